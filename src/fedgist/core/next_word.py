"""Texts as tasks: after each word a model says what comes next.

A text is a row of word numbers, (length,). The first four numbers are no words: padding, the begin
and the end of a text, and a word that the vocabulary does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.metrics import LOSS, WORD_METRICS, Metric
from fedgist.core.tree import tree
from fedgist.errors import one_of

PADDING, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")  # what these numbers are called


@tree
class WordMarks:
    """What is kept of each text: sums over its places, each (rows,).

    ``loss`` in nats over ``places``, all that are counted; ``right`` words of those that are in the
    vocabulary, ``words``.
    """

    loss: Tensor
    places: Tensor
    right: Tensor
    words: Tensor


@dataclass(frozen=True)
class NextWord:
    """The next word at each place of a text: cross-entropy, and the metrics chosen.

    The loss of a text is the mean over its places, ends and unknown words included; that of a batch
    the mean over its texts. Judged by, a client's places count alike, whatever text they are in.
    Accuracy is over words of the vocabulary, without ends and unknown words, which are not guessed
    either: the likeliest word counts. ``smoothing`` smooths what models learn from.
    """

    num_words: int
    chosen: tuple[str, ...] = tuple(WORD_METRICS)
    smoothing: float = 0.0

    name = "next_word"
    text = True
    views = norm_parts = 1

    @property
    def outputs(self) -> int:
        """A logit for each word."""
        return self.num_words

    def __post_init__(self) -> None:
        for name in self.chosen:
            one_of(name, WORD_METRICS, "metric")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics chosen."""
        return tuple(WORD_METRICS[name] for name in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of texts, ``logits`` (batch, length, words), by their weight."""
        places = counted(batch)
        found = _cross_entropy(logits, batch.y, self.smoothing)
        of_text = torch.where(places, found, 0.0).sum(1) / places.sum(1).clamp(min=1)
        of_text = of_text if batch.weight is None else of_text * batch.weight
        return losses.masked_mean(of_text, batch.mask)

    def mark(self, logits: Tensor, batch: Batch) -> WordMarks:
        """Return the sums of each text."""
        places = counted(batch)
        words = places & (batch.y >= len(SPECIAL))
        guess = logits[..., len(SPECIAL) :].max(-1).indices + len(SPECIAL)
        found = _cross_entropy(logits, batch.y, 0.0)
        return WordMarks(
            torch.where(places, found, 0.0).sum(-1),
            places.sum(-1),
            (words & (guess == batch.y)).sum(-1),
            words.sum(-1),
        )

    def measure(self, marks: WordMarks, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the metrics chosen, (clients,) each, NaN where nothing is counted."""
        del y  # the marks say how many words there are

        def total(leaf: Tensor) -> Tensor:
            return torch.where(mask, leaf, 0).sum(1, dtype=torch.float64)

        loss = total(marks.loss) / total(marks.places)
        every = {"accuracy": total(marks.right) / total(marks.words), "perplexity": loss.exp()}
        return {name: every[name] for name in self.chosen} | {LOSS.name: loss}

    def confusion(self, marks: WordMarks, y: Tensor, mask: Tensor) -> None:
        """Return nothing: a table of all words by all words would be too large to look at."""
        del marks, y, mask


def counted(batch: Batch) -> Tensor:
    """Return which places of a batch of texts are counted, (batch, length)."""
    return (batch.y >= 0) & batch.mask.unsqueeze(-1)


def _cross_entropy(logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy of each place, (batch, length)."""
    log_p = F.log_softmax(logits, dim=-1)
    chosen = log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if smoothing:
        chosen = (1.0 - smoothing) * chosen + smoothing * log_p.mean(-1)
    return -chosen
