"""Signs for an output that has no others: a terminal or a pipe whose encoding is ASCII, say."""

from __future__ import annotations

import codecs
import io
import sys

HANDLER = "fedgist.plain"
PLAIN = {
    **dict(zip("●○▲△■□◆◇", "ox^v#=%+", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇█", "._-~=+*#", strict=True)),
    **dict(zip("·░▒▓", ".:+*", strict=True)),
    **dict(zip("┤└─━", "|+-=", strict=True)),
    "±": "+-",
    "†": "*",
    "…": "..",
    "ε": "epsilon",
}


def use_plain_signs() -> None:
    """Let this program's output replace what its encoding lacks, in place of ending there."""
    codecs.register_error(HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not one that a notebook or a test put there
            stream.reconfigure(errors=HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return what is written in place of the signs that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end
