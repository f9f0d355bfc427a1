"""A server cannot make a site train, or score, as often as it likes (policy.most_requests)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedgist.core.tree import map_leaves
from fedgist.federation.site.agent import SiteAgent
from fedgist.wire.envelope import Header, seal, unseal
from private_sites import ANY_SIZE, plan_of, request, side_of, site_file
from three_sites import recipe, write_rows

MOST = 3
PLAIN: dict[str, Any] = {"model": {"name": "mlp", "hidden": [8]}}


def answer(agent: SiteAgent, header: Header, down: Any) -> Header:
    return unseal(agent.answer(seal(header, {"download": down})), ANY_SIZE)[0]


def asked(side: Any, number: int, **header: Any) -> tuple[Header, Any]:
    first, messages = unseal(request(side, number), ANY_SIZE)
    return first.model_copy(update={"messages": {}, **header}), messages["download"]


@pytest.mark.slow
def test_a_stage_is_trained_with_other_downloads_as_often_as_the_policy_says(
    tmp_path: Path,
) -> None:
    # seen: policy.most_rounds = 1, and one round was trained 20 times
    write_rows(tmp_path)
    side = side_of(recipe("fedavg", **PLAIN))
    agent = SiteAgent(site_file(tmp_path, epsilon=None, most_requests=MOST))
    agent.prepare(plan_of(side))
    for number in (1, 2):
        header, down = asked(side, number)
        downs = [map_leaves(lambda leaf, k=k: leaf + k, down) for k in range(MOST + 2)]
        answers = [answer(agent, header, each) for each in downs]
        assert [a.purpose for a in answers] == ["reply"] * MOST + ["refusal"] * 2
        assert answers[-1].reason.endswith("this site's policy.most_requests")
        assert answers[-1].kind == "policy"
        for _ in range(2 * MOST):  # what is given again from memory does not count
            assert answer(agent, header, downs[MOST - 1]).purpose == "reply"


@pytest.mark.slow
def test_scores_and_last_downloads_are_bounded_for_each_round_and_set_of_rows(
    tmp_path: Path,
) -> None:
    # seen: the last download was taken, and the model written, thirty times
    write_rows(tmp_path)
    side = side_of(recipe("fedavg", **PLAIN))
    agent = SiteAgent(site_file(tmp_path, epsilon=None, most_requests=MOST))
    agent.prepare(plan_of(side))
    scores = ((1, "score", "client"), (1, "score", "train"), (2, "score", "client"))
    for number, purpose, split in (*scores, (2, "finish", None)):
        about = {"purpose": purpose, "stage": "evaluate", "split": split}
        header, down = asked(side, number, **about)
        purposes = [answer(agent, header, down).purpose for _ in range(MOST + 1)]
        assert purposes == ["reply"] * MOST + ["refusal"]


@pytest.mark.slow
def test_another_run_between_does_not_let_the_site_forget_what_it_did(tmp_path: Path) -> None:
    # seen: an invitation to another run, and the count of the first one began at 0 again
    write_rows(tmp_path)
    side = side_of(recipe("fedavg", **PLAIN))
    agent, purposes = SiteAgent(site_file(tmp_path, epsilon=None, most_requests=MOST)), []
    for _ in range(MOST + 1):
        agent.prepare(plan_of(side, "b" * 16))
        agent.prepare(plan_of(side))
        header, down = asked(side, 1, purpose="score", stage="evaluate", split="client")
        purposes.append(answer(agent, header, down).purpose)
    assert purposes == ["reply"] * MOST + ["refusal"]
