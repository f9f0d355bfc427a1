"""The data sources by name, and loading from one with its options checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedgist.data.dataset import Dataset, check, with_classes
from fedgist.data.sources.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from fedgist.data.sources.digits import digits
from fedgist.data.sources.file_sizes import readable
from fedgist.data.sources.huggingface import huggingface
from fedgist.data.sources.image_folder import folder
from fedgist.data.sources.locations import data_root
from fedgist.data.sources.mnist import FASHION_MNIST, MNIST, fashion_mnist, mnist
from fedgist.data.sources.npz import npz
from fedgist.data.sources.tabular import table
from fedgist.errors import DataError, did_you_mean

_NOT_OPTIONS = ("root", "classes")  # for every source alike


@dataclass(frozen=True)
class Source:
    """One way to get data: a function of keyword options, and a line about it.

    For data that must be downloaded, ``where`` tells what to get and where to put it; ROOT in it
    stands for the data root.
    """

    load: Callable[..., Dataset]
    summary: str
    where: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The type of each option, by its name."""
        hints = get_type_hints(self.load)
        return {
            name: hints[name]
            for name in inspect.signature(self.load).parameters
            if name not in _NOT_OPTIONS
        }

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the options without a default."""
        parameters = inspect.signature(self.load).parameters.values()
        return tuple(option.name for option in parameters if option.default is option.empty)


DEFAULT_SOURCE = "digits"  # what a recipe runs on that names none

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "digits": Source(digits, "8x8 handwritten digits, 1,797 of them; come with scikit-learn"),
        "mnist": Source(mnist, "28x28 handwritten digits, 70,000 of them", MNIST.where),
        "fashion_mnist": Source(
            fashion_mnist, "28x28 pictures of clothes, 70,000 of them", FASHION_MNIST.where
        ),
        "cifar10": Source(
            cifar10, "32x32 colour images of 10 classes, 60,000 of them", CIFAR10.where
        ),
        "cifar100": Source(
            cifar100, "32x32 colour images of 100 (or 20 coarse) classes, 60,000", CIFAR100.where
        ),
        "npz": Source(npz, "your arrays x and y in a .npz file"),
        "folder": Source(folder, "your images in a folder for each class"),
        "table": Source(table, "your .csv, .tsv or .parquet table with a column of labels"),
        "huggingface": Source(
            huggingface, "a data set of the Hugging Face hub, or one saved with its library"
        ),
    }
)


def load(
    name: str, *, root: Path | None = None, classes: Sequence[str] = (), **options: object
) -> Dataset:
    """Return the data set called ``name``, checked.

    ``root`` is the folder of downloaded data (see :func:`.data_root`); ``classes`` are the names of
    all classes in the order of their numbers, if not the source's own; ``options`` are those of the
    source.

    Raises
    ------
    DataError
        If the name or an option is unknown, an option is missing or of the wrong type, the data
        is missing or cannot be used, or a label is not among ``classes``.
    """
    if name not in SOURCES:
        raise _unknown(name, "data set", SOURCES)
    source = SOURCES[name]
    _check_options(name, source, options)
    common = {"root": data_root(root), "classes": classes}
    taken = inspect.signature(source.load).parameters
    options |= {key: value for key, value in common.items() if key in taken}
    with readable(name):
        return with_classes(check(source.load(**options)), classes)


def _check_options(name: str, source: Source, options: Mapping[str, object]) -> None:
    types = source.options
    for option, value in options.items():
        if option not in types:
            raise _unknown(option, f"option of {name}", types)
        if not _fits(value, types[option]):
            needed = _in_words(types[option])
            msg = f"{name}: the option {option} is {value!r:.80}; it must be {needed}"
            raise DataError(msg)
    for option in source.required:
        if option not in options:
            msg = f"{name} needs the option {option}"
            raise DataError(msg)


def _unknown(name: str, what: str, choices: Iterable[str]) -> DataError:
    return DataError(f"unknown {what} {name!r}{did_you_mean(name, sorted(choices))}")


def _fits(value: object, kind: Any) -> bool:
    """Tell whether a value from a recipe has the type of an option.

    A whole number fits float; a truth value does not.
    """
    if get_origin(kind) in {Union, UnionType}:
        return any(_fits(value, choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
        return isinstance(value, dict) and all(_fits(item, inner) for item in value.values())
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _in_words(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return inspect.formatannotation(kind).replace("pathlib.", "").replace("NoneType", "None")
