"""Texts through the whole house: training, scores, public rows, records, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.core.batch import NO_WORD
from fedgist.core.objectives.next_word import SPECIAL
from fedgist.data.dataset import Dataset, check
from fedgist.data.sources.text_rows import prompts
from fedgist.data.vocabulary import Vocabulary
from fedgist.errors import DataError, InputError, RecipeError
from fedgist.methods import METHODS
from fedgist.models.lstm import word_lstm
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of
from interrupted import gets_more_rounds
from method_objects import each

WORDS, LENGTH, CLIENTS = 12, 6, 4
SIZES = (5, 1, 7, 3)  # rows of each client
MODEL = {"name": "word_lstm", "embedding": 6, "hidden": 5}


def counting(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return texts in which each word follows the one before it: what comes next is certain."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, WORDS - len(SPECIAL), (rows, 1), generator=generator)
    x = (first + torch.arange(LENGTH + 1)) % (WORDS - len(SPECIAL)) + len(SPECIAL)
    y = x[:, 1:].clone()
    y[torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)] = (
        NO_WORD
    )
    return x[:, :-1].to(torch.int32), y.to(torch.int32)


def texts(copies: int = 1) -> Dataset:
    count = sum(SIZES) * copies
    x, y = counting(count, 0)
    x_test, y_test = counting(9, 1)
    words = (*SPECIAL, *(f"w{i}" for i in range(WORDS - len(SPECIAL))))
    owners = torch.repeat_interleave(torch.arange(CLIENTS), torch.tensor(SIZES) * copies)
    names = tuple("abcd")
    return Dataset(
        "counting",
        x,
        y,
        x_test,
        y_test,
        WORDS,
        classes=words,
        clients=owners,
        client_names=names,
        vocabulary=Vocabulary(words),
        target="words",
    )


def recipe(**sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": {},
        "objective": {"name": "next_word"},
        "partition": {"name": "natural"},
        "model": MODEL,
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 2, "optimizer": "sgd", "lr": 0.5, "batch_size": 3},
        "evaluate": {"on": "global"},
        "engine": {"workers": 1, "plans": {"word_lstm": {"cohort_size": 3}}},
    }
    return {name: found.get(name, {}) | table for name, table in (found | sections).items()}


class Plain:
    """A model of torch alone, trained on texts one batch at a time."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self.net = word_lstm((LENGTH,), WORDS, embedding=6, hidden=5)
        self.net.load_state_dict(arrays)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = nn.CrossEntropyLoss(ignore_index=NO_WORD, reduction="none")
        found = losses(self.net(x.long()).transpose(1, 2), y.long())
        mean: Tensor = (found.sum(1) / (y >= 0).sum(1)).mean()
        return mean


