"""The documentation site: pages where they lie in the repository, and the API from its docstrings.

The source is the repository itself, so that a link between two pages is the same on the site and
in a checkout. ``make docs`` builds it; every warning is an error.
"""

import os
import pydoc
import re
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = "fedgist"
author = "The fedgist authors"
version = release = version_of("fedgist")

extensions = [
    "myst_nb",  # Markdown, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",  # NumPy's form of docstrings
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [".*", "bench", "build", "docs/templates", "recipes", "runs", "src", "tests"]
NAMES = "docs/generated/names.rst"  # what the page of the API lists, for autosummary
exclude_patterns += [NAMES]
templates_path = [str(Path(__file__).parent / "templates")]

myst_heading_anchors = 4
nb_execution_mode = "off"  # the tests run notebooks; the site shows what they hold

autosummary_generate = [NAMES]
autodoc_member_order = "bysource"
autodoc_use_type_comments = False  # types are annotations
napoleon_google_docstring = False
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|data|exc|obj)", r"(?!fedgist\.)\w+\..*"),  # of other packages
    (r"py:(class|data|obj)", r"(?!fedgist\.).*"),  # types in signatures
    (r"py:class", r"fedgist\..*\.([A-Z]|_\w+)"),  # type variables, and names that are private
]
suppress_warnings = ["ref.python"]  # types of one name in two modules, unqualified in a signature

html_theme = "furo"
html_title = f"fedgist {version}"
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which no browser does from a disk
html_show_sourcelink = False
html_show_copyright = False
linkcheck_timeout = 30
html_additional_pages = {"index": "redirect.html"}


ROOT = Path(__file__).parents[1]
# pages that are part of the site but not of its sidebar: the first page has the README's content,
# and the page on the architecture leads to the decisions
TABLE = re.compile(r"^\| name \| \|\n\|---\|---\|\n((?:\| \[`fedgist.*\n)+)", re.MULTILINE)
ASIDE = re.compile(r"README|docs/decisions/.*")


def setup(app: Sphinx) -> None:
    """Read docstrings as they are written, and open with the README."""
    app.connect("config-inited", write_names)
    app.connect("autodoc-process-docstring", with_plain_shapes)
    app.connect("autodoc-process-signature", without_generated_signature)
    app.connect("missing-reference", as_plain_code)
    app.connect("source-read", with_readme)


def with_readme(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the README before the first page's lists, and mark the pages that are in no list.

    Where the page of the API has a table of names, the site has a list that leads to their pages.
    """
    if page == root_doc:
        app.env.note_dependency(str(ROOT / "README.md"))
        readme = (ROOT / "README.md").read_text("utf-8")
        source[0] = re.sub(r"\]\((?!http)([^)]+)\)", from_docs, readme) + source[0]
    elif page == "docs/api":
        source[0] = TABLE.sub(lambda table: f"```{{eval-rst}}\n{summary(table[1])}```\n", source[0])
    elif ASIDE.fullmatch(page):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def write_names(*_: object) -> None:
    """List the names of the page of the API for autosummary, which makes a page for each."""
    rows = "".join(TABLE.findall((ROOT / "docs/api.md").read_text("utf-8")))
    (ROOT / NAMES).parent.mkdir(exist_ok=True)
    (ROOT / NAMES).write_text(summary(rows, "."), "utf-8")


def summary(rows: str, folder: str = "generated") -> str:
    """Return autosummary's list of the names that the rows of a table begin with."""
    names = re.findall(r"^\| \[`(fedgist[\w.]+)`", rows, re.MULTILINE)
    return "".join([f".. autosummary::\n   :toctree: {folder}\n\n", *(f"   {n}\n" for n in names)])


def from_docs(link: re.Match[str]) -> str:
    """Return a link of the README as one of a page in docs."""
    return f"]({os.path.relpath(link[1], 'docs')})"


def with_plain_shapes(*event: object) -> None:
    """Let shapes be written as in code: the star of (rows, *shape) begins no emphasis."""
    lines = event[-1]
    assert isinstance(lines, list)
    lines[:] = [re.sub(r"(?<!`)(\([\w, ]*)\*(\w+\))", r"\1\\*\2", line) for line in lines]


def without_generated_signature(*event: object) -> tuple[str, str] | None:
    """Leave out the signature of a recipe, which is all its defaults, and of a protocol."""
    _, kind, _, described, _, _, _ = event
    generated = hasattr(described, "model_fields") or getattr(described, "_is_protocol", False)
    return ("", "") if kind == "class" and generated else None


def as_plain_code(*event: object) -> object:
    """Show a docstring's link to a name outside the reference as plain code, if the name exists."""
    _, _, link, text = event
    assert isinstance(link, pending_xref)
    if link.get("refdomain") != "py":
        return None
    target, module = link["reftarget"], link.get("py:module")
    if module is None and "." not in target:  # in a table: it is checked on the name's own page
        return text
    names = [target, f"{module}.{target}", f"{module}.{link.get('py:class')}.{target}"]
    exists = any(pydoc.locate(name) for name in names if name.startswith("fedgist."))
    return text if exists else None
