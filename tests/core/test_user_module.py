"""Modules of users that cannot be trained are refused, and the sentence names their own part."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedgist.core import random
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import split_head

few = settings(max_examples=30)


class Returns(nn.Module):
    """A linear model whose output is made of its logits by a function."""

    def __init__(self, make: Callable[[Tensor], object], *, training_only: bool = False) -> None:
        super().__init__()
        self.last, self.make, self.training_only = nn.Linear(3, 2), make, training_only

    def forward(self, x: Tensor) -> object:
        logits = self.last(x)
        return logits if self.training_only and not self.training else self.make(logits)


MADE: dict[str, Callable[[Tensor], object]] = {
    "tuple": lambda z: (z, z),
    "list": lambda z: [z],
    "dict": lambda z: {"scores": z},
    "NoneType": lambda _: None,
    "float": lambda z: float(z.sum()),
    "SimpleNamespace": lambda z: SimpleNamespace(scores=z),
}


@few
@given(kind=st.sampled_from(sorted(MADE)), training_only=st.booleans(), deep=st.booleans())
def test_an_output_that_is_no_tensor_is_refused_by_its_type(
    *, kind: str, training_only: bool, deep: bool
) -> None:
    model = Returns(MADE[kind], training_only=training_only)
    whole = nn.Sequential(nn.Identity(), model) if deep else model
    with pytest.raises(TypeError, match=f"must return one tensor, it returns a {kind}"):
        split_head(lambda: copy.deepcopy(whole), (3,), 2, name="toy")


@pytest.mark.parametrize(
    "make",
    [
        lambda z: SimpleNamespace(logits=z, loss=None),
        lambda z: {"logits": z, "hidden": z + 1},
        lambda z: OrderedDict(hidden=z + 1, logits=z),
    ],
)
@pytest.mark.parametrize("training_only", [False, True])
def test_logits_of_an_output_are_taken(
    *, make: Callable[[Tensor], object], training_only: bool
) -> None:
    model = Returns(make, training_only=training_only)
    net, x = split_head(lambda: copy.deepcopy(model), (3,), 2).start(0), torch.randn(5, 3)
    # rejects the first of several tensors
    torch.testing.assert_close(net(x), model.last(x))


class Counting(nn.Module):
    """A layer that counts its calls in training in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("calls").add_(1)
        return x


class Divided(nn.Module):
    """A layer without finite outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0


class Flat(nn.Module):
    """A layer on rows as images of one channel."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.layer, self.rank = layer, rank

    def forward(self, x: Tensor) -> Tensor:
        shape = (len(x), 1, *(1 for _ in range(self.rank - 1)), -1)
        out: Tensor = self.layer(x.view(shape)).flatten(1)
        return out


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "InstanceNorm1d": (
        lambda: Flat(nn.InstanceNorm1d(1, track_running_stats=True), 1),
        "use track_running_stats=False",
    ),
    "InstanceNorm2d": (
        lambda: Flat(nn.InstanceNorm2d(1, track_running_stats=True), 2),
        "use track_running_stats=False",
    ),
    "Linear": (
        lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
        "leave out spectral_norm",
    ),
    "ParametrizedLinear": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        "leave out spectral_norm",
    ),
    "Counting": (Counting, "use a layer without such a buffer"),
}


@few
@given(st.sampled_from(sorted(LAYERS)), st.integers(0, 3))
def test_a_buffer_that_changes_in_place_is_named_with_its_layer(kind: str, place: int) -> None:
    make, cure = LAYERS[kind]

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
        layers.insert(place, make())
        return nn.Sequential(*layers, nn.Linear(4, 2))

    inner = ".layer" if kind.startswith("Instance") else ""
    with pytest.raises(ValueError, match="in training") as raised:
        split_head(build, (4,), 2, name="toy")
    # rejects the sentence that names FedAvg.loss, and no layer
    assert f"layer '{place}{inner}' of toy ({kind}) changes its buffer" in str(raised.value)
    assert cure in str(raised.value)


@pytest.mark.parametrize("kind", ["InstanceNorm1d", "Counting"])
def test_a_body_that_is_never_trained_may_have_such_layers(kind: str) -> None:
    make, _ = LAYERS[kind]
    layers = nn.Linear(4, 4), make(), nn.Linear(4, 2)
    whole = nn.Sequential(*layers)
    assert split_head(lambda: copy.deepcopy(whole), (4,), 2, trains=False).start(0)(
        torch.randn(3, 4)
    ).shape == (3, 2)


ENDS: dict[str, tuple[nn.Module, str]] = {
    "Softmax": (nn.Softmax(-1), "the loss adds it"),
    "LogSoftmax": (nn.LogSoftmax(-1), "the loss adds it"),
    "Sigmoid": (nn.Sigmoid(), "the loss adds it"),
    "LogSigmoid": (nn.LogSigmoid(), "the loss adds it"),
    "Tanh": (nn.Tanh(), "the last layer must be linear"),
    "ReLU": (nn.ReLU(), "the last layer must be linear"),
    "Softplus": (nn.Softplus(), "the last layer must be linear"),
}


@few
@given(st.sampled_from(sorted(ENDS)), st.integers(3, 7), st.integers(0, 99))
def test_an_activation_at_the_end_is_named(kind: str, width: int, seed: int) -> None:
    end, why = ENDS[kind]

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5), end)

    text = f"toy has a {kind} after its last layer '2': remove it, {why}"
    with pytest.raises(ValueError, match=text):
        split_head(build, (4,), 5, name="toy")


