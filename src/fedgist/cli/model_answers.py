"""Apply trained models to a user's examples: predictions, metrics and probes."""

from __future__ import annotations

import hashlib
import io
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.core.objectives.metrics import LOSS, Metric
from fedgist.core.objectives.target import Target
from fedgist.data.lazy_rows import pieces_of
from fedgist.data.sources.further_labels import columns_beside, image_names, read_labels
from fedgist.data.sources.image_folder import notes_on_files
from fedgist.data.sources.text_file import read_further
from fedgist.data.sources.text_rows import encoded_texts, further_texts
from fedgist.data.sources.unlabelled import read_examples
from fedgist.data.table_columns import Column
from fedgist.data.usual_values import unusual_values
from fedgist.errors import DataError, RecipeError, listed, one_of, printable
from fedgist.recipe.overrides import Overrides
from fedgist.report.formatting import Sheet, csv_text, percent, score_text
from fedgist.report.tables.prediction_table import prediction_lines
from fedgist.report.terminal.console import SheetView, console, say
from fedgist.runs import runner
from fedgist.runs.evaluation import score_rows
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import to_json
from fedgist.runs.finished.probes import PROBES, probed
from fedgist.runs.finished.trained_models import SERVER, ClientModel, server_net, trained_model
from fedgist.runs.round import ServerRun
from fedgist.world.data import client_number
from fedgist.world.world import World


def predict(
    folder: Path, data: Path, client: str, out: Path | None, data_root: Path | None
) -> None:
    """Write a client's predictions as CSV, and print the main score if labels are available.

    Classes of pixels are written to a .npz file.
    """
    federation, world = _predicting(folder, data_root)
    model = trained_model(federation, world, client)
    target, names = model.target, model.output_names
    _check_file(target, out)
    examples = _examples(data, world)
    answers = model.answers(examples)
    if target == "pixels":
        assert out is not None  # it was checked
        _write_pixels(out, answers.argmax(-1), names)
    else:
        files = None if world.data.text else image_names(data)
        lines = prediction_lines(target, answers, names, files)
        lines = _with_ids(lines, data, world, client)
        if isinstance(examples, Tensor) and model.data.columns:
            lines = _with_unusual(lines, model.data.columns, examples)
        _write(lines, out)
    if target != "words":
        _say_score(data, world, model, examples)


def _with_ids(
    lines: Sequence[Sequence[str]], data: Path, world: World, client: str
) -> list[list[str]]:
    """Return the lines with the columns of the table that tell its rows apart, such as ids."""
    options = world.server.setup.recipe.data.options
    owner = options.get("client")
    asked = [*(options.get("ignore") or ()), *filter(None, [options.get("group"), owner])]
    cells = columns_beside(data, world.data, list(dict.fromkeys(map(str, asked))))
    _say_whose(cells.pop(str(owner), []), world, client)
    header, *rest = map(list, lines)
    ids = {name: column for name, column in cells.items() if len({*column}) == len(column)}
    for place, (name, column) in enumerate(ids.items(), 1):
        header.insert(place, f"table: {name}" if name in header else name)
        for line, cell in zip(rest, column, strict=True):
            line.insert(place, cell)
    return [header, *rest]


def _say_whose(owners: Sequence[str], world: World, client: str) -> None:
    """Count the rows of other clients than the one whose model predicts them all."""
    names = world.partition.names
    if not names or (client.startswith(SERVER) and client not in names):
        return
    called = names[client_number(world.partition, client)]
    others = [name for name in owners if name.strip() not in {"", called}]
    if others:
        say(
            f"! rows of other clients ({listed(sorted({*others}))}): {len(others)}; all rows are "
            f"predicted by the model of {called}",
            error=True,
        )


def _check_file(target: Target, out: Path | None) -> None:
    """Raise RecipeError if predictions of pixels have no file to be written to."""
    if target == "pixels" and (out is None or out.suffix.lower() != ".npz"):
        raise RecipeError("the classes of pixels are no table: name a file, -o masks.npz")


def _examples(path: Path, world: World) -> Tensor | list[str]:
    """Return the examples of a file: raw examples (rows, *input), or texts."""
    if world.data.text:
        return read_further(path, _field(world))
    for note in notes_on_files([path] if path.is_dir() else [], deep=True):
        say(note, error=True)
    return read_examples(path, world.data)


