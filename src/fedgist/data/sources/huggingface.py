"""Data sets of the Hugging Face hub, or saved with its library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedgist.core.target import NUMERIC, Target
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import Inputs, outline
from fedgist.data.sources.array_file import features as as_features
from fedgist.data.sources.file_sizes import fits
from fedgist.data.sources.hub_rows import lazy_images, lazy_numbers
from fedgist.data.sources.image_pixels import (
    image_bytes,
    pixels,
    shared_size,
    size_of,
    stacked_images,
)
from fedgist.data.sources.labelled_rows import (
    LabelledRows,
    Missing,
    Values,
    as_texts,
    dataset,
    refuse_fraction,
    split_rows,
)
from fedgist.data.sources.optional_packages import need
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.stored_labels import label_columns
from fedgist.errors import DataError, first_line

_NEED = "reading Hugging Face data sets needs datasets: pip install 'fedgist[huggingface]'"
_SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes


class HubSplit(Protocol):
    """The used part of the library's class ``Dataset``, a split of a data set."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""

    @property
    def features(self) -> Mapping[str, object]:
        """Type of each column; a column of labels may have ``names``, the class names."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: str | int, /) -> Any:
        """Return a column by its name, or a row by its number."""


def huggingface(
    *,
    path: str | Path,
    config: str | None = None,
    label: str | list[str] = "label",
    image: str | None = None,
    features: list[str] | None = None,
    client: str | None = None,
    image_size: int | list[int] | None = None,
    train: str = "train",
    test: str | None = None,
    test_fraction: float | None = None,
    missing: Missing = "refuse",
    classes: Sequence[str] = (),
    target: Target = "class",
    read: Read = "auto",
) -> Dataset:
    """Read a Hugging Face data set: labels, and a column of images or numeric columns.

    Parameters
    ----------
    path
        A name on the hub, or a folder saved by the datasets library.
    config
        The configuration, if the data set has several.
    label
        The column of labels. If the data set names its classes, these names and their order are
        used. For the objectives ``regression`` and ``multilabel`` it holds numbers, or 1 and 0, and
        may be a list of columns.
    image
        The column of images. Give either this or ``features``.
    features
        The numeric columns.
    client
        The column with the name of the client that owns a row.
    image_size
        Size of all images: the side of a square in pixels, or ``[height, width]``. The default is
        the size of the first image, which may have at most 2048x2048 pixels.
    train
        The split of training rows.
    test
        The split of test rows. The default is the split ``test``, if there is one.
    test_fraction
        Fraction of each class held out as test rows. Default 0.2. Not with a test split.
    missing
        What to do with a missing number. ``"refuse"``: it is an error. ``"mean"``: the mean of its
        column over the training rows replaces it.
    classes
        Names of the classes in the order of their numbers.

    Notes
    -----
    This source needs the package datasets, which may download data from the hub. Pooled
    normalization: mean and deviation of each column, or of each channel of images, 0 to 1, over all
    training rows, those held out for validation included. With ``data.read = "lazy"``, or if images
    would fill more than half of the memory, rows are read from the library's files when they are
    used; missing numbers are then refused.

    Examples
    --------
    A recipe's section::

        [data]
        name = "huggingface"
        path = "ylecun/mnist"
        image = "image"
    """
    columns, labels = _input_columns(image, features, str(path)), label_columns(label, target)
    splits = _load(path, config)
    if test is None and "test" in splits:
        test = "test"
    if test is not None:
        refuse_fraction(test_fraction, f"{path} has the split {test!r}")
    chosen = [
        _split(splits, name, str(path)) for name in (train, *(() if test is None else (test,)))
    ]
    for rows in chosen:
        _expect(rows, [*columns, *labels, *([] if client is None else [client])], str(path))
    inputs = _inputs(chosen, columns, image, size_of(image_size), str(path), read)
    labelled = []
    for rows, x in zip(chosen, inputs, strict=True):
        own = _labels(rows, labels, target, str(path)), _clients(rows, client, str(path))
        lazy = None if isinstance(x, torch.Tensor) else x
        labelled.append(LabelledRows(outline(x), *own, lazy))
    train_rows, test_rows = labelled if test is not None else split_rows(labelled[0], test_fraction)
    names = labels if target in NUMERIC else classes or _class_names(chosen[0], labels[0])
    return dataset(str(path), train_rows, test_rows, classes=names, missing=missing, target=target)


def _inputs(
    splits: list[HubSplit],
    columns: list[str],
    image: str | None,
    size: tuple[int, int] | None,
    path: str,
    read: Read,
) -> list[Inputs]:
    """Return the inputs of each split: held in memory, or read when they are used."""
    if image is None and read != "lazy":
        return [_numbers(rows, columns, path) for rows in splits]
    if image is None:
        return [lazy_numbers(path, rows, columns) for rows in splits]
    first = lazy_images(path, splits[0], image, size)
    size = first.shape[2], first.shape[3]
    count = sum(len(rows) for rows in splits)
    if read == "once" or (read == "auto" and fits(image_bytes(size, count))):
        return list[Inputs](_images(splits, image, size, path))
    return [first, *(lazy_images(path, rows, image, size) for rows in splits[1:])]


def _input_columns(image: str | None, features: list[str] | None, path: str) -> list[str]:
    if image is not None and features is None:
        return [image]
    if features and image is None:
        return features
    raise DataError(
        f"{path}: name either the column of images (image) or the columns of numbers (features); "
        f"{'neither is' if image is None else 'both are'} given"
    )


def _load(path: str | Path, config: str | None) -> dict[str, HubSplit]:
    library = need("datasets", _NEED)
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in _SAVED):
            loaded = library.load_from_disk(str(folder))
        else:
            loaded = library.load_dataset(str(folder) if folder.exists() else str(path), config)
    except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
        raise DataError(
            f"the Hugging Face data set {str(path)!r} cannot be loaded: {first_line(error)}"
        ) from error
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _split(splits: dict[str, HubSplit], name: str, path: str) -> HubSplit:
    if name not in splits:
        raise DataError(f"{path} has no split {name!r}; it has {', '.join(map(str, splits))}")
    return splits[name]


def _expect(rows: HubSplit, columns: list[str], path: str) -> None:
    for name in columns:
        if name not in rows.column_names:
            raise DataError(f"{path} has no column {name!r}; it has {', '.join(rows.column_names)}")


def _images(
    splits: list[HubSplit], column: str, size: tuple[int, int] | None, path: str
) -> list[torch.Tensor]:
    """Return each split's images, resized to ``size`` or to the first image's size.

    Each result is uint8 (rows, channels, height, width).
    """
    counts = [len(rows) for rows in splits]
    pictures = _pixels_of(splits, column, size, path)
    return list(torch.split(stacked_images(pictures, sum(counts)), counts))


def _pixels_of(
    splits: list[HubSplit], column: str, size: tuple[int, ...] | None, path: str
) -> Iterator[Values]:
    count = sum(len(rows) for rows in splits)
    size = None if size is None else shared_size(size, count)
    for rows in splits:
        for row, image in enumerate(rows[column]):
            subject = f"{path}: the image in row {row} (counted from 0)"
            if not hasattr(image, "convert"):
                raise DataError(
                    f"{path}: the column {column!r} holds no image in row {row} (counted from 0)"
                )
            size = size or shared_size(image.size[::-1], count, first=subject)
            yield pixels(image, size, subject)


def _numbers(rows: HubSplit, columns: list[str], path: str) -> torch.Tensor:
    parts = []
    for name in columns:
        try:
            cells = [np.nan if cell is None else cell for cell in rows[name]]
            values = np.asarray(cells, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path}: the column {name!r} must hold numbers, equally many in every row: "
                f"{first_line(error)}"
            ) from error
        parts.append(as_features(values.reshape(len(values), -1), f"{path}: the column {name!r}"))
    return torch.cat(parts, dim=1)


def _labels(rows: HubSplit, columns: list[str], target: Target, path: str) -> Values:
    """Return labels: texts (rows,), or of numbers and labels float32 (rows, columns)."""
    if target in NUMERIC:
        return _numbers(rows, columns, path).numpy()
    column = columns[0]
    names = _class_names(rows, column)
    if not names:
        return _texts(rows, column, f"{path}: the labels {column!r}")
    for row, code in enumerate(rows[column]):
        if code is None or not 0 <= code < len(names):
            raise DataError(
                f"{path}: the label column {column!r} holds {code} in row {row} (counted from 0), "
                f"outside 0..{len(names) - 1}"
            )
    return np.array([names[code] for code in rows[column]], dtype=object)


def _clients(rows: HubSplit, column: str | None, path: str) -> Values | None:
    return None if column is None else _texts(rows, column, f"{path}: the clients {column!r}")


def _class_names(rows: HubSplit, column: str) -> tuple[str, ...]:
    """Return the data set's own class names, in its order, or an empty tuple."""
    return tuple(getattr(rows.features[column], "names", None) or ())


def _texts(rows: HubSplit, column: str, subject: str) -> Values:
    values = list(rows[column])
    if any(isinstance(value, str) for value in values):
        return as_texts(np.array(values, dtype=object), subject)
    return as_texts(np.asarray(values), subject)
