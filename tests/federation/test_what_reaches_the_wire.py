"""Every refusal and message that can leave a site stands in docs/security.md, with its reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedgist.federation.network.invitation import Hello

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"
#: What a site runs between a plan and a reply; the data sources are called in rows_stay_home alone.
SITE = (
    *(f"site/{name}" for name in ("agent", "policy", "setup", "limits", "store", "ledger")),
    "site/total_keys",
    "site/facts",
    *("network/invitation", "network/grpc_site", "agreement/recipe_check"),
    "agreement/server_setup",
)
FILES = [ROOT / f"src/fedgist/federation/{name}.py" for name in SITE]
FILES += [ROOT / f"src/fedgist/wire/{name}.py" for name in ("site", "envelope")]
FILES += [ROOT / "src/fedgist/world/facts/question.py"]
FILES += sorted((ROOT / "src/fedgist/wire/secure").glob("*.py"))
FILES = [file for file in FILES if file.name not in {"engine.py", "group.py"}]  # the server's
SENDS = {"seal", "refusal", "note"}
BY_ROWS = "the rows, in `rows_stay_home`"


def exits(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """Each place of the code that raises an error, or sends, by the function in which it is."""
    for node in ast.iter_child_nodes(tree):
        path = within
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = (*within, node.name)
        raises = isinstance(node, ast.Raise) and node.exc is not None
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "id", None)
        if raises or name in SENDS:
            yield ".".join(path)
        yield from exits(node, path)


def in_the_code() -> Counter[str]:
    return Counter(name for file in FILES for name in exits(ast.parse(file.read_text("utf-8"))))


def on_the_page() -> dict[str, dict[str, int]]:
    """The functions of each row of the table, with their numbers."""
    text = PAGE.read_text("utf-8")
    table = text[text.index("| decided by |") : text.index("A site that is ready says hello")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]
    return {
        row[0]: {name: int(count) for name, count in re.findall(r"`([\w.]+)` (\d+)", row[1])}
        for row in rows
    }


def test_each_refusal_and_message_of_a_site_is_classified_on_the_page() -> None:
    listed: Counter[str] = Counter()
    for functions in on_the_page().values():
        listed.update(functions)
    code = in_the_code()
    assert code - listed == Counter(), "add these to the table of docs/security.md, with a reason"
    assert listed - code == Counter(), "these are in the table, and not in the code"


def test_a_new_refusal_is_noticed() -> None:
    before = Counter(exits(ast.parse("def f():\n    raise A('x')\n")))
    after = Counter(exits(ast.parse("def f():\n    raise A('x')\n    if y:\n        seal(z)\n")))
    assert (after - before) == Counter({"f": 1})


def test_what_rows_decide_is_called_inside_rows_stay_home_alone() -> None:
    """Each function of that row is called by another one of it, or in the context."""
    inside = set(on_the_page()[BY_ROWS]) | {"_rows"}
    tree = ast.parse((ROOT / "src/fedgist/federation/site/setup.py").read_text("utf-8"))
    free: list[str] = []

    def visit(node: ast.AST, *, protected: bool) -> None:
        opens = isinstance(node, ast.With) and "rows_stay_home" in ast.unparse(node.items[0])
        owner = isinstance(node, ast.FunctionDef) and node.name in inside
        name = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
        if name in inside - {"rows_stay_home", "try_training"} and not protected:
            free.append(str(name))
        for child in ast.iter_child_nodes(node):
            visit(child, protected=protected or opens or owner)

    visit(tree, protected=False)
    assert free == []


def test_the_fields_of_a_hello_are_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    sentence = text[text.index("A site that is ready says hello") :].split(". ")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(Hello.model_fields)
