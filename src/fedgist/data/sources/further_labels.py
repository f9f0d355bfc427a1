"""Read labels and file names of new examples, if a file or folder has any."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.array_file import read_arrays
from fedgist.data.sources.image_folder import ENDINGS, images_below
from fedgist.data.sources.in_memory import labels_like
from fedgist.data.sources.locations import existing
from fedgist.data.sources.table_file import TABLES, is_number, load_table
from fedgist.data.sources.tabular import labels_in


def read_labels(path: str | Path, data: Dataset, column: str | None) -> Tensor | None:
    """Return the labels (rows,) of a file or folder, in the form of ``data.y``, or None.

    Labels are the array y of a .npz file, the ``column`` of a table, or the folder names of images
    if all these names are class names.
    """
    place = Path(path).expanduser()
    place = existing(place, folder=place.is_dir())
    ending = place.suffix.lower()
    if place.is_dir():
        folders = [file.parent.name for file in images_below(place)]
        named = set(folders) <= set(data.names)
        return labels_like(data, folders, place.name) if named else None
    if ending == ".npz":
        arrays = read_arrays(place, lambda stored: ["y"] if "y" in stored else [])
        return labels_like(data, arrays["y"], f"{place.name}: y") if arrays else None
    if ending in TABLES and column is not None:
        table = load_table(place)
        if column not in table.frame.columns:
            return None
        labels = labels_in(table, column, numbered=is_number(table, column))
        return labels_like(data, labels, f"{place.name}: the labels {column!r}")
    return None


def image_names(path: str | Path) -> list[str] | None:
    """Return the file names of images in a folder, or of one image; None for other files."""
    place = Path(path).expanduser()
    if place.is_dir():
        return [file.relative_to(place).as_posix() for file in images_below(place)]
    return [place.name] if place.suffix.lower() in ENDINGS else None
