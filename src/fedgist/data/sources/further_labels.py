"""Read labels, ids and file names of new examples, if a file or folder has any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.array_file import ENDINGS as ARRAYS
from fedgist.data.sources.array_file import read_arrays
from fedgist.data.sources.column_kinds import is_number
from fedgist.data.sources.image_folder import ENDINGS, images_below
from fedgist.data.sources.in_memory import labels_like
from fedgist.data.sources.locations import existing
from fedgist.data.sources.splits import Values
from fedgist.data.sources.table_file import is_missing, is_table, load_table, texts
from fedgist.data.sources.tabular import labels_of
from fedgist.data.sources.text_file import read_texts
from fedgist.data.sources.text_labels import label_numbers
from fedgist.errors import DataError, listed


def read_labels(
    path: str | Path, data: Dataset, columns: Sequence[str], text: str = "text"
) -> Tensor | None:
    """Return the labels (rows, ...) of a file or folder, in the form of ``data.y``, or None.

    Labels are the array y of a .npz file, the ``columns`` of a table, or the folder names of images
    if all these names are class names. Of texts in the field ``text`` they are the first of
    ``columns``. A row or a text whose labels are missing has -1 as its class, or NaN.
    """
    place = Path(path).expanduser()
    place = existing(place, folder=place.is_dir())
    ending = place.suffix.lower()
    if data.text:
        return _of_texts(place, data, columns, text)
    if place.is_dir():
        folders = [file.parent.name for file in images_below(place)]
        named = set(folders) <= set(data.names)
        return labels_like(data, folders, place.name) if named else None
    if ending in ARRAYS:
        arrays = read_arrays(place, lambda stored: ["y"] if "y" in stored else [])
        return labels_like(data, arrays["y"], f"{place.name}: y") if arrays else None
    if not is_table(place) or not columns:
        return None
    table = load_table(place, data.form)
    if not set(columns) <= set(table.frame.columns):
        return None
    unlisted = np.array([text not in data.names for text in texts(table, columns[0])], dtype=bool)
    absent = np.all([is_missing(table, name) for name in columns], axis=0)
    absent &= unlisted if data.target == "class" else True
    some = table.take(~absent)
    numbered = is_number(some, columns[0])
    labels = labels_of(some, columns, data.target, numbered=numbered)
    y = labels_like(data, labels, f"{place.name}: the labels {listed(map(repr, columns))}")
    return _with_absent(y, absent, data)


def columns_beside(path: str | Path, data: Dataset, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the cells (rows,) of those ``columns`` that a table has; other files have none."""
    place = Path(path).expanduser()
    if place.is_dir() or data.text or not is_table(place):
        return {}
    table = load_table(existing(place), data.form)
    return {name: texts(table, name).tolist() for name in columns if name in table.frame.columns}


def _of_texts(place: Path, data: Dataset, columns: Sequence[str], text: str) -> Tensor | None:
    """Return the labels of texts in a file of fields, if it has them."""
    if not columns or place.suffix.lower() == ".txt":
        return None
    try:
        read = read_texts(place, text, None, columns[0], sentences=False, unlabelled_too=True)
    except DataError:  # a line without the text, or with labels of another kind
        return None
    labels = list(read.labels or ())
    if not any(labels):
        return None
    y = label_numbers(place.name, data.target, [some for some in labels if some], data.names)
    return _with_absent(y, np.array([not some for some in labels]), data)


def _with_absent(y: Tensor, absent: Values, data: Dataset) -> Tensor:
    """Return labels of all rows, -1 or NaN where ``absent`` (rows,), of those of the others."""
    every = y.new_full((len(absent), *y.shape[1:]), -1 if data.target == "class" else torch.nan)
    every[torch.from_numpy(~absent)] = y
    return every


def image_names(path: str | Path) -> list[str] | None:
    """Return the file names of images in a folder, or of one image; None for other files."""
    place = Path(path).expanduser()
    if place.is_dir():
        return [file.relative_to(place).as_posix() for file in images_below(place)]
    return [place.name] if place.suffix.lower() in ENDINGS else None
