"""Numbers of a message as integers modulo 2^64, in which masks cancel exactly.

A number v is ``round(v 2^32)``. Sums are right modulo 2^64 as long as they lie between -2^31 and
2^31, so each of n sites may add numbers up to 2^31 / n: a larger one is an error, never a wrap.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedgist.core.message import Form
from fedgist.core.tree import Tree, build, named
from fedgist.errors import MessageError

FRACTION = 2.0**32
LARGEST = 2.0**31  # of a sum
Ring: TypeAlias = NDArray[np.uint64]


def encoded(message: Tree, sites: int) -> Ring:
    """Return the numbers of a message, in the order of its arrays' names, to be added over sites.

    Raises
    ------
    MessageError
        If a number is too large for a sum over so many sites. Its size is not told: the error may
        leave the site.
    """
    parts = []
    for name, array in sorted(named(message).items()):
        values = array.detach().cpu().double().flatten().numpy()
        most = LARGEST / sites
        if values.size and not bool((np.abs(values) < most).all()):
            raise MessageError(
                f"{name} has a number that is not below {most:.3g}, the most in a sum over {sites} "
                "sites that nobody can open: scale the rows, or use a method that sends averages"
            )
        parts.append(np.rint(values * FRACTION).astype(np.int64).view(np.uint64))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def decoded(total: Ring, form: Form) -> Tree:
    """Return the message of a sum, in the types of a message's form."""
    values = torch.from_numpy(total.view(np.int64).astype(np.float64) / FRACTION)
    arrays, at = {}, 0
    for name, (dtype, shape) in sorted(form.arrays.items()):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = values[at : at + count].to(dtype).view(shape)
        at += count
    return build(form.kind, arrays)
