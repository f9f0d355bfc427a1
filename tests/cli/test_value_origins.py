"""Errors that quote a value which the user did not type say whose it is, and how to change it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.value_origins import with_origins
from fedgist.core.training import Training
from fedgist.errors import InputError, shown
from fedgist.recipe.reading import flat, read_toml

DEMO = {
    key: value
    for key, value in flat(read_toml(find_recipe("demo"))).items()
    if not isinstance(value, list)
}


@given(key=st.sampled_from(sorted(DEMO)), form=st.sampled_from([" = {}", " must be 1..9, not {}"]))
def test_each_value_of_a_recipe_is_named_unless_it_was_typed(key: str, form: str) -> None:
    section = key.partition(".")[0]
    text = key + form.format(shown(DEMO[key]))
    named = f"{text} (of the recipe demo): no; --set {key}=... changes it"
    assert with_origins(f"{text}: no", "demo", []) == named
    assert with_origins(f"{text}: no", "demo", ["seed", "evaluate.every"]) == named
    for typed in (key, section):
        assert with_origins(f"{text}: no", "demo", [typed]) == f"{text}: no"
    for other in (f"x{text}: no", f"x.{text}: no", f"{text}9: no"):  # other keys and values
        assert with_origins(other, "demo", []) == other


def test_defaults_and_a_methods_own_table_have_their_words(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[methods.fedavg]\nx = 3\n[methods.fedavg.train]\nlr = 0.5\n")
    rounds = f"train.num_rounds = {Training().num_rounds}"
    text = f"train.lr = 0.5, method.x = 3 and {rounds} differ"
    of = f"(of the recipe {own})"
    assert with_origins(text, str(own), []).startswith(
        f"train.lr = 0.5 {of}, method.x = 3 {of} and {rounds} (the default) differ"
    )


@pytest.mark.parametrize("words", [["run", "--out", "r"], ["partition"]])
def test_a_command_says_whose_value_it_is(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: "clients.num_clients = 20, but digits has only 10", of which 20 was typed by nobody
    monkeypatch.chdir(tmp_path)
    rows = ["--set", "data.train_rows=10"]
    done = CliRunner().invoke(app, [words[0], "demo", *words[1:], *rows])
    assert isinstance(done.exception, InputError)
    says = "clients.num_clients = 20 (of the recipe demo), but digits has only 10 training samples"
    assert str(done.exception) == f"{says}; --set clients.num_clients=... changes it"
    typed = [*rows, "--set", "clients.num_clients=20"]
    done = CliRunner().invoke(app, [words[0], "demo", *words[1:], *typed])
    assert str(done.exception) == says.replace(" (of the recipe demo)", "")
