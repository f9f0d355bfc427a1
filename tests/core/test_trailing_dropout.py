"""Dropout before the head: which layers are moved to the head, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.layers import Pass, current, replace_layers
from fedgist.core.nets.net import Net, split_head

SHAPE, CLASSES = (1, 6, 6), 4


def plain(*end: nn.Module, width: int = 8) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, width), *end, nn.Linear(width, CLASSES)
    )


def pooled(*end: nn.Module, places: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.AdaptiveAvgPool2d(places),
        *end,
        nn.Linear(8 * places**2, CLASSES),
    )


class Twice(nn.Module):
    """One dropout layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x.flatten(1)))
        out: Tensor = self.head(self.drop(self.second(x).relu()))
        return out


class AsFunction(nn.Module):
    """Dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(36, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(self.first(x.flatten(1)), 0.5, training=self.training)
        out: Tensor = self.head(z)
        return out


class OffAsFunction(AsFunction):
    """Functions that drop nothing: with a rate of 0, and switched off."""

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(F.dropout(self.first(x.flatten(1)), 0.0, self.training), training=False)
        out: Tensor = self.head(z)
        return out


class Added(AsFunction):
    """A layer of dropout whose numbers are changed in place before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.first(x.flatten(1))).add_(1.0))
        return out


class OntoItself(Added):
    """Features with dropped ones added: none of them is 0."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.flatten(1))
        out: Tensor = self.head(z + self.drop(z))
        return out


class Recurrent(nn.Module):
    """Dropout within a recurrent layer, whose weights come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.flatten(1, 2))[0][:, -1])
        return out


MOVED = {
    "before the head": plain(nn.ReLU(), nn.Dropout(0.5)),
    "before ReLU": plain(nn.Dropout(0.5), nn.ReLU()),
    "before ReLU in place": plain(nn.Dropout(0.5), nn.ReLU(inplace=True)),
    "before Identity": plain(nn.Dropout(0.5), nn.Identity(), nn.ReLU()),
    "before Flatten": pooled(nn.Dropout(0.5), nn.Flatten(), places=2),
    "channels of one place": pooled(nn.Dropout2d(0.5), nn.Flatten(), places=1),
    "and another inside": plain(nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.5)),
}
STAYS = {
    "a function": AsFunction,
    "before a bounded activation": plain(nn.Dropout(0.5), nn.ReLU6()),
    "a layer called twice": Twice,
    "before another activation": plain(nn.Dropout(0.5), nn.Sigmoid()),
    "alpha dropout": plain(nn.SELU(), nn.AlphaDropout(0.5)),
    "added to what was not dropped": OntoItself,
    "changed in place": Added,
    "channels of several places": pooled(nn.Dropout2d(0.5), nn.Flatten(), places=2),
}
ELSEWHERE = {
    "none": plain(nn.ReLU()),
    "nothing is dropped": plain(nn.ReLU(), nn.Dropout(0.0)),
    "before batch norm": plain(nn.Dropout(0.5), nn.BatchNorm1d(8)),
    "inside": plain(nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU()),
    "within a recurrent layer": Recurrent,
    "functions that drop nothing": OffAsFunction,
}


def trained(build: Callable[[], nn.Module], seed: int = 0) -> Net:
    net = split_head(build, SHAPE, CLASSES).start(1)
    return replace(net, run=Pass(torch.ones(6, dtype=torch.bool), random.key(seed)))


def rows() -> Tensor:
    return torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))


def whole(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that a net was split from, with fedgist's layers in it."""
    with random.torch_draws(1):
        return replace_layers(build()).train()


@pytest.mark.parametrize("name", MOVED)
def test_dropout_before_the_head_acts_on_logits_and_never_on_features(name: str) -> None:
    arch = split_head(MOVED[name], SHAPE, CLASSES)
    assert arch.dropout is not None
    assert arch.dropout.p == 0.5
    assert arch.drops_features == ("inside" in name)
    if "inside" not in name:
        one, other = (trained(MOVED[name], seed).features(rows()) for seed in (0, 1))
        assert torch.equal(one, other)
    z = torch.ones(6, arch.feature_width)
    one, other = (trained(MOVED[name], seed).logits(z) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(replace(trained(MOVED[name]), run=None).logits(z), arch.start(1).logits(z))


@pytest.mark.parametrize("name", MOVED)
def test_logits_are_those_of_the_whole_module_in_the_same_pass_bit_for_bit(name: str) -> None:
    # rejects another draw of the key's counter than the body's own dropout would have taken
    net, module = trained(MOVED[name]), whole(MOVED[name])
    token = current.set(Pass(torch.ones(6, dtype=torch.bool), random.key(0)))
    try:
        expected = module(rows())
    finally:
        current.reset(token)
    assert torch.equal(net(rows()), expected)


@pytest.mark.parametrize("name", STAYS)
def test_dropout_that_cannot_be_moved_stays_in_the_body_and_is_said(name: str) -> None:
    arch = split_head(STAYS[name], SHAPE, CLASSES)
    assert arch.dropout is None
    assert arch.drops_features


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_layers_are_left_alone(name: str) -> None:
    arch = split_head(ELSEWHERE[name], SHAPE, CLASSES)
    assert arch.dropout is None
    assert not arch.drops_features


def test_names_and_parts_do_not_depend_on_dropout() -> None:
    build = plain(nn.ReLU(), nn.Dropout(0.5))
    with_it, without = (
        split_head(b, SHAPE, CLASSES) for b in (build, plain(nn.ReLU(), nn.Identity()))
    )
    assert with_it.layers == without.layers
    assert with_it.start(0).params.keys() == without.start(0).params.keys()


def test_texts_have_their_dropout_at_each_place() -> None:
    build = lambda: nn.Sequential(nn.Embedding(9, 5), nn.Dropout(0.5), nn.Linear(5, 9))  # noqa: E731
    arch = split_head(build, (4,), 9, words=9, target="words")
    assert arch.dropout is not None
    assert arch.start(0).features(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 5)
