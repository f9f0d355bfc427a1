"""The state of a federation's server: what is written while sites come and go."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedgist.federation.run_state import STATUS, SiteStatus, StatusBoard

THREADS, SITES, WRITES = 4, 50, 400


def test_the_board_is_written_whole_by_several_threads(tmp_path: Path) -> None:
    # seen: 50 sites connected at once, and the server ended because a temporary file was gone
    board = StatusBoard(tmp_path, "run", "federation", "localhost:8443")
    board.sites = {number: SiteStatus(f"site-{number}", number) for number in range(SITES)}
    states = [("ready", "absent")[number % 2] for number in range(WRITES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda n: board.saw(n % SITES, states[n]), range(WRITES)))
    assert len(json.loads((tmp_path / STATUS).read_text())["sites"]) == SITES
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]
