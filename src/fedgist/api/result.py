"""Result of ``fedgist.run``: a line in a terminal, a table in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.errors import printable
from fedgist.report.formatting import bytes_text, html_table, paragraph, score_text
from fedgist.report.tables.run_tables import rounds_sheet
from fedgist.report.terminal.progress import main_column, title
from fedgist.runs.files.columns import DOWN_BYTES, UP_BYTES
from fedgist.runs.files.record import Line, totals
from fedgist.runs.finished.trained_models import ClientModel, trained_model
from fedgist.runs.round import ServerRun
from fedgist.world.world import World

ROUNDS_SHOWN = 12


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its record and its trained models.

    ``rounds`` holds one line per round, and ``clients`` one line per client and evaluation.
    ``summary`` describes the end of the run. ``folder`` is None if nothing was written.
    """

    rounds: list[Line]
    clients: list[Line]
    summary: dict[str, Any]
    folder: Path | None
    server_run: ServerRun
    world: World

    @property
    def ledger(self) -> list[Line]:
        """Payload bytes of each round, uploaded and downloaded."""
        columns = ("round", UP_BYTES, DOWN_BYTES)
        return [{name: line.get(name, 0) for name in columns} for line in self.rounds]

    def model(self, client: int | str) -> ClientModel:
        """Return a client's final model: an ``nn.Module`` from raw examples to logits.

        ``client`` is a client's number, its name, its number as a text, or ``"server/NAME"`` for a
        model of the server. The model maps examples (rows, ...) to logits (rows, classes).
        """
        return trained_model(self.server_run, self.world, client)

    def __repr__(self) -> str:
        """Return one line: the run's title, its last score over clients, and the bytes sent."""
        return f"<fedgist.Result: {self._line()}>"

    def _repr_html_(self) -> str:
        """Return the line and a table of rounds as HTML, for a notebook."""
        table = rounds_sheet("", self.rounds, *main_column(self.server_run.side), ROUNDS_SHOWN)
        return paragraph(self._line()) + html_table(table)

    def _line(self) -> str:
        side, sent = self.server_run.side, totals(self.rounds)
        column, measure = main_column(side)
        last = self.summary.get(column, {}).get("final")
        parts = [
            title(side, str(self.folder or "")),
            f"{self.server_run.round} rounds",
            *([] if last is None else [f"{measure.title.lower()} {score_text(last, measure)}"]),
            f"{bytes_text(sent['up_bytes'])} up, {bytes_text(sent['down_bytes'])} down",
        ]
        return printable("; ".join(parts))
