"""Data: sources of examples, their partition over clients, and the order of batches."""

from fedgist.data.dataset import Dataset, check
from fedgist.data.sources.locations import data_root
from fedgist.data.sources.registry import SOURCES, Source, load
from fedgist.data.sources.unlabelled import read_examples

__all__ = [
    "SOURCES",
    "Dataset",
    "Source",
    "check",
    "data_root",
    "load",
    "read_examples",
]