def test_fedavg_on_texts_is_a_plain_average_of_plain_steps() -> None:
    data = texts()
    small = world_of(make(recipe()), Overrides(data=data))
    start = small.server.task.starts["word_lstm"]
    # whole batches, so that their order does not matter
    sections: dict[str, Any] = {"train": {"num_rounds": 1, "batch_size": 7}}
    result = fedgist.run(recipe(**sections), data=data)
    assert data.clients is not None
    total = {name: torch.zeros_like(p) for name, p in start.params.items()}
    for client, size in enumerate(SIZES):
        mine = data.clients == client
        plain = Plain(dict(start.params))
        plain.loss(data.x[mine], data.y[mine]).backward()
        for name, p in plain.net.named_parameters():
            assert p.grad is not None
            total[name] += size / sum(SIZES) * (p.detach() - 0.5 * p.grad)
    arrays = result.server_run.checkpoint().server
    for name, expected in total.items():
        torch.testing.assert_close(arrays[f"weights/word_lstm/arrays/{name}"], expected)
    plain = Plain(total)
    logits = plain.net(data.x_test.long()).detach()
    counted = data.y_test >= 0
    guess = logits[..., len(SPECIAL) :].argmax(-1) + len(SPECIAL)
    right = (guess == data.y_test)[counted].float().mean()
    line = result.rounds[-1]
    assert line["eval/global/accuracy"] == pytest.approx(float(right))
    loss = nn.functional.cross_entropy(logits[counted], data.y_test[counted].long())
    assert line["eval/global/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert line["eval/global/perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    each(("fedavg", "fedprox", "fedadam", "local", "centralized"), ("local", "centralized")),
)
def test_methods_learn_what_comes_next(method: str, tmp_path: Path) -> None:
    on = {"on": "test", "every": 20}
    steps = {"num_rounds": 20, "lr": 0.5 if method == "fedadam" else 2.0}
    server = {"server": {"lr": 0.05}} if method == "fedadam" else {}
    long = recipe(method={"name": method, **server}, train=steps, evaluate=on)
    result = fedgist.run(long, data=texts(4), out=tmp_path / "run")
    assert result.rounds[-1]["eval/client/accuracy_mean"] > (0.5 if method == "local" else 0.9)
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert partition["train"] == [[4 * size] for size in SIZES]
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    report = CliRunner().invoke(
        app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]
    )
    assert report.exit_code == 0, report.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:client . has too few rows for a local step")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_serves_texts_or_refuses_them(method: str) -> None:
    asked = recipe(method={"name": method}, evaluate={"on": "client"}, train={"num_rounds": 1})
    if "words" not in METHODS[method].targets:
        with pytest.raises(InputError, match="objective next_word has the next word at each"):
            world_of(make(asked), Overrides(data=texts()))
    elif "codist" not in method:  # these need pools: below
        line = fedgist.run(asked, data=texts()).rounds[-1]
        assert 0.0 <= line["eval/client/accuracy_mean"] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_no_stacking_and_no_engine_changes_results(optimizer: str) -> None:
    lr = 0.5 if optimizer == "sgd" else 0.05
    train = {"optimizer": optimizer, "lr": lr}
    sections: dict[str, Any] = {"evaluate": {"on": "client"}, "train": train}
    runs = [
        fedgist.run(recipe(**sections, engine=engine), data=texts())
        for engine in (
            {"plans": {"word_lstm": {"cohort_size": 1}}},
            {"plans": {"word_lstm": {"cohort_size": 4}}},
            {"name": "loopback", "plans": {}},
        )
    ]
    first, *others = ([line["eval/client/loss_mean"] for line in run.rounds] for run in runs)
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    gets_more_rounds(recipe(), tmp_path, data=texts())


def pools(method: str, **options: Any) -> dict[str, Any]:
    tables = {
        "small": MODEL,
        "large": MODEL | {"hidden": 9, "layers": 2, "clients": [0, 1]},
    }
    models = {
        n: {"model": t["name"], **{k: v for k, v in t.items() if k != "name"}}
        for n, t in tables.items()
    }
    found = recipe(clients={"pools": models}, method=options | {"name": method})
    found |= {"engine": {"workers": 1, "plans": {n: {"cohort_size": 2} for n in models}}}
    found.pop("model")
    return found


@pytest.mark.slow
def test_pools_of_texts_learn_from_each_other() -> None:
    public = {"data": {"public": {"rows": 8}}}
    distillation = {"steps": 3, "batch_size": 4, "temperature": 0.5}
    options = {"server": {"lr": 0.01}, "distillation": distillation}
    line = fedgist.run(pools("merged_codist", **options) | public, data=texts(2)).rounds[-1]
    assert line["server/distillation/small"] > 0
    mixed = options | {"distillation": distillation | {"mixup": 2}}
    with pytest.raises(InputError, match="mixup mixes numbers: texts cannot be mixed"):
        world_of(make(pools("merged_codist", **mixed) | public), Overrides(data=texts(2)))


