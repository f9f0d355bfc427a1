"""The total of what sites send, and nothing else: sums, losses of sites, and attacks by name."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedgist.core.message import Form, message
from fedgist.errors import MessageError
from fedgist.wire.secure import masks, shares
from fedgist.wire.secure.occasion import survivors_text
from fedgist.wire.secure.ring import decoded, encoded
from secure_worlds import OCCASION, Codes, added, members, numbers, until_masked


def sum_of(values: dict[int, Any], of: Any) -> Any:
    return sum((values[n] for n in of), start=np.zeros(len(values[0]), np.uint64))


@settings(max_examples=60)
@given(st.data())
def test_the_total_is_of_those_whose_numbers_arrived(data: st.DataObject) -> None:
    """With any sites lost between any two steps, as long as the threshold is left."""
    count = data.draw(st.integers(3, 9))
    most = count - shares.threshold(count)
    gone = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, most))]
    at = [data.draw(st.integers(1, 4)) for _ in gone]
    lost = [[n for n, step in zip(gone, at, strict=True) if step == i] for i in range(5)]
    values = numbers(count, 7, data.draw(st.integers(0, 99)))
    total, _ = added(members(range(count)), values, lost)
    there = set(range(count)) - {n for i in (0, 1, 2) for n in lost[i]}
    np.testing.assert_array_equal(total, sum_of(values, there))


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [3, 4, 9])
def test_below_the_threshold_nothing_is_opened(count: int, step: int) -> None:
    most = count - shares.threshold(count) + 1
    lost = [[*range(most)] if i == step else [] for i in range(5)]
    with pytest.raises(MessageError, match="are needed"):
        added(members(range(count)), numbers(count, 3), lost)


def test_figures_of_the_threshold() -> None:
    may_be_lost = {n: n - shares.threshold(n) for n in (3, 4, 9, 50)}
    assert may_be_lost == {3: 0, 4: 1, 9: 2, 50: 16}


# ---- what the server sees


def test_masked_numbers_of_equal_totals_are_distributed_alike() -> None:
    """Each site's masked numbers are uniform, whatever it sent; so are those of both worlds."""
    worlds = ([0, 0, 30], [10, 10, 10]), ([2**40, 5, 1], [5, 2**40, 1])
    for world in itertools.chain(*worlds):
        seen = []
        for _ in range(60):
            values = {n: np.full(16, v, np.uint64) for n, v in enumerate(world)}
            total, view = added(members(range(3)), values)
            assert set(total.tolist()) == {sum(world)}
            seen.append(np.stack([view.masked[n] for n in range(3)]))
        whole = np.stack(seen)  # (repeats, sites, numbers)
        for site in range(3):
            for shift in (0, 28, 60):
                digits = (whole[:, site] >> np.uint64(shift)) & np.uint64(15)
                assert (
                    chisquare(np.bincount(digits.ravel().astype(int), minlength=16)).pvalue > 1e-4
                )


def test_nothing_that_is_sent_tells_a_message() -> None:
    """Without the shares of the last step even all else gives no site's numbers away."""
    values = {n: np.full(50, n + 1, np.uint64) for n in range(4)}
    _, view = added(members(range(4)), values)
    for one, other in itertools.combinations(range(4), 2):
        assert not np.isin(
            view.masked[one] - view.masked[other], np.arange(-9, 9).astype(np.uint64)
        ).any()
    for n, answer in view.unmasked.items():
        assert not set(answer.keys) & set(answer.seeds), n


# ---- attacks by name


def test_survivor_lists_that_differ_open_nothing() -> None:
    """The server tells some that site 0 is in the total, and others that it left."""
    sites, values = members(range(9)), numbers(9, 3)
    group, view = until_masked(sites, values)
    everyone, without = frozenset(range(9)), frozenset(range(1, 9))
    confirmed = {n: sites[n].confirm(everyone if n % 2 else without) for n in range(1, 9)}
    for n in range(1, 9):
        with pytest.raises(MessageError, match="confirmed another group"):
            sites[n].unmask(confirmed)
    with pytest.raises(MessageError, match="0 sites gave shares"):
        group.total({})
    assert view.masked


