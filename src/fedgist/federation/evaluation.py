"""Scores into the columns of the record."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.engines.engine import Score, Scores
from fedgist.federation.record import Line


def columns(scores: Scores, split: str) -> Line:
    """Return mean and spread over clients of accuracy and loss, as ``eval/<split>/...``.

    Each client counts alike, whatever its rows; clients without rows to be tested on do not count.
    The spread is the standard deviation over clients (population).
    """
    line: Line = {}
    for name, score in scores.models.items():
        prefix = f"eval/{split}/{name}_" if name else f"eval/{split}/"
        accuracy, loss = _shares(score)
        if len(accuracy):
            line[f"{prefix}accuracy_mean"] = float(accuracy.mean())
            line[f"{prefix}accuracy_std"] = float(accuracy.std(correction=0))
            line[f"{prefix}loss_mean"] = float(loss.mean())
    if scores.whole is not None:
        line["eval/global/accuracy"] = float(scores.whole.correct) / float(scores.whole.rows)
    return line


def per_client(scores: Scores, number: int, split: str) -> list[Line]:
    """Return one line a client."""
    lines: list[Line] = [
        {"round": number, "client": i, "split": split} for i in range(len(scores.models[""].rows))
    ]
    for name, score in scores.models.items():
        suffix = f"{name}_" if name else ""
        values = zip(score.correct.tolist(), score.loss.tolist(), score.rows.tolist(), strict=True)
        for line, (correct, loss, rows) in zip(lines, values, strict=True):
            line["rows"] = rows
            line[f"{suffix}accuracy"] = correct / rows if rows else None
            line[f"{suffix}loss"] = loss / rows if rows else None
    return lines


def _shares(score: Score) -> tuple[Tensor, Tensor]:
    tested = score.rows > 0
    rows = score.rows[tested].to(torch.float64)
    return score.correct[tested].to(torch.float64) / rows, score.loss[tested].to(
        torch.float64
    ) / rows