def test_public_texts_are_read_as_the_clients_are(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text('{"text": "w1 w2 w3. w4 w5"}\n')
    public = {"name": "text_file", "file": str(file), "test_fraction": 0.0}
    options = {"server": {"lr": 0.01}, "distillation": {"steps": 2, "batch_size": 2}}
    asked = pools("merged_codist", **options) | {"data": {"public": public}}
    world = world_of(make(asked), Overrides(data=texts()))
    assert world.public is not None
    assert world.public.x.shape == (2, LENGTH)  # as long as the clients'
    wrong = {"data": {"public": public | {"tokenizer": "wordpiece"}}}
    with pytest.raises(InputError, match=r"data.public.tokenizer: unknown"):
        world_of(make(asked | wrong), Overrides(data=texts()))
    with pytest.raises(InputError, match="public: texts cannot be given so"):
        world_of(make(pools("merged_codist")), Overrides(data=texts(), public=["w1 w2"]))


@pytest.mark.slow
def test_the_rates_of_a_distillation_are_in_the_record_and_bind_the_rounds(tmp_path: Path) -> None:
    falling = {"steps": 2, "batch_size": 2, "final_factor": 0.0}
    options = {"server": {"lr": 0.01}, "distillation": falling}
    asked = pools("merged_codist", **options) | {"data": {"public": {"rows": 8}}}
    line = fedgist.run(asked, data=texts(2), out=tmp_path / "run").rounds[-1]
    assert line["server/distillation/lr/small"] == pytest.approx(1e-3 / 2)
    with pytest.raises(InputError, match="cannot be raised from 2 to 3"):
        fedgist.run(asked, data=texts(2), out=tmp_path / "run", resume=True, rounds=3)


@pytest.mark.slow
def test_pools_and_test_sets_may_be_of_clients_by_name() -> None:
    names = ("ann/question", "ann/answer", "bob/question", "eve/answer")
    owners = torch.arange(9) % CLIENTS
    data = replace(texts(2), client_names=names, clients_test=owners)
    asked = pools("fedadam", server={"lr": 0.01})
    for pool, pattern in (("small", "*/answer"), ("large", "*/question")):
        asked["clients"]["pools"][pool]["clients"] = pattern
    asked["evaluate"] = {"on": "global", "sets": {"answers": {"clients": "*/answer"}}}
    world = world_of(make(asked), Overrides(data=data))
    assert [c.architectures for c in world.server.clients] == [("large",), ("small",)] * 2
    chosen: Any = world.server.task.test_sets["answers"]
    assert torch.equal(chosen.y, data.y_test[(owners == 1) | (owners == 3)])
    line = fedgist.run(asked, data=data).rounds[-1]
    assert 0.0 <= line["eval/global/large/answers/accuracy"] <= 1.0
    asked["clients"]["pools"]["large"]["clients"] = "*/title"
    with pytest.raises(InputError, match=r"'\*/title' matches none of the clients: ann/question"):
        world_of(make(asked), Overrides(data=data))
    asked["clients"]["pools"]["large"]["clients"] = "*/question"
    asked["partition"] = {"name": "iid"}
    with pytest.raises(InputError, match="the clients of this partition have no names"):
        world_of(make(asked), Overrides(data=data))
    asked["evaluate"]["sets"]["answers"] = {"clients": "*", "classes": [1]}
    with pytest.raises(InputError, match="a test set is of classes or of clients: give one"):
        make(asked)


def test_each_client_keeps_a_text_when_rows_are_held_out() -> None:
    world = world_of(make(recipe(data={"held_out": 12})), Overrides(data=texts()))
    assert [len(world.partition.train[client]) for client in range(CLIENTS)] == [1] * CLIENTS
    with pytest.raises(InputError, match=r"held_out = 13.*each one of its own: 12 are left"):
        world_of(make(recipe(data={"held_out": 13})), Overrides(data=texts()))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"objective": {"name": "classes"}}, "objective.name = 'classes': counting has texts"),
        ({"method": {"name": "fedlog"}}, "FedLog needs one class for each row"),
        ({"method": {"name": "repshare"}}, "needs one class for each row"),
        ({"partition": {"name": "dirichlet"}}, "partition.name = 'dirichlet' .* needs one class"),
        ({"train": {"class_weights": "balanced"}}, "class_weights = 'balanced' needs one class"),
        ({"data": {"normalize": "client"}}, "data.normalize = 'client' needs numbers"),
        ({"data": {"augment": ["flip"]}}, "data.augment needs images"),
        ({"evaluate": {"save_features": 5}}, "evaluate.save_features needs"),
        (
            {"evaluate": {"sets": {"x": {"classes": [1]}}}},
            "evaluate.sets.x.classes needs one class",
        ),
        ({"objective": {"metrics": ["auroc"]}}, "next_word has no metric 'auroc'"),
        ({"model": {"name": "mlp"}}, "model mlp"),
        ({"data": {"words": {"length": 3}}}, "data.words says how files of texts are read"),
        ({"data": {"words": {"length": 0}}}, "data.words.length = 0"),
        ({"data": {"words": {"tokenizer": "letters"}}}, "data.words.tokenizer"),
    ],
)
def test_what_texts_do_not_have_is_refused(sections: dict[str, Any], says: str) -> None:
    asked = recipe(**sections)
    if "model" in sections:
        asked["model"] = sections["model"]
    with pytest.raises(InputError, match=says) as caught:
        world_of(make(asked), Overrides(data=texts()))
    assert "\n" not in str(caught.value)


