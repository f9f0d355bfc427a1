"""A site that is asked for facts, without a network: what it answers, keeps, charges and hides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from facts_tables import CLASSES, as_toml, data_of, question, tables
from fedgist.core.tree import map_leaves, named
from fedgist.errors import MessageError, OwnerError, SiteError
from fedgist.federation.network.invitation import Invitation
from fedgist.federation.site.agent import digest_of
from fedgist.federation.site.facts import FactsSite, check_question, without_few
from fedgist.federation.site.file import SiteFile, read_site_file
from fedgist.runs.files.digests import of_text
from fedgist.wire.envelope import Header, header_of, seal, unseal
from fedgist.world.facts.question import Filling, Plan, Question, parsed, read_question
from fedgist.world.facts.sums import (
    COMPARE,
    FACTS,
    GROUP,
    ROUNDS,
    SCALES,
    Answered,
    FactsSums,
    Told,
    facts_sums,
)

RUN = "0123456789abcdef"
SCALES_GIVEN = ((50.0, 20.0), (3000.0, 4000.0), (0.0, 1e-4))


def site_file(folder: Path, table: pd.DataFrame, **policy: Any) -> SiteFile:
    """Write a site's table and its file, and read the file."""
    table.to_csv(folder / "ulm.csv", index=False)
    allowed = ["counts", "moments", "histograms", "categories"]
    raw = {
        "data": data_of("ulm.csv") | {"missing": "mean"},
        "policy": {"facts": allowed} | policy,
    }
    (folder / "ulm.toml").write_text(tomli_w.dumps(raw))
    return read_site_file(folder / "ulm.toml")


def asked(folder: Path, **changes: Any) -> Question:
    (folder / "question.toml").write_text(as_toml(question(**changes)))
    return read_question(folder / "question.toml")


def facts_site(file: SiteFile, about: Question, said: list[str] | None = None) -> FactsSite:
    text = about.model_dump_json()
    invitation = Invitation(
        run=RUN,
        recipe="",
        digest=of_text(text),
        number=1,
        names=("berlin", "ulm", "york"),
        certificate="",
        last=None,
        state_lost="refuse",
        question=text,
    )
    heard = [] if said is None else said
    return FactsSite(parsed(text), invitation, file, 7, digest_of, heard.append)


def request(of_stage: str, down: Any, **changes: Any) -> bytes:
    header = Header(
        purpose="finish" if of_stage == COMPARE else "train",
        run=RUN,
        round=ROUNDS[of_stage],
        stage=of_stage,
        client=1,
        architecture=GROUP,
    )
    return seal(header.model_copy(update=changes), {"download": down})


def told(scales: tuple[tuple[float, float], ...] = ()) -> Told:
    return Told.of(Filling(scales=scales).model_dump_json())


def refused(reply: bytes) -> str:
    header = header_of(reply)
    assert header.purpose == "refusal"
    return header.words


def test_the_same_question_has_the_same_answer_and_another_one_none(tmp_path: Path) -> None:
    """Also after a restart, and if the rows have changed meanwhile."""
    about, table = asked(tmp_path), tables(3, 1)[0]
    file = site_file(tmp_path, table)
    first = facts_site(file, about).handle(request(FACTS, told(SCALES_GIVEN)))
    site_file(tmp_path, table.iloc[:5])
    again = facts_site(file, about)
    assert again.handle(request(FACTS, told(SCALES_GIVEN))) == first
    others = ((51.0, 20.0), *SCALES_GIVEN[1:])
    assert "was answered for another question" in refused(
        again.handle(request(FACTS, told(others)))
    )


