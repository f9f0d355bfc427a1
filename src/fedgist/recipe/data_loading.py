"""Data sources by name: those of fedgist, or a user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.division import USUAL, Division
from fedgist.data.sources import SOURCES
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.text_rows import SplitTexts
from fedgist.data.sources.user_rows import user_rows
from fedgist.errors import RecipeError, shown
from fedgist.recipe.own_code import load_own

KEY = "data.name"
Source = Callable[..., Dataset | SplitTexts]
_ADDED = {
    "test_fraction": float | None,
    "division": Division,
    "read": Read,
    "target": Target,
}  # options of every user's own function
_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"test_fraction": None, "division": USUAL, "read": "auto", "target": "class"}
)


class OwnSource:
    """A user's own function as a data source.

    Its options are the function's keywords and ``test_fraction``, the share of the rows that is
    held out as test rows.
    """

    def __init__(self, function: Callable[..., object], place: str) -> None:
        """Make a source of the function ``package.module:function``, which is ``place``."""
        self.function, self.place = function, place
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        further = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        added = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
            for key, default in _DEFAULTS.items()
            if key not in signature.parameters
        ]
        self.added = tuple(p.name for p in added)
        self.__wrapped__ = function
        self.__annotations__ = {**_ADDED, **getattr(function, "__annotations__", {})}
        self.__signature__ = signature.replace(parameters=[*kept, *added, *further])

    def __call__(
        self,
        *,
        test_fraction: float | None = None,
        division: Division = USUAL,
        read: Read = "auto",
        target: Target = "class",
        **options: object,
    ) -> Dataset:
        """Call the function, and return its objects as a data set."""
        stated = replace(division, fraction=test_fraction)
        shared: dict[str, object] = {"test_fraction": test_fraction, "division": stated}
        shared |= {"read": read, "target": target}
        own = {key: value for key, value in shared.items() if key not in self.added}
        drawn = stated if stated.is_stated and "test_fraction" in self.added else None
        data, _ = user_rows(self.function(**options, **own), drawn, read, target)
        return replace(data, name=self.place)


def data_source(name: str) -> Source:
    """Return the function that reads the data set called ``name``.

    Raises
    ------
    RecipeError
        If the user's own ``package.module:function`` cannot be imported or called.
    """
    if ":" not in name:
        return SOURCES[name]
    function = load_own(KEY, name)
    if not callable(function):
        raise RecipeError(f"{KEY} = {shown(name)} is not a function that returns a data set")
    return OwnSource(function, name)
