"""Tables of ``fedgist show --by``: the scores of runs by the clients' models, or by client."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from fedgist.core.objectives.metrics import LOSS, Metric
from fedgist.errors import ReportError, listed
from fedgist.report.formatting import NONE, Sheet, score_text
from fedgist.report.tables.client_scores import (
    COUNTED,
    UNKNOWN,
    ClientScore,
    Scores,
    counts_rows,
    keeps_clients,
    over_runs,
    scores_of,
)
from fedgist.report.tables.comparison import RunGroup, common_metric, draw_of, group
from fedgist.report.tables.mean_counts import sentence
from fedgist.report.tables.stats import Draw, jain, mean_of_differences, wilson, worst_tenth
from fedgist.report.tables.tested_rows import Sites, sites_of
from fedgist.runs.files.columns import COMPLETE, EXPECTED, measured, over_clients
from fedgist.runs.files.record import Line
from fedgist.runs.files.run_directory import PARTICIPANTS
from fedgist.runs.finished.finished_run import FinishedRun

LOCAL = "local"  # the method whose scores a gain is measured against
DECIDING = ("data.", "partition.", "clients.")  # settings that decide which rows a client has
EVERY_MODEL = "all"  # the row of the clients of all models
OF_MODELS = (
    "mean, spread, worst tenth and Jain's index (1: all equal) over clients; by rows: each "
    "client weighted by its test rows; each number is a mean over seeds"
)
By = Literal["model", "client"]
Shower = Callable[[float | None], str]


def by_client(runs: Sequence[FinishedRun]) -> list[Sheet]:
    """Return a row for each client: each method's score and gain over local; and all metrics.

    Scores are means over seeds and divisions. Where clients are drawn by the seed, clients of
    different seeds are different clients, and the smallest seed that all methods have is shown.
    """
    metric, all_groups = _groups(runs)
    groups, which = _of_same_clients(all_groups)
    show = _shower(runs)
    columns = {rows.label: over_runs(rows.runs, metric) for rows in groups}
    gains = {rows.label: base.label for rows in groups if (base := _local_of(rows, groups))}
    clients = {client: score for scores in columns.values() for client, score in scores.items()}
    lines = tuple(
        (
            *_about([scores[client] for scores in columns.values() if client in scores]),
            *(_score_text(scores.get(client), show) for scores in columns.values()),
            *(_gain(columns[a], columns[b], client, show) for a, b in gains.items()),
        )
        for client in sorted(clients)
    )
    head = (
        "client",
        "model",
        "test rows",
        *columns,
        *(f"{label} - {base}" for label, base in gains.items()),
    )
    title = f"{measure_of(runs).title} by client, {which}"
    sites = sites_of(groups) if counts_rows(runs, metric) else {}
    losers = _losers(columns, gains, measure_of(runs), sites)
    spread = any(score.spread is not None for of in columns.values() for score in of.values())
    about = "±: standard deviation over the runs" if spread else ""
    unshared = _unshared(all_groups)
    caption = "; ".join(filter(None, (about, _caption(runs, metric), unshared, losers)))
    sheet = Sheet(title, head, lines, caption)
    replied = {rows.label: rounds_replied(rows.runs[0]) for rows in groups if len(rows.runs) == 1}
    wide = _with_replies(sheet, sorted(clients), replied)
    return [wide, _all_metrics(groups, which, runs[0])]


def _local_of(rows: RunGroup, groups: Sequence[RunGroup]) -> RunGroup | None:
    """Return local training of the same clients on the same rows, with the likest settings."""

    def unlike(local: RunGroup) -> list[str]:
        keys = {*rows.settings, *local.settings}
        return [key for key in keys if rows.settings.get(key) != local.settings.get(key)]

    locals_ = [
        local
        for local in groups
        if local.method == LOCAL and not any(key.startswith(DECIDING) for key in unlike(local))
    ]
    return (
        None if rows.method == LOCAL else min(locals_, key=lambda r: len(unlike(r)), default=None)
    )


def _about(scores: Sequence[ClientScore]) -> tuple[str, str, str]:
    """Return a client's name, model and test rows; "-" for what differs between methods."""
    rows = [f"{score.rows:.0f}" for score in scores]
    columns = [score.name for score in scores], [score.model for score in scores], rows
    name, model, count = (texts[0] if len({*texts}) == 1 else NONE for texts in columns)
    return name, model, count


