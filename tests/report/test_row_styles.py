"""One colour a method: in every figure, on the page, and for readers who see fewer colours."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgist.methods import METHODS, base_name
from fedgist.methods.common.method_looks import INK, LOOKS
from fedgist.report import page
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.pictures.drawing import GROUP_COLORS, Picture
from fedgist.report.pictures.plot_elements import SHADES_OF_BARS
from fedgist.report.pictures.row_styles import styles_of
from fedgist.report.tables import comparison
from fedgist.runs.finished.run_reader import find

from written import write_run  # isort: skip

if TYPE_CHECKING:
    from matplotlib.artist import Artist

colors = pytest.importorskip("matplotlib.colors")
RECIPES = Path(__file__).parents[2] / "recipes"
# Machado and others (2009), strength 1: what readers without one kind of cone see
SEEN = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
MOST_BY_COLOR = 8  # methods of a table
PERSONAL = ["local", "fedavg", "lg_fedavg", "fedper", "fedrep", "fedbabu", "feddbe", "fedlog"]
SUMMARIES = ["local", "fedavg", "fedproto", "fedlog", "fd", "repshare", "fedper", "fedrep"]
ONE_MODEL = ["local", "fedavg", "fedprox", "fedadam", "cs_fl", "fedlog"]
PUBLIC_ROWS = ["local", "fedavg", "periodic_codist", "merged_codist", "centralized"]


def tables() -> list[list[str]]:
    """The methods of each paper's table, and of the usual families."""
    found = [
        tomllib.loads(path.read_text("utf-8")).get("table", {}).get("methods", [])
        for path in sorted(RECIPES.rglob("*.toml"))
    ]
    papers = [list(dict.fromkeys(map(base_name, methods))) for methods in found if methods]
    assert len(papers) >= 4
    return [*papers, PERSONAL, SUMMARIES, ONE_MODEL, PUBLIC_ROWS]


def lightness_and_hue(color: str, seen: np.ndarray) -> np.ndarray:
    """Ottosson's OKLab (2020) of a colour as a reader sees it, times 100."""
    rgb = np.array(colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    found: np.ndarray = 100 * lab @ np.cbrt(cones @ np.clip(seen @ linear, 0, 1))
    return found


def test_every_method_has_a_look_and_no_two_the_same() -> None:
    assert set(LOOKS) == set(METHODS)
    assert len({color for color, _ in LOOKS.values()}) == len(LOOKS)
    assert not {color for color, _ in LOOKS.values()} & {*GROUP_COLORS, *SHADES_OF_BARS}


@pytest.mark.parametrize("methods", tables(), ids=" ".join)
@pytest.mark.parametrize("reader", SEEN)
def test_methods_that_are_compared_differ_for_every_reader(reader: str, methods: list[str]) -> None:
    # rejects grey for local training beside the green of representation sharing: 2.8
    for one, other in itertools.combinations(methods, 2):
        (first, sign), (second, other_sign) = LOOKS[one], LOOKS[other]
        seen = (lightness_and_hue(color, SEEN[reader]) for color in (first, second))
        far = np.linalg.norm(np.subtract(*seen)) > 7
        # no eleven colours differ for all readers: there the markers do
        assert far or (len(methods) > MOST_BY_COLOR and sign != other_sign), f"{one}, {other}"
        assert sign != other_sign or len(methods) > MOST_BY_COLOR, f"{one}, {other}"


@given(st.lists(st.sampled_from([*METHODS, "own.py:Mine", "other.py:Yours", "fedprox@strong"])))
def test_a_method_keeps_its_colour_whatever_else_is_shown(methods: list[str]) -> None:
    styles = styles_of(methods)
    for method, style in zip(methods, styles, strict=True):
        if methods.count(method) == 1 and method != "fedprox@strong" and "py" not in method:
            assert (style.color, style.marker) == LOOKS[method]
    # each row of up to twelve of a method has a look of its own
    looks = [(style.color, style.line, style.marker) for style in styles]
    if all(methods.count(method) <= 2 for method in methods):
        assert len(set(looks)) == len(looks)


def test_rows_of_one_method_share_its_colour_and_differ_in_the_line() -> None:
    styles = styles_of(["fedlog"] * 12 + ["lg_fedavg@1", "lg_fedavg@2"])
    assert {style.color for style in styles[:4]} == {LOOKS["fedlog"][0]}
    assert len({style.line for style in styles[:4]}) == 4
    assert len({(style.color, style.line) for style in styles[:12]}) == 12
    assert styles[12].color == styles[13].color == LOOKS["lg_fedavg"][0]
    assert styles[12].line != styles[13].line


def study_of(folder: Path, methods: list[str]) -> comparison.Study:
    for place, method in enumerate(methods):
        for seed in (0, 1):
            accuracies = [0.3 + 0.1 * place, 0.5 + 0.01 * seed]
            write_run(
                folder / f"{method}-{seed}", accuracies, seed=seed, method=method, clients=[0.5, 1]
            )
    return comparison.study(find([folder]))


def color_of(picture: Picture, row: int) -> set[str]:
    """The colours of the marks of a row in a figure, as they are drawn."""
    axes = picture.figure.axes
    lines = [
        colors.to_hex(line.get_color()) for ax in axes for line in ax.lines if gid(line) == row
    ]
    patches = [
        colors.to_hex(box.get_edgecolor()) for ax in axes for box in ax.patches if gid(box) == row
    ]
    return {*lines, *patches}


def gid(mark: Artist) -> int:
    found = re.fullmatch(r"row-(\d+)", str(mark.get_gid()))
    return int(found[1]) if found else -1


def test_a_method_has_its_colour_in_every_figure_and_on_the_page(tmp_path: Path) -> None:
    for number, methods in enumerate((["local", "fedlog", "fedavg"], ["fedavg", "fedproto"])):
        study = study_of(tmp_path / str(number), methods)
        drawn = {picture.name: picture for picture in pictures.pictures(study)}
        html = page.render(study, [], "A page")
        for row, name in enumerate(study.rows):
            color = LOOKS[name.method][0]
            for picture in ("by-round", "bytes-by-round", "over-clients"):
                assert color_of(drawn[picture], row) == {color}, (picture, name.method)
            shown = "currentColor" if color == INK else color
            assert html.count(f'class="dot" style="background:{shown}"') >= 2, name.method
            assert f'style="color:{shown}"' in html


def luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


@pytest.mark.parametrize("paper", ["#ffffff", "#14171a"], ids=["by day", "by night"])
def test_every_colour_is_visible_by_day_and_by_night(paper: str) -> None:
    for color in {*GROUP_COLORS, *(color for color, _ in LOOKS.values())} - {INK}:
        both = sorted((luminance(color) + 0.05, luminance(paper) + 0.05))
        assert both[1] / both[0] > 2, color
