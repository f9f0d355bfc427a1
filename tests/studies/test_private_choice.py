"""Searches under privacy: the choice by report noisy max, what it costs, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

from commands import fedgist
from fedgist.cli.recipe_files import folder
from fedgist.cli.study_commands import print_best
from fedgist.errors import RecipeError
from fedgist.recipe.reading import read
from fedgist.runs.files.columns import VALIDATION_ACCURACY
from fedgist.studies import private_choice
from fedgist.studies.job import Event
from fedgist.studies.private_choice import check_search, noisy_max, source_of_bits
from fedgist.studies.tune import Tuner
from fedgist.world.accounting import composed

pytest.importorskip("optuna")
pytest.importorskip("dp_accounting")

DEMO = folder() / "demo.toml"
PRIVATE = [
    "data.train_rows=150",
    "train.num_rounds=2",
    "engine.cohort_size=3",
    "clients.num_clients=4",
    "privacy.unit=record",
    "privacy.epsilon=1.0",
    "privacy.delta=0.01",
    "privacy.clip=5",
]
PAID = [*PRIVATE, "tune.epsilon=0.5"]
GRID = np.linspace(-60.0, 60.0, 24001)


def chances(counts: tuple[int, ...], epsilon: float) -> np.ndarray:
    """The chance of each count to be the greatest under Laplace noise, by numerical integration."""
    far = epsilon * (GRID - np.array(counts)[:, None])
    density = epsilon / 2 * np.exp(-np.abs(far))
    below = np.where(far < 0, np.exp(far) / 2, 1 - np.exp(-np.abs(far)) / 2)
    others = [np.delete(below, i, axis=0).prod(0) for i in range(len(counts))]
    return np.array([np.trapezoid(density[i] * others[i], GRID) for i in range(len(counts))])


def worst_ratio(epsilon: float, changes: list[tuple[int, ...]]) -> float:
    """How many times likelier a choice gets at most, when counts change so, or the other way."""
    ratios = [
        np.log(chances(counts, epsilon) / chances(after, epsilon))
        for counts in itertools.product(range(3), repeat=3)
        for change in changes
        if (after := tuple(c + d for c, d in zip(counts, change, strict=True)))
    ]
    return float(np.abs(ratios).max())


def test_a_row_more_or_less_changes_no_chance_by_more_than_epsilon_says() -> None:
    one_row = list(itertools.product((0, 1), repeat=3))
    assert worst_ratio(0.7, one_row) <= 0.7 + 1e-3
    assert worst_ratio(1.0, one_row) > 0.7  # rejects less noise, a scale of 0.7 / epsilon
    # rejects this scale where counts move in both directions
    assert worst_ratio(0.7, [(1, -1, -1)]) > 0.75


def test_choices_have_the_chances_that_the_audit_is_of() -> None:
    random, counts, draws = Random(0), (3, 2, 0), 20_000
    found = np.zeros(3)
    for _ in range(draws):
        found[noisy_max(counts, 0.7, lambda _: random.getrandbits(64))] += 1
    expected = chances(counts, 0.7)
    assert np.abs(found / draws - expected).max() < 4 * math.sqrt(0.25 / draws)
    assert expected.sum() == pytest.approx(1.0, abs=1e-3)


def test_each_trial_has_noise_of_its_own() -> None:
    # rejects one draw for all trials, with which the largest count always wins
    little, much = (1 << 64) - 2, 0  # of the Laplace distribution: 0, and its largest sample
    for place in range(3):
        asked: list[int] = []

        def bits(at: int, place: int = place, asked: list[int] = asked) -> int:
            asked.append(at)
            return much if at == place else little

        assert noisy_max([3.0, 3.0, 3.0], 1.0, bits) == place
        assert asked == [0, 1, 2]


def test_noise_is_of_the_seed_or_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = read(DEMO, PAID)
    first, again = (source_of_bits(simulated, 0) for _ in range(2))
    assert [first(i) for i in range(3)] == [again(i) for i in range(3)]
    assert first(0) != source_of_bits(simulated, 1)(0)
    assert first(0) != source_of_bits(read(DEMO, [*PAID, "seed=1"]), 0)(0)
    monkeypatch.setattr("secrets.randbits", lambda count: count * 1000)
    assert source_of_bits(read(DEMO, [*PAID, "privacy.noise=system"]), 0)(5) == 64_000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (PRIVATE, "which costs epsilon beside that of its trials: state it as tune.epsilon"),
        (["tune.epsilon=0.5"], "tune.epsilon = 0.5: nothing reads it: privacy.unit is 'none'"),
        ([*PAID, "privacy.unit=client"], "changes a count of correct rows by all the rows that it"),
        ([*PAID, "data.held_out=20"], "data.held_out = 20: the best trial is chosen by counts of"),
        ([*PAID, "evaluate.on=global"], "evaluate.on = 'global': the best trial is chosen by"),
        ([*PAID, "privacy.share_measurements=false"], "which would stay with the clients"),
        ([*PAID, "objective.name=simclr"], "objective.name = 'simclr': the best trial is chosen"),
    ],
)
def test_a_search_that_cannot_be_paid_for_is_refused(settings: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        check_search(read(DEMO, settings))


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.toml"
    path.write_text('["train.lr"]\nlow = 1e-3\nhigh = 1e-1\nlog = true\n')
    return path


def search(tuner: Tuner, trials: int) -> None:
    """Go on with a search whose n-th trial predicts 1000 n rows of client 0, and 2 of client 1."""
    for job in tuner.jobs(trials):
        number = tuner.open[job.name].trials[0].number
        job.folder.mkdir(parents=True, exist_ok=True)
        assert not tuner.listen(
            job, Event("round", {"round": 1, VALIDATION_ACCURACY: -1.0 * number})
        )
        # by the mean over clients, the objective, the first trial is the best
        line = {"round": 2, VALIDATION_ACCURACY: 1 - number / 100}
        (job.folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
        clients = [
            {"round": 1, "client": 0, "split": "validation", "rows": 9999, "accuracy": 1.0},
            {"round": 2, "client": 0, "split": "client", "rows": 9999, "accuracy": 1.0},
            {"round": 2, "client": 0, "split": "validation", "rows": 9000, "accuracy": number / 9},
            {"round": 2, "client": 1, "split": "validation", "rows": 3, "accuracy": 2 / 3},
            {"round": 2, "client": 2, "split": "validation", "rows": 0, "accuracy": None},
        ]
        text = "".join(json.dumps(li) + "\n" for li in clients)
        (job.folder / "clients.jsonl").write_text(text)
        assert private_choice.correct_rows(job.folder) == 1000 * number + 2
        tuner.listen(job, Event("done"))


@pytest.mark.slow
def test_a_private_search_draws_at_random_stops_nothing_and_chooses_by_counts_once(
    tmp_path: Path, space: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner = Tuner(DEMO, PAID, space, tmp_path / "study", 2)
    search(tuner, 7)  # rounds are bad ones, of which the median pruner stops some
    best = tuner.best()
    trials = tuner.study.get_trials()
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    assert best is not None
    assert best[0] == trials[6].params
    # another process, which must not draw again; and an eighth trial, for which it must
    again = Tuner(DEMO, PAID, space, tmp_path / "study", 2)
    assert again.best() == best
    assert len(again.study.user_attrs["choices"]) == 1
    epsilon, delta = composed([(1.0, 0.01)] * 14)
    told = f"14 runs on the same rows compose to epsilon {epsilon:.4g}, delta {delta:g} for one re"
    assert told in again.promise()
    assert f"tune.epsilon = 0.5; in all epsilon {epsilon + 0.5:.4g}, delta 0.01" in again.promise()
    search(again, 8)
    print_best(again, tmp_path / "study")
    out = " ".join(capsys.readouterr().out.split())
    assert "best of 8 trials on validation data, by report noisy max over correct rows" in out
    assert f"in all epsilon {composed([(1.0, 0.01)] * 16)[0] + 1.0:.4g}, delta 0.01" in out
    assert "tune.epsilon = 0.5 + 0.5" in out
    assert "simulated: noise from seeds" in out
    assert "scores of single trials" in out


def test_values_of_a_private_search_do_not_depend_on_scores(tmp_path: Path, space: Path) -> None:
    # after ten trials the sampler of other searches looks at scores
    values = []
    for sign in (1, -1):
        tuner = Tuner(DEMO, PAID, space, tmp_path / f"study{sign}", 1)
        for job in tuner.jobs(12):
            trial = tuner.open[job.name].trials[0]
            job.folder.mkdir(parents=True)
            line = {"round": 2, VALIDATION_ACCURACY: sign * trial.params["train.lr"]}
            (job.folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
            tuner.listen(job, Event("done"))
        values.append([trial.params for trial in tuner.study.get_trials()])
    assert values[0] == values[1]


@pytest.mark.slow
def test_a_private_search_ends_in_a_recipe_and_says_what_it_spent(
    tmp_path: Path, space: Path
) -> None:
    settings = [word for text in PAID for word in ("--set", text)]
    command = ["tune", "demo", "--space", str(space), "--trials", "2", "--out", "s", *settings]
    done = fedgist(*command, cwd=tmp_path)
    assert "trials are drawn at random and none is stopped early" in done.stderr
    out = " ".join(done.stdout.split())
    assert "2 runs on the same rows compose to epsilon 1.586, delta 0.01" in out
    assert "in all epsilon 2.086" in out
    assert (tmp_path / "s/best.toml").exists()
    assert fedgist(*command, cwd=tmp_path).stdout == done.stdout