def test_members_that_were_shown_other_lists_have_nothing_in_common() -> None:
    """The server shows each a group of its own, in which the threshold is another."""
    sites = members(range(6))
    advertised = {n: sites[n].advertise() for n in range(6)}
    lists = {n: range(3) if n == 0 else range(6) for n in range(6)}
    sealed = {n: sites[n].share([advertised[m] for m in lists[n]]) for n in range(6)}
    with pytest.raises(MessageError, match="sealed shares were changed"):
        sites[0].mask({1: sealed[1][0], 2: sealed[2][0]}, numbers(6, 3)[0])


def test_confirmations_of_an_attempt_before_do_not_count() -> None:
    """Not even under the same number, by the same sites, for the same survivors."""
    before = members(range(3))
    _, view = until_masked(before, numbers(3, 3))
    old = {n: before[n].confirm(frozenset(range(3))) for n in range(3)}
    sites = members(range(3))
    until_masked(sites, numbers(3, 3))
    sites[0].confirm(frozenset(range(3)))
    with pytest.raises(MessageError, match="confirmed another group"):
        sites[0].unmask(old)
    assert view.masked


def test_one_certificate_is_one_member() -> None:
    """A site that works for the server counts once, whatever numbers the server gives it."""
    sites = members(range(3))
    advertised = [sites[n].advertise() for n in range(3)]
    twice = dataclasses.replace(advertised[2], certificate=advertised[1].certificate)
    with pytest.raises(MessageError, match="or two certificates"):
        sites[0].share([*advertised[:2], twice])


@pytest.mark.parametrize("step", ["advertise", "share", "mask", "confirm", "unmask"])
def test_no_step_is_done_twice(step: str) -> None:
    sites, values = members(range(3)), numbers(3, 3)
    _, view = added(sites, values)
    again: dict[str, Any] = {
        "advertise": sites[0].advertise,
        "share": lambda: sites[0].share(view.advertised),
        "mask": lambda: sites[0].mask({1: view.sealed[1][0], 2: view.sealed[2][0]}, values[0]),
        "confirm": lambda: sites[0].confirm(frozenset({0, 1, 2})),
        "unmask": lambda: sites[0].unmask(view.confirmed),
    }
    with pytest.raises(MessageError, match="was done, or is not the next one"):
        again[step]()


@pytest.mark.parametrize("change", ["attempt", "round", "stage", "run", "group", "about"])
def test_keys_of_another_occasion_are_refused(change: str) -> None:
    """Replayed keys; and another download or recipe for one site, which is in ``about``."""
    other: Any = 7 if change in {"attempt", "round"} else "other"
    elsewhere = dataclasses.replace(OCCASION, **{change: other})
    sites = members(range(2)) | members([2], occasion=elsewhere)
    advertised = [sites[n].advertise() for n in range(3)]
    for n in range(2):
        with pytest.raises(MessageError, match="the keys of site 2 are not signed by it"):
            sites[n].share(advertised)


def test_sealed_shares_of_an_old_attempt_are_refused() -> None:
    same: dict[str, Any] = {"sealing": b"s" * 32, "masking": b"m" * 32}
    before = members([0]) | members([1], **same) | members([2])
    _, view = until_masked(before, numbers(3, 3))
    later = dataclasses.replace(OCCASION, attempt=2)
    sites = members([0, 2], occasion=later) | members([1], occasion=later, **same)
    advertised = [sites[n].advertise() for n in range(3)]
    sealed = {n: sites[n].share(advertised) for n in range(3)}
    with pytest.raises(MessageError, match="of another attempt"):
        sites[1].mask({0: view.sealed[0][1], 2: sealed[2][1]}, numbers(3, 3)[1])


