"""Makes the pictures of the documentation anew: python docs/scripts/pictures.py, from the root.

Runs the demo of README.md, and keeps its curves and each client's gain, by the client's model.
Runs the study of studies.md (three methods, six seeds; about a minute), writes its page, and takes
pictures of it in Chromium, on a desk and on a phone, by day and by night.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

IMAGES = Path(__file__).parents[1] / "img"
SHADES = 128  # colours of a picture: enough for flat ones, and a third of the bytes
SWEEP = "sweep demo --grid method.name=fedlog,fedavg,local --seeds 6 --out study"
REPORT = "report study --reference fedlog -o page.html"
DEMO = (
    "run demo --out fedlog",
    "run demo --out local --set method.name=local",
    "run demo --out fedavg --set method.name=fedavg",
    "show fedlog local fedavg --figure accuracy.png",
    "report fedlog local fedavg -o demo.html --figures figures",
)
SHOWN = {"demo": "accuracy.png", "demo-gains": "figures/gains.png"}
# name, width, height, colours, and what must be at the top
SHOTS: tuple[tuple[str, int, int, Literal["light", "dark"], str], ...] = (
    ("report-desktop", 1280, 1400, "light", "header"),
    ("report-desktop-dark", 1280, 1150, "dark", "#bytes-by-round"),
    ("report-phone", 390, 844, "light", "header"),
    ("report-phone-dark", 390, 844, "dark", "#by-round"),
)


def main() -> None:
    """Run demo and study, and write every picture."""
    with tempfile.TemporaryDirectory() as place:
        for words in DEMO:
            command(place, *words.split())
        for name, file in SHOWN.items():
            keep(Image.open(Path(place) / file), name)
    with tempfile.TemporaryDirectory() as place:
        command(place, *SWEEP.split(), "--set", "evaluate.save_features=10")
        command(place, *REPORT.split())
        photograph(Path(place) / "page.html")


def command(place: str, *words: str) -> None:
    """Run one of fedgist's commands."""
    subprocess.run([sys.executable, "-m", "fedgist.cli", *words], cwd=place, check=True)


def photograph(page: Path) -> None:
    """Take the pictures of a page."""
    with sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, width, height, scheme, top in SHOTS:
            size = ViewportSize(width=width, height=height)
            tab = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            tab.goto(page.as_uri())
            tab.evaluate("top => document.querySelector(top).scrollIntoView()", top)
            tab.evaluate("window.scrollBy(0, -60)")  # the legend stays above
            keep(Image.open(io.BytesIO(tab.screenshot())), name)
        browser.close()


def keep(picture: Image.Image, name: str) -> None:
    """Write a picture with few colours among those of the documentation."""
    picture.convert("RGB").quantize(SHADES).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
