"""Elements shared by figures: names at line ends, ticks, bubbles, boxes, bars, points."""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedgist.report.drawing import COLORS, INK, PAPER, FigureTable, color, dashes, short
from fedgist.report.formatting import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D

LINE = 11.0  # points from one line of text to the next
MOST_AT_ENDS = 5  # largest number of names written at the ends of their lines
FAR = 0.2  # share of the axes' width: longer leaders to the column of names would cross lines
LEADER = {"arrowstyle": "-", "lw": 1, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
BUBBLE = 200.0  # area of the largest bubble in square points, if there is room
FINEST = 2000  # more bubbles are drawn as an image, not as shapes
DECADES = 1.5  # over more decades there is no room for ticks between powers of ten
SHADES = ("#59636d", "#98a2ab", "#d3d9de")  # parts of a bar: no row has these colours
SIGNS = "os^Dv*Pd"  # markers of points: the next one is used when the colours repeat
LETTERS = 50  # characters in a line of a legend
MOST_NAMED = 20  # largest number of groups in a legend


@dataclass(frozen=True)
class End:
    """The end of the line of row ``number``, its name, and a note below the name."""

    number: int
    x: float
    y: float
    name: str
    note: str = ""


def name_ends(axes: Axes, ends: Sequence[End], inches: float) -> None:
    """Write a name at the end of each line, moved vertically if names would overlap.

    With many lines, the names form a column beside the axes; a name far from the end of its
    line gets a short sample of the line.
    ``inches`` is the height of the axes with their labels. Call this function after all lines are
    drawn, because it needs the final limits of the axes.
    """
    if not ends:
        return
    height = 0.75 * 72 * inches
    texts = [_words(end) for end in ends]
    data = axes.transData.transform([(end.x, end.y) for end in ends]).reshape(-1, 2)
    places = axes.transAxes.inverted().transform(data)  # fractions of the axes, for any layout
    wanted = [float(height * y) for _, y in places]
    label_places = spread(wanted, [LINE * (1 + text.count("\n")) for text in texts], height)
    crowded = len(ends) > MOST_AT_ENDS
    far = crowded and min(x for x, _ in places) < 1 - FAR
    column = 1.12 if far else 1.04
    for end, text, (x, _), y in zip(ends, texts, places, label_places, strict=True):
        drawn = axes.annotate(
            text,
            (1.02, y / height) if far else (end.x, end.y),
            xycoords="axes fraction" if far else "data",
            xytext=(column if crowded else float(x) + 0.04, y / height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops=LEADER | {"color": color(end.number), "ls": dashes(end.number)},
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
        drawn.set_gid(f"row-{end.number}")


def _words(end: End) -> str:
    lines = textwrap.wrap(short(end.name, 40), 18, max_lines=3, placeholder="…")
    return "\n".join([*lines, *([end.note] if end.note else [])])


def spread(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Return positions in [0, ``room``] near the wanted ones, without overlaps.

    Overlapping neighbours are merged into a block at the mean of their wanted positions.

    >>> spread([20.0, 21.0, 99.0], [10.0, 10.0, 10.0], 100.0)
    [15.5, 25.5, 95.0]
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[tuple[list[int], float, float]] = []  # members, middle, height
    for place in order:
        block = _stacked([place], wanted, heights, room)
        while blocks and block[1] - block[2] / 2 < blocks[-1][1] + blocks[-1][2] / 2:
            members = [*blocks.pop()[0], *block[0]]
            block = _stacked(members, wanted, heights, room)
        blocks.append(block)
    positions = [0.0] * len(wanted)
    for members, middle, height in blocks:
        bottom = middle - height / 2
        for place in members:
            positions[place] = bottom + heights[place] / 2
            bottom += heights[place]
    return positions


def _stacked(
    members: list[int], wanted: Sequence[float], heights: Sequence[float], room: float
) -> tuple[list[int], float, float]:
    height = sum(heights[place] for place in members)
    middle = sum(wanted[place] for place in members) / len(members)
    return members, max(height / 2, min(room - height / 2, middle)), height


def whole_ticks(axis: Axis) -> None:
    """Restrict the ticks of an axis to whole numbers, for rounds or clients."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def byte_ticks(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic over the range of the values, with byte units."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = min(values), max(values)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    steps = (1.0,) if math.log10(high / low) > DECADES else (1.0, 2.0, 5.0)
    axis.set_major_locator(ticker.LogLocator(subs=steps))
    axis.set_major_formatter(lambda value, _: bytes_text(value).replace(".0 ", " "))
    axis.set_minor_formatter(ticker.NullFormatter())


def bubbles(
    axes: Axes,
    counts: Sequence[Sequence[int]],
    classes: Sequence[object],
    clients: Sequence[object] = (),
) -> None:
    """Draw a bubble per client and class, its area the number of rows, with a legend of sizes.

    Clients are labelled by ``clients``, or by number.
    """
    most = max((count for line in counts for count in line), default=1) or 1
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes belong to a figure
    wide, high = (72 * inches for inches in figure.get_size_inches())
    cell = min((wide - 80) / max(1, len(counts)), (high - 70) / max(1, len(classes)))
    largest = min(BUBBLE, max(1.0, cell) ** 2)
    cells = [(x, y, n) for x, line in enumerate(counts) for y, n in enumerate(line) if n]
    axes.scatter(
        [x for x, _, _ in cells],
        [y for _, y, _ in cells],
        s=[largest * n / most for _, _, n in cells],
        color=COLORS[0],
        alpha=0.8,
        linewidths=0,
        rasterized=len(cells) > FINEST,
    )
    step = 1 + (len(classes) - 1) // 30
    axes.set_yticks(range(0, len(classes), step), [short(name, 16) for name in classes[::step]])
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, len(counts) - 0.3))
    axes.set_ylim(-0.7, len(classes) - 0.3)
    whole_ticks(axes.xaxis)
    if clients:
        every = 1 + (len(clients) - 1) // 30
        names = [short(name, 12) for name in clients[::every]]
        axes.set_xticks(range(0, len(clients), every), names, rotation=45, ha="right")
    sizes = sorted({max(1, round(most * share)) for share in (0.1, 0.5, 1.0)})
    _legend(
        axes,
        [(_mark("o", COLORS[0], largest * n / most), f"{n} row{'s' * (n > 1)}") for n in sizes],
    )


def boxes(axes: Axes, rows: Sequence[tuple[int, str, list[float]]]) -> None:
    """Draw a horizontal box plot for each (number, label, values), from top to bottom."""
    parts = axes.boxplot(
        [values for _, _, values in rows],
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        flierprops={"markersize": 3, "markeredgecolor": INK},
        medianprops={"color": INK},
        whiskerprops={"color": INK},
        capprops={"color": INK},
    )
    for (i, _, _), box in zip(rows, parts["boxes"], strict=True):
        box.set(facecolor=color(i), alpha=0.6, edgecolor=color(i), gid=f"row-{i}")
    axes.set_yticks(range(1, len(rows) + 1), [short(label, 24) for _, label, _ in rows])
    axes.invert_yaxis()


def stacked_bars(axes: Axes, names: Sequence[str], rows: FigureTable) -> None:
    """Draw a horizontal stacked bar per row: its label, then the length of each part."""
    left = [0.0] * len(rows)
    for place, shade in enumerate(SHADES[: len(names)], 1):
        widths = [row[place] for row in rows]
        bars = axes.barh(range(len(rows)), widths, left=left, color=shade, height=0.6)
        for i, bar in enumerate(bars):
            bar.set(edgecolor=INK, linewidth=0.6, gid=f"row-{i}")
        left = [end + width for end, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [short(row[0], 24) for row in rows])
    axes.invert_yaxis()
    marks = [_mark("s", shade, 60) for shade in SHADES]
    _legend(axes, list(zip(marks, names, strict=True)))


def groups(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    *,
    room: float | None = None,
) -> None:
    """Draw points with a colour and a marker per group name, and a legend below.

    The legend is after ``room`` for tick labels, a share of the axes' height. With None the axes
    have no ticks and no frame, for their numbers mean nothing.
    """
    distinct = sorted(dict.fromkeys(names), key=lambda name: (len(name), name))
    entries = []
    for number, name in enumerate(distinct):
        of_group = [point for point, other in zip(points, names, strict=True) if other == name]
        sign = SIGNS[number // len(COLORS) % len(SIGNS)]
        axes.scatter(
            [x for x, _ in of_group],
            [y for _, y in of_group],
            s=18,
            color=color(number),
            marker=sign,
            alpha=0.85,
            linewidths=0,
        )
        entries.append((short(name, 12), sign, color(number)))
    legend_of(axes, entries, room or 0.0)
    if room is None:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


def legend_of(axes: Axes, marks: Sequence[tuple[str, str, str]], room: float = 0.0) -> None:
    """Draw a legend with a name, a marker and a colour per entry, cut after ``MOST_NAMED``.

    The legend is below the axes, after ``room`` for tick labels, a share of the axes' height.
    """
    entries = [(_mark(sign, hue, 30), name) for name, sign, hue in marks[:MOST_NAMED]]
    more = [(_mark("", INK, 0), f"and {len(marks) - MOST_NAMED} more")]
    _legend(axes, entries + more * (len(marks) > MOST_NAMED), below=room)


def _mark(sign: str, hue: str, area: float) -> Line2D:
    lines = importlib.import_module("matplotlib.lines")
    mark: Line2D = lines.Line2D(
        [], [], ls="", marker=sign or None, color=hue, ms=math.sqrt(area), mew=0, alpha=0.8
    )
    return mark


def _legend(
    axes: Axes, entries: Sequence[tuple[Line2D, str]], *, below: float | None = None
) -> None:
    """Draw a legend no wider than the axes, ordered line by line.

    The legend is above the axes, or below them by the share ``below`` of their height.
    """
    longest = max((len(name) for _, name in entries), default=1)
    count = len(entries)
    lines = math.ceil(count / max(1, LETTERS // (longest + 4)))
    columns = math.ceil(count / max(1, lines))
    order = [i for first in range(columns) for i in range(first, count, columns)]
    axes.legend(
        [entries[i][0] for i in order],
        [f"\u200b{entries[i][1]}" for i in order],  # matplotlib hides names with a leading "_"
        loc="lower center" if below is None else "upper center",
        bbox_to_anchor=(0.5, 1.0 if below is None else -below),
        ncols=max(1, columns),
        handletextpad=0.3,
        columnspacing=1.2,
    )
