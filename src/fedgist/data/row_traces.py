"""Arrays that stand for rows in a digest: the rows, or facts about rows that are read lazily."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.lazy_rows import Inputs, LazyRows

SAMPLED = 16  # rows that stand for all, if no file is known


def traces(name: str, x: Inputs) -> dict[str, Tensor]:
    """Return arrays by name that change with the rows ``x`` ``(rows, *input)``.

    For lazy rows these are their numbers, and the names, sizes and times of all files. If the files
    are not known, a few rows stand for all. Nothing else is read.
    """
    if isinstance(x, Tensor):
        return {name: x}
    shape = torch.tensor(x.shape, dtype=torch.int64)
    return {f"{name}/shape": shape, f"{name}/numbers": x.numbers, f"{name}/rows": _content(x)}


def _content(x: LazyRows) -> Tensor:
    identity = x.source.reader.identity()
    if identity is None:
        drawn = random.choice(random.key(0, "trace"), len(x), SAMPLED)
        return x.read(torch.tensor(drawn, dtype=torch.int64)).cpu()
    return torch.frombuffer(bytearray("\n".join([*identity, ""]).encode()), dtype=torch.uint8)