def _write_pixels(out: Path, classes: Tensor, names: Sequence[str]) -> None:
    """Write the class of each pixel, ``y`` (rows, height, width), and the names ``classes``."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, y=classes.numpy().astype(np.int16), classes=np.array(names))
    atomic_files.write(out, buffer.getvalue())


def _predicting(folder: Path, data_root: Path | None) -> tuple[ServerRun, World]:
    """Load a run; raise RecipeError if its models are encoders, which predict no labels."""
    federation, world = runner.load_run(folder, Overrides(root=data_root))
    if federation.task.objective.views > 1:
        raise RecipeError(
            f"{folder}: encoders predict nothing; look at them with fedgist probe, or export them"
        )
    return federation, world


def _with_unusual(
    lines: Sequence[Sequence[str]], columns: Sequence[Column], x: Tensor
) -> list[list[str]]:
    """Return the lines with the names of each row's unusual columns, and say how many there are."""
    unusual = unusual_values(columns, x)
    counts = {column: int(rows.sum()) for column, rows in unusual.items()}
    if parts := [_unusual_text(column, count) for column, count in counts.items() if count]:
        rows = int(torch.stack(list(unusual.values())).any(0).sum())
        say(f"! {rows} of {len(x)} rows have unusual values: {listed(parts)}", error=True)
    if any(c.categories is None for c in columns) and not any(c.usual for c in columns):
        say("numbers are not compared with usual ones: state data.ranges before a run", error=True)
    marks = {column.name: rows.tolist() for column, rows in unusual.items()}
    names = ["; ".join(n for n, rows in marks.items() if rows[row]) for row in range(len(x))]
    return [[*line, text] for line, text in zip(lines, ["unusual", *names], strict=True)]


def _unusual_text(column: Column, count: int) -> str:
    kind = "an unknown category"
    if column.usual is not None:
        kind = f"outside {column.usual[0]:g} to {column.usual[1]:g}"
    return f"{printable(column.name)} ({kind}, {count:,} row{'s' * (count != 1)})"


def _write(lines: Sequence[Sequence[str]], out: Path | None) -> None:
    text = csv_text(lines)
    if out is None:
        sys.stdout.write(text)
    else:
        atomic_files.write(out, text)


def _field(world: World) -> str:
    """Return the name of the text field in the recipe's data files."""
    return str(world.server.setup.recipe.data.options.get("text", "text"))


def _say_score(data: Path, world: World, model: ClientModel, examples: Tensor | list[str]) -> None:
    """Print the task's first metric on standard error, or the reason why it is not known."""
    objective = world.server.task.objective
    main = objective.metrics[0]
    try:
        y = _labels(data, world)
    except DataError as error:
        text = f"{main.title.lower()} not known: {error}"
    else:
        if y is None:
            return
        x = encoded_texts(examples, world.data) if isinstance(examples, list) else examples
        x, y = _with_a_label(x, y)
        score = score_rows(model, x, y, objective)[main.name]
        text = f"{main.title.lower()} {score_text(score, main)} of {len(y)} rows"
    say(text, error=True)


def _labelled(data: Path, world: World) -> tuple[Tensor, Tensor | None]:
    """Return the examples (rows, ...) of a file, and their labels (rows, ...) or None."""
    if world.data.target == "words":
        cut = bool(world.server.setup.recipe.data.options.get("sentences", True))
        return further_texts(read_further(data, _field(world), sentences=cut), world.data)
    examples = _examples(data, world)
    x = encoded_texts(examples, world.data) if isinstance(examples, list) else examples
    y = _labels(data, world)
    return (x, y) if y is None or len(x) != len(y) else _with_a_label(x, y)


