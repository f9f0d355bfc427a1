"""The compiled convolution beside torch's, in every shape, in a model and in a run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

import fedgist
from fedgist.core import random
from fedgist.core.nets import convolution
from fedgist.core.nets.compiled.compiled_convolution import Settings, convolve
from fedgist.core.nets.kernel_choice import use_kernels
from fedgist.core.nets.layers import Pass, current, replace_layers
from fedgist.core.nets.net import split_head
from fedgist.engines.plans import kernel_timing
from fedgist.engines.plans import plan as stacking_plan
from fedgist.engines.plans.kernel_timing import faster_layers
from fedgist.engines.plans.plan import Plan
from fedgist.engines.plans.timing import choose_plans
from fedgist.methods import METHODS
from fedgist.models import MODELS
from fedgist.recipe.overrides import ClientGroup
from fedgist.runs.prepare import hosting_of
from fedgist.runs.round import start_server
from fedgist.testing.small_worlds import Trace, trace, world
from method_objects import each

pytestmark = pytest.mark.usefixtures("compiled")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    out = F.conv2d(x, weight, bias, padding=settings.padding)
    out = F.max_pool2d(out, 2) if settings.pool else out
    return out.relu() if settings.relu else out


sizes = st.fixed_dictionaries(
    {
        "clients": st.integers(1, 3),
        "batch": st.sampled_from([1, 3, 10, 16, 17, 50, 65, 130]),
        "channels": st.integers(1, 4),
        "out": st.integers(1, 12),
        "taps": st.tuples(st.integers(1, 7), st.integers(1, 7)),
        "more": st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "padding": st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "pool": st.booleans(),
        "relu": st.booleans(),
        "bias": st.booleans(),
        "innermost": st.booleans(),
    }
)


@given(sizes)
def test_the_layer_and_its_gradients_are_torchs_in_every_shape(size: dict[str, Any]) -> None:
    # rejects a vector that passes the end of a row, and images of a batch beyond the first 64
    settings = Settings(size["padding"], size["pool"], size["relu"])
    taps, clients = size["taps"], size["clients"]
    sides = [
        max(1, t + 1 + m - 2 * p)
        for t, m, p in zip(taps, size["more"], settings.padding, strict=True)
    ]
    if any(s + 2 * p - t < 1 for s, p, t in zip(sides, settings.padding, taps, strict=True)):
        return
    x = numbers(clients, size["batch"], size["channels"], *sides)
    if size["innermost"]:  # as the layer before leaves its images
        x = x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    weight = numbers(clients, size["out"], size["channels"], *taps, seed=1)
    bias = numbers(clients, size["out"], seed=2) if size["bias"] else None
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    dims = 0, 0, None if bias is None else 0, None
    ours = vmap(convolve, dims)(x, weight, bias, settings)
    alone = [
        by_torch(x[k], weight[k], None if bias is None else bias[k], settings)
        for k in range(clients)
    ]
    theirs = torch.stack(alone)
    scale = math.sqrt(size["channels"] * taps[0] * taps[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)
    weights = numbers(*ours.shape, seed=3)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-3)


def test_gradients_of_single_rows_are_torchs() -> None:
    # private steps take them: a batching rule within a batching rule
    settings = Settings((1, 1), pool=True, relu=True)
    x, weight, bias = numbers(2, 5, 3, 8, 8), numbers(2, 4, 3, 3, 3, seed=1), numbers(2, 4, seed=2)

    def rows(layer: Any) -> Any:
        def loss(weight: Tensor, bias: Tensor, row: Tensor) -> Tensor:
            out: Tensor = layer(row.unsqueeze(0), weight, bias, settings)
            return (out * out).sum()

        of_rows = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))
        return vmap(of_rows)(weight, bias, x)

    for one, other in zip(rows(convolve), rows(by_torch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pool", [True, False])
def test_a_number_that_is_none_stays_so(*, pool: bool) -> None:
    # rejects a maximum, or a cut at zero, that turns NaN into a number
    x = numbers(2, 1, 6, 6)
    x[1, 0, 2, 3] = torch.nan
    settings = Settings((0, 0), pool=pool, relu=True)
    weight = numbers(3, 1, 3, 3)
    ours, theirs = (f(x, weight, None, settings) for f in (convolve, by_torch))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert bool(ours.isnan().any())
    assert not bool(ours[0].isnan().any())


def test_each_client_has_the_same_bits_in_any_stack() -> None:
    x, weight = numbers(5, 7, 2, 9, 9), numbers(5, 6, 2, 3, 3, seed=1)
    layer = vmap(lambda images, w: convolve(images, w, None, Settings(relu=True)))
    assert torch.equal(layer(x, weight)[2:4], layer(x[2:4], weight[2:4]))


def test_threads_change_no_bit() -> None:
    # a batch of three pieces: rejects sums in the order in which threads end
    layer = [numbers(200, 2, 9, 9), numbers(6, 2, 3, 3, seed=1), numbers(6, seed=2)]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        inputs = [t.clone().requires_grad_() for t in layer]
        x, weight, bias = inputs
        out = convolve(x, weight, bias, Settings(pool=True, relu=True))
        results.append([out, *torch.autograd.grad((out * out).sum(), inputs)])
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# layers in a model


def small() -> nn.Sequential:
    layers = [nn.Conv2d(3, 6, 3), nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten())


def test_pooling_relu_and_dropout_of_channels_join_the_convolution_and_change_nothing() -> None:
    torch.manual_seed(0)
    plain = replace_layers(small())
    joined = copy.deepcopy(plain)
    use_kernels(joined, {"0": "compiled", "4": "compiled"})
    kinds = [type(layer).__name__ for layer in joined.children()]
    assert kinds == ["Conv2d", "Identity", "Identity", "Dropout", "Conv2d", "Identity", "Flatten"]
    x = numbers(9, 3, 12, 12)
    out = []
    for module in (plain, joined):
        token = current.set(Pass(torch.ones(9, dtype=torch.bool), random.key(3)))
        out.append(module(x))
        current.reset(token)
    torch.testing.assert_close(out[1], out[0], rtol=1e-4, atol=1e-5)
    assert bool((out[0] == 0).any())
    gradients = [
        torch.autograd.grad((o * o).sum(), list(m.parameters()))
        for o, m in zip(out, (plain, joined), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_layers_that_other_code_may_call_are_not_joined() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

    for module in (Owner(), nn.ModuleDict({"inner": small()})):
        use_kernels(replace_layers(module), {"inner.0": "compiled"})
        assert "Identity" not in [type(m).__name__ for m in module.modules()]
    relu = nn.ReLU()
    twice = nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Conv2d(4, 4, 3), nn.Dropout(0.1), relu)
    use_kernels(replace_layers(twice), {"0": "compiled"})
    assert twice[1] is relu


def test_other_numbers_than_float32_are_left_to_torch() -> None:
    module = replace_layers(small())
    double = copy.deepcopy(module).double()
    use_kernels(double, {"0": "compiled", "4": "compiled"})
    x = numbers(4, 3, 12, 12)
    torch.testing.assert_close(double(x.double()).float(), module(x), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        use_kernels(module, {"0": "compiled", "4": "compiled"})
        assert module(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["conv9", "relu1"])
@pytest.mark.parametrize("each", [True, False])
def test_a_layer_that_is_not_there_is_an_error(*, name: str, each: bool) -> None:
    arch = split_head(lambda: MODELS["fedlog_mnist"]((1, 28, 28), 10), (1, 28, 28), 10)
    says = f"kernels.{name} = 'compiled': no such layer; choose from: conv1, conv2"
    with pytest.raises(ValueError, match=says):
        arch.with_layout(each=each, kernels={name: "compiled"})


def test_a_layout_is_made_once() -> None:
    arch = split_head(lambda: MODELS["fedlog_mnist"]((1, 28, 28), 10), (1, 28, 28), 10)
    laid_out = arch.with_layout(each=True, kernels={"conv1": "compiled"})
    assert laid_out is not arch
    assert laid_out.with_layout(each=True, kernels={"conv1": "compiled"}) is laid_out
    assert laid_out.with_layout(each=True) is not laid_out


def test_large_layers_keep_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # their timing would take the memory of a run
    monkeypatch.setattr(kernel_timing, "MOST", kernel_timing.CLIENTS * 8 * 16 * 16 * 16 - 1)
    monkeypatch.setattr(kernel_timing, "_seconds", lambda layer, x, kernel: kernel != "compiled")
    arch = split_head(lambda: MODELS["conv4"]((3, 16, 16), 10), (3, 16, 16), 10)
    assert faster_layers(arch, 8) == dict.fromkeys(["conv2", "conv3", "conv4"], "compiled")


def test_layers_are_timed_one_by_one() -> None:
    arch = split_head(lambda: MODELS["conv4"]((3, 16, 16), 10), (3, 16, 16), 10)
    chosen = faster_layers(arch, 8)
    assert chosen.keys() <= {f"conv{i}" for i in range(1, 5)}
    assert set(chosen.values()) <= {"compiled"}


# runs


def pictures() -> nn.Sequential:
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def of_run(plan: Plan, method: str = "fedavg", workers: int = 1, **sections: Any) -> Trace:
    given = {"groups": {"mine": ClientGroup(pictures)}}
    return trace(world(method, given=given, engine={"workers": workers}, **sections), plan)


COMPILED: dict[str, Any] = {"kernels": {"1": "compiled"}}


@pytest.mark.parametrize("method", each(name for name in METHODS if "codist" not in name))
def test_a_run_has_the_numbers_of_torchs_kernels(method: str) -> None:
    plain = of_run(Plan(2), method)
    ours = [of_run(Plan(size, **COMPILED), method) for size in (1, 2, 5)]
    ours.append(of_run(Plan(1, stack=False, **COMPILED), method))
    for run in ours:
        for name, array in plain.state.items():
            torch.testing.assert_close(run.state[name], array, rtol=1e-3, atol=1e-4)
    assert of_run(Plan(2, **COMPILED), method, workers=2).rounds == ours[1].rounds


@pytest.mark.slow
def test_private_steps_have_the_numbers_of_torchs_kernels() -> None:
    privacy = {"unit": "record", "epsilon": 9.0, "delta": 0.01, "clip": 3.0, "bodies": "dp_sgd"}
    steps = {"gradient_clip": 1.0, "sampling_rate": 0.5}
    plain, ours = (
        of_run(Plan(2, **more), "fedlog", privacy=privacy | steps) for more in ({}, COMPILED)
    )
    for name, array in plain.state.items():
        torch.testing.assert_close(ours.state[name], array, rtol=1e-3, atol=1e-3)


def test_the_servers_own_models_have_the_kernels_too() -> None:
    # rejects a layout for stacks at the server, which has single models
    images = numbers(40, 3, 32, 32).numpy()
    data = (images, np.arange(40) % 10, images[:10], np.arange(10))
    names = ("conv1", "conv2", "conv3")
    weights = []
    for kernels in ({}, dict.fromkeys(names[:2], "compiled")):
        plan = {"cohort_size": 2, "convolutions": "each", "kernels": kernels}
        recipe: dict[str, Any] = {
            "clients": {"num_clients": 2, "pools": {n: {"model": "codist_cnn"} for n in "ab"}},
            "partition": {"name": "iid"},
            "method": {"name": "merged_codist", "distillation": {"steps": 3, "batch_size": 16}},
            "train": {"num_rounds": 1, "batch_size": 8, "optimizer": "sgd"},
            "evaluate": {"on": "global"},
            "engine": {"workers": 1, "server_threads": 1, "plans": dict.fromkeys("ab", plan)},
        }
        result = fedgist.run(recipe, data=data, public=images)
        task = result.server_run.side.task
        assert [task.starts["a"].arch.module.get_submodule(n).kernel for n in names] == (
            ["compiled", "compiled", "grouped"] if kernels else ["grouped"] * 3
        )
        weights.append(result.server_run.checkpoint().server)
    for name, array in weights[0].items():
        torch.testing.assert_close(weights[1][name], array, rtol=1e-3, atol=1e-3)


def test_a_plan_is_timed_with_kernels_where_they_are_built() -> None:
    small_world = world(given={"groups": {"mine": ClientGroup(pictures)}})
    side, settings = small_world.server, hosting_of(small_world)
    lines: list[str] = []
    plan = choose_plans(
        side.method,
        side.task,
        small_world.population,
        settings,
        start_server(side),
        {},
        say=lines.append,
    )["mine"]
    assert plan.stack
    assert set(plan.kernels) <= {"1"}
    assert not any("fedgist compile" in line for line in lines)


def test_a_method_that_fails_with_kernels_has_a_plan_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as one whose loss takes second derivatives: rejects another method's plan, and an error
    plans = []
    monkeypatch.setattr(stacking_plan, "user_cache_path", lambda _: tmp_path)  # no earlier plans
    for fails in (False, True):
        small_world = world(
            "fedprox" if fails else "fedavg", given={"groups": {"mine": ClientGroup(pictures)}}
        )
        side, settings = small_world.server, hosting_of(small_world)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_timing, "NEAR", 1e9)
            patch.setattr(kernel_timing, "PATIENCE_S", 1e9)
            patch.setattr(stacking_plan, "WORSE", 1e9)
            if fails:
                patch.setattr(convolution, "convolve", _not_twice)
            about = side.method, side.task, small_world.population, settings, start_server(side)
            plans.append(choose_plans(*about, {})["mine"])
    assert plans[0].kernels == {"1": "compiled"}
    assert plans[1].stack
    assert plans[1].kernels == {}


def _not_twice(*_: object) -> Tensor:
    raise NotImplementedError("no second derivatives")
