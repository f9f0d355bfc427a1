"""The Python interface, with a user's own objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock
from torch import nn

import fedgist
from fedgist.core.message import message
from fedgist.core.method import Context, Count, Method, Order, Replies
from fedgist.core.nets.net import Net
from fedgist.core.tree import Tree, tree
from fedgist.errors import RecipeError
from fedgist.methods.fedavg import FedAvg
from fedgist.runs.files.record import (
    FEATURES,
    LINES,
    METRICS_FILE,
    RECIPE,
    RECIPE_MARK,
    RELEASES,
    STATE,
    Line,
)
from fedgist.runs.files.run_directory import OF_A_RUN
from fedgist.testing.small_worlds import SIZES, blobs, rows

QUICK: dict[str, Any] = {
    "train": {"num_rounds": 3, "batch_size": 5, "lr": 0.01},
    "engine": {"workers": 1, "cohort_size": 3, "checkpoint_every": 2},
}


def user_arrays() -> tuple[np.ndarray, ...]:
    data = blobs()
    return tuple(a.numpy() for a in (data.x.double(), data.y, data.x_test, data.y_test))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def test_ten_lines_with_ones_own_arrays_clients_and_module() -> None:
    result = fedgist.run(
        QUICK, data=user_arrays(), clients=[r.numpy() for r in rows()], model=plain()
    )
    assert [line["round"] for line in result.rounds] == [1, 2, 3]
    assert len(result.clients) == 3 * len(SIZES)
    assert result.ledger[0] == {
        "round": 1,
        "comm/up_bytes": 5 * 3 * 5 * 4,
        "comm/down_bytes": 5 * 3 * 5 * 4,
    }
    logits = result.model(2)(torch.as_tensor(user_arrays()[2][:7]))
    assert logits.shape == (7, 3)
    assert result.folder is None


def test_a_run_in_which_nobody_could_train_says_so() -> None:
    # seen: it ended as a success without a word
    nobody = QUICK | {"clients": {"num_clients": 5, "availability": 0.0}}
    with pytest.warns(UserWarning, match="nothing was learned: .*nobody was online"):
        result = fedgist.run(nobody, data=blobs())
    assert "nothing was learned" in " ".join(result.summary["notes"])
    with pytest.warns(UserWarning, match="1 client is in no mean of the result"):  # no test rows
        with_somebody = fedgist.run(QUICK | {"method": {"name": "local"}}, data=blobs())
    assert not [note for note in with_somebody.summary["notes"] if "nothing" in note]


class HasNoModel(FedAvg):
    """A method that has a model at the server only before training."""

    def models(self, server: Any, ctx: Any) -> Any:
        return {} if ctx.round else super().models(server, ctx)


def test_a_run_that_scores_no_model_says_so() -> None:
    # rejects a success without a word where the data have test rows and nothing asks for them
    sections = {"data": {"train_rows": 60}, "evaluate": {"on": "global"}}
    with pytest.warns(UserWarning, match="nothing was measured: no model was scored in any ro"):
        result = fedgist.run({"train": {"num_rounds": 1}, **sections}, method=HasNoModel())
    assert not any(name.startswith("eval/") for name in result.rounds[-1])
    assert "nothing was measured" in " ".join(result.summary["notes"])


@pytest.mark.filterwarnings("ignore:data.validation:UserWarning")
def test_a_run_without_test_rows_says_before_round_1_and_at_its_end_that_it_scores_nothing() -> (
    None
):
    data = user_arrays()[:2]
    with (
        pytest.warns(UserWarning, match="nothing was measured"),
        pytest.warns(UserWarning, match="no model will be scored"),
    ):
        result = fedgist.run(QUICK, data=data, clients=rows())
    first, *_, last = result.summary["notes"]
    assert first.startswith("no model will be scored: your data has no test rows; give test rows")
    assert last.startswith("nothing was measured")
    for settings in ({"evaluate": {"train": True}}, {"data": {"validation": 0.3}}):
        scored = fedgist.run(QUICK | settings, data=data, clients=rows())
        assert not [note for note in scored.summary["notes"] if "scored" in note]


def test_a_torch_data_set_and_a_model_for_each_group() -> None:
    x, y, *_ = user_arrays()
    data = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    model = {
        "small": (plain(), [0, 2]),
        "large": (
            lambda: nn.Sequential(
                nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 3)
            ),
            [1, 3, 4],
        ),
    }
    result = fedgist.run(QUICK, data=(data, data), clients=rows(), model=model)
    assert set(result.server_run.task.architectures) == {"small", "large"}
    assert result.world.population.clients[2].architectures == ("small",)


def test_a_modules_own_numbers_are_the_start() -> None:
    module = plain()
    world = fedgist.run(QUICK, data=user_arrays(), clients=rows(), model=module).world
    assert torch.equal(
        world.server.task.starts["model"].params["0.weight"], module.state_dict()["0.weight"]
    )


@message(reduce="each")
class Mean:
    """A client's mean output."""

    value: torch.Tensor


