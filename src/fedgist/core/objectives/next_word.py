"""Next-word prediction: after each token of a text, a model predicts the next one.

A text is a row of token numbers, (length,). The first four numbers are special: padding, the begin
and the end of a text, and a word outside the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.objectives.metrics import LOSS, WORD_METRICS, Metric
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import one_of

PADDING, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")  # their names


@tree
class WordPredictions:
    """Sums over the tokens of each text, each (rows,).

    ``loss`` in nats is the sum over all ``places`` counted tokens. ``right`` of the ``words``
    tokens in the vocabulary are predicted correctly.
    """

    loss: Tensor
    places: Tensor
    right: Tensor
    words: Tensor


@dataclass(frozen=True)
class NextWord:
    """The objective of next-word prediction: cross-entropy per token, and the chosen metrics.

    The loss of a text is the mean over its tokens, including ends and unknown words. The loss of a
    batch is the mean over its texts. For evaluation, every token of a client has the same weight,
    regardless of text length. Per-token accuracy covers words of the vocabulary, without ends and
    unknown words; the prediction is the most likely of these words. ``smoothing`` smooths labels in
    training.
    """

    num_words: int
    chosen: tuple[str, ...] = tuple(WORD_METRICS)
    smoothing: float = 0.0

    name = "next_word"
    target: ClassVar[Target] = "words"
    labels: ClassVar[Target] = "words"
    loss_metric: ClassVar[Metric] = LOSS
    views = norm_parts = 1

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per token of the vocabulary."""
        return self.num_words

    def __post_init__(self) -> None:
        for name in self.chosen:
            one_of(name, WORD_METRICS, "metric")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(WORD_METRICS[name] for name in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of texts, (), for ``logits`` (batch, length, words), weighted."""
        per_token = losses.cross_entropy_of_each(logits, batch.y, self.smoothing)
        of_text = losses.mean_over_places(per_token, counted(batch))
        return losses.weighted_mean(of_text, batch.mask, batch.weight)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the next word at each place, (batch, length, words)."""
        return torch.softmax(logits, -1)

    def predict_rows(self, logits: Tensor, batch: Batch) -> WordPredictions:
        """Return the sums of each text, for ``logits`` (batch, length, words)."""
        places = counted(batch)
        words = places & (batch.y >= len(SPECIAL))
        guess = logits[..., len(SPECIAL) :].max(-1).indices + len(SPECIAL)
        per_token = losses.cross_entropy_of_each(logits, batch.y, 0.0)
        return WordPredictions(
            torch.where(places, per_token, 0.0).sum(-1),
            places.sum(-1),
            (words & (guess == batch.y)).sum(-1),
            words.sum(-1),
        )

    def measure(self, predictions: WordPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each, NaN without counted tokens.

        The predictions, ``y`` and ``mask`` are (clients, rows, ...).
        """
        del y  # the predictions say how many words there are

        def total(leaf: Tensor) -> Tensor:
            return torch.where(mask, leaf, 0).sum(1, dtype=torch.float64)

        loss = total(predictions.loss) / total(predictions.places)
        every = {
            "accuracy": total(predictions.right) / total(predictions.words),
            "perplexity": loss.exp(),
        }
        return {name: every[name] for name in self.chosen} | {LOSS.name: loss}

    def confusion(self, predictions: WordPredictions, y: Tensor, mask: Tensor) -> None:
        """Return nothing: a confusion matrix of all words would be too large."""
        del predictions, y, mask


def counted(batch: Batch) -> Tensor:
    """Return a mask of the counted tokens in a batch of texts, (batch, length)."""
    return (batch.y >= 0) & batch.mask.unsqueeze(-1)