def _of_same_clients(groups: Sequence[RunGroup]) -> tuple[list[RunGroup], str]:
    """Return the groups with the runs whose clients are the same, and these runs in words."""
    everything = [run for rows in groups for run in rows.runs]
    common = _common_draws(groups)
    if not common:
        raise ReportError("--by client: the runs have no seed in common")
    if not keeps_clients(everything):
        seed = min(draw.seed for draw in common)
        kept = [draw for draw in common if draw.seed == seed]
        groups = [
            replace(rows, runs=tuple(run for run in rows.runs if draw_of(run) in kept))
            for rows in groups
        ]
        return [*groups], f"seed {seed}"
    groups = [
        replace(rows, runs=tuple(run for run in rows.runs if draw_of(run) in common))
        for rows in groups
    ]
    seeds, divisions = ({draw[place] for draw in common} for place in (0, 1))
    words = f"mean over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {min(seeds)}"
    return groups, words + (f" and {len(divisions)} divisions" if len(divisions) > 1 else "")


def _score_text(score: ClientScore | None, show: Shower) -> str:
    if score is None:
        return show(None)
    text = show(score.score)
    if score.spread is None:
        return text
    number, _, unit = text.partition(" ")
    return f"{number} ± {show(score.spread).partition(' ')[0]} {unit}".rstrip()


def _losers(
    columns: Mapping[str, Scores],
    gains: Mapping[str, str],
    measure: Metric,
    sites: Mapping[str, Sites],
) -> str:
    """Return a sentence that names the clients that a method makes worse than local training.

    ``gains`` names the local training of each row of the study. ``sites`` are the clients' test
    rows by row of the study, of clients with saved predictions. Of these the sentence says which
    differences are beyond chance.
    """
    sign = 1 if measure.better == "higher" else -1
    lost = [
        (label, client)
        for label, local in gains.items()
        for client in sorted(columns[label].keys() & columns[local].keys())
        if sign * (columns[label][client].score - columns[local][client].score) < 0
    ]
    kinds: dict[str, list[str]] = {}
    for label, client in lost:
        kind = f"worse than {LOCAL} training"
        own, base = (sites.get(row, {}).get(client) for row in (label, gains[label]))
        if own is not None and base is not None:
            apart = own.right - base.right
            beyond = (mean_of_differences([apart.tolist()]).high or 0.0) < 0
            kind += ", beyond chance" if beyond else ", perhaps by chance (95 % over rows)"
        kinds.setdefault(kind, []).append(f"{columns[label][client].name} by {label}")
    return "; ".join(f"{kind}: {listed(names)}" for kind, names in sorted(kinds.items()))


def _all_metrics(groups: Sequence[RunGroup], which: str, run: FinishedRun) -> Sheet:
    """Return a table with a row for each client and method, and a column for each metric."""
    measures = [m for name, m in run.metrics.items() if name != LOSS.name]
    counted = [rows.label for rows in groups if counts_rows(rows.runs, COUNTED)]
    scores = {
        (rows.label, metric.name): over_runs(rows.runs, metric.name)
        for rows in groups
        for metric in measures
    }
    clients = sorted({client for of_metric in scores.values() for client in of_metric})
    lines = []
    for client in clients:
        for rows in groups:
            own = [scores[rows.label, metric.name].get(client) for metric in measures]
            if not any(own):
                continue
            first = next(score for score in own if score)
            cells = [
                score_text(score.score if score else None, metric)
                for score, metric in zip(own, measures, strict=True)
            ]
            bounds = []
            if counted:
                right = scores[rows.label, COUNTED].get(client)
                low, high = wilson(right.score, right.rows) if right and right.rows else (0, 0)
                bounds = [f"[{100 * low:.1f}, {100 * high:.1f}]" if high else UNKNOWN]
            lines.append((first.name, rows.label, f"{first.rows:.0f}", *bounds, *cells))
    head = ("client", "method", "test rows", *(["95 % of accuracy"] if counted else []))
    caption = "mean over runs; 95 %: Wilson's interval of these models, over rows of the client"
    sheet = Sheet(
        f"All metrics by client, {which}",
        (*head, *(metric.title.lower() for metric in measures)),
        tuple(lines),
        caption if counted else "mean over runs",
        named_by=2,
    )
    return sheet.filled()


