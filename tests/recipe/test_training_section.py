"""Settings of training in a recipe: their defaults, their bounds, and what they become."""

from __future__ import annotations

import pytest

from fedgist.core.training import Schedule
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make, read
from fedgist.recipe.resolve import resolve
from fedgist.world.world import make_world


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.lr_schedule=lineal"], "train.lr_schedule = 'lineal': .*'linear' or 'cosine'"),
        (["train.lr_schedule=3"], "train.lr_schedule = 3"),
        (["train.lr_schedule.name=[1]"], "train.lr_schedule.name"),
        (["train.lr_schedule.warm=3"], "train.lr_schedule.warm: unknown key.*warmup_rounds"),
        (["train.lr_schedule.warmup_rounds=-1"], "warmup_rounds = -1: .*at least"),
        (["train.lr_schedule.warmup_rounds=1.5"], "warmup_rounds = 1.5"),
        (
            ['train.lr_schedule={name="cosine", step_rounds=3}'],
            "lr_schedule.step_rounds = 3: the schedule 'cosine' does not read it; known to: step",
        ),
        (
            ["train.lr_schedule.min_factor=0.1"],
            "'constant' does not read it; known to: linear, cos",
        ),
        (['train.lr_schedule={name="step", step_rounds=0}'], "step_rounds = 0"),
        (['train.lr_schedule={name="step", step_factor=1}'], "step_factor = 1: .*less than 1"),
        (['train.lr_schedule={name="cosine", min_factor=1.5}'], "min_factor = 1.5"),
        (['train.lr_schedule={name="cosine", min_factor=nan}'], "min_factor = nan: .*finite"),
        (["train.clip_norm=-1.0"], "train.clip_norm = -1.0: .*at least 0"),
        (["train.clip_norm=inf"], "train.clip_norm = inf: .*finite"),
        (["train.clip_norm=nan"], "train.clip_norm = nan"),
        (["train.clip_norm=much"], "train.clip_norm = 'much'"),
        (["train.class_weights=balance"], "train.class_weights = 'balance': .*'balanced'"),
        (["train.label_smoothing=1"], "train.label_smoothing = 1: .*less than 1"),
        (["train.label_smoothing=-0.1"], "train.label_smoothing = -0.1"),
        (["train.label_smoothing=nan"], "train.label_smoothing = nan"),
        (["train.precision=float16"], "train.precision = 'float16': .*'float32' or 'bfloat16'"),
    ],
)
def test_what_is_wrong_is_named(settings: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        make({}, settings)
    assert "\n" not in str(caught.value)


def test_a_warmup_that_never_ends_is_refused() -> None:
    # a table of one method may hold a part of what [train] says, so the whole is looked at
    recipe = make({"train": {"num_rounds": 4, "lr_schedule": {"warmup_rounds": 4}}})
    with pytest.raises(RecipeError, match=r"warmup_rounds = 4 leaves none of train.num_rounds = 4"):
        make_world(resolve(recipe))


def test_a_schedule_is_a_name_or_a_table_and_another_layer_replaces_it_whole() -> None:
    cosine = {"name": "cosine", "warmup_rounds": 2, "min_factor": 0.1}
    raw = {"train": {"lr_schedule": cosine}, "methods": {"fedavg": {"train": {}}}}
    raw["methods"]["fedavg"]["train"] = {"lr_schedule": "step"}  # type: ignore[index]
    assert make(raw).train.lr_schedule == Schedule(name="cosine", warmup_rounds=2, min_factor=0.1)
    assert make(raw, ["method.name=fedavg"]).train.lr_schedule == Schedule(name="step")
    assert make(raw, ["train.lr_schedule=constant"]).train.lr_schedule == Schedule()
    settings = ["train.lr_schedule=step", "train.lr_schedule.step_rounds=3"]
    assert make({}, settings).train.lr_schedule == Schedule(name="step", step_rounds=3)


def test_a_resolved_recipe_holds_the_options_of_its_schedule_alone_and_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    recipe = make({}, ["train.lr_schedule=step", "train.optimizer=adamw"])
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(text := recipe.to_toml(), encoding="utf-8")
    assert "step_rounds = 10" in text
    assert "min_factor" not in text
    assert read(path).train == recipe.train


def test_adamw_decays_unless_told_otherwise() -> None:
    def decay(*settings: str) -> float:
        return make({}, settings).train.local_optimizer.weight_decay

    assert decay("train.optimizer=adamw") == 0.01  # torch's default
    assert decay("train.optimizer=adamw", "train.weight_decay=0") == 0
    assert decay() == decay("train.optimizer=sgd") == 0


def test_what_is_off_by_default_stays_off() -> None:
    plain = make({}).train
    assert (plain.clip_norm, plain.class_weights, plain.label_smoothing) == (0.0, "none", 0.0)
    assert plain.precision == "float32"
    assert make({}, ["train.clip_norm=2"]).train == plain.model_copy(update={"clip_norm": 2.0})
