"""Colour, line and marker of each row: a method looks the same in every figure and table.

Each method has one colour and one marker, whatever else is shown. Rows of one method, which differ
in a setting, share its colour and differ in the line, then also in the shade.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedgist.methods import base_name
from fedgist.methods.common.method_looks import LOOKS

# of methods that are not fedgist's: the method's name selects one
OTHER_COLORS = ("#999933", "#3f8f9f", "#cc3366", "#6b6bb8", "#b8860b", "#5f7f3f")
OTHER_MARKERS = "h><*pd"
LINES = ("-", "--", ":", "-.")
SHADES_OF_COLOR = (0.0, -0.3, 0.4)  # toward black or white, for each further four rows of a method


@dataclass(frozen=True)
class RowStyle:
    """How the row ``number`` of a study is drawn; every other row of a method has open markers."""

    number: int
    color: str
    line: str
    marker: str
    filled: bool = True

    @property
    def gid(self) -> str:
        """Name of the row's marks in an SVG."""
        return f"row-{self.number}"


def styles_of(methods: Sequence[str]) -> tuple[RowStyle, ...]:
    """Return the style of each row, by the names of the rows' methods.

    >>> [(style.color, style.line) for style in styles_of(["fedavg", "fedlog", "fedavg"])]
    [('#d55e00', '-'), ('#0072b2', '-'), ('#d55e00', '--')]
    """
    count = Counter[str]()
    styles = []
    for number, method in enumerate(methods):
        color, marker = _of_method(method)
        place = count[color]
        count[color] += 1
        shade = SHADES_OF_COLOR[place // len(LINES) % len(SHADES_OF_COLOR)]
        line = LINES[place % len(LINES)]
        styles.append(RowStyle(number, mixed(color, shade), line, marker, place % 2 == 0))
    return tuple(styles)


def _of_method(name: str) -> tuple[str, str]:
    """Return a method's colour and marker; its name alone decides."""
    if base_name(name) in LOOKS:
        return LOOKS[base_name(name)]
    digest = hashlib.sha256(name.encode()).digest()
    color, marker = digest[0] % len(OTHER_COLORS), digest[1] % len(OTHER_MARKERS)
    return OTHER_COLORS[color], OTHER_MARKERS[marker]


def mixed(color: str, share: float) -> str:
    """Return a colour mixed with white, or with black if ``share`` is negative.

    >>> mixed("#804000", 0.5), mixed("#804000", -0.5)
    ('#bf9f7f', '#402000')
    """
    if not share:
        return color
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    goal = 255 if share > 0 else 0
    return "#" + "".join(f"{int(part + abs(share) * (goal - part)):02x}" for part in parts)
