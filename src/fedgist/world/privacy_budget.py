"""Privacy accounting of a run: number of releases, noise per release, and budget spent.

Noise from the system lies on a grid, on which sums of numbers are exact (decision 0038).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fedgist.core import random
from fedgist.core.message import Form, reduction
from fedgist.core.method import ClientInfo, Context, Method, Order, Task
from fedgist.core.nets.layers import BatchNorm
from fedgist.core.privacy import Privacy, PrivateSteps, grid_of, sensitivity
from fedgist.core.training import Training, Work
from fedgist.core.wire_form import Bits, form_of
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.engines.message_form import upload_form
from fedgist.errors import RecipeError
from fedgist.recipe.privacy_section import PrivacySection
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import Recipe
from fedgist.world.accounting import ReleaseSchedule, gaussian_delta, multiplier, spent
from fedgist.world.client_settings import works_in

CONDITION = (
    "this holds for bodies that do not depend on the record: they learn from it, so it is a "
    "promise about the sums alone (privacy.bodies = 'dp_sgd' makes it unconditional)"
)
FROZEN = (
    "this holds if the frozen bodies do not depend on the record: their weights were made without "
    "it"
)
MEASURED = (
    "losses and scores of this record, which the simulation measured, are not covered by epsilon; "
    "real sites keep theirs (privacy.share_measurements)"
)
HELD = (
    "simulated: epsilon does not cover this folder, whose class counts and clients' models say "
    "more of the rows; share the noisy sums alone (real sites keep the rest)"
)
SIMULATED = (
    "simulated: noise from seed {seed}, which anyone can subtract (privacy.noise = 'system' draws "
    "it from the operating system)"
)

FOUND_IN_ROWS = {
    "moments": "means and deviations of the inputs are measured on the training rows: state "
    "data.mean and data.std, or use data.normalize = 'none'",
    "fill": "missing numbers are replaced by means of the training rows: replace them before",
    "categories": "the categories of columns are those of the training rows: list them in "
    "data.columns",
    "label moments": "means and deviations of the predicted numbers are measured on the training "
    "rows: state objective.mean and objective.std",
    "length of texts": "the length of texts is that of 95 % of the training texts: state "
    "data.words.length",
    "vocabulary": "the vocabulary is made of the training texts: name a file of words in "
    "data.words.file",
}
STEP_DIGITS = 40  # of a step's sums, which are float64 and get noise before they are rounded
COARSEST = 64.0  # steps of the grid in a deviation, at least: coarser noise tells more
FINEST = 2.0**48  # and at most: then noise has more digits than float64


@dataclass(frozen=True)
class PrivacyBudget:
    """The privacy budget of a run: its releases, and the noise that keeps them within the budget.

    ``noise`` is the noise multiplier: the noise's standard deviation divided by the sensitivity.
    ``frozen`` says that no body learns.
    """

    section: PrivacySection
    schedule: ReleaseSchedule
    noise: float
    seed: int = 0
    frozen: bool = False

    @property
    def delta(self) -> float:
        """The delta of the budget."""
        assert self.section.delta is not None  # a complete section has one
        return self.section.delta

    def epsilon(self, number: int, repeats: int = 0) -> float:
        """Return the epsilon spent up to a round if ``repeats`` of the rounds were done twice."""
        longer = with_repeats(self.schedule, repeats, number)
        return spent(longer, self.noise, self.delta, number + repeats)

    def allows(self, number: int, repeats: int) -> bool:
        """Return whether the budget allows this round after ``repeats`` repeated rounds."""
        budget = self.section.epsilon
        assert budget is not None  # a complete section has one
        return not repeats or self.epsilon(number, repeats) <= budget * (1.0 + 1e-6)

    def described(self) -> dict[str, object]:
        """Return the privacy section of a run's result."""
        keys = ("unit", "where", "epsilon", "delta", "clip", "accounting", "bodies", "noise")
        releases, steps = self.schedule.until(len(self.schedule.releases))
        facts: dict[str, object] = {key: getattr(self.section, key) for key in keys}
        facts |= {"noise_multiplier": self.noise, "releases": releases}
        facts |= {"private_steps": steps} if steps else {}
        facts |= {"client_sampling": self.schedule.chance} if self.schedule.chance < 1 else {}
        return facts

    def notes(self, sizes: Sequence[int] | None = None) -> list[str]:
        """Return notes for the user: the privacy promise and its condition.

        ``sizes`` are the clients' numbers of training rows in a simulation. In a federation they
        are None, because they are not the server's to know.
        """
        s = self.section
        whose = f"one {s.unit} more or less"
        promise = (
            f"privacy: epsilon {s.epsilon:g}, delta {s.delta:g} over the whole run for {whose}"
        )
        conditional = s.unit == "record" and s.bodies == "fixed"
        condition = FROZEN if self.frozen else CONDITION
        notes = [f"{promise}; {condition}" if conditional else promise]
        notes += [MEASURED] if s.share_measurements else []
        notes += [] if sizes is None else [*self._about_delta(sizes), HELD]
        return [*notes, SIMULATED.format(seed=self.seed)] if s.noise == "seed" else notes

    def _about_delta(self, sizes: Sequence[int]) -> list[str]:
        """Return a note if delta allows a mechanism that now and then publishes a record."""
        s = self.section
        if s.unit == "client":
            count, subject = len(sizes), "the number of clients"
        elif s.where == "central":
            count, subject = sum(sizes), "the number of rows"
        else:
            count, subject = min(sizes), "the rows of the smallest client"
        return [large_delta("privacy.delta", self.delta, count, subject)] * (self.delta * count > 1)


