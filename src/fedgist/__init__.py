"""fedgist: federated learning that shares the gist, not the weights.

>>> import fedgist
>>> result = fedgist.run({"train": {"num_rounds": 1}, "engine": {"workers": 1, "cohort_size": 5}})
>>> result.rounds[0]["round"]
1
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedgist.errors import (
    CheckpointError,
    DataError,
    FedgistError,
    InputError,
    JobsError,
    MessageError,
    MethodError,
    OutputError,
    RecipeError,
    ReportError,
    Stopped,
    TooFewRepliesError,
    WorkerError,
)
from fedgist.registry import Registry

if TYPE_CHECKING:
    from fedgist.api.result import Result
    from fedgist.api.run import run
    from fedgist.core.method import Method
    from fedgist.core.objectives.own_metric import metric
    from fedgist.data.dataset import Dataset
    from fedgist.data.sources.user_rows import lazy
    from fedgist.recipe.reading import Recipe

__version__ = version("fedgist")
__all__ = [
    "CheckpointError",
    "DataError",
    "Dataset",
    "FedgistError",
    "InputError",
    "JobsError",
    "MessageError",
    "Method",
    "MethodError",
    "OutputError",
    "Recipe",
    "RecipeError",
    "ReportError",
    "Result",
    "Stopped",
    "TooFewRepliesError",
    "WorkerError",
    "lazy",
    "metric",
    "run",
]

# these load torch, which takes a second: each is imported at its first use
_WHEN_USED: Registry[Any] = Registry(
    {
        "Method": "fedgist.core.method:Method",
        "Dataset": "fedgist.data.dataset:Dataset",
        "Recipe": "fedgist.recipe.reading:Recipe",
        "Result": "fedgist.api.result:Result",
        "lazy": "fedgist.data.sources.user_rows:lazy",
        "metric": "fedgist.core.objectives.own_metric:metric",
        "run": "fedgist.api.run:run",
    }
)


def __getattr__(name: str) -> Any:
    if name in _WHEN_USED:
        return _WHEN_USED[name]
    raise AttributeError(f"module 'fedgist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
