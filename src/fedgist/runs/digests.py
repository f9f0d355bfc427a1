"""Digests: SHA-256 of texts, and of arrays with their names, types and shapes.

Of large arrays a sample may be taken: the first and the last bytes, and blocks drawn by a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedgist.core import random

BLOCKS, BLOCK = 4096, 4096  # of an array that is sampled: how many, of how many bytes


def of_text(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def of_arrays(arrays: Mapping[str, Tensor], key: Tensor | None = None) -> str:
    """Return the digest of arrays of any shape by name; with a key, of samples of them."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name].detach().cpu().contiguous()
        state.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        for piece in _pieces(array, key, name):
            state.update(piece)
    return state.hexdigest()


def _pieces(array: Tensor, key: Tensor | None, name: str) -> Iterator[memoryview]:
    if not array.numel():
        return
    flat: memoryview = array.reshape(-1).view(torch.uint8).numpy().data
    if key is None or len(flat) <= BLOCKS * BLOCK:
        yield flat
        return
    drawn = random.integers(random.fold(key, name), (BLOCKS,), len(flat) // BLOCK)
    for place in (0, len(flat) - BLOCK, *(drawn * BLOCK).tolist()):
        yield flat[place : place + BLOCK]