def test_each_exchange_is_charged_before_its_reply_is_kept(tmp_path: Path) -> None:
    about = asked(tmp_path, epsilon=0.5, delta=1e-7)
    file = site_file(tmp_path, tables(3, 1)[0], epsilon=1.2, max_rows=100)
    site = facts_site(file, about)
    noisy = site.handle(request(SCALES, told()))
    assert header_of(noisy).purpose == "reply"

    def spent() -> tuple[float, float, int]:
        ledger = json.loads((file.state_folder / "ledger.json").read_text())
        (run,) = ledger["accounts"]["data"]["runs"].values()
        return run["epsilon"], run["delta"], run["round"]

    assert spent() == (0.5, 1e-7, 0)
    assert site.handle(request(SCALES, told())) == noisy  # and not charged again
    assert header_of(site.handle(request(FACTS, told(SCALES_GIVEN)))).purpose == "reply"
    assert spent() == (1.0, 2e-7, 1)
    for kept in site.folder.glob("facts-*.reply"):
        kept.unlink()
    assert "its reply is lost" in refused(site.handle(request(FACTS, told(SCALES_GIVEN))))


def test_an_exchange_beyond_the_budget_releases_nothing(tmp_path: Path) -> None:
    about = asked(tmp_path, epsilon=2.0)
    site = facts_site(site_file(tmp_path, tables(3, 1)[0], epsilon=1.0, max_rows=100), about)
    assert "more epsilon than this site's policy allows" in refused(
        site.handle(request(FACTS, told(SCALES_GIVEN)))
    )
    assert not list(site.folder.glob("*")) if site.folder.exists() else True


def test_noise_differs_and_exact_sums_stay(tmp_path: Path) -> None:
    """Under a budget what leaves is not the sums, and no two runs have the same noise."""
    about = asked(tmp_path, epsilon=0.5)
    file = site_file(tmp_path, tables(3, 1)[0])

    def sums(number: int) -> FactsSums:
        site = facts_site(file, about)
        site.invitation = site.invitation.model_copy(update={"run": f"{number:016x}"})
        reply = site.handle(request(FACTS, told(SCALES_GIVEN), run=f"{number:016x}"))
        _, messages = unseal(reply, len(reply))
        upload = messages["upload"]
        assert isinstance(upload, FactsSums)
        return upload

    one, other = sums(1), sums(2)
    assert float(one.rows) != float(other.rows)
    assert float(one.rows) != round(float(one.rows))


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_what_rows_decide_is_no_refusal_under_a_budget(
    tmp_path: Path, epsilon: float | None
) -> None:
    """A column that the table lacks: the owner's error, and with a budget nobody else's."""
    about = asked(tmp_path, **({} if epsilon is None else {"epsilon": epsilon}))
    table = tables(3, 1)[0].drop(columns="dose")
    site = facts_site(site_file(tmp_path, table), about)
    if epsilon is None:
        words = refused(site.handle(request(FACTS, told(SCALES_GIVEN))))
        assert "dose" not in words
    else:
        with pytest.raises(OwnerError, match="dose"):
            site.handle(request(FACTS, told(SCALES_GIVEN)))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "ffffffffffffffff"},
        {"client": 2},
        {"architecture": "mlp"},
        {"round": 0},
        {"stage": "train"},
        {"purpose": "score"},
    ],
)
def test_a_request_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    site = facts_site(site_file(tmp_path, tables(3, 1)[0]), asked(tmp_path))
    reply = site.handle(request(FACTS, told(SCALES_GIVEN), **changes))
    assert "another exchange" in refused(reply)


@pytest.mark.parametrize(
    "down",
    [
        Told.of("{"),
        Told.of('{"names": {"classes": ["a"]}}'),
        Told.of('{"scales": [[1, 2]]}'),
        Told.of('{"scales": [[1, -2], [1, 1], [1, 1]]}'),
        Told(torch.tensor([255, 254], dtype=torch.uint8)),
        Answered(torch.zeros(0, dtype=torch.uint8), FactsSums(*[torch.zeros(())] * 10)),
    ],
)
def test_a_filling_that_does_not_fit_is_refused(tmp_path: Path, down: Any) -> None:
    site = facts_site(site_file(tmp_path, tables(3, 1)[0]), asked(tmp_path))
    refused(site.handle(request(FACTS, down)))
    assert not site.folder.exists()


