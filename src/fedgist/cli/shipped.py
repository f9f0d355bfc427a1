"""The recipes that come with fedgist."""

from __future__ import annotations

from pathlib import Path

from fedgist.run.recipe import RecipeError

DEFAULT = "demo"


def folder() -> Path:
    """Where they are: in the package once installed, beside ``src`` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str | None) -> Path:
    """Return the file called ``name``: a path, or a shipped recipe's name such as ``fedlog/mnist``."""
    if name is None:
        name = DEFAULT
    elif Path(name).is_file():
        return Path(name)
    inside = folder() / Path(name).with_suffix(".toml")
    if name in shipped():
        return inside
    msg = f"no recipe {name}: no such file, and none that comes with fedgist ({', '.join(shipped())})"
    raise RecipeError(msg)


def shipped() -> dict[str, str]:
    """Return the shipped recipes by name, with the first line of each."""
    root = folder()
    return {
        path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in sorted(root.rglob("*.toml"))
    }
