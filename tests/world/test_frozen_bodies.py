"""Runs over frozen bodies, with adapters and without: only what learns is sent and stored."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.errors import InputError, RecipeError
from fedgist.methods import METHODS
from fedgist.methods.flesd import FLESD, SimilarityDistillation
from fedgist.models import MODELS
from fedgist.recipe.reading import make
from fedgist.runs.files.checkpoint import load
from fedgist.runs.finished.adapter_files import CONFIG, WEIGHTS, export_adapters
from fedgist.runs.finished.model_files import export
from fedgist.runs.finished.trained_models import ClientModel, trained_model
from fedgist.runs.runner import load_run
from fedgist.testing.laws import close
from fedgist.testing.small_worlds import (
    ALONE,
    SIZES,
    blobs,
    law_world,
    loopback,
    rows,
    trace,
    world,
)
from interrupted import StopAfter, bare
from method_objects import each

TABLE = {"rank": 2, "alpha": 4.0}
MODEL: dict[str, Any] = {"name": "mlp", "hidden": [7, 5], "adapters": TABLE}
FROZEN: dict[str, Any] = {"name": "mlp", "hidden": [7, 5], "frozen": True}
HEAD = 3 * 5 + 3
ADAPTED = 2 * (6 + 7) + 2 * (7 + 5)  # rank x (in + out) of each layer
RUN: dict[str, Any] = {
    "model": MODEL,
    "train": {"num_rounds": 3, "batch_size": 5, "lr": 0.05},
    "engine": {"workers": 1, "cohort_size": 3, "checkpoint_every": 1},
}
# Adam turns the last bit of a gradient of 0 into a whole step: its moments, which are the gradient
# after one step, are compared in place of what it stepped
OF_ONE_STEP = {"flesd": FLESD(distillation=SimilarityDistillation(epochs=1, batch_size=200))}
STEPPED = ("server/student/arrays/", "server/student/momentum/")
SEVERAL = [name for name, method in METHODS.items() if not method.merges_clients]
PRIVACY = {"unit": "record", "epsilon": 2.0, "delta": 0.01, "clip": 3.0}
STEPS = PRIVACY | {"bodies": "dp_sgd", "sampling_rate": 0.5, "gradient_clip": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore:model mlp. the frozen body:UserWarning")


@pytest.mark.parametrize(
    ("method", "model", "up"),
    [
        ("fedavg", MODEL, 4 * (ADAPTED + HEAD + 1)),  # and the number of rows
        ("fedavg", FROZEN, 4 * (HEAD + 1)),
        ("fedper", MODEL, 4 * (ADAPTED + 1)),
        ("fedlog", MODEL, 4 * HEAD),
        ("fedlog", FROZEN, 4 * HEAD),
    ],
)
def test_adapters_and_head_are_sent_and_nothing_else(
    method: str, model: dict[str, Any], up: int
) -> None:
    line = trace(world(method, model=model), rounds=1).rounds[-1]
    assert line["comm/up_bytes"] == len(SIZES) * up


@pytest.mark.slow
@pytest.mark.parametrize("method", each(SEVERAL, ("fedavg", "fedlog", "fedrep", "merged_codist")))
def test_stacked_and_alone_and_over_a_wire_are_the_same_for_every_method(method: str) -> None:
    tables = {
        "wide": {"model": "mlp", "hidden": [7, 6, 5], "share": 0.4, "adapters": TABLE},
        "flat": {"model": "mlp", "hidden": [6, 5], "share": 0.6, "adapters": TABLE},
    }
    made = law_world(OF_ONE_STEP.get(method, METHODS[method]()), architectures=tables)
    rounds = 1 if method in OF_ONE_STEP else 3
    stacked, alone = trace(made, rounds=rounds), trace(made, ALONE, rounds)
    wire = trace(made, rounds=rounds, make_engine=loopback)
    one, other = (
        {n: a for n, a in t.state.items() if not n.startswith(STEPPED)} for t in (stacked, alone)
    )
    assert close(one, other)
    assert len(stacked.rounds) == len(wire.rounds)
    for ours, theirs in zip(stacked.rounds, wire.rounds, strict=True):
        assert ours["comm/up_bytes"] == theirs["comm/up_bytes"]
        losses = [line.get("eval/client/loss_mean", 0.0) for line in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def module() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def test_three_steps_are_those_of_torch() -> None:
    """One client, whole batches, plain SGD, against adapters by hand in a module of one's own."""
    whole, data = module(), blobs()
    recipe = {
        "model": {"adapters": TABLE},
        "method": {"name": "fedavg"},
        "train": {
            "num_rounds": 1,
            "local_epochs": 3,
            "batch_size": 32,
            "lr": 0.3,
            "optimizer": "sgd",
        },
        "engine": RUN["engine"],
    }
    result = fedgist.run(recipe, data=data, clients=[list(range(32))], model=whole)
    start = result.world.server.task.starts["model"]
    learned = {n: p.clone().requires_grad_() for n, p in start.params.items()}
    x, y = (data.x - 0.5) / 2.0, data.y

    def logits() -> Tensor:
        z = x
        for place in ("0", "2"):
            layer = whole.get_submodule(place)
            assert isinstance(layer, nn.Linear)
            a, b = learned[f"{place}.lora_a"], learned[f"{place}.lora_b"]
            z = (F.linear(z, layer.weight.detach(), layer.bias.detach()) + 2 * z @ a.T @ b.T).tanh()
        return z @ learned["4.weight"].T + learned["4.bias"]

    for _ in range(3):
        slopes = torch.autograd.grad(F.cross_entropy(logits(), y), list(learned.values()))
        learned = {
            n: (p - 0.3 * slope).detach().requires_grad_()
            for (n, p), slope in zip(learned.items(), slopes, strict=True)
        }
    trained = result.model(0).trained
    assert set(trained.params) == set(learned)
    for name, array in trained.params.items():
        torch.testing.assert_close(array, learned[name].detach(), msg=name)
        assert not torch.equal(array, start.params[name])
    assert all(torch.equal(p, module().state_dict()[n]) for n, p in whole.named_parameters())


