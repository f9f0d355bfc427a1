"""The trained models of a run as modules of their own, for predictions and export."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedgist.core.message import Nothing, are_finite, is_finite
from fedgist.core.method import Context, Method
from fedgist.core.nets.adapters import merged
from fedgist.core.nets.net import Net
from fedgist.core.objectives.multilabel import LIKELY
from fedgist.core.objectives.next_word import BEGIN, PADDING, UNKNOWN
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree, below, build, map_leaves, named, under
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import pieces_of, sample_of
from fedgist.data.sources.in_memory import examples_like
from fedgist.data.sources.text_rows import encoded_texts, prompts
from fedgist.data.usual_values import with_measured_ranges, with_stated_ranges
from fedgist.engines.engine import EVALUATE, Simulation
from fedgist.errors import RecipeError, listed
from fedgist.runs.round import ServerRun
from fedgist.world.data import client_number, data_of_client
from fedgist.world.world import World

NO_PROBABILITIES: frozenset[Target] = frozenset({"numbers", "own"})
_MOST = 10_000  # rows whose quantiles are the usual ranges of columns
SERVER = "server/"  # before the name of a model of the server


class ClientModel(nn.Module):
    """One client's final model, from raw examples, as the data source gives them, to logits.

    An encoder, which has learnt no classes, gives features. ``method`` None: a model of the server,
    which predicts by itself. Adapters are added to the weights. ``trained`` is the net before that.
    """

    def __init__(
        self, method: Method | None, net: Net, own: Tree, down: Tree, ctx: Context, data: Dataset
    ) -> None:
        super().__init__()
        self.trained, net = net, merged(net)
        self.method, self.arch, self.ctx, self.data = method, net.arch, ctx, data
        self.in_units = False
        self.kinds = {"own": type(own), "down": type(down)}
        arrays = under("params/", net.params) | under("buffers/", net.buffers)
        arrays |= under("own/", named(own)) | under("down/", named(down))
        self.names = {f"array_{i}": name for i, name in enumerate(arrays)}
        for slot, name in self.names.items():
            self.register_buffer(slot, arrays[name].detach().cpu().clone())
        shape = (-1, *(1 for _ in data.input_shape[1:]))
        kind = self.number
        self.register_buffer("mean", (torch.tensor(data.mean, dtype=kind) * data.scale).view(shape))
        self.register_buffer("std", (torch.tensor(data.std, dtype=kind) * data.scale).view(shape))
        self.register_buffer("fill", None if data.fill is None else data.fill.to("cpu", kind))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes) of raw examples ``x``, ``(batch, *shape)``.

        NaN is a missing number, if the training rows were allowed to lack some.
        """
        arrays = {name: self.get_buffer(slot) for slot, name in self.names.items()}

        net = Net(below("params/", arrays), below("buffers/", arrays), self.arch)
        own, down = (build(self.kinds[kind], below(f"{kind}/", arrays)) for kind in ("own", "down"))
        if self.arch.words:
            x = x.long()
        else:
            x = x.to(self.number)
            x = x if self.data.fill is None else torch.where(x.isnan(), self.get_buffer("fill"), x)
            x = (x - self.get_buffer("mean")) / self.get_buffer("std")
            x = x.to(torch.float32)
        if self.arch.projects:
            return net.features(x)
        method = self.method
        out = method.predict(net, own, down, x, self.ctx) if method else net(x)
        return self.ctx.task.objective.answers(out) if self.in_units else out

    def in_own_units(self) -> ClientModel:
        """Return the same model with numbers in their own unit as outputs, if it predicts numbers.

        Logits of classes and labels stay logits.
        """
        other = copy.copy(self)
        other.in_units = self.target in NO_PROBABILITIES
        return other

    def without(self, slots: Collection[str]) -> ClientModel:
        """Return the same model in which these arrays, which predictions do not use, are empty."""
        other = copy.copy(self)
        kept = {k: v.new_zeros(0) if k in slots else v for k, v in self.named_buffers()}
        other.__dict__["_buffers"] = kept  # a copy of a module shares them
        return other

    def probabilities(self, x: object, batch: int = 512) -> Tensor:
        """Return the probabilities (rows, ..., classes) of raw examples, ``batch`` rows at a time.

        ``x`` is an array or a data frame like that of the training rows, or a list of texts. The
        probabilities are those of the classes, of each label, or of the classes at each pixel; if
        models predict words, of the word that comes after each text.

        Raises
        ------
        RecipeError
            If the model predicts numbers, or what an objective of the user's own says.
        """
        if self.target in NO_PROBABILITIES:
            raise RecipeError("this model predicts numbers and no probabilities: use predict(x)")
        return self.answers(x, batch)

    def answers(self, x: object, batch: int = 512) -> Tensor:
        """Return the probabilities, or the predicted numbers (rows, numbers) in their own unit.

        Raises
        ------
        RecipeError
            If the model is not finite: what it says means nothing.
        """
        self.check_finite()
        rows = self._rows(x)
        batch = max(1, batch // math.prod(self.ctx.task.places))
        answers = self.ctx.task.objective.answers
        with torch.no_grad():
            logits = [self._last(piece) for piece in torch.split(rows, batch)]
        if not are_finite(logits):
            raise RecipeError(
                "the model's outputs are not finite: it diverged in training (try a smaller "
                "train.lr), or an input is too large"
            )
        return torch.cat([answers(piece) for piece in logits])

    def check_finite(self) -> None:
        """Raise RecipeError if a parameter of the model is not finite."""
        for slot, name in self.names.items():
            if name.startswith("params/") and not is_finite(self.get_buffer(slot)):
                raise RecipeError(
                    f"the model is not finite, in {name.removeprefix('params/')!r}: it diverged in "
                    "training; run again with a smaller train.lr"
                )

    def predict(self, x: object) -> list[str] | list[list[str]] | Tensor:
        """Return the prediction of each raw example.

        It is the name of the likeliest class, or of the next word of a text; a list of the names of
        the labels with a probability above 1/2; the predicted numbers, (rows, numbers); the number
        of the likeliest class of each pixel, (rows, height, width); or the answers of an objective
        of the user's own, (rows, ...).
        """
        answers, names = self.answers(x), self.output_names
        if self.target in NO_PROBABILITIES:
            return answers
        if self.target == "pixels":
            return answers.argmax(-1)
        if self.target == "labels":
            return [labels_in(row, names) for row in answers.tolist()]
        chances = sayable(answers) if self.target == "words" else answers
        return [names[label] for label in chances.argmax(1).tolist()]

    @property
    def number(self) -> torch.dtype:
        """The type in which inputs are centred and scaled: float64 if float32 is too short."""
        return torch.float64 if self.data.x.dtype == torch.float64 else torch.float32

    @property
    def is_network(self) -> bool:
        """Whether the network predicts by itself what the method predicts with it."""
        shape = (2, *self.data.input_shape)
        if self.arch.words:
            x = torch.zeros(shape, dtype=torch.int64)
        else:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        alone = copy.copy(self)
        alone.method = None
        with torch.no_grad():
            return torch.equal(self(x), alone(x))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The name of each class, label or number; numbers of an own objective have none."""
        if self.target != "own":
            return self.data.names
        return tuple(f"output_{i}" for i in range(self.ctx.task.objective.outputs))

    @property
    def target(self) -> Target:
        """What the model predicts."""
        return self.ctx.task.objective.target

    def _rows(self, x: object) -> Tensor:
        """Return raw examples (rows, *shape) of an array, a data frame, or a list of texts."""
        if not self.arch.words:
            return examples_like(self.data, x, "x")
        texts = [x] if isinstance(x, str) or not isinstance(x, Iterable) else x
        whole = prompts if self.target == "words" else encoded_texts
        return whole([str(text) for text in texts], self.data)

    def _last(self, x: Tensor) -> Tensor:
        """Return the logits (batch, ...), of the next word those after the last word."""
        logits: Tensor = self(x)
        if self.target != "words":
            return logits
        return logits[torch.arange(len(x), device=x.device), (x != PADDING).sum(1) - 1]


def labels_in(probabilities: Sequence[float], names: Sequence[str]) -> list[str]:
    """Return the names of the labels with a probability above 1/2.

    >>> labels_in([0.9, 0.5, 0.7], ["a", "b", "c"])
    ['a', 'c']
    """
    return [name for p, name in zip(probabilities, names, strict=True) if p > LIKELY]


def sayable(probabilities: Tensor) -> Tensor:
    """Return probabilities (rows, words) with those of padding, begin and unknown removed."""
    return probabilities.index_fill(1, torch.tensor([PADDING, BEGIN, UNKNOWN]), 0.0)


def trained_model(server_run: ServerRun, world: World, who: int | str) -> ClientModel:
    """Return the model of a client, or of the server.

    ``who`` is a client's number, or a text: a client's name or number, or ``"server/NAME"``.
    """
    net = server_net(server_run, world, who)
    if net is None:
        return client_model(server_run, world, who)
    if world.server.setup.recipe.data.normalize == "client":
        raise RecipeError(
            f"{who}: with data.normalize = 'client' nothing says how the server sees an example"
        )
    ctx = server_run.context(EVALUATE)
    return ClientModel(None, net, Nothing(), Nothing(), ctx, _with_ranges(world, world.data))


def server_net(server_run: ServerRun, world: World, who: int | str) -> Net | None:
    """Return the server's model with the name ``"server/NAME"``, or None for a client's name."""
    name = str(who)
    if not name.startswith(SERVER) or name in world.partition.names:
        return None
    models = server_nets(server_run)
    if name not in models:
        choices = listed(sorted(models)) if models else "none of its own: a client's is meant"
        raise RecipeError(f"there is no model {name:.80}; the server of this run has {choices}")
    return models[name]


def server_nets(server_run: ServerRun) -> dict[str, Net]:
    """Return the server's own models, on the CPU, by ``"server/NAME"``."""
    models = server_run.method.models(server_run.server, server_run.context(EVALUATE)) or {}
    return {f"{SERVER}{n}": map_leaves(lambda leaf: leaf.cpu(), net) for n, net in models.items()}


def client_model(server_run: ServerRun, world: World, client: int | str) -> ClientModel:
    """Return the model that a client holds after the last aggregation and its next download.

    ``client`` is its number, or a text: its name, or its number.
    """
    number = client_number(world.partition, client)
    method = server_run.method
    engine = simulation(server_run)
    order = server_run.orders_to_each(server_run.round)[0 if method.merges_clients else number]
    ctx = server_run.context(EVALUATE)
    down = server_run.download(order, ctx)
    clients = engine.client(ctx, order, down)
    cpu = map_leaves(lambda leaf: leaf.cpu(), clients)
    data = data_of_client(
        world.server.setup.recipe.data.normalize, world.data, world.partition, number
    )
    at_client = replace(ctx, architecture=order.architecture)
    described = _with_ranges(world, data)
    return ClientModel(method, cpu.net, cpu.own, down, at_client, described)


def _with_ranges(world: World, data: Dataset) -> Dataset:
    """Return the data of a model, whose columns have their usual ranges.

    They are stated, or measured on the training rows of all clients without privacy.
    """
    setup = world.server.setup
    recipe = setup.recipe
    if recipe.data.ranges is not None:
        columns = with_stated_ranges(data.columns, recipe.data.ranges, data.name)
    elif recipe.privacy.unit == "none" and data.columns:
        rows = world.partition.train.rows
        few = data.inputs[rows[sample_of(len(rows), _MOST)]]
        columns = with_measured_ranges(data.columns, torch.cat(list(pieces_of(few))))
    else:
        columns = data.columns
    return replace(data, columns=columns)


def client_nets(server_run: ServerRun, clients: Sequence[int]) -> Iterator[Net]:
    """Yield the model that each client holds after the last round, on the CPU."""
    engine = simulation(server_run)
    orders, downs, ctx = server_run.downloads(server_run.round)
    for client in clients:
        place = 0 if server_run.method.merges_clients else client
        held = engine.client(ctx, orders[place], downs[place])
        yield map_leaves(lambda leaf: leaf.cpu(), held).net


def simulation(server_run: ServerRun) -> Simulation:
    """Return the federation's engine, if it simulates the clients."""
    if not isinstance(server_run.engine, Simulation):
        raise RecipeError(
            "the clients' models are at their sites: only a simulation can look at them"
        )
    return server_run.engine
