"""Edits of a run's folder, each of which must be noticed by whatever reads the run.

An edit is a function of three folders: the run that is edited, of a kind that its name begins with,
and a finished run of another seed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgist.runs.files.seals import DIGESTS, of_file

ROUNDS, CLIENTS, RESULT, RECIPE = "rounds.jsonl", "clients.jsonl", "result.json", "recipe.toml"
METRICS, PARTITION, FEATURES = "metrics.json", "partition.json", "features.safetensors"
STATE = "checkpoint/state.safetensors"
Edit = Callable[[Path, Path], None]


def text(name: str, change: Callable[[str], str]) -> Edit:
    """An edit of a file as text; it must change something."""

    def edit(run: Path, other: Path) -> None:
        before = (run / name).read_text("utf-8")
        after = change(before)
        assert after != before
        (run / name).write_text(after, "utf-8")

    return edit


def data(name: str, change: Callable[[bytes], bytes]) -> Edit:
    """An edit of a file as bytes."""
    return lambda run, other: void((run / name).write_bytes(change((run / name).read_bytes())))


def void(_: object) -> None: ...


def without(*names: str) -> Edit:
    """The edit that removes files."""

    def edit(run: Path, other: Path) -> None:
        for name in names:
            (run / name).unlink()

    return edit


def new(name: str, content: str) -> Edit:
    """The edit that writes a file which was not there."""
    return lambda run, other: void((run / name).write_text(content))


def all_of(*edits: Edit) -> Edit:
    """Several edits, one after the other."""

    def edit(run: Path, other: Path) -> None:
        for each in edits:
            each(run, other)

    return edit


def from_other(*names: str) -> Edit:
    """The edit that puts another seed's files in the place of the run's own."""
    return lambda run, other: [shutil.copy(other / n, run / n) for n in names].clear()


def lines(change: Callable[[list[str]], list[str]], name: str = ROUNDS) -> Edit:
    return text(name, lambda whole: "".join(change(whole.splitlines(keepends=True))))


def result(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Edit:
    return text(RESULT, lambda whole: json.dumps(change(json.loads(whole)), indent=2) + "\n")


def later(line: str, rounds: int = 1) -> str:
    """A line as if further rounds had been done, with a better score."""
    table = json.loads(line)
    scores = {key: 0.9999 for key in table if re.fullmatch(r"eval/.*accuracy_mean", key)}
    return json.dumps(table | scores | {"round": table["round"] + rounds}) + "\n"


def better(whole: str) -> str:
    return re.sub(r'("eval/client/accuracy_mean": 0\.)\d', r"\g<1>9", whole)


def bare(whole: str) -> str:
    """Text without the number of the format, as an earlier fedgist would have written it."""
    return re.sub(r', "format": 1|\n *"format": 1,|# format = 1\n', "", whole)


def dropped(*keys: str) -> Edit:
    return result(lambda table: {key: value for key, value in table.items() if key not in keys})


def resealed_lines(run: Path, other: Path) -> None:
    """Lines edited, and their digest in the result made to fit: the result's own does not."""
    text(ROUNDS, better)(run, other)
    digest = of_file(run / ROUNDS)
    result(lambda table: table | {DIGESTS: table[DIGESTS] | {ROUNDS: digest}})(run, other)


def flipped(blob: bytes) -> bytes:
    return blob[:-1] + bytes([blob[-1] ^ 1])


