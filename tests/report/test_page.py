"""The page and its pictures; in a real browser, what it shows, and that it needs no network."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from matplotlib.colors import to_hex

import fedgist
from fedgist.errors import RecipeError
from fedgist.methods.common.method_looks import INK
from fedgist.report import page
from fedgist.report.pictures import confusion_pictures, drawing
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.pictures.feature_pictures import CACHE, tsne_points
from fedgist.report.tables import comparison
from fedgist.runs.files.record import FEATURES, PARTITION
from fedgist.runs.finished.run_reader import find
from fedgist.runs.finished.trained_models import simulation

from browsers import in_browser, new_page, open_browser  # isort: skip
from written import sealed_run, write_run  # isort: skip

SPLIT = {"classes": ["cat", "<dog>"], "train": [[3, 0], [1, 9]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for method, best in (("fedlog", 0.9), ("fedavg", 0.7), ("local", 0.8)):
        for seed in range(2):
            curve = [best - 0.3 / r + 0.01 * seed for r in range(1, 11)]
            run = write_run(
                root / method / f"seed-{seed}",
                curve,
                seed=seed,
                method=method,
                clients=[best, best - 0.2, 1.0],
                up=0 if method == "local" else 1000,
                down=0 if method == "local" else 3000,
            )
            (run / PARTITION).write_text(json.dumps(SPLIT))
            sealed_run(run)
    draw = torch.Generator().manual_seed(0)
    safetensors.numpy.save_file(
        {
            "features": torch.randn(24, 5, generator=draw).numpy(),
            "client": torch.arange(24).div(8, rounding_mode="floor").numpy(),
            "label": (torch.arange(24) % 2).numpy(),
        },
        root / "fedlog" / "seed-0" / FEATURES,
    )
    sealed_run(root / "fedlog" / "seed-0")
    return root


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    study = comparison.study(find([folder]), reference="fedlog", target_accuracy=0.75)
    path = folder / "report.html"
    path.write_text(page.render(study, pictures.pictures(study), "Two seeds <of> three"))
    return path


class Links(HTMLParser):
    """Collects the addresses of everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            value or ""
            for name, value in attrs
            if name in {"src", "href", "action", "srcset", "xlink:href"}
        ]


@pytest.mark.slow
def test_the_page_needs_nothing_else(written: Path) -> None:
    parser = Links()
    parser.feed(written.read_text())
    assert all(link.startswith(("data:", "#")) for link in parser.links)
    assert "<of>" not in written.read_text()
    assert "@import" not in written.read_text()


def test_every_picture_is_there_with_its_numbers(folder: Path) -> None:
    study = comparison.study(find([folder]), target_accuracy=0.75)
    drawn = {picture.name: picture for picture in pictures.pictures(study)}
    assert list(drawn) == [
        "by-round",
        "by-bytes",
        "over-clients",
        "gains",
        "partition-1",
        "bytes-by-round",
        "times",
        "features-1-class",
        "features-1-client",
    ]
    rows = list(csv.DictReader(io.StringIO(drawn["by-round"].csv())))
    last = next(row for row in rows if row["row"] == "fedlog" and row["round"] == "10")
    assert float(last["mean"]) == pytest.approx(0.9 - 0.03 + 0.005)
    assert float(last["high"]) - float(last["mean"]) == pytest.approx(
        0.005
    )  # the standard error of two seeds
    by_bytes = list(csv.DictReader(io.StringIO(drawn["by-bytes"].csv())))
    assert {row["row"] for row in by_bytes if float(row["bytes"])} == {"fedlog", "fedavg"}
    assert "(sends nothing)" in drawn["by-bytes"].svg()
    assert "sends nothing: local" in drawn["bytes-by-round"].svg()
    assert drawn["partition-1"].table == [["client", "cat", "<dog>"], [0, 3, 0], [1, 1, 9]]
    assert len(drawn["over-clients"].table) == 1 + 3 * 2 * 3
    assert len(drawn["gains"].table) == 1 + 2 * 2 * 3, "two methods beside local training"