def test_outputs_that_are_not_finite_are_said() -> None:
    with pytest.raises(ValueError, match="the outputs of toy are not finite, even of numbers"):
        split_head(lambda: nn.Sequential(Divided(), nn.Linear(3, 2)), (3,), 2, name="toy")


def test_another_last_layer_is_still_asked_for() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'0' is not the last layer of toy: name the layer"):
        split_head(lambda: copy.deepcopy(whole), (2,), 2, name="toy", head="0")


@few
@given(
    place=st.integers(0, 3),
    number=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    wrapped=st.booleans(),
)
def test_weights_that_are_not_finite_are_named(*, place: int, number: float, wrapped: bool) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            list(model.parameters())[place].view(-1)[-1] = number
        return nn.DataParallel(model) if wrapped else model

    name = ("0.weight", "0.bias", "2.weight", "2.bias")[place]
    text = "toy is wrapped in DataParallel" if wrapped else f"'{name}' of toy is not finite"
    with pytest.raises(ValueError, match=text):
        split_head(build, (3,), 2, name="toy")


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch norm": lambda size: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size * size)),
    "batch norm of images": lambda _: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()),
    "batch norm of lines": lambda size: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(1)),
    "layer norm": lambda size: nn.Sequential(nn.Flatten(), nn.LayerNorm(size * size)),
    "group norm": lambda size: nn.Sequential(nn.Flatten(), nn.GroupNorm(1, size * size)),
}


@few
@given(kind=st.sampled_from(sorted(NORMS)), size=st.integers(1, 3), trains=st.booleans())
def test_two_rows_are_needed_where_torch_refuses_one(*, kind: str, size: int, trains: bool) -> None:
    def build() -> nn.Module:
        layers = NORMS[kind](size)
        if kind == "batch norm of lines":
            layers = nn.Sequential(layers, nn.Flatten())
        return nn.Sequential(layers, nn.Linear(size * size, 2))

    try:
        build().train()(torch.randn(1, 1, size, size))
        refused = False
    except ValueError:
        refused = "batch" in kind  # a group of one value is 0 in every row
    # rejects a rule by the kind of layer: batch norm of images of several pixels takes one row
    arch = split_head(build, (1, size, size), 2, trains=trains)
    assert arch.least_rows == 1 + (refused and trains)


class OwnHead(nn.Linear):
    """A head that does more than its weight and bias say."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnDropout(nn.Dropout):
    """A dropout that shifts its input in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x


class OwnNorm(nn.BatchNorm1d):
    """A batch norm with a forward of its own, which keeps torch's statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Assigning(nn.Module):
    """A layer that counts its calls in training in a buffer that it assigns anew."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        return x


def small(*between: nn.Module, last: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *between, nn.ReLU(), last or nn.Linear(4, 2))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].bias = module[0].bias
    return module


def hooked(place: int) -> nn.Module:
    module = small()
    module[place].register_forward_hook(lambda *_: None)
    return module


def zeroing() -> nn.Module:
    module = small()
    next(module.parameters()).register_hook(torch.zeros_like)
    return module


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(last=OwnHead(4, 2)), r"the head '2' of toy \(OwnHead\) has a forward of"),
        (lambda: hooked(2), "has a forward of its own or hooks"),
        (tied, r"'2.bias' of toy is also '0.bias' \(tied weights\)"),
        (lambda: small(nn.BatchNorm1d(4, momentum=None)), "momentum = None, a mean over all"),
        (lambda: small(OwnNorm(4)), r"layer '1' of toy \(OwnNorm\) changes its buffer"),
        (lambda: small(Assigning()), r"layer '1' of toy \(Assigning\) changes its buffer 'calls'"),
        (zeroing, "the parameter '0.weight' has a gradient hook"),
    ],
)
def test_what_is_not_done_in_training_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_head(make, (4,), 4 if make is tied else 2, name="toy")


def in_training(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a module's outputs in training, and its new statistics."""
    net = split_head(lambda: copy.deepcopy(module), (4,), 2, name="toy").start(0)
    run = Pass(torch.ones(len(x), dtype=torch.bool), random.key(0))
    return replace(net, run=run)(x), run.all_updates


def test_a_layer_of_ones_own_is_called_in_training() -> None:
    module, x = small(OwnDropout(0.5)), torch.randn(5, 4)
    torch.testing.assert_close(in_training(module, x)[0], module.train()(x))


class KeepsItsNorm(nn.Module):
    """A model whose batch norm and dropout stay in evaluation, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.norm.register_buffer("running_mean", torch.full((4,), 5.0))

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  # torch's signature
        super().train(mode)
        self.norm.eval()
        self.drop.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(x)))  # type: ignore[no-any-return]  # of a module


def test_layers_that_a_model_keeps_in_evaluation_stay_there() -> None:
    module, x = KeepsItsNorm(), torch.randn(5, 4)
    outputs, updates = in_training(module, x)
    torch.testing.assert_close(outputs, module.eval()(x))  # rejects dropout, and the batch's mean
    assert not updates
    learning = small(nn.BatchNorm1d(4)).eval()  # as a pretrained model comes
    assert in_training(learning, x)[1]


def test_hooks_of_layers_are_called() -> None:
    seen: list[int] = []
    module = small(nn.BatchNorm1d(4), nn.Linear(4, 4))
    for place in (0, 1, 2):
        module[place].register_forward_hook(lambda *_, place=place: seen.append(place))
    seen.clear()
    in_training(module, torch.randn(5, 4))
    assert {0, 1, 2} <= set(seen)
