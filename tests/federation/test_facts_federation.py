"""Facts before training by real processes: totals, names, policies, budgets, differences."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w

from commands import Command, fedgist, wait_until
from facts_tables import (
    CLASSES,
    NUMBERS,
    Oracle,
    as_toml,
    data_of,
    question,
    tables,
    write_tables,
)
from real_federation import RealFederation, real_federation

pytestmark = pytest.mark.slow
FIVE = ("berlin", "lyon", "oslo", "ulm", "york")
EVERYTHING = ["counts", "moments", "histograms", "categories"]


def started(fed: RealFederation, about: dict[str, Any], **policies: dict[str, Any]) -> None:
    """Start ``fedgist facts`` and the sites; a site's policy allows everything but what is said."""
    (fed.folder / "question.toml").write_text(as_toml(about))
    for name in fed.names:
        policy = {"facts": EVERYTHING} | policies.get(name, {})
        data = data_of(f"{name}.csv") | {"missing": "mean"}
        fed.write_site(name, data=data, policy=policy, target=about.get("target", "class"))
    words = ["facts", "kits/server", "--ask", "question.toml", "--out", "facts.toml"]
    listen = ["--listen", f"{fed.host}:{fed.port}"]
    fed.processes["facts"] = Command([*words, *listen], fed.folder)
    for name in fed.names:
        fed.start_site(name)


def answered(fed: RealFederation) -> dict[str, Any]:
    """Wait for the facts; return the recipe that was written."""
    fed.wait_end("facts")
    return tomllib.loads((fed.folder / "facts.toml").read_text())


def asked_for(fed: RealFederation, about: dict[str, Any], **policies: dict[str, Any]) -> Any:
    """Ask all sites, and return the recipe that was written."""
    started(fed, about, **policies)
    return answered(fed)


def log_of(fed: RealFederation, name: str) -> str:
    return (fed.folder / f"state-{name}" / "audit.log").read_text()


@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_facts_of_five_sites_are_those_of_the_pooled_rows(sums: str, tmp_path: Path) -> None:
    every = tables(11, len(FIVE))
    write_tables(tmp_path, FIVE, every)
    oracle = Oracle.of(every)
    with real_federation(tmp_path, names=FIVE) as fed:
        recipe = asked_for(fed, question(sums=sums))
        for place, name in enumerate(NUMBERS):
            _, mean, std = oracle.moments(name)
            near = std * (1e-9 if sums == "plain" else 1e-7)
            assert abs(recipe["data"]["mean"][place] - mean) < near
            assert abs(recipe["data"]["std"][place] - std) < near
        assert recipe["data"]["classes"] == [*CLASSES]
        assert [*recipe["facts"]["columns"]] == [*NUMBERS, "town"]
        page = (tmp_path / "facts.html").read_text()
        assert "Correlations" in page
        assert f"Rows of 5 of 5 sites: {', '.join(FIVE)}." in page
        for name in FIVE:
            log = log_of(fed, name)
            assert "received the facts of all sites" in log
            assert ("sent upload FactsSums" in log) == (sums == "plain")
            assert ("sent mask Masked" in log) == (sums == "secure")
        wait_until(lambda: all("waiting for a run" in fed.output(name) for name in FIVE))


def test_a_simulation_has_the_same_facts(tmp_path: Path) -> None:
    """By ``fedgist partition --facts``: the clients are those that the column of sites names."""
    every = tables(12, 3)
    names = ("berlin", "lyon", "ulm")
    write_tables(tmp_path, names, every)
    with real_federation(tmp_path, names=names) as fed:
        real = asked_for(fed, question())
    for name, table in zip(names, every, strict=True):
        table["site"] = name
    pd.concat(every).to_csv(tmp_path / "all.csv", index=False)
    recipe = {
        "data": data_of("all.csv") | {"client": "site", "missing": "mean"},
        "partition": {"name": "natural"},
        "model": {"name": "mlp"},
    }
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    about = ("--facts", "question.toml", "--out", "simulated.toml")
    done = fedgist("partition", "recipe.toml", *about, cwd=tmp_path)
    assert "Rows of 3 simulated clients." in done.stdout
    simulated = tomllib.loads((tmp_path / "simulated.toml").read_text())
    for key in ("mean", "std"):
        np.testing.assert_allclose(simulated["data"][key], real["data"][key], rtol=1e-12)
    assert simulated["facts"] == real["facts"]
    assert simulated["data"]["client"] == "site"
    fedgist("run", "simulated.toml", "--set", "train.num_rounds=1", cwd=tmp_path)


