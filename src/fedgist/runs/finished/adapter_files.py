"""Files of trained adapters in the format of peft: a matrix pair per layer, and the head.

The format is described at https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from fedgist.core.nets.adapters import A, Adapted, B, adapted_layers
from fedgist.errors import RecipeError
from fedgist.runs.files import atomic_files as files
from fedgist.runs.finished.trained_models import ClientModel

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of every array's name
_MATRICES = {A: "lora_A.weight", B: "lora_B.weight"}


def export_adapters(model: ClientModel, folder: Path) -> None:
    """Write a client's adapters and its head into a folder, as peft reads them.

    The weights of the frozen body are not in these files. A program that reads them needs the
    pretrained model as well.

    Raises
    ------
    RecipeError
        If the model has no adapters.
    """
    layers = adapted_layers(model.trained.arch)
    if not layers:
        raise RecipeError(
            f"model {model.arch.name} has no adapters (model.adapters): export the whole model, "
            "without --adapters"
        )
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} is a file: adapters are written into a folder")
    others = _learned_whole(model)
    arrays = {
        f"{_PREFIX}{layer}.{name}": model.trained.params[f"{layer}.{part}"]
        for layer in layers
        for part, name in _MATRICES.items()
    }
    arrays |= {f"{_PREFIX}{name}": array for name, array in others.items()}
    whole = {name: array.detach().contiguous() for name, array in arrays.items()}
    settings = _settings(layers, others)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / WEIGHTS, safetensors.torch.save(whole, {"format": "pt"}))
    files.write(folder / CONFIG, json.dumps(settings, indent=2).encode())


def _settings(layers: Mapping[str, Adapted], others: Iterable[str]) -> dict[str, object]:
    """Return peft's settings of adapters in these layers; ``others`` are whole arrays by name."""
    adapters = next(iter(layers.values())).settings
    return {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # peft compares a text with whole names, and the names in a list also with their ends
        "target_modules": "|".join(re.escape(name) for name in layers),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in others}) or None,
    }


def _learned_whole(model: ClientModel) -> dict[str, Tensor]:
    """Return the arrays that learn as a whole: those of the head, and of a projection before it.

    The head of an encoder is no layer of the user's model, so its arrays are left out.
    """
    arch, whole = model.trained.arch, model.trained.arch.frozen
    if whole is None or arch.projects:
        return {}
    return {name: array for name, array in model.trained.params.items() if name in whole.params}
