"""Refusals of sites: their kind in words, and that what cannot change is not asked again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changed_wires import with_wire
from fedgist.core.replies import Asked
from fedgist.engines.engine import Answer
from fedgist.errors import FederationError, MessageError, RefusalKind, SiteError
from fedgist.runs.round import ServerRun
from fedgist.testing.small_worlds import world
from fedgist.wire.envelope import Header
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.wire.remote_engine import Patience
from fedgist.wire.site import FullConsent


class Refuses:
    """A consent that refuses all training, for good."""

    def before_work(self, request: Header, count: int) -> None:
        """Accept the work."""

    def before_training(self, request: Header) -> None:
        raise MessageError("epsilon 3 is spent", "budget")

    before_sending = FullConsent.before_sending


def trained(fed: ServerRun) -> Answer:
    orders, downs, ctx = fed.downloads(0)
    return fed.engine.ask(replace(ctx, round=1, stage="train"), orders, downs)


@settings(max_examples=12)
@given(st.dictionaries(st.integers(0, 4), st.sampled_from(get_args(RefusalKind)), min_size=1))
def test_a_refusal_for_good_is_not_asked_again(kinds: dict[int, RefusalKind]) -> None:
    # seen: a spent budget was asked for ten times, with pauses of four minutes
    requests: Counter[int] = Counter()
    small_world, waits = world("fedavg"), list[str]()
    fed = with_wire(small_world, lambda client, blob: [blob])
    assert isinstance(fed.engine, LoopbackEngine)
    for client, kind in kinds.items():

        def refuses(request: Header, client: int = client, kind: RefusalKind = kind) -> None:
            requests[client] += 1
            raise SiteError("patient 4711", kind, "some.key")

        fed.engine.sites[client].consent.before_training = refuses  # type: ignore[method-assign]
    fed.engine.remote.patience = Patience(least_replies=5, most_attempts=3)
    fed.engine.remote.before_repeating = waits.append
    with pytest.raises(FederationError) as stopped:
        fed.advance()
    final = {"policy", "budget", "plan", "rows", "state"}
    any_final = bool(final & set(kinds.values()))
    assert len(waits) == (0 if any_final else 2)
    for client, kind in kinds.items():
        assert requests[client] == (1 if any_final else 3)
        assert f"client {client}: {kind}: some.key; the site's log says why" in str(stopped.value)
    assert "4711" not in str(stopped.value)
    assert "Error" not in str(stopped.value)


def test_the_others_are_asked_again_if_they_are_enough() -> None:
    attempts: Counter[int] = Counter()

    def lost_once(client: int, blob: bytes) -> list[bytes]:
        attempts[client] += 1
        return [] if client in {0, 1} and attempts[client] == 1 else [blob]

    fed = with_wire(world("fedavg"), lost_once)
    assert isinstance(fed.engine, LoopbackEngine)
    fed.engine.sites[3].consent = Refuses()
    fed.engine.remote.patience = Patience(least_replies=4, most_attempts=3)
    answer = trained(fed)
    assert answer.refused == ((Asked(3, "mlp"), "budget: epsilon 3 is spent"),)
    assert not answer.absent
    assert attempts == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
