"""An option that a command does not read, as it is called, is refused by its name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import InputError

# each way to call a command, with the parameters that it reads; "*" are all others
WAYS = {
    "run nosuch": "* but rounds resume",
    "run --resume runs": "settings seed seeds rounds track data_root quiet as_json",
    "run --resume one": "settings seed rounds track data_root quiet as_json",
    "forget one --client 0": "data_root",
    "forget one --reply reply --kit kit": "",
    "partition nosuch": "* but out",
    "show runs": "*",
    "show runs --by client": "label trust",
    "compare runs": "* but figure",
    "compare runs --by model": "form out label trust",
    "compare runs --by client": "form out label trust",
    "compare runs --ranks": "metric form out figure label trust",
    "compare runs --format csv": "* but columns figure",
    "watch runs": "* but port",
    "watch runs --serve": "every port trust",
    "privacy": "epsilons",
    "privacy nosuch --epsilons 1": "*",
    "reproduce all": "queue archive out hours plan device jobs data_root quiet",
    "reproduce nosuch": "* but queue hours plan",
    "provision new.toml --out kits": "",
    "provision --request kit": "",
    "provision --sign request.csr --out kits": "",
    "provision --add-site ulm --out kits": "",
    "provision --renew ulm --out kits": "address",
    "provision --revoke ulm --out kits": "",
    "server kit nosuch": "*",
    "server kit nosuch --from-files replies": "out settings quiet",
    "site kit": "config check to_file from_file new_data",
    "site kit --check": "config recipe",
    "site kit --recipe nosuch --to-file reply": "config",
    "site kit --recipe nosuch --from-file models": "config",
    "site kit --new-data": "config",
}
# commands that read all their options in any case
PLAIN = {
    *("init", "list", "compile", "report", "card", "predict", "evaluate", "probe", "export"),
    *("sweep", "tune", "facts", "status", "stop"),
}
VALUES = {"--by": "model", "--port": "1024"}  # others take 1, as a number or a name
SERVING = "watch runs --serve"  # it would serve a page until Ctrl-C
COMMANDS = typer.main.get_command(app)
assert isinstance(COMMANDS, TyperGroup)
GROUP = COMMANDS.commands


def cases(*, read: bool) -> list[tuple[str, list[str]]]:
    """Return each way with each of its options that it reads, or that it does not read."""
    found = []
    for way, reads in WAYS.items():
        words = shlex.split(way)
        names, _, unread = reads.partition(" but ")
        for parameter in GROUP[words[0]].params:
            option = parameter.opts[0]
            if option in {"--help", *words} or not option.startswith("-"):
                continue
            of_all = names == "*" and parameter.name not in unread.split()
            if read and way in SERVING:
                continue
            if read == (of_all or parameter.name in names.split()):
                flag = getattr(parameter, "is_flag", False)
                found.append((way, [option] if flag else [option, VALUES.get(option, "1")]))
    return found


def words_of(case: str | list[str]) -> str:
    return case if isinstance(case, str) else case[0]


def error_of(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of a command in a folder with a run, which is called with nonsense."""
    (folder / "one").mkdir()
    (folder / "one" / "recipe.toml").write_text("nonsense", "utf-8")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, InputError | OSError), done.output
    assert [path.name for path in folder.iterdir()] == ["one"]  # nothing was begun
    return str(done.exception)


def test_each_command_is_listed() -> None:
    assert {shlex.split(way)[0] for way in WAYS} | PLAIN == set(GROUP)


@pytest.mark.parametrize(("way", "option"), cases(read=False), ids=words_of)
def test_an_option_that_is_not_read_is_refused_by_name(
    way: str, option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = error_of([*shlex.split(way), *option], tmp_path, monkeypatch)
    assert option[0] in error
    assert "\n" not in error


@pytest.mark.parametrize(("way", "option"), cases(read=True), ids=words_of)
def test_an_option_that_is_read_is_not_refused(
    way: str, option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = error_of([*shlex.split(way), *option], tmp_path, monkeypatch)
    assert "no effect" not in error


@pytest.mark.parametrize("words", ["run nosuch --resume runs", "privacy nosuch"])
def test_a_recipe_that_is_not_read_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "RECIPE has no effect" in error_of(words.split(), tmp_path, monkeypatch)
