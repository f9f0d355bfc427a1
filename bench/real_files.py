"""Train on 24 tables that nobody here wrote: `python bench/real_files.py`, in a quarter of an hour.

The tables are in published packages. pip fetches their wheels into a temporary folder. Nothing is
installed. Each table is first run as it is, and then with the settings that fedgist's errors
propose: two rounds of FedLog and FedAvg, ``predict``, ``evaluate`` and ``report``. The table of
results is printed, and written into ``docs/real-files.md``.

``--only NAME`` takes the tables whose name contains NAME, and only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PAGE = Path(__file__).resolve().parents[1] / "docs" / "real-files.md"
BEGIN, END = "<!-- made by bench/real_files.py -->\n", "<!-- end -->"
HEADS = ("table", "label; client", "fedgist about it as it is", "settings")
METHODS: Mapping[str, str] = MappingProxyType({"fedlog": "FedLog", "fedavg": "FedAvg"})
SCORES: Mapping[str, str] = MappingProxyType({"classes": "accuracy", "regression": "r2"})
VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "palmerpenguins": "0.1.6",
        "lifelines": "0.30.3",
        "scikit-survival": "0.28.0",
        "plotnine": "0.15.9",
        "vega_datasets": "0.9.0",
        "bokeh_sampledata": "2026.1",
        "ISLP": "0.6.0",
        "gapminder": "0.1",
        "plotly": "7.1.0",
        "statsmodels": "0.15.0",
    }
)
RECIPE = """\
[data]
name = "table"
path = "{path}"
label = "{label}"
{client}
[objective]
name = "{task}"
[model]
name = "mlp"
hidden = [8]
[train]
num_rounds = 2
local_epochs = 2
batch_size = 16
lr = 1e-2
[engine]
workers = 1
cohort_size = 10 # stated, not timed: a plan decides the last bits of the numbers
"""
BY_CLIENT = 'client = "{}"\n[partition]\nname = "natural"'
DEALT = '[partition]\nname = "iid"\n[clients]\nnum_clients = 3'
MEAN, MASK, DROP = (
    'data.missing="mean"',
    'data.missing_labels="mask"',
    'data.missing_clients="drop"',
)


@dataclass(frozen=True)
class RealFile:
    """A table in a package: its path there, its columns of labels and clients, and the settings.

    Without a client, rows are dealt to three clients. ``settings`` are those that a user adds after
    ``--set`` because fedgist refuses the table as it is.
    """

    package: str
    path: str
    label: str
    client: str = ""
    settings: tuple[str, ...] = ()
    task: str = "classes"

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.rpartition("/")[2]


def ignore(*columns: str) -> str:
    """Return the setting that leaves columns out."""
    return f"data.ignore={json.dumps(columns)}"


FILES = (
    RealFile("palmerpenguins", "palmerpenguins/data/penguins.csv", "species", "island", (MEAN,)),
    RealFile(
        "palmerpenguins",
        "palmerpenguins/data/penguins-raw.csv",
        "Species",
        "Island",
        (ignore("Individual ID", "Date Egg"), MEAN),
    ),
    RealFile("lifelines", "lifelines/datasets/lung.csv", "status", "inst", (MEAN, DROP)),
    RealFile("lifelines", "lifelines/datasets/ACTG175.csv", "cens", "strat", (MEAN,)),
    RealFile("lifelines", "lifelines/datasets/gbsg2.csv", "cens", "tgrade"),
    RealFile("lifelines", "lifelines/datasets/multicenter_aids_cohort.tsv", "D"),
    RealFile("scikit-survival", "sksurv/datasets/data/whas500.arff", "fstat"),
    RealFile("plotnine", "plotnine/data/mpg.csv", "drv", "manufacturer", (ignore("model"),)),
    RealFile(
        "plotnine",
        "plotnine/data/msleep.csv",
        "vore",
        "conservation",
        (MASK, ignore("name", "genus"), MEAN),
    ),
    RealFile("plotnine", "plotnine/data/midwest.csv", "inmetro", "state", (ignore("county"),)),
    RealFile(
        "vega_datasets",
        "vega_datasets/_data/seattle-weather.csv",
        "weather",
        settings=(ignore("date"),),
    ),
    RealFile(
        "vega_datasets",
        "vega_datasets/_data/airports.csv",
        "country",
        "state",
        (ignore("iata", "name", "city"),),
    ),
    RealFile("bokeh_sampledata", "bokeh_sampledata/_data/cows.csv", "age", "breed"),
    RealFile(
        "bokeh_sampledata",
        "bokeh_sampledata/_data/elements.csv",
        "metal",
        settings=(
            ignore(
                "symbol", "name", "atomic mass", "CPK", "electronic configuration", "ion radius"
            ),
            'data.missing_signs=["Ancient", "-"]',
            MEAN,
        ),
    ),
    RealFile("ISLP", "ISLP/data/OJ.csv", "Purchase", "StoreID"),
    RealFile("ISLP", "ISLP/data/Auto.csv", "origin", settings=(ignore("name"),)),
    RealFile("ISLP", "ISLP/data/Wage.csv", "wage", "region", task="regression"),
    RealFile("ISLP", "ISLP/data/Hitters.csv", "League", "Division", (MEAN,)),
    RealFile(
        "gapminder",
        "gapminder/gapminder.csv",
        "lifeExp",
        "continent",
        (ignore("country"),),
        "regression",
    ),
    RealFile("plotly", "plotly/package_data/datasets/tips.csv.gz", "sex", "day"),
    RealFile("statsmodels", "statsmodels/datasets/heart/heart.csv", "censors"),
    RealFile(
        "statsmodels",
        "statsmodels/datasets/statecrime/statecrime.csv",
        "violent",
        settings=(ignore("state"),),
        task="regression",
    ),
    RealFile("statsmodels", "statsmodels/datasets/fair/fair.csv", "rate_marriage", "religious"),
    RealFile("statsmodels", "statsmodels/datasets/randhie/randhie.csv", "mdvis", task="regression"),
)


def fetch(file: RealFile, folder: Path) -> Path:
    """Return the file, taken out of the wheel that pip downloads into the folder."""
    wheels = folder / file.package
    if not wheels.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        named = f"{file.package}=={VERSIONS[file.package]}"
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", wheels, named], check=True)
    (wheel,) = wheels.iterdir()
    table = folder / file.name
    with zipfile.ZipFile(wheel) as opened:
        table.write_bytes(opened.read(file.path))
    return table


def fedgist(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Give a command in the folder."""
    command = [sys.executable, "-m", "fedgist.cli", *map(str, words)]
    wide = os.environ | {"COLUMNS": "2000"}
    return subprocess.run(
        command, cwd=folder, env=wide, check=False, capture_output=True, text=True
    )


