"""The recognizer of text lines in the package rapidocr-onnxruntime, an encoder of characters.

``pip install --no-deps rapidocr-onnxruntime && pip install onnx onnxruntime``. Its weights are
PaddleOCR's (Apache-2.0, 11 MB). A square image has six columns of 120 numbers, which the last layer
reads: 720 features. Inputs are images from 0 to 1 (``data.normalize = "none"``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import distribution

import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional

MODEL = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
SIDE = 48  # the height of the lines that it has learnt
COLUMNS, FEATURES = "transpose_51.tmp_0", 720
IMAGE = 3  # dimensions


@functools.cache
def session() -> onnxruntime.InferenceSession:
    """Return the program up to the columns; it has no threads of its own, so processes may fork."""
    path = distribution("rapidocr-onnxruntime").locate_file(MODEL)  # an import would need OpenCV
    program = onnx.load(str(path))
    del program.graph.output[:]
    program.graph.output.append(onnx.helper.make_empty_tensor_value_info(COLUMNS))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(program.SerializeToString(), options)


@torch.library.custom_op("rapidocr::features", mutates_args=())
def features(x: Tensor) -> Tensor:
    """Return the features (batch, 720) of images (batch, 3, 48, 48) from -1 to 1."""
    (columns,) = session().run([COLUMNS], {"x": x.numpy()})
    return torch.from_numpy(columns).flatten(1)


@features.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(len(x), FEATURES)


@features.register_vmap
def _(info: object, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
    """Encode the images of stacked clients as one batch."""
    del info
    x = x.movedim(in_dims[0], 0)
    return features(x.flatten(0, 1).contiguous()).unflatten(0, x.shape[:2]), 0


class Recognizer(nn.Module):
    """The program as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (batch, 720) of images (batch, 1 or 3, height, width)."""
        x = functional.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False)
        return features((2 * x - 1).expand(-1, 3, -1, -1).contiguous())


def recognizer(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return the encoder with a new head."""
    if len(input_shape) != IMAGE or input_shape[0] not in {1, 3}:
        raise ValueError(f"the recognizer takes images, not inputs of {list(input_shape)}")
    return nn.Sequential(Recognizer(), nn.Linear(FEATURES, num_classes))
