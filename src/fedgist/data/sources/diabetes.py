"""The progression of diabetes in 442 patients, shipped with scikit-learn: numbers to predict."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.sources.splits import moments
from fedgist.data.sources.tabular import with_columns
from fedgist.data.table_columns import Column
from fedgist.errors import DataError

COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
TEST_EVERY = 5  # every fifth row of the file is a test row
GROUPS = 5  # clients: patients in order of age


def diabetes(*, target: Target = "numbers") -> Dataset:
    """Read 442 patients with 10 numbers each; predict the progression of diabetes after a year.

    Notes
    -----
    The numbers are age, sex (1 or 2), body mass index, blood pressure and six blood values. The
    progression is a number from 25 to 346. Every fifth patient is a test row. Patients are divided
    by age into five clients of about the same size. Pooled normalization: mean and deviation of
    each column over all training rows. The data come with scikit-learn.

    Examples
    --------
    A recipe's section::

        [data]
        name = "diabetes"

        [objective]
        name = "regression"

        [partition]
        name = "natural"

    References
    ----------
    Efron, Hastie, Johnstone, Tibshirani 2004, "Least angle regression", Annals of Statistics 32(2).
    """
    if target != "numbers":
        raise DataError("diabetes has numbers to predict: use objective.name = 'regression'")
    x = torch.from_numpy(_bundled("diabetes_data_raw.csv.gz").astype(np.float32))
    y = torch.from_numpy(_bundled("diabetes_target.csv.gz").astype(np.float32)).view(-1, 1)
    test = torch.arange(len(x)) % TEST_EVERY == 0
    borders = x[:, 0].quantile(torch.arange(1, GROUPS) / GROUPS)
    group = torch.bucketize(x[:, 0].contiguous(), borders)
    ends = [x[group == g, 0] for g in range(GROUPS)]
    data = Dataset(
        "diabetes",
        x[~test],
        y[~test],
        x[test],
        y[test],
        1,
        1.0,
        *moments(x[~test], 1.0),
        classes=("progression",),
        clients=group[~test],
        clients_test=group[test],
        client_names=tuple(f"age {int(e.min())}-{int(e.max())}" for e in ends),
        target="numbers",
        measured=frozenset({"moments"}),
    )
    return with_columns(data, [Column(name) for name in COLUMNS])


def _bundled(name: str) -> np.ndarray:
    """Read a file of scikit-learn without importing scikit-learn, which takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("diabetes needs scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / name
    try:
        return np.loadtxt(path)
    except (OSError, ValueError) as error:
        raise DataError(f"diabetes cannot be read from scikit-learn's {path}: {error}") from error
