"""Optimizers over stacked parameters: row k of every tensor belongs to client k.

Each is a pair (init, step) over named tensors (clients, ...). Every client has its own step
counter, so clients with different numbers of steps can share a stack. ``step`` works in place on
the given rows: clients whose rows are left out are unchanged.

The update rules are those of ``torch.optim`` (Adam: Kingma and Ba 2015, algorithm 1; AdamW, whose
decay is decoupled from the gradient: Loshchilov and Hutter 2019, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from fedgist.core.training import Optimizer
from fedgist.core.tree import tree

ADAMS = ("adam", "adamw")  # the rules with two moments


@tree
class OptimizerState:
    """Moments by parameter, if the rule has them, and each client's step count, (clients,)."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    count: Tensor


def init(optimizer: Optimizer, params: Mapping[str, Tensor]) -> OptimizerState:
    """Return a fresh state for ``params``, each (clients, ...)."""
    has_first, has_second = optimizer.name != "sgd", optimizer.name in ADAMS
    any_param = next(iter(params.values()))
    moved = {n: p for n, p in params.items() if n not in optimizer.plain}
    return OptimizerState(
        first={n: torch.zeros_like(p) for n, p in moved.items() if has_first},
        second={n: torch.zeros_like(p) for n, p in moved.items() if has_second},
        count=torch.zeros(len(any_param), dtype=torch.int64, device=any_param.device),
    )


def step(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: OptimizerState,
    *,
    together: bool | None = None,
) -> None:
    """Take one step for every client, in place; all leaves are (clients, ...).

    ``together`` says whether all clients have taken the same number of steps. If it is None, a CPU
    compares the counts, and a GPU uses the rule for different counts.
    """
    state.count.add_(1)
    if optimizer.plain:
        for name in params.keys() & optimizer.plain:
            params[name].sub_(grads[name], alpha=optimizer.lr)
        params = {name: p for name, p in params.items() if name not in optimizer.plain}
    if optimizer.name in ADAMS and (_in_step(state.count) if together is None else together):
        _fused_adam(optimizer, params, grads, state)
        return
    if optimizer.name in ADAMS:
        beta1, beta2 = optimizer.betas
        count = state.count.to(torch.float64)
        scale, spread = optimizer.lr / (1.0 - beta1**count), (1.0 - beta2**count).rsqrt()
    for name, p in params.items():
        g = grads[name]
        if optimizer.name == "adamw":
            p.mul_(1.0 - optimizer.lr * optimizer.weight_decay)
        elif optimizer.weight_decay:
            g = g.add(p, alpha=optimizer.weight_decay)
        if optimizer.name == "sgd":
            p.sub_(g, alpha=optimizer.lr)
        elif optimizer.name == "momentum":
            # it starts from zero, so the first step is the gradient itself
            m = state.first[name].mul_(optimizer.momentum).add_(g)
            p.sub_(m, alpha=optimizer.lr)
        else:
            shape = (-1, *(1 for _ in p.shape[1:]))
            m = state.first[name].lerp_(g, 1.0 - beta1)
            v = state.second[name].mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            denominator = v.sqrt().mul_(spread.to(p.dtype).view(shape)).add_(optimizer.eps)
            p.sub_(torch.div(m, denominator, out=denominator).mul_(scale.to(p.dtype).view(shape)))


def from_shared(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: OptimizerState,
) -> dict[str, Tensor]:
    """Return the parameters after a step of plain SGD; all leaves are (clients, ...).

    The ``params`` are shared by the clients and stay as they are: one tensor, which is expanded.
    """
    state.count.add_(1)
    if decay := optimizer.weight_decay:
        grads = {name: grads[name].add(p, alpha=decay) for name, p in params.items()}
    return {name: torch.sub(p, grads[name], alpha=optimizer.lr) for name, p in params.items()}


def clipped_gradients(grads: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Return gradients, each (clients, ...), scaled so that no client's norm exceeds ``most``.

    The norm is taken over all tensors of a client, as ``torch.nn.utils.clip_grad_norm_`` does.
    """
    norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: g * scale.view(-1, *(1 for _ in g.shape[1:])) for name, g in grads.items()}


def _in_step(count: Tensor) -> bool:
    """Return whether all clients have the same number of steps, as in a fresh stack.

    On a GPU it is False for several clients, because reading the numbers would block the CPU.
    """
    if len(count) == 1:
        return True
    return count.device.type == "cpu" and len(count) > 0 and bool((count == count[0]).all())


def _fused_adam(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: OptimizerState,
) -> None:
    """Call torch's fused Adam, which reads each tensor once; :func:`step` reads it nine times."""
    done = [(state.count[0] - 1).to(torch.float32) for _ in params]
    rule = adamw if optimizer.name == "adamw" else adam
    rule(
        list(params.values()),
        # the fused kernel ignores strides: a transposed gradient would meet other numbers
        [grads[n].contiguous() for n in params],
        [state.first[n] for n in params],
        [state.second[n] for n in params],
        [],
        done,
        amsgrad=False,
        maximize=False,
        fused=True,
        lr=optimizer.lr,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
