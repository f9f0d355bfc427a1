"""The data sources by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path  # needed at run time: fedgist.data.sources.registry reads the annotations
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedgist.data.dataset import Dataset, check
from fedgist.data.sources.cifar import CIFAR10, CIFAR100, cifar10, cifar100
from fedgist.data.sources.digits import digits
from fedgist.data.sources.huggingface import huggingface
from fedgist.data.sources.idx_format import FASHION_MNIST, MNIST, fashion_mnist, mnist
from fedgist.data.sources.image_folder import folder
from fedgist.data.sources.locations import data_root
from fedgist.data.sources.npz import npz
from fedgist.data.sources.tabular import table
from fedgist.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Source:
    """One way to get data: a function of keyword options, and a line about it.

    ``where`` tells what to get and where to put it (ROOT stands for the data root), for data that
    is downloaded.
    """

    load: Callable[..., Dataset]
    summary: str
    where: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Options by name, with their types."""
        hints = get_type_hints(self.load)
        return {
            name: hints[name] for name in inspect.signature(self.load).parameters if name != "root"
        }

    @property
    def required(self) -> tuple[str, ...]:
        """Options without a default."""
        parameters = inspect.signature(self.load).parameters.values()
        return tuple(option.name for option in parameters if option.default is option.empty)


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


def load(name: str, *, root: Path | None = None, **options: object) -> Dataset:
    """Load the data set called ``name`` and check it.

    Raises
    ------
    DataError
        If the name or an option is unknown, or the data is missing or cannot be used.
    """
    if name not in SOURCES:
        raise _unknown(name, "data set", SOURCES)
    source = SOURCES[name]
    for option, value in options.items():
        if option not in source.options:
            raise _unknown(option, f"option of {name}", source.options)
        if not _fits(value, source.options[option]):
            kind = (
                inspect.formatannotation(source.options[option])
                .replace("pathlib.", "")
                .replace("NoneType", "None")
            )
            msg = f"{name}: the option {option} is {value!r}; it must be {kind}"
            raise DataError(msg)
    for option in source.required:
        if option not in options:
            msg = f"{name} needs the option {option}"
            raise DataError(msg)
    rooted = "root" in inspect.signature(source.load).parameters
    return check(source.load(**options, **({"root": data_root(root)} if rooted else {})))


def _unknown(name: str, what: str, choices: Iterable[str]) -> DataError:
    return DataError(f"unknown {what} {name!r}{did_you_mean(name, sorted(choices))}")


def _fits(value: object, kind: Any) -> bool:
    """Tell whether a value from a recipe has the type of an option.

    A whole number is a float, a truth value is not.
    """
    if get_origin(kind) in {Union, UnionType}:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
