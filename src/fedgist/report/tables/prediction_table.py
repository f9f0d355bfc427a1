"""Predictions of new examples as lines of a CSV file, by the task's target."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedgist.core.objectives.target import Target
from fedgist.runs.finished.trained_models import labels_in, sayable

DIGITS = ".6g"


def prediction_lines(
    target: Target, answers: Tensor, names: Sequence[str], files: Sequence[str] | None
) -> list[list[str]]:
    """Return a header, and a line for each example.

    ``answers`` (rows, ...) are probabilities or numbers, ``names`` those of what is predicted, and
    ``files`` the examples' file names, if they are files. A line has the most likely class and the
    probabilities of all; the next word and its probability; the labels and the probabilities of
    all; or the predicted numbers.
    """
    first = "row" if files is None else "file"
    lines = {
        "words": _words,
        "labels": _labels,
        "numbers": _numbers,
        "own": _numbers,
    }.get(target, _classes)(answers, names)
    keys = [str(row) for row in range(len(answers))] if files is None else list(files)
    header, *rest = lines
    return [[first, *header], *([key, *line] for key, line in zip(keys, rest, strict=True))]


def _classes(answers: Tensor, names: Sequence[str]) -> list[list[str]]:
    lines = [["label", *(f"p_{name}" for name in names)]]
    return lines + [[names[row.index(max(row))], *_texts(row)] for row in answers.tolist()]


def _labels(answers: Tensor, names: Sequence[str]) -> list[list[str]]:
    lines = [["labels", *(f"p_{name}" for name in names)]]
    return lines + [[" ".join(labels_in(row, names)), *_texts(row)] for row in answers.tolist()]


def _numbers(answers: Tensor, names: Sequence[str]) -> list[list[str]]:
    # all digits that their type holds: a number may be large, and what matters of it small
    return [list(names), *([str(value) for value in row] for row in answers.flatten(1).numpy())]


def _words(answers: Tensor, names: Sequence[str]) -> list[list[str]]:
    likeliest = sayable(answers).max(1)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [["next", "p"], *([names[word], f"{p:{DIGITS}}"] for word, p in pairs)]


def _texts(row: Sequence[float]) -> list[str]:
    return [f"{value:{DIGITS}}" for value in row]
