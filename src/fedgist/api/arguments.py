"""The arguments of fedgist.run: what each may be, and one line about what it may not be."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist.core.method import Method
from fedgist.core.metrics import ALL_ROWS, HELD_OUT
from fedgist.data.sources.python_objects import array
from fedgist.errors import MethodError, RecipeError
from fedgist.recipe.method_loading import checked_class, identity
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import MethodSection
from fedgist.world.client_lists import Clients
from fedgist.world.models import Group, module_group


def clients_of(clients: object, argument: str) -> Clients | None:
    """Return what is given for each client, whatever it is: in order, or by name.

    Raises
    ------
    RecipeError
        If it is neither a mapping nor a list or another iterable, or is empty; ``argument`` begins
        the message.
    """
    if clients is None:
        return None
    single = isinstance(clients, str | bytes) or getattr(clients, "ndim", 1) == 0
    if single or not isinstance(clients, Iterable):
        raise RecipeError(
            f"{argument} is a {type(clients).__name__}; it must be a list with each client's rows"
            ", or a mapping of names to rows"
        )
    if isinstance(clients, Mapping):
        found: Clients = {str(name): rows for name, rows in clients.items()}
    else:
        found = list(clients)
    if not found or len(found) < len(clients if isinstance(clients, Mapping) else found):
        problem = "names one client twice" if found else "is empty; it must list each client's rows"
        raise RecipeError(f"{argument} {problem}")
    return found


def with_method(recipe: Recipe, method: Method) -> Recipe:
    """Return the recipe with a method object's name and fields written into it.

    Raises
    ------
    MethodError
        If ``method`` is not a method object.
    RecipeError
        If the recipe gives hyper-parameters as well.
    """
    if isinstance(method, str):
        raise MethodError(
            f"method is the text {method!r}: give an object, or name it in the recipe's [method]"
        )
    if isinstance(method, type):
        raise MethodError(
            f"method is the class {method.__name__}: give an object, {method.__name__}()"
        )
    checked_class(type(method), type(method).__name__)
    if recipe.method.options:
        key = next(iter(recipe.method.options))
        raise RecipeError(
            f"method.{key} is given in the recipe, and a method object as well: give only one of "
            "the two"
        )
    name, options = identity(method)
    return recipe.model_copy(update={"method": MethodSection(name=name, **options)})


def groups_of(
    model: object, clients: Clients | None, *, own_start: bool
) -> dict[str, Group] | None:
    """Return the groups of clients given by a module, a factory, or a mapping of these.

    A group's clients are numbers or, where ``clients`` is a mapping, its names.

    Raises
    ------
    RecipeError
        If ``model`` is none of these, or a group names a client that is not there.
    """
    if model is None:
        return None
    if not isinstance(model, Mapping):
        return {"model": module_group(_module(model, "model"), own_start=own_start)}
    if not model:
        raise RecipeError(
            "model is an empty mapping; it must hold a name, a module and its clients"
        )
    names = tuple(clients) if isinstance(clients, Mapping) else ()
    return {
        str(name): _group(f"model[{name!r}]", value, names, own_start=own_start)
        for name, value in model.items()
    }


def _group(where: str, value: object, names: Sequence[str], *, own_start: bool) -> Group:
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004
        raise RecipeError(
            f"{where} is a {type(value).__name__}; it must be (module or factory, [clients])"
        )
    members = array(value[1], f"{where}: its clients")
    listed = [names.index(name) if name in names else name for name in members.tolist()]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in listed):
        known = f" or names: {', '.join(names)}" if names else ""
        raise RecipeError(
            f"{where}: its clients are {value[1]!r:.80}; a list of their numbers{known} is needed"
        )
    return module_group(_module(value[0], where), own_start=own_start, clients=listed)


def _module(model: Any, where: str) -> Any:
    """Return a module or a factory."""
    if isinstance(model, str):
        raise RecipeError(
            f"{where} is the text {model!r:.80}: give a module, or name it in the recipe's [model]"
        )
    if not callable(model):
        raise RecipeError(
            f"{where} is a {type(model).__name__}; it must be a torch.nn.Module or a factory"
        )
    return model


def named_sets(test_sets: object) -> dict[str, tuple[object, object]] | None:
    """Return further test sets by name.

    Raises
    ------
    RecipeError
        If they are not a mapping of names to pairs (x, y), or a name is the server's own.
    """
    if test_sets is None:
        return None
    if not isinstance(test_sets, Mapping):
        raise RecipeError(
            f"test_sets is a {type(test_sets).__name__}; it must be {{'name': (x, y)}}"
        )
    for name, pair in test_sets.items():
        if not isinstance(name, str) or name in {ALL_ROWS, HELD_OUT}:
            raise RecipeError(
                f"test_sets has the name {name!r:.80}; a text other than {ALL_ROWS!r} and "
                f"{HELD_OUT!r} is needed"
            )
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004
            raise RecipeError(f"test_sets[{name!r}] must be a pair (x, y)")
    return {name: (x, y) for name, (x, y) in test_sets.items()}


def path_of(path: object, argument: str) -> Path | None:
    """Return a path that an argument names.

    Raises
    ------
    RecipeError
        If it is neither a path nor a text that can be one.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or str(path) == "" or "\0" in str(path):
        raise RecipeError(f"{argument} is {path!r:.80}; it must be the path of a folder")
    return Path(path)


def check_flags(**flags: object) -> None:
    """Raise RecipeError if an argument is not True or False, or more than one is True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RecipeError(f"{name} is {value!r:.80}; it must be True or False")
    if all(flags.values()):
        raise RecipeError(f"{' and '.join(flags)} are both True: choose one")
