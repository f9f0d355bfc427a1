"""Load data from a source by its name, and check its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.sources import SOURCES
from fedgist.data.sources.file_sizes import readable
from fedgist.data.sources.locations import data_root
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.text_rows import Reading, SplitTexts, text_dataset
from fedgist.errors import DataError, did_you_mean, shown
from fedgist.options import check_options

NO_OPTIONS = ("root", "classes", "seed", "read")  # parameters that sources share


def load_data(
    name: str,
    *,
    root: Path | None = None,
    classes: Sequence[str] = (),
    seed: int = 0,
    words: Reading | None = None,
    read: Read = "auto",
    source: Callable[..., Dataset | SplitTexts] | None = None,
    **options: object,
) -> Dataset:
    """Return the validated data set of the source ``name``.

    ``root`` is the folder of downloaded data (see :func:`.data_root`). ``classes`` are the names
    of all classes in the order of their numbers, if they differ from the source's. ``seed`` is the
    run's seed, for sources that draw their examples. ``words`` are the settings for texts.
    ``read`` says how rows are read: once, or when they are used. ``source`` reads the data set if
    the name is a user's own. ``options`` are the options of the source.
    """
    source = source or _source(name)
    arguments = check_options(source, options, name, "data", NO_OPTIONS)
    common = {"root": data_root(root), "classes": classes, "seed": seed, "read": read}
    taken = inspect.signature(source).parameters
    if read == "lazy" and "read" not in taken:
        raise DataError(f"data.read = 'lazy': the rows of {name} are read once, into memory")
    arguments |= {key: value for key, value in common.items() if key in taken}
    with readable(name):
        data = source(**arguments)
        if isinstance(data, SplitTexts):
            data = text_dataset(data, words or Reading())
        elif words is not None:
            raise DataError(f"data.words is about texts, and {name} has none")
        return with_classes(check(data), classes)


def _source(name: str) -> Callable[..., Dataset | SplitTexts]:
    if name not in SOURCES:
        raise DataError(f"data.name: unknown data set {shown(name)}{did_you_mean(name, SOURCES)}")
    return SOURCES[name]
