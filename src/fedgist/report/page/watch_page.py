"""The page of ``fedgist watch --serve``: run folders as values, and these values as HTML.

Nothing here writes a file or opens a connection. ``watch_server`` sends the page to a browser.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedgist.errors import ReportError, first_line
from fedgist.federation.server.status import (
    SITE_STATES,
    FederationStatus,
    SiteStatus,
    read_status,
)
from fedgist.methods.common.method_looks import INK
from fedgist.report.formatting import MINUTE, Sheet, bytes_text, duration, score_text
from fedgist.report.page.html_templates import part, template
from fedgist.report.pictures.row_styles import styles_of
from fedgist.report.tables.mean_counts import who_is_missing
from fedgist.report.tables.run_tables import epsilon_text
from fedgist.report.terminal import watch
from fedgist.report.troubles import Trouble, troubles
from fedgist.runs.files.columns import COMPLETE, DOWN_BYTES, EPSILON, EXPECTED, UP_BYTES, measured
from fedgist.runs.files.record import Line
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun

Facts = tuple[tuple[str, str], ...]  # names and their values, in order

RECENT = 10  # number of last rounds of which events are shown
MOST_EVENTS = 12
MOST_POINTS = 160  # of a curve; more are too close together to be seen
WIDTH, HEIGHT, EDGE = 320, 80, 4  # of a curve, in its own units
OLD_S = 60.0  # the server of a federation rewrites its file more often than this
WAITING, SILENT = "waiting", "silent"
OVER = (watch.STOPPED, watch.FINISHED)
WIRE_UP, WIRE_DOWN = "comm/wire_up_bytes", "comm/wire_down_bytes"
NONE = "-"


@dataclass(frozen=True)
class Curve:
    """A metric by round: an SVG path, the path of its last point, and the texts around it."""

    path: str
    end: str
    low: str
    high: str
    first_round: int
    last_round: int
    color: str
    words: str  # for readers who do not see the curve


@dataclass(frozen=True)
class FederationView:
    """A federation and its sites as texts."""

    name: str
    facts: Facts
    waiting_for: str
    silent: str  # a sentence if the server has written nothing for long
    problem: str
    counts: str  # number of sites in each state
    sites: Sheet


@dataclass(frozen=True)
class RunView:
    """A run as texts, or a folder without a run."""

    key: str  # identifies the run's section from one refresh to the next
    name: str
    line: str
    kind: str  # running, silent, stopped, finished or waiting
    state: str
    done: int = 0
    planned: int = 0
    facts: Facts = ()
    metric: str = ""
    curve: Curve | None = None
    events: tuple[Trouble, ...] = ()
    more_events: int = 0
    federation: FederationView | None = None


@dataclass(frozen=True)
class WatchState:
    """Everything that the page shows at one moment."""

    runs: tuple[RunView, ...]
    problems: tuple[str, ...] = ()
    left_out: bool = False  # a run does not match its seal, or its recipe cannot be used

    @property
    def summary(self) -> str:
        """The number of runs in each state, and what federations wait for."""
        waits = [view.federation.waiting_for for view in self.runs if view.federation]
        return "; ".join(filter(None, (self._counts, *waits)))

    @property
    def title(self) -> str:
        """A title that fits a browser's tab."""
        if len(self.runs) == 1 and self.runs[0].planned:
            (run,) = self.runs
            return f"{run.done}/{run.planned} {run.state}"
        return self._counts

    @property
    def _counts(self) -> str:
        counts = Counter(view.kind for view in self.runs)
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no run"


def read_state(
    folders: Iterable[Path], *, trust: bool = False, now: float | None = None
) -> WatchState:
    """Read the runs in these folders; a folder without a run is shown, too."""
    at = time.time() if now is None else now
    runs: dict[Path, FinishedRun] = {}
    waiting: list[RunView] = []
    problems: list[str] = []
    for folder in folders:
        try:
            for run in run_reader.find([folder], trust=trust):
                runs.setdefault(run.folder.resolve(), run)
        except ReportError as error:
            waiting.append(_without_run(folder, error, at))
        except OSError as error:  # a folder may be moved or deleted while it is read
            problems.append(f"{folder} cannot be read: {first_line(error)}")
    usable = [run for run in runs.values() if run.usable]
    problems += run_reader.problems_of(runs.values())
    views = [*(view_of(run, at) for run in watch.in_order(usable)), *waiting]
    views.sort(key=lambda view: (view.kind in OVER, view.federation is None))
    return WatchState(tuple(views), tuple(problems), left_out=len(usable) < len(runs))


