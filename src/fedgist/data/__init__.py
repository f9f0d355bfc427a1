"""Data: sources of examples, their partition over clients, and the order of batches."""

from fedgist.data.base import DataError, Dataset, check
from fedgist.data.examples_file import read_examples
from fedgist.data.files import data_root
from fedgist.data.sources import SOURCES, Source, load

__all__ = [
    "SOURCES",
    "DataError",
    "Dataset",
    "Source",
    "check",
    "data_root",
    "load",
    "read_examples",
]
