"""The next word's loss and metrics, against plain sums over places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedgist.core.batch import NO_WORD, Batch
from fedgist.core.objectives.next_word import END, SPECIAL, UNKNOWN, NextWord
from fedgist.core.tree import map_leaves
from fedgist.errors import InputError

WORDS, TEXTS, LENGTH = 9, 4, 5


def batch(seed: int, weight: Tensor | None = None) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(len(SPECIAL), WORDS, (TEXTS, LENGTH), generator=generator)
    y[0, 3:], y[1, 2], y[2, 1], y[2, 2:] = NO_WORD, UNKNOWN, END, NO_WORD
    mask = torch.tensor([True, True, True, False])
    logits = torch.randn(TEXTS, LENGTH, WORDS, generator=generator)
    return logits, Batch(torch.zeros_like(y), y, mask, weight=weight)


def losses_of(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> list[list[float]]:
    """Return the losses of the places that are counted, text by text."""
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    return [
        [
            float(loss(z.unsqueeze(0), label.unsqueeze(0)))
            for z, label in zip(row, labels, strict=True)
            if label >= 0
        ]
        for row, labels in zip(logits, y, strict=True)
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_a_mean_over_texts_of_means_over_places(smoothing: float) -> None:
    logits, rows = batch(0)
    means = [sum(found) / len(found) for found in losses_of(logits, rows.y, smoothing)[:3]]
    loss = NextWord(WORDS, smoothing=smoothing).loss(logits, rows)
    assert float(loss) == pytest.approx(sum(means) / 3, rel=1e-5)
    weight = torch.tensor([1.0, 2.0, 0.5, 9.0])
    weighted = NextWord(WORDS, smoothing=smoothing).loss(logits, batch(0, weight=weight)[1])
    expected = sum(m * float(w) for m, w in zip(means, weight, strict=False)) / 3
    assert float(weighted) == pytest.approx(expected, rel=1e-5)


def test_metrics_count_words_and_places_of_all_texts_alike() -> None:
    objective = NextWord(WORDS)
    parts = [batch(seed) for seed in (1, 2)]
    marks = [objective.predict_rows(logits, rows) for logits, rows in parts]
    stack = map_leaves(lambda *leaf: torch.stack(leaf), *marks)
    y, mask = (torch.stack([getattr(rows, name) for _, rows in parts]) for name in ("y", "mask"))
    found = objective.measure(stack, y, mask)
    for client, (logits, rows) in enumerate(parts):
        places = [loss for text in losses_of(logits, rows.y)[:3] for loss in text]
        words = [
            (int(z[len(SPECIAL) :].argmax()) + len(SPECIAL), int(label))
            for row, labels in zip(logits[:3], rows.y[:3], strict=True)
            for z, label in zip(row, labels, strict=True)
            if label >= len(SPECIAL)
        ]
        right = sum(guess == label for guess, label in words) / len(words)
        assert float(found["accuracy"][client]) == pytest.approx(right)
        assert float(found["loss"][client]) == pytest.approx(sum(places) / len(places), rel=1e-5)
        assert float(found["perplexity"][client]) == pytest.approx(
            math.exp(sum(places) / len(places)), rel=1e-5
        )


def test_absent_texts_weigh_nothing_whatever_they_hold() -> None:
    objective = NextWord(WORDS)
    logits, rows = batch(3)
    other, wild = logits.clone(), rows.y.clone()
    other[3], wild[3] = 1e3, END
    changed = Batch(rows.x, wild, rows.mask)
    assert torch.equal(objective.loss(logits, rows), objective.loss(other, changed))
    assert objective.predict_rows(logits, rows) == objective.predict_rows(other, changed)


def test_a_text_without_a_known_word_has_no_accuracy() -> None:
    objective = NextWord(WORDS)
    y = torch.tensor([[UNKNOWN, END, NO_WORD]])
    marks = objective.predict_rows(torch.zeros(1, 3, WORDS), Batch(y, y, torch.tensor([True])))
    line = map_leaves(lambda leaf: leaf.unsqueeze(0), marks)
    found = objective.measure(line, y.unsqueeze(0), torch.tensor([[True]]))
    assert math.isnan(float(found["accuracy"]))
    assert float(found["perplexity"]) == pytest.approx(WORDS)


def test_unknown_metrics_are_named() -> None:
    with pytest.raises(InputError, match=r"unknown metric .auroc.*known: accuracy, perplexity"):
        NextWord(WORDS, ("auroc",))