def _with_a_label(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with a label, and say how many have none."""
    absent = y.isnan() if y.is_floating_point() else y < 0
    has = ~absent.flatten(1).all(1) if y.dim() > 1 else ~absent
    if not bool(has.all()):
        say(f"rows without a label, which have no score: {int((~has).sum())}", error=True)
    return x[has], y[has]


def _labels(data: Path, world: World) -> Tensor | None:
    column = world.server.setup.recipe.data.options.get("label")
    columns = [column] if isinstance(column, str) else column
    named = columns if isinstance(columns, list) else []
    return read_labels(data, world.data, named, _field(world))


def evaluate(
    folder: Path, data: Path, client: str | None, data_root: Path | None, *, as_json: bool
) -> None:
    """Print the metrics of one client's final model, or of every client's, on labelled examples."""
    federation, world = _predicting(folder, data_root)
    x, y = _labelled(data, world)
    if y is None:
        raise DataError(
            f"{data} has no labels: evaluate needs the array y of a .npz file, the label column "
            "of a table, or images in folders that are called like the classes"
        )
    if len(y) != len(x):
        raise DataError(f"{data} has {len(x)} examples, but {len(y)} labels")
    seen = _trained_on(x, y, world)
    if 2 * seen > len(x):  # a few rows of small tables are equal by chance
        say(
            f"! {seen} of the {len(x)} examples equal training rows of this run: their scores do "
            "not say how well the models do on new examples",
            error=True,
        )
    every = world.partition.names or tuple(str(i) for i in range(len(world.partition.test)))
    clients = every if client is None else [client]
    objective = federation.task.objective
    models = ((who, trained_model(federation, world, who)) for who in clients)
    scores = _of_finite({who: score_rows(model, x, y, objective) for who, model in models}, folder)
    if as_json:
        lines = [{"client": who, **values} for who, values in scores.items()]
        sys.stdout.write(to_json({"rows": len(y), "clients": lines, "mean": _means(scores)}) + "\n")
    else:
        console().print(
            SheetView(_sheet(scores, len(y), (*objective.metrics, objective.loss_metric)))
        )


def _of_finite(
    scores: Mapping[str, Mapping[str, float]], folder: Path
) -> dict[str, Mapping[str, float]]:
    """Return the scores with NaN for models that are not finite, and name them.

    Raise RecipeError if all are.
    """
    lost = [who for who, values in scores.items() if math.isinf(values[LOSS.name])]
    if len(lost) == len(scores):
        raise RecipeError(f"{folder}: no model has a score; not finite: {listed(lost)}")
    if lost:
        say(f"! not finite, so without a score: {listed(lost)}", error=True)
    return {who: dict.fromkeys(v, math.nan) if who in lost else v for who, v in scores.items()}


def _trained_on(x: Tensor, y: Tensor, world: World) -> int:
    """Return how many examples ``(rows, *input)`` equal a training row, its label (rows,) too."""
    data = world.data.only(world.partition.train.rows)
    rows = (row for piece in pieces_of(data.inputs) for row in piece)
    trained = set(zip(map(_digest, rows), map(_digest, data.y), strict=True))
    given = zip(map(_digest, x.to(data.x.dtype)), map(_digest, y), strict=True)
    return sum(pair in trained for pair in given)


def _digest(row: Tensor) -> bytes:
    return hashlib.sha256(row.contiguous().numpy().tobytes()).digest()


def probe(
    folder: Path,
    client: str | None,
    kinds: Sequence[str],
    data_root: Path | None,
    *,
    starts: bool,
    as_json: bool,
) -> None:
    """Print the probe accuracies of one client's body, or of every client's."""
    kinds = [kind.strip() for kind in kinds]
    for kind in kinds:
        one_of(kind, PROBES, "probe")
    federation, world = runner.load_run(folder, Overrides(root=data_root))
    alone = client is not None and server_net(federation, world, client) is not None
    clients = list(range(len(world.partition.test)))
    if client is not None:
        clients = [] if alone else [client_number(world.partition, client)]
    all_scores = probed(federation, world, clients, kinds, starts=starts)
    # the server's models are probed with every request
    wanted = (client, *(f"start/{name}" for name in federation.task.starts)) if alone else ()
    scores = {who: values for who, values in all_scores if not wanted or who in wanted}
    if as_json:
        entries = [{"model": who, **values} for who, values in scores.items()]
        sys.stdout.write(to_json({"probes": entries}) + "\n")
        return
    lines = tuple((who, *(percent(of[kind]) for kind in kinds)) for who, of in scores.items())
    rows = f"{len(world.data.y)} training rows, scored on {len(world.data.y_test)} test rows"
    console().print(SheetView(Sheet(f"Probes on features, of {rows}", ("body of", *kinds), lines)))


def _means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the clients that have a defined value."""
    names = next(iter(scores.values()))
    defined = {n: [v[n] for v in scores.values() if not math.isnan(v[n])] for n in names}
    return {n: statistics.fmean(values) if values else math.nan for n, values in defined.items()}


def _sheet(
    scores: Mapping[str, Mapping[str, float]], rows: int, metrics: Sequence[Metric]
) -> Sheet:
    by_name = {metric.name: metric for metric in metrics}
    columns = [by_name[name] for name in next(iter(scores.values()))]
    lines = dict(scores) | ({"mean": _means(scores)} if len(scores) > 1 else {})
    return Sheet(
        f"Final models on {rows} rows",
        ("client", *(metric.title.lower() for metric in columns)),
        tuple((who, *(score_text(of[m.name], m) for m in columns)) for who, of in lines.items()),
    )
