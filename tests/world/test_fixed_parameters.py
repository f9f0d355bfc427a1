"""Parameters with ``requires_grad = False`` in a user's module do not learn and are not sent."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import fedgist
from fedgist.api.result import Result
from fedgist.errors import RecipeError
from fedgist.methods import METHODS
from fedgist.runs.finished.model_files import export
from method_objects import TRAINS

NAMES = tuple(f"{layer}.{leaf}" for layer in (0, 1, 3, 5) for leaf in ("weight", "bias"))
HEAD = ("5.weight", "5.bias")
COMPUTES_THE_HEAD = {"fedlog", "fedlog_c", "analytic"}
# distillation needs public rows or pools; its models are those of the others
TRIED = sorted(set(METHODS) - {"periodic_codist", "merged_codist", "flesd"})
EXAMPLES = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
LABELS = (EXAMPLES[:, 0] > 0).astype(int)
pytestmark = pytest.mark.filterwarnings("ignore:model model:UserWarning")


def model(fixed: Collection[str]) -> nn.Module:
    """Return a net with batch norm, of which some parameters are fixed."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU()
    net = nn.Sequential(*layers, nn.Linear(5, 2))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return net


def run(net: Any, method: str = "fedavg", **more: Any) -> Result:
    how = {key: more.pop(key) for key in ("out", "resume", "callback") if key in more}
    recipe: dict[str, Any] = {
        "method": {"name": method},
        "train": {"num_rounds": 2, "batch_size": 6, "lr": 0.1} | TRAINS.get(method, {}),
        "partition": {"name": "iid"},
        "engine": {"workers": 1},
    }
    for section, values in ({"clients": {"num_clients": 3}} | more).items():
        recipe[section] = {**recipe.get(section, {}), **values}
    data = EXAMPLES[:48], LABELS[:48], EXAMPLES[48:], LABELS[48:]
    return fedgist.run(recipe, data=data, model=net, **how)


def arrays(result: Result, client: int = 0) -> dict[str, Tensor]:
    """Return all parameters of a client's final model by name."""
    held = result.model(client)
    names = {name: held.get_buffer(slot) for slot, name in held.names.items()}
    return {n.removeprefix("params/"): a for n, a in names.items() if n.startswith("params/")}


def stop(line: dict[str, Any]) -> None:
    """Stop a run after its first round."""
    raise StopIteration(line["round"])


@settings(max_examples=15)
@given(st.sampled_from(TRIED), st.sets(st.sampled_from(NAMES), max_size=len(NAMES) - 1))
def test_fixed_parameters_stay_and_the_others_learn(method: str, fixed: set[str]) -> None:
    net = model(fixed)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    if method in COMPUTES_THE_HEAD and fixed & {*HEAD}:
        with pytest.raises(RecipeError, match=f"method {method} computes the head"):
            run(net, method)
        return
    after = arrays(run(net, method))
    assert after.keys() == start.keys()
    for name in fixed:  # rejects training with requires_grad_() on every parameter
        assert torch.equal(after[name], start[name])
    idle = {*HEAD} if method == "fedbabu" else set()
    idle = {*start} - {*HEAD} if method == "analytic" else idle  # bodies do not learn
    moved = {name for name in start if not torch.equal(after[name], start[name])}
    if method == "cs_fl":  # small arrays may keep their bits: the signs of a few measurements
        assert moved
    else:
        assert moved | idle >= {*start} - fixed


@settings(max_examples=6)
@given(st.sets(st.sampled_from(NAMES), max_size=len(NAMES) - 1))
def test_only_what_learns_is_sent(fixed: set[str]) -> None:
    line = run(model(fixed), train={"num_rounds": 1}).rounds[-1]
    learns = sum(p.numel() for n, p in model(fixed).named_parameters() if n not in fixed)
    statistics, rows = 2 * 8, 1  # batch norm goes on with its statistics
    assert line["comm/up_bytes"] == 3 * 4 * (learns + statistics + rows)
    assert line["comm/down_bytes"] == 3 * 4 * (learns + statistics)