def large_delta(key: str, delta: float, count: int, subject: str) -> str:
    """Return a sentence on a delta that is above one over the number of records."""
    return (
        f"{key} = {delta:g} is above 1 / {count}, {subject}: publishing one of them at random "
        "would meet it"
    )


def with_repeats(schedule: ReleaseSchedule, repeats: int, number: int) -> ReleaseSchedule:
    """Return the schedule up to a round, preceded by ``repeats`` copies of the costliest round.

    A round that is done again draws its clients anew.
    """
    releases, steps = schedule.releases, schedule.steps
    return replace(
        schedule,
        releases=(max(releases),) * repeats + releases[: number + 1],
        steps=(max(steps, default=0),) * repeats + steps[: number + 1],
    )


def private_task(
    setup: Setup,
    task: Task,
    clients: tuple[ClientInfo, ...],
    sizes: Sequence[int],
    say: Callable[[str], None],
) -> tuple[Task, PrivacyBudget | None]:
    """Return the task with its privacy, and the run's budget; None if nothing is protected.

    ``sizes`` holds the clients' numbers of training rows. ``say`` is called with the progress of
    long calculations.
    """
    recipe = setup.recipe
    section, method = recipe.privacy, setup.method
    if section.unit == "none":
        return task, None
    assert section.clip is not None  # a complete section has one
    assert section.epsilon is not None  # the same
    assert section.delta is not None  # the same
    _check_settings(recipe)
    grid, fine = grids(section, sizes, method.release_digits)
    about = section.unit, section.where, section.clip
    silent = Privacy(*about, 0.0, _steps(section, 0.0, fine), grid, section.epsilon)
    _check_private_steps(recipe.train, task, silent.steps)
    method.check(trial := replace(task, privacy=silent))
    releases = _releases(setup, trial, clients)
    drawn = type(method).select is Method.select and section.where == "central"
    amplified = drawn and recipe.train.sampling == "poisson" and silent.steps is None
    schedule = ReleaseSchedule(
        releases,
        _private_steps(method, trial, works_in(recipe.clients.settings)),
        recipe.train.fraction_train if amplified and section.accounting == "tight" else 1.0,
        silent.steps.rate if silent.steps else 1.0,
        section.accounting,
    )
    paid = with_repeats(schedule, section.repeats, task.training.num_rounds)
    noise = multiplier(paid, section.epsilon, section.delta, say)
    _check_paper(section, schedule, noise)
    deviation = noise * sensitivity(section.unit, section.clip)
    privacy = replace(silent, deviation=deviation, steps=_steps(section, noise, fine))
    check_noise(privacy)
    budget = PrivacyBudget(section, schedule, noise, recipe.seed, frozen=_is_frozen(method, task))
    return replace(task, privacy=privacy), budget


def _check_paper(section: PrivacySection, schedule: ReleaseSchedule, noise: float) -> None:
    """Raise RecipeError if theorem 4's noise is too little for the epsilon that is claimed."""
    assert section.epsilon is not None  # a complete section has one
    assert section.delta is not None  # the same
    if section.accounting != "paper":
        return
    releases, _ = schedule.until(len(schedule.releases))
    if gaussian_delta(section.epsilon, noise / math.sqrt(releases)) > section.delta:
        raise RecipeError(
            f"privacy.accounting = 'paper': with epsilon {section.epsilon:g} the theorem's noise "
            "does not keep the promise, which holds for small epsilons: use 'tight'"
        )


def _is_frozen(method: Method, task: Task) -> bool:
    """Return whether no body learns."""
    if all(net.arch.evaluates and not net.body for net in task.starts.values()):
        return True
    return not any(
        method.phases(replace(ctx, architecture=name))
        for name in task.architectures
        for ctx in _stages(method, task, 1)
    )