def test_a_frozen_module_keeps_its_weights_whatever_clients_draw() -> None:
    recipe = RUN | {"model": {"adapters": TABLE}, "clients": {"init": "own"}}
    result = fedgist.run(recipe, data=blobs(), clients=rows(), model=module())
    arch = result.world.server.task.architectures["model"]
    assert arch.frozen is not None
    state = module().state_dict()
    assert all(torch.equal(array, state[n]) for n, array in arch.frozen.params.items())
    assert not torch.equal(arch.start(1).params["0.lora_a"], arch.start(2).params["0.lora_a"])


def test_frozen_arrays_are_in_no_checkpoint_and_a_run_resumes(tmp_path: Path) -> None:
    recipe = RUN | {"method": {"name": "local"}}
    given: dict[str, Any] = {"data": blobs(), "clients": rows()}
    whole = fedgist.run(recipe, out=tmp_path / "whole", **given)
    with contextlib.suppress(KeyboardInterrupt):
        fedgist.run(recipe, out=tmp_path / "half", observer=StopAfter(2), **given)
    fedgist.run(recipe, out=tmp_path / "half", resume=True, **given)
    lines = [(tmp_path / name / "rounds.jsonl").read_text() for name in ("whole", "half")]
    first, second = (bare(map(json.loads, text.splitlines())) for text in lines)
    assert first == second
    saved, again = load(tmp_path / "whole"), load(tmp_path / "half")
    assert saved is not None
    assert again is not None
    assert close(saved.arrays(), again.arrays(), 0.0)
    sizes = {n: a.shape[1:].numel() for n, a in saved.clients.items() if "/net/" in n}
    assert sum(sizes.values()) == ADAPTED + HEAD
    assert whole.model(0)(blobs().x_test).shape == (30, 3)


