"""Runs that are tracked as they go: what is sent and when, and that no tracker changes a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fedgist
from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report.tracking.tracker_names import TRACKERS, tracker
from fedgist.report.tracking.wandb_tracker import WandB
from fedgist.runs.files.record import Line, read_lines
from fedgist.testing.small_worlds import blobs, rows

import commands  # isort: skip
from interrupted import bare, killed_in_round  # isort: skip
from kept_rounds import KeptRounds  # isort: skip

QUICK: dict[str, Any] = {
    "model": {"hidden": [5]},
    "train": {"num_rounds": 4, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3, "checkpoint_every": 2},
}
GIVEN: dict[str, Any] = {"data": blobs(), "clients": rows()}
SETS = ("data.train_rows=90", "clients.num_clients=3", "engine.workers=1", "engine.cohort_size=3")
SMALL = [word for text in SETS for word in ("--set", text)]
ACCURACY = "eval/client/accuracy_mean"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptRounds:
    """The tracker that ``mlflow`` names in this test."""
    tracker = KeptRounds()
    monkeypatch.setitem(TRACKERS, "mlflow", lambda _: tracker)
    return tracker


class Logger:
    """A logger of one's own."""

    def __init__(self) -> None:
        self.settings: list[Mapping[str, object]] = []
        self.rounds: dict[int, Mapping[str, float]] = {}

    def start(self, settings: Mapping[str, object]) -> None:
        self.settings.append(settings)

    def log(self, number: int, values: Mapping[str, float]) -> None:
        assert number not in self.rounds
        self.rounds[number] = values


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def numbers(line: Line) -> dict[str, float]:
    """What a round's line holds of numbers, by an independent rule: JSON has no others."""
    return {k: v for k, v in line.items() if k != "round" and type(v) in {int, float}}


# a logger of one's own


def test_a_logger_of_ones_own_gets_what_is_recorded(tmp_path: Path) -> None:
    logger = Logger()
    fedgist.run(QUICK, out=tmp_path / "run", track=logger, **GIVEN)
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert logger.rounds == {line["round"]: numbers(line) for line in lines}
    (settings,) = logger.settings
    assert settings["train.num_rounds"] == 4
    assert settings["method.name"] == "fedlog"


def test_a_round_is_sent_when_its_line_is_on_the_disk(tmp_path: Path) -> None:
    sent = []

    def log(number: int, values: Mapping[str, float]) -> None:
        sent.append((number, read_lines(tmp_path / "run" / "rounds.jsonl")[-1]["round"]))

    logger = types.SimpleNamespace(start=lambda _: None, log=log)
    fedgist.run(QUICK, out=tmp_path / "run", track=logger, **GIVEN)
    assert sent == [(n, n) for n in range(1, 5)]


def test_a_resumed_run_logs_only_its_new_rounds(tmp_path: Path) -> None:
    first, second = Logger(), Logger()
    killed_in_round(4, QUICK, tmp_path / "run", **GIVEN, track=first)
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track=[second], **GIVEN)
    assert (sorted(first.rounds), sorted(second.rounds)) == ([1, 2, 3], [3, 4])


def test_two_loggers_of_a_class_are_both_called() -> None:
    loggers = [Logger(), Logger()]
    fedgist.run(QUICK, track=loggers, **GIVEN)
    assert [sorted(logger.rounds) for logger in loggers] == [[1, 2, 3, 4]] * 2


def test_what_is_no_tracker_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for value, says in (
        (3, "track: a int has no function 'start'"),
        (types.SimpleNamespace(start=print), "has no function 'log'"),
        ("neptune", "track: unknown tracker 'neptune'; known: tensorboard, mlflow, wandb"),
        ("tensorboard", r"track: tensorboard writes into the run directory: give out=\.\.\."),
    ):
        with pytest.raises(ReportError, match=says):
            fedgist.run(tmp_path / "no recipe is here", track=value)  # type: ignore[arg-type]


# no tracker changes a run


