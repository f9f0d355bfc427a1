"""A data set of the Hugging Face hub, or one saved with its library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedgist.data.dataset import Dataset
from fedgist.data.sources.assembly import Examples, Values, dataset, names, split
from fedgist.data.sources.image_pixels import pixels, size_of, stack
from fedgist.data.sources.locations import first_line, need
from fedgist.data.sources.npz import features as numbers
from fedgist.errors import DataError

_NEED = "reading Hugging Face data sets needs datasets: pip install 'fedgist[huggingface]'"
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves


def huggingface(
    *,
    path: str | Path,
    config: str | None = None,
    label: str = "label",
    image: str | None = None,
    features: list[str] | None = None,
    client: str | None = None,
    image_size: int | list[int] | None = None,
    train: str = "train",
    test: str | None = None,
    test_fraction: float = 0.2,
) -> Dataset:
    """Read labels and a column of images, or columns of numbers, from the splits train and test."""
    if (image is None) == (features is None):
        msg = (
            f"{path}: name either the column of images (image) or the columns of numbers (features)"
        )
        raise DataError(msg)
    columns = (features or []) if image is None else [image]
    found = _load(path, config)
    if test is None and "test" in found:
        test = "test"
    splits = [
        _split(found, name, str(path)) for name in (train, *(() if test is None else (test,)))
    ]
    for rows in splits:
        _expect(rows, [*columns, label, *([] if client is None else [client])], str(path))
    if image is not None:
        inputs = _images(splits, image, size_of(image_size))
    else:
        inputs = [_numbers(rows, columns, str(path)) for rows in splits]
    halves = []
    for rows, x in zip(splits, inputs, strict=True):
        clients = (
            None if client is None else _texts(rows, client, f"{path}: the clients {client!r}")
        )
        halves.append(Examples(x, _labels(rows, label, str(path)), clients))
    first, second = halves if test is not None else split(halves[0], test_fraction)
    return dataset(str(path), first, second, classes=_known(splits[0], label))


def _load(path: str | Path, config: str | None) -> dict[str, Any]:
    library = need("datasets", _NEED)
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in _SAVED):
            found = library.load_from_disk(str(folder))
        else:
            found = library.load_dataset(str(folder) if folder.exists() else str(path), config)
    except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
        msg = f"the Hugging Face data set {str(path)!r} cannot be loaded: {first_line(error)}"
        raise DataError(msg) from error
    return found if isinstance(found, dict) else {"train": found}


def _split(found: dict[str, Any], name: str, path: str) -> Any:
    if name not in found:
        msg = f"{path} has no split {name!r}; it has {', '.join(map(str, found))}"
        raise DataError(msg)
    return found[name]


def _expect(rows: Any, columns: list[str], path: str) -> None:
    for name in columns:
        if name not in rows.column_names:
            msg = f"{path} has no column {name!r}; it has {', '.join(rows.column_names)}"
            raise DataError(msg)


def _images(splits: list[Any], column: str, size: tuple[int, int] | None) -> list[torch.Tensor]:
    pictures: list[Values] = []
    for rows in splits:
        for row, image in enumerate(rows[column]):
            if not hasattr(image, "convert"):
                msg = f"the column {column!r} holds no image in row {row} (counted from 0)"
                raise DataError(msg)
            pictures.append(pixels(image, size, f"the image in row {row} (counted from 0)"))
            size = size or pictures[0].shape[1:]
    return list(torch.split(stack(pictures), [len(rows) for rows in splits]))


def _numbers(rows: Any, columns: list[str], path: str) -> torch.Tensor:
    parts = []
    for name in columns:
        try:
            values = np.asarray(list(rows[name]), dtype=np.float32)
        except (TypeError, ValueError) as error:
            msg = (
                f"{path}: the column {name!r} must hold numbers, as many in each row: "
                f"{first_line(error)}"
            )
            raise DataError(msg) from error
        parts.append(numbers(values.reshape(len(values), -1), f"{path}: the column {name!r}"))
    return torch.cat(parts, dim=1)


def _labels(rows: Any, column: str, path: str) -> Values:
    known = _known(rows, column)
    if not known:
        return _texts(rows, column, f"{path}: the labels {column!r}")
    for row, code in enumerate(rows[column]):
        if code is None or not 0 <= code < len(known):
            msg = (
                f"{path}: the label column {column!r} holds {code}, none of its names, in row "
                f"{row} (counted from 0)"
            )
            raise DataError(msg)
    return np.array([known[code] for code in rows[column]], dtype=object)


def _known(rows: Any, column: str) -> tuple[str, ...]:
    """Return the classes that the data set itself names, in its order."""
    return tuple(getattr(rows.features[column], "names", None) or ())


def _texts(rows: Any, column: str, what: str) -> Values:
    values = list(rows[column])
    texts = (
        np.array(values, dtype=object)
        if any(isinstance(value, str) for value in values)
        else np.asarray(values)
    )
    return names(texts, what)
