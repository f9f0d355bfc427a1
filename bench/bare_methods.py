"""Bare loops of four methods: plain PyTorch modules, one client after another.

Nothing here is from fedgist. The formulas are written a second time, from the papers, and share no
code with the package. Each client has a module of its own and a ``torch.optim`` object. A round of
each function does what a round of the method does, without messages, records or checks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]  # a client's inputs and labels
Change = Callable[[Tensor], Tensor]  # of the inputs of a batch
SURE = 1.0 - 1e-6  # upper bound of a probability of which ln(1 - h) is taken


@dataclass(frozen=True)
class Clients:
    """The clients' rows, their model, their local training, and how torch is used.

    The last layer of ``module``'s models is the head, and ``classes`` its number of outputs. With
    ``fused``, Adam is torch's fused one.
    """

    rows: Sequence[Rows]
    module: Callable[[], nn.Sequential]
    classes: int
    batch_size: int
    epochs: int
    lr: float
    fused: bool = False
    threads: int = 1

    def adam(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> torch.optim.Adam:
        """Return Adam for these parameters, by default at the clients' learning rate."""
        return torch.optim.Adam(parameters, lr=lr or self.lr, fused=self.fused or None)


@dataclass(frozen=True)
class Bare:
    """A bare loop: ``do_round`` returns its seconds, ``predict`` a model's scores of classes.

    The number passed to ``predict`` is that of a client, or of a pool.
    """

    do_round: Callable[[], float]
    predict: Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Codistillation:
    """The settings of merged codistillation's server; its optimizers are Adam.

    ``augment`` changes the inputs of the clients' batches, and ``augment_public`` those of public
    batches. With ``mixup``, public batches are mixed with weights from Beta(mixup, mixup).
    """

    alpha: float
    server_lr: float
    steps: int
    batch_size: int
    lr: float
    temperature: float
    regularization: float
    mixup: int = 0
    augment: Change = lambda x: x
    augment_public: Change = lambda x: x


def bare_local(about: Clients) -> Bare:
    """Return local training without any exchange, as a control of comparisons."""
    nets = _copies(about)

    def work() -> None:
        for net, rows in zip(nets, about.rows, strict=True):
            _learn(net, about.adam(net.parameters()), rows, about, _cross_entropy(net))

    return _bare(work, about, lambda client, x: nets[client](x))


def bare_fedper(about: Clients) -> Bare:
    """Return FedPer: bodies become their mean, weighted by rows, and heads stay with clients."""
    nets = _copies(about)
    weights = torch.tensor([float(len(y)) for _, y in about.rows])
    shares = weights / weights.sum()

    def work() -> None:
        for net, rows in zip(nets, about.rows, strict=True):
            _learn(net, about.adam(net.parameters()), rows, about, _cross_entropy(net))
        bodies = [net[:-1].parameters() for net in nets]
        with torch.no_grad():
            for arrays in zip(*bodies, strict=True):
                mean = torch.tensordot(shares, torch.stack(arrays), 1)
                for array in arrays:
                    array.copy_(mean)

    return _bare(work, about, lambda client, x: nets[client](x))


def bare_fedlog(about: Clients, nu: float = 1.0) -> Bare:
    """Return FedLog: bodies learn below a fixed head, which the server solves for (eq. 14)."""
    nets = _copies(about)
    eta = torch.randn(about.classes, _head(nets[0]).in_features + 1)

    def with_head(client: int) -> nn.Sequential:
        head = _head(nets[client]).requires_grad_(requires_grad=False)
        head.bias.copy_(eta[:, 0])
        head.weight.copy_(eta[:, 1:])
        return nets[client]

    def work() -> None:
        nonlocal eta
        s = torch.zeros_like(eta)
        for client, (x, y) in enumerate(about.rows):
            net = with_head(client)
            body = net[:-1]
            _learn(net, about.adam(body.parameters()), (x, y), about, _cross_entropy(net))
            with torch.no_grad():
                z = body(x)
            s.index_add_(0, y, torch.cat([torch.ones_like(z[:, :1]), z], 1))
        eta = map_head(s, nu)

    return _bare(work, about, lambda client, x: with_head(client)(x))


