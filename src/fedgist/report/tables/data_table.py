"""What the rows are that runs were made of: by client and class, and how they were read."""

from __future__ import annotations

from collections.abc import Sequence

from fedgist.errors import listed
from fedgist.report.formatting import NONE, Sheet
from fedgist.report.tables.client_scores import over_runs
from fedgist.report.tables.comparison import Study
from fedgist.runs.files.prediction_file import VALIDATION
from fedgist.runs.finished.finished_run import FinishedRun

MOST_CLIENTS = 50  # with more, a row per client says nothing at a glance
MOST_CLASSES = 12  # with more, there is one column for all
MOST_INPUTS = 60


def data_sheets(study: Study) -> list[Sheet]:
    """Return the tables of a study's data: how they were read, and the rows of each client.

    They are those of the first run; a study of several data sets has a note that says so.
    """
    runs = [run for row in study.rows for run in row.runs]
    first = next((run for run in runs if run.split), None)
    if first is None or first.split is None:
        return []
    facts = [fact for fact in _facts(first) if fact[1]]
    several = len({run.division for run in runs}) > 1
    caption = f"numbers of rows: seed {first.seed}, division {first.division}" if several else ""
    sheets = [Sheet("Data", ("", "value"), tuple(facts), caption)]
    if 1 < len(first.split["train"]) <= MOST_CLIENTS:
        sheets.append(_by_client(first, study.rows[0].runs))
    return sheets


def classes_of(run: FinishedRun) -> list[str]:
    """Return the names of the classes; none where rows have no class and count as one."""
    names = [str(name) for name in (run.split or {}).get("classes", ())]
    return [] if names == ["rows"] else names


def _facts(run: FinishedRun) -> list[tuple[str, str]]:
    """Return what is known of the rows, as pairs of a name and a text."""
    split, section = run.split or {}, run.recipe.get("data", {})
    counts = split["train"]
    inputs = split.get("inputs") or []
    tested = sum(score.rows for score in over_runs([run], run.first).values())
    said = run.predictions
    held = 0 if said is None else len(said.of(VALIDATION).row)
    fractions = {key: section.get(key) for key in ("test_fraction", "folds", "repeats", "divide")}
    stated = [f"{key} = {value}" for key, value in fractions.items() if value not in {None, 1}]
    return [
        ("source", " ".join(str(section[key]) for key in ("name", "path") if key in section)),
        ("training rows", str(sum(map(sum, counts)))),
        ("validation rows", f"{held:.0f}" if held else ""),
        ("test rows", f"{tested:.0f}" if tested else ""),
        ("classes", listed(classes, 20) if (classes := classes_of(run)) else ""),
        ("inputs", f"{len(inputs)}: {listed(inputs, MOST_INPUTS)}" if inputs else ""),
        ("ignored columns", ", ".join(section.get("ignore") or [])),
        ("missing numbers", str(section.get("missing", "")) or "refused"),
        ("divided by", ", ".join(stated)),
        ("normalized by", str(section.get("normalize", ""))),
        ("notes", "; ".join(str(note) for note in run.result.get("notes", []))),
    ]


def _by_client(run: FinishedRun, runs: Sequence[FinishedRun]) -> Sheet:
    """Return a table of the clients: model, training rows of each class, and test rows."""
    split = run.split or {}
    classes = classes_of(run)
    names, models = split.get("clients") or [], split.get("models") or []
    tested = over_runs(runs, run.first)
    few = len(classes) <= MOST_CLASSES
    lines = []
    for client, counts in enumerate(split["train"]):
        lines.append(
            (
                str(names[client]) if names else str(client),
                str(models[client]) if models else NONE,
                str(sum(counts)),
                *(map(str, counts) if few and len(classes) > 1 else ()),
                f"{tested[client].rows:.0f}" if client in tested else "0",
            )
        )
    head = ("client", "model", "training rows", *(classes if few and len(classes) > 1 else ()))
    caption = f"training rows of seed {run.seed}"
    caption += f", division {run.division}" if len({r.division for r in runs}) > 1 else ""
    return Sheet(
        "Data by client", (*head, "test rows"), tuple(lines), f"{caption}; test rows of all"
    )
