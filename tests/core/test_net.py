"""Nets against the modules they are split from: body and head together compute the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import split_head, stacked
from fedgist.core.nets.parts import Part


def small() -> nn.Module:
    """Convolution, batch norm, dropout and two linear layers."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 3, 3),
            bn=nn.BatchNorm2d(3),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(12, 5),
            drop=nn.Dropout(0.5),
            fc2=nn.Linear(5, 4),
        )
    )


class Nested(nn.Module):
    """A user's module whose head is neither at the top nor registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.ModuleDict({"head": nn.Linear(5, 4, bias=False)})
        self.first = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail["head"](self.first(x.flatten(1)).tanh())
        return out


def seeded_module(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], str | None, str]] = [
    (small, (1, 6, 6), None, "fc2"),
    (Nested, (2, 3), "tail.head", "tail.head"),
    (lambda: nn.Linear(3, 4), (3,), None, "1"),
    (lambda: nn.Linear(6, 4), (2, 3), None, "1"),
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten()), (3,), None, "0"),
]


@pytest.mark.parametrize(
    ("build", "shape", "asked", "head"), CASES, ids=["small", "nested", "bare", "images", "last"]
)
def test_body_and_head_together_are_the_module(
    build: Callable[[], nn.Module], shape: tuple[int, ...], asked: str | None, head: str
) -> None:
    arch = split_head(build, shape, 4, head=asked)
    net, whole = arch.start(7), seeded_module(build, 7).eval()
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    expected = whole(x.flatten(1) if isinstance(whole, nn.Linear) else x)
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(net.logits(net.features(x)), net(x))
    assert arch.head == head
    assert net.features(x).shape == (5, arch.feature_width)
    assert sum(p.numel() for p in net.params.values()) == sum(p.numel() for p in whole.parameters())
    if not isinstance(whole, nn.Linear):
        assert {n: p.shape for n, p in net.params.items()} == {
            n: p.shape for n, p in whole.named_parameters()
        }
        assert set(net.buffers) == {n for n, b in whole.named_buffers() if b.dim()}


def test_training_mode_is_the_modules_with_gradients() -> None:
    net = split_head(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        (3,),
        2,
    ).start(1)
    whole = seeded_module(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), 1
    )
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    run = Pass(torch.ones(8, dtype=torch.bool), random.key(0))
    params = {n: p.clone().requires_grad_() for n, p in net.params.items()}
    live = type(net)(params, net.buffers, net.arch, run)
    gradients = torch.autograd.grad(live(x).square().sum(), list(params.values()))
    whole(x).square().sum().backward()
    for (name, grad), p in zip(
        zip(params, gradients, strict=True), map(whole.get_parameter, params), strict=True
    ):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)
    after = net.with_arrays(run.updates)
    torch.testing.assert_close(
        after.buffers["1.running_var"], dict(whole.named_buffers())["1.running_var"]
    )
    torch.testing.assert_close(after(x), whole.eval()(x))


def test_other_rows_within_a_step_have_a_mask_and_draws_of_their_own() -> None:
    # rejects the mask of the client's own batch, draws that are the same for both, and running
    # statistics that forget one of the two batches
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 2)
        )

    net, module = split_head(build, (3,), 2).start(1), seeded_module(build, 1)
    assert isinstance(module, nn.Sequential)
    norm = module[:2]
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(8, 3, generator=generator), torch.randn(5, 3, generator=generator)
    run = Pass(torch.ones(8, dtype=torch.bool), random.key(0))
    live = replace(net, run=run)
    present = torch.tensor([True, True, True, True, False])
    first = live(x)
    seen = live.for_rows(present)(other)
    assert seen.shape == (5, 2)
    absent = other.clone()
    absent[4] = 99.0
    again = replace(net, run=Pass(run.mask, random.key(0)))
    again(x)
    torch.testing.assert_close(again.for_rows(present)(absent)[:4], seen[:4])
    assert not torch.equal(live.for_rows(run.mask)(x), first)  # other draws of the same rows
    norm(x)
    norm(other[:4])
    norm(x)
    after = net.with_arrays(run.updates)
    torch.testing.assert_close(after.buffers["1.running_mean"], module.get_buffer("1.running_mean"))
    torch.testing.assert_close(after.buffers["1.running_var"], module.get_buffer("1.running_var"))
    assert net.for_rows(present) is net  # in evaluation mode


def test_a_user_module_is_told_whether_it_is_being_trained() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x + 1.0 if self.training else x)
            return out

    net = split_head(Asks, (2,), 2).start(0)
    x = torch.zeros(1, 2)
    live = type(net)(
        net.params, net.buffers, net.arch, Pass(torch.ones(1, dtype=torch.bool), random.key(0))
    )
    assert torch.equal(net.features(x), x)
    assert torch.equal(live.features(x), x + 1)
    assert torch.equal(net.features(x), x)


class Shared(nn.Module):
    """One batch norm in two places, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.block = nn.Sequential(nn.Linear(3, 3), self.bn)
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.block(self.bn(x)))
        return out


