"""ASCII replacements for characters that the output's encoding lacks."""

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
    """Make standard output and error replace unencodable characters instead of failing."""
    codecs.register_error(HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # notebooks and tests replace the streams
            stream.reconfigure(errors=HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of unencodable characters, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end
