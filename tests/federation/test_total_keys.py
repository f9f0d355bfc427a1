"""Whom a site shares a secure total with, and its book of totals."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import MessageError, SiteError
from fedgist.federation.keys import provision
from fedgist.federation.keys.certificates import fingerprint
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.site.total_keys import (
    FactsBook,
    KitCredentials,
    TotalsBook,
    forget_group,
)

NAMES = ("berlin", "lyon", "ulm")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kit]:
    found = {}
    for root in ("one", "other"):
        folder = tmp_path_factory.mktemp(root)
        table = {"name": root, "server": "localhost:7777", "sites": list(NAMES), "keys": "central"}
        (folder / "f.toml").write_text(tomli_w.dumps(table | {"administrators": ["anna"]}))
        provision.provision(folder / "f.toml", folder / "kits")
        for name in NAMES:
            found[f"{root} {name}"] = read_kit(folder / "kits/sites" / name)
        found[f"{root} anna"] = read_kit(folder / "kits/administrators/anna")
    return found


def of(kit: Kit, **pinned: str) -> KitCredentials:
    return KitCredentials(kit, NAMES, pinned)


def test_a_signature_is_that_of_the_site_of_a_number(kits: dict[str, Kit]) -> None:
    here, ulm = of(kits["one berlin"]), of(kits["one ulm"])
    text, signed = b"text", ulm.sign(b"text")
    assert here.is_signed(2, ulm.certificate, text, signed)
    assert not here.is_signed(1, ulm.certificate, text, signed)  # another site's number
    assert not here.is_signed(7, ulm.certificate, text, signed)  # nobody's
    assert not here.is_signed(2, ulm.certificate, b"other", signed)
    assert not here.is_signed(2, here.certificate, text, signed)
    assert not here.is_signed(2, b"no certificate", text, signed)


@pytest.mark.parametrize("who", ["other ulm", "one anna"])
def test_only_sites_of_the_federation_are_trusted(kits: dict[str, Kit], who: str) -> None:
    here, strange = of(kits["one berlin"]), of(kits[who])
    names = (*NAMES[:2], "anna") if who == "one anna" else NAMES
    here = KitCredentials(here.kit, names, {})
    assert not here.is_signed(2, strange.certificate, b"text", strange.sign(b"text"))


def test_a_site_may_name_the_keys_of_the_others(kits: dict[str, Kit]) -> None:
    ulm, lyon = of(kits["one ulm"]), of(kits["one lyon"])
    here = of(kits["one berlin"], ulm=fingerprint(ulm.certificate))
    assert here.is_signed(2, ulm.certificate, b"text", ulm.sign(b"text"))
    assert not here.is_signed(1, lyon.certificate, b"text", lyon.sign(b"text"))  # not listed
    assert here.is_signed(0, here.certificate, b"text", here.sign(b"text"))  # itself
    wrong = of(kits["one berlin"], ulm=fingerprint(lyon.certificate))
    assert not wrong.is_signed(2, ulm.certificate, b"text", ulm.sign(b"text"))


def test_a_book_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "totals.json"
    book = TotalsBook(path)
    assert not book.holds("stage")
    book.add("stage", "message")
    again = TotalsBook(path)
    assert again.holds("stage")
    assert again.repeats("message")
    assert not again.holds("other")
    path.write_text("[[3]]")
    with pytest.raises(SiteError, match="cannot be read"):
        TotalsBook(path)


SITES = tuple("abcdefghi")


def accepted(folder: Path, groups: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return the groups that all their sites accept, one after the other."""
    books = [
        FactsBook(TotalsBook(folder / f"{name}-t.json"), folder / f"{name}.json", SITES, "d")
        for name in SITES
    ]
    out = []
    for number, group in enumerate(groups):
        try:
            for site in group:
                books[site].check(group)
        except MessageError:
            continue
        for site in group:
            books[site].add(f"stage {number}", "message", group)
        out.append(group)
    return out


@settings(max_examples=60)
@given(
    st.sampled_from([3, 4]).flatmap(
        lambda least: st.tuples(
            st.just(least),
            st.lists(st.frozensets(st.integers(0, 8), min_size=least), min_size=2, max_size=6),
        )
    )
)
def test_no_combination_of_totals_of_facts_tells_of_few_sites(
    drawn: tuple[int, list[frozenset[int]]],
) -> None:
    """Whatever is added and subtracted, numbers of fewer than ``least`` sites never remain."""
    least, groups = drawn
    with tempfile.TemporaryDirectory() as folder:
        found = accepted(Path(folder), groups)
    rows = np.array([[site in group for site in range(9)] for group in found], float)
    if not len(rows):
        return
    for count in range(1, least):
        for few in itertools.combinations(range(9), count):
            others = [site for site in range(9) if site not in few]
            whole, without = (np.linalg.matrix_rank(part) for part in (rows, rows[:, others]))
            assert whole == without, (found, few)


def test_the_same_group_may_be_asked_again(tmp_path: Path) -> None:
    whole, less = frozenset(range(9)), frozenset(range(8))
    assert accepted(tmp_path, [whole, less, whole]) == [whole, whole]


def test_a_damaged_book_of_facts_is_said(tmp_path: Path) -> None:
    path = tmp_path / "groups.json"
    book = FactsBook(TotalsBook(tmp_path / "t.json"), path, SITES, "d")
    book.add("stage", "message", range(4))
    assert book.holds("stage")
    assert not book.repeats("message")
    with pytest.raises(MessageError, match="the same sites as before"):
        book.check(range(5))
    forget_group(path, "d")  # the data are new
    book.check(range(5))
    path.write_text("{")
    with pytest.raises(SiteError, match="cannot be read"):
        book.check(range(4))