def _key(folder: Path) -> str:
    name = str(folder.resolve()).encode("utf-8", "surrogateescape")
    return f"run-{hashlib.sha256(name).hexdigest()[:12]}"


def _without_run(folder: Path, error: ReportError, now: float) -> RunView:
    is_file = folder.exists() and not folder.is_dir()
    text = str(error) if is_file else f"no run yet in {folder}"
    state = None if is_file else read_status(folder)
    federation = None if state is None else federation_view(state, now)
    return RunView(_key(folder), str(folder), text, WAITING, WAITING, federation=federation)


def view_of(run: FinishedRun, now: float) -> RunView:
    """Return a run as texts."""
    state = watch.state(run, now)
    kind = state if state in {watch.RUNNING, *OVER} else SILENT
    events = [trouble for line in reversed(run.rounds[-RECENT:]) for trouble in troubles(line)]
    federation = read_status(run.folder)
    return RunView(
        key=_key(run.folder),
        name=str(run.folder),
        line=f"{run.called}, seed {run.seed}",
        kind=kind,
        state=state,
        done=run.done,
        planned=run.planned,
        facts=_facts(run, kind),
        metric=_metric(run),
        curve=_curve(run),
        events=tuple(events[:MOST_EVENTS]),
        more_events=max(0, len(events) - MOST_EVENTS),
        federation=None
        if federation is None
        else federation_view(federation, now, over=kind in OVER),
    )


def _facts(run: FinishedRun, kind: str) -> Facts:
    seconds = watch.left(run) if kind == watch.RUNNING else None
    last: Line = run.rounds[-1] if run.rounds else {}
    epsilon = run.last(EPSILON)
    answered = last.get(COMPLETE, last.get("clients/replied"))
    orders = last.get(EXPECTED, last.get("clients/asked"))
    facts = {
        watch.title_of(run): watch.score(run),
        "scored": who_is_missing(run, watch.shown_column(run)),
        "time left": "" if seconds is None else duration(seconds),
        "sent up": bytes_text(run.total(UP_BYTES)),
        "sent down": bytes_text(run.total(DOWN_BYTES)),
        "up on the wire": _bytes(run.total(WIRE_UP)),
        "down on the wire": _bytes(run.total(WIRE_DOWN)),
        "epsilon spent": "" if epsilon is None else epsilon_text(epsilon) + _of_budget(run),
        "replies, last round": "" if orders is None else f"{answered or 0:g} of {orders:g}",
        "last round took": duration(last.get("time/round_s") or 0.0) if last else "",
    }
    return tuple((name, text) for name, text in facts.items() if text)


def _bytes(count: int) -> str:
    return bytes_text(count) if count else ""


def _of_budget(run: FinishedRun) -> str:
    privacy = run.recipe.get("privacy")
    budget = privacy.get("epsilon") if isinstance(privacy, dict) else None
    given = isinstance(budget, int | float) and not isinstance(budget, bool)
    return f" of {budget:g}" if given else ""


def _metric(run: FinishedRun) -> str:
    """Return the name of the metric that is shown, and of its rows if they are no test rows."""
    rows = "" if watch.shown_column(run) == run.main else " (validation)"
    return watch.title_of(run) + rows


def _curve(run: FinishedRun) -> Curve | None:
    column = watch.shown_column(run)
    rounds, values = run.column(column)
    if not values:
        return None
    measure = measured(column, run.metrics)
    texts = [score_text(value, measure) for value in (min(values), max(values), values[-1])]
    points = _points(rounds, values)
    x, y = points[-1]
    (style,) = styles_of([run.name])
    return Curve(
        path="M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points),
        end=f"M{x:.1f} {y:.1f}h0",
        low=texts[0],
        high=texts[1],
        first_round=rounds[0],
        last_round=rounds[-1],
        color="currentColor" if style.color == INK else style.color,
        words=f"{measure.title} from round {rounds[0]} to round {rounds[-1]}: "
        f"lowest {texts[0]}, highest {texts[1]}, last {texts[2]}",
    )


