"""Check of a method before a run; an error names the function that breaks the interface.

Each of the client's functions is called once, for one client and a few made-up rows. The check
covers the result, and that the function did not change its arguments. Loss and summaries are
evaluated twice, with different numbers in absent rows. If the numbers change a result, the method
ignores ``batch.mask``, and its results would depend on the number of stacked clients.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedgist.core.batch import Batch, Labels, repeated_rows
from fedgist.core.message import Form, reduction, why_not_summable
from fedgist.core.method import Context, Method, Net, Order, Phase, Task
from fedgist.core.nets.convolution import Conv2d
from fedgist.core.nets.layers import BatchNorm, Pass
from fedgist.core.nets.net import stacked
from fedgist.core.nets.parts import check_part
from fedgist.core.peer_method import PeerMethod
from fedgist.core.task import fake_batch
from fedgist.core.tree import Tree, leaves, map_leaves, named
from fedgist.core.wire_form import why_not_decodable
from fedgist.errors import MethodError, cut, first_line
from fedgist.training.local_training import learned

ROWS, PRESENT = 3, 2  # of the made-up batch
ABSENT = (
    "depends on rows that are absent, or on torch's generator: "
    "weigh rows by batch.mask, and draw from ctx.draw"
)


def check_method(method: Method, task: Task, server: Tree, key: Tensor) -> list[str]:
    """Check a method before its first round; return notes on its models, if there are any."""
    check_part(method.keeps, f"{type(method).__name__}.keeps")
    notes = [*method.notes(task)]
    for trial in trials(method, task, server, key):
        notes += trial.look()
    _check_memory(method, task, key)
    return list(dict.fromkeys(notes))


def _check_memory(method: Method, task: Task, key: Tensor) -> None:
    """Raise MethodError if a later round has a phase whose optimizer round 1 does not prepare."""

    def lasting(number: int) -> dict[tuple[str, int], tuple[object, ...]]:
        memory = task.training.optimizer_memory
        found: dict[tuple[str, int], tuple[object, ...]] = {}
        for stage in _stages(method, Context(key, task, number, "")):
            phases = method.phases(Context(key, task, number, stage, architecture=task.main))
            for place, phase in enumerate(phases):
                if (phase.remembers or memory) == "run":
                    found[stage, place] = phase.learns, phase.optimizer, phase.loss is None
        return found

    first = lasting(1)
    for number in range(2, task.training.num_rounds + 1):
        if any(phase != first.get(name) for name, phase in lasting(number).items()):
            raise MethodError(
                f"train.optimizer_memory = 'run': the phases of {type(method).__name__} in round "
                f"{number} are others than in round 1, so no optimizer lives for the run; use "
                "'round'"
            )


def trials(method: Method, task: Task, server: Tree, key: Tensor) -> Iterator[Trial]:
    """Yield a trial of every stage with clients, in rounds 0 and 1, by architecture."""
    for name in task.architectures:
        for number in (0, 1):
            for stage in _stages(method, Context(key, task, number, "")):
                trial = Trial(method, Context(key, task, number, stage), name, server)
                if trial.asks_clients():
                    yield trial


def why_unstackable(
    method: Method, task: Task, server: Tree, key: Tensor, architecture: str
) -> str | None:
    """Return the function of a method that cannot be stacked, and why; None: the model."""
    for stage in _stages(method, Context(key, task, 1, "")):
        trial = Trial(method, Context(key, task, 1, stage), architecture, server)
        if trial.asks_clients() and (reason := trial.unstackable()):
            return reason
    return None


def check_loss_settings(method: Method, task: Task, server: Tree, key: Tensor) -> None:
    """Raise MethodError if the recipe has settings of the task's loss that the method ignores."""
    training = task.training
    given = ["train.class_weights = 'balanced'"] if training.class_weights == "balanced" else []
    given += (
        [f"train.sample_weights = {training.sample_weights!r}"] if training.sample_weights else []
    )
    given += (
        [f"train.label_smoothing = {training.label_smoothing}"] if training.label_smoothing else []
    )
    read = _uses_weights if not training.label_smoothing else _uses_task_loss
    if given and not any(read(trial) for trial in trials(method, task, server, key)):
        raise MethodError(
            f"{given[0]} would have no effect: {type(method).__name__} does not learn by the "
            "task's loss, ctx.task.objective.loss(logits, batch), on the batch that it is given, "
            "or that loss does not read batch.weight"
        )


