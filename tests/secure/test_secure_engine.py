"""Sites and server of secure sums over a wire that loses sites at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from fedgist.core.tree import map_leaves, named
from fedgist.errors import FederationError, RecipeError
from fedgist.recipe.reading import make
from fedgist.runs.round import ServerRun, start_server
from fedgist.testing.small_worlds import ALONE, loopback, world_of
from fedgist.wire.envelope import Header, header_of, seal, unseal
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.wire.remote_engine import Patience
from fedgist.wire.secure.engine import SecureEngine
from fedgist.wire.wire import LoopbackWire, Parts
from fedgist.world import secure_sums

ANY_SIZE = 1 << 30
STEPS = ("train", "share", "mask", "confirm", "unmask")
SITES = 9
SMALL: dict[str, Any] = {
    "engine": {"name": "loopback", "workers": 1},
    "data": {"name": "digits", "train_rows": 200},
    "clients": {"num_clients": 5},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"num_rounds": 2},
}
SECURE = {"federation": {"sums": "secure"}}
Lost = Callable[[Header], bool]


class Losing(LoopbackWire):
    """A wire that loses requests, and notes all replies."""

    def __init__(self) -> None:
        super().__init__({})
        self.lost: Lost = lambda _: False
        self.seen: list[bytes] = []

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        sent = [(n, parts) for n, parts in envelopes if not self.lost(header_of(b"".join(parts)))]
        for client, reply in super().exchange(sent, deadline_s, largest):
            self.seen.append(reply)
            yield client, reply


def federation(attempts: int = 1, *, secure: bool = True) -> tuple[ServerRun, Losing]:
    raw = SMALL | {"clients": {"num_clients": SITES}, "method": {"name": "fedlog"}}
    small, wire = world_of(make(raw | {"train": {"num_rounds": 30}})), Losing()
    engine = loopback(small, ALONE, wire, secure=secure)
    wire.clients = dict(engine.handlers)
    engine.remote.patience = Patience(most_attempts=attempts)
    return ServerRun(small.server, engine, start_server(small.server)), wire


def difference(one: ServerRun, other: ServerRun) -> float:
    a, b = named(one.server), named(other.server)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedprox", "fedadam", "fedlog", "fedlog_c", "fedproto", "lg_fedavg"),
        *("fedper", "fedrep", "fedbabu", "feddbe"),
    ],
)
def test_a_run_has_the_numbers_of_plain_sums(method: str) -> None:
    recipe = SMALL | {"method": {"name": method}}
    plain, secure = fedgist.run(recipe), fedgist.run(recipe | SECURE)
    assert difference(plain.server_run, secure.server_run) < 2e-5
    payload = [run.rounds[-1]["comm/up_bytes"] for run in (plain, secure)]
    assert payload[1] > 2 * payload[0]  # 8 bytes for 4, keys and shares


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": {"name": "fd"}}, "the server of method fd reads each ClassLogits by itself"),
        ({"method": {"name": "repshare"}}, "reads each Released by itself"),
        ({"clients": {"num_clients": 2}}, "2 clients have mlp, and a total .* needs 3"),
        (
            {"clients": {"architectures": {"mlp": 0.8, "logistic": 0.2}}, "model": None}
            | {"method": {"name": "lg_fedavg"}},
            "2 clients have logistic",
        ),
        (
            {"privacy": {"unit": "record", "epsilon": 1.0, "delta": 1e-3, "clip": 1.0}}
            | {"method": {"name": "fedlog"}},
            "adds noise at the server",
        ),
        ({"clients": {"delay": 0.5}, "method": {"name": "fedlog"}}, "a late message"),
        (
            {"model": {"name": "mlp", "frozen": True}, "method": {"name": "fedlog"}},
            "the same sums in each round",
        ),
        ({"engine": {"name": "local"}}, "needs engine.name = 'loopback'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_would_show_a_message_is_refused_before_training(
    more: dict[str, Any], says: str
) -> None:
    recipe = {key: value for key, value in (SMALL | SECURE | more).items() if value is not None}
    recipe["method"] = more.get("method", {"name": "fedavg"})
    with pytest.raises(RecipeError, match=says):
        fedgist.run(recipe)


def test_sites_may_be_lost_at_any_step_of_twenty_rounds() -> None:
    """Two of nine in each round: the total is that of those whose numbers arrived."""
    secure, wire = federation()
    plain, other = federation(secure=False)
    draws = np.random.default_rng(0)
    for number in range(1, 21):
        gone = {int(n): STEPS[int(draws.integers(1, 5))] for n in draws.choice(SITES, 2, False)}

        def lost(header: Header, gone: dict[int, str] = gone) -> bool:
            at = gone.get(header.client)
            if header.purpose in STEPS:
                return at is not None and STEPS.index(header.purpose) >= STEPS.index(at)
            return False

        def lost_before_numbers(header: Header, gone: dict[int, str] = gone) -> bool:
            # a plain round trains all, and loses the replies of those who sent no numbers
            return header.purpose == "train" and gone.get(header.client) in {"share", "mask"}

        wire.lost, other.lost = lost, lost_before_numbers
        line, _ = secure.do_round(number)
        plain.do_round(number)
        absent = sum(step in {"share", "mask"} for step in gone.values())
        assert line["clients/replied"] == SITES - absent
        # those whose answers were lost have trained; the plain sites have not
        _align(plain, secure)
        assert difference(plain, secure) < 1e-5


def _align(plain: ServerRun, secure: ServerRun) -> None:
    """Give the plain run's sites the state of the secure run's."""
    assert isinstance(plain.engine, LoopbackEngine)
    assert isinstance(secure.engine, LoopbackEngine)
    for client, site in secure.engine.sites.items():
        plain.engine.sites[client].host.restore(site.host.state())


@pytest.mark.parametrize("step", STEPS[1:])
def test_with_three_of_nine_lost_the_round_opens_nothing(step: str) -> None:
    secure, wire = federation()
    wire.lost = lambda header: header.purpose == step and header.client < 3
    with pytest.raises(FederationError, match=r"no total was opened: 6 sites .* 7 are needed"):
        secure.do_round(1)
    answered = [header_of(blob).purpose for blob in wire.seen]
    assert answered
    assert not [b for b in wire.seen if "unmask" in header_of(b).messages] or step == "unmask"


def test_another_attempt_masks_the_same_reply_anew() -> None:
    secure, wire = federation(attempts=2)
    wire.lost = lambda header: (
        header.purpose == "mask" and header.client < 3 and header.attempt == 1
    )
    secure.do_round(1)
    masked: dict[int, dict[int, torch.Tensor]] = {}
    for blob in wire.seen:
        header, messages = unseal(blob, ANY_SIZE)
        if "mask" in messages:
            masked.setdefault(header.client, {})[header.attempt] = messages["mask"].numbers
    both = [arrays for arrays in masked.values() if len(arrays) == 2]
    assert len(both) == 6
    assert not any(torch.equal(arrays[1], arrays[2]) for arrays in both)
    plain, _ = federation(secure=False)
    plain.do_round(1)
    assert difference(plain, secure) < 1e-5


def test_a_stage_that_was_opened_is_not_opened_for_another_group() -> None:
    """A server that begins the round again, with other sites, gets no second total."""
    secure, wire = federation(attempts=2)
    before = secure.checkpoint().copied()
    secure.do_round(1)
    secure.restore(before)
    wire.lost = lambda header: header.client == 0
    with pytest.raises(FederationError, match="it takes part in no other total of it"):
        secure.do_round(1)


def test_a_lost_answer_to_the_last_step_is_given_again() -> None:
    """The same request has the same answer; another one is refused."""
    _, wire = federation()
    secure, wire = federation()
    requests: dict[int, bytes] = {}

    def noting(client: int, handle: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def answer(envelope: bytes) -> bytes:
            if header_of(envelope).purpose == "unmask":
                requests[client] = envelope
            return handle(envelope)

        return answer

    handlers: Mapping[int, Callable[[bytes], bytes]] = dict(wire.clients)
    wire.clients = {client: noting(client, handle) for client, handle in handlers.items()}
    secure.do_round(1)
    opened = [blob for blob in wire.seen if "unmask" in header_of(blob).messages]
    again = [handlers[client](requests[client]) for client in sorted(requests)]
    assert opened == again


def test_another_download_for_one_site_opens_nothing() -> None:
    """What all must have in common is in every signature: the group's keys do not fit."""
    secure, _ = federation()
    assert isinstance(secure.engine, LoopbackEngine)
    site = secure.engine.handlers[4].__self__  # type: ignore[attr-defined]
    site.recipe = "another one"
    with pytest.raises(FederationError, match="are not signed by it"):
        secure.do_round(1)


