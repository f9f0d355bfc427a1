"""Elements shared by figures: names of lines, legends, ticks, bubbles, boxes, bars, points."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from fedgist.methods.common.method_looks import INK
from fedgist.report.formatting import bytes_text
from fedgist.report.pictures.drawing import GROUP_COLORS, PAPER, FigureTable, short, wrapped
from fedgist.report.pictures.row_styles import RowStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LINE = 11.0  # points from one line of text to the next
MARKS = 6  # markers on a line, about
BUBBLE = 200.0  # area of the largest bubble in square points, if there is room
FINEST = 2000  # more bubbles are drawn as an image, not as shapes
DECADES = 1.5  # over more decades there is no room for ticks between powers of ten
SHADES_OF_BARS = ("#59636d", "#98a2ab", "#d3d9de")  # parts of a bar: no row has these colours
SIGNS = "os^Dv*Pd"  # markers of points, beside their colours
LETTERS = 56  # characters in a line of a legend
TICK_WIDTH = 22  # characters of a line of a tick's name
MOST_NAMED = 20  # largest number of groups in a legend


@dataclass(frozen=True)
class NamedLine:
    """A row's line with its name, and a note beside the name."""

    style: RowStyle
    name: str
    note: str = ""


def draw_line(
    axes: Axes, style: RowStyle, x: Sequence[float], y: Sequence[float], *, dense: bool = False
) -> None:
    """Draw a row's line with a few of its markers, or with all of them if it is ``dense``."""
    every = 1 if dense else max(1, len(x) // MARKS)
    line = _line_of(style, x, y)
    line.set_markevery((style.number % every, every))
    axes.add_line(line)
    axes.autoscale_view()


def draw_band(
    axes: Axes, style: RowStyle, x: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    """Draw a row's band, unless it has no height."""
    if any(a < b for a, b in zip(low, high, strict=True)):
        axes.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0, gid=style.gid)


def draw_level(axes: Axes, style: RowStyle, y: float) -> None:
    """Draw a horizontal line for a row that has no place on the x axis."""
    axes.axhline(y, color=style.color, linewidth=1.2, linestyle=(0, (8, 3)), gid=style.gid)


def _line_of(style: RowStyle, x: Sequence[float], y: Sequence[float]) -> Line2D:
    line: Line2D = _lines().Line2D(
        x,
        y,
        color=style.color,
        linestyle=style.line,
        marker=style.marker,
        markersize=4.5,
        markerfacecolor=style.color if style.filled else PAPER,
        markeredgewidth=0.8,
        gid=style.gid,
    )
    return line


def name_lines(axes: Axes, lines: Sequence[NamedLine]) -> None:
    """Name the lines in a legend below the figure, each once; call it after all are drawn."""
    by_row = {line.style.number: line for line in lines}
    entries = []
    for _, line in sorted(by_row.items()):
        name = wrapped(f"{line.name} {line.note}".rstrip(), LETTERS)
        entries.append((_line_of(line.style, [], []), name))
    figure_legend(_figure(axes), entries, handlelength=2.6)


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
    figure = _figure(axes)
    wide, high = (72 * inches for inches in figure.get_size_inches())
    cell = min((wide - 80) / max(1, len(counts)), (high - 70) / max(1, len(classes)))
    largest = min(BUBBLE, max(1.0, cell) ** 2)
    cells = [(x, y, n) for x, line in enumerate(counts) for y, n in enumerate(line) if n]
    axes.scatter(
        [x for x, _, _ in cells],
        [y for _, y, _ in cells],
        s=[largest * n / most for _, _, n in cells],
        color=SHADES_OF_BARS[0],
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
    marks = [
        (_mark("o", SHADES_OF_BARS[0], largest * n / most), f"{n} row{'s' * (n > 1)}")
        for n in sizes
    ]
    figure_legend(figure, marks, place="outside upper center")


def tick_names(names: Sequence[str]) -> list[str]:
    """Return the names of ticks in as many lines as they need."""
    return [wrapped(name, TICK_WIDTH) for name in names]


def rows_height(names: Sequence[str], each: float) -> float:
    """Return the inches that rows need: ``each`` for a name of one line, more for longer names."""
    most = max((name.count("\n") for name in tick_names(names)), default=0)
    return len(names) * max(each, (1 + most) * (LINE + 1) / 72 + 0.08)


def boxes(axes: Axes, rows: Sequence[tuple[RowStyle, str, list[float]]]) -> None:
    """Draw a horizontal box plot for each (style, label, values), from top to bottom."""
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
    for (style, _, _), box in zip(rows, parts["boxes"], strict=True):
        box.set(facecolor=style.color, alpha=0.6, edgecolor=style.color, gid=style.gid)
    axes.set_yticks(range(1, len(rows) + 1), tick_names([label for _, label, _ in rows]))
    axes.invert_yaxis()


def stacked_bars(axes: Axes, names: Sequence[str], rows: FigureTable) -> None:
    """Draw a horizontal stacked bar per row: its label, then the length of each part."""
    left = [0.0] * len(rows)
    for place, shade in enumerate(SHADES_OF_BARS[: len(names)], 1):
        widths = [row[place] for row in rows]
        bars = axes.barh(range(len(rows)), widths, left=left, color=shade, height=0.6)
        for i, bar in enumerate(bars):
            bar.set(edgecolor=INK, linewidth=0.6, gid=f"row-{i}")
        left = [end + width for end, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), tick_names([row[0] for row in rows]))
    axes.invert_yaxis()
    marks = [_mark("s", shade, 60) for shade in SHADES_OF_BARS]
    figure_legend(_figure(axes), list(zip(marks, names, strict=True)), place="outside upper center")


def groups(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    title: str = "",
) -> None:
    """Draw points with a colour and a marker per group name, and a legend below the figure."""
    distinct = sorted(dict.fromkeys(names), key=lambda name: (len(name), name))
    entries = []
    for number, name in enumerate(distinct):
        of_group = [point for point, other in zip(points, names, strict=True) if other == name]
        sign, hue = SIGNS[number % len(SIGNS)], group_color(number)
        axes.scatter(
            [x for x, _ in of_group],
            [y for _, y in of_group],
            s=16,
            color=hue,
            marker=sign,
            alpha=0.85,
            linewidths=0,
        )
        entries.append((name, sign, hue))
    legend_of(axes, entries, title)


def group_color(number: int) -> str:
    """Return the colour of a class, a client or a model by its number; no row has it."""
    return GROUP_COLORS[number % len(GROUP_COLORS)]


def legend_of(axes: Axes, marks: Sequence[tuple[str, str, str]], title: str = "") -> None:
    """Draw a legend with a name, a marker and a colour per entry, cut after ``MOST_NAMED``."""
    entries = [(_mark(sign, hue, 30), short(name)) for name, sign, hue in marks[:MOST_NAMED]]
    more = [(_mark("", INK, 0), f"and {len(marks) - MOST_NAMED} more")]
    figure_legend(_figure(axes), entries + more * (len(marks) > MOST_NAMED), title=title)


def figure_legend(
    figure: Figure,
    entries: Sequence[tuple[Line2D, str]],
    *,
    place: Literal["outside lower center", "outside upper center"] = "outside lower center",
    title: str = "",
    handlelength: float = 1.0,
) -> None:
    """Draw a legend below or above everything else, and make the figure higher by its height.

    It has as many columns as fit in the figure's width, and is ordered line by line.
    """
    room, count = float(figure.get_figwidth()) - 0.1, len(entries)
    if not entries:
        return
    for lines in range(1, count + 1):
        columns = math.ceil(count / lines)
        order = [i for first in range(columns) for i in range(first, count, columns)]
        legend = figure.legend(
            [entries[i][0] for i in order],
            [f"\u200b{entries[i][1]}" for i in order],  # matplotlib hides names with a leading "_"
            loc=place,
            ncols=columns,
            title=title,
            handletextpad=0.4,
            handlelength=handlelength,
            columnspacing=1.2,
        )
        extent = legend.get_window_extent()
        if extent.width / figure.dpi <= room or columns == 1:
            break
        legend.remove()
    for sample, text, i in zip(legend.get_lines(), legend.get_texts(), order, strict=True):
        text.set_gid(entries[i][0].get_gid())
        sample.set_gid(entries[i][0].get_gid())
    figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes belong to a figure
    return figure


def _lines() -> ModuleType:
    return importlib.import_module("matplotlib.lines")


def _mark(sign: str, hue: str, area: float) -> Line2D:
    mark: Line2D = _lines().Line2D(
        [], [], ls="", marker=sign or None, color=hue, ms=math.sqrt(area), mew=0, alpha=0.8
    )
    return mark
