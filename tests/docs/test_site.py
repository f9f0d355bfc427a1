"""The site is built without a warning, holds every page, and opens from the disk."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from browsers import in_browser, new_page, open_browser
from commands import call

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")])

pytestmark = [pytest.mark.slow, pytest.mark.environment]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the words of the Makefile, once: two builds would write the same stubs at a time."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # of several workers, if there are
    shared = tmp_path_factory.getbasetemp().parent / f"site-{run}"
    out = shared if run else tmp_path_factory.mktemp("site") / "built"
    recipe = re.search(r"sphinx-build (.* build/site)", (ROOT / "Makefile").read_text("utf-8"))
    assert recipe is not None
    *options, _ = recipe[1].split()
    with FileLock(f"{out}.lock"):
        if not (out / "index.html").exists():
            done = call([sys.executable, "-m", "sphinx", *options, out], ROOT)
            assert "WARNING" not in done.stderr
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_is_part_of_it(site: Path, page: Path) -> None:
    built = (site / page.relative_to(ROOT)).with_suffix(".html")
    assert len(built.read_text("utf-8")) > 2000


def test_every_public_name_has_its_reference(site: Path) -> None:
    names = re.findall(
        r"^\| \[`(fedgist[\w.]+)`\]", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE
    )
    for name in names:
        text = (site / "docs" / "generated" / f"{name}.html").read_text("utf-8")
        assert name in text
    built = {path.stem for path in (site / "docs" / "generated").glob("*.html")}
    assert built == set(names)
    assert "Raises" in (site / "docs" / "generated" / "fedgist.run.html").read_text("utf-8")


def visit(browser: Any, url: str, width: int) -> tuple[Any, list[str]]:
    page, troubles = new_page(browser, width, 900), list[str]()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: troubles.append(request.url) if away(request.url) else None)
    page.goto(url)
    return page, troubles


def away(url: str) -> bool:
    return not url.startswith(("file:", "data:", "about:", "blob:"))


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_from_the_disk_and_needs_no_network(site: Path, width: int) -> None:
    with open_browser() as browser:
        page, troubles = visit(browser, (site / "index.html").as_uri(), width)
        page.wait_for_url("**/docs/index.html")
        assert page.locator("h1").first.inner_text().startswith("fedgist")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert troubles == []


@in_browser
def test_its_search_finds(site: Path) -> None:
    with open_browser() as browser:
        address = (site / "search.html").as_uri() + "?q=check_laws"
        page, troubles = visit(browser, address, 1280)
        found = page.locator("ul.search li a").first
        found.wait_for()
        assert "fedgist.testing.check_laws" in found.get_attribute("href")
        assert troubles == []
