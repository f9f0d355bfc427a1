"""Files of trained models that need no fedgist: .pt2, .safetensors and .onnx."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch.export import ExportedProgram

from fedgist.data.sources.optional_packages import need
from fedgist.errors import RecipeError, one_of
from fedgist.runs.files import atomic_files as files
from fedgist.runs.finished.trained_models import NO_PROBABILITIES, ClientModel

DESCRIPTION = "fedgist.json"  # the file in a .pt2 that describes the model
_ONNX = "writing .onnx needs onnx and onnxscript: pip install 'fedgist[onnx]'"


def export(model: ClientModel, path: Path | str) -> None:
    """Write a client's model to a file.

    ``.pt2`` and ``.onnx`` hold the program: it takes any number of raw examples and returns logits,
    an encoder's features.
    ``.safetensors`` holds parameters and buffers. Each says what the classes and the inputs are
    called.

    Raises
    ------
    InputError
        If ``path`` has another suffix, or a package is missing.
    """
    file = Path(path)
    files.write(file, FORMATS[check_format(file)](model))


def check_format(path: Path) -> str:
    """Return the suffix of a file to write a model to.

    Raises
    ------
    InputError
        If no model can be written to such a file, or a package is missing.
    """
    try:
        suffix = one_of(path.suffix, FORMATS, "suffix of the file to export to")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if suffix == ".onnx":
        for package in ("onnx", "onnxscript"):
            need(package, _ONNX)
    return suffix


def what_lacks(model: ClientModel, path: Path) -> str:
    """Return what a file of parameters lacks of a model's predictions, in words; else nothing."""
    if path.suffix != ".safetensors" or model.is_network:
        return ""
    return (
        f"{path} holds the network alone: the model predicts with what the server sent, too, as "
        "files in .pt2 and .onnx do"
    )


def description(model: ClientModel) -> dict[str, Any]:
    """Return the description in the file: names of classes, and the normalization of inputs.

    ``inputs`` names each number of an example, and ``columns`` the table's own columns with their
    categories; both are empty where the data has none. ``ranges`` are the columns' usual ranges,
    if any: stated, or rounded quantiles. The program replaces missing numbers by ``fill``, if they
    were allowed, and normalizes by itself. An encoder tells no ``classes``.
    """
    data = model.data
    return {
        "architecture": model.arch.name,
        "head": model.arch.head,
        "outputs": outputs(model),
        "target": model.target,
        "classes": [] if model.arch.projects else list(model.output_names),
        "columns": {
            c.name: None if c.categories is None else list(c.categories) for c in data.columns
        },
        "ranges": {c.name: list(c.usual) for c in data.columns if c.usual},
        "inputs": [name for column in data.columns for name in column.inputs],
        "input_shape": list(data.input_shape),
        "scale": data.scale,
        "mean": list(data.mean),
        "std": list(data.std),
        "fill": None if data.fill is None else data.fill.tolist(),
    }


def outputs(model: ClientModel) -> str:
    """Return the name of a program's output: ``logits``, ``numbers``, or an encoder's ``features``.

    Numbers are in their own unit.
    """
    if model.arch.projects:
        return "features"
    return "numbers" if model.target in NO_PROBABILITIES else "logits"


def _as_texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in table.items()}


def _arrays(model: ClientModel) -> bytes:
    arrays = {
        name.partition("/")[2]: model.get_buffer(slot).contiguous()
        for slot, name in model.names.items()
        if name.startswith(("params/", "buffers/"))
    }
    return safetensors.torch.save(arrays, _as_texts({**description(model), "format": "pt"}))


def _program(model: ClientModel) -> bytes:
    program = _traced(model)
    # the first operation makes float32 of what comes: any type of numbers will do
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # noqa: SLF001
            program.graph.erase_node(node)
    program.graph_module.recompile()
    buffer = io.BytesIO()
    extra = {DESCRIPTION: json.dumps(description(model))}
    torch.export.save(program, buffer, extra_files=extra)
    return buffer.getvalue()


def _onnx(model: ClientModel) -> bytes:
    with _quiet():
        made = torch.onnx.export(
            _traced(model), input_names=["x"], output_names=[outputs(model)], verbose=False
        )
    assert made is not None  # only the old exporter returns nothing
    made.model.metadata_props.update(_as_texts(description(model)))
    blob: bytes = made.model_proto.SerializeToString()
    return blob


def _traced(model: ClientModel) -> ExportedProgram:
    """Return the model's program, with the arrays that its predictions use and no others.

    What else the server sent, such as other clients' observations, stays out of the file.
    """
    model = model.in_own_units()
    program = _trace(model)
    names = program.graph_signature.inputs_to_buffers
    unused = {
        names[node.name] for node in program.graph.nodes if node.name in names and not node.users
    }
    return _trace(model.without(unused)) if unused else program


def _trace(model: ClientModel) -> ExportedProgram:
    kind = torch.int64 if model.arch.words else model.number
    example = torch.zeros(2, *model.data.input_shape, dtype=kind)
    batch = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model.eval(), (example,), dynamic_shapes=batch)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's messages about torchvision and about itself while it writes ONNX."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FORMATS: Mapping[str, Callable[[ClientModel], bytes]] = MappingProxyType(
    {".pt2": _program, ".safetensors": _arrays, ".onnx": _onnx}
)
