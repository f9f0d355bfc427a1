"""The picture of mean ranks: a scale, a name at each rank, bars over methods not told apart."""

from __future__ import annotations

from fedgist.report.pictures.drawing import STYLE, Picture, matplotlib, new_figure, wrapped
from fedgist.report.tables.ranks import Ranks

WIDTH = 6.0  # inches, of two columns of names beside the scale
LINE = 0.22  # inches, of a name
HEAD = 0.75  # inches, of the scale and the critical difference


def of_ranks(ranks: Ranks) -> Picture:
    """Return the picture of mean ranks (Demšar 2006, figure 1), the best method at the left."""
    with matplotlib().rc_context(STYLE):
        return _drawn(ranks)


def _drawn(ranks: Ranks) -> Picture:
    count, bars = len(ranks.methods), len(ranks.groups)
    lines = -(-count // 2)  # names on the left; the others are on the right
    height = HEAD + LINE * (lines + 1) + 0.09 * bars
    figure, axes = new_figure(WIDTH, height)
    axes.set_axis_off()
    axes.set_xlim(1 - 0.35 * (count - 1), count + 0.35 * (count - 1))
    axes.set_ylim(-(LINE * (lines + 1) + 0.09 * bars), HEAD)
    axes.plot([1, count], [0, 0], color="black", linewidth=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.06], color="black", linewidth=1)
        axes.text(tick, 0.1, str(tick), ha="center", va="bottom")
    for number, (first, last) in enumerate(ranks.groups, 1):
        y = -0.09 * number
        ends = ranks.mean_ranks[first] - 0.03, ranks.mean_ranks[last] + 0.03
        axes.plot(
            ends, [y, y], color="black", linewidth=3, solid_capstyle="butt", gid=f"bar-{number}"
        )
    for place, (name, rank) in enumerate(zip(ranks.methods, ranks.mean_ranks, strict=True)):
        left = place < lines
        line = place if left else count - 1 - place
        low = -(LINE * (line + 1) + 0.09 * bars)
        end = 0.9 if left else count + 0.1
        axes.plot([rank, rank, end], [0, low, low], color="black", linewidth=0.8)
        text = (
            f"{wrapped(name, 24, 1)}  {rank:.2f}" if left else f"{rank:.2f}  {wrapped(name, 24, 1)}"
        )
        axes.text(end, low, f" {text} ", ha="right" if left else "left", va="center")
    if ranks.test is not None:
        top = HEAD - 0.25
        axes.plot([1, 1 + ranks.test.critical], [top, top], color="black", linewidth=2)
        axes.text(1, top + 0.05, f"critical difference {ranks.test.critical:.2f}", va="bottom")
    sheet = ranks.sheet()
    table = [list(sheet.columns), *map(list, sheet.rows)]
    return Picture("ranks", sheet.title, sheet.caption, figure, table)
