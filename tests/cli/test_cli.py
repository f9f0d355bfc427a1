"""The commands, end to end, as processes: what they print, where, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import Command, call, fedgist, wait_for_ends, wait_until
from fedgist.core import random as keyed
from fedgist.runs.files import checkpoint
from interrupted import bare

pytestmark = pytest.mark.slow  # each command is a process that imports torch

SMALL = [
    "--set",
    "train.num_rounds=4",
    "--set",
    "engine.cohort_size=3",
    "--set",
    "data.train_rows=300",
    "--set",
    "train.local_epochs=1",
]
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    def call(*args: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        return fedgist(*args, cwd=tmp_path, code=code, **env)

    return call


def rounds(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return bare(lines)


def weights(folder: Path) -> dict[str, bytes]:
    saved = checkpoint.load(folder)
    assert saved is not None
    both = {
        **{f"s/{k}": v for k, v in saved.server.items()},
        **{f"c/{k}": v for k, v in saved.clients.items()},
    }
    return {k: v.numpy().tobytes() for k, v in both.items()}


def test_a_run_prints_a_line_a_round_in_a_pipe_and_writes_its_directory(
    cli: Cli, tmp_path: Path
) -> None:
    done = cli("run", "demo", *SMALL, "--out", "small")
    assert done.stdout.count("round ") >= 4
    assert "round 4/4  accuracy" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\ndata: inputs of shape [1, 8, 8]; 10 classes: 0, 1, 2, 3," in done.stdout
    assert done.stdout.splitlines()[-1] == "Next: fedgist show small"
    folder = tmp_path / "small"
    assert {p.name for p in folder.iterdir()} == {
        "recipe.toml",
        "metrics.json",
        "rounds.jsonl",
        "clients.jsonl",
        "result.json",
        "partition.json",
        "checkpoint",
    }
    line = rounds(folder)[-1]
    assert line["comm/up_bytes"] == line["comm/down_bytes"] == 20 * 33 * 10 * 4
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["eval/client/accuracy_mean"]["final"] == line["eval/client/accuracy_mean"]
    assert "cohort_size = 3" in (folder / "recipe.toml").read_text()
    assert len((folder / "clients.jsonl").read_text().splitlines()) == 4 * 20


def test_a_seed_is_set_by_its_own_option(cli: Cli, tmp_path: Path) -> None:
    short = ["--quiet", "--set", "train.num_rounds=1"]
    cli("run", *SMALL, *short, "--out", "a", "--seed", "3")
    cli("run", *SMALL, *short, "--out", "b", "--set", "seed=3")
    assert (tmp_path / "a" / "recipe.toml").read_text().startswith("seed = 3\n")
    assert bare(rounds(tmp_path / "a")) == bare(rounds(tmp_path / "b"))
    refused = cli("run", "--resume", "a", "--seed", "4", code=2)
    assert "--set seed=4: a resumed run keeps its recipe" in refused.stderr


def test_json_is_only_json_and_quiet_is_quiet(cli: Cli) -> None:
    done = cli("run", *SMALL, "--json", "--out", "a")
    *lines, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert end["result"]["rounds"] == 4
    assert cli("run", *SMALL, "--quiet", "--out", "b").stdout == ""


def test_several_seeds_have_their_own_folders_and_a_mean_with_its_error(
    cli: Cli, tmp_path: Path
) -> None:
    done = cli("run", *SMALL, "--seeds", 2, "--out", "many", "--set", "seed=5")
    assert sorted(p.name for p in (tmp_path / "many").iterdir()) == ["seed-5", "seed-6"]
    assert "fedlog, 2 seeds" in done.stdout
    assert "±" in done.stdout
    assert rounds(tmp_path / "many/seed-5") != rounds(tmp_path / "many/seed-6")
    assert "±" in cli("show", "many").stdout
    assert "holds runs of several seeds" in cli("run", *SMALL, "--out", "many", code=2).stderr
    done = cli("run", "--resume", "many", "--seeds", 3)  # two are finished, the third had not begun
    assert done.stdout.count("is finished") == 2
    assert "fedlog, 3 seeds" in done.stdout
    assert (tmp_path / "many/seed-7/result.json").exists()


def test_show_draws_a_table_a_curve_and_a_png(cli: Cli, tmp_path: Path) -> None:
    cli("run", *SMALL, "--quiet", "--out", "a")
    cli("run", *SMALL, "--quiet", "--out", "b", "--set", "method.name=fedavg")
    text = cli("show", "a", "b").stdout
    assert "fedlog" in text
    assert "fedavg" in text
    assert "round" in text
    cli("show", "a", "b", "--png", "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_partition_prints_who_has_what_and_draws_it(cli: Cli, tmp_path: Path) -> None:
    done = cli("partition", "demo", "--png", "p.png")
    assert "20 clients" in done.stdout
    assert "pathological" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "no recipe given" not in done.stdout
    assert "no recipe given: this is demo" in cli("partition").stdout


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("methods", "fedprox"),
        ("datasets", "cifar10"),
        ("models", "resnet9"),
        ("recipes", "fedlog/mnist"),
        ("partitions", "shards"),
    ],
)
def test_list_names_what_there_is(cli: Cli, what: str, word: str) -> None:
    assert word in cli("list", what).stdout


def test_help_teaches_every_command(cli: Cli) -> None:
    text = cli("--help").stdout
    for command in ("run", "list", "partition", "show", "predict", "probe", "export"):
        assert command in text
        assert len(cli(command, "--help").stdout) > 100


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "train.lrr=1"], "train.lrr: unknown key; did you mean 'lr'?"),
        (["--set", "method.name=fedlogg"], "unknown method 'fedlogg'; did you mean 'fedlog'?"),
        (["--set", "partition.alpha=0"], "partition.alpha"),
        (
            ["--set", "clients.num_clients=60", "--set", "data.train_rows=50"],
            "clients.num_clients = 60, but digits has only 50 training samples",
        ),
        (
            ["--set", "model.name=nowhere:net", "--set", "clients.architectures={}"],
            "model.name = 'nowhere:net'",
        ),
        (
            ["--set", "clients.architectures={mlp=0.5,lenet5=0.5}"],
            "all bodies need one feature width",
        ),
        (["--set", "data.name=mnist", "--data-root", "none"], "--data-root or FEDGIST_DATA"),
        (["--set", "engine.device=gpu9"], "engine.device = 'gpu9'"),
        (["--seeds", "0"], "--seeds"),
        (["nothing.toml"], "no recipe nothing.toml"),
        (["--resume", "nowhere"], "nowhere holds no run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli: Cli, args: list[str], says: str) -> None:
    env = {"FEDGIST_DATA": ""} if "mnist" in str(args) else {}
    out = [] if "--resume" in args else ["--out", "x"]
    done = cli("run", *args, *out, code=2, **env)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    if "--seeds" not in args:
        lines = done.stderr.strip().splitlines()
        assert [line for line in lines if "importing this module runs its code" not in line] == [
            lines[-1]
        ]


def test_data_that_cannot_be_trusted_are_refused(cli: Cli, tmp_path: Path) -> None:
    raw = tmp_path / "data/MNIST/raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(
        (2051).to_bytes(4, "big") + (5).to_bytes(4, "big") * 3 + b"xx"
    )
    labels = (2049).to_bytes(4, "big") + (5).to_bytes(4, "big") + bytes(5)
    for name in ("train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (raw / name).write_bytes(labels)
    done = cli("run", "fedlog/mnist", "--data-root", "data", "--out", "x", code=2)
    assert "train-images-idx3-ubyte" in done.stderr
    cifar = tmp_path / "data/cifar-10-batches-py"
    cifar.mkdir()
    for name in (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
        "batches.meta",
    ):
        (cifar / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    done = cli("run", "fedlog/cifar10", "--data-root", "data", "--out", "x", code=2)
    assert "refused" in done.stderr
    assert not (tmp_path / "owned").exists()
    (tmp_path / "t.csv").write_text("a,diagnosis\n1,x\n2,\n3,y\n")
    table = [
        "--set",
        "data.name=table",
        "--set",
        "data.path=t.csv",
        "--set",
        "data.label=diagnosis",
    ]
    done = cli("run", *table, "--out", "x", code=2)
    assert "diagnosis" in done.stderr


def test_a_folder_that_holds_a_run_is_kept(cli: Cli) -> None:
    cli("run", *SMALL, "--quiet", "--out", "a")
    done = cli("run", *SMALL, "--out", "a", code=2)
    assert "--resume a" in done.stderr
    assert "--overwrite" in done.stderr
    assert "is finished" in cli("run", "--resume", "a").stdout
    cli("run", *SMALL, "--quiet", "--out", "a", "--overwrite")


def test_predictions_are_the_models_own_and_an_export_gives_the_same_without_fedgist(
    cli: Cli, tmp_path: Path
) -> None:
    cli("run", *SMALL, "--quiet", "--out", "a")
    from fedgist.data.sources.loading import load_data  # noqa: PLC0415

    x = load_data("digits").x_test[:9]
    np.savez(tmp_path / "x.npz", x=x.numpy())
    table = list(csv.DictReader(io.StringIO(cli("predict", "a", "x.npz", "--client", 3).stdout)))
    assert len(table) == 9
    for row in table:
        probabilities = [float(row[f"p_{c}"]) for c in range(10)]
        assert sum(probabilities) == pytest.approx(1, abs=1e-4)
        assert row["label"] == str(int(np.argmax(probabilities)))
    cli("export", "a", "--client", 3, "-o", "m.pt2")
    script = (
        "import sys, torch, numpy as np\n"
        "model = torch.export.load('m.pt2').module()\n"
        "x = torch.tensor(np.load('x.npz')['x'], dtype=torch.float32)\n"
        "print(torch.softmax(model(x), 1).tolist()); assert 'fedgist' not in sys.modules"
    )
    done = call([sys.executable, "-W", "ignore", "-c", script], tmp_path)
    again = torch.tensor(json.loads(done.stdout))
    assert torch.allclose(
        again, torch.tensor([[float(row[f"p_{c}"]) for c in range(10)] for row in table]), atol=1e-4
    )
    cli("export", "a", "--client", 3, "-o", "m.safetensors")
    assert "unknown suffix" in cli("export", "a", "--client", 3, "-o", "m.bin", code=2).stderr
    assert "clients 0..19" in cli("predict", "a", "x.npz", "--client", 20, code=2).stderr


def has_lines(path: Path, number: int) -> bool:
    return path.exists() and len(path.read_text().splitlines()) >= number


LONG = [
    "--set",
    "train.num_rounds=12",
    "--set",
    "engine.cohort_size=3",
    "--set",
    "data.train_rows=600",
    "--set",
    "engine.checkpoint_every=2",
    "--set",
    "engine.workers=2",
]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(
    cli: Cli, tmp_path: Path, number: signal.Signals
) -> None:
    cli("run", *LONG, "--quiet", "--out", "whole")
    command = Command(["run", *LONG, "--out", "cut"], tmp_path)
    wait_until(lambda: has_lines(tmp_path / "cut/rounds.jsonl", 3))
    command.signal(number)
    said = command.end()
    assert said.returncode == 130
    assert "fedgist run --resume cut" in said.stderr
    cli(
        "run",
        *(
            ["--resume", "cut"]
            if (tmp_path / "cut/recipe.toml").exists()
            else [*LONG, "--out", "cut"]
        ),
    )
    assert rounds(tmp_path / "cut") == rounds(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


SHORT = [*LONG, "--set", "data.train_rows=200", "--set", "train.local_epochs=1"]  # much is saving


@pytest.mark.parametrize("most", [5, pytest.param(20, marks=pytest.mark.environment)])
def test_killed_at_any_moment_and_resumed_is_the_uninterrupted_run(
    cli: Cli, tmp_path: Path, most: int
) -> None:
    cli("--version")  # what commands are forked from is there
    began = time.monotonic()
    cli("run", *SHORT, "--quiet", "--out", "whole")
    span = time.monotonic() - began
    kills = 0
    for i, draw in enumerate(keyed.uniform(keyed.key(0, "kill"), (100,)).tolist()):
        # one run, killed again and again, each time at another moment; now and then, and once it is
        # finished, from the start again
        begun = (tmp_path / "cut/recipe.toml").exists()
        anew = not begun or i % 5 == 4 or (tmp_path / "cut/result.json").exists()
        args = (
            [*SHORT, "--out", "cut", *(["--overwrite"] if begun else [])]
            if anew
            else ["--resume", "cut"]
        )
        command = Command(["run", *args], tmp_path)
        time.sleep(draw * span)
        children = command.workers()
        kills += command.runs
        command.signal(signal.SIGKILL)
        command.end()
        wait_for_ends(children)  # no worker is left behind
        if kills == most:
            break
    assert kills == most
    cli(
        "run",
        *(
            ["--resume", "cut"]
            if (tmp_path / "cut/recipe.toml").exists()
            else [*SHORT, "--out", "cut"]
        ),
    )
    assert rounds(tmp_path / "cut") == rounds(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
