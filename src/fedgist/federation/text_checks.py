"""What a recipe may not ask of texts, whose rows have a label at each place and no class."""

from __future__ import annotations

from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.errors import RecipeError
from fedgist.federation.recipe import Recipe

BY_CLASS = ("dirichlet", "shards", "pathological", "pachinko")  # partitions
TEXT, CLASSES = "next_word", "classes"  # objectives


def check_objective(recipe: Recipe, data: Dataset) -> None:
    """Raise RecipeError unless the objective is one for such data, and settings fit texts."""
    name = recipe.objective.name
    if data.text != (name == TEXT):
        some, wanted = ("", TEXT) if data.text else ("no ", CLASSES)
        msg = f"objective.name = {name!r}: {data.name} has {some}texts; use {wanted!r}"
        raise RecipeError(msg)
    asked = {
        f"partition.name = {recipe.partition.name!r}": recipe.partition.name in BY_CLASS,
        "train.class_weights = 'balanced'": recipe.train.class_weights == "balanced",
        "data.normalize = 'client'": recipe.data.normalize == "client",
        "data.mean and data.std": bool(recipe.data.mean or recipe.data.std),
        "evaluate.save_features": bool(recipe.evaluate.save_features),
    }
    sets = recipe.evaluate.sets.items()
    asked |= {f"evaluate.sets.{key}.classes": part.classes is not None for key, part in sets}
    if data.text and (bad := [what for what, is_asked in asked.items() if is_asked]):
        msg = f"{bad[0]} needs a class or numbers for each row; {data.name} has texts"
        raise RecipeError(msg)


def check_method_reads(method: Method, data: Dataset) -> None:
    """Raise RecipeError if the method needs one class a row, and the data are texts."""
    if data.text and method.needs_classes:
        msg = f"{type(method).__name__} needs one class for each row; {data.name} has texts"
        raise RecipeError(msg)
