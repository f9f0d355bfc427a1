"""Write the section on a GPU of benchmarks.md: python docs/scripts/gpu_page.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
PAGE = HERE / "benchmarks.md"
RESULTS = HERE / "results" / "data" / "bench-gpu.json"
BEGIN, END = "<!-- made by docs/scripts/gpu_page.py -->\n", "<!-- end -->"
COMMAND = "python bench/gpu.py"
UNMEASURED = f"""\
Not measured: no machine with a GPU was at hand. The command is `{COMMAND}`. It needs
torch, no network and nine minutes, and writes `bench-gpu.json`. Copy that file to
`docs/results/data` and run `python docs/scripts/gpu_page.py`.
"""
ABOUT = f"""\
`{COMMAND}` times rounds on a GPU against bare loops with all data on the GPU. A bare loop
has one module and one `torch.optim` object, and goes client after client. The loops differ in the
options of the optimizer. Contenders take turns. A clock is read only after the GPU has done its
work.
"""
SPEED = """\
The table has seconds per round, or per step of FLESD's distillation in the paper's sizes, with its
captures: best (median). Below are the peaks of GPU memory. A ratio is the fastest bare loop's time
over fedgist's.
"""
TIMED: Mapping[str, str] = {"W1": "W1", "W2": "W2", "W3": "W3", "flesd": "FLESD, a step"}
OURS = "fedgist"
Parts = Mapping[str, Mapping[str, Any]]
Row = Sequence[object]


def with_section(page: str, report: Mapping[str, Any] | None) -> str:
    """Return the page on benchmarks, with the section on a GPU of this report, if there is one."""
    before, _, rest = page.partition(BEGIN)
    text = UNMEASURED if report is None else section(report)
    return before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2]


def section(report: Mapping[str, Any]) -> str:
    """Return the text of the section."""
    parts: Parts = report["parts"]
    blocks = [ABOUT, machine(report["machine"], quick=bool(report["quick"]))]
    blocks += [*speed(parts), *laws(parts), *resumed(parts), *precision(parts), *waits(parts)]
    return "\n".join([*blocks, *absent(parts)])


def machine(found: Mapping[str, Any], *, quick: bool) -> str:
    """Return a sentence on the machine."""
    name = found.get("gpu") or "a CPU"
    text = f"Measured on {name} with torch {found.get('torch')}"
    text += f" and CUDA {found['cuda']}" if found.get("cuda") else ""
    return text + (", in tiny sizes that say nothing about speed.\n" if quick else ".\n")


def figures(parts: Parts, name: str) -> Mapping[str, Any]:
    """Return the figures of a part; empty if it was not measured."""
    table: Mapping[str, Any] = parts.get(name, {}).get("figures", {})
    return table


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a table in Markdown; empty without rows."""
    lines = [head, ("---",) * len(head), *rows]
    if len(lines) == len((head, "---")):
        return ""
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def number(value: float | None) -> str:
    """Return a number with three figures; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004  # three figures


def speed(parts: Parts) -> Iterator[str]:
    """Yield the table of seconds, ratios and memory."""
    timed = {name: figures(parts, name) for name in TIMED}
    timed = {name: found for name, found in timed.items() if "seconds" in found}
    if not timed:
        return
    names = dict.fromkeys(one for found in timed.values() for one in found["seconds"])
    rows: list[Row] = [(who, *(_seconds(found, who) for found in timed.values())) for who in names]
    pairs = [(number(f["ratio"]), number(f["median_ratio"])) for f in timed.values()]
    rows += [("**ratio**", *(f"**{best}** ({median})" for best, median in pairs))]
    rows += [(f"memory, MB: {who}", *(_memory(f, who) for f in timed.values())) for who in names]
    yield SPEED
    yield table(("", *(TIMED[name] for name in timed)), rows)


def _seconds(found: Mapping[str, Any], who: str) -> str:
    times = found["seconds"].get(who)
    return f"{number(times['best'])} ({number(times['median'])})" if times else "-"


def _memory(found: Mapping[str, Any], who: str) -> str:
    return number(found.get("peak_mb", {}).get(who))


def laws(parts: Parts) -> Iterator[str]:
    """Yield the table of laws, and that of the methods that break one."""
    found = figures(parts, "laws")
    methods: Mapping[str, Mapping[str, str]] = found.get("methods", {})
    if not methods:
        return
    yield "Laws on the GPU, in the tiny world of `fedgist.testing`:\n"
    passed = {n: sum(said.get(n) == "pass" for said in methods.values()) for n in found["laws"]}
    rows = [(text, f"{passed[n]} of {len(methods)}") for n, text in found["laws"].items()]
    yield table(("law", "methods that keep it"), rows)
    broken = [
        (f"`{name}`", number_of_law, said)
        for name, verdicts in methods.items()
        for number_of_law, said in verdicts.items()
        if said != "pass" or not number_of_law.isdigit()
    ]
    yield table(("method", "law", "result"), broken)


def resumed(parts: Parts) -> Iterator[str]:
    """Yield the table of resumed runs."""
    rows = [
        (name, what, "yes" if found[what]["same bits"] else "no", _far(found[what]))
        for name, found in figures(parts, "resume").items()
        for what in ("resumed", "run again")
    ]
    if rows:
        yield "A run that was stopped and resumed, and a run done again, against one run:\n"
        yield table(("method", "", "same bits", "largest difference"), rows)


def _far(found: Mapping[str, Any]) -> str:
    return f"{found['largest difference']:.3g}"


def precision(parts: Parts) -> Iterator[str]:
    """Yield the table of bfloat16 against float32."""
    rows = [
        (
            name,
            *(_seconds(found, kind) for kind in ("float32", "bfloat16")),
            number(found["ratio"]),
            *(f"{found['loss'][kind]:.4f}" for kind in ("float32", "bfloat16")),
            *(number(found["peak_mb"][kind]) for kind in ("float32", "bfloat16")),
        )
        for name, found in figures(parts, "autocast").items()
    ]
    if rows:
        yield "`train.precision`: float32 and bfloat16, each in this order, and the final losses:\n"
        head = ("", "s", "s", "float32 / bfloat16", "loss", "loss", "memory, MB", "memory, MB")
        yield table(head, rows)


def waits(parts: Parts) -> Iterator[str]:
    """Yield the table of lines that wait for the GPU."""
    found = figures(parts, "synchronizations")
    rows = [
        (work, f"`{line['line']}`", f"`{line['code']}`", line["count"])
        for work, counted in found.items()
        for line in counted["lines"]
    ]
    if found:
        yield "How often the CPU waits for the GPU in a round, or in a stage of a distillation:\n"
        about = [(work, counted["steps"], counted["count"]) for work, counted in found.items()]
        yield table(("", "steps", "waits"), about)
        yield table(("", "line", "code", "count"), rows)


def absent(parts: Parts) -> Iterator[str]:
    """Yield the table of parts that were not measured, or failed."""
    rows = [
        (name, part["state"], part["why"])
        for name, part in parts.items()
        if part["state"] != "measured"
    ]
    if rows:
        yield "Parts without a complete measurement:\n"
        yield table(("part", "state", "why"), rows)


def main() -> None:
    """Write the section into the page."""
    report = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else None
    PAGE.write_text(with_section(PAGE.read_text("utf-8"), report), "utf-8")


if __name__ == "__main__":
    main()
