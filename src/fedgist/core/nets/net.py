"""One client's model as a value: a body that makes features and a linear head that makes logits.

An :class:`Architecture` is the structure of a model, made once from any ``nn.Module`` whose last
layer is linear. A :class:`Net` is an architecture with parameters and buffers by their names in the
module. Nets are trees, so they stack: the same code runs one client or, under vmap, many clients.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgist.core.nets.compiled.kernel_library import Kernel
from fedgist.core.nets.convolution import Conv2d
from fedgist.core.nets.kernel_choice import use_kernels
from fedgist.core.nets.layers import BatchNorm, Dropout, Pass, current, linear, replace_layers
from fedgist.core.nets.parts import Layers, Part, layers_of
from fedgist.core.nets.projection import head_and_projection, without_projection
from fedgist.core.nets.trailing_dropout import move_trailing
from fedgist.core.nets.user_module import (
    activation_after,
    attempt,
    check_head,
    check_parts,
    check_pass,
    fixed_in,
    tensor_of,
)
from fedgist.core.objectives.target import Target, places
from fedgist.core.random import torch_draws
from fedgist.core.tree import STATIC, map_leaves, tree
from fedgist.errors import first_line


@dataclass(frozen=True, eq=False)
class Architecture:
    """The structure of a model: its body as a module, its layers, and its head's name and sizes.

    In ``module`` the head is replaced by an identity. ``start`` makes the initial net of a seed.
    With ``words``, inputs are numbers of so many words, (batch, length). If ``places`` is not (),
    features and logits have one row per place, (batch, *places, m): per token or per pixel. With
    ``projects``, the head includes a hidden layer as wide as the features, ``HEAD.hidden``,
    followed by ReLU. ``dropout`` is the module's dropout before the head. ``drops_features`` says
    that a dropout before the head had to stay in the body.

    ``fixed`` names the parameters that do not learn because of their ``requires_grad``. ``frozen``
    is the whole model if some of it are constants in ``module``, else None. With ``evaluates``, the
    body always computes as in evaluation. A batch in training needs ``least_rows`` rows.
    """

    name: str
    module: nn.Module = field(repr=False)
    layers: Layers = field(repr=False)
    head: str
    feature_width: int
    num_classes: int
    head_bias: bool
    input_shape: tuple[int, ...]
    start: Callable[[int], Net] = field(repr=False)
    words: int = 0
    places: tuple[int, ...] = ()
    projects: bool = False
    dropout: Dropout | None = field(default=None, repr=False)
    drops_features: bool = False
    fixed: frozenset[str] = frozenset()
    frozen: Net | None = field(default=None, repr=False)
    evaluates: bool = False
    least_rows: int = 1

    @property
    def projected(self) -> bool:
        """Whether features of another width are projected to ``feature_width``."""
        return head_and_projection(self.module, self.head) != self.head

    def with_layout(
        self, *, each: bool, kernels: Mapping[str, Kernel] | None = None
    ) -> Architecture:
        """Return the architecture with unstacked (``each``) or stacked layers.

        This concerns convolutions and batch norm. A convolution named in ``kernels`` runs by that
        kernel instead.

        Raises
        ------
        ValueError
            If a kernel is not on this machine, or a layer is not there or does not have it.
        """
        kernels = kernels or {}
        unstacked: Kernel = "each" if each else "grouped"

        def as_asked(name: str, layer: nn.Module) -> bool:
            if isinstance(layer, Conv2d):
                return layer.kernel == kernels.get(name, unstacked)
            return layer.each == each if isinstance(layer, BatchNorm) else name not in kernels

        layers = dict(self.module.named_modules())
        if kernels.keys() <= layers.keys() and all(as_asked(n, m) for n, m in layers.items()):
            return self  # many sites of one process share it
        module = copy.deepcopy(self.module)
        for layer in module.modules():
            if isinstance(layer, Conv2d):
                layer.kernel = unstacked
            elif isinstance(layer, BatchNorm):
                layer.each = each
        use_kernels(module, kernels)
        return replace(self, module=module)


@tree
class Net:
    """A model with its numbers: parameters and buffers by name.

    It maps ``x``, ``(batch, *input)``, to features ``z`` (batch, m), and features to logits (batch,
    classes). Parameters and buffers are arrays of any shape, as the model's layers have them.
    ``run`` is the training pass, or None in evaluation: with it, dropout before the head acts in
    :meth:`logits`.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    arch: Architecture = field(metadata=STATIC)
    run: Pass | None = field(default=None, metadata=STATIC)

    def features(self, x: Tensor) -> Tensor:
        """Run the body: ``(batch, *input) -> (batch, m)``."""
        module = self.arch.module
        run = None if self.arch.evaluates else self.run
        # a user's module may ask whether it is being trained
        if module.training != (run is not None):
            module.train(run is not None)
        with _running(run), self._cast(x):
            out = tensor_of(functional_call(module, {**self.body, **self.buffers}, (x,)))
        # heads and methods' own terms need all digits: ln(1 - h) of an h near 1
        return out.float() if out.dtype == torch.bfloat16 else out

    def logits(self, z: Tensor) -> Tensor:
        """Run the head: (batch, m) -> (batch, classes), or the same at each place of a row."""
        if self.arch.dropout is not None:
            with _running(self.run):
                z = self.arch.dropout(z)
        if self.arch.projects:
            hidden = f"{self.arch.head}.hidden"
            z = linear(z, self.params[f"{hidden}.weight"], self.params[f"{hidden}.bias"]).relu()
        return linear(z, *self.head)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return self.logits(self.features(x))

    def _cast(self, x: Tensor) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.run is None else self.run.cast(x.device.type)

    def for_rows(self, mask: Tensor) -> Net:
        """Return the net for other rows within the same step, such as public rows in a loss.

        ``mask`` (rows,) says which of the other rows are present. Batch norm and dropout depend on
        the present rows and on random draws of a pass. Each call gets different draws, and batch
        norm updates its running statistics once per batch. In evaluation mode the net is returned
        unchanged.
        """
        return self if self.run is None else replace(self, run=self.run.of_rows(mask))

    @property
    def body(self) -> dict[str, Tensor]:
        """The body's parameters by name."""
        return self.part("body")

    def part(self, part: Part) -> dict[str, Tensor]:
        """Return the parameters of ``part`` by name."""
        return {k: v for k, v in self.params.items() if self.arch.layers.holds(part, k)}

    def state(self, part: Part = "all") -> dict[str, Tensor]:
        """Return parameters and buffers of ``part`` by name, as averaging methods send them."""
        holds = self.arch.layers.holds
        return self.part(part) | {k: v for k, v in self.buffers.items() if holds(part, k)}

    def with_arrays(self, arrays: Mapping[str, Tensor]) -> Net:
        """Return the same net with some parameters or buffers replaced, by arrays of their shapes.

        In training, a net with another body runs aside: batch norm normalizes by the batch, but the
        client's net keeps its own statistics and draws. A teacher should be in
        :meth:`in_evaluation`.

        Raises
        ------
        ValueError
            If the net has no array of a given name.
        """
        if unknown := [k for k in arrays if k not in self.params and k not in self.buffers]:
            raise ValueError(f"{self.arch.name} has no array {unknown[0]!r}")
        params = {k: arrays.get(k, v) for k, v in self.params.items()}
        buffers = {k: arrays.get(k, v) for k, v in self.buffers.items()}
        net = replace(self, params=params, buffers=buffers)
        theirs = params | buffers
        if self.run is None or all(v is theirs[k] for k, v in (self.body | self.buffers).items()):
            return net  # another head sees the same features
        return replace(net, run=self.run.aside())

    def aside(self) -> Net:
        """Return the net in a pass of its own, whose statistics and draws are not the client's."""
        return self if self.run is None else replace(self, run=self.run.aside())

    def in_evaluation(self) -> Net:
        """Return the net as it predicts, without dropout and with batch norm's kept statistics.

        This is a teacher's or an earlier model's mode in a loss: ``net.with_arrays(down.arrays)
        .in_evaluation().features(batch.x)``.
        """
        return replace(self, run=None)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Weight (classes, m) and bias (classes,) of the head, independent of the head's name."""
        params, whole = self.params, self.arch.frozen
        if whole is not None:  # a head that does not learn is a constant
            params = {n: a for n, a in whole.params.items() if n in self.arch.fixed} | params
        return params[f"{self.arch.head}.weight"], params.get(f"{self.arch.head}.bias")

    def with_head(self, weight: Tensor, bias: Tensor) -> Net:
        """Return the same body under another head: ``weight`` (classes, m), ``bias`` (classes,)."""
        return self.with_arrays(
            {f"{self.arch.head}.weight": weight, f"{self.arch.head}.bias": bias}
        )


