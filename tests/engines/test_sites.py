"""A site under privacy: it answers what its budget was divided among, once, also after a kill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedgist.core.method import Order
from fedgist.core.tree import leaves, map_leaves
from fedgist.engines.engine import EVALUATE, Split
from fedgist.errors import MessageError, MethodError
from fedgist.runs.prepare import hosting_of
from fedgist.runs.round import context, start_server
from fedgist.testing.small_worlds import SIZES, world
from fedgist.wire.envelope import Header, seal, unseal
from fedgist.wire.loopback_engine import task_of_site
from fedgist.wire.site import FullConsent, Keep, Site, SiteState, population_of_one
from fedgist.world.world import World

SEEDED: dict[str, Any] = {
    "unit": "record",
    "epsilon": 1.0,
    "delta": 1e-3,
    "clip": 1.0,
    "where": "local",
}
LOCAL = SEEDED | {"noise": "system"}
RUN = "r"
LAST = 3  # the rounds of a small world
ANY_SIZE = 1 << 30


def site_of(small: World, keep: Keep | None = None) -> Site:
    side, client = small.server, small.population.clients[0]
    task = task_of_site(side.task, client.architectures)
    mine = population_of_one(small.population, 0)
    return Site(side.method, task, mine, hosting_of(small), run=RUN, keep=keep)


def request(
    small: World,
    number: int,
    stage: str = "train",
    *,
    split: Split | None = None,
    scale: float = 1.0,
) -> bytes:
    side, (name, *_) = small.server, small.population.clients[0].architectures
    ctx = context(side, number, stage)
    down = side.method.download(start_server(side), Order(0, name), ctx)
    header = Header(
        purpose="score" if split else "train",
        run=RUN,
        round=number,
        stage=stage,
        client=0,
        architecture=name,
        split=split,
    )
    return seal(header, {"download": map_leaves(lambda leaf: leaf * scale, down)})


def answer(site: Site, envelope: bytes) -> tuple[str, str]:
    header, _ = unseal(site.handle(envelope), ANY_SIZE)
    return header.purpose, header.reason


class Kept:
    """Keeps each state of a site; from call ``dies`` on, the process is killed before it is."""

    def __init__(self, dies: int = 1 << 30) -> None:
        self.states: list[SiteState] = []
        self.dies = dies

    def __call__(self, state: SiteState) -> None:
        if len(self.states) >= self.dies:
            raise KeyboardInterrupt
        self.states.append(state)


def test_rounds_after_the_last_are_refused() -> None:
    small = world("fedlog", privacy=LOCAL)
    site = site_of(small, Kept())
    found = {n: answer(site, request(small, n)) for n in (1, 2, 3, 4, 5, 100, 10**6)}
    assert [n for n, (purpose, _) in found.items() if purpose == "reply"] == [1, 2, LAST]
    assert found[4][1] == "round 4 is after the last round, 3"
    assert answer(site_of(world("fedlog")), request(world("fedlog"), 4))[0] == "refusal"


POOLS = {"a": {"model": "mlp", "hidden": [5]}, "b": {"model": "logistic"}}
STEPS = {"steps": 2, "batch_size": 8}
OWN_WORK: dict[str, dict[str, Any]] = {
    "merged_codist": {"options": {"distillation": STEPS}},
    "periodic_codist": {"options": {"distillation": STEPS, "period": 1}},
    "flesd": {"options": {"distillation": {"epochs": 1, "batch_size": 8}}},
}


@pytest.mark.parametrize("method", OWN_WORK)
def test_what_the_server_does_by_itself_is_not_answered(method: str) -> None:
    pooled = {"clients": {"num_clients": len(SIZES), "pools": POOLS}, "model": None}
    small = world(method, **OWN_WORK[method], **(pooled if method != "flesd" else {}))
    stages = small.server.method.stages(context(small.server, 1, ""))
    assert "distill-0" in stages, "the world has such a stage"
    site = site_of(small)
    purpose, reason = answer(site, request(small, 1, "distill-0"))
    assert (purpose, reason) == ("refusal", "a client has no stage 'distill-0' in round 1 to train")
    assert answer(site, request(small, 1))[0] == "reply"


def test_scores_are_asked_for_in_one_stage() -> None:
    small = world("fedavg")
    site = site_of(small)
    assert answer(site, request(small, 1, EVALUATE, split="train"))[0] == "reply"
    known = len(site.forms)
    for number in range(20):
        purpose, reason = answer(site, request(small, 1, f"s{number}", split="train"))
        assert (purpose, f"'s{number}'" in reason) == ("refusal", True)
    assert len(site.forms) == known, "a server does not fill a site's memory"


def test_noise_of_the_system_needs_a_place_where_releases_are_kept() -> None:
    with pytest.raises(MethodError, match=r"must keep what it released: give Site\(keep=...\)"):
        site_of(world("fedlog", privacy=LOCAL))


@pytest.mark.parametrize("privacy", [SEEDED, LOCAL], ids=["seed", "system"])
def test_a_restarted_site_sends_the_same_reply_and_releases_nothing_again(
    privacy: dict[str, Any],
) -> None:
    small, kept = world("fedlog", privacy=privacy), Kept()
    first = site_of(small, kept).handle(request(small, 1))
    second = site_of(small, Kept())
    second.restore(kept.states[-1])
    assert second.handle(request(small, 1)) == first
    assert "was made" in answer(second, request(small, 1, scale=2.0))[1]
    assert answer(second, request(small, 2))[0] == "reply"


@pytest.mark.parametrize("dies", [0, 1])
def test_a_site_that_is_killed_around_a_release_does_not_release_again(dies: int) -> None:
    small, kept = world("fedlog", privacy=LOCAL), Kept(dies)
    site = site_of(small, kept)
    with pytest.raises(KeyboardInterrupt):
        site.handle(request(small, 1))
    restarted = site_of(small, Kept())
    if kept.states:
        restarted.restore(kept.states[-1])
    purpose, reason = answer(restarted, request(small, 1))
    # without a state on disk nothing was drawn yet, so the release is made for the first time
    assert purpose == ("refusal" if kept.states else "reply")
    assert ("was made" in reason) == bool(kept.states)


def test_a_release_is_kept_before_its_training_and_its_reply_before_it_is_sent() -> None:
    small, kept = world("fedlog", privacy=LOCAL), Kept()
    site = site_of(small, kept)
    start = site.state()
    reply = site.handle(request(small, 1))
    before, after = kept.states
    assert [*before.released] == [(1, 0, "mlp")]
    assert not before.answered
    for old, new in zip(leaves(start.client), leaves(before.client), strict=True):
        assert torch.equal(old, new), "training had begun"
    assert [done.reply for done in after.answered.values()] == [reply]


class Decides:
    """A consent that refuses what it is given, and counts its questions."""

    def __init__(self, training: str = "", sending: str = "") -> None:
        self.training, self.sending = training, sending
        self.steps: list[str] = []

    before_work = FullConsent.before_work

    def before_training(self, request: Header) -> None:
        self.steps.append("policy and charge")
        if self.training:
            raise MessageError(self.training)

    def before_sending(self, request: Header, reply: bytes) -> None:
        self.steps.append(f"reply of round {request.round}")
        if self.sending:
            raise MessageError(self.sending)


def consenting(small: World, consent: Decides, keep: Keep | None = None) -> Site:
    site = site_of(small, keep)
    site.consent = consent
    return site


def test_the_policy_comes_before_the_charge_and_the_state_before_sending() -> None:
    small, decides = world("fedlog", privacy=LOCAL), Decides()

    def keep(state: SiteState) -> None:
        decides.steps.append(f"state with {len(state.answered)} answers")

    site = consenting(small, decides, keep)
    assert answer(site, request(small, 1))[0] == "reply"
    assert answer(site, request(small, 1))[0] == "reply"  # the stored one: nothing is asked again
    assert decides.steps == [
        "policy and charge",
        "state with 0 answers",
        "reply of round 1",
        "state with 1 answers",
    ]


def test_a_refused_request_is_no_release() -> None:
    small = world("fedlog", privacy=LOCAL)
    site = consenting(small, Decides(training="only fedproto may run here"), lambda _: None)
    assert answer(site, request(small, 1)) == ("refusal", "only fedproto may run here")
    assert not site.released
    site.consent = Decides()
    assert answer(site, request(small, 1))[0] == "reply"


@pytest.mark.parametrize("fails", ["train", "reply"])
def test_any_failure_of_a_site_is_a_refusal_without_its_text(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = world("fedper")
    site, untouched = site_of(small), site_of(small)
    if fails == "reply":
        site.consent = Decides(sending="too large")
        assert answer(site, request(small, 1)) == ("refusal", "too large")
    else:

        def training(*given: Any) -> Any:
            raise RuntimeError("patient 4711 has no label")

        with monkeypatch.context() as patch:
            patch.setattr(site.host, "train", training)
            assert answer(site, request(small, 1)) == (
                "refusal",
                "it failed; the site's log says why",
            )
        assert "patient 4711" in caplog.text
    site.consent = Decides()
    # the site goes on from the state before
    assert site.handle(request(small, 1)) == untouched.handle(request(small, 1))


def test_trainings_and_scorings_are_counted_and_answers_from_memory_are_not() -> None:
    small, counts = world("fedper"), list[tuple[str, int]]()

    class Counts(FullConsent):
        def before_work(self, request: Header, count: int) -> None:
            counts.append((request.purpose, count))

    site = site_of(small)
    site.consent = Counts()
    for _ in range(3):
        assert answer(site, request(small, 1))[0] == "reply"
        assert answer(site, request(small, 1, EVALUATE, split="client"))[0] == "reply"
    assert counts == [("train", 1), ("score", 1), ("score", 2), ("score", 3)]
