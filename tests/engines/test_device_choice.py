"""Devices: the name in a recipe, what the machine has, and what only makes sense on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedgist
from fedgist.engines.device_choice import check_precision, usable_device
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make
from fedgist.runs.runner import load_run
from fedgist.testing.small_worlds import world


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def units(monkeypatch: pytest.MonkeyPatch, **has: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)


@pytest.mark.parametrize("name", ["gpu9", "cuda:", "cuda:-1", "cuda:1x", "meta", "mps", "", "CPU"])
def test_a_name_that_is_no_device_is_refused_before_torch_is_asked(name: str) -> None:
    says = f"engine.device = '{name}': .*auto, cpu, cuda or cuda:NUMBER"
    with pytest.raises(RecipeError, match=says) as caught:
        make({"engine": {"device": name}})
    assert "\n" not in str(caught.value)


def test_auto_is_the_gpu_or_the_cpu_of_a_machine_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 0)
    assert (usable_device("auto"), usable_device("cpu")) == ("cpu", "cpu")
    assert world(engine={"device": "auto"}).server.recipe.engine.device == "cpu"
    gpus(monkeypatch, 2)
    assert (usable_device("auto"), usable_device("cpu")) == ("cuda", "cpu")


def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(RecipeError, match=r"engine.device = 'cuda': this machine has cpu$"):
        world(engine={"device": "cuda"})
    gpus(monkeypatch, 2)
    with pytest.raises(RecipeError, match=r"'cuda:2': this machine has cpu, cuda, cuda:0, cuda:1$"):
        usable_device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch may have a driver")
def test_a_driver_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    with pytest.raises(RecipeError, match=r"engine.device = 'cuda:1' cannot be used: ") as caught:
        usable_device("cuda:1")
    assert "\n" not in str(caught.value)


def test_bfloat16_is_refused_where_it_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    units(monkeypatch, amx_bf16=False)
    for device in ("cpu", "auto"):
        raw = {"train": {"precision": "bfloat16"}, "engine": {"device": device}}
        message = f"needs a GPU or a CPU with AMX; engine.device = '{device}' is a CPU without"
        with pytest.raises(RecipeError, match=message):
            fedgist.run(raw)
    units(monkeypatch, amx_bf16=True)
    check_precision("bfloat16", "auto")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # of a torch that cannot tell
    with pytest.raises(RecipeError, match="needs a GPU or a CPU with AMX"):
        check_precision("bfloat16", "cpu")
    gpus(monkeypatch, 1)
    check_precision("bfloat16", "auto")
    check_precision("float32", "cpu")


def test_a_run_of_a_gpu_is_looked_at_on_a_machine_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fedgist.run({"train": {"num_rounds": 1}, "data": {"train_rows": 100}}, out=tmp_path / "run")
    path = tmp_path / "run" / "recipe.toml"
    text = path.read_text("utf-8")
    assert 'device = "cpu"' in text
    path.write_text(text.replace('device = "cpu"', 'device = "cuda:1"'), "utf-8")
    gpus(monkeypatch, 0)
    federation, _ = load_run(tmp_path / "run")
    assert federation.side.recipe.engine.device == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_trains_as_the_cpu_does() -> None:
    def loss(device: str, precision: str) -> float:
        section = {"num_rounds": 2, "class_weights": "balanced", "clip_norm": 1.0}
        raw = {"train": {**section, "precision": precision}, "engine": {"device": device}}
        return float(fedgist.run(raw).rounds[-1]["train/loss"])

    expected = loss("cpu", "float32")
    assert loss("cuda", "float32") == pytest.approx(expected, rel=1e-3)
    assert loss("cuda:0", "bfloat16") == pytest.approx(expected, rel=0.1)
