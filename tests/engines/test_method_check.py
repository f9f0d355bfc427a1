"""A method that breaks the vocabulary is refused before round 1, with the function's name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedgist
from fedgist.core.message import message
from fedgist.core.method import Nothing
from fedgist.errors import MethodError, RecipeError, cut
from fedgist.methods.fedprox import FedProx
from fedgist.runs.round import Observer

RECIPE = {
    "train": {"num_rounds": 1},
    "data": {"train_rows": 60},
    "clients": {"num_clients": 2},
    "partition": {"name": "iid"},
    "engine": {"workers": 1, "cohort_size": 2},
}


def method(**functions: Any) -> fedgist.Method:
    """Return a method with these functions and the defaults of the others."""
    return type("Mine", (fedgist.Method,), functions)()  # type: ignore[no-any-return]


@message(reduce="sum")
class Sums:
    total: torch.Tensor


def forgetful_sums(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Sums:
    return Sums(net.features(batch.x).sum(0))


def forgetful_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    return F.cross_entropy(net(batch.x), batch.y)


def boolean_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    return F.cross_entropy(net(batch.x)[batch.mask], batch.y[batch.mask])


def detached_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    return ctx.task.objective.loss(net(batch.x), batch).detach()


def drawing_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    return ctx.task.objective.loss(net(batch.x), batch) * torch.rand(())


def drawing_update(self: Any, server: Any, replies: Any, ctx: Any) -> Any:
    torch.randn(3)
    return server


def drawing_init(self: Any, ctx: Any) -> Any:
    torch.randn(3)
    return Nothing()


def drawing_select(self: Any, server: Any, online: Any, ctx: Any) -> Any:
    random.shuffle([1, 2, 3])
    return fedgist.Method.select(self, server, online, ctx)


def drawing_download(self: Any, server: Any, order: Any, ctx: Any) -> Any:
    np.random.rand()  # noqa: NPY002  # it must not
    return Nothing()


def halving_update(self: Any, server: Any, replies: Any, ctx: Any) -> Any:
    replies.total().rows.div_(2)
    return server


def adding_update(self: Any, server: Any, replies: Any, ctx: Any) -> Any:
    server.total.add_(1)
    return server


def erasing_report(self: Any, server: Any, ctx: Any) -> Any:
    next(iter(ctx.task.starts["mlp"].params.values())).zero_()
    return {}


def growing_update(self: Any, server: Any, replies: Any, ctx: Any) -> Any:
    return Sums(torch.zeros(len(server.total) + 1))


def zeroing_receive(self: Any, net: Any, own: Any, down: Any, ctx: Any) -> Any:
    next(iter(net.params.values())).data.zero_()
    return net, own


def shifting_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    return ctx.task.objective.loss(net(batch.x.sub_(1)), batch)


def erasing_download(self: Any, server: Any, order: Any, ctx: Any) -> Any:
    server.total.data.add_(1)
    return Nothing()


def fails(self: Any, *args: Any) -> Any:
    return args[0].no_such_thing


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sumarize": forgetful_sums}, "defines 'sumarize', which is never called; did you mean 'summ"),
    ({"pick": fails}, "defines 'pick', which is called on methods derived from .*PeerMethod"),
    ({"stages": lambda self, ctx: "train"}, r"Mine.stages returned 'train': return a tuple"),
    ({"keeps": "bodies"}, "Mine.keeps = 'bodies'; did you mean 'body'?"),
    ({"receive": lambda self, *a: None}, "Mine.receive returned nothing"),
    ({"receive": lambda self, net, own, down, ctx: (own, net)}, "a Nothing in place of the net"),
    ({"upload": lambda self, net, own, sums, down, ctx: sums}, "a Count, not the pair"),
    (
        {"upload": lambda self, net, own, *a: (3, own)},
        "Mine.upload returned a int: int is not a mes",
    ),
    ({"upload": lambda self, net, own, *a: (Nothing(), [1])}, "own state that is not a tree"),
    ({"download": lambda self, *a: {"a": torch.zeros(1)}}, "Mine.download returned a dict"),
    ({"init_server": lambda self, ctx: None}, "Mine.init_server returned nothing"),
    ({"select": lambda self, *a: [1, 2]}, "Mine.select returned a int among its orders"),
    ({"report": lambda self, *a: torch.ones(2)}, "Mine.report returned a tensor of shape"),
    ({"server_update": lambda self, s, replies, c: replies}, "Mine.server_update returned a Repl"),
    ({"loss": detached_loss}, "Mine.loss returned a number without a gradient"),
    ({"loss": drawing_loss}, "draw from ctx.draw"),
    ({"select": lambda self, *a: None}, "Mine.select returned nothing"),
    ({"report": lambda self, *a: None}, "Mine.report returned nothing"),
    ({"server_update": lambda self, *a: None}, "Mine.server_update returned nothing"),
    ({"loss": lambda self, net, batch, *a: net(batch.x)}, r"of shape \[3, 10\], not a scalar"),
    (
        {"loss": forgetful_loss},
        "Mine.loss depends on rows that are absent, or on torch's generator: weigh",
    ),
    ({"server_update": drawing_update}, r"Mine.server_update draws from torch's generator, so tha"),
    ({"init_server": drawing_init}, r"Mine.init_server draws from torch's generator, so that two"),
    ({"select": drawing_select}, r"Mine.select draws from Python's random module, so that two"),
    ({"download": drawing_download}, r"Mine.download draws from NumPy's global generator, so"),
    (
        {"server_update": halving_update, "upload": lambda self, net, own, sums, *a: (sums, own)},
        r"Mine.server_update changed a tensor of shape \[\] that it was given",
    ),
    (
        {"server_update": adding_update, "init_server": lambda self, ctx: Sums(torch.zeros(2))},
        r"Mine.server_update changed a tensor of shape \[2\] that it was given, in place",
    ),
    ({"report": erasing_report}, "Mine.report changed a tensor of shape .* that it was given"),
    (
        {"server_update": growing_update, "init_server": lambda self, ctx: Sums(torch.zeros(2))},
        r"Mine.server_update returned a state with 'total' as \[3\] of float32; it had 'total' as",
    ),
    (
        {"server_update": lambda self, *a: Sums(torch.zeros(2))},
        r"Mine.server_update returned a Sums; the state was a Nothing",
    ),
    ({"receive": zeroing_receive}, r"Mine.receive changed a tensor of shape .* it was given, in"),
    ({"loss": shifting_loss}, r"Mine.loss changed a tensor of shape \[3, 1, 8, 8\] that it was"),
    (
        {"download": erasing_download, "init_server": lambda self, ctx: Sums(torch.zeros(2))},
        r"Mine.download changed a tensor of shape \[2\] that it was given, in place",
    ),
    ({"loss": fails}, "Mine.loss failed in stage 'train': AttributeError: 'Net' object"),
    ({"summarize": forgetful_sums}, "Mine.summarize depends on rows that are absent"),
    ({"phases": lambda self, ctx: ("body",)}, "Mine.phases returned a str among its phases"),
    ({"predict": lambda self, net, own, down, x, ctx: x}, r"Mine.predict returned a tensor of sha"),
]


@pytest.mark.parametrize(("functions", "says"), WRONG)
def test_a_broken_function_is_told_by_name(functions: dict[str, Any], says: str) -> None:
    with pytest.raises(MethodError, match=says):
        fedgist.run(RECIPE, method=method(**functions))


def test_a_class_in_the_place_of_an_object_and_fields_without_a_dataclass() -> None:
    with pytest.raises(MethodError, match=r"method is the class FedProx: give an object, FedProx"):
        fedgist.run(RECIPE, method=FedProx)  # type: ignore[arg-type]
    annotated = {"mu": 1.0, "__annotations__": {"mu": "float"}}
    with pytest.raises(MethodError, match="has fields but is not a dataclass"):
        fedgist.run(RECIPE, method=method(**annotated))


def test_what_a_method_says_of_itself_is_no_hyper_parameter() -> None:
    # seen: an annotation made a field of it, which recipes, searches and records took for a key
    @dataclass(frozen=True)
    class Annotated(fedgist.Method):
        keeps: str = "head"

    with pytest.raises(MethodError, match=r"keeps is no hyper-parameter: declare it as keeps: Cla"):
        fedgist.run(RECIPE, method=Annotated())


def test_a_name_in_the_place_of_an_object() -> None:
    with pytest.raises(MethodError, match="method is the text 'fedavg': give an object, or name"):
        fedgist.run(RECIPE, method="fedavg")  # type: ignore[arg-type]


def test_hyper_parameters_beside_an_object_are_refused() -> None:
    recipe = RECIPE | {"method": {"name": "fedprox", "mu": 0.5}}
    with pytest.raises(
        RecipeError, match=r"method.mu is in the recipe, but a method object is given"
    ):
        fedgist.run(recipe, method=FedProx())


def branching_loss(self: Any, net: Any, batch: Any, own: Any, down: Any, ctx: Any) -> Any:
    value = ctx.task.objective.loss(net(batch.x), batch)
    return value if value > 0 else -value


@pytest.mark.parametrize("loss", [boolean_loss, branching_loss])
def test_why_a_method_cannot_be_stacked_is_said_in_whole_words(loss: Any) -> None:
    with pytest.warns(UserWarning, match=r"mlp runs client by client: Mine.loss cannot be stacked"):
        result = fedgist.run(RECIPE, method=method(loss=loss))
    why, end = result.summary["notes"][0].rsplit("; ", 1)
    assert end == "use masks (torch.where) in place of Boolean indices and branches"
    assert re.search(
        r"(dynamic shape|control flow|\w \.\.\.)$", why
    )  # a sentence's end, or says it is cut


@given(
    words=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=30),
    sentences=st.lists(st.integers(1, 29), max_size=3),
    width=st.integers(20, 80),
)
def test_a_text_is_cut_at_the_end_of_a_sentence_or_a_word(
    words: list[str], sentences: list[int], width: int
) -> None:
    whole = [w + "." * (i in sentences) for i, w in enumerate(words)]
    text = " ".join(whole)
    seen = cut(text, width)
    assert len(seen) <= width
    if len(text) <= width:
        assert seen == text
        return
    kept = seen.removesuffix(" ...").split(" ")
    assert kept == whole[: len(kept)]  # rejects text[:width], which ends within a word
    assert seen.endswith((".", "..."))
    ends = [i for i, w in enumerate(whole) if w.endswith(".")]
    fitting = [i for i in ends if len(" ".join(whole[: i + 1])) <= width]
    assert seen.endswith(" ...") != bool(fitting)


def test_a_boolean_index_runs_client_by_client_and_python_is_told_why() -> None:
    with pytest.warns(UserWarning, match=r"mlp runs client by client: Mine.loss cannot be stacked"):
        result = fedgist.run(RECIPE, method=method(loss=boolean_loss))
    assert "use masks" in result.summary["notes"][0]


def test_a_plan_is_not_remembered_for_other_code_of_the_same_name() -> None:
    # seen: a plan of another method, whose object had lain at the same address
    named = {"__repr__": lambda self: "Mine()"}
    fedgist.run(RECIPE, method=method(**named))
    with pytest.warns(UserWarning, match=r"mlp runs client by client: Mine.loss cannot be stacked"):
        fedgist.run(RECIPE, method=method(loss=boolean_loss, **named))


class CentersBatches(nn.Module):
    """A model that mixes the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        out: torch.Tensor = self.head(flat - flat.mean(0))
        return out