def test_a_tracked_run_has_the_same_bits(tmp_path: Path, kept: KeptRounds) -> None:
    fedgist.run(QUICK, out=tmp_path / "plain", **GIVEN)
    fedgist.run(QUICK, out=tmp_path / "tracked", track=["mlflow", Logger()], **GIVEN)
    kept.fails_in = 2
    with pytest.warns(UserWarning, match="tracking with mlflow failed"):
        fedgist.run(QUICK, out=tmp_path / "failed", track="mlflow", **GIVEN)
    plain, *others = [
        [bare(read_lines(tmp_path / name / file)) for file in ("rounds.jsonl", "clients.jsonl")]
        for name in ("plain", "tracked", "failed")
    ]
    assert others == [plain, plain]


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    tmp_path: Path, kept: KeptRounds
) -> None:
    kept.fails_in = 2
    logger = Logger()
    with pytest.warns(UserWarning, match="tracking") as said:
        fedgist.run(QUICK, out=tmp_path / "a b", track=["mlflow", logger], **GIVEN)
    (text,) = (str(warning.message) for warning in said)
    assert text == (
        "tracking with mlflow failed, and the run goes on without it: the server is gone; "
        f"send what is missing with: fedgist watch '{tmp_path / 'a b'}' --track mlflow"
    )
    assert (kept.only.rounds, kept.only.ended) == ([1], None)
    assert sorted(logger.rounds) == [1, 2, 3, 4]
    kept.only.fails_in = None  # the server is there again
    assert call("watch", tmp_path / "a b", "--track", "mlflow", "--once").exit_code == 0
    assert (kept.only.rounds, kept.only.ended) == ([1, 2, 3, 4], True)


def test_a_failing_logger_is_left_out_and_no_command_is_named() -> None:
    def fail(*_: object) -> None:
        raise ValueError("\x1b[2Jno")

    logger = types.SimpleNamespace(start=fail, log=fail)
    with pytest.warns(UserWarning, match="tracking") as said:
        result = fedgist.run(QUICK, track=logger, **GIVEN)
    assert len(result.rounds) == 4
    (text,) = (str(warning.message) for warning in said)
    assert text == (
        "tracking with logger 1 (SimpleNamespace) failed, and the run goes on without it: "
        r"\x1b[2Jno"
    )


def test_a_failure_is_said_on_standard_error_when_a_command_is_quiet(
    tmp_path: Path, kept: KeptRounds
) -> None:
    kept.fails_in = 1
    out = ("--out", tmp_path / "run", "--set", "train.num_rounds=2", "-q")
    name = "mlflow:http://me:secret@host/"
    done = call("run", "demo", *SMALL, *out, "--seeds", 2, "--track", name)
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()  # one for both seeds
    assert line.endswith(f"fedgist watch {tmp_path / 'run'} --track mlflow:http://...@host/")
    assert "secret" not in line


# commands


def test_each_seed_is_a_run_and_a_resumed_one_has_no_round_twice(
    tmp_path: Path, kept: KeptRounds
) -> None:
    out = ("--out", tmp_path / "run", "--set", "train.num_rounds=2", "--track", "mlflow")
    assert call("run", "demo", *SMALL, *out, "--seeds", 2).exit_code == 0
    assert [run.name for run in kept.runs] == ["fedlog seed 0", "fedlog seed 1"]
    assert [log.ended for log in kept.logs.values()] == [True, True]
    again = ("--resume", tmp_path / "run" / "seed-1", "--rounds", 4, "--track", "mlflow")
    assert call("run", *again).exit_code == 0
    assert [log.rounds for log in kept.logs.values()] == [[1, 2], [1, 2, 3, 4]]
    (settings,) = {str(run.settings["data.train_rows"]) for run in kept.runs}
    assert settings == "90"


def test_a_run_that_was_killed_goes_on_in_the_same_log(tmp_path: Path, kept: KeptRounds) -> None:
    killed_in_round(
        4, QUICK, tmp_path / "run", **GIVEN, track="mlflow"
    )  # round 3 is sent and not saved
    assert (kept.only.rounds, kept.only.ended) == ([1, 2, 3], False)
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track="mlflow", **GIVEN)
    assert (kept.only.rounds, kept.only.ended) == ([1, 2, 3, 4], True)


