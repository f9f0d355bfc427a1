"""What a person is told of a round while a run goes on."""

from __future__ import annotations

import pytest

from fedgist.cli.progress import Plain
from fedgist.engines.delayed_engine import LATE


def test_refused_and_absent_clients_are_named_and_simulated_delays_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = {
        "round": 1,
        "comm/up_bytes": 10,
        "comm/down_bytes": 20,
        "time/round_s": 0.1,
        "refused": [{"client": 7, "reason": "total is not finite"}],
        "absent": [
            *({"client": c, "reason": "not connected"} for c in range(10)),
            {"client": 11, "reason": "no reply in time"},
            {"client": 12, "reason": LATE},
        ],
        "events": ["a total over 1 replies of wide was withheld; privacy.min_replies is 3"],
    }
    Plain().finished_round(line)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "client 7: upload refused, total is not finite" in text
    assert "absent: clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, not connected" in text
    assert "absent: client 11, no reply in time" in text
    assert "12" not in text.replace("20 B", "")
    assert "privacy.min_replies is 3" in text
