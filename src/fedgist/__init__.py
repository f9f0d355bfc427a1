"""fedgist: federated learning that shares the gist, not the weights.

>>> import fedgist
>>> result = fedgist.run({"train": {"num_rounds": 1}, "engine": {"workers": 1, "cohort_size": 5}})
>>> result.rounds[0]["round"]
1
"""

from importlib.metadata import version

from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
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
    TooFewRepliesError,
    WorkerError,
)
from fedgist.federation.recipe import Recipe
from fedgist.federation.server_run import Stopped
from fedgist.notebook.door import run
from fedgist.notebook.result import Result

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
    "run",
]