def test_a_resumed_run_sends_rounds_that_were_not_tracked(tmp_path: Path, kept: KeptRounds) -> None:
    killed_in_round(4, QUICK, tmp_path / "run", **GIVEN)
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track="mlflow", **GIVEN)
    assert kept.only.rounds == [1, 2, 3, 4]


def test_a_run_that_replaces_another_is_another_run(tmp_path: Path, kept: KeptRounds) -> None:
    for _ in range(2):
        fedgist.run(QUICK, out=tmp_path / "run", overwrite=True, track="mlflow", **GIVEN)
    assert [log.rounds for log in kept.logs.values()] == [[1, 2, 3, 4]] * 2


@pytest.mark.slow
def test_each_job_of_a_sweep_is_a_run(tmp_path: Path, kept: KeptRounds) -> None:
    grid = ("--grid", "method.name=fedlog,local", "--out", tmp_path / "sweep", "--jobs", 1)
    words = ("sweep", "demo", *SMALL, "--set", "train.num_rounds=2", *grid, "--track", "mlflow")
    assert call(*words).exit_code == 0
    assert {run.name for run in kept.runs} == {"fedlog seed 0", "local seed 0"}
    assert [(log.rounds, log.ended) for log in kept.logs.values()] == [([1, 2], True)] * 2
    assert call(*words).exit_code == 0  # everything is done
    assert len(kept.logs) == 2
    # the files describe the same runs as were sent
    assert call("watch", tmp_path / "sweep", "--track", "mlflow", "--once").exit_code == 0
    assert [log.rounds for log in kept.logs.values()] == [[1, 2], [1, 2]]


def test_a_wrong_tracker_is_said_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as if it were not installed
    for name, says in (
        ("neptune", "unknown tracker 'neptune'"),
        ("mlflow", "tracking needs mlflow-skinny: pip install 'fedgist[track]'"),
        (f"tensorboard:{tmp_path / 'file'}", "is not a folder"),
    ):
        for words in (("run", "demo"), ("sweep", "demo", "--grid", "train.lr=0.1,0.2")):
            done = call(*words, "--out", tmp_path / "run", "--track", name)
            assert isinstance(done.exception, ReportError)
            assert says in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_private_search_sends_no_scores(tmp_path: Path, kept: KeptRounds) -> None:
    space = tmp_path / "space.toml"
    space.write_text('["train.lr"]\nlow = 0.01\nhigh = 0.1\n')
    words = ("privacy.unit=record", "privacy.epsilon=2", "privacy.delta=0.01", "privacy.clip=5")
    private = [w for text in (*words, "tune.epsilon=0.5") for w in ("--set", text)]
    tune = ("tune", "demo", "--space", space, "--out", tmp_path / "study", "--trials", 1)
    done = call(*tune, *private, "--track", "mlflow")
    assert isinstance(done.exception, ReportError)
    assert "tune.epsilon does not cover" in str(done.exception)
    assert kept.logs == {}


# TensorBoard


def steps(folder: Path) -> list[int]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return [event.step for event in read.Scalars(ACCURACY)]


