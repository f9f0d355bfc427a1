"""Files of trained models give the predictions of the models, without fedgist."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors
import torch

import fedgist
from fedgist.core.method import Method
from fedgist.errors import InputError
from fedgist.methods import METHODS
from fedgist.runs.finished.model_files import DESCRIPTION, export, what_lacks
from fedgist.runs.finished.trained_models import ClientModel
from fedgist.testing.small_worlds import blobs, public_rows, rows
from method_objects import TRAINS, each

QUICK: dict[str, Any] = {
    "model": {"hidden": [5]},
    "train": {"num_rounds": 2, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3},
}
DEEP = {"hidden": [7, 5]}  # below the two layers that some methods keep to a client
ONNX_READER = "onnxruntime"
# whose clients predict in a way of their own, and one of those that do not: onnx takes seconds
BY_ITSELF = [n for n, m in METHODS.items() if n == "fedavg" or m.predict is not Method.predict]
# besides: one whose clients keep layers, one of pools, one with a head of the server's
OTHERS = ("fedrep", "periodic_codist", "fedlog")
IN_POOLS = ("periodic_codist", "merged_codist")  # these have several models


def trained(method: str, **sections: Any) -> ClientModel:
    short = {"flesd": {"epochs": 2}, "merged_codist": {"steps": 4}}
    options = {"distillation": short[method]} if method in short else {}
    recipe = QUICK | {"method": {"name": method, **options}} | sections
    recipe["train"] = recipe["train"] | TRAINS.get(method, {})
    if method in IN_POOLS:
        model = {"model": "mlp", **recipe.pop("model")}
        recipe["clients"] = {"pools": {"all": model, "some": model | {"clients": [0, 2]}}}
    return fedgist.run(recipe, data=blobs(), clients=rows(), public=public_rows()).model(2)


def from_pt2(path: Path, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = torch.export.load(path).module()(x)
    return logits


def from_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    reader: Any = importlib.import_module(ONNX_READER)
    session = reader.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.float().numpy()})[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", each(METHODS, (*BY_ITSELF, *OTHERS)))
@pytest.mark.filterwarnings("ignore:client . has too few rows for a local step")
def test_files_give_the_logits_of_every_methods_models(method: str, tmp_path: Path) -> None:
    model = trained(method, model=DEEP)
    export(model, tmp_path / "m.pt2")
    if method in BY_ITSELF:
        export(model, tmp_path / "m.onnx")
    for count in (1, 7):
        x = blobs().x_test[:count]
        torch.testing.assert_close(from_pt2(tmp_path / "m.pt2", x), model(x))
        if method in BY_ITSELF:
            torch.testing.assert_close(
                from_onnx(tmp_path / "m.onnx", x), model(x), atol=1e-5, rtol=1e-5
            )


@pytest.mark.slow
def test_a_file_holds_no_arrays_but_those_that_predictions_use(tmp_path: Path) -> None:
    # seen: what the server had sent was in the file, used or not
    model = trained("fedavg")
    export(model, tmp_path / "m.pt2")
    state = torch.export.load(tmp_path / "m.pt2").state_dict
    sizes = {model.names[slot]: state[slot].numel() for slot in model.names}
    assert {name: size for name, size in sizes.items() if size == 0} == {
        name: 0 for name in sizes if name.startswith("down/")
    }
    assert sizes["params/1.weight"] == 6 * 5
    assert all(model.get_buffer(slot).numel() for slot in model.names)  # the model has them still


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.uint8, torch.float64, torch.float32, torch.int64])
def test_a_program_takes_any_type_of_numbers(kind: torch.dtype, tmp_path: Path) -> None:
    # seen: it took float32 alone
    result = fedgist.run(QUICK | {"data": {"train_rows": 100}})
    x = result.world.data.x_test[:5]
    model = result.model(0)
    export(model, tmp_path / "m.pt2")
    torch.testing.assert_close(from_pt2(tmp_path / "m.pt2", x.to(kind)), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:missing numbers that the mean:UserWarning")
@pytest.mark.parametrize("far", [0.0, 1.7e9])
def test_missing_numbers_are_replaced_in_files_as_in_the_run(far: float, tmp_path: Path) -> None:
    # seen: the files gave NaN for a row that the run predicted
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": far + rng.normal(50, 9, 60), "bmi": rng.normal(25, 3, 60)})
    frame["town"], frame["y"] = np.array(["a", "b"])[np.arange(60) % 2], frame["bmi"] > 25
    frame.loc[::7, ["age", "bmi"]] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "label": "y", "missing": "mean"}
    result = fedgist.run(QUICK | {"data": data, "clients": {"num_clients": 1}})
    model, (x, fill) = result.model(0), (result.world.data.x_test[:6], result.world.data.fill)
    assert fill is not None
    gaps = torch.tensor(rng.random((6, x.shape[1])) < 0.4) & torch.tensor(
        [True, True, False, False]
    )
    whole, holed = torch.where(gaps, fill, x), x.masked_fill(gaps, torch.nan)
    readers = {"m.pt2": from_pt2} | ({} if far else {"m.onnx": from_onnx})  # it takes float32 alone
    for name, read in readers.items():
        export(model, tmp_path / name)
        torch.testing.assert_close(read(tmp_path / name, holed), model(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet5", "resnet9"])
def test_convolutions_norms_and_dropout(name: str, tmp_path: Path) -> None:
    options = {"width": 8} if name == "resnet9" else {}
    recipe = QUICK | {"model": {"name": name, **options}, "data": {"train_rows": 60}}
    result = fedgist.run(recipe | {"train": {"num_rounds": 1}})
    x, model = result.world.data.x_test[:3], result.model(0)
    export(model, tmp_path / "m.pt2")
    torch.testing.assert_close(from_pt2(tmp_path / "m.pt2", x), model(x), atol=1e-5, rtol=1e-5)
    export(model, tmp_path / "m.onnx")
    torch.testing.assert_close(from_onnx(tmp_path / "m.onnx", x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_compiled_convolutions_stay_out_of_programs(tmp_path: Path) -> None:
    # seen: neither format could be written once `fedgist compile` had been called
    plan = {"cohort_size": 2, "kernels": {"conv1": "compiled", "conv2": "compiled"}}
    recipe = QUICK | {"model": {"name": "lenet5"}, "data": {"train_rows": 60}}
    result = fedgist.run(recipe | {"engine": {"workers": 1, "plans": {"lenet5": plan}}})
    x, model = result.world.data.x_test[:3], result.model(0)
    for name, read in (("m.pt2", from_pt2), ("m.onnx", from_onnx)):
        export(model, tmp_path / name)
        torch.testing.assert_close(read(tmp_path / name, x), model(x), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def of_a_frame() -> ClientModel:
    frame = pd.DataFrame({"age": [30.0, 40.0, 50.0, 60.0], "town": list("abab")})
    recipe = QUICK | {"evaluate": {"train": True}}  # there are no test rows
    labels = ["well", "ill"] * 2
    return fedgist.run(recipe, data=(frame, labels), clients=[[0, 1], [2, 3]]).model(1)


def check_description(texts: dict[str, Any]) -> None:
    assert texts["classes"] == ["ill", "well"]
    assert texts["columns"] == {"age": None, "town": ["a", "b"]}
    assert texts["inputs"] == ["age", "town=a", "town=b"]
    assert texts["input_shape"] == [3]


def test_files_name_classes_and_columns(of_a_frame: ClientModel, tmp_path: Path) -> None:
    export(of_a_frame, tmp_path / "m.pt2")
    extra = {DESCRIPTION: ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    check_description(json.loads(extra[DESCRIPTION]))
    export(of_a_frame, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        texts = file.metadata()
    assert (texts["architecture"], texts["format"]) == ("mlp", "pt")
    lists = {k: json.loads(v) for k, v in texts.items() if v.startswith(("[", "{"))}
    check_description(lists)


@pytest.mark.slow
def test_onnx_names_classes_and_columns(of_a_frame: ClientModel, tmp_path: Path) -> None:
    export(of_a_frame, tmp_path / "m.onnx")
    reader: Any = importlib.import_module(ONNX_READER)
    session = reader.InferenceSession(tmp_path / "m.onnx")
    texts = session.get_modelmeta().custom_metadata_map
    assert texts["architecture"] == "mlp"
    check_description({k: json.loads(v) for k, v in texts.items() if v.startswith(("[", "{"))})


def test_a_frame_is_predicted_by_name(of_a_frame: ClientModel) -> None:
    frame = pd.DataFrame({"town": ["a", "?"], "age": [41, 42], "more": [0, 0]})
    names = of_a_frame.predict(frame)
    x = np.array([[41, 1, 0], [42, 0, 0]], dtype=np.float32)
    assert names == of_a_frame.predict(x)
    assert names == [("ill", "well")[i] for i in of_a_frame(torch.as_tensor(x)).argmax(1)]
    with pytest.raises(InputError, match="x has no column 'age'; it has town"):
        of_a_frame.predict(frame[["town"]])


def test_what_cannot_be_written_is_said(
    of_a_frame: ClientModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError, match=r"suffix of the file .* '.bin'.*\.pt2, \.safetensors, \.onnx"
    ):
        export(of_a_frame, tmp_path / "m.bin")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError, match=r"onnx and onnxscript: pip install 'fedgist\[onnx\]'"):
        export(of_a_frame, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "lacks"),
    [
        ({"name": "fedavg"}, ""),
        ({"name": "fedlog"}, ""),
        ({"name": "fedproto"}, "predicts with what the server sent, too"),
        ({"name": "analytic", "expand": 0}, ""),
        ({"name": "analytic", "expand": 3}, "predicts with what the server sent, too"),
        ({"name": "analytic", "head": "qda"}, "predicts with what the server sent, too"),
    ],
)
def test_a_file_of_parameters_says_what_it_lacks(method: dict[str, Any], lacks: str) -> None:
    recipe = QUICK | {"method": method, "model": {"name": "logistic"}}
    model = fedgist.run(recipe, data=blobs(), clients=rows()).model(0)
    said = what_lacks(model, Path("m.safetensors"))
    assert lacks in said
    assert bool(said) == bool(lacks)
    assert what_lacks(model, Path("m.pt2")) == ""
