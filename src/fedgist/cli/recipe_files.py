"""Find recipes, tables and search spaces: by path, or by the name of one shipped with fedgist."""

from __future__ import annotations

from pathlib import Path

from fedgist.errors import RecipeError, did_you_mean
from fedgist.studies.paper_table import is_table

DEFAULT = "demo"
SPACES = "spaces"  # the folder of search spaces
NONE_GIVEN = f"no recipe given: this is {DEFAULT}, which comes with fedgist"


def folder() -> Path:
    """Return the folder of shipped recipes: inside the installed package, or next to ``src``."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str | None) -> Path:
    """Return the path of a recipe: a file, or a shipped name such as ``fedlog/mnist``."""
    if name is None:
        name = DEFAULT
    elif Path(name).is_file():
        return Path(name)
    if name not in shipped():
        raise RecipeError(f"no recipe {name}: there is no such file{did_you_mean(name, shipped())}")
    path = folder() / Path(name).with_suffix(".toml")
    if is_table(path):
        raise RecipeError(f"{name} is a paper's table: fedgist reproduce {name}")
    return path


def find_table(name: str) -> Path:
    """Return the path of a paper's table: a file, or a shipped name such as ``fedlog/table1``."""
    if Path(name).is_file():
        return Path(name)
    tables = [recipe for recipe in shipped() if is_table(folder() / f"{recipe}.toml")]
    if name not in tables:
        raise RecipeError(f"unknown table {name!r}{did_you_mean(name, tables)}")
    return folder() / f"{name}.toml"


def find_space(name: str) -> Path:
    """Return the path of a search space: a file, or the name of a shipped one."""
    if Path(name).exists():
        return Path(name)
    root = folder() / SPACES
    spaces = {p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.toml")}
    if name not in spaces:
        raise RecipeError(
            f"no search space {name}: there is no such file{did_you_mean(name, sorted(spaces))}"
        )
    return spaces[name]


def shipped() -> dict[str, str]:
    """Return the first line of each shipped recipe, by the recipe's name."""
    root = folder()
    return {
        path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        .splitlines()[0]
        .lstrip("# ")
        for path in sorted(root.rglob("*.toml"))
        if path.relative_to(root).parts[0] != SPACES
    }