def check_rows(section: PrivacySection, data: Dataset, train: Rows, held: Rows) -> None:
    """Raise RecipeError if anything besides the releases depends on the private rows.

    Statistics measured on the rows enter every input without noise. A row that several clients hold
    changes a total by more than the sensitivity, because each of these clients adds it. Held-out
    rows (``held``) count as well, because a search may choose by scores on them.
    """
    unit = section.unit
    if unit == "none":
        return
    for part, problem in FOUND_IN_ROWS.items():
        if part in data.measured:
            raise RecipeError(f"privacy.unit = {unit!r}: {data.name}: {problem}")
    times = torch.cat([train.rows, held.rows]).bincount()
    if unit == "record" and int(times.max()) > 1:
        raise RecipeError(
            f"privacy.unit = 'record': row {int(times.argmax())} is in {int(times.max())} "
            "clients, and each would release it: give each row to one client"
        )


def _steps(section: PrivacySection, noise: float, grid: float) -> PrivateSteps | None:
    clip, rate = section.gradient_clip, section.sampling_rate
    return None if clip is None or rate is None else PrivateSteps(clip, noise * clip, rate, grid)


def _check_settings(recipe: Recipe) -> None:
    """Raise RecipeError for settings that would release information outside the accounting."""
    section, unit = recipe.privacy, f"privacy.unit = {recipe.privacy.unit!r}"
    central = section.where == "central"
    problems = {
        f"{unit}: train.sample_weights change how much a row adds": (
            section.unit == "record" and bool(recipe.train.sample_weights)
        ),
        f"{unit}: with data.long_tail = {recipe.data.long_tail:g} a row more may be a row less of "
        "another client": section.unit == "record" and recipe.data.long_tail < 1,
        f"{unit}: clients.max_norm refuses all rows of a client because of one": (
            central and section.unit == "record" and recipe.clients.max_norm is not None
        ),
        f"{unit}: with train.round_seconds the number of steps tells how long rows take, which no "
        "epsilon covers": recipe.train.round_seconds is not None,
        f"{unit}: data.normalize = 'client' depends on each client's rows: state data.mean and "
        "data.std": recipe.data.normalize == "client",
        f"{unit}: privacy.min_replies = {section.min_replies} tells how many clients were drawn: "
        "use 1 with train.sampling = 'poisson'": (
            central and section.min_replies > 1 and recipe.train.sampling == "poisson"
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise RecipeError(problem)


def _check_private_steps(train: Training, task: Task, steps: PrivateSteps | None) -> None:
    """Raise RecipeError for settings with which per-row gradients are not defined."""
    if steps is None:
        return
    bodies = "privacy.bodies = 'dp_sgd'"
    if train.class_weights != "none":
        raise RecipeError(
            f"{bodies}: train.class_weights = {train.class_weights!r} depend on all rows: 'none'"
        )
    if train.clip_norm:
        raise RecipeError(
            f"{bodies}: train.clip_norm = {train.clip_norm:g} is not read; gradients are clipped "
            "row by row, by privacy.gradient_clip"
        )
    if train.precision != "float32":
        raise RecipeError(
            f"{bodies}: train.precision = {train.precision!r} rounds clipped gradients: 'float32'"
        )
    for name, arch in task.architectures.items():
        if arch.frozen is not None and not task.starts[name].body:
            raise RecipeError(
                f"{bodies}: the body of {name} is frozen, so that no step needs noise: 'fixed'"
            )
        if arch.evaluates:  # its batch norm uses stored statistics
            continue
        if any(isinstance(layer, BatchNorm) for layer in arch.module.modules()):
            raise RecipeError(
                f"{bodies}: {name} has batch norm, which mixes the rows of a batch: use a model "
                "without it, or with group norm"
            )


def _releases(setup: Setup, task: Task, clients: tuple[ClientInfo, ...]) -> tuple[int, ...]:
    """Return the number of releases of each round, from round 0."""
    recipe = setup.recipe
    method, forms = setup.method, {}
    counts = []
    for number in range(task.training.num_rounds + 1):
        count = 0
        for ctx in _stages(method, task, number):
            key = (number == 0, ctx.stage)
            if key not in forms:
                forms[key] = [_form(method, ctx, client) for client in _one_of_each(clients)]
                for form in forms[key]:
                    _check_form(setup, form)
            terms = method.record_terms if recipe.privacy.unit == "record" else 1
            count += terms * any(form.arrays for form in forms[key])
        counts.append(count)
    if not any(counts):
        raise RecipeError(
            f"privacy.unit = {recipe.privacy.unit!r}: method {recipe.method.name} sends nothing to "
            "protect"
        )
    return tuple(counts)


def _private_steps(method: Method, task: Task, works: Sequence[Work] = ()) -> tuple[int, ...]:
    """Return a client's most private steps per round, from round 0; () without such steps.

    ``works`` is how long clients train that have a length of their own.
    """
    assert task.privacy is not None  # that of the caller
    if task.privacy.steps is None:
        return ()
    any_rows = torch.zeros(1, dtype=torch.int64)
    return tuple(
        max(
            sum(
                int(phase.steps_of(any_rows, task, name, work))
                for ctx in _stages(method, task, number)
                for phase in method.phases(replace(ctx, architecture=name))
            )
            for name in task.architectures
            for work in (None, *works)
        )
        for number in range(task.training.num_rounds + 1)
    )


def _stages(method: Method, task: Task, number: int) -> Iterator[Context]:
    key = random.key(0)
    device = next(iter(next(iter(task.starts.values())).params.values())).device
    for stage in method.stages(Context(key.to(device), task, number, "")):
        yield Context(key.to(device), task, number, stage)


def _one_of_each(clients: tuple[ClientInfo, ...]) -> list[Order]:
    """Return one client of each architecture."""
    client_ids = {client.architectures[0]: client.id for client in clients}
    return [Order(client, name) for name, client in sorted(client_ids.items())]


def _form(method: Method, ctx: Context, order: Order) -> Form:
    server = method.init_server(replace(ctx, stage="init"))
    return upload_form(method, ctx, order.architecture, method.download(server, order, ctx))


def _check_form(setup: Setup, form: Form) -> None:
    """Raise RecipeError if messages of this form cannot be protected."""
    recipe = setup.recipe
    if not form.arrays:
        return
    name, unit = recipe.method.name, recipe.privacy.unit
    if reduction(form.kind) != "sum" and recipe.privacy.where == "central":
        raise RecipeError(
            f"privacy.unit = {unit!r}: method {name} sends messages that are not summed: use "
            "privacy.where = 'local', noise at each client"
        )
    if unit == "record" and not setup.method.record_terms:
        raise RecipeError(
            f"privacy.unit = 'record': the messages of method {name} are not sums of one term a "
            "row; use unit = 'client'"
        )
    for array, (dtype, shape) in form.arrays.items():
        if not math.prod(shape):
            continue
        kind = "" if dtype.is_floating_point else f"{str(dtype).removeprefix('torch.')} numbers"
        if isinstance(form_of(form.kind, array), Bits):
            kind = "single bits"
        if kind:
            raise RecipeError(
                f"privacy.unit = {unit!r}: method {name} sends {kind} ({array}), to which noise "
                "cannot be added"
            )


def grids(
    section: PrivacySection, sizes: Sequence[int], digits: int = Method().release_digits
) -> tuple[float, float]:
    """Return the grid sizes of releases and of private steps; 0 if the seed makes the noise.

    ``sizes`` holds the clients' numbers of rows. Their sum or maximum is rounded up to a power of
    two. The number of rows, up to a factor of 2, is therefore treated as public. ``digits`` is
    ``Method.release_digits``.
    """
    if section.noise == "seed":
        return 0.0, 0.0
    assert section.clip is not None  # a complete section has one
    central, largest = section.where == "central", max(1, *sizes)
    if section.unit == "client":
        return grid_of(section.clip * (len(sizes) if central else 1), digits), 0.0
    rows = _power(max(1, sum(sizes)) if central else largest)
    grid = grid_of(max(1.0, section.clip) * rows, digits)
    if grid > 1:
        raise RecipeError(
            f"privacy.clip = {section.clip:g}: sums over {rows} rows of this norm are not exact "
            "with privacy.noise = 'system': use a smaller one"
        )
    if section.gradient_clip is None:
        return grid, 0.0
    return grid, grid_of(section.gradient_clip * _power(largest), STEP_DIGITS)


def check_noise(privacy: Privacy) -> None:
    """Raise RecipeError if noise of the system is too coarse or too fine for its grid."""
    steps = privacy.steps
    pairs = [(privacy.deviation, privacy.grid)]
    pairs += [(steps.deviation, steps.grid)] if steps else []
    for deviation, grid in pairs:
        if grid and deviation < COARSEST * grid:
            raise RecipeError(
                f"privacy.epsilon: noise of deviation {deviation:.3g} is coarse beside sums in "
                f"steps of {grid:.3g} (privacy.noise = 'system'): use less"
            )
        if grid and deviation > FINEST * grid:
            raise RecipeError(
                f"privacy.epsilon: noise of deviation {deviation:.3g} has more digits than "
                f"numbers, in steps of {grid:.3g}: use more"
            )


def _power(count: int) -> int:
    return 1 << math.ceil(math.log2(count))
