"""WISDM activity recognition from the accelerometers of phones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations

import numpy as np
import torch

from fedgist.data.dataset import Dataset
from fedgist.data.sources.arff_file import read_arff
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.splits import Split, dataset, last_of_each
from fedgist.data.table_columns import Column
from fedgist.errors import DataError, listed

NAME = "wisdm"
ADVICE = (
    "get WISDM_ar_latest.tar.gz of https://www.cis.fordham.edu/wisdm/dataset.php and put "
    "WISDM_ar_v1.1_transformed.arff of it into ROOT/wisdm"
)
ACTIVITIES = ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")
FILE = "wisdm/WISDM_ar_v1.1_transformed.arff"
PERSON, ACTIVITY, NUMBER = "user", "class", "UNIQUE_ID"
_HELD_OUT = 1 / 5  # share of each person's rows of each activity


def wisdm(*, root: Path | None = None) -> Dataset:
    """Read WISDM 1.1: phone acceleration of 36 people, labelled with one of 6 activities.

    Notes
    -----
    A row is ten seconds: 43 numbers computed from the acceleration along three axes. Each person is
    a client, with 60 to 273 rows; 18 of them have rows of all activities. Rows are ordered by
    activity. So the last fifth of each person's rows of each activity is held out (rounded; at
    least one training row remains). Consecutive seconds are then seldom divided between training
    and test rows. 615 numbers are missing, all of them times between peaks. The mean of their
    column over the training rows replaces them. Pooled normalization: mean and deviation of each
    column over all training rows.

    The laboratory asks users to cite the paper below, and to include the archive's readme.txt if
    they pass the data on.

    Examples
    --------
    A recipe's section::

        [data]
        name = "wisdm"

        [partition]
        name = "natural"

    References
    ----------
    Kwapisz, Weiss, Moore 2010, "Activity recognition using cell phone accelerometers", Proceedings
    of the Fourth International Workshop on Knowledge Discovery from Sensor Data (at KDD-10).
    """
    base = data_root(root)
    if not (file := base / FILE).is_file():
        raise absent(NAME, FILE, base, ADVICE)
    columns = read_arff(file)
    if missing := [name for name in (PERSON, ACTIVITY) if name not in columns]:
        raise DataError(f"{file} has no column {missing[0]!r}; it has {listed(columns)}")
    people, activities = columns.pop(PERSON), columns.pop(ACTIVITY)
    columns.pop(NUMBER, None)
    x = torch.from_numpy(np.stack(list(columns.values()), axis=1).astype(np.float32))
    rows = Split(x, activities, people)
    held = last_of_each(people + "/" + activities, _HELD_OUT)
    train, test = rows.take(~held), rows.take(held)
    data = dataset(NAME, train, test, classes=ACTIVITIES, missing="mean")
    return replace(data, columns=tuple(Column(name) for name in columns))
