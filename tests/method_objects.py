"""Every registered method with its defaults, and the example methods of the laws."""

from __future__ import annotations

from fedgist.methods import METHODS
from fedgist.testing.example_methods import EXAMPLES

METHOD_OBJECTS = {name: cls() for name, cls in METHODS.items()} | dict(EXAMPLES)