def test_rows_that_are_no_texts_have_no_next_word() -> None:
    with pytest.raises(
        InputError,
        match="'next_word': digits has one class for each row; use 'classes' or 'simclr'",
    ):
        world_of(make({"objective": {"name": "next_word"}, "model": {"name": "mlp"}}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda d: replace(d, x=d.x[:, :2]),
            "must be the next word at each place .* of shape .rows, 2",
        ),
        (lambda d: replace(d, y=d.y.long()), "int32 numbers of shape .rows, 6., not torch.int64"),
        (lambda d: replace(d, x=d.x + WORDS), "words of the training texts reach"),
        (lambda d: replace(d, y=d.y - 9), "training labels reach -10..2, outside -1.."),
        (lambda d: replace(d, y=torch.full_like(d.y, NO_WORD)), r"training row 0 .* has no word"),
    ],
)
def test_what_is_no_text_is_refused(change: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        check(change(texts()))


@pytest.mark.slow
def test_models_of_texts_go_on_and_are_exported(tmp_path: Path) -> None:
    file = tmp_path / "posts.jsonl"
    posts = [{"body": f"w{i} w{i + 1} w{i + 2} w{i + 3}", "who": i % 3} for i in range(9)]
    file.write_text("".join(json.dumps(post) + "\n" for post in posts))
    table = {
        "name": "text_file",
        "file": str(file),
        "text": "body",
        "client": "who",
        "words": {"length": 5},
    }
    asked = recipe(data=table, train={"num_rounds": 30, "lr": 2.0, "batch_size": 3})
    folder = tmp_path / "run"
    result = fedgist.run(asked, out=folder)
    model = result.model(0)
    assert model.predict(["w1 w2", "w4"]) == ["w3", "w5"]
    known = result.world.data.classes.index
    long = prompts(["w1 w2 w3 w4 w5 w6 w7"], result.world.data)  # longer than there are places
    assert long.tolist() == [[known(f"w{i}") for i in range(3, 8)]]
    assert len(model.predict("w1 w2 w3 w4 w5 w6 w7")) == 1
    assert model.predict("zz zz")[0] not in {"<pad>", "<begin>", "<unknown>"}
    with pytest.raises(DataError, match=r"text 1 \(counted from 0\) has no words"):
        model.predict(["w1", " "])
    more = tmp_path / "more.txt"
    more.write_text("w1 w2\nw4\n")

    def answered(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    lines = answered("predict", str(folder), str(more), "--client", "0").splitlines()
    assert [line.split(",")[:2] for line in lines] == [["row", "next"], ["0", "w3"], ["1", "w5"]]
    scored = json.loads(answered("evaluate", str(folder), str(file), "--json"))
    assert scored["mean"]["accuracy"] > 0.3
    assert scored["rows"] == len(posts)
    x = torch.tensor([[1, 5, 6, 0, 0], [1, 7, 0, 0, 0]])
    for ending in (".pt2", ".onnx", ".safetensors"):
        out = tmp_path / f"model{ending}"
        answered("export", str(folder), "--client", "0", "-o", str(out))
        if ending == ".pt2":
            program = torch.export.load(out).module()
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    again = {"model": MODEL | {"weights": str(out)}}
    assert not world_of(make(asked | again)).server.notes
    renamed = file.read_text("utf-8").replace("w8", "v8")
    (tmp_path / "others.jsonl").write_text(renamed, "utf-8")
    others = {"data": table | {"file": str(tmp_path / "others.jsonl")}}
    with pytest.raises(RecipeError, match=r"word \d+ is 'w\d+' in the file, '[vw]\d+' in the data"):
        world_of(make(asked | again | others))
    longer = tmp_path / "longer.jsonl"
    longer.write_text('{"body": "w1 w2. w3 w4!", "who": 1}\n')
    judged = world_of(make(asked | {"data": table | {"test_file": str(longer)}}))
    found = json.loads(answered("evaluate", str(folder), str(longer), "--json"))
    assert found["rows"] == len(judged.data.y_test) == 2  # sentences, as in the run
    more.write_bytes(b"\xff\xfe\xff")
    refused = CliRunner().invoke(app, ["predict", str(folder), str(more), "--client", "0"])
    assert "it is a text in UTF-16; a text in UTF-8 is needed" in str(refused.exception)
    shown = CliRunner().invoke(app, ["partition", str(folder / "recipe.toml")])
    assert "classes" not in shown.output