def test_the_servers_keys_in_place_of_a_sites_are_refused() -> None:
    sites = members(range(3))
    advertised = [sites[n].advertise() for n in range(3)]
    forged = dataclasses.replace(advertised[2], masking=masks.public_of(b"k" * 32))
    with pytest.raises(MessageError, match="the keys of site 2 are not signed"):
        sites[0].share([*advertised[:2], forged])
    replaced = dataclasses.replace(advertised[1], masking=masks.public_of(b"k" * 32))
    with pytest.raises(MessageError, match="this site's own keys were replaced"):
        sites[1].share([advertised[0], replaced, advertised[2]])


def test_a_site_twice_in_a_group_is_refused() -> None:
    sites = members(range(3))
    advertised = [sites[n].advertise() for n in range(3)]
    with pytest.raises(MessageError, match="each site once"):
        sites[0].share([*advertised, advertised[2]])
    copied = dataclasses.replace(advertised[2], member=3, certificate=b"3")
    copied = dataclasses.replace(copied, signature=Codes(3).sign(copied.signed_text(OCCASION)))
    with pytest.raises(MessageError, match="two keys of a group are the same"):
        sites[1].share([*advertised, copied])


def test_a_group_below_the_sites_own_least_is_refused() -> None:
    sites = members(range(4), least=4)
    advertised = [sites[n].advertise() for n in range(3)]
    with pytest.raises(MessageError, match="groups of 4 or more") as error:
        sites[0].share(advertised)
    assert (error.value.kind, error.value.key) == ("policy", "least_sites")
    # one of four may be lost by the threshold, and not by the sites' own least group
    with pytest.raises(MessageError, match="3 of 4 sites are left, and 4 are needed"):
        added(members(range(4), least=4), numbers(4, 3), [(), (), (3,)])


def test_a_confirmation_is_of_a_member_of_the_total() -> None:
    sites, values = members(range(9)), numbers(9, 3)
    _, view = until_masked(sites, values, [(), (), (8,)])
    survivors = frozenset(view.masked)
    confirmed = {n: sites[n].confirm(survivors) for n in sorted(survivors)}
    strange = confirmed | {8: Codes(8).sign(survivors_text(OCCASION, survivors))}
    with pytest.raises(MessageError, match="site 8 confirmed a total that it has no part in"):
        sites[0].unmask(strange)


def test_a_late_message_is_not_in_the_total_and_cannot_be_added() -> None:
    """What arrives after the survivors were named stays masked by the site's own seed."""
    sites, values = members(range(9)), numbers(9, 3)
    group, view = until_masked(sites, values, [(), (), (8,)])
    late = sites[8].mask(group.shares_for(8), values[8])
    survivors = frozenset(view.masked)
    confirmed = {n: sites[n].confirm(survivors) for n in sorted(survivors)}
    answers = {n: sites[n].unmask(confirmed) for n in sorted(survivors)}
    total = group.total(answers)
    np.testing.assert_array_equal(total, sum_of(values, survivors))
    assert all(8 in answer.keys and 8 not in answer.seeds for answer in answers.values())
    assert not np.array_equal(late - total, values[8] - total)
    for site in survivors:
        with pytest.raises(MessageError, match="was done"):
            sites[site].confirm(survivors | {8})


def test_a_wrong_share_is_noticed() -> None:
    sites, values = members(range(9)), numbers(9, 3)
    group, view = until_masked(sites, values, [(), (), (8,)])
    confirmed = {n: sites[n].confirm(frozenset(view.masked)) for n in view.masked}
    answers = {n: sites[n].unmask(confirmed) for n in view.masked}
    wrong = dataclasses.replace(answers[0], keys={8: bytes(shares.LENGTH)})
    with pytest.raises(MessageError, match=r"do not belong together|a wrong share of site 8"):
        group.total(answers | {0: wrong})


# ---- shares


def test_shares_have_a_published_example() -> None:
    """Shamir's scheme over the integers: 1234 + 166 x + 94 x^2."""
    published = {1: 1494, 2: 1942, 3: 2578, 4: 3402, 5: 4414, 6: 5614}
    numbers_drawn = iter([166, 94])
    drawn = shares.split((1234).to_bytes(32, "big"), range(1, 7), 3, lambda _: next(numbers_drawn))
    assert {place: int.from_bytes(share, "big") for place, share in drawn.items()} == published
    for places in itertools.combinations(published, 3):
        some = {place: drawn[place] for place in places}
        assert int.from_bytes(shares.joined(some), "big") == 1234