def trained(file: RealFile, folder: Path, method: str, settings: Sequence[str]) -> tuple[str, str]:
    """Run a method; return its final score, and fedgist's notes or error."""
    out = f"run-{method}"
    changes = [word for s in (f"method.name={method}", *settings) for word in ("--set", s)]
    done = fedgist(folder, "run", "recipe.toml", "--quiet", "--overwrite", "--out", out, *changes)
    if done.returncode:
        _, mark, error = done.stderr.partition("error: ")
        return "-", (mark + error).strip().replace("\n- ", "; ").replace(":;", ":")
    result = json.loads((folder / out / "result.json").read_text("utf-8"))
    score = SCORES[file.task]
    final = result[f"eval/client/{score}_mean"]["final"]
    return f"{final:.1%}" if score == "accuracy" else f"{score} {final:.2f}", says(result["notes"])


def says(notes: Sequence[str]) -> str:
    """Return a run's notes as a text."""
    return "; ".join(notes) or "no error, no note"


def row(file: RealFile, folder: Path) -> tuple[str, ...]:
    """Return the line about a file."""
    table = fetch(file, folder)
    client = BY_CLIENT.format(file.client) if file.client else DEALT
    recipe = RECIPE.format(path=table.name, label=file.label, client=client, task=file.task)
    (folder / "recipe.toml").write_text(recipe, "utf-8")
    _, first = trained(file, folder, "fedlog", ()) if file.settings else ("", "")
    runs = [trained(file, folder, method, file.settings) for method in METHODS]
    about = f"{first}. With the settings: {runs[0][1]}" if first else runs[0][1]
    used = [
        fedgist(folder, *words).returncode == 0
        for method in METHODS
        for words in (
            ("predict", f"run-{method}", table.name, "--client", 0, "--out", "p.csv"),
            ("evaluate", f"run-{method}", table.name),
        )
    ]
    used.append(fedgist(folder, "report", *(f"run-{m}" for m in METHODS)).returncode == 0)
    return (*fixed(file), about, *written(file.settings), *(score for score, _ in runs), ok(used))


def ok(used: Sequence[bool]) -> str:
    """Return whether all commands after a run ended well, and which did not."""
    names = ("predict", "evaluate") * len(METHODS) + ("report",)
    failed = [name for name, well in zip(names, used, strict=True) if not well]
    return f"no: {', '.join(dict.fromkeys(failed))}" if failed else "yes"


def fixed(file: RealFile) -> tuple[str, str]:
    """Return the cells that need no run: the file, and its columns."""
    columns = f"`{file.label}`; " + (f"`{file.client}`" if file.client else "three, dealt")
    return f"{file.name} ({file.package} {VERSIONS[file.package]})", columns


def written(settings: Sequence[str]) -> tuple[str]:
    """Return the cell with the settings."""
    return (", ".join(f"`{setting}`" for setting in settings) or "none",)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the table."""
    heads = (*HEADS, *METHODS.values(), "predict, evaluate, report")
    lines = [heads, ("---",) * len(heads), *rows]
    cells = ([textwrap.shorten(c.replace("|", "\\|"), 600) for c in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_table(page: str, table: str) -> str:
    """Return the page with the table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def main() -> None:
    """Fetch the files, run fedgist on each, print the table and write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="a part of the name of a table")
    only = parser.parse_args().only
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            if only in file.name:
                rows.append(row(file, Path(folder)))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    table = markdown(rows)
    print(table)
    if not only:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")


if __name__ == "__main__":
    main()
