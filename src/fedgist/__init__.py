"""fedgist: federated learning that shares the gist, not the weights.

>>> import fedgist
>>> result = fedgist.run({"train": {"num_rounds": 1}, "engine": {"workers": 1, "cohort_size": 5}})
>>> result.rounds[0]["round"]
1
"""

from importlib.metadata import version

from fedgist.core.method import Method
from fedgist.data.base import Dataset
from fedgist.run.api import Result, Stopped, run
from fedgist.run.recipe import Recipe, RecipeError

__version__ = version("fedgist")
__all__ = ["Dataset", "Method", "Recipe", "RecipeError", "Result", "Stopped", "run"]