def rounds_replied(run: FinishedRun) -> dict[int, str]:
    """Return in how many rounds each client replied, as "2 of 3"; empty if that is not known.

    The server of a federation writes down who took part. A simulation's record names the clients
    that were asked and did not reply, so it is known if all clients were asked in every round.
    """
    rounds = [line for line in run.rounds if line["round"] > 0]
    clients = {line["client"] for line in run.clients.lines}
    path = run.folder / PARTICIPANTS
    silent = [_silent(line) for line in rounds]
    replied = {client: sum(client not in some for some in silent) for client in clients}
    if path.is_file():
        pairs = [line.split(",") for line in path.read_text("utf-8").split()[1:]]
        took_part = Counter(int(client) for number, client in pairs if int(number) > 0)
        replied = {client: took_part[client] for client in clients | took_part.keys()}
    elif not all(map(_asks_all, rounds, silent, [len(clients)] * len(rounds))):
        return {}
    return {client: f"{count} of {len(rounds)}" for client, count in replied.items()}


def _silent(line: Line) -> set[int]:
    """Return the clients that were asked in a round and did not reply in all stages."""
    return {entry["client"] for kind in ("refused", "absent") for entry in line.get(kind) or ()}


def _asks_all(line: Line, silent: set[int], count: int) -> bool:
    """Return whether a round asked all clients, so that each that is not named replied."""
    if EXPECTED in line:
        return bool(line[EXPECTED] == count and line[COMPLETE] == count - len(silent))
    orders = line.get("clients/asked") or 0
    return orders > 0 and orders == line.get("clients/replied") and orders % count == 0


def _with_replies(
    sheet: Sheet, clients: Sequence[int], replied: Mapping[str, Mapping[int, str]]
) -> Sheet:
    """Return a table by client with the rounds in which each replied, unless all did in all."""
    shown = {
        label: counts
        for label, counts in replied.items()
        if any(len(set(text.split(" of "))) > 1 for text in counts.values())
    }
    columns = [f"replied, {label}" if len(replied) > 1 else "replied" for label in shown]
    rows = tuple(
        (*row, *(counts.get(client, UNKNOWN) for counts in shown.values()))
        for client, row in zip(clients, sheet.rows, strict=True)
    )
    return replace(sheet, columns=(*sheet.columns, *columns), rows=rows)


def _caption(runs: Sequence[FinishedRun], metric: str) -> str:
    """Return what is not shown, and which clients have no score."""
    rows = {members.label: members.runs for members in group(runs)[0]}
    partial = sentence(rows, over_clients("client", metric)).removesuffix(".")
    return "; ".join(filter(None, (without_scores(runs), partial)))


def by_model(runs: Sequence[FinishedRun]) -> Sheet:
    """Return a table with a row for each model and method: clients, rows, mean, how even it is.

    A method with several models also has a row of all its clients.
    """
    metric, groups = _groups(runs)
    lines = []
    for rows in groups:
        tables = [list(scores_of(run, metric).values()) for run in rows.runs]
        models = list(dict.fromkeys(score.model for table in tables for score in table))
        for model in [*([EVERY_MODEL] if len(models) > 1 else []), *models]:
            seeds = [[s for s in table if model in {s.model, EVERY_MODEL}] for table in tables]
            lines.append((model, rows.label, *_of_model([seed for seed in seeds if seed], runs)))
    measure = measure_of(runs)
    head = ("clients", "rows", "mean", "spread", "worst tenth", "Jain", "by rows")
    return Sheet(
        f"{measure.title} by model",
        ("model", "method", *head),
        tuple(sorted(lines, key=lambda line: line[0])),
        "; ".join(filter(None, (OF_MODELS, _unshared(groups), _caption(runs, metric)))),
        named_by=2,
    )


def without_scores(runs: Sequence[FinishedRun]) -> str:
    """Return a note on the rows that are not shown, because their clients have no score."""
    shown = {rows.label for rows in _scored(runs)[1]}
    absent = [rows.label for rows in group(runs)[0] if rows.label not in shown]
    if not absent:
        return ""
    return f"not shown, without {measure_of(runs).title} of single clients: {', '.join(absent)}"


MOST_CLIENTS = 50  # with more, a row per client says nothing at a glance


def of_runs(runs: Sequence[FinishedRun]) -> list[Sheet]:
    """Return the tables by model and by client of the runs that have scores of clients."""
    metric, groups = _scored(runs)
    scores = [scores_of(run, metric) for rows in groups for run in rows.runs]
    models = {score.model for table in scores for score in table.values()}
    shown = [by_model(runs)] if len(models) > 1 else []
    few = bool(scores) and all(len(table) <= MOST_CLIENTS for table in scores)
    return [*shown, *by_client(runs)] if few and _common_draws(groups) else shown


