"""Recipes: an error is one line that names the key, the value and the choices."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.cli.recipe_files import folder, shipped
from fedgist.errors import RecipeError
from fedgist.recipe.reading import Recipe, make, read
from fedgist.recipe.resolve import resolve
from fedgist.studies.paper_table import is_table
from fedgist.testing.small_worlds import world_of


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"trian": {}}, "trian: unknown key; did you mean 'train'"),
        ({"train": {"batchsize": 3}}, "train.batchsize: unknown key; did you mean 'batch_size'"),
        ({"train": {"lr": 0}}, "train.lr = 0: .*greater than 0"),
        ({"train": {"lr": "fast"}}, "train.lr = 'fast'"),
        (
            {"train": {"optimizer": "adan"}},
            "train.optimizer = 'adan': .*'sgd', 'momentum', 'adam' or 'adamw'",
        ),
        ({"train": {"fraction_train": 1.5}}, "train.fraction_train = 1.5"),
        ({"partition": {"alpha": 0}}, "partition.alpha = 0: .*greater than 0"),
        (
            {"partition": {"name": "dirichlett"}},
            "unknown partition 'dirichlett'; did you mean 'dirichlet'",
        ),
        (
            {"method": {"name": "fedavgg"}},
            "method.name: unknown method 'fedavgg'; did you mean 'fedavg'.*known: centralized",
        ),
        ({"method": {"name": "fedlog", "mu": 1}}, "method.mu: unknown key of fedlog; .*known: nu"),
        ({"method": {"name": "fedlog", "nu": -1}}, "method.nu = -1: must be at least 0"),
        (
            {"method": {"name": "fedlog", "head_start": "warm"}},
            "method.head_start = 'warm'.*'random' or 'exchange'",
        ),
        ({"methods": {"fedprox": {"nu": 1}}}, "methods.fedprox.nu: unknown key of fedprox"),
        ({"methods": {"fedprx": {}}}, "unknown method 'fedprx'; did you mean 'fedprox'"),
        ({"methods": {"fedprox": {"train": {"lrr": 1}}}}, "methods.fedprox.train.lrr: unknown key"),
        ({"clients": {"num_clients": 0}}, "clients.num_clients = 0"),
        ({"engine": {"cohort_size": "big"}}, "engine.cohort_size"),
        ({"evaluate": {"on": "train"}}, "evaluate.on = 'train': .*'client', 'test' or 'global'"),
        ({"data": 3}, "data = 3: must be a table"),
        ({"train": {"lr": float("nan")}}, "train.lr = nan: must be a finite number"),
        ({"method": {"name": "fedprox", "mu": float("inf")}}, "method.mu = inf: must be a finite"),
        ({"methods": {"fedprox": {"mu": float("nan")}}}, "methods.fedprox.mu = nan: .*finite"),
        ({"method": {"name": "fedprox", "mu": True}}, "method.mu = True: must be a number"),
        ({"method": {"name": "fedprox", "mu": "12"}}, "method.mu = '12': must be a number"),
        ({"train": {"lr": True}}, "train.lr = True: must be a number"),
        # also a value that the method's own table replaces
        (
            {
                "train": {"local_epochs": float("nan")},
                "methods": {"fedavg": {"train": {"local_epochs": 1}}},
                "method": {"name": "fedavg"},
            },
            "train.local_epochs = nan: must be",
        ),
        ({"engine": {"workers": 100_000}}, "engine.workers = 100000: .*1024"),
        ({"train": {"num_rounds": "12"}}, "train.num_rounds = '12': must be a whole number"),
        ({"train": {"num_rounds": 12.5}}, "train.num_rounds = 12.5: must be a whole number"),
        ({"train": {"batch_size": 10**30}}, r"train.batch_size = 10+: must be at most \d+$"),
        ({"train": {"batch_size": 10**12}}, "train.batch_size = 10+: must be at most"),
        ({"seed": 10**30}, r"seed = 10+: must be at most"),
        ({"seed": "x" * 500}, r"seed = 'x+\.\.\.x+': must be a whole number"),
        ({"paper": {"departs": 1}}, "paper.departs = 1: must be a list"),
        ({"model": {"name": "mlp", "dropout": True}}, "model.dropout = True: must be a number"),
        ({"model": {"name": "mlp", "hidden": [True]}}, "model.hidden.0 = True: must be a whole"),
        ({"model": {"name": "mlp", "width": 3}}, "model.width: unknown key of mlp; .*known: hidd"),
        (
            {"engine": {"workers": "many"}},
            "engine.workers = 'many': must be 'auto' or must be a wh",
        ),
        ({"clients": {"architectures": {"a": {"share": True}}}}, "share must be a number"),
        (
            {"clients": {"architectures": {"a": {"share": 1, "model": 1}}}},
            "clients.architectures.a.model = 1: must be text",
        ),
        ({"clients": {"pools": {"a": {"model": 1}}}}, "clients.pools.a.model = 1: must be text"),
        (
            {"clients": {"architectures": {"mlp": {"share": 1, "clients": [0]}}}},
            "clients.architectures.mlp: give share or clients, not both",
        ),
        (
            {"clients": {"architectures": {"mlp": {"clients": [-1]}}}},
            r"clients.architectures.mlp.clients.0 = -1: .*at least 0",
        ),
        (
            {"clients": {"architectures": {"mlp": {"clients": []}}}},
            r"clients.architectures.mlp.clients = \[\]: .*at least 1 item",
        ),
        (
            {"clients": {"architectures": {"mlp": {"clients": [0]}, "logistic": 1}}},
            "clients.architectures: give all of them a share, or all of them a list of clients",
        ),
        (
            {"clients": {"architectures": {"a": {"model": "mlp", "share": 1, "widht": 2}}}},
            "clients.architectures.a.widht: unknown key of mlp",
        ),
        # a key that nothing reads
        ({"partition": {"name": "iid", "alpha": 1.0}}, "partition.alpha: unknown key of iid"),
        ({"train": {"momentum": 0.5}}, "train.momentum = 0.5: .*'adam' does not read it"),
        (
            {"model": {"name": "mlp"}, "clients": {"architectures": {"mlp": 1}}},
            r"model.name is given, and nothing reads it: \[clients.architectures\]",
        ),
        ({"train": {"lr": object()}}, "train.lr = <object .*: is of type object, which a recipe"),
        ({"data": {"name": "npz", "path": "x" * 99, "tset": 1}}, "data.tset: unknown key of npz"),
        ({"data": {"name": "npz"}}, "data.path is missing: npz needs it"),
    ],
)
def test_what_is_wrong_is_named(raw: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        resolve(make(raw))
    assert "\n" not in str(caught.value)


def test_a_value_is_cut_where_it_is_printed() -> None:
    with pytest.raises(RecipeError) as caught:
        make({"train": {"optimizer": "x" * 10_000, "lr": list(range(10_000))}})
    assert len(str(caught.value)) < 200


FEDPROX = {
    "model": {"name": "mlp", "hidden": [7], "dropout": 0.5},
    "method": {"name": "fedprox", "mu": 0.5},
    "partition": {"name": "dirichlet", "alpha": 0.1, "min_size": 2},
    "train": {"optimizer": "momentum", "momentum": 0.5},
}


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        (
            ["model.name=logistic"],
            ["model.hidden = [7] is dropped: logistic", "model.dropout = 0.5 is dropped"],
        ),
        (["method.name=fedavg"], ["method.mu = 0.5 is dropped: it belongs to 'fedprox'"]),
        # alpha is read by both
        (["partition.name=size"], ["partition.min_size = 2 is dropped: size does not read it"]),
        (["train.optimizer=sgd"], ["train.momentum = 0.5 is dropped: optimizer sgd"]),
        (
            ["clients.architectures.mlp=1.0"],
            [f"model.{key} is dropped" for key in ("dropout", "hidden", "name")],
        ),
    ],
)
def test_a_key_left_over_by_a_changed_name_is_dropped_and_said(
    settings: list[str], dropped: list[str]
) -> None:
    recipe = make(FEDPROX, settings)
    assert len(recipe.dropped) == len(dropped)
    assert all(line.startswith(start) for line, start in zip(recipe.dropped, dropped, strict=True))
    again = make(tomllib.loads(recipe.to_toml()))  # nothing inert is written down
    assert again.settings() == recipe.settings()
    assert again.dropped == ()


def test_own_data_on_top_of_a_recipe_are_not_cut_in_silence(tmp_path: Path) -> None:
    # seen: 1,797 rows of one's own cut to the demo's 200; "num_clients = 20, but n.npz has 3"
    demo = {"data": {"train_rows": 200}, "clients": {"num_clients": 20, "init": "own"}}
    own = ["data.name=npz", f"data.path={tmp_path / 'n.npz'}", "partition.name=natural"]
    recipe = make(demo, own)
    assert recipe.dropped == (
        "data.train_rows = 200 of the recipe is kept: only so many rows are used",
        "clients.num_clients = 20 is dropped: the data say how many",
    )
    assert "num_clients" not in recipe.clients.model_fields_set
    assert recipe.clients.init == "own"
    assert make(demo, [*own, "clients.num_clients=3", "data.train_rows=9"]).dropped == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["partition.name=iid", "partition.alpha=2.0"], "partition.alpha: unknown key of iid"),
        (["method.name=fedavg", "method.mu=1.0"], "method.mu: unknown key of fedavg"),
        (
            ["clients.architectures.mlp=1.0", "model.name=mlp"],
            "model.name is given, and nothing reads it",
        ),
        (["train.optimizer=adam", "train.momentum=0.1"], "train.momentum = 0.1: "),
    ],
)
def test_a_key_that_was_set_and_is_not_read_is_an_error(settings: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        resolve(make(FEDPROX, settings))


def test_a_nest_of_lists_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(f"seed = {'[' * 5000}{']' * 5000}")
    with pytest.raises(RecipeError, match=r"deep.toml: ") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="nested more than 32 deep"):
        make({"model": {"hidden": json.loads("[" * 40 + "]" * 40)}})


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", tmp_path):
        with pytest.raises(RecipeError, match="is not a file"):
            read(path)


def test_settings_change_the_recipe_and_bare_words_are_strings() -> None:
    recipe = make(
        {}, ["train.lr=0.5", "method.name=fedprox", "method.mu=2", "partition.name=iid", "seed=7"]
    )
    assert (recipe.train.lr, recipe.method.name, recipe.method.options, recipe.seed) == (
        0.5,
        "fedprox",
        {"mu": 2},
        7,
    )
    with pytest.raises(RecipeError, match=r"expected section.key=value"):
        make({}, ["train.lr"])
    with pytest.raises(RecipeError, match="seed is not a section"):
        make({"seed": 1}, ["seed.x=1"])


def test_the_table_of_the_method_named_is_used_and_the_others_are_inert() -> None:
    raw = {
        "method": {"name": "fedlog", "nu": 0.5},
        "train": {"lr": 0.1, "local_epochs": 2},
        "methods": {
            "fedprox": {"mu": 3.0, "train": {"local_epochs": 9}},
            "fedlog": {"nu": 2.0, "wire": "float64"},
        },
    }
    own = make(raw)
    assert own.method.options == {"nu": 0.5, "wire": "float64"}
    assert own.train.local_epochs == 2
    other = make(raw, ["method.name=fedprox", "train.lr=0.2"])
    assert other.method.options == {"mu": 3.0}
    assert (other.train.local_epochs, other.train.lr) == (9, 0.2)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = make(
        {
            "clients": {
                "architectures": {
                    "a": {"model": "mlp", "hidden": [3], "share": 0.5},
                    "logistic": 0.5,
                }
            }
        }
    )
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert read(path).model_dump() == recipe.model_dump()


@pytest.mark.parametrize(
    "path",
    [p for name in shipped() if not is_table(p := folder() / f"{name}.toml")],
    ids=lambda p: p.stem,
)
def test_every_shipped_recipe_is_valid_and_says_what_it_is(path: Path) -> None:
    assert isinstance(read(path), Recipe)
    assert path.read_text().startswith("# ")


def test_clients_of_a_model_may_be_listed(tmp_path: Path) -> None:
    tables = {
        "large": {"model": "mlp", "hidden": [3], "clients": [0, 2]},
        "logistic": {"clients": [1]},
    }
    clients = {"num_clients": 3, "architectures": tables}
    raw = {"data": {"train_rows": 60}, "clients": clients, "method": {"name": "local"}}
    side = world_of(make(raw)).server
    assert [client.architectures for client in side.clients] == [
        ("large",),
        ("logistic",),
        ("large",),
    ]
    path = tmp_path / "recipe.toml"
    path.write_text(make(raw).to_toml())
    assert read(path).model_dump() == make(raw).model_dump()
    for listed, says in (([3], "client 1 has none"), ([1, 2], "client 2 is listed twice")):
        wrong = {**tables, "logistic": {"clients": listed}}
        with pytest.raises(RecipeError, match=f"every client needs exactly one model; {says}"):
            world_of(make({**raw, "clients": {**clients, "architectures": wrong}}))


def models_by_name(path: Path, listed: Sequence[str | int], **clients: object) -> dict[str, str]:
    """Return each client's model by the client's name; those that are not listed have the other."""
    header, *lines = path.read_text().splitlines()
    names = sorted({line.split(",")[0] for line in lines})
    rest = [name for name in names if name not in listed]
    tables = {
        "large": {"model": "mlp", "hidden": [5, 3], "clients": listed},
        "small": {"model": "mlp", "hidden": [3], "clients": rest},
    }
    raw = {
        "data": {"name": "table", "path": str(path), "label": "y", "client": header.split(",")[0]},
        "partition": {"name": "natural"},
        "clients": {"architectures": tables, **clients},
        "method": {"name": "repshare", "m_up": 1} if clients else {"name": "local"},
    }
    side = world_of(make(raw)).server
    assert side.client_names == tuple(names)
    return {names[client.id]: client.architectures[0] for client in side.clients}


def test_clients_of_a_model_may_be_named_and_a_new_site_shifts_none(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    rows = [f"{site},{k},{k % 2}" for site in ("Dorf", "Stadt", "Ufer") for k in range(10)]
    path.write_text("site,a,y\n" + "\n".join(rows))
    before = models_by_name(path, ["Stadt", "Ufer"])
    assert before == {"Dorf": "small", "Stadt": "large", "Ufer": "large"}
    rows += [f"Au,{k},{k % 2}" for k in range(10)]  # the first of all names
    path.write_text("site,a,y\n" + "\n".join(rows))
    assert models_by_name(path, ["Stadt", "Ufer"]) == {"Au": "small", **before}
    own = {"settings": {"some": {"clients": ["Ufer", 0], "m_up": 0}}}
    assert models_by_name(path, ["Stadt"], **own)["Ufer"] == "small"
    for wrong, says in (
        (
            ["Stad"],
            r"architectures.large.clients: no client is called 'Stad'; did you mean 'Stadt'",
        ),
        ([-1], r"architectures.large.clients.0 = -1: must be at least 0"),
    ):
        with pytest.raises(RecipeError, match=says):
            models_by_name(path, wrong)
    own = {"settings": {"some": {"clients": ["Uferr"], "m_up": 0}}}
    with pytest.raises(
        RecipeError, match=r"settings.some.clients: no client is called 'Uferr'; did"
    ):
        models_by_name(path, ["Stadt"], **own)
    raw = {"clients": {"num_clients": 2, "architectures": {"mlp": {"clients": ["a", 1]}}}}
    with pytest.raises(
        RecipeError, match=r"called 'a'; the clients of this partition have no name"
    ):
        world_of(make(raw))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe .*nowhere.toml"):
        read(tmp_path / "nowhere.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\nlr=1")
    with pytest.raises(RecipeError, match=r"bad.toml: "):
        read(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"bad.toml: "):
        read(bad)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.dictionaries(st.text(), x) | st.lists(x),
    )
)
def test_whatever_stands_in_a_section_is_accepted_or_a_recipe_error(value: object) -> None:
    for section in ("train", "method", "methods", "clients", "data", "model", "engine"):
        try:
            make({section: value})
        except RecipeError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("size", [0, -3])
def test_a_plan_stacks_at_least_one_client(size: int) -> None:
    # seen: a plan of none ended in a traceback
    with pytest.raises(RecipeError, match=rf"engine\.plans\.mlp\.cohort_size = {size}: must be"):
        make({"engine": {"plans": {"mlp": {"cohort_size": size}}}})
