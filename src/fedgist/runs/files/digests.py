"""Digests: SHA-256 of texts, and of arrays with their names, types and shapes.

The digest of a large array may cover only a sample: the first and last bytes and random blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import pieces_of

BLOCKS, BLOCK = 4096, 4096  # of a sampled array: number of blocks, and bytes per block


def of_text(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def of_arrays(arrays: Mapping[str, Tensor], key: Tensor | None = None) -> str:
    """Return the digest of arrays of any shape by name; with a ``key`` (), of samples of them.

    Only arrays of more than ``BLOCKS * BLOCK`` bytes are sampled.
    """
    state = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name].detach().cpu().contiguous()
        state.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        for piece in _pieces(array, key, name):
            state.update(piece)
    return state.hexdigest()


def of_all_rows(data: Dataset) -> str:
    """Return the digest of all bytes of all examples. Lazy rows are read, in pieces."""
    state = hashlib.sha256()
    for x in (data.inputs, data.inputs_test):
        state.update(f"{x.dtype} {list(x.shape)}\n".encode())
        for piece in pieces_of(x):
            for block in _pieces(piece.detach().cpu().contiguous(), None, ""):
                state.update(block)
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
