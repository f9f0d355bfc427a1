"""What every engine is: one verb between a server and its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from fedgist.core.message import message
from fedgist.core.method import Context, Order, Replies

Split = Literal[
    "client", "test", "train", "validation"
]  # a client's own test rows, the whole test set, ...


@message(reduce="each")
class Score:
    """How models do on rows.

    Sums, so that means can be taken over rows or clients; stacked, one line a client.
    """

    correct: Tensor
    loss: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of all clients by name of the model (``""``, ``"finetuned"``).

    Of the whole test set for one model.
    """

    models: Mapping[str, Score]
    whole: Score | None = None


@dataclass(frozen=True)
class Answer:
    """What a stage brought.

    The replies, the uploads refused and why, and each client's mean training loss.
    """

    replies: Replies
    refused: tuple[tuple[int, str], ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)
    upload_bytes: int = 0


class Engine(Protocol):
    """Where clients live. ``ask`` and ``score`` reach them.

    Nothing else separates a simulation from a federation.
    """

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any]) -> Answer:
        """Send each order with its download; return what came back."""

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Any], split: Split
    ) -> Scores:
        """Evaluate what each client would hold after this download."""

    def client(self, ctx: Context, order: Order, down: Any) -> Any:
        """Return what one client holds after this download (in a simulation)."""

    def state(self) -> dict[str, Tensor]:
        """Return what clients keep, by name, for a checkpoint."""

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's state back."""

    def close(self) -> None:
        """Stop; leave no process behind."""