def map_head(s: Tensor, nu: float) -> Tensor:
    """Return the maximum of <eta, S> - (nu + n) ln sum_y exp(|eta_y|^2 / 4), by L-BFGS."""
    s64 = s.double()
    t = nu + s64[:, 0].sum()
    eta = torch.zeros_like(s64, requires_grad=True)
    search = torch.optim.LBFGS([eta], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        a = torch.logsumexp(eta.square().sum(1) / 4, 0)
        value = a - (eta * s64).sum() / t
        torch.autograd.backward(value)
        return value

    search.step(loss)
    return eta.detach().to(s.dtype)


def bare_fedproto(about: Clients, lam: float = 1.0) -> Bare:
    """Return FedProto: features are pulled to the mean of their class over all clients.

    The last two layers of a model are a dropout, which features do not pass, and the head.
    """
    nets = _copies(about)
    mean = torch.zeros(about.classes, _head(nets[0]).in_features)
    exists = torch.zeros(about.classes)

    def loss_of(net: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = net[:-2](x)
            far: Tensor = ((z - mean[y]).square().mean(1) * exists[y]).mean()
            return F.cross_entropy(net[-2:](z), y) + lam * far

        return loss

    def work() -> None:
        nonlocal mean, exists
        total, count = torch.zeros_like(mean), torch.zeros_like(exists)
        for net, (x, y) in zip(nets, about.rows, strict=True):
            _learn(net, about.adam(net.parameters()), (x, y), about, loss_of(net))
            with torch.no_grad():
                total.index_add_(0, y, net[:-2](x))
            count += y.bincount(minlength=about.classes)
        has = (count > 0).float()
        mean = torch.where(has.unsqueeze(1) > 0, total / count.clamp(min=1).unsqueeze(1), mean)
        exists = torch.maximum(exists, has)

    def predict(client: int, x: Tensor) -> Tensor:
        far = torch.cdist(nets[client][:-2](x), mean)
        return -far.masked_fill(exists == 0, torch.inf)

    return _bare(work, about, predict)


@dataclass(frozen=True)
class _Release:
    """What a client releases: sums and numbers of rows by class; means of observed rows."""

    total: Tensor
    count: Tensor
    seen: Tensor
    there: Tensor


def bare_repshare(
    about: Clients, lambda_kd: float = 10.0, lambda_disc: float = 1.0, n_avg: int = 10
) -> Bare:
    """Return representation sharing: one observation up and down; Adam keeps its state."""
    nets = _copies(about, same=False)
    optimizers = [about.adam(net.parameters()) for net in nets]
    releases: list[_Release] = []

    def work() -> None:
        nonlocal releases
        means = _class_means(releases)
        new = []
        for client, (net, rows) in enumerate(zip(nets, about.rows, strict=True)):
            others = [number for number in range(len(releases)) if number != client]
            loss = _cross_entropy(net)
            if others:
                heard = releases[others[int(torch.randint(len(others), ()))]]
                loss = _shared_loss(net, means, heard, (lambda_kd, lambda_disc))
            _learn(net, optimizers[client], rows, about, loss)
            new.append(_released(net, rows, about.classes, n_avg))
        releases = new

    return _bare(work, about, lambda client, x: nets[client](x))


def _class_means(releases: Sequence[_Release]) -> Rows:
    """Return the mean of each class over all clients, and a mask of classes with a mean."""
    if not releases:
        return torch.zeros(0), torch.zeros(0)
    total = torch.stack([r.total for r in releases]).sum(0)
    count = torch.stack([r.count for r in releases]).sum(0)
    return total / count.clamp(min=1).unsqueeze(1), (count > 0).float()


def _shared_loss(
    net: nn.Sequential, means: Rows, heard: _Release, weights: tuple[float, float]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return L_CE + lambda_KD L_KD + lambda_disc L_disc (eq. 6), means over entries."""
    mean, known = means

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = net[:-1](x)
        logits = net[-1](z)
        kd: Tensor = ((z - mean[y]).square().mean(1) * known[y]).mean()
        p, q = F.log_softmax(logits, 1), F.log_softmax(net[-1](heard.seen), 1)
        log_h = torch.logsumexp(p.unsqueeze(1) + q, 2)  # eq. 5
        apart = torch.log1p(-log_h.exp().clamp(max=SURE))
        own = F.one_hot(y, len(q)).bool()
        disc: Tensor = -(torch.where(own, log_h, apart) * heard.there).mean()
        return F.cross_entropy(logits, y) + weights[0] * kd + weights[1] * disc

    return loss


@torch.no_grad()
def _released(net: nn.Sequential, rows: Rows, classes: int, n_avg: int) -> _Release:
    x, y = rows
    z, count = net[:-1](x), y.bincount(minlength=classes)
    total = torch.zeros(classes, z.shape[1]).index_add_(0, y, z)
    seen = torch.zeros_like(total)
    for label in count.nonzero().flatten().tolist():
        members = (y == label).nonzero().flatten()
        seen[label] = z[members[torch.randperm(len(members))[:n_avg]]].mean(0)
    return _Release(total, count, seen, (count > 0).float())


def bare_merged_codist(
    pools: Sequence[Clients], per_round: int, public: Tensor, server: Codistillation
) -> Bare:
    """Return MergedCodist: a step of Adam along the clients' update and the distilled update.

    Clients learn by SGD. The models have no dropout. ``public`` are the public inputs.
    """
    nets = [about.module() for about in pools]
    steps = [torch.optim.Adam(net.parameters(), server.server_lr, eps=1e-5) for net in nets]

    def work() -> None:
        updates = [
            _mean_update(net, about, per_round, server)
            for net, about in zip(nets, pools, strict=True)
        ]
        students = _students(nets, pools[0], public, server)
        for net, step, update, student in zip(nets, steps, updates, students, strict=True):
            pairs = zip(net.parameters(), student.parameters(), strict=True)
            delta = [(old - new).detach() for old, new in pairs]
            scale = (1.0 - server.alpha) * _norm(update) / _norm(delta)
            for parameter, g, d in zip(net.parameters(), update, delta, strict=True):
                parameter.grad = server.alpha * g + scale * d  # line 8
            step.step()

    return _bare(work, pools[0], lambda pool, x: nets[pool](x))


def _mean_update(
    net: nn.Sequential, about: Clients, per_round: int, server: Codistillation
) -> list[Tensor]:
    """Return the old weights minus the mean of sampled clients' weights, by rows."""
    total = [torch.zeros_like(p) for p in net.parameters()]
    chosen = torch.randperm(len(about.rows))[:per_round].tolist()
    rows_of_all = sum(len(about.rows[client][1]) for client in chosen)
    for client in chosen:
        own = copy.deepcopy(net)
        loss = _cross_entropy(own, server.augment)
        sgd = torch.optim.SGD(own.parameters(), about.lr)
        _learn(own, sgd, about.rows[client], about, loss)
        share = len(about.rows[client][1]) / rows_of_all
        for mean, parameter in zip(total, own.parameters(), strict=True):
            mean.add_(parameter.detach(), alpha=share)
    return [old.detach() - mean for old, mean in zip(net.parameters(), total, strict=True)]


def _students(
    frozen: Sequence[nn.Sequential], about: Clients, public: Tensor, server: Codistillation
) -> list[nn.Sequential]:
    """Return copies of the models that learned from each other's first predictions."""
    students = [copy.deepcopy(net) for net in frozen]
    optimizers = [about.adam(net.parameters(), server.lr) for net in students]
    for _ in range(server.steps):
        batch = server.augment_public(public[torch.randperm(len(public))[: server.batch_size]])
        if server.mixup:
            b = torch.full((len(batch),), float(server.mixup))
            weight = torch.distributions.Beta(b, b).sample().view(-1, *[1] * (batch.dim() - 1))
            batch = weight * batch + (1.0 - weight) * batch[torch.randperm(len(batch))]
        with torch.no_grad():
            logits = [net(batch) for net in frozen]
        for i, (student, optimizer) in enumerate(zip(students, optimizers, strict=True)):
            others = [z for j, z in enumerate(logits) if j != i]
            soft = torch.stack([torch.softmax(z / server.temperature, 1) for z in others]).mean(0)
            own = torch.softmax(logits[i], 1)
            target = (1.0 - server.regularization) * soft + server.regularization * own
            log_q = F.log_softmax(student(batch), 1)
            optimizer.zero_grad()
            torch.autograd.backward(F.kl_div(log_q, target, reduction="batchmean"))
            optimizer.step()
    return students


def _head(net: nn.Sequential) -> nn.Linear:
    head = net[-1]
    assert isinstance(head, nn.Linear)
    return head


def _norm(arrays: Sequence[Tensor]) -> Tensor:
    return torch.stack([a.square().sum() for a in arrays]).sum().sqrt()


def _copies(about: Clients, *, same: bool = True) -> list[nn.Sequential]:
    """Return a model of each client, with the same first weights or with others."""
    start = about.module()
    return [copy.deepcopy(start) if same else about.module() for _ in about.rows]


def _cross_entropy(
    net: nn.Sequential, augment: Change = lambda x: x
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(net(augment(x)), y)


def _learn(
    net: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    about: Clients,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Train a model on a client's rows for the epochs of a round."""
    x, y = rows
    net.train()
    for _ in range(about.epochs):
        for at in torch.split(torch.randperm(len(y)), about.batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(loss(x[at], y[at]))
            optimizer.step()
    net.eval()


def _bare(
    work: Callable[[], None], about: Clients, predict: Callable[[int, Tensor], Tensor]
) -> Bare:
    def do_round() -> float:
        torch.set_num_threads(about.threads)
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return Bare(do_round, torch.no_grad()(predict))


def shifted(x: Tensor, places: tuple[int, int], *, mirrored: bool, turned: bool) -> Tensor:
    """Return images (..., height, width) of an image padded by 4, cut out at a place."""
    (top, left), height, width = places, x.shape[-2] - 8, x.shape[-1] - 8
    x = x[..., top : top + height, left : left + width]
    return x.flip([-1] * mirrored + [-2] * turned) if mirrored or turned else x


def shift_batch(x: Tensor) -> Tensor:
    """Shift all images of a batch alike, and mirror all of them or none."""
    top, left, mirrored = (*torch.randint(0, 8, (2,)).tolist(), int(torch.randint(2, ())))
    return shifted(F.pad(x, (4, 4, 4, 4)), (top, left), mirrored=bool(mirrored), turned=False)


def shift_each(x: Tensor) -> Tensor:
    """Shift each image, and mirror it or not in both directions."""
    padded = F.pad(x, (4, 4, 4, 4))
    places = torch.randint(0, 9, (len(x), 2)).tolist()
    flips = torch.randint(0, 2, (len(x), 2)).bool().tolist()
    return torch.stack(
        [
            shifted(image, (top, left), mirrored=mirrored, turned=turned)
            for image, (top, left), (mirrored, turned) in zip(padded, places, flips, strict=True)
        ]
    )