@contextlib.contextmanager
def _running(run: Pass | None) -> Iterator[None]:
    """Set the current pass for the layers."""
    token = current.set(run)
    try:
        yield
    finally:
        current.reset(token)


def split_head(
    build: Callable[[], nn.Module],
    input_shape: Iterable[int],
    num_classes: int,
    *,
    name: str = "model",
    head: str | None = None,
    words: int = 0,
    target: Target = "class",
    projects: bool = False,
    trains: bool = True,
) -> Architecture:
    """Split a module into body and head.

    Parameters
    ----------
    build
        Makes the module. It is called with torch's generator seeded, so that the initial numbers
        depend on the seed only.
    input_shape
        Shape of one example.
    num_classes
        Width of the head.
    head
        Name of the linear layer that is the head; the last linear layer if not given.
    words
        Number of words if inputs are texts, (batch, length); 0 if inputs are numbers.
    target
        What is predicted: per row, outputs (batch, classes), or per token or pixel.
    projects
        Whether the head starts with a hidden layer, as in SimCLR.
    trains
        Whether the body will be in training mode, which a frozen body never is.

    Raises
    ------
    ValueError
        If the module has no such layer, or body and head do not fit each other, the input or the
        classes, or a layer cannot be trained here.
    TypeError
        If the module returns something else than one tensor.
    """
    input_shape = tuple(input_shape)
    whole = check_parts(_seeded(build, 0), name)
    head, layer = head_of(whole, num_classes, name, head)
    check_head(whole, head, name)

    def start(seed: int) -> Net:
        return Net(*_cut(build, seed, head, projects=projects)[1:], arch)

    body, params, buffers = _cut(build, 0, head, projects=projects)
    with without_projection(body):
        dropout, drops_features = move_trailing(body, _rows(input_shape, words))
    arch = Architecture(
        name=name,
        module=body.requires_grad_(requires_grad=False),
        layers=layers_of(body, head, [*params, *buffers]),
        head=head,
        feature_width=layer.in_features,
        num_classes=num_classes,
        head_bias=layer.bias is not None,
        input_shape=input_shape,
        start=start,
        words=words,
        places=places(target, input_shape),
        projects=projects,
        dropout=dropout,
        drops_features=drops_features,
        fixed=fixed_in(whole).intersection(params),
        least_rows=check_pass(whole, _rows(input_shape, words), name, trains=trains),
    )
    _check(start(0), whole)
    return arch


