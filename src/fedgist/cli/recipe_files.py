"""The recipes that come with fedgist."""

from __future__ import annotations

from pathlib import Path

from fedgist.errors import RecipeError, one_of
from fedgist.studies.paper_table import is_table

DEFAULT = "demo"


def folder() -> Path:
    """Where they are: in the package once installed, beside ``src`` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str | None) -> Path:
    """Return the file called ``name``.

    A path, or a shipped recipe's name such as ``fedlog/mnist``.
    """
    if name is None:
        name = DEFAULT
    elif Path(name).is_file():
        return Path(name)
    inside = folder() / Path(name).with_suffix(".toml")
    if name in shipped():
        if is_table(inside):
            msg = f"{name} is a paper's table: fedgist reproduce {name}"
            raise RecipeError(msg)
        return inside
    msg = (
        f"no recipe {name}: no such file, and none that comes with fedgist ({', '.join(shipped())})"
    )
    raise RecipeError(msg)


def find_table(name: str) -> Path:
    """Return the file of a table: a path, or a shipped table's name such as ``fedlog/table1``."""
    if Path(name).is_file():
        return Path(name)
    tables = [known for known in shipped() if is_table(folder() / f"{known}.toml")]
    try:
        return folder() / f"{one_of(name, tables, 'table')}.toml"
    except ValueError as error:
        raise RecipeError(str(error)) from error


def shipped() -> dict[str, str]:
    """Return the shipped recipes by name, with the first line of each."""
    root = folder()
    return {
        path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        .splitlines()[0]
        .lstrip("# ")
        for path in sorted(root.rglob("*.toml"))
    }
