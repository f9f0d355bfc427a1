"""Splits of the Hugging Face library with known values, and the ways in which a user gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.data.sources.hub_columns import HubOptions
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.user_rows import user_rows

COUNT = 8
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 4, 5), dtype=np.uint8)
CODES = [1, 0, 0, 1, 1, 0, 1, 1]  # of classes
CLASSES = ("well", "ill")  # the data set's own order, not the sorted one
SITES = list("babbabca")


def hub() -> Any:
    """Return the library, which is imported where it is used."""
    library = importlib.import_module("datasets")
    library.disable_progress_bars()
    return library


def pictures(pixels: Any = PIXELS) -> list[Image.Image]:
    return [Image.fromarray(image) for image in pixels]


def split(columns: Mapping[str, Sequence[Any]], **kinds: Any) -> Any:
    """Return a split; a column whose type is not stated has the one that the library infers."""
    plain = hub().Dataset.from_dict(columns)
    return plain.cast(hub().Features({**plain.features, **kinds})) if kinds else plain


def classes() -> Any:
    return hub().ClassLabel(names=list(CLASSES))


def labelled(**columns: tuple[Any, Sequence[Any]]) -> Any:
    """Return rows of two classes with further columns, each a type and its values."""
    count = min(len(cells) for _, cells in columns.values())
    kinds = hub().Features({**{n: kind for n, (kind, _) in columns.items()}, "label": classes()})
    cells = {name: values for name, (_, values) in columns.items()}
    return hub().Dataset.from_dict({**cells, "label": CODES[:count]}, features=kinds)


def images(**columns: tuple[Any, Sequence[Any]]) -> Any:
    return labelled(image=(hub().Image(), pictures()), **columns)


def saved(rows: Any, folder: Path, **options: Any) -> Dataset:
    """Return the data of rows that were saved with the library."""
    rows.save_to_disk(folder)
    options = {"test_fraction": 0, **options} if not isinstance(rows, dict) else options
    return load_data("huggingface", path=folder, **options)


def given(rows: Any, read: Any = "once", **options: Any) -> Dataset:
    """Return the data that ``fedgist.run`` makes of an object."""
    return user_rows(rows, options.pop("test_fraction", None), read, options=HubOptions(**options))[
        0
    ]


Way = Callable[[Any, Path], Dataset]
#: Ways to give a split of training rows, none of which may change a value.
WAYS: Mapping[str, Way] = {
    "saved": saved,
    "saved, lazy": lambda rows, folder: saved(rows, folder, read="lazy"),
    "saved mapping": lambda rows, folder: saved(
        hub().DatasetDict(train=rows), folder, test_fraction=0
    ),
    "given": lambda rows, _: given(rows),
    "given, lazy": lambda rows, _: given(rows, "lazy"),
    "fedgist.lazy": lambda rows, _: fedgist.lazy(rows),
    "mapping": lambda rows, _: given(hub().DatasetDict(train=rows)),
    "pair": lambda rows, _: given((rows, rows.select([0, 1]))),
    "list": lambda rows, _: given([rows]),
    "client's mapping": lambda rows, _: given({"north": hub().DatasetDict(train=rows)}, "lazy"),
    "two clients": lambda rows, _: given(
        {"a": rows.select([0, 1]), "b": rows.select(range(2, len(rows)))}
    ),
    "concatenated": lambda rows, _: given(
        hub().concatenate_datasets([rows.select([0]), rows.select(range(1, len(rows)))])
    ),
    "reordered twice": lambda rows, _: given(
        rows.select(range(len(rows) - 1, -1, -1)).select(range(len(rows) - 1, -1, -1))
    ),
    "torch": lambda rows, _: given(rows.with_format("torch")),
    "numpy, lazy": lambda rows, _: given(rows.with_format("numpy"), "lazy"),
    "arrow": lambda rows, _: given(rows.with_format("arrow")),
    "pandas": lambda rows, _: fedgist.lazy(rows.with_format("pandas")),
}


@contextmanager
def offline(folder: Path, monkeypatch: Any) -> Iterator[None]:
    """Let the library ask no server, and keep its files in a folder."""
    with monkeypatch.context() as patch:
        patch.setattr(hub().config, "HF_DATASETS_CACHE", folder)
        patch.setattr(hub().config, "HF_HUB_OFFLINE", True)
        server = importlib.import_module("huggingface_hub.constants")
        patch.setattr(server, "HF_HUB_OFFLINE", True)
        yield
