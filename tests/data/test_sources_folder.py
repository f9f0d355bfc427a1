"""Folders of images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError

RNG = np.random.default_rng(0)


def picture(
    path: Path, *, grey: bool = False, size: tuple[int, int] = (5, 6), mode: str | None = None
) -> np.ndarray:
    array = RNG.integers(0, 256, size if grey else (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return array


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test(tmp_path: Path, test: str) -> None:
    first = picture(tmp_path / "train" / "dog" / "b.png")
    second = picture(tmp_path / "train" / "cat" / "z.PNG")
    third = picture(tmp_path / "train" / "cat" / "a.bmp")
    only = picture(tmp_path / test / "dog" / "a.png")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "dog" / "._b.png").write_text("left by another system")
    (tmp_path / "train" / ".cache").mkdir()
    data = load_data("folder", path=tmp_path)
    assert (data.classes, data.y.tolist(), data.y_test.tolist()) == (("cat", "dog"), [0, 0, 1], [1])
    assert (data.x.dtype, data.scale, data.name) == (torch.uint8, 255.0, tmp_path.name)
    assert np.array_equal(data.x.numpy(), np.stack([third, second, first]).transpose(0, 3, 1, 2))
    assert np.array_equal(data.x_test.numpy(), only.transpose(2, 0, 1)[None])
    assert data.mean == pytest.approx((data.x.numpy() / 255).mean((0, 2, 3)))


@pytest.mark.parametrize("top", ["", "train"])
def test_held_out(tmp_path: Path, top: str) -> None:
    for label in "12":
        for number in range(10):
            picture(tmp_path / top / f"{label}0" / f"{number}.png", grey=True)
    data = load_data("folder", path=str(tmp_path), test_fraction=0.3)
    assert (data.x.shape, data.x_test.shape) == ((14, 1, 5, 6), (6, 1, 5, 6))
    assert torch.bincount(data.y_test).tolist() == [3, 3]


def test_one_colour_image_makes_all_three_channels(tmp_path: Path) -> None:
    grey = picture(tmp_path / "a" / "1.png", grey=True)
    picture(tmp_path / "a" / "2.png")
    data = load_data("folder", path=tmp_path, test_fraction=0)
    assert np.array_equal(data.x[0].numpy(), np.stack([grey] * 3))


@pytest.mark.parametrize(("image_size", "shape"), [(None, (5, 6)), (4, (4, 4)), ([3, 7], (3, 7))])
def test_sizes(tmp_path: Path, image_size: object, shape: tuple[int, int]) -> None:
    for name, size in (("1.jpg", (5, 6)), ("2.jpeg", (9, 9)), ("3.webp", (2, 3))):
        picture(tmp_path / "a" / name, size=size)
    assert load_data(
        "folder", path=tmp_path, image_size=image_size, test_fraction=0
    ).input_shape == (
        3,
        *shape,
    )


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("LA", 1), ("P", 3), ("RGBA", 3), ("L", 1)]
)
def test_modes(tmp_path: Path, mode: str, channels: int) -> None:
    picture(tmp_path / "a" / "1.png", mode=mode)
    assert load_data("folder", path=tmp_path, test_fraction=0).input_shape == (channels, 5, 6)


def test_a_palette_with_transparency(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    image = Image.fromarray(RNG.integers(0, 256, (5, 6, 3), dtype=np.uint8)).convert("P")
    image.save(tmp_path / "a" / "1.png", transparency=bytes(range(256)))
    assert load_data("folder", path=tmp_path, test_fraction=0).input_shape == (3, 5, 6)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no class folders"):
        load_data("folder", path=tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"cat holds no images \(\.png, \.jpg"):
        load_data("folder", path=tmp_path)
    picture(tmp_path / "cat" / "1.png")
    for size in (0, -1, [3], [3, 0], [1, 2, 3]):
        with pytest.raises(DataError, match="one positive number is needed, or"):
            load_data("folder", path=tmp_path, image_size=size)
    (tmp_path / "cat" / "2.png").write_text("no image")
    with pytest.raises(
        DataError,
        match=r"cat/2\.png cannot be read as an image; it may be corrupt: cannot identify",
    ):
        load_data("folder", path=tmp_path)
    Image.fromarray(np.zeros((3, 3), np.uint16)).save(tmp_path / "cat" / "2.png")
    with pytest.raises(DataError, match=r"cat/2\.png has more than 8 bits per pixel \(mode I;16\)"):
        load_data("folder", path=tmp_path)


def test_an_unknown_test_class(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "1.png")
    picture(tmp_path / "test" / "cats" / "1.png")
    with pytest.raises(
        DataError, match="the test label 'cats' is not among the training labels: cat"
    ):
        load_data("folder", path=tmp_path)


def test_pillow_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(
        DataError, match=r"reading images needs pillow: pip install 'fedgist\[images\]'"
    ):
        load_data("folder", path=tmp_path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["png", "jpeg", "bmp", "webp"]))
def test_a_truncated_or_changed_image_is_an_error_or_data(
    tmp_path: Path, data: st.DataObject, kind: str
) -> None:
    file = io.BytesIO()
    Image.fromarray(np.arange(90, dtype=np.uint8).reshape(5, 6, 3)).save(file, kind)
    content = bytearray(file.getvalue())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "a" / f"1.{kind}"
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.iterdir():
        old.unlink()
    path.write_bytes(content)
    try:
        load_data("folder", path=tmp_path, image_size=4, test_fraction=0)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("own_tests", [False, True])
def test_domains_are_clients(tmp_path: Path, *, own_tests: bool) -> None:
    # rejects labels that are domains, and images under the client of another domain
    drawn = {}
    for domain, count in (("sketch", 3), ("photo", 2)):
        for label in ("dog", "cat") if domain == "photo" else ("cat",):
            for number in range(count):
                below = (
                    tmp_path / domain / "train" / label if own_tests else tmp_path / domain / label
                )
                image = picture(below / f"{number}.png")
                drawn[image.tobytes()] = (domain, label)
        if own_tests:
            drawn[picture(tmp_path / domain / "test" / "cat" / "t.png").tobytes()] = (domain, "cat")
    how: dict[str, Any] = {} if own_tests else {"test_fraction": 0.5}
    data = load_data("folder", path=tmp_path, domains=True, **how)
    assert data.client_names == ("photo", "sketch")
    assert data.classes == ("cat", "dog")
    splits = (data.x, data.y, data.clients), (data.x_test, data.y_test, data.clients_test)
    seen = 0
    for x, y, clients in splits:
        assert clients is not None
        for image, label, client in zip(x, y, clients, strict=True):
            found = drawn[image.permute(1, 2, 0).contiguous().numpy().tobytes()]
            assert found == (data.client_names[int(client)], data.classes[int(label)])
            seen += 1
    assert seen == len(drawn)


def test_domains_need_folders_and_tests_of_all_or_of_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folders of domains"):
        load_data("folder", path=tmp_path, domains=True)
    picture(tmp_path / "a" / "train" / "cat" / "1.png")
    picture(tmp_path / "a" / "test" / "cat" / "1.png")
    picture(tmp_path / "b" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"'a' has test images of its own, and 'b' not"):
        load_data("folder", path=tmp_path, domains=True)
    picture(tmp_path / "c" / "1.png")
    (tmp_path / "a" / "test" / "cat" / "1.png").unlink()
    with pytest.raises(DataError):
        load_data("folder", path=tmp_path, domains=True)