@dataclass(frozen=True)
class Talk(Method):
    """A method that is not registered, in which the server sees each client's number."""

    def init_server(self, ctx: Context) -> Mean:
        return Mean(torch.zeros(len(SIZES)))

    def upload(self, net: Net, own: Any, sums: Count, down: Any, ctx: Context) -> tuple[Mean, Any]:
        return Mean(sums.rows), own

    def server_update(self, server: Mean, replies: Replies, ctx: Context) -> Mean:
        return Mean(torch.stack([reply.message.value for reply in replies]))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_of_ones_own_whose_server_hears_each_client(workers: int) -> None:
    recipe = QUICK | {"engine": {"workers": workers, "cohort_size": 2}}
    result = fedgist.run(recipe, data=user_arrays(), clients=rows(), method=Talk())
    assert result.server_run.server.value.tolist() == [float(n) for n in SIZES]


def test_a_folder_that_holds_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": user_arrays(), "clients": rows(), "out": tmp_path}
    fedgist.run(QUICK, **given)
    with pytest.raises(ValueError, match=r"holds a run \(3 rounds done\).*--resume.*--overwrite"):
        fedgist.run(QUICK, **given)
    assert len(fedgist.run(QUICK, overwrite=True, **given).rounds) == 3


# a checkpoint is a run's, damaged or not
NAMES = [name for name in OF_A_RUN if name not in map(str, (STATE, RELEASES))]
FEATURES_OF_ROUND_2 = "features-2.safetensors"
PART_OF_STATE = "checkpoint/clients-0.safetensors"


@pytest.mark.parametrize("flag", ["overwrite", "resume", "neither"])
@pytest.mark.parametrize("name", [*NAMES, RECIPE, FEATURES_OF_ROUND_2, PART_OF_STATE])
def test_a_file_that_no_run_wrote_is_never_replaced(name: str, flag: str, tmp_path: Path) -> None:
    # rejects that only a checkpoint is looked for, and that --overwrite covers a user's own files
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("# by hand\nseed = 1\n")
    if flag == "resume":  # a recipe is what a run to resume has
        (tmp_path / RECIPE).write_text("# by hand\nseed = 1\n")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    named = RECIPE if flag == "resume" else Path(name).name
    with pytest.raises(RecipeError, match=rf"{named} is not a file of a run.*choose another"):
        fedgist.run(
            {**QUICK, "seed": 1},
            data=blobs(),
            clients=rows(),
            out=tmp_path,
            overwrite=flag == "overwrite",
            resume=flag == "resume",
        )
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before  # nor a lock


@pytest.mark.parametrize("begun", [(), (RECIPE,), (RECIPE, *LINES, METRICS_FILE, FEATURES)])
def test_a_run_begins_beside_other_names_and_in_place_of_a_killed_one(
    begun: tuple[str, ...], tmp_path: Path
) -> None:
    # rejects a refusal of what a run that was killed before its first checkpoint leaves
    (tmp_path / "notes.txt").write_text("mine")
    for name in begun:
        (tmp_path / name).write_text(f"seed = 7\n{RECIPE_MARK}" if name == RECIPE else "")
    recipe = {"train": {"num_rounds": 1, "batch_size": 5}, "engine": {"workers": 1}}
    fedgist.run(recipe, data=blobs(), clients=rows(), out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / STATE).exists()
    assert not (tmp_path / FEATURES).exists()


@pytest.mark.parametrize(
    "wrong", [{"method": {"name": "fedprox", "mu": -1.0}}, {"evaluate": {"on": "global"}}]
)
def test_a_recipe_with_a_mistake_replaces_no_run(wrong: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "out": tmp_path / "run"}
    fedgist.run(QUICK, **given)
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"method.mu|evaluate.on"):
        fedgist.run(QUICK | {"method": {"name": "local"}} | wrong, overwrite=True, **given)
    assert {p: p.read_bytes() for p in files} == files


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": (np.zeros((3, 2)),)}, r"data is a tuple of 1; it must be \(x, y\)"),
        ({"clients": [[0, 99]]}, "clients: client 0 names row 99, but there are rows 0..31"),
        ({"clients_test": [[0]]}, "clients has 5 clients, clients_test has 1"),
        ({"model": nn.ReLU()}, "no linear layer"),
        ({"model": nn.Linear(6, 5)}, "5 outputs, the data have 3 classes"),
        (
            {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))},
            "does not accept input of shape",
        ),
        ({"model": nn.Sequential(nn.Linear(4, 3))}, "gives 6 features, but its head '0' takes 4"),
        (
            {"clients": [np.array([0.0, 1.0])] * 5},
            "clients: client 0: rows are float64; a list of whole numbers or a mask",
        ),
        (
            {"data": (np.ones((4, 6)), np.array([0.5, 1, 0, 1]))},
            "data: y must be whole numbers or text",
        ),
        ({"resume": True}, "resume=True goes on with the run in out="),
        ({"model": {"a": (plain(), [0, 1])}}, "every client needs exactly one model"),
        (
            {"model": {"a": (plain(), [0, 1, 2]), "b": (plain(), [2, 3, 4])}},
            "client 2 is listed twice",
        ),
    ],
)
def test_objects_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"data": user_arrays(), "clients": rows(), "model": plain()} | change
    with pytest.raises(ValueError, match=says):
        fedgist.run(QUICK, **given)


