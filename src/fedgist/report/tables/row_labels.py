"""Names that a reader gives to rows, instead of their methods and settings: ``--label``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedgist.errors import ReportError, did_you_mean
from fedgist.report.tables.comparison import RunGroup, group
from fedgist.runs.finished.finished_run import FinishedRun


def labelled(runs: Sequence[FinishedRun], texts: Sequence[str]) -> list[FinishedRun]:
    """Return the runs with the names of their rows, by texts NAME=ROW.

    ROW is a folder with the runs of one row, or the row's label, or its method. Both sides may
    hold an equals sign: the first one counts after which there is a row.
    """
    groups, _ = group([run for run in runs if run.usable])
    names: dict[str, str] = {}
    for text in texts:
        name, row = _named(text, groups)
        if row in names:
            raise ReportError(f"--label: two names for {row}: {names[row]!r} and {name!r}")
        names[row] = name
    count = Counter(names.get(members.label, members.label) for members in groups)
    if doubled := [name for name, times in count.items() if times > 1]:
        raise ReportError(f"--label: two rows would have the name {doubled[0]!r}")
    label_of = {
        run.folder: names[members.label]
        for members in groups
        if members.label in names
        for run in members.runs
    }
    return [replace(run, label=label_of.get(run.folder, "")) for run in runs]


def _named(text: str, groups: Sequence[RunGroup]) -> tuple[str, str]:
    """Return the name that a text gives, and the label of the row that gets it."""
    for name, row in _splits(text):
        rows = list(_rows(row, groups))
        if len(rows) > 1:
            some = ", ".join(map(repr, rows))
            raise ReportError(f"--label {text!r}: {row} stands for {len(rows)} rows: {some}")
        if rows:
            return name, rows[0]
    labels = [members.label for members in groups]
    if not list(_splits(text)):
        raise ReportError(f"--label {text!r}: write NAME=ROW, such as 'Ours=runs/a'")
    _, row = next(_splits(text))
    raise ReportError(
        f"--label {text!r}: there is no row or folder {row!r}{did_you_mean(row, labels)}"
    )


def _splits(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text before and after each equals sign, if neither is empty."""
    for place, sign in enumerate(text):
        name, row = text[:place].strip(), text[place + 1 :].strip()
        if sign == "=" and name and row:
            yield name, row


def _rows(text: str, groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield the labels of the rows that a text stands for."""
    by_label = [members.label for members in groups if members.label == text]
    by_method = [members.label for members in groups if members.method == text]
    folder = Path(text).resolve()
    by_folder = [
        members.label
        for members in groups
        if any(run.folder.resolve().is_relative_to(folder) for run in members.runs)
    ]
    yield from by_label or by_method or by_folder
