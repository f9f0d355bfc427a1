"""A server that has several secure totals under way opens no message by their difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedgist.core.message import message
from fedgist.core.replies import ClientInfo
from fedgist.core.tree import Tree
from fedgist.errors import MessageError
from fedgist.federation.site.total_keys import FactsBook, TotalsBook
from fedgist.wire.envelope import Header, Packed, header_of, seal, unseal
from fedgist.wire.secure.group import Group
from fedgist.wire.secure.local_keys import LocalCredentials
from fedgist.wire.secure.notes import Confirmations, Keys, Sealed, Survivors
from fedgist.wire.secure.site import Book, MemoryBook, SecureSite, about_of, occasion_of

SITES, WHOLE, PART = 4, (0, 1, 2, 3), (0, 1, 2)
NAMES = ("berlin", "lyon", "ulm", "york")


@message(reduce="sum")
class Sums:
    x: torch.Tensor


@message(reduce="each")
class Asked:
    x: torch.Tensor


class Unchanging:
    """A site that has the same sums in each round, as one whose body is fixed."""

    def __init__(self, number: int) -> None:
        self.client = ClientInfo(number, ("m",))

    def handle(self, envelope: bytes) -> bytes:
        request = header_of(envelope).model_copy(update={"purpose": "reply"})
        return seal(request, {"upload": Sums(torch.tensor([1.25 * (self.client.id + 1), 7.0]))})


def secure_sites(book: Callable[[int], Book]) -> dict[int, SecureSite]:
    keys = {n: Ed25519PrivateKey.generate() for n in range(SITES)}
    public = {n: key.public_key() for n, key in keys.items()}
    return {
        n: SecureSite(Unchanging(n), LocalCredentials(keys[n], public), book=book(n))
        for n in range(SITES)
    }


def steps(sites: dict[int, SecureSite], number: int, members: Sequence[int]) -> Iterator[str]:
    """Work at the total of a round's stage; what is between two steps may be another's steps."""
    down = Packed.of(Asked(torch.zeros(1)))
    header = Header(
        purpose="train", run="ab" * 8, round=number, stage="train", client=0, architecture="m"
    )
    group = Group(occasion_of(header, about_of("", down.about.digest)), 2)

    def ask(member: int, purpose: str, name: str, note: Tree | Packed) -> Tree:
        request = header.model_copy(update={"purpose": purpose, "client": member})
        reply, messages = unseal(sites[member].handle(seal(request, {name: note})), 1 << 30)
        if reply.purpose == "refusal":
            raise MessageError(reply.reason)
        return messages[purpose]

    for n in members:
        group.add_keys(n, ask(n, "train", "download", down).all())
    yield "under way"
    keys = Keys.of(group.advertised.values())
    for n in members:
        group.add_sealed(n, ask(n, "share", "step", keys).all())
    yield "under way"
    for n in members:
        group.add_masked(n, ask(n, "mask", "step", Sealed.of(group.shares_for(n))).ring())
    yield "under way"
    signed = {n: ask(n, "confirm", "step", Survivors.of(members)).all()[n] for n in members}
    yield "under way"
    shares = {n: ask(n, "unmask", "step", Confirmations.of(signed)).all() for n in members}
    group.total(shares)
    yield "opened"


def facts_book(folder: Path, number: int) -> Book:
    totals = TotalsBook(folder / f"totals-{number}")
    return FactsBook(totals, folder / f"groups-{number}", NAMES, "data")


@pytest.mark.parametrize("kind", ["messages", "facts"])
def test_only_one_of_two_totals_of_the_same_messages_is_opened(kind: str, tmp_path: Path) -> None:
    # seen: both were begun before either was opened, and their difference was a site's message
    opened = []
    for first in [*itertools.combinations(range(8), 4)][::7]:
        folder = tmp_path / "".join(map(str, first))
        folder.mkdir()
        facts = partial(facts_book, folder)
        sites = secure_sites(facts if kind == "facts" else lambda _: MemoryBook())
        both = [steps(sites, 2, WHOLE), steps(sites, 1, PART)]
        order = [int(turn not in first) for turn in range(8)]
        ends = [end_of(both[total]) for total in [*order, 0, 1]]  # the fifth step opens a total
        opened.append(ends.count("opened"))
    assert {*opened} == {1}


def end_of(total: Iterator[str]) -> str:
    """Do the next step of a total; a refused one is over."""
    try:
        return next(total, "refused")
    except MessageError:
        return "refused"
