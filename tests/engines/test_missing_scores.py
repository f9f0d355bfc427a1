"""Scores over a wire: missing, impossible or asked for again, and what a mean says of it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from changed_wires import ANY_SIZE, Change, with_wire
from fedgist.core.objectives.metrics import LOSS, METRICS_OF, NUMBER_LOSS, WORD_METRICS, Metric
from fedgist.core.objectives.own_metric import metric
from fedgist.engines.engine import Score
from fedgist.errors import MessageError
from fedgist.runs.files.columns import clients_in
from fedgist.runs.round import ServerRun, start_server
from fedgist.testing.small_worlds import ALONE, SIZES, loopback, world
from fedgist.wire.envelope import seal, unseal
from fedgist.wire.loopback_engine import LoopbackEngine
from fedgist.wire.remote_engine import Patience, tables_of
from fedgist.wire.wire import LoopbackWire, Parts

CLIENTS = range(len(SIZES))


def spoilt_score(clients: Collection[int], change: Callable[[Score], Score | None]) -> Change:
    """Return a change of the scores of some clients; without a score, the reply is lost."""

    def of(client: int, blob: bytes) -> list[bytes]:
        header, messages = unseal(blob, ANY_SIZE)
        if client not in clients or "score-" not in messages:
            return [blob]
        changed = change(messages["score-"])
        return [] if changed is None else [seal(header, {**messages, "score-": changed})]

    return of


@settings(max_examples=12)
@given(st.sets(st.sampled_from(CLIENTS)))
def test_a_mean_says_over_how_many_whoever_is_missing(lost: set[int]) -> None:
    # seen: a site that kept a low score raised the published mean, and no line said so
    small_world = world("local")
    _, all_scores = with_wire(small_world, lambda _, blob: [blob]).advance()
    line, details = with_wire(small_world, spoilt_score(lost, lambda _: None)).advance()
    there = [client for client in CLIENTS if client not in lost]
    assert [entry["client"] for entry in details] == there
    assert line["eval/client/count"] == len(there)
    assert line.get("eval/client/missing", 0) == len(lost)
    reasons = [(entry["client"], entry["reason"]) for entry in line.get("unscored", [])]
    assert reasons == [(client, "no reply in time") for client in sorted(lost)]
    mean = line.get("eval/client/accuracy_mean")
    # rejects the mean over all five with zeros for those that are missing
    expected = statistics.fmean(all_scores[c]["accuracy"] for c in there) if there else None
    assert mean == (None if expected is None else pytest.approx(expected))


@metric(unit="fraction")
def share_of_right(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (probabilities.argmax(1) == labels).double().mean()


METRICS = {m for of in METRICS_OF.values() for m in of.values()}
METRICS |= {LOSS, NUMBER_LOSS, share_of_right.describes}
BOUNDS = [
    (m, bound, sign)
    for m in sorted(METRICS, key=lambda m: (m.name, m.unit))
    for bound, sign in ((m.least, -1.0), (m.most, 1.0))
    if bound is not None
]


@settings(max_examples=200)
@given(st.sampled_from(BOUNDS), st.floats(1e-5, 1e30))
def test_a_value_outside_a_metrics_bounds_is_no_score(
    case: tuple[Metric, float, float], beyond: float
) -> None:
    # seen: a log loss of -1e30 was recorded, and a Brier score of 2.00000000002 was refused
    measure, bound, sign = case
    name = measure.name
    for value, is_taken in (
        (bound, True),
        (bound + sign * 1e-9, True),
        (bound + sign * beyond, False),
    ):
        score = Score(torch.tensor(3), {name: torch.tensor(value, dtype=torch.float64)})
        if is_taken:
            assert name in tables_of(0, {"score-": score}, {name: measure}, 3)[""].values
        else:
            with pytest.raises(MessageError, match=f"its score is not valid: {name} = .* is not p"):
                tables_of(0, {"score-": score}, {name: measure}, 3)


def test_every_metric_is_bounded_where_its_formula_is() -> None:
    # only R2 may be any negative number; only errors and losses may be any positive one
    assert {m.name for m in METRICS if m.least is None} == {"r2"}
    unlimited = {"loss", "perplexity", "mae", "rmse"}
    assert {m.name for m in METRICS if m.most is None} == unlimited
    assert WORD_METRICS["perplexity"].least == math.exp(0)  # of a loss of at least 0


def test_values_of_a_score_of_no_rows_are_in_no_mean() -> None:
    change = spoilt_score({1}, lambda score: replace(score, rows=torch.tensor(0)))
    line, details = with_wire(world("local"), change).advance()
    assert (line["eval/client/count"], line["eval/client/missing"]) == (4, 1)
    (entry,) = (entry for entry in details if entry["client"] == 1)
    assert (entry["rows"], entry["accuracy"]) == (0, None)


def without(score: Score, metric: str) -> Score:
    return replace(score, values={n: v for n, v in score.values.items() if n != metric})


def test_a_metric_that_a_client_leaves_out_has_a_count_of_its_own() -> None:
    change = spoilt_score({1, 3}, lambda score: without(score, "accuracy"))
    line, _ = with_wire(world("local"), change).advance()
    assert line["eval/client/count"] == 5
    assert line["eval/client/accuracy_count"] == 3
    assert clients_in(line, "eval/client/accuracy_mean") == (3, 5)
    assert clients_in(line, "eval/client/loss_mean") == (5, 5)


class UnsteadyScores(LoopbackWire):
    """A wire on which the scores of some clients are lost in the first attempts."""

    def __init__(self, lost: dict[int, int]) -> None:
        super().__init__({})
        self.lost = lost  # number of attempts that fail, by client
        self.requests: list[tuple[int, int]] = []  # attempt and client

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        headers = {client: unseal(b"".join(parts), ANY_SIZE)[0] for client, parts in envelopes}
        scores = {c: header for c, header in headers.items() if header.purpose == "score"}
        self.requests += [(header.attempt, client) for client, header in scores.items()]
        for client, blob in super().exchange(envelopes, deadline_s, largest):
            if client not in scores or scores[client].attempt > self.lost.get(client, 0):
                yield client, blob


def scored_with(lost: dict[int, int], patience: Patience) -> tuple[ServerRun, UnsteadyScores]:
    small_world, wire = world("local"), UnsteadyScores(lost)
    engine = loopback(small_world, ALONE, wire)
    wire.clients = {client: site.handle for client, site in engine.sites.items()}
    engine.remote.patience = patience
    return ServerRun(small_world.server, engine, start_server(small_world.server)), wire


@pytest.mark.parametrize(
    ("least", "attempts", "count"),
    [
        (0, 1, 2),
        (3, 2, 3),  # client 0 comes with the second attempt
        (4, 3, 4),
        (5, 4, 5),
    ],
)
def test_scores_are_asked_for_again_until_enough_have_one(
    least: int, attempts: int, count: int
) -> None:
    fed, wire = scored_with({0: 1, 1: 2, 2: 3}, Patience(least_replies=least, most_attempts=9))
    line, _ = fed.advance()
    assert line["eval/client/count"] == count
    assert max(attempt for attempt, _ in wire.requests) == attempts
    # those with a score are not asked again
    assert Counter(wire.requests).most_common(1)[0][1] == 1
    second = [client for attempt, client in wire.requests if attempt == 2]
    assert second == ([0, 1, 2] if attempts > 1 else [])


def test_in_the_last_round_every_client_that_replied_is_asked_again() -> None:
    fed, _ = scored_with({0: 1, 1: 2}, Patience(least_replies=1, most_attempts=9))
    last = fed.task.training.num_rounds
    lines = [fed.advance()[0] for _ in range(last)]
    assert [line["eval/client/count"] for line in lines] == [3] * (last - 1) + [5]
    assert "unscored" not in lines[-1]


def test_a_client_that_keeps_its_scores_is_neither_waited_for_nor_asked_again() -> None:
    fed, wire = scored_with({1: 1}, Patience(least_replies=5, most_attempts=9))
    assert isinstance(fed.engine, LoopbackEngine)
    keeps = fed.engine.sites[3]
    keeps.settings = replace(keeps.settings, share_measurements=False)
    line, _ = fed.advance()
    assert line["unscored"] == [
        {"client": 3, "reason": "policy: this site keeps its scores to itself"}
    ]
    assert (line["eval/client/count"], line["eval/client/missing"]) == (4, 1)
    assert [client for attempt, client in wire.requests if attempt > 1] == [1]