@given(st.binary(min_size=32, max_size=32), st.integers(3, 12), st.data())
def test_any_shares_that_are_enough_tell_the_secret(
    secret: bytes, count: int, data: st.DataObject
) -> None:
    least = shares.threshold(count)
    drawn = shares.split(secret, range(1, count + 1), least)
    some = data.draw(st.permutations(range(1, count + 1)))[:least]
    assert shares.joined({place: drawn[place] for place in some}) == secret
    fewer = {place: drawn[place] for place in some[:-1]}
    with contextlib.suppress(MessageError):  # nearly always: 521 bits are too many for a secret
        assert shares.joined(fewer) != secret


def test_fewer_shares_are_the_same_for_every_secret() -> None:
    """For each secret there is a polynomial through the same shares."""
    drawn = shares.split(b"\x01" * 32, range(1, 4), 3)
    for other in (0, 7, 2**255):
        x, y = [0, 1, 2], [other, *(int.from_bytes(drawn[p], "big") for p in (1, 2))]
        third = 0  # Lagrange's value at 3 of the polynomial through (0, other) and two shares
        for i in range(3):
            above = below = 1
            for j in range(3):
                if i != j:
                    above, below = above * (3 - x[j]), below * (x[i] - x[j])
            third += y[i] * above * pow(below, -1, shares.PRIME)
        share = (third % shares.PRIME).to_bytes(shares.LENGTH, "big")
        again = shares.joined({1: drawn[1], 2: drawn[2], 3: share})
        assert int.from_bytes(again, "big") == other


# ---- masks


def test_masks_are_the_published_key_stream() -> None:
    """RFC 8439, appendix A.1: the key stream of a zero key, nonce and counter."""
    expected = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert masks.mask(bytes(32), 8).astype("<u8").tobytes() == expected


def test_two_sites_agree_and_a_third_does_not() -> None:
    """Bob of RFC 7748, section 6.1, and another; another purpose gives another key."""
    alice = bytes(range(32))
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    one = masks.agreed(alice, masks.public_of(bob), b"mask")
    assert one == masks.agreed(bob, masks.public_of(alice), b"mask")
    assert one != masks.agreed(bob, masks.public_of(alice), b"shares")
    assert masks.public_of(bob).hex() == (
        "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    )
    with pytest.raises(MessageError, match="a public key of another site is none"):
        masks.agreed(alice, bytes(32), b"mask")


# ---- numbers


@message(reduce="sum")
class Sums:
    """A message."""

    a: torch.Tensor
    b: torch.Tensor


@given(st.integers(2, 60), st.integers(0, 99), st.sampled_from([1e-6, 1.0, 1e4]))
def test_totals_are_right_to_the_last_bit_of_a_site(count: int, seed: int, size: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    sent = [
        Sums(
            size * torch.randn(3, 2, generator=draws),
            size * torch.randn(4, generator=draws).double(),
        )
        for _ in range(count)
    ]
    total = sum((encoded(m, count) for m in sent), start=np.zeros(10, np.uint64))
    found = decoded(total, Form(Sums, {"a": (torch.float64, (3, 2)), "b": (torch.float64, (4,))}))
    for name in ("a", "b"):
        exact = torch.stack([getattr(m, name).double() for m in sent]).sum(0)
        assert float((getattr(found, name) - exact).abs().max()) <= count * 2**-31 + 1e-12 * size


@pytest.mark.parametrize("value", [2.0**31 / 3, -(2.0**31) / 3, 1e30, float("nan"), float("inf")])
def test_what_might_wrap_is_an_error(value: float) -> None:
    sent = Sums(torch.zeros(1), torch.tensor([value], dtype=torch.float64))
    with pytest.raises(MessageError, match=r"b has a number that is not below 7.16e\+08"):
        encoded(sent, 3)