def test_the_spread_over_clients_is_the_band_of_a_single_seed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5, 0.6])
    (table,) = [
        p.table
        for p in pictures.pictures(comparison.study(find([tmp_path])))
        if p.name == "by-round"
    ]
    assert table[2] == ["fedlog", 2, 800.0, 0.6, pytest.approx(0.5), pytest.approx(0.7)]


def test_privacy_is_drawn_where_it_was_spent(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5, 0.6], columns={"privacy/epsilon": 1.5})
    study = comparison.study(find([tmp_path]))
    assert "privacy" in [picture.name for picture in pictures.pictures(study)]


def test_files_that_no_picture_can_be_made_of_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5, 0.6])
    for name, blob in ((PARTITION, b"[]"), (FEATURES, b"\xb5\x00"), ("clients.jsonl", b"\xff\n")):
        (run / name).write_bytes(blob)
        sealed_run(run)
    study = comparison.study(find([tmp_path]))
    assert [picture.name for picture in pictures.pictures(study)] == [
        "by-round",
        "by-bytes",
        "bytes-by-round",
        "times",
    ]
    for name, remark in zip(
        (PARTITION, "clients.jsonl", FEATURES), pictures.unreadable(study), strict=True
    ):
        assert remark.startswith(str(run / name))


@pytest.mark.slow
def test_pictures_are_files_too(folder: Path, tmp_path: Path) -> None:
    drawn = pictures.pictures(comparison.study(find([folder / "fedlog"])))
    drawing.write(drawn, tmp_path / "figures")
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {
        ".pdf",
        ".svg",
        ".png",
        ".csv",
    }
    assert (tmp_path / "figures" / "by-round.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "figures" / "by-round.svg").read_text()
    assert INK in svg  # colours of its own, for programs that know no variables
    assert "var(" not in svg
    on_page = next(p for p in drawn if p.name == "by-round").svg()
    assert INK not in on_page
    assert 'class="row-0"' in on_page


def test_features_are_arranged_once(folder: Path) -> None:
    run = folder / "fedlog" / "seed-0"
    first = tsne_points(run)
    kept = json.loads((run / CACHE).read_text())
    assert len(kept["points"]) == 24
    kept["points"][0] = [7.0, 7.0]
    (run / CACHE).write_text(json.dumps(kept))
    again = tsne_points(run)
    assert again is not None
    assert again[0][0] == (7.0, 7.0)  # read, not computed again
    (run / CACHE).write_text("{")
    assert tsne_points(run) == first  # a damaged cache is made anew


@pytest.mark.slow
def test_a_run_saves_features_if_asked_to(tmp_path: Path) -> None:
    recipe = {
        "data": {"train_rows": 100},
        "train": {"num_rounds": 1},
        "evaluate": {"save_features": 3},
        "clients": {"num_clients": 4},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    result = fedgist.run(recipe, out=tmp_path / "run")
    arrays = safetensors.numpy.load_file(tmp_path / "run" / FEATURES)
    assert set(arrays["client"].tolist()) <= {0, 1, 2, 3}
    assert max(arrays["client"].tolist().count(c) for c in range(4)) == 3
    world = result.world
    client = int(arrays["client"][0])
    row = world.partition.test[client][:1]
    # an oracle: the model that is handed out gives the logits that the head makes of these features
    orders, downs, ctx = result.server_run.downloads(1)
    net = simulation(result.server_run).client(ctx, orders[client], downs[client]).net
    expected = result.model(client)(world.data.x_test[row])
    torch.testing.assert_close(net.logits(torch.from_numpy(arrays["features"][:1])), expected)
    assert arrays["label"][0] == world.data.y_test[row]


def test_features_of_other_rounds_are_files_of_their_own(tmp_path: Path) -> None:
    recipe = {
        "data": {"train_rows": 100},
        "train": {"num_rounds": 3},
        "evaluate": {"save_features": 3, "save_features_at": [1, 3], "every": 3},
        "clients": {"num_clients": 4},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    folder = tmp_path / "run"
    fedgist.run(recipe, out=folder)
    names = ("features-1", "features-3", "features")
    first, third, last = (
        safetensors.numpy.load_file(folder / f"{name}.safetensors")["features"] for name in names
    )
    assert not np.array_equal(first, third)
    assert np.array_equal(third, last)
    once = {**recipe, "train": {"num_rounds": 1}, "evaluate": {"save_features": 3}}
    alone = tmp_path / "alone"
    fedgist.run(once, out=alone)
    assert np.array_equal(safetensors.numpy.load_file(alone / FEATURES)["features"], first)
    fedgist.run(once, out=folder, overwrite=True)
    assert not list(folder.glob("features-*"))
    with pytest.raises(RecipeError, match=r"needs evaluate\.save_features"):
        fedgist.run({"evaluate": {"save_features_at": [1]}})


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as chromium:
        yield chromium


class OpenPage:
    """An open page, what it wrote to the console, and what it requested."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.page = new_page(browser, width, 900, scheme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_from_the_disk_without_a_word_or_a_request(
    browser: Any, written: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    opened = OpenPage(browser, written, width, scheme)
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [written.as_uri()]
    assert (
        opened.page.evaluate("document.documentElement.scrollWidth") <= width
    )  # nothing hangs over the edge
    dark = (
        opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    )
    assert dark == (scheme == "dark")
    ink = opened.page.evaluate("getComputedStyle(document.querySelector('#by-round svg')).color")
    assert ink == ("rgb(230, 232, 234)" if dark else "rgb(28, 31, 35)")
    shot = tmp_path / f"report-{'phone' if width < 500 else 'desktop'}-{scheme}.png"
    opened.page.screenshot(path=shot)
    assert shot.stat().st_size > 10_000


@in_browser
def test_tables_hold_the_numbers_and_sort_by_a_click(browser: Any, written: Path) -> None:
    opened = OpenPage(browser, written, 1280, "light")
    table = opened.page.locator("table.sortable").first

    def column(place: int) -> list[str]:
        texts: list[str] = table.locator(f"tbody tr td:nth-child({place})").all_inner_texts()
        return texts

    finals = dict(zip(column(1), column(2), strict=True))
    assert finals == {"fedavg": "67.50 ± 0.50", "fedlog": "87.50 ± 0.50", "local": "77.50 ± 0.50"}
    head = table.locator("th", has_text="final")
    head.click()
    assert column(1) == ["fedavg", "local", "fedlog"]
    head.click()
    assert column(1) == ["fedlog", "local", "fedavg"]
    assert head.get_attribute("aria-sort") == "descending"
    costs = opened.page.locator("table.sortable", has_text="in all")
    costs.locator("th", has_text="in all").click()  # 0 B, 4.0 kB: by size, not by letter
    assert costs.locator("tbody tr td:first-child").all_inner_texts()[0] == "local"


@in_browser
def test_a_row_ticked_off_disappears_from_every_figure(browser: Any, written: Path) -> None:
    opened = OpenPage(browser, written, 1280, "light")
    box = opened.page.locator(".legend input").nth(1)
    marks = opened.page.locator(".row-1")
    assert marks.count() >= 6  # lines and bands by round and by bytes, a box, traffic
    assert opened.page.locator("#by-round .row-1").first.is_visible()
    box.uncheck()
    assert not any(marks.nth(i).is_visible() for i in range(marks.count()))
    greyed = opened.page.locator("tbody tr.off td:first-child").all_inner_texts()
    assert set(greyed) == {"fedlog"}  # in the table of differences, too, where the rows are others
    assert opened.page.locator("#by-round .row-0").first.is_visible()
    box.check()
    assert opened.page.locator("#by-round .row-1").first.is_visible()


@in_browser
def test_light_and_dark_by_a_button_and_files_by_links(browser: Any, written: Path) -> None:
    opened = OpenPage(browser, written, 1280, "light")
    opened.page.locator("#theme").click()
    assert (
        opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    )
    figure = opened.page.locator("#by-round")
    with opened.page.expect_download() as download:
        figure.locator("button", has_text="SVG").click()
    saved = Path(download.value.path()).read_text()
    assert saved.startswith("<svg")
    assert "var(" not in saved  # its own colours, dark on white, whatever the theme
    assert "#010101" in saved
    assert download.value.suggested_filename == "by-round.svg"
    for name, start in (("PNG", b"\x89PNG"), ("CSV", b"row,round,bytes,mean")):
        link = figure.locator("a", has_text=name).get_attribute("href")
        blob = base64.b64decode(re.sub(r"^data:[^,]*,", "", link))
        assert blob.startswith(start)
    assert opened.said == []


@in_browser
def test_the_main_column_stays_in_sight_on_a_phone(browser: Any, written: Path) -> None:
    opened = OpenPage(browser, written, 390, "light")
    for place in range(3):
        table = opened.page.locator("table.results").nth(place)
        box = table.evaluate_handle("table => table.parentNode")
        box.evaluate("box => { box.scrollLeft = 10000 }")
        for column in (1, 2):  # the rows' names, and the main column
            seen = table.locator(f"tbody tr:first-child td:nth-child({column})").bounding_box()
            assert seen is not None
            assert seen["x"] >= 0
            assert seen["x"] + seen["width"] <= 390
        names, main = (
            table.locator(f"tbody tr:first-child td:nth-child({column})").bounding_box()
            for column in (1, 2)
        )
        assert main["x"] >= names["x"] + names["width"] - 1  # beside each other, not one over one


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_text_in_pictures_can_be_read(browser: Any, written: Path, width: int) -> None:
    # seen: on a phone the numbers of an axis were six pixels high
    opened = OpenPage(browser, written, width, "dark")
    script = "texts => texts.map(text => text.getBoundingClientRect().height)"
    sizes = opened.page.eval_on_selector_all("figure svg text", script)
    assert min(sizes) >= 8


CONTRASTS = Path(__file__).with_name("contrasts.js")


@pytest.fixture(scope="module")
def with_matrices(folder: Path) -> Path:
    """A page with matrices of two classes and shares of each kind, one near the paper's colour."""
    root = folder.parent / "matrices"
    for method, counts in (("fedlog", [[499, 1], [7, 600]]), ("fedavg", [[30, 30], [60, 0]])):
        cells = {"eval/client/confusion": counts}
        run = write_run(root / method, [0.5, 0.6], method=method, clients=[0.6, 0.4], columns=cells)
        (run / PARTITION).write_text(json.dumps(SPLIT))
        sealed_run(run)
    study = comparison.study(find([root]))
    (root / "r.html").write_text(page.render(study, pictures.pictures(study), "Matrices"))
    return root / "r.html"


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_text_has_contrast(
    browser: Any, written: Path, with_matrices: Path, width: int, scheme: str
) -> None:
    # seen: by night the "2" of a matrix was black on black
    for path in (written, with_matrices):
        opened = OpenPage(browser, path, width, scheme)
        found = opened.page.evaluate(CONTRASTS.read_text().split("\n", 1)[1])
        assert len(found) > 100
        assert [entry for entry in found if entry[0] < 3] == []
        assert [entry for entry in found if entry[0] < 4.5 and not entry[2]] == []


@pytest.mark.parametrize("color", ["#000000", "#ffffff", "#59636d", "#fdfdfd", INK])
def test_no_cell_of_a_matrix_has_a_colour_that_the_page_replaces(color: str) -> None:
    shades = confusion_pictures.shades_of(color)
    assert not {to_hex(shades(share / 4096)) for share in range(4097)} & {*drawing.ON_PAGE}