@dataclass
class Notes(Observer):
    texts: ClassVar[list[str]] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_model_that_mixes_rows_is_noted_and_not_blamed_on_the_method() -> None:
    build: Callable[[], nn.Module] = CentersBatches
    fedgist.run(RECIPE | {"method": {"name": "local"}}, model=build, observer=Notes())
    assert any("mixes the rows of a batch" in text for text in Notes.texts)


class DropsFeatures(nn.Module):
    """Dropout as a function before the head: it cannot be moved out of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = nn.functional.dropout(self.body(x.flatten(1)), 0.5, training=self.training)
        out: torch.Tensor = self.head(z)
        return out


@pytest.mark.parametrize(("model", "said"), [(DropsFeatures, True), (None, False)])
def test_features_that_are_dropped_out_are_noted_in_the_result(
    model: type[nn.Module] | None,
    said: bool,  # noqa: FBT001
) -> None:
    # seen: the note was printed and stood nowhere else
    result = fedgist.run(RECIPE | {"method": {"name": "local"}}, model=model, observer=Notes())
    notes = result.summary["notes"]
    assert any("its features are dropped out in training" in note for note in notes) == said


@pytest.mark.parametrize(
    ("optimizer", "bias", "said"),
    [("adam", True, True), ("adam", False, False), ("sgd", True, False)],
)
def test_a_bias_before_batch_norm_is_noted_under_adam(
    optimizer: str,
    bias: bool,  # noqa: FBT001
    said: bool,  # noqa: FBT001
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 3, bias=bias), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10)
        )

    recipe = RECIPE | {"train": {"num_rounds": 1, "optimizer": optimizer, "lr": 0.01}}
    Notes.texts.clear()
    fedgist.run(recipe, model=model, observer=Notes())
    assert any("batch norm takes off the bias of" in text for text in Notes.texts) == said
