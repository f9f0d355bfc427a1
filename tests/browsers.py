"""A browser in tests: found on the machine, and as patient as the commands are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from commands import HANG_S

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_THERE = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
HANG_MS = HANG_S * 1000
Test = TypeVar("Test", bound=Callable[..., None])


def in_browser(test: Test) -> Test:
    """Mark a test that opens a browser: `make test-all` runs it, where there is a browser."""
    marked: Test = pytest.mark.environment(pytest.mark.slow(_THERE(test)))
    return marked


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Open the machine's Chromium; the test is skipped where playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=HANG_MS
        )
        yield browser
        browser.close()


def new_page(browser: Any, width: int, height: int, scheme: str = "light") -> Any:
    """Open an empty page of this size."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(HANG_MS)
    return context.new_page()