def test_counts_of_few_rows_are_not_told(tmp_path: Path) -> None:
    said = list[str]()
    table = tables(9, 1)[0]
    table["dose"] = np.nan
    table.loc[3:4, "dose"] = 100.0
    table["town"] = ["Bonn"] * (len(table) - 1) + ["Ulm"]
    about = asked(tmp_path)
    site = facts_site(site_file(tmp_path, table, least_rows=3), about, said)
    _, messages = unseal(reply := site.handle(request(FACTS, told(SCALES_GIVEN))), len(reply))
    sums = named(messages["upload"])
    assert sums["present"].tolist()[1] == 0
    assert sums["total"].tolist()[1] == 0
    assert all(count == 0 or count >= 3 for count in sums["histograms"].tolist())
    assert sums["categories"].tolist()[1:] == [0, 0]
    assert float(sums["complete"]) == 0
    assert not sums["products"].any()
    (text,) = [text for text in said if "not told" in text]
    assert "dose" in text
    assert "categories of town" in text
    assert "correlations" in text


@pytest.mark.parametrize("least", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_hidden_cannot_be_subtracted(tmp_path: Path, seed: int, least: int) -> None:
    """Counts that are left out of a whole are of enough rows together, and so are other rows."""
    about = asked(tmp_path)
    table = tables(seed, 1)[0]
    file = site_file(tmp_path, table, least_rows=least)
    _, messages = unseal(
        reply := facts_site(file, about).handle(request(FACTS, told(SCALES_GIVEN))), len(reply)
    )
    sums = messages["upload"]
    rows, present = float(sums.rows), sums.present
    for counts, whole in ((sums.histograms, float(present[0])), (sums.categories, rows)):
        assert all(count == 0 or count >= least for count in counts.tolist())
        left = whole - float(counts.sum())
        assert left == 0 or left >= least
    apart = [*(present - sums.complete).tolist(), rows - float(sums.complete)]
    assert not sums.complete or all(count == 0 or count >= least for count in apart)


def test_a_search_tells_of_few_rows_no_more_than_the_facts(tmp_path: Path) -> None:
    table = tables(9, 1)[0].assign(dose=np.nan)
    table.loc[3, "dose"] = 4321.0
    site = facts_site(site_file(tmp_path, table, least_rows=5), asked(tmp_path))
    _, messages = unseal(reply := site.handle(request(SCALES, told())), len(reply))
    for array in named(messages["upload"]).values():
        assert array[1] == 0
        assert array[0] != 0


def compared(site: FactsSite, total: FactsSums, scales: Any = SCALES_GIVEN) -> str:
    """The words in which a site says that its rows differ, or nothing."""
    reply = site.handle(request(COMPARE, Answered(told(scales).text, total)))
    return "" if header_of(reply).purpose == "reply" else refused(reply)


def forged(site: FactsSite) -> FactsSums:
    """A total beside which everything of a site is strange."""
    (own,) = site.sums.values()
    strange = map_leaves(lambda array: array * 2.0, own)
    return dataclasses.replace(strange, squares=own.squares * 1e6)


def test_a_comparison_tells_columns_and_no_number_and_once(tmp_path: Path) -> None:
    """A server may send any total: it learns which columns differ, of one total."""
    about = asked(tmp_path)
    site = facts_site(site_file(tmp_path, tables(3, 1)[0], differences="refuse"), about)
    zeros = map_leaves(torch.zeros_like, facts_sums(Plan(about, Filling(scales=SCALES_GIVEN)), ()))
    assert "gave no facts" in compared(site, zeros)
    site.handle(request(FACTS, told(SCALES_GIVEN)))
    total = forged(site)
    words = compared(site, total)
    assert words == "rows: its rows differ in age, dose, level"
    assert compared(site, total) == words  # the same bytes again
    assert "another question" in compared(site, map_leaves(lambda array: array * 3, total))


@pytest.mark.parametrize("changes", [{"sums": "secure"}, {"epsilon": 1.0}])
def test_under_secure_sums_or_noise_differences_stay(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    about, said = asked(tmp_path, **changes), list[str]()
    file = site_file(tmp_path, tables(3, 1)[0], differences="refuse")
    site = facts_site(file, about, said)
    site.handle(request(FACTS, told(SCALES_GIVEN)))
    assert compared(site, forged(site)) == ""
    assert any("differs: age" in text for text in said) or "epsilon" in changes


@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_values_too_far_from_the_centre_are_named(tmp_path: Path, sums: str) -> None:
    table = tables(3, 1)[0]
    table.loc[4, "dose"] = 1e200 if sums == "plain" else 1e9
    site = facts_site(site_file(tmp_path, table), asked(tmp_path, sums=sums))
    scales = ((50.0, 20.0), (3000.0, 4.0), (0.0, 1e-4))
    words = refused(site.handle(request(FACTS, told(scales))))
    assert words.startswith("rows: dose: values too far from the centre")


def test_names_that_are_too_long_are_one_line(tmp_path: Path) -> None:
    table = tables(3, 1)[0]
    table["town"] = "x" * 300
    about = asked(tmp_path, columns={"town": "categories"})
    said = list[str]()
    site = facts_site(site_file(tmp_path, table, least_rows=2), about, said)
    with pytest.raises(SiteError, match=r"columns\.town: 1 names, of which the longest has 300"):
        site.hello()
    assert said == []


@pytest.mark.parametrize("stated", [{"ignore": ["dose"]}, {"columns": {"age": "number"}}])
def test_a_site_file_says_which_columns_may_be_asked_about(
    tmp_path: Path, stated: dict[str, Any]
) -> None:
    file = site_file(tmp_path, tables(3, 1)[0])
    section = file.table.data.model_copy(update=stated)
    table = type(file.table.data).model_validate(section.model_dump() | stated)
    file = dataclasses.replace(file, table=file.table.model_copy(update={"data": table}))
    with pytest.raises(SiteError, match="'dose'"):
        check_question(asked(tmp_path), file, 3)
    check_question(asked(tmp_path, columns={"age": "number"}), file, 3)


def test_names_are_told_of_several_rows_alone(tmp_path: Path) -> None:
    about = asked(tmp_path, classes=[])
    with pytest.raises(SiteError, match=r"policy\.least_rows = 5 allows names of five"):
        check_question(about, site_file(tmp_path, tables(3, 1)[0]), 3)
    check_question(about, site_file(tmp_path, tables(3, 1)[0], least_rows=2), 3)


def test_a_column_that_a_table_lacks_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    site = facts_site(
        site_file(tmp_path, tables(3, 1)[0]), asked(tmp_path, columns={"x": "number"})
    )
    with pytest.raises(SiteError, match=r"ulm\.csv has no column 'x'; it has age, dose"):
        site.hello()


def test_nothing_is_hidden_where_one_row_is_enough() -> None:
    plan = Plan(parsed('{"classes": ["a"], "input_shape": [1]}'), Filling())
    sums = FactsSums(*[torch.ones(1)] * 10)
    assert without_few(plan, sums, 1) == (sums, [])


def test_rows_of_classes_that_are_never_released_are_in_no_sum(tmp_path: Path) -> None:
    table = tables(9, 1)[0]
    about, said = asked(tmp_path), list[str]()
    site = facts_site(site_file(tmp_path, table, never_released=["ill"]), about, said)
    _, messages = unseal(reply := site.handle(request(FACTS, told(SCALES_GIVEN))), len(reply))
    well = int(((table["state"] == "well") & (table["test"] == 0)).sum())
    assert float(messages["upload"].rows) == well
    assert messages["upload"].classes.tolist() == [0, well]
    assert "class ill: its rows are not used, because policy.never_released names it" in said


def test_least_rows_and_a_budget_exclude_each_other(tmp_path: Path) -> None:
    file = site_file(tmp_path, tables(3, 1)[0], least_rows=5)
    with pytest.raises(SiteError, match="lets one row decide"):
        check_question(asked(tmp_path, epsilon=1.0), file, 3)
    check_question(asked(tmp_path), file, 3)


def test_a_question_of_another_machine_is_checked_as_a_file_is() -> None:
    for text in ("{", '{"classes": ["a"]}', '{"classes": [], "input_shape": [1], "epsilon": 1}'):
        with pytest.raises(MessageError, match="question"):
            parsed(text)
    assert parsed('{"classes": ["a"], "input_shape": [1]}').kinds == ("counts", "moments")
    assert CLASSES


@pytest.mark.parametrize(
    ("policy", "changes", "says"),
    [
        ({"never_released": ["1"]}, {"target": "numbers", "classes": ["state"]}, "names classes"),
        ({"least_rows": 1000}, {"target": "numbers", "classes": ["state"]}, "fewer than"),
        ({"never_released": ["Ill"]}, {}, "names no class: 'Ill'"),
    ],
)
def test_a_policy_on_classes_is_not_passed_by(
    policy: dict[str, Any], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    # seen: a question of numbers got the sums of rows of a class that is never released
    table, columns = tables(9, 1)[0], {}
    if "target" in changes:
        columns = {"columns": {"dose": "number"}}
        table["state"] = (table["state"] == "ill").astype(int)
    about, said = asked(tmp_path, **changes, **columns), list[str]()
    site = facts_site(site_file(tmp_path, table, **policy), about, said)
    scales = SCALES_GIVEN[1:3] if columns else SCALES_GIVEN
    assert header_of(site.handle(request(FACTS, told(scales)))).purpose == "refusal"
    assert any(says in sentence for sentence in said)


LEAST = 5


@given(st.integers(0, 30), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_of_labels_neither_few_rows_with_nor_few_without_are_told(
    more: int, counts: list[int]
) -> None:
    rows = float(max(counts) + more)
    text = {"target": "labels", "classes": [*"abcd"[: len(counts)]], "input_shape": [1]}
    plan = Plan(parsed(json.dumps(text)), Filling())
    one = {name: torch.full((1,), rows) for name in ("present", "total", "squares")}
    empty = {field.name: torch.zeros(0) for field in dataclasses.fields(FactsSums)} | one
    about = {"rows": torch.tensor(rows), "complete": torch.zeros(())}
    sums = FactsSums(**(empty | about | {"classes": torch.tensor(counts).double()}))
    told_of, _ = without_few(plan, sums, LEAST)
    for count, exact in zip(told_of.classes.tolist(), counts, strict=True):
        assert count in (0, exact)
        assert count == 0 or (count >= LEAST and (rows == count or rows - count >= LEAST))


@pytest.mark.parametrize("seed", range(12))
def test_no_count_of_few_rows_is_the_difference_of_two_that_are_told(
    seed: int, tmp_path: Path
) -> None:
    # seen: 52 rows, of which 48 have a number, tell that 4 lack it
    rng, table = np.random.default_rng(seed), tables(seed, 1)[0]
    for column in ("age", "dose", "town"):
        lost = rng.permutation(len(table))[: int(rng.integers(0, 2 * LEAST))]
        table.loc[lost, column] = None
    kinds = {"age": "number", "dose": "number", "level": "number", "town": ["Bonn", "Lyon", "Ulm"]}
    edges = {"age": {"edges": [20.0, 40.0, 60.0, 80.0]}}
    about = asked(tmp_path, columns=kinds | edges)
    site = facts_site(site_file(tmp_path, table, least_rows=LEAST), about)
    reply = site.handle(request(FACTS, told(SCALES_GIVEN)))
    if header_of(reply).purpose == "refusal":
        return
    sums = unseal(reply, len(reply))[1]["upload"]
    rows, bins = float(sums.rows), float(sums.histograms.sum())
    several = [
        *sums.present.tolist(),
        bins,
        float(sums.categories.sum()),
        float(sums.classes.sum()),
    ]
    for count in [*several, *sums.categories.tolist(), *sums.histograms.tolist()]:
        assert count == 0 or count >= LEAST
    for count in several:
        assert count == 0 or rows - count == 0 or rows - count >= LEAST
