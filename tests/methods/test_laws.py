"""Every registered method, and every example method of the laws, obeys every law."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedgist.core.message import Nothing, message
from fedgist.core.method import Batch, Context, Count, Method, Net, Task
from fedgist.errors import InputError, MethodError
from fedgist.methods.analytic import Analytic
from fedgist.methods.common.codistillation import Distillation
from fedgist.methods.cs_fl import CSFL
from fedgist.methods.fd import FD
from fedgist.methods.feddbe import FedDBE
from fedgist.methods.feddf import Distillation as EnsembleDistillation
from fedgist.methods.feddf import FedDF
from fedgist.methods.fedlog import FedLog
from fedgist.methods.fedlog_c import FedLogC
from fedgist.methods.fednova import FedNova
from fedgist.methods.fedproto import FedProto
from fedgist.methods.fedrep import FedRep
from fedgist.methods.flesd import FLESD, SimilarityDistillation
from fedgist.methods.merged_codist import MergedCodist
from fedgist.methods.periodic_codist import PeriodicCodist
from fedgist.methods.repshare import RepShare
from fedgist.testing import LAWS, Law, LawError, MethodUnderTest, check_laws
from fedgist.testing.example_methods import Digest
from fedgist.testing.small_nets import NORMED
from method_objects import METHOD_OBJECTS, marks

TWO_STAGES = Distillation(30, 8, 0.01, 0.5, 0.5, 0.2, mixup=2)
FEW_STEPS = SimilarityDistillation(epochs=2, batch_size=32, momentum=0.5, queue=40)
# what takes long by default, with fewer steps
SHORTER = {
    "fedrep": FedRep(head_epochs=2),
    "merged_codist": MergedCodist(distillation=Distillation(steps=4)),
    "analytic": Analytic(penalty=1.0),
    "feddf": FedDF(EnsembleDistillation(steps=4)),
}
# of twenty rows, cross-validation may choose another of two penalties after a rounding
FIXED: dict[str, Any] = {"penalty": 1.0, "wire": "float64"}
EVERY_OPTION = {
    "flesd": FLESD(distillation=FEW_STEPS),
    "flesd, no own anchors": FLESD(distillation=replace(FEW_STEPS, own_anchor=False)),
    "flesd, quantized": FLESD(student="flat", of="features", wire="int8", distillation=FEW_STEPS),
    "flesd, similarities": FLESD(sends="similarities", distillation=FEW_STEPS),
    "repshare, every option": RepShare(
        m_up=2,
        m_down=3,
        n_avg=2,
        draw="class",
        start="random",
        discriminator="learned",
        wishes=True,
        shared_width=4,
        log_bound=True,
    ),
    "periodic_codist, due": PeriodicCodist(period=2, distillation=TWO_STAGES),
    "merged_codist, every option": MergedCodist(
        alpha=0.4, alpha_rounds=2, first_alpha=0.9, distillation=TWO_STAGES, mu=0.1
    ),
    "cs_fl, measurements down": CSFL(sparsity=0.1, dimension_reduction=0.5, down="measurements"),
    "fedlog, newest": FedLog(memory="newest"),
    "fedlog, discounted": FedLog(memory=0.8),
    "analytic, quadratic": Analytic("qda", prior="own", expand=4, **FIXED),
    "analytic, class means": Analytic("means", calibrate=True, **FIXED),
    "analytic, in codes": Analytic(wire="int8", project=2, refine=False, penalty=1.0),
    "analytic, cosine": Analytic("cosine", wire="float64"),
    "analytic, refined": Analytic(calibrate=True, refine=True, **FIXED),
    "fd, dense": FD(leave_own_out=False, declare_classes=False),
}
# dropout before the head, which features must not see
DROPPED = {
    "wide": {"model": "mlp", "hidden": [7, 5], "dropout": 0.5, "share": 0.4},
    "flat": {"model": "mlp", "hidden": [6, 5], "dropout": 0.2, "share": 0.6},
}
WITH_DROPOUT = {
    "fedproto, own classes, dropout": FedProto(inference_classes="own"),
    "fedlog_c, class, dropout": FedLogC(memory="class"),
    "feddbe, dropout": FedDBE(),
}
SUBJECTS = {
    name: MethodUnderTest(method)
    for name, method in (METHOD_OBJECTS | SHORTER | EVERY_OPTION).items()
} | {
    name: MethodUnderTest(method, {"architectures": DROPPED})
    for name, method in WITH_DROPOUT.items()
}
# heads of numbers and of labels, and prototypes of labels
OF_TASKS = {
    "fedlog, numbers": (FedLog(head_start="exchange"), "regression"),
    "fedlog, numbers, newest": (FedLog(memory="newest", wire="float64"), "regression"),
    "fedlog, labels": (FedLog(), "multilabel"),
    "fedproto, labels": (FedProto(inference="logits"), "multilabel"),
    "feddbe, numbers": (FedDBE(), "regression"),
    "analytic, numbers": (Analytic("ridge", **FIXED), "regression"),
    "analytic, labels": (Analytic(**FIXED), "multilabel"),
}
SUBJECTS |= {
    name: MethodUnderTest(method, {"objective": {"name": objective}})
    for name, (method, objective) in OF_TASKS.items()
}
# lengths of training of single clients, by which messages are divided
UNEQUAL = {
    "slow": {"clients": [0, 2], "train": {"local_steps": 1}},
    "fast": {"clients": [4], "train": {"local_epochs": 3}},
}
SUBJECTS["fednova, unequal work"] = MethodUnderTest(
    FedNova(),
    {"clients": {"settings": UNEQUAL}, "train": {"local_steps": 3, "local_epochs": 1}},
)
# rows of another batch inside a loss, through layers that look at the rows of a pass
SUBJECTS["digest, batch norm and dropout"] = MethodUnderTest(Digest(), {"architectures": NORMED})


# a subject for each mechanism, tried in `make test`; `make test-all` tries all subjects
MECHANISMS = {
    "weights averaged within each architecture": "fedavg",
    "sums over classes that all architectures share": "fedlog",
    "sums with the classes that a client declares": "fedproto",
    "messages one by one, and a state at each client": "relay",
    "clients merged into one": "centralized",
    "no message": "local",
    "two phases, and layers that stay at the client": "fedrep",
    "layers averaged over architectures": "lg_fedavg",
    "late sums of some of the clients": "shared_bodies",
    "steps of an optimizer at the server": "fedadam",
    "pools, and stages of the server alone": "merged_codist, every option",
    "residuals at clients": "cs_fl",
    "several stages with clients": "two_stages",
    "noise of a client's own on rows that it sends": "repshare, every option",
    "batch norm that stays with the client": "fedbn",
    "a second model of a client": "ditto",
    "gradients within a loss, and two batches in a step": "per_fedavg",
    "encoders, and messages that are quantized": "flesd, quantized",
    "an average within each architecture beside sums over all": "feddbe, dropout",
    "statistics of numbers": "fedlog, numbers",
    "sums of several labels": "fedlog, labels",
    "clients that train for unlike numbers of steps": "fednova, unequal work",
    "rows of another batch through batch norm and dropout": "digest, batch norm and dropout",
}


# over a wire that loses and repeats, `make test` leaves out what is sent and kept as by another
UNRELIABLE = ("12b", "12c", "12d")
AS_OTHERS = ("fedrep", "lg_fedavg", "fedadam", "local", "digest, batch norm and dropout")


def tried() -> list[object]:
    """Return every subject with every law."""
    several = set(MECHANISMS.values())
    cases: list[object] = []
    for name, law in itertools.product(SUBJECTS, LAWS):
        number = law.name.split()[0]
        chosen = several.difference(AS_OTHERS) if number in UNRELIABLE else several
        case = pytest.param(name, law, marks=marks(name, chosen), id=f"{name}-{number}")
        cases.append(case)
    return cases


@pytest.mark.parametrize(("name", "law"), tried())
def test_law(name: str, law: Law) -> None:
    law.try_on(SUBJECTS[name])


def test_every_kind_of_exchange_and_of_state_is_a_mechanism() -> None:
    def kinds(methods: Collection[Method]) -> dict[str, set[object]]:
        return {
            "exchange": {type(m.exchange) for m in methods},
            "keeps": {m.keeps for m in methods},
            "accepts_late": {m.accepts_late for m in methods},
            "merges_clients": {m.merges_clients for m in methods},
        }

    chosen = [SUBJECTS[name].method for name in MECHANISMS.values()]
    assert kinds(chosen) == kinds([subject.method for subject in SUBJECTS.values()])


@message(reduce="each")
class Leak:
    row: torch.Tensor


@dataclass(frozen=True)
class Leaks(Method):
    """A method whose clients send their first rows."""

    def summarize(self, net: Net, batch: Batch, own: Nothing, down: Any, ctx: Context) -> Leak:
        return Leak(batch.x[0])

    def upload(
        self, net: Net, own: Nothing, sums: Leak, down: Any, ctx: Context
    ) -> tuple[Leak, Nothing]:
        return sums, own


@dataclass(frozen=True)
class ForgetsTheMask(Method):
    """A method whose loss counts absent rows."""

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Any, ctx: Context) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(batch.x), batch.y)


@dataclass(frozen=True)
class HalvesReplies(Method):
    """A method whose server changes the replies that it is given."""

    def init_server(self, ctx: Context) -> Count:
        return Count(torch.zeros(()))

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Any, ctx: Context
    ) -> tuple[Count, Nothing]:
        return sums, own

    def server_update(self, server: Count, replies: Any, ctx: Context) -> Count:
        replies.total().rows.div_(2)
        return server


@dataclass(frozen=True)
class HalvesNumbers(HalvesReplies):
    """A method whose server changes replies where torch does not count the change."""

    def server_update(self, server: Count, replies: Any, ctx: Context) -> Count:
        replies.total().rows.data.div_(2)
        return server


@dataclass(frozen=True)
class FailsLater(Method):
    """A method whose server fails on what it was sent."""

    def init_server(self, ctx: Context) -> Count:
        return Count(torch.zeros(2))

    def server_update(self, server: Count, replies: Any, ctx: Context) -> Count:
        return Count(server.rows + torch.zeros(3))


@dataclass(frozen=True)
class CountsTwice(Method):
    """A method whose server adds to what it has, so that a repeated reply would show."""

    def init_server(self, ctx: Context) -> Count:
        return Count(torch.zeros(()))

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Any, ctx: Context
    ) -> tuple[Count, Nothing]:
        return sums, own

    def server_update(self, server: Count, replies: Any, ctx: Context) -> Count:
        return Count(server.rows + replies.total().rows)


@dataclass(frozen=True)
class InsistsLater(CountsTwice):
    """A method whose server asserts what does not hold."""

    def server_update(self, server: Count, replies: Any, ctx: Context) -> Count:
        assert not server.rows, "the server begins with nothing"
        return super().server_update(server, replies, ctx)


def test_a_method_that_breaks_a_law_is_told_which() -> None:
    with pytest.raises(LawError, match="Leaks breaks law 10 no raw example appears in a message"):
        check_laws(Leaks(), only=("10",))
    with pytest.raises(LawError, match=r"ForgetsTheMask.loss depends on rows that are absent"):
        check_laws(ForgetsTheMask(), only=("1",))
    with pytest.raises(
        LawError, match=r"HalvesReplies breaks law 8 .*: server_update changed a re"
    ):
        check_laws(HalvesReplies(), only=("8",))
    with pytest.raises(LawError, match=r"HalvesNumbers breaks law 8 .*: server_update changed a"):
        check_laws(HalvesNumbers(), only=("8",))
    with pytest.raises(LawError, match=r"InsistsLater.server_update breaks law 8 .* with nothing"):
        check_laws(InsistsLater(), only=("8",))
    says = "FailsLater.server_update fails under law 4 .*: RuntimeError: The size of tensor a"
    with pytest.raises(LawError, match=says):
        check_laws(FailsLater(), only=("4",))


@pytest.mark.slow
def test_all_laws_in_one_line_for_a_method_from_outside() -> None:
    assert len(check_laws(CountsTwice())) == len(LAWS)


def test_a_law_that_does_not_exist_and_a_class_are_refused() -> None:
    with pytest.raises(InputError, match="unknown law '99'"):
        check_laws(CountsTwice(), only=("99",))
    with pytest.raises(MethodError, match="check_laws takes a method object, not <class"):
        check_laws(CountsTwice)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Needs(Method):
    """A method that needs one architecture, a frozen body, or features of some width."""

    archs: int = 1
    frozen: bool = False
    width: int | None = None

    def check(self, task: Task) -> None:
        archs = task.architectures.values()
        if len(archs) != self.archs:
            raise MethodError(f"it needs {self.archs} architectures, not {len(archs)}")
        if any((arch.frozen is not None) != self.frozen for arch in archs):
            raise MethodError("it needs frozen bodies")
        if self.width and any(arch.feature_width != self.width for arch in archs):
            raise MethodError(f"it needs {self.width} features")


WIDER = {"name": "mlp", "hidden": [9, 4]}
TOLD: list[dict[str, Any]] = [
    {"architectures": count, "frozen": frozen, "model": model}
    for count, frozen, model in itertools.product((1, 2), (False, True), (None, WIDER))
]


@pytest.mark.parametrize("about", TOLD)
def test_the_laws_are_told_what_a_method_needs(about: dict[str, Any]) -> None:
    width = 4 if about["model"] else None
    method = Needs(about["architectures"], about["frozen"], width)
    # rejects a world in which any of the three is not as told
    assert check_laws(method, only=("8",), **about) == ["8 inputs are not mutated"]
    others = {"architectures": 3 - about["architectures"]}, {"frozen": not about["frozen"]}
    for other in others:
        with pytest.raises((LawError, InputError), match="it needs"):
            check_laws(method, only=("8",), **{**about, **other})


def test_a_number_of_architectures_that_there_is_no_world_for_is_refused() -> None:
    with pytest.raises(InputError, match="number of architectures of the laws"):
        check_laws(CountsTwice(), architectures=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("about", "normed"), [({}, 2), ({"architectures": 1}, 1)])
def test_law_13_tries_nets_with_batch_norm(about: dict[str, Any], normed: int) -> None:
    seen: list[list[str]] = []

    @dataclass(frozen=True)
    class Looks(Method):
        def check(self, task: Task) -> None:
            seen.append([n for a in task.starts.values() for n in a.buffers if "running" in n])

    check_laws(Looks(), only=("13",), **about)
    assert max(map(len, seen)) == 2 * normed


@dataclass(frozen=True)
class SharesStatistics(Method):
    """A method whose loss adds what absent rows hold to the statistics of batch norm."""

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Any, ctx: Context) -> torch.Tensor:
        logits = net(batch.x)
        # torch's own batch norm sees absent rows, too
        if net.run is not None:
            for name, value in list(net.run.updates.items()):
                net.run.updates[name] = value + 0.1 * batch.x.mean()
        return ctx.task.objective.loss(logits, batch)


def test_statistics_that_see_absent_rows_break_law_13_alone() -> None:
    check_laws(SharesStatistics(), only=("1", "3"))
    with pytest.raises(LawError, match="breaks law 13 batch norm and dropout change no law"):
        check_laws(SharesStatistics(), only=("13",))