EDITS: dict[str, Edit] = {
    "finished: a line of a later round": lines(lambda whole: [*whole, later(whole[-1])]),
    "finished: many later rounds": lines(lambda w: [*w, *(later(w[-1], n) for n in range(1, 9))]),
    "finished: a line that is not whole": lines(lambda whole: [*whole, whole[-1][:20]]),
    "finished: a line twice": lines(lambda whole: [*whole, whole[-1]]),
    "finished: the last line removed": lines(lambda whole: whole[:-1]),
    "finished: a line removed": lines(lambda whole: [whole[0], *whole[2:]]),
    "finished: lines exchanged": lines(lambda whole: [whole[1], whole[0], *whole[2:]]),
    "finished: an accuracy": text(ROUNDS, better),
    "finished: fewer bytes": text(
        ROUNDS, lambda t: re.sub(r'("comm/up_bytes": )\d', r"\g<1>", t, count=1)
    ),
    "finished: no lines": text(ROUNDS, lambda whole: ""),
    "finished: no file of lines": without(ROUNDS),
    "finished: no format in lines": text(ROUNDS, lambda t: bare(better(t))),
    "finished: no result, an accuracy": all_of(without(RESULT), text(ROUNDS, better)),
    "finished: no result": without(RESULT),
    "finished: an empty result": text(RESULT, lambda whole: ""),
    "finished: a result of nothing": text(RESULT, lambda whole: "{}"),
    "finished: a result that is not JSON": text(RESULT, lambda whole: whole[:-9]),
    "finished: another kept round": result(
        lambda table: table | {"kept_round": 3 - table["kept_round"] % 2}
    ),
    "finished: no kept round": dropped("kept_round"),
    "finished: no digests": all_of(text(ROUNDS, better), result(lambda t: t | {DIGESTS: {}})),
    "finished: digests that fit": resealed_lines,
    "finished: no seal": dropped("seal"),
    "finished: no seal, digests or format": all_of(
        dropped("seal", "digests", "format"), text(ROUNDS, better)
    ),
    "finished: a shorter time": result(lambda table: table | {"time/total_s": 0.001}),
    "finished: not finished": result(lambda table: table | {"status": "stopped"}),
    "finished: fewer rounds": all_of(
        lines(lambda whole: whole[:-1]), result(lambda t: t | {"rounds": t["rounds"] - 1})
    ),
    "finished: another method": text(RECIPE, lambda t: t.replace('"fedlog"', '"fedavg"')),
    "finished: another learning rate": text(RECIPE, lambda t: t.replace("lr = 0.0", "lr = 0.6")),
    "finished: another seed in the recipe": text(
        RECIPE, lambda t: t.replace("seed = 0", "seed = 1")
    ),
    "finished: no format in the recipe": text(RECIPE, bare),
    "finished: an empty recipe": text(RECIPE, lambda t: ""),
    "finished: less is better": text(METRICS, lambda t: t.replace("higher", "lower")),
    "finished: a metric renamed": text(METRICS, lambda t: t.replace('"accuracy"', '"macro_f1x"')),
    "finished: no metrics": without(METRICS),
    "finished: a client's accuracy": text(
        CLIENTS, lambda t: re.sub(r'("accuracy": 0\.)\d', r"\g<1>9", t)
    ),
    "finished: no clients": text(CLIENTS, lambda t: ""),
    "finished: edges that were not": new("edges.jsonl", '{"round": 1, "from": 0, "to": 1}\n'),
    "finished: another partition": text(
        PARTITION, lambda t: re.sub(r'("train": \[\[)\d+', r"\g<1>99", t)
    ),
    "finished: no partition": without(PARTITION),
    "finished: other features": data(FEATURES, flipped),
    "finished: no features": without(FEATURES),
    "finished: features that were not": all_of(
        lambda run, other: void(shutil.copy(run / FEATURES, run / "features-1.safetensors"))
    ),
    "finished: lines and result of another seed": from_other(ROUNDS, RESULT),
    "finished: all but the recipe of another seed": from_other(
        ROUNDS, RESULT, CLIENTS, METRICS, PARTITION, FEATURES, STATE
    ),
    "finished: the format in the checkpoint alone": all_of(
        *(text(name, bare) for name in (RECIPE, ROUNDS, CLIENTS)),
        dropped("seal", "digests", "format"),
        text(ROUNDS, better),
    ),
    "stopped: an accuracy": text(ROUNDS, better),
    "stopped: a line removed": lines(lambda whole: whole[1:]),
    "stopped: a client's line": lines(lambda whole: whole[1:], CLIENTS),
    "stopped: another learning rate": text(RECIPE, lambda t: t.replace("lr = 0.0", "lr = 0.6")),
    "stopped: less is better": text(METRICS, lambda t: t.replace("higher", "lower")),
    "stopped: no partition": without(PARTITION),
    "stopped: no checkpoint, an accuracy": all_of(without(STATE), text(ROUNDS, better)),
    "stopped: a checkpoint that is not whole": data(STATE, lambda blob: blob[:100]),
    "stopped: another round in the checkpoint": data(
        STATE, lambda blob: blob.replace(b'\\"round\\": 2', b'\\"round\\": 1', 1)
    ),
    "stopped: lines of another seed": from_other(ROUNDS),
    "stopped: the result of another seed": from_other(RESULT),
}
