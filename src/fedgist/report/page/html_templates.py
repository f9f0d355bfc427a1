"""Templates of the HTML pages, in which every text is escaped and unprintable characters show."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from fedgist.errors import printable

if TYPE_CHECKING:
    import jinja2


def part(name: str) -> str:
    """Return a template, style sheet or script of the pages."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def template(name: str) -> jinja2.Template:
    """Return a template; a value that it needs and does not get is an error."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown
    )
    return environment.from_string(part(name))


def _shown(value: object) -> object:
    """Return a value for the page with unprintable characters escaped; markup is kept."""
    import markupsafe

    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return printable(value)
    return value
