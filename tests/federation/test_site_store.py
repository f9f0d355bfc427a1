"""A site's stored state: written whole, read back, and refused if it is another's or damaged."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist.errors import DiskFullError, SiteError
from fedgist.federation.site.store import SiteStore
from fedgist.runs.files import atomic_files
from fedgist.wire.site import Answered, SiteState

RUN = "0123456789abcdef"


def arrays(value: float) -> dict[str, torch.Tensor]:
    return {"mlp/net/w": torch.full((1, 3), value), "mlp/own/n": torch.tensor([[int(value)]])}


def answered(number: int) -> Answered:
    return Answered(f"d{number}", arrays(number - 1), b"reply %d" % number)


def state(*numbers: int, released: int = 0, forgotten: int = -1) -> SiteState:
    """Return the state after some rounds; the client's arrays hold the newest one's number."""
    done = {(n, 0, "mlp"): answered(n) for n in numbers}
    releases = {(n, 0, "mlp"): f"d{n}" for n in range(1, released + 1)}
    return SiteState(arrays(max(numbers, default=0)), releases, done, (forgotten, 0, ""))


def same(one: SiteState | None, other: SiteState) -> bool:
    assert one is not None
    assert one.answered.keys() == other.answered.keys()
    for key, stage in other.answered.items():
        found = one.answered[key]
        assert (found.digest, found.reply) == (stage.digest, stage.reply)
        assert all(torch.equal(found.before[n], a) for n, a in stage.before.items())
    assert all(torch.equal(one.client[name], array) for name, array in other.client.items())
    return (one.released, one.forgotten) == (other.released, other.forgotten)


def store(
    folder: Path, run: str = RUN, client: int = 0, recipe: str = "0a", lost: int = -1
) -> SiteStore:
    return SiteStore(folder / "s", run, client, recipe, lost)


def test_a_new_run_has_no_state(tmp_path: Path) -> None:
    assert store(tmp_path).load() is None


def test_a_run_is_bound_to_its_recipe_at_first_contact(tmp_path: Path) -> None:
    store(tmp_path).keep(state())
    assert same(store(tmp_path).load(), state())
    with pytest.raises(SiteError, match="began here with another recipe: begin a new run"):
        store(tmp_path, recipe="0b").load()


def test_the_rows_of_the_newest_state_are_known(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.rows = "r1"
    first.keep(state())
    again = store(tmp_path)
    again.load()
    assert again.rows_before == "r1"  # the site's log compares them with those of now
    again.rows = "r2"
    again.keep(state(1))
    third = store(tmp_path)
    third.load()
    assert third.rows_before == "r2"


def test_rounds_of_a_lost_state_stay_lost_over_restarts(tmp_path: Path) -> None:
    store(tmp_path, lost=4).keep(state())
    again = store(tmp_path)
    again.load()
    assert again.lost == 4
    again.keep(state(5, released=1))
    third = store(tmp_path)
    third.load()
    assert third.lost == 4


def test_only_the_owner_can_read_the_state(tmp_path: Path) -> None:
    store(tmp_path).keep(state(1, 2, released=2))
    folder = tmp_path / "s"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_each_state_comes_back(tmp_path: Path) -> None:
    first = store(tmp_path)
    states = [state(), state(1), state(1, 2, released=2), state(2, 3, released=3, forgotten=1)]
    for each in states:
        first.keep(each)
        assert same(store(tmp_path).load(), each)
    # two rounds are kept: the files do not grow in number
    assert len(list((tmp_path / "s").glob("0*.safetensors"))) == 2


def test_a_stage_that_is_done_again_undoes_the_later_ones(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.keep(state())
    kept.keep(state(1))
    kept.keep(state(1, 2))
    kept.keep(state(1))  # before round 2 is done again with another download
    assert same(store(tmp_path).load(), state(1))
    kept.keep(state())
    assert same(store(tmp_path).load(), state())


@pytest.mark.parametrize("writes", range(5))
def test_a_kill_between_two_writes_leaves_a_state_that_was(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = state(1, 2, released=2), state(2, 3, released=3, forgotten=1)
    kept = store(tmp_path)
    kept.keep(state())
    kept.keep(before)
    count = 0

    write = atomic_files.write

    def killed(path: Path, content: Any, **how: Any) -> None:
        nonlocal count
        count += 1
        if count > writes:
            raise KeyboardInterrupt
        write(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "write", killed)
        with contextlib.suppress(KeyboardInterrupt):
            kept.keep(after)
    found = store(tmp_path).load()
    assert found is not None
    newest = max(found.answered)[0]
    # the arrays are those of the newest answer, and a release is never less than what may have left
    assert torch.equal(found.client["mlp/net/w"], arrays(newest)["mlp/net/w"])
    assert newest in {2, 3}
    assert len(found.released) >= newest


@pytest.mark.parametrize(
    ("run", "client", "says"),
    [("f" * 16, 0, "is of run 0123456789abcdef, not ffff"), (RUN, 2, "is of site 0, not 2")],
)
def test_the_state_of_another_is_refused(run: str, client: int, says: str, tmp_path: Path) -> None:
    store(tmp_path).keep(state(1, released=1))
    with pytest.raises(SiteError, match=says):
        store(tmp_path, run, client).load()


@pytest.mark.parametrize(
    "name", ["base.safetensors", "00000001-000-*.safetensors", "releases.json"]
)
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_named_with_the_remedy(name: str, damage: str, tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.keep(state(released=1))
    kept.keep(state(1, released=1))
    (path,) = (tmp_path / "s").glob(name)
    blob = bytearray(path.read_bytes())
    if damage == "changed":
        blob[-9] ^= 1
    content = {"cut": blob[: len(blob) // 2], "changed": blob, "empty": b""}[damage]
    path.write_bytes(bytes(content))
    with pytest.raises(SiteError, match=f"{path.name}.*put it back from a copy"):
        store(tmp_path).load()


def test_a_full_disk_is_an_error_and_the_old_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store(tmp_path)
    kept.keep(state())
    kept.keep(state(1))

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DiskFullError):
            kept.keep(state(1, 2))
    assert same(store(tmp_path).load(), state(1))


def test_lost_releases_are_noticed(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.keep(state(released=1))
    kept.keep(state(1, released=1))
    (tmp_path / "s/releases.json").unlink()
    with pytest.raises(SiteError, match="missing or too old: 1 releases were made, and it has 0"):
        store(tmp_path).load()
