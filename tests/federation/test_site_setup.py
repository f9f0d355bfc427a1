"""A site's rows, model and policy: what does not fit is refused before any training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgist.errors import FedgistError, InputError, MessageError, OwnerError
from fedgist.federation.agreement.recipe_check import as_federated, check_stated
from fedgist.federation.agreement.server_setup import PRIVATE, server_context
from fedgist.federation.site.file import SiteFile, SiteTable, read_site_file
from fedgist.federation.site.policy import (
    ReleasePolicy,
    check_approved,
    check_names,
    check_run,
    described,
    digest_of_settings,
)
from fedgist.federation.site.process import check_rows_of_owner
from fedgist.federation.site.setup import allowed_rows, plain_data, site_part, try_training
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.testing.small_worlds import world_of
from fedgist.wire.envelope import Header
from fedgist.world.privacy_budget import PrivacyBudget
from three_sites import ARCHITECTURES, NAMES, SAME, parsed, recipe, write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return folder


def test_a_site_validates_by_the_patients_of_the_simulation(tmp_path: Path) -> None:
    """All rows of a patient are trained on or validate, the same as where sites are simulated."""
    x, patient = torch.rand(90, 64), np.arange(90) // 4
    owner = np.minimum(patient // 8, 2)
    arrays: dict[str, Any] = {
        "x": x.numpy(),
        "y": np.arange(90) % 10,
        "group": patient,
        "client": owner,
    }
    np.savez(tmp_path / "all.npz", **arrays)
    raw = recipe("fedavg", data={"validation": 0.4})
    settings = {"name": "npz", "path": str(tmp_path / "all.npz"), "validation": 0.4}
    simulated = {k: v for k, v in raw.items() if k != "facts"} | {
        "data": settings,
        "partition": {"name": "natural"},
        "clients": {"num_clients": 3},
    }
    made = world_of(make(simulated))
    for number, name in enumerate(NAMES):
        own = {key: array[owner == number] for key, array in arrays.items() if key != "client"}
        np.savez(tmp_path / f"{name}.npz", **own)
        data = {"name": "npz", "path": f"{name}.npz"}
        part = site_part(parsed(raw), NAMES, number, site(tmp_path, data=data), secret=1)
        held, x_of = part.population.validation[0], part.data.x
        groups = part.data.groups
        assert groups is not None
        assert not {*groups[held].tolist()} & {*groups[part.population.train[0]].tolist()}
        there = made.data.x[made.partition.validation[number]]
        assert len(there) > 0
        assert torch.equal(there, x_of[held])


def site(folder: Path, **table: Any) -> SiteFile:
    given = {"data": {"name": "npz", "path": "berlin.npz"}} | table
    return SiteFile(folder / "site.toml", SiteTable.model_validate(given))


PRIVATE_FACTS = {"input_shape": [64], "feature_width": 12}


def test_private_models_of_any_shape_meet_at_the_heads(rows: Path) -> None:
    text = parsed(recipe("fedlog", facts=PRIVATE_FACTS))
    side = server_context(resolve(text), NAMES)
    assert list(side.task.architectures) == [PRIVATE]
    small = {"name": "mlp", "hidden": [12]}
    frozen = [small | {"frozen": True}, small | {"adapters": {"rank": 2}}]
    for model in ({"name": "mlp", "hidden": [40, 20]}, small, *frozen):
        part = site_part(text, NAMES, 0, site(rows, model=model), secret=7)
        try_training(part)
        assert part.task.architectures[PRIVATE].feature_width == 12
        # another secret is another start: the server does not know it
        other = site_part(text, NAMES, 0, site(rows, model=model), secret=8)
        starts = [p.task.starts[PRIVATE].params for p in (part, other)]
        assert any(not torch.equal(starts[0][name], starts[1][name]) for name in starts[0])


REFUSED_RECIPES: list[tuple[dict[str, Any], str]] = [
    ({"facts": PRIVATE_FACTS, "method": {"name": "fedavg"}}, "shares more than heads"),
    ({"evaluate": {"on": "test"}}, "evaluate.on = 'test' cannot be used in a federation"),
    ({"evaluate": {"on": "global"}}, "evaluate.on = 'global' cannot be used in a federation"),
    ({"evaluate": {"probe": "knn"}}, "evaluate.probe = 'knn' cannot be used in a federation"),
    ({"evaluate": {"save_features": 5}}, "evaluate.save_features cannot be used"),
    ({"evaluate": {"save_predictions": True}}, "evaluate.save_predictions cannot be used"),
    ({"evaluate": {"keep": "best_validation"}}, "evaluate.keep = 'best_validation' cannot be"),
    ({"evaluate": {"sets": {"a": {"classes": [0]}}}}, "evaluate.sets cannot be used"),
    ({"clients": {"availability": 0.5}}, "clients.availability = 0.5 cannot be used"),
    ({"clients": {"delay": 0.5}}, "clients.delay = 0.5 cannot be used"),
    ({"clients": {"num_clients": 2}}, "clients.num_clients = 2, and the federation has 3 sites"),
    ({"data": {"train_rows": 10}}, "data.train_rows cannot be used"),
    ({"data": {"held_out": 10}}, "data.held_out = 10 cannot be used"),
    ({"data": {"public": {"rows": 10}}}, "state data.public.name"),
    ({"data": {"classes": []}}, "data.classes is missing"),
    ({"data": {"mean": [], "std": []}}, "data.mean and data.std are missing"),
    ({"data": {"mean": [0.1, 0.2]}}, "data.mean has 2 numbers"),
    ({"facts": None}, "state the form of the sites' rows in [facts]"),
    ({"engine": {"name": "loopback"}}, "engine.name = 'loopback' cannot be used"),
    ({"method": {"name": "centralized"}}, "merges all clients' rows"),
]
PRIVACY: dict[str, Any] = {
    "unit": "record",
    "epsilon": 4.0,
    "delta": 1e-5,
    "clip": 1.0,
    "where": "local",
}


@pytest.mark.parametrize(("sections", "says"), REFUSED_RECIPES, ids=[s for _, s in REFUSED_RECIPES])
def test_a_recipe_that_a_federation_cannot_honour_is_refused_by_key(
    sections: dict[str, Any], says: str
) -> None:
    raw = recipe("fedlog", **sections)
    raw = {key: value for key, value in raw.items() if value is not None}
    with pytest.raises(InputError) as error:
        server_context(resolve(parsed(raw)), NAMES)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"partition": {"name": "iid"}}, "partition.name = 'iid'"),
        ({"data": {"name": "npz", "path": "x.npz"}}, "data.name = 'npz'"),
    ],
)
def test_keys_of_a_simulation_are_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"^{key} cannot be used in a federation"):
        check_stated(parsed(recipe("fedlog", **sections)))


def test_noise_that_the_server_could_subtract_is_refused() -> None:
    seeded: dict[str, Any] = {"privacy": PRIVACY, "clients": {"max_rows": 2000}}
    with pytest.raises(InputError, match=r"privacy.noise = 'seed': .* use 'system'"):
        server_context(resolve(parsed(recipe("fedlog", **seeded))), NAMES)
    unbounded: dict[str, Any] = {"privacy": PRIVACY | {"noise": "system"}}
    with pytest.raises(InputError, match=r"privacy needs clients.max_rows"):
        server_context(resolve(parsed(recipe("fedlog", **unbounded))), NAMES)


def test_a_private_site_keeps_its_scores_and_works_the_budget_out_itself(rows: Path) -> None:
    private: dict[str, Any] = {
        "privacy": PRIVACY | {"noise": "system"},
        "clients": {"max_rows": 2000},
    }
    text = parsed(recipe("fedlog", **private, **SAME))
    part = site_part(text, NAMES, 0, site(rows, policy={"epsilon": 5.0}), secret=1)
    assert part.task.privacy is not None
    assert part.task.privacy.source == "system"
    assert isinstance(part.side.spending, PrivacyBudget)
    assert part.side.spending.epsilon(3) == pytest.approx(4.0, rel=1e-3)
    assert not part.settings.share_measurements


POLICIES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"methods": ["fedproto"]}, {}, "policy.methods accepts fedproto, not 'fedlog'"),
    ({"most_rounds": 2}, {}, "policy.most_rounds = 2; the run has 3 rounds"),
    ({"epsilon": 1.0}, {}, "the run has no differential privacy"),
    (
        {"epsilon": 5.0},
        {
            "privacy": PRIVACY | {"noise": "system", "where": "central"},
            "clients": {"max_rows": 2000},
        },
        "the server would add the noise",
    ),
    ({}, {"clients": {"graph": {"name": "file", "path": "x"}}}, "clients.graph.path names a file"),
    ({}, {"model": {"name": "mlp", "weights": "w.pt"}}, "model.weights names a file"),
    ({}, {"data": {"public": {"name": "npz", "path": "/etc/x"}}}, "data.public.path names a file"),
]


@pytest.mark.parametrize(("policy", "sections", "says"), POLICIES, ids=[p[2] for p in POLICIES])
def test_a_run_outside_the_policy_is_refused_before_anything_is_read(
    policy: dict[str, Any], sections: dict[str, Any], says: str, rows: Path
) -> None:
    text, own = parsed(recipe("fedlog", **sections)), site(rows, policy=policy)

    def check() -> None:
        check_names(text, own)
        check_run(resolve(text), own)

    with pytest.raises(FedgistError) as error:
        check()
    assert says in str(error.value)


def test_code_that_a_server_names_is_not_imported(rows: Path) -> None:
    text = parsed(recipe("fedlog"))
    hostile = text.changed({"method": text.method.model_copy(update={"name": "os:system"})})
    with pytest.raises(InputError, match=r"policy.methods accepts"):
        check_names(hostile, site(rows))


def test_only_the_approved_recipe_runs(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "approved.toml").write_text(parsed(recipe("fedlog")).to_toml())
    own = replace(site(rows, policy={"recipe": "approved.toml"}), file=tmp_path / "site.toml")
    check_approved(parsed(recipe("fedlog", federation={"deadline_s": 5.0})), own)
    with pytest.raises(InputError, match=r"the server's recipe has train.lr = 0.5, and the approv"):
        check_approved(parsed(recipe("fedlog", train={"lr": 0.5})), own)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"facts": {"input_shape": [63]}}, "input_shape is [64] here, and [63] in the recipe"),
    (
        {"facts": {"input_shape": [64], "element": "uint8"}},
        "element is 'float32' here, and 'uint8' in the recipe",
    ),
    ({"data": {"classes": list("01234")}}, "the label '5' is not among the classes"),
]


@pytest.mark.parametrize(("sections", "says"), UNFIT, ids=[says for _, says in UNFIT])
def test_rows_of_another_form_are_refused_with_both_values(
    sections: dict[str, Any], says: str, rows: Path
) -> None:
    text = parsed(recipe("fedlog", **sections))
    with pytest.raises(InputError) as error:
        site_part(text, NAMES, 0, site(rows), secret=1)
    assert says in str(error.value)


def test_rows_of_rare_and_withheld_classes_are_used_for_nothing(rows: Path) -> None:
    data = plain_data(site(rows))
    counts = data.y.bincount(minlength=10)
    least = int(counts.sort().values[3]) + 1
    own = site(rows, policy={"least_rows": least, "never_released": ["9"]})
    kept, sentences = allowed_rows(data, own)
    used = set(kept.y.tolist())
    assert used == {c for c in range(9) if counts[c] >= least}
    assert set(kept.y_test.tolist()) <= used
    assert any("policy.never_released" in text for text in sentences)
    assert sum("fewer than policy.least_rows" in text for text in sentences) >= 2
    with pytest.raises(InputError, match="policy leaves no training rows"):
        allowed_rows(data, site(rows, policy={"least_rows": 10_000}))


def test_a_site_with_nan_or_one_row_says_so(rows: Path, tmp_path: Path) -> None:
    with np.load(rows / "berlin.npz") as stored:
        arrays = dict(stored)
    arrays["x"][3, 5] = np.nan
    np.savez(tmp_path / "berlin.npz", **arrays)
    text = parsed(recipe("fedlog", clients={"architectures": ARCHITECTURES}))
    with pytest.raises(InputError, match="row 3"):
        site_part(text, NAMES, 0, site(tmp_path), secret=1)
    one = {key: value[:1] for key, value in dict(np.load(rows / "berlin.npz")).items()}
    np.savez(tmp_path / "berlin.npz", **one)
    part = site_part(text, NAMES, 0, site(tmp_path), secret=1)
    try_training(part)
    assert len(part.data.y) == 1


SITE_FILES: list[tuple[str, str]] = [
    ("", "data is missing"),
    ('[data]\nname = "npzz"', "unknown data set 'npzz'; did you mean 'npz'?"),
    ('[data]\nname = "npz"\n[policy]\nmost_round = 3', "policy.most_round: unknown key"),
    ('[data]\nname = "npz"\n[policy]\nepsilon = -1', "policy.epsilon = -1"),
    ("[data", "site.toml"),
]


@pytest.mark.parametrize(("text", "says"), SITE_FILES)
def test_a_wrong_site_file_is_one_line_that_names_the_key(
    text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(InputError) as error:
        read_site_file(tmp_path / "site.toml")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_policy_in_words_names_the_rows_that_are_not_used(rows: Path) -> None:
    words = described(site(rows, policy={"least_rows": 5, "never_released": ["3", "4"]}))
    assert "classes with fewer than 5 training rows are not used" in words
    assert "never used: rows of 3, 4" in words


def test_nothing_says_that_a_federation_is_a_simulation() -> None:
    privacy = {"unit": "record", "where": "local", "epsilon": 1, "delta": 1e-5, "clip": 5}
    privacy |= {"noise": "system"}
    text = parsed(recipe("fedlog", facts=PRIVATE_FACTS, privacy=privacy, clients={"max_rows": 900}))
    side = server_context(resolve(as_federated(text)), NAMES)
    assert any("epsilon 1" in note for note in side.notes)
    assert not any("simulat" in note for note in side.notes)


def test_test_rows_of_a_class_without_training_rows_are_held_back_too(rows: Path) -> None:
    # seen: such rows were scored, because no training row of the class was held back
    data = plain_data(site(rows))
    without = data.only((data.y != 3).nonzero().squeeze(1))
    assert bool((without.y_test == 3).any())
    for policy in ({"least_rows": 2}, {"never_released": ["3"]}):
        kept, _ = allowed_rows(without, site(rows, policy=policy))
        assert not bool((kept.y_test == 3).any())


def test_more_rows_than_the_recipe_allows_are_refused_at_the_site(rows: Path) -> None:
    text = parsed(recipe("fedlog", clients={"max_rows": 100}, **SAME))
    with pytest.raises(InputError, match=r"has 365 training rows; the recipe states clients.max_r"):
        site_part(text, NAMES, 0, site(rows), secret=1)


def test_least_rows_beside_a_budget_is_refused(rows: Path, tmp_path: Path) -> None:
    # seen: a row more let five rows in, epsilon 5.0 of a claimed 1; the guide had both keys
    (tmp_path / "site.toml").write_text(
        '[data]\nname = "npz"\npath = "x.npz"\n[policy]\nepsilon = 3.0\nleast_rows = 2\n'
    )
    with pytest.raises(InputError, match=r"name the rare classes in policy\.never_released"):
        read_site_file(tmp_path / "site.toml")
    privacy = {"unit": "record", "where": "local", "epsilon": 1, "delta": 1e-5, "clip": 5}
    private = parsed(
        recipe("fedlog", **SAME, clients={"max_rows": 900}, privacy=privacy | {"noise": "system"})
    )
    own = site(rows, policy={"least_rows": 2, "max_rows": 900})  # without a limit of its own
    with pytest.raises(InputError, match=r"policy\.least_rows above 1 lets one row decide"):
        check_run(resolve(private), own)


def test_a_private_sites_facts_are_those_of_its_owner_and_the_rows_are_not_asked(
    rows: Path,
) -> None:
    privacy = {"unit": "record", "where": "local", "epsilon": 1, "delta": 1e-5, "clip": 5}
    private = parsed(
        recipe("fedlog", **SAME, clients={"max_rows": 900}, privacy=privacy | {"noise": "system"})
    )
    data = {"name": "npz", "path": "a file that does not exist.npz"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "policy.max_rows is missing"),
        ({"max_rows": 901}, {}, "policy.max_rows = 901; the recipe states clients.max_rows = 900"),
        ({"max_rows": 900}, {"classes": ["3", "4"]}, r"data.classes = \['3', '4'\]; the recipe"),
    ]
    for policy, more, says in cases:
        own = site(rows, policy=policy, data=data | more)
        with pytest.raises(InputError, match=says):
            check_run(resolve(private), own)
    check_run(resolve(private), site(rows, policy={"max_rows": 900}, data=data))


def test_more_rows_than_the_owner_declares_end_the_site_before_it_connects(rows: Path) -> None:
    count = len(plain_data(site(rows)).y) + len(plain_data(site(rows)).y_test)
    check_rows_of_owner(site(rows, policy={"epsilon": 1.0, "max_rows": count}))
    check_rows_of_owner(site(rows, policy={"max_rows": 1}))  # no budget: nothing is promised
    with pytest.raises(OwnerError, match=f"the data have {count} rows: state a number that"):
        check_rows_of_owner(site(rows, policy={"epsilon": 1.0, "max_rows": count - 1}))


@pytest.mark.parametrize("more", [0, 1, 1024, 1025])
def test_a_reply_of_the_largest_size_leaves_and_no_larger_one(more: int, rows: Path) -> None:
    own = site(rows, policy={"largest_upload": 100})
    policy = ReleasePolicy(own, "0a", "0b", "data", "0c", None)
    header = Header(purpose="train", run="0a" * 8, round=1, stage="s", client=0, architecture="a")
    if more:
        with pytest.raises(
            MessageError, match=f"has {100 + more} bytes; this site sends at most 100"
        ):
            policy.before_sending(header, bytes(100 + more))
    else:
        policy.before_sending(header, bytes(100))


def test_a_site_may_have_exactly_as_many_rows_as_the_recipe_states(rows: Path) -> None:
    count = len(plain_data(site(rows)).y)
    for most in (count, count - 1, count // 2 + 1):
        text = parsed(recipe("fedlog", clients={"max_rows": most}, **SAME))
        if most == count:
            assert len(site_part(text, NAMES, 0, site(rows), 1).data.y) == count
        else:
            with pytest.raises(InputError, match=f"{count} training rows; the recipe states"):
                site_part(text, NAMES, 0, site(rows), 1)


def test_more_rounds_are_the_same_run_without_privacy_and_another_one_under_it() -> None:
    privacy = {"unit": "client", "where": "local", "epsilon": 1, "delta": 1e-5, "clip": 5}
    private = {"privacy": privacy | {"noise": "system"}, "clients": {"max_rows": 900}}
    for sections, same in (({}, True), (private, False)):
        two, five, other = (
            digest_of_settings(parsed(recipe("fedavg", rounds, **SAME, **sections, seed=seed)))
            for rounds, seed in ((2, 5), (5, 5), (2, 6))
        )
        assert (two == five) == same
        assert two != other


def test_work_is_done_as_often_as_the_policy_says_and_not_once_more(rows: Path) -> None:
    policy = ReleasePolicy(site(rows, policy={"most_requests": 3}), "0a", "0b", "data", "0c", None)
    header = Header(purpose="score", run="0a" * 8, round=1, stage="s", client=0, architecture="a")
    policy.before_work(header, 3)
    with pytest.raises(MessageError, match="a score was asked for 3 times"):
        policy.before_work(header, 4)