def head_of(
    module: nn.Module, num_classes: int, name: str, head: str | None
) -> tuple[str, nn.Linear]:
    """Return name and layer of the head: the named layer, or the last linear layer."""
    linear = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    if not linear and head is None:
        raise ValueError(f"{name} has no linear layer to be the head")
    head = list(linear)[-1] if head is None else head
    if head not in linear:
        choices = ", ".join(linear) or "none"
        raise ValueError(f"{name} has no linear layer {head!r}; its linear layers: {choices}")
    if linear[head].out_features != num_classes:
        outputs = linear[head].out_features
        raise ValueError(
            f"the head {head!r} of {name} has {outputs} outputs, the data have "
            f"{num_classes} classes"
        )
    return head, linear[head]


def _cut(
    build: Callable[[], nn.Module], seed: int, head: str, *, projects: bool
) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """Build the module and remove its head; return the body, all parameters, all buffers."""
    body = _seeded(build, seed).train()  # its own train() may keep layers in evaluation
    outer, _, leaf = head.rpartition(".")
    top = body.get_submodule(head)
    setattr(body.get_submodule(outer), leaf, nn.Identity())
    replace_layers(body)
    params = dict(body.named_parameters())
    params |= {f"{head}.{k}": v for k, v in top.named_parameters()}
    if projects:
        width = params[f"{head}.weight"].shape[1]
        hidden = _seeded(lambda: nn.Sequential(OrderedDict(hidden=nn.Linear(width, width))), seed)
        params |= {f"{head}.{k}": v for k, v in hidden.named_parameters()}
    return body, {k: v.detach().clone() for k, v in params.items()}, dict(body.named_buffers())