def gains(runs: Sequence[FinishedRun]) -> list[tuple[str, ClientScore, float]]:
    """Return each client's gain over local training with the same draw: label, client, gain.

    Of clients that are the same in all runs it is the mean over draws.
    """
    metric, (groups, _) = common_metric(runs) if runs else "", group(runs)
    pairs = []
    for rows in groups:
        if (base_rows := _local_of(rows, groups)) is None:
            continue
        common = {draw_of(run) for run in rows.runs} & {draw_of(run) for run in base_rows.runs}
        own, alone = (
            [run for run in some.runs if draw_of(run) in common] for some in (rows, base_rows)
        )
        same = keeps_clients([*own, *alone])
        sets = [(own, alone)] if same else [([a], [b]) for a, b in zip(own, alone, strict=True)]
        for some, others in sets:
            scores, base = over_runs(some, metric), over_runs(others, metric)
            pairs += [
                (rows.label, score, score.score - base[client].score)
                for client, score in scores.items()
                if client in base
            ]
    return pairs


TABLES: Mapping[By, Callable[[Sequence[FinishedRun]], list[Sheet]]] = MappingProxyType(
    {"model": lambda runs: [by_model(runs)], "client": by_client}
)


def _of_model(
    seeds: Sequence[Sequence[ClientScore]], runs: Sequence[FinishedRun]
) -> tuple[str, ...]:
    """Return the cells of one model and method: means over seeds."""
    show, measure = _shower(runs), measure_of(runs)
    values = [[score.score for score in scores] for scores in seeds]

    def mean(statistic: Callable[[Sequence[float]], float]) -> float:
        return statistics.fmean(map(statistic, values))

    rows = statistics.fmean(sum(score.rows for score in scores) for scores in seeds)
    even = [index for index in map(jain, values) if index is not None]
    index = f"{statistics.fmean(even):.3f}" if even and measure.better == "higher" else NONE
    worst = mean(lambda scores: worst_tenth(scores, measure.better))
    plain, spread = mean(statistics.fmean), mean(statistics.pstdev)
    by_rows = statistics.fmean(map(_by_rows, seeds))
    counts = (f"{count:.4g}" for count in (mean(len), rows))
    return (*counts, *map(show, (plain, spread, worst)), index, show(by_rows))


def _by_rows(scores: Sequence[ClientScore]) -> float:
    values, rows = [score.score for score in scores], [score.rows for score in scores]
    return statistics.fmean(values, rows) if any(rows) else statistics.fmean(values)


def _groups(runs: Sequence[FinishedRun]) -> tuple[str, list[RunGroup]]:
    """Return the metric, and the groups of runs with scores of clients; there is at least one."""
    metric, groups = _scored(runs)
    if not groups:
        raise ReportError(
            "--by: no run has scores of single clients; they are in the clients.jsonl of a run "
            "directory, and an archived run keeps none"
        )
    return metric, groups


def _scored(runs: Sequence[FinishedRun]) -> tuple[str, list[RunGroup]]:
    """Return the metric, and the groups without the runs whose clients have no score by it."""
    metric, (groups, _) = common_metric(runs) if runs else "", group(runs)
    scored = [
        replace(rows, runs=tuple(run for run in rows.runs if scores_of(run, metric)))
        for rows in groups
    ]
    return metric, [rows for rows in scored if rows.runs]


def _common_draws(groups: Sequence[RunGroup]) -> set[Draw]:
    return set.intersection(*({draw_of(run) for run in rows.runs} for rows in groups))


def _unshared(groups: Sequence[RunGroup]) -> str:
    """Return a note on the seeds that some methods have and others have not."""
    common = _common_draws(groups)
    more = [
        f"{rows.label} {listed(sorted(seeds))}"
        for rows in groups
        if (seeds := {run.seed for run in rows.runs if draw_of(run) not in common})
    ]
    return f"seeds that not all methods have: {'; '.join(more)}" if more else ""


def _gain(scores: Scores, local: Scores, client: int, show: Shower) -> str:
    if client not in scores or client not in local:
        return show(None)
    gain = scores[client].score - local[client].score
    return ("+" if gain >= 0 else "") + show(gain).replace("%", "points")


def measure_of(runs: Sequence[FinishedRun]) -> Metric:
    """Return the metric by which these tables show clients: the one that most runs have."""
    return measured(over_clients("client", common_metric(runs)), runs[0].metrics)


def _shower(runs: Sequence[FinishedRun]) -> Shower:
    measure = measure_of(runs)
    return lambda value: score_text(value, measure)