def test_fixed_parameters_are_exported_and_resumed(tmp_path: Path) -> None:
    fixed = {"0.weight", "3.bias", "5.bias"}
    whole = run(model(fixed), out=str(tmp_path / "whole"))
    with pytest.raises(StopIteration):
        run(model(fixed), out=str(tmp_path / "part"), callback=stop)
    again = run(model(fixed), out=str(tmp_path / "part"), resume=True)
    paths = [tmp_path / f"{name}.safetensors" for name in ("whole", "again")]
    for result, path in zip((whole, again), paths, strict=True):
        export(result.model(1), str(path))
    first, second = map(load_file, paths)
    assert first.keys() == second.keys() >= {*NAMES}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[n], dict(model(fixed).named_parameters())[n]) for n in fixed)


def test_clients_with_starts_of_their_own_share_what_is_fixed() -> None:
    net = model({"0.weight", "3.bias"})
    result = run(net, "local", clients={"num_clients": 3, "init": "own"})
    first, second = arrays(result, 0), arrays(result, 1)
    given_arrays = dict(net.named_parameters())
    for name in NAMES:
        is_fixed = name in {"0.weight", "3.bias"}
        assert torch.equal(first[name], given_arrays[name]) == is_fixed
        assert torch.equal(first[name], second[name]) == is_fixed


class Attends(nn.Module):
    """Attention, whose weights are drawn by a function that is not called reset_parameters."""

    def __init__(self, *, token: bool) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(6, 1, batch_first=True), nn.Linear(6, 2)
        self.token = nn.Parameter(torch.ones(6)) if token else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(1) if self.token is None else x.unsqueeze(1) + self.token
        out: Tensor = self.last(self.attention(rows, rows, rows, need_weights=False)[0].squeeze(1))
        return out


@pytest.mark.filterwarnings("ignore:model runs client by client")  # as attention does
def test_a_start_of_ones_own_draws_all_weights_or_is_refused() -> None:
    own = {"num_clients": 3, "init": "own"}
    result = run(Attends(token=False), "local", clients=own)
    first, second = arrays(result, 0), arrays(result, 1)
    # seen: attention's weights were the same at all clients
    assert not torch.equal(*(each["attention.in_proj_weight"] for each in (first, second)))
    with pytest.raises(RecipeError, match="'Attends' has no reset_parameters, so that its 'token'"):
        run(Attends(token=True), "local", clients=own)


def test_a_note_says_what_does_not_learn() -> None:
    notes = run(model({"0.weight", "0.bias"})).summary["notes"]
    text = "model model: 2 parameters with requires_grad = False (0.bias, 0.weight) do not learn"
    assert any(note.startswith(text) for note in notes)
    assert not any("requires_grad" in note for note in run(model(())).summary["notes"])


def test_a_model_of_which_nothing_learns_is_refused() -> None:
    with pytest.raises(RecipeError, match="no parameter learns: all have requires_grad = False"):
        run(model(NAMES))


def test_a_frozen_body_may_have_fixed_parameters_too() -> None:
    net = model({"0.weight", "5.bias"})
    start = copy.deepcopy(net.state_dict())
    after = arrays(run(net, model={"frozen": True}))
    assert [name for name in NAMES if not torch.equal(after[name], start[name])] == ["5.weight"]


@pytest.mark.parametrize("engine", ["local", "loopback"])
@pytest.mark.parametrize("size", [1, 3])
def test_alone_stacked_and_over_a_wire_agree(engine: str, size: int) -> None:
    fixed = {"0.bias", "3.weight"}
    about = {"name": engine, "workers": 1} | ({"cohort_size": size} if engine == "local" else {})
    after, expected = (arrays(run(model(fixed), engine=e)) for e in (about, {"workers": 1}))
    for name, array in expected.items():
        torch.testing.assert_close(after[name], array, rtol=1e-4, atol=1e-5)