def test_each_client_must_get_the_same_download() -> None:
    secure, _ = federation()
    ctx = secure.context("train", 1)
    orders = secure.orders_to_each(1)
    downs = [secure.method.download(secure.server, order, ctx) for order in orders]
    downs[3] = type(downs[3])(downs[3].eta + 1)
    with pytest.raises(RecipeError, match="sends each client another download"):
        secure.engine.ask(ctx, orders, downs)


class InMemory:
    """Totals that last as long as a test."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self.blobs.get(name)

    def save(self, name: str, blob: bytes) -> None:
        self.blobs[name] = blob


def test_a_server_that_is_killed_after_a_total_goes_on_with_it() -> None:
    """Its sites would open no second one; another stage has none that was kept."""
    secure, wire = federation()
    assert isinstance(secure.engine, LoopbackEngine)
    assert isinstance(secure.engine.asked, SecureEngine)
    secure.engine.asked.totals = InMemory()
    before = secure.checkpoint().copied()
    secure.do_round(1)
    expected = {name: array.clone() for name, array in named(secure.server).items()}
    sites = {client: site.host.state() for client, site in secure.engine.sites.items()}
    secure.restore(before)
    wire.seen.clear()
    line, _ = secure.do_round(1)
    assert not [blob for blob in wire.seen if header_of(blob).stage == "train"]
    assert any("opened before the restart is used" in event for event in line["events"])
    for name, array in named(secure.server).items():
        assert torch.equal(array, expected[name])
    for client, arrays in sites.items():
        secure.engine.sites[client].host.restore(arrays)
    line, _ = secure.do_round(2)
    assert line["clients/replied"] == SITES
    assert wire.seen


def test_a_message_above_the_limit_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_sums, "MOST_NUMBERS", 100)
    says = "a message of 611 numbers would be masked for each other site; the limit is 100"
    with pytest.raises(RecipeError, match=says):
        fedgist.run(SMALL | SECURE | {"method": {"name": "fedavg"}})


def test_a_message_is_in_one_total_whatever_the_run_is_called() -> None:
    """A second run of the same recipe, with other sites, would differ by one message."""
    secure, wire = federation()
    requests: list[bytes] = []
    site = wire.clients[0]

    def noting(envelope: bytes) -> bytes:
        requests.append(envelope)
        return site(envelope)

    wire.clients[0] = noting
    secure.do_round(1)
    first = next(r for r in requests if header_of(r).purpose == "train")
    secure_site: Any = site.__self__  # type: ignore[attr-defined]
    secure_site.site.run = "another"
    header, messages = unseal(first, ANY_SIZE)
    again = seal(header.model_copy(update={"run": "another", "attempt": 2}), messages)
    answer = header_of(site(again))
    assert answer.purpose == "refusal"
    assert "this very message is in a total already" in answer.reason


@pytest.mark.parametrize("step", ["train", "share", "mask", "confirm", "unmask"])
def test_a_site_that_answers_nonsense_is_left_out(step: str) -> None:
    """Whatever it sends, the others open their total, or the attempt fails in words."""
    secure, wire = federation(attempts=2)
    site = wire.clients[4]

    def broken(envelope: bytes) -> bytes:
        request, reply = header_of(envelope), site(envelope)
        if request.purpose != step:
            return reply
        header, messages = unseal(reply, ANY_SIZE)
        note = messages[step]
        changed = map_leaves(lambda array: array.repeat(2, *[1] * (array.dim() - 1)), note)
        return seal(header, {step: changed})

    wire.clients[4] = broken
    line, _ = secure.do_round(1)
    assert line["clients/replied"] == (SITES if step in {"confirm", "unmask"} else SITES - 1)
