"""The log files of a federation's processes: they rotate, and hold what fedgist logs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedgist.cli import network_commands


def test_a_log_rotates_and_is_written_inside_the_context_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_commands, "LARGEST", 200)
    monkeypatch.setattr(network_commands, "KEPT", 2)
    path, log = tmp_path / "state/site.log", logging.getLogger("fedgist.federation.test")
    with network_commands.logging_to(path):
        for number in range(20):
            log.info("round %d was answered", number)
    log.warning("later")
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["site.log", "site.log.1", "site.log.2"]
    assert all(file.stat().st_size <= 200 for file in path.parent.iterdir())
    assert path.read_text().endswith("INFO round 19 was answered\n")