def _check(net: Net, whole: nn.Module) -> None:
    arch = net.arch
    x = _rows(arch.input_shape, arch.words)
    rows = (2, *arch.places)
    with torch.no_grad():
        expected = attempt(lambda: tensor_of(whole.eval()(x)))
        z = attempt(lambda: net.features(x))
        if isinstance(z, Exception) and isinstance(expected, Exception):
            why = first_line(z)
            raise ValueError(  # noqa: TRY004  # the caller asks for values that fit
                f"{arch.name} does not accept input of shape {list(arch.input_shape)}: {why}"
            ) from z
        whole_works = isinstance(expected, Tensor) and expected.shape == (*rows, arch.num_classes)
        if isinstance(z, Tensor) and z.shape != (*rows, arch.feature_width) and not whole_works:
            output = f"shape {list(z.shape[1:])}" if z.dim() != 2 else f"{z.shape[1]} features"  # noqa: PLR2004
            raise ValueError(
                f"the body of {arch.name} gives {output}, but its head {arch.head!r} takes "
                f"{arch.feature_width} features"
            )
        if not (
            isinstance(expected, Tensor)
            and expected.shape == (*rows, arch.num_classes)
            and isinstance(z, Tensor)
            and z.shape == (*rows, arch.feature_width)
            and torch.allclose(linear(z, *net.head), expected, rtol=1e-3, atol=1e-4)
        ):
            raise ValueError(_not_the_last(arch, whole, x, expected))


def _not_the_last(arch: Architecture, whole: nn.Module, x: Tensor, expected: object) -> str:
    """Return what comes after the head, and the cure; ``expected`` is the module's output."""
    ends = activation_after(whole, arch.head, x, expected) if isinstance(expected, Tensor) else ""
    if isinstance(expected, Tensor) and not bool(torch.isfinite(expected).all()):
        return f"the outputs of {arch.name} are not finite, even of numbers from -1 to 1"
    if not ends:
        return (
            f"{arch.head!r} is not the last layer of {arch.name}: name the layer that makes its "
            "logits (head = ...)"
        )
    adds = "Softmax" in ends or "Sigmoid" in ends
    why = "the loss adds it" if adds else "the last layer must be linear"
    return f"{arch.name} has a {ends} after its last layer {arch.head!r}: remove it, {why}"


def _rows(input_shape: tuple[int, ...], words: int) -> Tensor:
    """Return two made-up rows, ``(2, *input_shape)``; of texts if there are ``words``."""
    x = torch.linspace(-1.0, 1.0, 2 * math.prod(input_shape)).view(2, *input_shape)
    return torch.arange(x.numel()).view(x.shape) % words if words else x


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch_draws(seed):
        module = build()
    return nn.Sequential(nn.Flatten(), module) if isinstance(module, nn.Linear) else module


def stacked(net: Net, count: int) -> Net:
    """Return ``count`` copies of a net as one stack, ``(count, ...)`` (views, without a copy)."""
    return map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), net)
