"""Run fedgist's command line, and add the seconds of each training and scoring to a file.

python bench/timed_site.py TIMES.jsonl ARGUMENTS...
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgist.cli.main import main
from fedgist.engines.client_host import ClientHost


def timed(work: Callable[..., Any], name: str, file: Path) -> Callable[..., Any]:
    """Return a function that does the same work, and writes down how long it took."""

    def run(host: ClientHost, sent: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        out = work(host, sent, *given)
        line = {"round": sent.round, "work": name, "s": time.perf_counter() - begin}
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        return out

    return run


if __name__ == "__main__":
    times = Path(sys.argv[1])
    sys.argv = ["fedgist", *sys.argv[2:]]
    for function in ("train", "score"):
        setattr(ClientHost, function, timed(getattr(ClientHost, function), function, times))
    main()