def test_sites_name_classes_and_categories_that_are_not_listed(tmp_path: Path) -> None:
    every = tables(13, 3)
    names = ("berlin", "lyon", "ulm")
    every[1].loc[3, "town"] = "Rome"  # one row alone
    write_tables(tmp_path, names, every)
    about = question()
    del about["classes"]
    about["columns"]["town"] = "categories"
    with real_federation(tmp_path, names=names) as fed:
        two = {name: {"least_rows": 2} for name in names}
        recipe = asked_for(fed, about, **two)
        assert recipe["data"]["classes"] == [*CLASSES]
        assert recipe["facts"]["columns"]["town"] == ["Bonn", "Lyon", "Ulm"]
        assert "tells the names of columns.town: Bonn, Lyon, Ulm" in log_of(fed, "lyon")
        assert "Rome" not in (tmp_path / "facts.html").read_text()


def test_each_site_compares_itself_and_says_what_differs(tmp_path: Path) -> None:
    """In its own log, and to the server if its owner wants that."""
    every = tables(14, 3)
    names = ("berlin", "lyon", "ulm")
    every[0]["dose"] = every[0]["dose"] / 1000
    every[1] = every[1][["dose", "age", "level", "town", "state", "test"]]
    write_tables(tmp_path, names, every)
    with real_federation(tmp_path, names=names) as fed:
        asked_for(fed, question(), berlin={"differences": "refuse"})
        assert "differs: dose:" in log_of(fed, "berlin")
        assert "differs: the order of columns: it is dose, age" in log_of(fed, "lyon")
        head = (tmp_path / "facts.toml").read_text().partition("[")[0]
        assert "# berlin: rows: its rows differ in dose." in head  # and no number of its own
        assert "lyon: " not in head


@pytest.mark.parametrize(
    ("policy", "changes", "about"),
    [
        ({"facts": []}, {}, "policy: facts"),
        ({"facts": ["counts", "moments"]}, {}, "policy: facts"),
        ({"sums": "secure"}, {}, "policy: sums"),
        ({"least_sites": 4}, {"sums": "secure"}, "policy: least_sites"),
        ({"epsilon": 1.0, "max_rows": 100}, {}, "policy: epsilon"),
        ({"epsilon": 1.0, "max_rows": 100}, {"epsilon": 0.5, "delta": 1e-3}, "policy: delta"),
    ],
)
def test_a_policy_decides_before_any_row_is_read(
    tmp_path: Path, policy: dict[str, Any], changes: dict[str, Any], about: str
) -> None:
    every = tables(15, 3)
    names = ("berlin", "lyon", "ulm")
    write_tables(tmp_path, names, every)
    with real_federation(tmp_path, names=names) as fed:
        started(fed, question(**changes), ulm=policy)
        said = fed.wait_end("ulm", 2)
        assert "policy." in said
        refused = f"waiting for ulm (the site does not take part: {about}"
        wait_until(lambda: refused in fed.output("facts"))
        fed.processes["facts"].signal(signal.SIGINT)
        assert "go on with: fedgist facts" in " ".join(fed.wait_end("facts", 130).split())
        assert "does not take part" in log_of(fed, "ulm")


def test_a_budget_is_charged_for_each_exchange_and_ends(tmp_path: Path) -> None:
    """Two exchanges, then one; the third does not fit, and nothing of it leaves."""
    rng = np.random.default_rng(0)
    names = ("berlin", "lyon", "ulm")
    for name in names:
        rows = 4000
        ages = rng.normal(60, 10, rows)
        table = pd.DataFrame({"age": ages, "state": rng.choice(CLASSES, rows), "test": 0})
        table.loc[0, "test"] = 1
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    about = {"classes": [*CLASSES], "columns": {"age": "number"}, "epsilon": 1.0}
    budget = {name: {"epsilon": 3.5, "delta": 1e-5, "max_rows": 5000} for name in names}
    with real_federation(tmp_path, names=names) as fed:
        recipe = asked_for(fed, about, **budget)
        assert recipe["data"]["mean"] == pytest.approx([60], abs=20)  # of a unit that was found
        for name in names:
            fed.kill(name)
        ledger = json.loads((tmp_path / "state-ulm/ledger.json").read_text())
        (spent,) = ledger["accounts"]["data"]["runs"].values()
        assert (spent["epsilon"], spent["delta"], spent["round"]) == (2.0, 2e-6, 1)
        about["columns"] = {"age": {"centre": 60, "unit": 10}}
        recipe = asked_for(fed, about, **budget)
        assert recipe["data"]["mean"] == pytest.approx([60], abs=0.5)
        assert recipe["data"]["std"] == pytest.approx([10], abs=0.5)
        for name in names:
            fed.kill(name)
        started(fed, about, **budget)
        said = " ".join(fed.wait_end("facts", 1).split())
        assert "would spend more epsilon than this site's policy allows" in said
        assert "would spend more than policy.epsilon = 3.5" in log_of(fed, "ulm")
        assert log_of(fed, "ulm").count("sent upload FactsSums") == 2


