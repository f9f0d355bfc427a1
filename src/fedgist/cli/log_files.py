"""Log files of the processes of a federation, which rotate."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator
from pathlib import Path

LARGEST, KEPT = 5 << 20, 5  # bytes of a log file, and older files that are kept
FORM = "%(asctime)s %(levelname)s %(message)s"


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write what fedgist logs to a file, inside this context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=LARGEST, backupCount=KEPT, delay=True
    )
    handler.setFormatter(logging.Formatter(FORM))
    logger = logging.getLogger("fedgist")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.level, logger.propagate = before