def _uses_task_loss(trial: Trial) -> bool:
    """Return whether the loss of a phase changes with the weights of the rows."""
    trial.look()
    return _differ(lambda batch: trial.losses(trial.net, batch, trial.own), trial)


def _uses_weights(trial: Trial) -> bool:
    """Return whether a loss or the sums change with the weights of the rows."""
    return _uses_task_loss(trial) or _differ(lambda batch: leaves(trial.sums(batch)), trial)


def _differ(of: Callable[[Batch], Sequence[Tensor]], trial: Trial) -> bool:
    """Return whether any tensor changes with the weights of the rows."""
    batch = trial.batch(0.0)
    weights = torch.arange(1.0, 1.0 + len(batch.y), device=batch.y.device)
    with torch.no_grad():
        plain, weighted = (of(rows) for rows in (batch, replace(batch, weight=weights)))
    return any(not torch.equal(a, b) for a, b in zip(plain, weighted, strict=True))


def check_returned(value: Any, method: Method, function: str) -> Any:
    """Return ``value``, the result of a method's function, unless it is None."""
    if value is None:
        raise MethodError(
            f"{type(method).__name__}.{function} returned nothing: is a return missing?"
        )
    return value


def check_state(value: Tree, method: Method, function: str) -> Tree:
    """Return a state that a function returned; raise MethodError unless it is a tree."""
    try:
        named(check_returned(value, method, function))
    except (TypeError, ValueError) as error:
        broken(method, function, f"returned {kind_of(value)}, which is not a tree: {error}")
    return value


def broken(method: Method, function: str, problem: str) -> NoReturn:
    """Raise MethodError about a function of a method."""
    raise MethodError(f"{type(method).__name__}.{function} {problem}")


def _stages(method: Method, ctx: Context) -> Sequence[str]:
    names: Any = check_returned(method.stages(ctx), method, "stages")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise MethodError(
            f"{type(method).__name__}.stages returned {names!r}: return a tuple, ({names!r},)"
        )
    return tuple(names)