def test_bodies_of_different_widths_are_refused_by_fedlog() -> None:
    recipe = QUICK | {"clients": {"num_clients": 5, "architectures": {"mlp": 0.5, "logistic": 0.5}}}
    with pytest.raises(ValueError, match="one feature width; they have mlp 64, logistic 6"):
        fedgist.run(recipe, data=user_arrays(), clients=rows())


def test_too_few_replies_change_nothing_and_are_recorded() -> None:
    result = fedgist.run(
        QUICK | {"privacy": {"min_replies": 5}, "clients": {"availability": 0.5}},
        data=user_arrays(),
        clients=rows(),
    )
    assert all("min_replies is 5" in line["events"][0] for line in result.rounds)


def test_offline_clients_are_not_asked_and_a_round_without_anybody_is_recorded(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n1,0\n1,3\n3,2\n")
    recipe = QUICK | {"clients": {"num_clients": 5, "availability": str(trace)}}
    result = fedgist.run(recipe, data=user_arrays(), clients=rows())
    assert [line["clients/replied"] for line in result.rounds] == [2, 0, 1]
    assert (
        result.rounds[1]["eval/client/accuracy_mean"]
        == result.rounds[0]["eval/client/accuracy_mean"]
    )
    # an exchange before training is with those of round 1, where round 0 is not named
    exchange = recipe | {"method": {"name": "fedlog_c"}}
    lines = fedgist.run(exchange, data=user_arrays(), clients=rows()).rounds
    assert [(line["round"], line["clients/replied"]) for line in lines[:2]] == [(0, 2), (1, 2)]
    trace.write_text("round,client\n0,4\n1,0\n1,3\n3,2\n")
    named = fedgist.run(exchange, data=user_arrays(), clients=rows()).rounds[0]
    assert named["clients/replied"] == 1
    trace.write_text("round,client\n1,9\n")
    with pytest.raises(ValueError, match=r"names client 9, outside 0..4"):
        fedgist.run(recipe, data=user_arrays(), clients=rows())


@pytest.mark.parametrize(
    ("share", "expected"), [(1.0, [5, 5, 5]), (0.6, [3, 3, 3]), (0.2, [None, 1, None])]
)
def test_clients_that_are_away_are_missed_where_they_would_have_been_asked(
    share: float, expected: list[int | None], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n1,0\n1,3\n3,2\n")
    clients = {"num_clients": 5, "availability": str(trace)}
    recipe = QUICK | {"clients": clients, "train": {"num_rounds": 3, "fraction_train": share}}
    lines = fedgist.run(recipe, data=user_arrays(), clients=rows()).rounds
    assert [line.get("clients/expected") for line in lines] == expected


def test_validation_rows_are_held_out_of_training() -> None:
    result = fedgist.run(
        {
            "data": {"validation": 0.25},
            "train": {"num_rounds": 1},
            "engine": {"workers": 1, "cohort_size": 5},
        }
    )
    parts = result.world.partition
    train, held = set(parts.train.rows.tolist()), set(parts.validation.rows.tolist())
    assert not train & held
    assert len(held) == sum(
        int(0.25 * (a + b))
        for a, b in zip(parts.train.counts.tolist(), parts.validation.counts.tolist(), strict=True)
    )
    assert 0 <= result.rounds[0]["eval/validation/accuracy_mean"] <= 1


def test_the_public_names_are_all_there_and_no_others() -> None:
    assert {name for name in dir(fedgist) if not name.startswith("_")} == set(fedgist.__all__)
    assert all(hasattr(fedgist, name) for name in fedgist.__all__)
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = fedgist.runn


@pytest.mark.slow
def test_two_processes_are_not_at_one_run_at_once(tmp_path: Path) -> None:
    # rejects a record in which every round is written twice
    recipe = {
        "train": {"num_rounds": 1},
        "data": {"train_rows": 100},
        "engine": {"workers": 1, "cohort_size": 5},
    }
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    with (
        FileLock(tmp_path / "run" / "checkpoint" / "lock"),
        pytest.raises(ValueError, match="another process is using"),
    ):
        fedgist.run(recipe, out=tmp_path / "run")
    assert len(fedgist.run(recipe, out=tmp_path / "run").rounds) == 1


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing"):
        fedgist.run(
            {"data": {"name": "npz", "path": str(tmp_path / "nothing.npz")}}, out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_mask_names_the_rows_where_it_is_true() -> None:
    # seen: a mask was taken for row numbers 0 and 1
    masks = [np.isin(np.arange(sum(SIZES)), part.numpy()) for part in rows()]
    model = plain()
    by_mask = fedgist.run(QUICK, data=user_arrays(), clients=masks, model=model)
    by_number = fedgist.run(QUICK, data=user_arrays(), clients=rows(), model=model)
    for client, part in enumerate(rows()):
        assert torch.equal(by_mask.world.partition.train[client], part)
    assert by_mask.rounds[-1]["train/loss"] == by_number.rounds[-1]["train/loss"]


def test_more_replies_than_clients_cannot_be_asked_for() -> None:
    recipe = {**QUICK, "privacy": {"min_replies": 40}}
    with pytest.raises(RecipeError, match=r"privacy\.min_replies = 40, but there are 5 clients"):
        fedgist.run(recipe, data=user_arrays(), clients=rows(), model=plain())


@tree
class TwoSpeeds:
    """A server's state whose keys are not in the order of their names."""

    parts: dict[str, torch.Tensor]


@message(reduce="sum")
class HeadSum:
    """The weight of a head, and 1."""

    weight: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class SlowAndFast(fedgist.Method):
    """A method that unpacks its state in the order in which it was made."""

    def init_server(self, ctx: Context) -> Tree:
        weight, _ = next(iter(ctx.task.starts.values())).head
        return TwoSpeeds({"slow": weight.clone(), "fast": weight.clone()})

    def download(self, server: Tree, order: Order, ctx: Context) -> Tree:
        slow, fast = server.parts.values()
        return HeadSum(0.9 * slow + 0.1 * fast, torch.ones(()))

    def receive(self, net: Net, own: Tree, down: Tree, ctx: Context) -> tuple[Net, Tree]:
        return net.with_head(down.weight, net.params[f"{net.arch.head}.bias"]), own

    def upload(
        self, net: Net, own: Tree, sums: Tree, down: Tree, ctx: Context
    ) -> tuple[Tree, Tree]:
        return HeadSum(net.head[0], torch.ones(())), own

    def server_update(self, server: Tree, replies: Replies, ctx: Context) -> Tree:
        total = replies.total()
        fast, slow = total.weight / total.count, server.parts["slow"]
        return TwoSpeeds({"slow": slow + 0.1 * (fast - slow), "fast": fast})


def stops_after(number: int) -> Callable[[Line], None]:
    def callback(line: Line) -> None:
        if line["round"] == number:
            raise InterruptedError

    return callback


def test_a_resumed_run_keeps_the_order_of_a_states_keys(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "method": SlowAndFast()}
    recipe = QUICK | {"model": {"hidden": [5]}}
    whole = fedgist.run(recipe, **given)
    with pytest.raises(InterruptedError):
        fedgist.run(recipe, **given, out=tmp_path / "run", callback=stops_after(2))
    again = fedgist.run(recipe, **given, out=tmp_path / "run", resume=True)
    assert [r["train/loss"] for r in again.rounds] == [r["train/loss"] for r in whole.rounds]


@pytest.mark.parametrize("renamed", ["clients", "columns"])
def test_a_resumed_run_refuses_other_names(tmp_path: Path, renamed: str) -> None:
    data, names = blobs(), ["north", "south", "east", "west", "centre"]
    columns = [f"c{number}" for number in range(data.x.shape[1])]

    def given(*, swapped: bool) -> dict[str, Any]:
        turned = {"clients": names, "columns": columns}
        if swapped:
            turned[renamed] = [turned[renamed][1], turned[renamed][0], *turned[renamed][2:]]
        x, x_test = (
            pd.DataFrame(part.numpy(), columns=turned["columns"]) for part in (data.x, data.x_test)
        )
        clients = dict(zip(turned["clients"], rows(), strict=True))
        return {"data": (x, data.y, x_test, data.y_test), "clients": clients}

    out = tmp_path / "run"
    with pytest.raises(InterruptedError):
        fedgist.run(
            QUICK | {"model": {"hidden": [5]}},
            **given(swapped=False),
            out=out,
            callback=stops_after(1),
        )
    with pytest.raises(RecipeError, match="the names of clients or inputs changed since the run"):
        fedgist.run(QUICK | {"model": {"hidden": [5]}}, **given(swapped=True), out=out, resume=True)
    assert fedgist.run(
        QUICK | {"model": {"hidden": [5]}}, **given(swapped=False), out=out, resume=True
    ).rounds