def test_a_layer_that_stands_at_two_depths_learns_one_set_of_statistics() -> None:
    net, whole = split_head(Shared, (3,), 2).start(0), seeded_module(Shared, 0)
    run = Pass(torch.ones(8, dtype=torch.bool), random.key(0))
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(type(net)(net.params, net.buffers, net.arch, run)(x), whole(x))
    assert set(run.updates) == set(net.buffers)
    torch.testing.assert_close(net.with_arrays(run.updates)(x), whole.eval()(x))


class Reads(nn.Module):
    """A user's module that asks its layers for their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc1, self.fc2 = (
            nn.Conv2d(1, 2, 3),
            nn.BatchNorm2d(2),
            nn.Linear(8, 3),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn(self.conv(x)).view(
            len(x), self.conv.out_channels * self.bn.num_features * self.conv.stride[0], -1
        )
        out: Tensor = self.fc2(self.fc1(z.reshape(-1, self.fc1.in_features)))
        return out


def test_a_user_module_may_read_the_sizes_of_its_layers() -> None:
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        split_head(Reads, (1, 4, 4), 2).start(0)(x), seeded_module(Reads, 0).eval()(x)
    )


def test_parts_divide_the_arrays() -> None:
    net = split_head(small, (1, 6, 6), 4).start(0)
    parts: dict[Part, set[str]] = {
        "head": {"fc2.weight", "fc2.bias"},
        "body": {"conv.weight", "conv.bias", "bn.weight", "bn.bias", "fc1.weight", "fc1.bias"},
        "none": set(),
    }
    running = {"bn.running_mean", "bn.running_var"}
    for part, names in parts.items():
        assert set(net.part(part)) == names
        assert set(net.state(part)) == (names | running if part == "body" else names)
    assert set(net.part("all")) == parts["head"] | parts["body"]
    assert set(net.state()) == set(net.part("all")) | running
    assert set(net.body) == parts["body"]


def test_a_layer_whose_name_begins_like_the_heads_belongs_to_the_body() -> None:
    # rejects a prefix without its dot
    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(fc2=nn.Linear(3, 5), fc=nn.Linear(5, 2)))

    assert set(split_head(build, (3,), 2, head="fc").start(0).part("head")) == {
        "fc.weight",
        "fc.bias",
    }


def test_replacing_arrays_makes_another_net_and_leaves_the_first_alone() -> None:
    net = split_head(small, (1, 6, 6), 4).start(0)
    weight, bias = torch.ones(4, 5), torch.arange(4.0)
    other = net.with_head(weight, bias).with_arrays({"bn.running_mean": torch.ones(3)})
    z = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other.logits(z), z @ weight.T + bias)
    assert float(other.buffers["bn.running_mean"].sum()) == 3.0
    assert float(net.buffers["bn.running_mean"].sum()) == 0.0
    assert other.params["conv.weight"] is net.params["conv.weight"]
    with pytest.raises(ValueError, match=r"model has no array 'fc3\.weight'"):
        net.with_arrays({"fc3.weight": weight})


def test_a_start_is_a_function_of_its_seed_and_moves_no_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    arch = split_head(small, (1, 6, 6), 4)
    first, again, other = arch.start(3), arch.start(3), arch.start(4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first.params[n], again.params[n]) for n in first.params)
    assert not torch.equal(first.params["conv.weight"], other.params["conv.weight"])
    first.params["conv.weight"].add_(1.0)
    assert not torch.equal(first.params["conv.weight"], arch.start(3).params["conv.weight"])


def test_stacked_copies_run_under_vmap_like_the_one() -> None:
    net = split_head(small, (1, 6, 6), 4).start(0)
    x = torch.randn(3, 2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for arch in (net.arch.with_layout(each=True), net.arch.with_layout(each=False)):
        laid = type(net)(net.params, net.buffers, arch)
        out = torch.func.vmap(lambda n, x: n(x))(stacked(laid, 3), x)
        torch.testing.assert_close(
            out, torch.stack([net(images) for images in x]), rtol=1e-4, atol=1e-5
        )


class Wide(nn.Module):
    """A body that gives images to a head that takes columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 5, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(x))
        return out


@pytest.mark.parametrize(
    ("build", "shape", "head", "text"),
    [
        (nn.ReLU, (3,), None, "toy has no linear layer to be the head"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            (3,),
            "fc",
            "toy has no linear layer 'fc'; its linear layers: 0",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 5)),
            (3,),
            None,
            "'0' of toy has 5 outputs, the data have 2 classes",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
            (3,),
            None,
            "toy has a Softmax after its last layer '0': remove it, the loss adds it",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            (2,),
            "0",
            "'0' is not the last layer of toy",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            (3,),
            "0",
            "'0' is not the last layer of toy",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
            (5,),
            None,
            r"does not accept input of shape \[5\]",
        ),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2)),
            (5,),
            None,
            "gives 4 features, but its head '1' takes 3",
        ),
        (Wide, (1, 6, 6), None, r"gives shape \[5, 4, 4\], but its head 'fc' takes 4"),
    ],
)
def test_what_does_not_fit_is_said(
    build: Callable[[], nn.Module], shape: tuple[int, ...], head: str | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        split_head(build, shape, 2, name="toy", head=head)