class Trial:
    """One client's part of a stage, tried on made-up rows."""

    def __init__(self, method: Method, ctx: Context, architecture: str, server: Tree) -> None:
        self.method, self.ctx, self.server = method, ctx, server
        self.at_client = replace(ctx, architecture=architecture)
        self.net = ctx.task.starts[architecture]
        self.order = Order(0, architecture)

    def asks_clients(self) -> bool:
        """Return whether this stage involves any client."""
        return self.method.orders(self.server, [self.order], self.ctx) is not None

    def look(self) -> list[str]:
        """Call every function of the client once and check the result; return notes."""
        self.down = self._call("download", self.server, self.order)
        self._message("download", self.down)
        own = self._call("init_client", self.net)
        self.net, self.own = self._pair("receive", self._call("receive", self.net, own, self.down))
        notes = self._check_mask() + self._dropped() + self._idle_biases()
        batch = self._picked(self.batch(0.0))
        sums = self._call("summarize", self.net, batch, self.own, self.down)
        pair = self._call("upload", self.net, self.own, sums, self.down)
        self._message("upload", self._pair("upload", pair)[0])
        logits = self._call("predict", self.net, self.own, self.down, batch.x)
        shape = (ROWS, *self.ctx.task.places, self.ctx.task.objective.outputs)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != shape:
            self._complain("predict", f"returned {kind_of(logits)}, not logits {list(shape)}")
        return notes

    def batch(self, absent: float) -> Batch:
        """Return made-up rows; the last row is absent and filled with the number ``absent``."""
        task = self.ctx.task
        batch = fake_batch(task, self.ctx.key, ROWS)
        if self.method.counts_classes:
            counts = torch.arange(task.num_classes, device=batch.y.device).float()
            batch = replace(batch, class_counts=counts)
        batch.x[PRESENT:] = absent % task.words if task.words else absent
        for values in (batch.y, batch.mask, *batch.annotations.values()):
            values[PRESENT:] = 0
        return batch

    def sums(self, batch: Batch) -> Tree:
        """Return the sums over a batch."""
        return self._call("summarize", self.net, self._picked(batch), self.own, self.down)

    def _picked(self, batch: Batch) -> Batch:
        """Return the batch for summaries, with the client's choices among its rows."""
        if not isinstance(self.method, PeerMethod):
            return batch
        picks = self._call("pick", Labels(batch.y, batch.mask, batch.annotations), self.own)
        if not isinstance(picks, Tensor) or tuple(picks.shape[:-1]) != (ROWS,):
            self._complain("pick", f"returned {kind_of(picks)}, not (rows, choices)")
        return replace(batch, picks=picks)

    def unstackable(self) -> str | None:
        """Return the function that fails on two stacked clients, if the model itself does not."""
        self.look()
        batch = self._picked(self.batch(0.0))

        def body(net: Net, batch: Batch, own: Tree) -> Tensor:
            del own  # the model does not need it
            return self._pass(net, batch.mask).features(batch.x)

        def summaries(net: Net, batch: Batch, own: Tree) -> Any:
            return self.method.summarize(net, batch, own, self.down, self.at_client)

        functions = {"the model": body, "loss": self.losses, "summarize": summaries}
        for name, function in functions.items():
            stacked_args = [stacked(self.net, 2), *(_twice(value) for value in (batch, self.own))]
            try:
                with torch.no_grad():
                    torch.func.vmap(function)(*stacked_args)
            except Exception as error:  # noqa: BLE001  # a user's function may fail in any way
                if name == "the model":
                    return None
                words = "use masks (torch.where) in place of Boolean indices and branches"
                why = cut(first_line(error.__cause__ or error), 120).rstrip(".")
                return f"{self._name(name)} cannot be stacked: {why}; {words}"
        return None

    def _check_mask(self) -> list[str]:
        """Compare loss and summaries for two different numbers in the absent row."""
        first, other = self.batch(0.0), self.batch(7.0)
        with torch.no_grad():
            a, b = (self._pass(self.net, batch.mask).features(batch.x) for batch in (first, other))
            if not _close(a[:PRESENT], b[:PRESENT]):
                name = self.order.architecture
                return [f"{name} mixes the rows of a batch: absent rows can change its results"]
            given = (self.net, first, other, self.own, self.down)
            with self._unchanged("loss", given):
                losses = [self.losses(self.net, batch, self.own) for batch in (first, other)]
        self._check_gradient(first)
        if any(not _close(x, y) for x, y in zip(*losses, strict=True)):
            self._complain("loss", ABSENT)
        sums = [self.sums(batch) for batch in (first, other)]
        pairs = zip(*(leaves(value) for value in sums), strict=True)
        if any(not _close(x.double(), y.double()) for x, y in pairs):
            self._complain("summarize", ABSENT)
        return []

    def _dropped(self) -> list[str]:
        if not self.net.arch.drops_features:
            return []
        name = self.order.architecture
        note = f"{name}: its features are dropped out in training; terms of a loss on features see "
        note += "the dropout. Put one nn.Dropout layer, used once, right before the last layer"
        return [note]

    def _idle_biases(self) -> list[str]:
        """Return a note if Adam changes biases without an effect on the loss."""
        optimizer = self.ctx.task.training.optimizer
        layers = [m for m in self.net.arch.module.modules() if not any(True for _ in m.children())]
        pairs = itertools.pairwise(layer for layer in layers if not isinstance(layer, nn.Identity))
        idle = [a for a, b in pairs if _has_bias(a) and isinstance(b, BatchNorm)]
        if not idle or optimizer not in {"adam", "adamw"} or self.net.arch.evaluates:
            return []
        note = f"{self.order.architecture}: batch norm takes off the bias of the convolution before"
        note += f" it, so its gradient is rounding alone, which {optimizer} makes whole steps of: "
        return [note + "engines may differ by points of accuracy; use bias=False there"]

    def _check_gradient(self, batch: Batch) -> None:
        """Raise MethodError if no gradient flows from the loss to the trained tensors."""
        live = {n: p.detach().clone().requires_grad_() for n, p in self.net.params.items()}
        own = map_leaves(_learnable, self.own)
        with torch.enable_grad():
            losses = self.losses(self.net.with_arrays(live), batch, own)
        if live and any(not loss.requires_grad for loss in losses):
            self._complain("loss", "returned a number without a gradient: was it detached?")

    def losses(self, net: Net, batch: Batch, own: Tree) -> list[Tensor]:
        """Return the loss of each phase, ()."""
        losses = []
        phases: Any = check_returned(self.method.phases(self.at_client), self.method, "phases")
        for phase in phases:
            if not isinstance(phase, Phase):
                self._complain("phases", f"returned {kind_of(phase)} among its phases")
            try:
                learned(phase, net, own)
            except MethodError as error:
                raise MethodError(f"{self._name('phases')}: {error}") from error
            objective = self.ctx.task.objective
            views = repeated_rows(batch, objective.views)
            run = Pass(views.mask, self.ctx.key, objective.norm_parts)
            loss = phase.loss or self.method.loss
            value = self._named("loss", loss, replace(net, run=run), views, own, self.down)
            if not isinstance(value, Tensor) or value.dim():
                self._complain("loss", f"returned {kind_of(value)}, not a scalar")
            losses.append(value)
        return losses

    def _pass(self, net: Net, mask: Tensor) -> Net:
        return replace(net, run=Pass(mask, self.ctx.key))

    def _call(self, function: str, *args: Any) -> Any:
        with torch.no_grad(), self._unchanged(function, args):
            return self._named(function, getattr(self.method, function), *args)

    @contextlib.contextmanager
    def _unchanged(self, function: str, given: tuple[object, ...]) -> Iterator[None]:
        """Raise MethodError if a function changes its arguments in place."""
        tensors = leaves(given)
        before = [tensor.detach().clone() for tensor in tensors]
        yield
        for tensor, was in zip(tensors, before, strict=True):
            if not torch.allclose(tensor, was, rtol=0.0, atol=0.0, equal_nan=True):
                problem = f"changed {kind_of(tensor)} that it was given, in place: "
                self._complain(function, problem + "return a new tensor")

    def _named(self, function: str, code: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the method; an error names the function."""
        try:
            value = code(*args, self.ctx if function == "download" else self.at_client)
        except MethodError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise MethodError(
                f"{self._name(function)} failed in stage {self.ctx.stage!r}: {why}"
            ) from error
        return check_returned(value, self.method, function)

    def _pair(self, function: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, tuple) or len(value) != 2:  # noqa: PLR2004  # a pair
            pair = "(net, own)" if function == "receive" else "(message, own)"
            self._complain(function, f"returned {kind_of(value)}, not the pair {pair}")
        first, own = value
        if function == "receive" and not isinstance(first, Net):
            self._complain(function, f"returned {kind_of(first)} in place of the net")
        try:
            named(own)
        except (TypeError, ValueError) as error:
            self._complain(function, f"returned an own state that is not a tree: {error}")
        return first, own

    def _message(self, function: str, value: Any) -> None:
        try:
            reduction(type(value))
            reason = why_not_decodable(type(value), named(value))
            if function == "upload":
                reason = reason or why_not_summable(Form.of(value))
        except (TypeError, ValueError) as error:
            self._complain(function, f"returned {kind_of(value)}: {error}")
        if reason:
            self._complain(function, f"returned {kind_of(value)}: {reason}")

    def _complain(self, function: str, problem: str) -> None:
        raise MethodError(f"{self._name(function)} {problem}")

    def _name(self, function: str) -> str:
        return f"{type(self.method).__name__}.{function}"


def _learnable(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_() if leaf.is_floating_point() else leaf


def _has_bias(layer: nn.Module) -> bool:
    kinds = Conv2d | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return isinstance(layer, kinds) and layer.bias is not None


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def kind_of(value: Any) -> str:
    """Return a description of a value's type, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _twice(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.expand(2, *leaf.shape), value)