def test_a_run_does_not_go_on_over_another_frozen_body(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(MODELS["mlp"]((6,), 3, hidden=[7, 5]).state_dict(), file)
    recipe = RUN | {"model": MODEL | {"weights": str(file)}}
    given: dict[str, Any] = {"data": blobs(), "clients": rows()}
    fedgist.run(recipe, out=tmp_path / "run", **given)
    fedgist.run(recipe, out=tmp_path / "run", resume=True, **given)
    state = torch.load(file)
    state["1.weight"] += 1.0  # of the body alone
    torch.save(state, file)
    with pytest.raises(RecipeError, match="the models' start changed"):
        fedgist.run(recipe, out=tmp_path / "run", resume=True, **given)


def test_the_frozen_body_is_that_of_the_file_and_starts_of_clients_differ_in_the_rest(
    tmp_path: Path,
) -> None:
    state = MODELS["mlp"]((6,), 3, hidden=[7, 5]).state_dict()
    torch.save(state, tmp_path / "w.pt")
    clients = {"init": "own"}
    small = world("local", model=MODEL | {"weights": str(tmp_path / "w.pt")}, clients=clients)
    assert small.server.notes == ()
    arch = small.server.task.architectures["mlp"]
    assert arch.frozen is not None
    assert all(torch.equal(arch.frozen.params[n], a) for n, a in state.items())
    one, other = arch.start(1), arch.start(2)
    x = blobs().x_test
    assert torch.equal(one.features(x), other.features(x))
    assert not torch.equal(one.params["1.lora_a"], other.params["1.lora_a"])


def test_fedlog_over_a_frozen_body_is_done_after_one_round() -> None:
    small = world("fedlog", model=FROZEN)
    result = trace(small, rounds=3)
    etas = [saved.server["eta"] for saved in result.saved]
    torch.testing.assert_close(etas[0], etas[2])
    # the head of the sums of all clients' features, whoever holds the rows
    whole = {"clients": [torch.arange(32)], "clients_test": [torch.arange(30)]}
    merged = world("fedlog", model=FROZEN, given=whole, clients={"num_clients": 1})
    pooled = trace(merged, rounds=1)
    torch.testing.assert_close(pooled.saved[0].server["eta"], etas[0])
    assert [line["train/loss"] for line in result.rounds] == [0.0, 0.0, 0.0]  # nothing learns


def test_random_frozen_bodies_are_noted() -> None:
    (note,) = world("fedavg", model=FROZEN).server.notes
    assert note == "model mlp: the frozen body has random weights (model.weights reads a file's)"


OWN = "model outside_models:{}: the frozen body has random weights"


@pytest.mark.parametrize(
    ("model", "noted"),
    [
        ({"name": "outside_models:good"}, True),
        ({"name": "outside_models:loads", "body": False}, True),  # its bias is random
        ({"name": "outside_models:loads"}, False),
        ({"name": "outside_models:loads", "project": 3}, True),  # the projection is random
        ({"name": "outside_models:loads", "frozen": False}, False),
    ],
)
def test_a_factory_that_loads_its_bodys_weights_is_not_called_random(
    model: dict[str, Any], *, noted: bool
) -> None:
    notes = world("fedavg", model={"frozen": True, **model}).server.notes
    assert [note.startswith(OWN.format(model["name"][15:])) for note in notes] == [True] * noted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:privacy:UserWarning", "ignore:losses:UserWarning")
@pytest.mark.filterwarnings("ignore:simulated:UserWarning")
def test_private_steps_train_adapters() -> None:
    small = world("fedlog", model=MODEL, privacy=STEPS, data={"normalize": "none"})
    one, other = trace(small), trace(small, ALONE)
    assert close(one.state, other.state)
    learned = {n for n in one.state if "lora" in n}
    assert {n.rpartition("/")[2] for n in learned} == {
        f"{layer}.{part}" for layer in "13" for part in ("lora_a", "lora_b")
    }


def test_what_frozen_bodies_mean_for_privacy() -> None:
    notes = world("fedlog", model=FROZEN, privacy=PRIVACY).server.notes
    assert any("if the frozen bodies do not depend on the record" in note for note in notes)
    notes = world("fedlog", model=MODEL, privacy=PRIVACY).server.notes
    assert any("they learn from it" in note for note in notes)
    with pytest.raises(RecipeError, match="the body of mlp is frozen, so that no step needs noise"):
        world("fedlog", model=FROZEN, privacy=STEPS)


def test_a_projection_before_the_head_goes_on_learning() -> None:
    small = world("fedlog", model=FROZEN | {"project": 4})
    start = small.server.task.starts["mlp"]
    assert set(start.body) == {"6.project.weight", "6.project.bias"}
    state = trace(small, rounds=1).state
    kept = next(a for n, a in state.items() if n.endswith("6.project.weight"))
    assert not torch.equal(kept[0], start.params["6.project.weight"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"adapters": {"rank": 0}}, r"model\.adapters\.rank = 0: must be"),
        ({"adapters": {"alpha": 0}}, r"model\.adapters\.alpha = 0: must be"),
        ({"adapters": {"layers": []}}, r"model\.adapters\.layers"),
        ({"adapters": {"dropout": 0.1}}, r"model\.adapters\.dropout: unknown key"),
        ({"adapters": {"rank": 2}, "frozen": False}, "adapters need a frozen body"),
        (
            {"adapters": {"layers": ["1", "encoder.*"]}},
            r"model mlp: model\.adapters\.layers: 'encoder\.\*' matches no linear.*; it has 1",
        ),
        ({"hidden": [], "adapters": {}}, "body of mlp has no linear layer for adapters"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(model: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        world("fedavg", model={"name": "mlp", **model})


def test_adapters_imply_a_frozen_body_in_the_recorded_recipe() -> None:
    recipe = make({"model": {"adapters": {"rank": 4}}}, ["model.adapters.alpha=2"])
    assert recipe.model is not None
    assert recipe.model.frozen
    assert 'layers = "linear"' in recipe.to_toml()
    again = make({"model": {"name": "mlp", "frozen": True, "adapters": {"rank": 4}}})
    assert again.model is not None
    assert again.model.adapters == make({"model": {"adapters": {"rank": 4}}}).model.adapters  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, over a body from a file."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.save(MODELS["mlp"]((1, 8, 8), 10, hidden=[7, 5]).state_dict(), folder / "w.pt")
    sections = {"data": {"train_rows": 100}, "clients": {"num_clients": 2}}
    model = MODEL | {"weights": str(folder / "w.pt")}
    fedgist.run(RUN | sections | {"model": model}, out=folder / "run")
    return folder


def loaded(run: Path, client: int) -> tuple[ClientModel, Tensor]:
    """Return a client's final model, and raw examples."""
    federation, made = load_run(run / "run")
    return trained_model(federation, made, client), made.data.x_test[:9]


def exported(*args: object) -> Any:
    return CliRunner().invoke(app, ["export", *(str(arg) for arg in args)])


@pytest.mark.slow
def test_peft_loads_exported_adapters(run: Path, tmp_path: Path) -> None:
    """Peft puts the files into the body's own file, and computes the logits of our model."""
    peft = pytest.importorskip("peft")  # its import takes seconds
    done = exported(run / "run", "--client", 1, "--adapters", "-o", tmp_path / "adapters")
    assert done.exit_code == 0, done.exception
    base = MODELS["mlp"]((1, 8, 8), 10, hidden=[7, 5])
    base.load_state_dict(torch.load(run / "w.pt"))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    model, x = loaded(run, 1)
    seen = (x.float() - model.get_buffer("mean")) / model.get_buffer("std")
    torch.testing.assert_close(theirs(seen), model(x))
    layers = theirs.base_model.model
    assert [i for i, layer in enumerate(layers) if hasattr(layer, "lora_A")] == [1, 3]
    with theirs.disable_adapter():  # the body alone, with its own head, answers otherwise
        assert (theirs(seen) - model(x)).abs().max() > 1e-3


@pytest.mark.slow
def test_whole_models_are_exported_with_their_adapters_merged(run: Path, tmp_path: Path) -> None:
    model, x = loaded(run, 0)
    seen = (x.float() - model.get_buffer("mean")) / model.get_buffer("std")
    torch.testing.assert_close(model.trained(seen), model(x))
    export(model, tmp_path / "m.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(x), model(x))
    export(model, tmp_path / "m.safetensors")
    plain = MODELS["mlp"]((1, 8, 8), 10, hidden=[7, 5]).eval()
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    torch.testing.assert_close(plain(seen), model(x))


def test_what_cannot_be_exported_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = exported(run / "run", "--client", 1, "--adapters", "-o", tmp_path / "file")
    assert "is a file: adapters are written into a folder" in str(done.exception)
    plain = fedgist.run(RUN | {"model": {}}, data=blobs(), clients=rows())
    with pytest.raises(RecipeError, match=r"model mlp has no adapters \(model.adapters\)"):
        export_adapters(plain.model(0), tmp_path / "folder")


def test_an_encoders_head_is_no_part_of_its_adapters(tmp_path: Path) -> None:
    simclr: dict[str, Any] = {"objective": {"name": "simclr"}, "method": {"name": "fedavg"}}
    halves = [list(range(16)), list(range(16, 32))]
    result = fedgist.run(RUN | simclr, data=blobs(), clients=halves)
    export_adapters(result.model(0), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["modules_to_save"] is None
    assert len(safetensors.torch.load_file(tmp_path / WEIGHTS)) == 4