def test_tensorboard_has_a_round_before_the_next_begins(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    seen = []
    fedgist.run(
        QUICK,
        out=tmp_path / "run",
        track="tensorboard",
        callback=lambda line: seen.append(steps(tmp_path / "run" / "tensorboard")),
        **GIVEN,
    )
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_tensorboard_has_no_round_of_a_resumed_run_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    words = ("--out", tmp_path / "run", "--track", "tensorboard", "--set", "train.num_rounds=2")
    assert call("run", "demo", *SMALL, *words).exit_code == 0
    again = ("--resume", tmp_path / "run", "--rounds", 3, "--track", "tensorboard")
    assert call("run", *again).exit_code == 0
    assert steps(tmp_path / "run" / "tensorboard") == [1, 2, 3]


def test_a_run_in_memory_may_have_a_folder_of_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fedgist.run(QUICK, track=f"tensorboard:{tmp_path}", **GIVEN)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("fedlog-seed-0-")
    assert steps(folder) == [1, 2, 3, 4]


# MLflow


# MLflow's tracking server, without what its command brings for models
SERVER = """
from werkzeug.serving import make_server
from mlflow.server import app
server = make_server("127.0.0.1", 0, app)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(params=["database", "server"])
def mlflow_uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a database, or of MLflow's server on the loopback."""
    database = f"sqlite:///{tmp_path / 'ml.db'}"
    if request.param == "database":
        yield database
        return
    own = {"_MLFLOW_SERVER_FILE_STORE": database, "_MLFLOW_SERVER_ARTIFACT_ROOT": str(tmp_path)}
    (tmp_path / "server.py").write_text(SERVER)
    server = commands.Command(["server.py"], tmp_path, own, work=commands._script)
    commands.wait_until(lambda: "\n" in server.printed() or not server.runs)
    assert server.runs, server.printed()
    yield f"http://127.0.0.1:{int(server.printed().splitlines()[0])}"
    server.signal(signal.SIGKILL)
    server.end()


@pytest.mark.environment
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database
def test_mlflow_follows_a_run_that_is_killed_and_resumed(tmp_path: Path, mlflow_uri: str) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = mlflow_uri
    client = mlflow.MlflowClient(tracking_uri=uri)
    seen = []

    def only_run() -> Any:
        (experiment,) = (e for e in client.search_experiments() if e.name == "given")
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    def look(line: Line) -> None:
        seen.append((only_run().info.status, only_run().data.metrics[ACCURACY] == line[ACCURACY]))

    killed_in_round(4, QUICK, tmp_path / "run", **GIVEN, track=f"mlflow:{uri}", callback=look)
    assert seen == [("RUNNING", True)] * 3
    assert only_run().info.status == "KILLED"
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track=f"mlflow:{uri}", **GIVEN)
    run = only_run()
    history = client.get_metric_history(run.info.run_id, ACCURACY)
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert [(m.step, m.value) for m in history] == [(n["round"], n[ACCURACY]) for n in lines]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.num_rounds"] == "4"
    client.set_terminated(run.info.run_id, "KILLED")  # as if the end of the run had not arrived
    assert call("watch", tmp_path / "run", "--track", f"mlflow:{uri}", "--once").exit_code == 0
    assert only_run().info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database
@pytest.mark.parametrize("uri", ["nonsense:there", "sqlite:////proc/none/ml.db"])
def test_a_target_that_mlflow_refuses_is_said_at_once(uri: str) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(ReportError, match="MLflow: "):
        tracker(f"mlflow:{uri}")


# W&B, without its server


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of W&B's files; nothing is sent."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path / "wandb"


def logged(file: Path) -> list[Any]:
    """The records of a file for ``wandb sync``: each has a header of seven bytes."""
    pytest.importorskip("wandb").teardown()  # it writes in a process of its own
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    blob, at, records = file.read_bytes(), 7, []
    assert len(blob) < 32768  # else a record may be in several parts
    while at < len(blob):
        size = int.from_bytes(blob[at + 4 : at + 6], "little")
        records.append(record.FromString(blob[at + 7 : at + 7 + size]))
        at += 7 + size
    return records


def history(records: list[Any]) -> list[dict[str, float]]:
    rounds = [record.history for record in records if record.HasField("history")]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in line.item}
        for line in rounds
    ]