def _points(rounds: Sequence[int], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return evenly picked points of a curve, including the last point, in the curve's units."""
    count = min(MOST_POINTS, len(values))
    picks = [round(i * (len(values) - 1) / max(1, count - 1)) for i in range(count)]
    if count == 1:
        return [(WIDTH - EDGE, HEIGHT / 2)]
    low, high, first, last = min(values), max(values), rounds[0], rounds[-1]
    wide, tall = (WIDTH - 2 * EDGE) / max(1, last - first), HEIGHT - 2 * EDGE
    heights = {i: (values[i] - low) / (high - low) if high > low else 0.5 for i in picks}
    return [(EDGE + (rounds[i] - first) * wide, HEIGHT - EDGE - heights[i] * tall) for i in picks]


def federation_view(
    federation: FederationStatus, now: float, *, over: bool = False
) -> FederationView:
    """Return a federation as texts; ``over`` is whether its run has ended."""
    age = None if federation.written is None else max(0.0, now - federation.written)
    old = not over and age is not None and age > OLD_S
    facts = {
        "address": federation.address,
        "round": _number(federation.round),
        "scored": federation.scored,
        "attempt": _number(federation.attempt) if federation.attempt != 1 else NONE,
        "run": federation.run,
        "written": NONE if age is None else f"{_age(age)} ago",
    }
    counts = Counter(site.state or "unknown" for site in federation.sites)
    return FederationView(
        name=federation.federation,
        facts=tuple((name, text) for name, text in facts.items() if text not in {"", NONE}),
        waiting_for=federation.waiting_for,
        silent=f"The server has written nothing for {_age(age or 0.0)}." if old else "",
        problem=federation.problem,
        counts=", ".join(f"{count} {state}" for state, count in counts.items()),
        sites=_sites(federation.sites, now),
    )


def _sites(sites: Sequence[SiteStatus], now: float) -> Sheet:
    columns = ("site", "state", "for", "last round", "sent", "received", "refusals", "version")
    rows = tuple(_site(site, place, now) for place, site in enumerate(sites))
    return Sheet("Sites", (*columns, "note"), rows).filled()


def _site(site: SiteStatus, place: int, now: float) -> tuple[str, ...]:
    number = place if site.number is None else site.number
    return (
        site.name or f"site {number}",
        site.state or NONE,
        NONE if site.since is None else _age(max(0.0, now - site.since)),
        _number(site.last_round),
        NONE if site.sent_bytes is None else bytes_text(site.sent_bytes),
        NONE if site.received_bytes is None else bytes_text(site.received_bytes),
        _number(site.refusals),
        site.version or NONE,
        site.note or NONE,
    )


def _number(value: int | None) -> str:
    return NONE if value is None else str(value)


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < MINUTE else duration(seconds)


def fragment(state: WatchState) -> str:
    """Return the part of the page that changes, as HTML."""
    return template("watch_state.html.j2").render(
        state=state,
        width=WIDTH,
        height=HEIGHT,
        edge=EDGE,
        waiting=WAITING,
        recent=RECENT,
        site_states=SITE_STATES,
    )


def page(state: WatchState, every: float) -> str:
    """Return the whole page, which refreshes itself after each ``every`` seconds."""
    return template("watch.html.j2").render(
        css=_style(),
        js=part("watch.js"),
        fragment=fragment(state),
        state=state,
        every=every,
        whole_seconds=max(1, math.ceil(every)),
        version=metadata.version("fedgist"),
    )


def _style() -> str:
    return part("palette.css") + part("watch.css")


def content_policy() -> str:
    """Return the page's Content-Security-Policy: its own style and script alone, by their hash."""
    style, script = (_hash(text) for text in (_style(), part("watch.js")))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
