"""Data sources, one file each. A new source is a function in a file here and a line below.

Each source takes its options as keywords. It may also take ``root``, the folder of downloaded data,
and ``seed``, the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedgist.registry import Registry

if TYPE_CHECKING:  # the import loads torch
    from fedgist.data.dataset import Dataset
    from fedgist.data.sources.text_rows import SplitTexts

DEFAULT_SOURCE = "digits"  # the source of a recipe that names none

SOURCES: Registry[Callable[..., Dataset | SplitTexts]] = Registry(
    {
        "digits": "fedgist.data.sources.digits:digits",
        "mnist": "fedgist.data.sources.mnist:mnist",
        "fashion_mnist": "fedgist.data.sources.mnist:fashion_mnist",
        "cifar10": "fedgist.data.sources.cifar:cifar10",
        "cifar100": "fedgist.data.sources.cifar:cifar100",
        "celeba": "fedgist.data.sources.celeba:celeba",
        "femnist": "fedgist.data.sources.femnist:femnist",
        "wisdm": "fedgist.data.sources.wisdm:wisdm",
        "diabetes": "fedgist.data.sources.diabetes:diabetes",
        "shapes": "fedgist.data.sources.shapes:shapes",
        "circle": "fedgist.data.sources.circle:circle",
        "stackoverflow": "fedgist.data.sources.stackoverflow:stackoverflow",
        "stackexchange": "fedgist.data.sources.posts:stackexchange",
        "shakespeare": "fedgist.data.sources.posts:shakespeare",
        "npz": "fedgist.data.sources.arrays:npz",
        "npy": "fedgist.data.sources.arrays:npy",
        "parquet": "fedgist.data.sources.parquet_rows:parquet",
        "folder": "fedgist.data.sources.image_folder:folder",
        "table": "fedgist.data.sources.tabular:table",
        "text_file": "fedgist.data.sources.text_file:text_file",
        "huggingface": "fedgist.data.sources.huggingface:huggingface",
    }
)
