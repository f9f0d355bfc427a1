"""Splits of the Hugging Face library, in every way in which they are given from Python."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Subset

import fedgist
from data.hub_worlds import (
    CLASSES,
    CODES,
    COUNT,
    PIXELS,
    SITES,
    WAYS,
    given,
    hub,
    images,
    labelled,
    pictures,
    saved,
)
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.lazy_rows import held
from fedgist.data.sources.user_rows import user_rows
from fedgist.errors import DataError, RecipeError

SMALL = {
    "method": {"name": "fedavg"},
    "train": {"num_rounds": 1},
    "engine": {"workers": 1, "cohort_size": 2},
}
FLOATS = [0.5 * i for i in range(COUNT)]
DAYS = [dt.datetime(2020, 1, 1 + i) for i in range(COUNT)]  # noqa: DTZ001


def value(name: str) -> Any:
    return hub().Value(name)


def rows_of(data: Dataset) -> Any:
    return held(data.inputs, "x").numpy()


@pytest.mark.parametrize("way", WAYS)
def test_an_image_a_class_and_a_text_are_read_in_every_way(way: str, tmp_path: Path) -> None:
    data = WAYS[way](images(site=(value("string"), SITES)), tmp_path / "saved")
    assert data.x.dtype == torch.uint8
    assert np.array_equal(rows_of(data)[:, 0], PIXELS)
    assert (data.classes, data.y.tolist()) == (CLASSES, CODES)
    assert "columns that are neither input nor label: site (string)" in "".join(data.notes)


Column = tuple[Callable[[], Any], list[Any], list[float]]
#: Types of a column, its values, and the numbers that they are in the first and the last row.
NUMBERS: dict[str, Column] = {
    **{
        kind: (partial(value, kind), [0, 1, 1, 0, 1, 0, 0, 1], [0, 1])
        for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    "float16": (lambda: value("float16"), FLOATS, [0, 3.5]),
    "float32": (lambda: value("float32"), FLOATS, [0, 3.5]),
    "float64": (lambda: value("float64"), FLOATS, [0, 3.5]),
    "bool": (lambda: value("bool"), [True, False] * 4, [1, 0]),
    "decimal": (
        lambda: value("decimal128(5, 2)"),
        [Decimal("1.25")] * 7 + [Decimal(-3)],
        [1.25, -3],
    ),
    "fixed list": (
        lambda: hub().List(value("int32"), length=2),
        [[i, 7] for i in range(8)],
        [0, 7],
    ),
    "equal lists": (lambda: hub().List(value("float32")), [[i, 7] for i in range(8)], [0, 7]),
    "large list": (lambda: hub().LargeList(value("int8")), [[i, 7] for i in range(8)], [0, 7]),
    "array": (
        lambda: hub().Array2D((2, 2), "float32"),
        [[[i, 1], [2, 3]] for i in range(8)],
        [0, 3],
    ),
    "bytes": (lambda: hub().Array3D((1, 4, 5), "uint8"), PIXELS[:, None].tolist(), []),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("way", ["saved", "saved, lazy", "given", "fedgist.lazy", "two clients"])
def test_numbers_of_every_type_are_inputs(kind: str, way: str, tmp_path: Path) -> None:
    make, cells, ends = NUMBERS[kind]
    data = WAYS[way](labelled(v=(make(), cells), day=(value("timestamp[s]"), DAYS)), tmp_path / "d")
    x = rows_of(data)
    if kind == "bytes":  # an array of bytes is an image
        assert x.dtype == np.uint8
        assert np.array_equal(x[:, 0], PIXELS)
        return
    assert x.dtype == np.float32
    expected = np.array([float(n) for n in np.array(cells, dtype=object).ravel()])
    assert np.array_equal(x.ravel(), expected.astype(np.float32))
    assert x.shape[1:] == ((2, 2) if kind == "array" else (2,) if "list" in kind else (1,))
    assert [x[0].ravel()[0], x[-1].ravel()[-1]] == ends
    assert (data.classes, data.y.tolist()) == (CLASSES, CODES)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@drawn(
    kinds=st.lists(
        st.sampled_from([*NUMBERS, "string", "timestamp", "mapping", "other class"]),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    order=st.lists(st.integers(0, COUNT - 1), min_size=2, max_size=12),
    way=st.sampled_from([way for way in WAYS if not way.startswith("saved")]),
)
def test_drawn_columns_in_drawn_order_are_joined(
    tmp_path: Path, kinds: list[str], order: list[int], way: str
) -> None:
    further: dict[str, Column] = {
        "string": (lambda: value("string"), SITES, []),
        "timestamp": (lambda: value("timestamp[s]"), DAYS, []),
        "mapping": (lambda: {"a": value("int8")}, [{"a": 1}] * COUNT, []),
        "other class": (lambda: hub().ClassLabel(names=["m", "f"]), CODES, []),
    }
    columns = {kind: (NUMBERS | further)[kind] for kind in kinds}
    rows = labelled(**{name: (make(), cells) for name, (make, cells, _) in columns.items()})
    numeric = [name for name in kinds if name in NUMBERS]
    rows = rows.select(order)
    if not numeric:
        with pytest.raises(DataError, match="no column of images or numbers beside label; it has"):
            WAYS[way](rows, tmp_path)
        return
    data = WAYS[way](rows, tmp_path)
    flat = [
        np.array(
            [
                [float(n) for n in np.array(columns[name][1][row], dtype=object).ravel()]
                for row in order
            ]
        )
        for name in numeric
    ]
    x = rows_of(data)
    assert np.array_equal(
        x.reshape(len(order), -1), np.concatenate(flat, axis=1).astype(np.float32)
    )
    assert [data.classes[code] for code in data.y.tolist()] == [CLASSES[CODES[i]] for i in order]
    unused = [name for name in kinds if name not in NUMBERS]
    assert all(f"{name} (" in "".join(data.notes) for name in unused)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "ragged": (
        lambda: labelled(v=(hub().List(value("float32")), [[1.0] * (1 + i % 2) for i in range(8)])),
        r"the column 'v' must hold numbers, .*; row 1 .* holds \[2\] of it, row 0 .* \[1\]$",
    ),
    "no list": (
        lambda: labelled(v=(hub().List(value("float32")), [[1.0]] * 7 + [None])),
        r"the column 'v' must hold numbers, .*; row 7 \(counted from 0\) holds None",
    ),
    "none": (
        lambda: labelled(v=(value("int64"), [1, 2, None, 4, 5, 6, 7, 8])),
        r"the column 'v' lacks a number in row 2 .*: leave such rows out with filter, or state",
    ),
    "nan": (lambda: labelled(v=(value("float32"), [1.0, *[float("nan")] * 7])), "in row 1 "),
    "none in a list": (
        lambda: labelled(v=(hub().List(value("float32")), [[1.0, 2.0]] * 7 + [[1.0, None]])),
        "the column 'v' lacks a number in row 7 ",
    ),
    "no image": (
        lambda: labelled(image=(hub().Image(), [*pictures()[:3], None, *pictures()[4:]])),
        "the column 'image' holds no image in row 3 ",
    ),
    "two images": (
        lambda: labelled(a=(hub().Image(), pictures()), b=(hub().Image(), pictures())),
        "2 columns of images, a, b: name the one to use by image",
    ),
    "no inputs": (
        lambda: labelled(t=(value("string"), SITES), m=({"a": value("int8")}, [{"a": 1}] * COUNT)),
        r"beside label; it has t \(string\), m \(a mapping\): make numbers of a column with map",
    ),
    "no labels": (
        lambda: images().rename_column("label", "kind").cast_column("kind", value("int64")),
        "has the columns image, kind, and none of them is named label.*: name the column of label",
    ),
    "no label": (
        lambda: labelled(v=(value("int8"), range(8))).select([0]).map(lambda _: {"label": -1}),
        r"'label' are missing \(-1\) in every row, in 1 of 1 rows: .* by data\.test$",
    ),
    "text among labels": (
        lambda: hub().Dataset.from_dict({"v": [1.0, 2.0], "label": [0.5, 1.0]}),
        r"the labels 'label' must be whole numbers or text; row 0 .* holds 0\.5",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("way", ["saved", "saved, lazy", "given", "given, lazy", "mapping", "list"])
def test_what_cannot_be_used_is_named(case: str, way: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    with pytest.raises(DataError, match=message) as error:
        rows_of(WAYS[way](make(), tmp_path / "saved"))
    assert "\n" not in str(error.value)


def test_a_split_without_rows_is_named_and_no_test_rows_are_none() -> None:
    with pytest.raises(DataError, match="data: train has no rows"):
        given((images().select([]), images()))
    assert len(given((images(), images().select([]))).y_test) == 0


def test_missing_numbers_become_the_mean_of_the_training_rows() -> None:
    cells = [1.0, None, 5.0, None, None, None, None, None]
    data = given(labelled(v=(value("float32"), cells)), missing="mean")
    assert data.x[:3, 0].tolist() == [1, 3, 5]  # zero or the median of all cells would differ


def test_columns_are_named_by_the_recipe_and_clients_are_its_sites() -> None:
    rows = images(site=(value("string"), SITES), v=(value("int64"), range(COUNT)))
    rows = rows.rename_column("label", "kind")
    named = {"label": "kind", "features": ["v"], "client": "site"}
    recipe = {**SMALL, "data": named, "partition": {"name": "natural"}}
    with pytest.warns(UserWarning, match="neither input nor label: image"):
        result = fedgist.run(recipe, data=(rows, rows))
    parts = result.world.partition
    assert parts.names == ("a", "b", "c")
    assert [parts.train[i].tolist() for i in range(3)] == [[1, 4, 7], [0, 2, 3, 5], [6]]
    assert result.world.data.x[:, 0].tolist() == list(range(COUNT))
    lazily = fedgist.lazy(rows, label="site", image="image", client="kind", image_size=2)
    assert (lazily.classes, lazily.client_names) == (("a", "b", "c"), ("ill", "well"))
    assert lazily.input_shape == (1, 2, 2)


def test_a_mapping_of_splits_is_trained_and_tested_on() -> None:
    both = hub().DatasetDict(train=images(), test=images().select([6]), validation=images())
    data = given(both)
    assert (len(data.y), data.y_test.tolist()) == (COUNT, [CODES[6]])
    assert any(note.startswith("splits that are not read: validation") for note in data.notes)
    other = given(both, train="test", test="validation")
    assert (other.y.tolist(), other.y_test.tolist()) == ([CODES[6]], CODES)
    assert given({"train": images(), "test": images()}).y_test.tolist() == CODES
    for way in (given, fedgist.lazy):
        with pytest.raises(DataError, match=r"no split 'train'; it has a, b: name the splits by"):
            way(hub().DatasetDict(a=images(), b=images()))


def test_each_client_has_a_split_by_name() -> None:
    own = {
        "north": (images().select([0, 1, 2]), images().select([3])),
        "east": hub().DatasetDict(train=images(), test=images().select([4, 5])),
    }
    result = fedgist.run(SMALL, data=own)
    parts = result.world.partition
    assert parts.names == ("north", "east")  # in the order given
    assert [parts.train[i].tolist() for i in range(2)] == [[0, 1, 2], list(range(3, 11))]
    assert [parts.test[i].tolist() for i in range(2)] == [[0], [1, 2]]
    assert np.array_equal(rows_of(result.world.data)[3:, 0], PIXELS)
    share = {**SMALL, "data": {"test_fraction": 0.25}}
    held_out = fedgist.run(share, data={"a": images(), "b": images()}).world
    # a quarter of three and of five rows of a class: one each
    assert [len(held_out.partition.test[i]) for i in range(2)] == [2, 2]
    with pytest.raises(DataError, match="data names a client twice: 1, 1"):
        given({1: images(), "1": images()})
    with pytest.raises(DataError, match="data has a split for each client: leave out client"):
        given({"a": images()}, client="label")
    with pytest.raises(RecipeError, match="a data set for each client: leave out clients="):
        fedgist.run(SMALL, data=own, clients=[[0], [1]])


def test_class_names_of_clients_may_be_in_another_order() -> None:
    other = (
        images()
        .map(lambda row: {"label": 1 - row["label"]})
        .cast_column("label", hub().ClassLabel(names=list(CLASSES[::-1])))
    )
    data = given([images(), other])
    assert (data.classes, data.y.tolist()) == (CLASSES, CODES + CODES)  # not 1 - code


def test_held_out_rows_of_a_split_are_those_of_arrays() -> None:
    rows = labelled(v=(value("float32"), FLOATS))
    x, y = np.array(FLOATS)[:, None], np.array(CODES)
    pairs = [user_rows(data, Division(0.4)) for data in (rows, (x, y))]
    for (ours, mask), (theirs, other) in [pairs]:
        assert mask is not None
        assert other is not None
        assert mask.tolist() == other.tolist()
        assert torch.equal(ours.x, theirs.x)
        assert torch.equal(ours.y, theirs.y)


def test_shuffled_and_filtered_rows_keep_their_labels() -> None:
    rows = images(site=(value("string"), SITES))
    shuffled = given(rows.shuffle(seed=3), "lazy")
    order = rows.add_column("row", list(range(COUNT))).shuffle(seed=3)["row"]
    assert list(order) != list(range(COUNT))
    assert np.array_equal(rows_of(shuffled)[:, 0], PIXELS[list(order)])
    assert shuffled.y.tolist() == [CODES[row] for row in order]
    kept = [row for row in range(COUNT) if SITES[row] == "b"]
    filtered = fedgist.lazy(rows.filter(lambda row: row["site"] == "b"))
    assert np.array_equal(rows_of(filtered)[:, 0], PIXELS[kept])
    subset = given(Subset(Subset(rows, [5, 1, 2]), [2, 0]))
    assert np.array_equal(rows_of(subset)[:, 0], PIXELS[[2, 5]])


def test_images_that_are_not_decoded_or_differ() -> None:
    stored = images().cast_column("image", hub().Image(decode=False))
    assert np.array_equal(rows_of(given(stored, "lazy"))[:, 0], PIXELS)
    turned = [
        *pictures()[:4],
        *(image.transpose(Image.Transpose.ROTATE_90) for image in pictures()[4:]),
    ]
    uneven = given(labelled(image=(hub().Image(), turned)))
    assert uneven.input_shape == (1, 4, 5)
    assert "images differ in size, and are resized to 4x5 pixels" in "".join(uneven.notes)
    colour = [*pictures()[:7], pictures()[7].convert("RGB")]
    both = given((labelled(image=(hub().Image(), colour)), images()))
    assert both.x.shape[1] == both.x_test.shape[1] == 3
    assert np.array_equal(both.x_test[:, 2].numpy(), PIXELS)


def test_columns_that_a_format_hides_are_no_inputs() -> None:
    rows = labelled(v=(value("int8"), range(8)), w=(value("int8"), range(8)))
    data = given(rows.with_format("numpy", columns=["v", "label"]))
    assert data.input_shape == (1,)
    assert given(rows.with_format("torch", columns=["v"], output_all_columns=True)).input_shape == (
        2,
    )


def scaled(batch: dict[str, list[Any]]) -> dict[str, Any]:
    pixels = [torch.from_numpy(np.array(image)).float()[None] / 255 for image in batch["image"]]
    return {"pixels": pixels, "label": batch["label"], "path": ["p"] * len(pixels)}


def noisy(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "pixels": [x + torch.rand(()) for x in scaled(batch)["pixels"]],
        "label": batch["label"],
    }


@pytest.mark.parametrize("read", ["auto", "once", "lazy"])
def test_a_transform_makes_the_rows(read: Any) -> None:
    data = given(images().with_transform(scaled), read)
    assert (data.lazy is not None) == (read == "lazy")
    assert np.array_equal(rows_of(data)[:, 0], (PIXELS / np.float32(255)).astype(np.float32))
    assert (data.classes, data.y.tolist()) == (CLASSES, CODES)
    assert "path (str)" in "".join(data.notes)


def test_a_random_transform_is_drawn_anew_and_repeats_with_its_seed() -> None:
    before = torch.random.get_rng_state()
    data = given(images().with_transform(noisy), "auto")
    assert torch.equal(before, torch.random.get_rng_state())
    assert data.lazy is not None
    assert "random transforms are drawn anew at each read" in "".join(data.how_read)
    rows = torch.tensor([0, 0, 3])
    first, second = (data.lazy.read(rows, torch.tensor([1, 2, 1])) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    once = given(images().with_transform(noisy), "once")
    assert "random transforms are drawn only once" in "".join(once.how_read)


def test_labels_that_a_transform_changes_are_those_of_its_rows() -> None:
    def swapped(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {**scaled(batch), "label": [1 - code for code in batch["label"]]}

    def texts(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"x": scaled(batch)["pixels"], "y": [f"class {code}" for code in batch["label"]]}

    assert given(images().with_transform(swapped)).y.tolist() == [1 - code for code in CODES]
    data = given(images().with_transform(texts))
    assert (data.classes, data.y.tolist()) == (("class 0", "class 1"), CODES)

    def broken(batch: dict[str, list[Any]]) -> dict[str, Any]:
        raise ZeroDivisionError("by the user")

    with pytest.raises(DataError, match=r"data: row 0 .* cannot be read: by the user"):
        given(images().with_transform(broken))


def test_rows_that_come_in_turn_are_refused_with_a_cure() -> None:
    stream = images().to_iterable_dataset()
    cure = r"Hugging Face IterableDataset, whose rows .*: load it without streaming=True, or keep"
    for data in (stream, (stream, stream), [stream], {"a": stream}, stream.with_format("torch")):
        with pytest.raises(DataError, match=cure):
            given(data)
        with pytest.raises(DataError, match=cure):
            fedgist.lazy(data)
    with pytest.raises(DataError, match="IterableDatasetDict"):
        given(hub().IterableDatasetDict(train=stream))
    kept = hub().Dataset.from_list(list(stream.take(3)), features=stream.features)  # the cure
    assert given(kept).y.tolist() == CODES[:3]


def test_what_is_mixed_or_stated_for_other_data_is_refused() -> None:
    arrays = np.zeros((4, 2)), [0, 1, 0, 1]
    for data in ((images(), arrays[0]), [images(), arrays], (images(), images(), images())):
        with pytest.raises(DataError, match="mixes Hugging Face splits with other objects"):
            given(data)
    with pytest.raises(DataError, match=r"data\.image = 'image' is about Hugging Face data sets"):
        fedgist.run({**SMALL, "data": {"image": "image"}}, data=arrays)
    pairs = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(
        DataError, match="label = 'y' is about Hugging Face data sets, and the data"
    ):
        fedgist.lazy(pairs, label="y")
    with pytest.raises(DataError, match="targets= is about torch data sets"):
        fedgist.lazy(images(), targets=CODES)
    with pytest.raises(RecipeError, match=r"data\.imgae: unknown key .*image"):
        fedgist.run({**SMALL, "data": {"imgae": "image"}}, data=images())
    with pytest.raises(
        DataError, match="data: test: the column 'image' holds int64, and images in the first split"
    ):
        given((images(), images().remove_columns("image").add_column("image", CODES)))


def test_other_targets_have_the_labels_of_their_columns(tmp_path: Path) -> None:
    several = hub().List(hub().ClassLabel(names=["cat", "dog", "owl"]))
    mask = (PIXELS % 3).astype(np.uint8)
    rows = labelled(
        image=(hub().Image(), pictures()),
        tags=(several, [[0, 2], [], [1], [0, 1, 2], [2], [0], [1], [1]]),
        size=(value("float32"), [None, *FLOATS[1:]]),
        v=(value("int8"), [3] * COUNT),
        mask=(hub().Image(), pictures(mask)),
        area=(hub().Array2D((4, 5), "int8"), mask.tolist()),
    )
    tags = saved(rows, tmp_path / "t", target="labels", image="image", label="tags")
    assert tags.classes == ("cat", "dog", "owl")
    assert tags.y[:4].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]
    sizes = fedgist.lazy(rows, target="numbers", image="image", label=["size", "v"])
    assert sizes.classes == ("size", "v")
    assert sizes.y[1:].tolist() == [[n, 3] for n in FLOATS[1:]]
    assert bool(sizes.y[0, 0].isnan())
    for column in ("mask", "area"):
        pixels = fedgist.lazy(rows, target="pixels", image="image", label=column)
        assert np.array_equal(pixels.y.numpy(), mask)


def test_a_run_on_lazy_splits_is_that_in_memory_and_reads_in_workers(tmp_path: Path) -> None:
    rows = images()
    moments = {"mean": [0.5], "std": [0.25]}
    recipe = {**SMALL, "clients": {"num_clients": 2}, "partition": {"name": "iid"}}
    once, lazy = (
        fedgist.run({**recipe, "data": {"read": read, **moments}}, data=(rows, rows))
        for read in ("once", "lazy")
    )
    lines = [{k: v for k, v in run.rounds[0].items() if "time/" not in k} for run in (once, lazy)]
    assert lines[0] == lines[1]
    several = {**recipe, "engine": {"workers": 2, "cohort_size": 1}}
    again = fedgist.run({**several, "data": {"read": "lazy", **moments}}, data=(rows, rows))
    key = "eval/client/loss_mean"
    assert again.rounds[0][key] == pytest.approx(once.rounds[0][key], rel=1e-4)


def test_a_resumed_run_wants_the_same_rows(tmp_path: Path) -> None:
    rows = images()
    rows.save_to_disk(tmp_path / "saved")
    stored = hub().load_from_disk(str(tmp_path / "saved"))
    recipe = {**SMALL, "clients": {"num_clients": 2}, "partition": {"name": "iid"}}
    recipe |= {"data": {"read": "lazy"}}
    fedgist.run(recipe, data=(stored, stored), out=tmp_path / "run")
    fedgist.run(data=(stored, stored), out=tmp_path / "run", resume=True, rounds=2)
    swapped = [3, 1, 2, 0, 4, 5, 6, 7]  # other images in two places, with the same labels
    assert [CODES[row] for row in swapped] == CODES
    other = stored.select(swapped)
    with pytest.raises(ValueError, match="data"):
        fedgist.run(data=(other, stored), out=tmp_path / "run", resume=True, rounds=3)


def test_an_alpha_channel_that_is_left_out_is_counted() -> None:
    pictures = [Image.new(mode, (4, 5)) for mode in ("RGB", "RGBA", "RGBA", "RGB")]
    rows = hub().Dataset.from_dict(
        {"image": pictures, "label": [0, 1, 0, 1]},
        features=hub().Features(image=hub().Image(), label=hub().ClassLabel(names=["a", "b"])),
    )
    assert "images that lose the alpha channel, of 4 looked at: 2" in given(rows).notes
