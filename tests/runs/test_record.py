"""Records and checkpoints: they are written whole or not at all, and a damaged file is named."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.core.replies import Asked
from fedgist.errors import CheckpointError, DiskFullError, OutputError
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files import checkpoint
from fedgist.runs.files.checkpoint import Binding, Checkpoint
from fedgist.runs.files.record import STATE, Record, read_lines, summary, to_json
from fedgist.runs.files.seals import sealed
from fedgist.runs.round_record import RoundRecord


def test_lines_are_cut_back_to_the_checkpoints_round(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for r in range(1, 6):
        record.add({"round": r, "x": r / 3}, [{"round": r, "client": 0}])
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "x"')  # a kill in the middle of a line
    again = Record(tmp_path, 3)
    assert [line["round"] for line in again.rounds] == [1, 2, 3]
    assert [line["round"] for line in read_lines(tmp_path / "rounds.jsonl")] == [1, 2, 3]
    assert [line["round"] for line in read_lines(tmp_path / "clients.jsonl")] == [1, 2, 3]


def test_what_is_not_finite_is_null_and_the_line_stays_json() -> None:
    assert json.loads(to_json({"a": math.nan, "b": [math.inf, 1.5]})) == {
        "a": None,
        "b": [None, 1.5],
    }


def test_the_summary_labels_final_best_and_last_ten() -> None:
    rounds = [{"round": r, "acc": v} for r, v in enumerate([0.1, 0.9, *[0.5] * 9, 0.7], start=1)]
    column = summary(rounds, "acc")
    assert (column["final"], column["final_round"]) == (0.7, 12)
    assert (column["best"], column["best_round"]) == (0.9, 2)
    assert column["last10_mean"] == pytest.approx((0.5 * 9 + 0.7) / 10)
    assert summary(rounds, "nothing") == {}


def test_the_final_value_is_of_no_round_after_the_kept_one() -> None:
    # seen: a score of every fourth round was that of the last round, whose models are gone
    rounds = [{"round": r, "acc": r / 10} for r in range(1, 8)]
    rounds = [line if line["round"] in {4, 7} else {"round": line["round"]} for line in rounds]
    finals = [summary(rounds, "acc", kept=kept).get("final_round") for kept in range(1, 8)]
    assert finals == [None, None, None, 4, 4, 4, 7]


def arrays() -> Checkpoint:
    whole = torch.arange(12.0).view(3, 4)
    return Checkpoint(
        7,
        {"a": whole, "b": whole[1]},
        {"m/x": whole.T, "m/none": torch.zeros(0, 2), "m/n": torch.tensor(3)},
    )


def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    saved = arrays()
    checkpoint.save(tmp_path, saved)
    back = checkpoint.load(tmp_path)
    assert back is not None
    assert back.round == 7
    for before, after in ((saved.server, back.server), (saved.clients, back.clients)):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_best_round_reads_back_under_its_own_number(tmp_path: Path) -> None:
    best = Checkpoint(3, {"a": torch.ones(2)}, {"m/x": torch.zeros(3)})
    checkpoint.save(tmp_path, replace(arrays(), best=best))
    back = checkpoint.load(tmp_path)
    assert back is not None
    assert back.best is not None
    assert (back.round, back.best.round) == (7, 3)
    assert torch.equal(back.best.server["a"], torch.ones(2))
    assert torch.equal(back.best.clients["m/x"], torch.zeros(3))


def test_what_was_asked_for_between_two_rounds_is_told_by_the_next_one() -> None:
    # rejects the line of the round before, which is written already
    binding = Binding(raised=((2, 4, 6),), forgotten=((3, 1),))
    told = [binding.with_events({"round": number}).get("events") for number in (2, 3, 4, 5)]
    raised, forgot = "train.num_rounds was raised from 4 to 6", "the server forgot client 1"
    assert told == [None, [raised], [forgot], None]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    checkpoint.save(folder, arrays())
    path = folder / STATE
    blob = path.read_bytes()
    path.write_bytes(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(CheckpointError, match=r"state.safetensors is damaged"):
        checkpoint.load(folder)


def test_a_checkpoint_of_another_version_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "sealed", lambda table: sealed({**table, "computes": 3}))
    checkpoint.save(tmp_path, arrays())
    with pytest.raises(CheckpointError, match="was written by another version of fedgist, which "):
        checkpoint.load(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, arrays())
    before = (tmp_path / STATE).read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFullError, match=r"state.safetensors cannot be written: No space left"):
        checkpoint.save(tmp_path, arrays())
    assert (tmp_path / STATE).read_bytes() == before
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["state.safetensors"]


def test_a_file_is_replaced_whole_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "old").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "old"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # rejects a rename over a device: /dev/null would become a file
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_places_that_cannot_be_written_to_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "below", "cannot be written: "),
    ):
        with pytest.raises(OutputError, match=says):
            files.write(path, "text")


def test_losses_that_are_exactly_zero_are_written() -> None:
    # seen: a round whose losses were all 0.0 had no train/loss
    losses = [(Asked(client, "mlp"), 0.0) for client in (0, 1)]
    assert RoundRecord(1, losses=losses).line()["train/loss"] == 0.0
    assert "train/loss" not in RoundRecord(1).line()