@pytest.mark.slow
def test_wandb_has_the_rounds_and_settings_and_no_more(tmp_path: Path, offline: Path) -> None:
    fedgist.run(QUICK, out=tmp_path / "run", track="wandb", **GIVEN)
    (file,) = offline.glob("offline-run-*/run-*.wandb")
    records = logged(file)
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    sent = [{k: v for k, v in line.items() if k[0] != "_"} for line in history(records)]
    assert sent == [numbers(line) for line in lines]
    assert [line["_step"] for line in history(records)] == [1, 2, 3, 4]
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("given", "fedlog seed 0")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train.num_rounds"] == 4
    assert set(config) == {"_wandb", *(k for k in config if "." in k), "seed"}
    blob = file.read_bytes()
    assert run.host == ""
    for private in map(str, (tmp_path, sys.executable, Path.cwd())):
        assert private.encode() not in blob
    files = [path for path in (file.parent / "files").rglob("*") if path.is_file()]
    assert files == []


def test_wandb_has_no_round_of_a_resumed_run_twice(tmp_path: Path, offline: Path) -> None:
    killed_in_round(4, QUICK, tmp_path / "run", **GIVEN, track="wandb:team/project")
    (file,) = offline.glob("offline-run-*/run-*.wandb")
    assert [line["_step"] for line in history(logged(file))] == [1, 2, 3]
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track="wandb:team/project", **GIVEN)
    (file,) = offline.glob("offline-run-*/run-*.wandb")
    assert [line["_step"] for line in history(logged(file))] == [1, 2, 3, 4]
    assert call("watch", tmp_path / "run", "--track", "wandb", "--once").exit_code == 0
    (file,) = offline.glob("offline-run-*/run-*.wandb")
    assert [line["_step"] for line in history(logged(file))] == [1, 2, 3, 4]


class Server:
    """As much of the package ``wandb`` as fedgist uses, with a server behind it."""

    class Settings(dict[str, object]):
        model_fields = ("silent", "host")

    def __init__(self, *, key: bool = True) -> None:
        self.key, self.runs, self.began = key, dict[str, list[int]](), list[dict[str, Any]]()
        self.ends: list[int] = []

    def setup(self) -> Any:
        settings = types.SimpleNamespace(wandb_dir="nowhere", mode="online")
        return types.SimpleNamespace(settings=settings)

    def login(self) -> bool:
        return self.key

    def end(self, exit_code: int) -> None:
        self.ends.append(exit_code)

    def init(self, **how: Any) -> Any:
        self.began.append(how)
        steps = self.runs.setdefault(how["id"], [])
        return types.SimpleNamespace(
            step=steps[-1] + 1 if steps else 0,
            log=lambda values, *, step, commit: steps.append(step),
            finish=self.end,
        )


def test_wandb_resumes_a_run_at_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setitem(sys.modules, "wandb.errors", types.SimpleNamespace(Error=OSError))
    killed_in_round(4, QUICK, tmp_path / "run", **GIVEN, track="wandb:team/project")
    fedgist.run(QUICK, out=tmp_path / "run", resume=True, track="wandb:team/project", **GIVEN)
    assert list(server.runs.values()) == [[1, 2, 3, 4]]
    assert server.ends == [1, 0]
    first, second = server.began
    assert (first["entity"], first["project"], first["resume"]) == ("team", "project", "allow")
    assert first == second
    assert first["settings"] == {"silent": True, "host": ""}
    server.key = False
    with pytest.raises(ReportError, match="W&B: there is no API key: wandb login"):
        WandB()


def test_a_project_that_wandb_refuses_is_said_at_once(offline: Path) -> None:
    with pytest.raises(ReportError, match=r"W&B: .*project"):
        tracker("wandb:a#b")
    assert not offline.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database
def test_packages_report_nothing_to_their_makers_unless_the_user_wants_it(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    reports = ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING")
    for chosen, then in (("", ["true", "false"]), ("by the user", ["by the user"] * 2)):
        for variable in reports:
            monkeypatch.setenv(variable, chosen)
            if not chosen:
                monkeypatch.delenv(variable)
        tracker(f"mlflow:sqlite:///{tmp_path / 'ml.db'}")
        tracker("wandb")
        assert [os.environ[variable] for variable in reports] == then


def test_nothing_is_warned_of_when_all_goes_well(kept: KeptRounds) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedgist.run(QUICK, track="mlflow", **GIVEN)
    assert kept.only.run.folder is None