def test_a_total_over_other_sites_is_refused_if_it_tells_of_few(tmp_path: Path) -> None:
    """With one site less, the difference of two secure totals would be this site's sums."""
    every = tables(16, len(FIVE))
    write_tables(tmp_path, FIVE, every)
    with real_federation(tmp_path, names=FIVE) as fed:
        asked_for(fed, question(sums="secure"))
        for name in FIVE:
            fed.kill(name)
        started(fed, question(sums="secure", least_sites=4), york={"facts": []})
        fed.wait_end("york", 2)
        said = " ".join(fed.wait_end("facts", 1).split())
        assert "policy" in said
        assert "ask the same sites as before" in said
        for name in FIVE[:-1]:
            fed.kill(name)
        again = question(sums="secure", correlations=False)
        recipe = asked_for(fed, again)  # other figures of the same sites
        assert recipe["data"]["classes"] == [*CLASSES]


def test_sites_that_are_not_there_are_named(tmp_path: Path) -> None:
    """And what a site's rows lack is said there."""
    every, names = tables(18, 3), ("berlin", "lyon", "ulm")
    every[0]["age"] = [f"{age:.1f}".replace(".", ",") for age in every[0]["age"]]
    every[0].loc[3:, "age"] = "60.5"
    write_tables(tmp_path, names, every)
    with real_federation(tmp_path, names=names) as fed:
        started(fed, question(least_sites=2), ulm={"facts": []})
        fed.wait_end("ulm", 2)
        recipe = answered(fed)
        head = (tmp_path / "facts.toml").read_text().partition("[")[0]
        assert "Rows of 2 of 3 sites: berlin, lyon." in head
        assert "ulm has no part: the site does not take part: policy: facts" in head
        assert recipe["data"]["classes"] == [*CLASSES]
        assert "age: 3 cells hold no number and count as missing, such as in row 1" in log_of(
            fed, "berlin"
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "facts.html"), "--out facts.html: name the recipe"),
        (("--out", "kits"), "--out kits: name the recipe"),
        (("--recipe", "bad.toml"), "bad.toml: trian: unknown key"),
        (("--recipe", "none.toml"), "no recipe none.toml"),
        (("--ask", "none.toml"), "there is no none.toml"),
    ],
)
def test_what_could_not_be_written_is_said_before_anybody_is_asked(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    with real_federation(tmp_path) as fed:
        (tmp_path / "question.toml").write_text(as_toml(question()))
        (tmp_path / "bad.toml").write_text("[trian]\nlr = 1\n")
        asked = {"--ask": "question.toml", words[0]: words[1]}
        given = [word for pair in asked.items() for word in pair]
        done = fedgist("facts", "kits/server", *given, cwd=fed.folder, code=2)
        assert says in " ".join(done.stderr.split())


def test_a_simulation_reads_columns_as_the_question_names_them(tmp_path: Path) -> None:
    """In its order, with its categories; some of them, and one that is empty."""
    table = tables(19, 1)[0].assign(none="")
    table["town"] = ["Ulm"] * 5 + ["Bonn"] * (len(table) - 5)
    table.to_csv(tmp_path / "all.csv", index=False)
    raw = {"data": data_of("all.csv") | {"missing": "mean"}, "clients": {"num_clients": 2}}
    raw["data"] = raw["data"] | {"ignore": ["none"]}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(raw))
    train = table[table["test"] == 0]

    def shown(about: dict[str, Any], code: int = 0) -> str:
        (tmp_path / "q.toml").write_text(as_toml({"classes": [*CLASSES]} | about))
        done = fedgist("partition", "recipe.toml", "--facts", "q.toml", cwd=tmp_path, code=code)
        return " ".join((done.stdout if code == 0 else done.stderr).split())

    found = shown({"columns": {"town": ["Ulm", "Rome", "Bonn"], "age": {"centre": 50, "unit": 9}}})
    ulm, bonn = (int((train["town"] == name).sum()) for name in ("Ulm", "Bonn"))
    assert f"Ulm {ulm} " in found
    assert "Rome 0 " in found
    assert f"Bonn {bonn} " in found
    assert "none: too few rows have it" in shown({"columns": {"none": "number"}}, 1)
    assert "no column 'x'" in shown({"columns": {"x": "number"}}, 2)
