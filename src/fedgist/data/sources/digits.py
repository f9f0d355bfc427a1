"""The 8x8 handwritten digits shipped with scikit-learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from fedgist.data.dataset import Dataset
from fedgist.errors import DataError

_TEST_EVERY = 5  # every fifth example of a class is a test row


def digits() -> Dataset:
    """Read 1,797 handwritten digits, 8x8 pixels of 0..16, with a fixed test split.

    Notes
    -----
    They come with scikit-learn. Pooled normalization: the mean 0.305136 and the deviation 0.376158
    of all pixels of the training images, where white is 1.

    Examples
    --------
    A recipe's section::

        [data]
        name = "digits"
    """
    lines = _bundled()
    x = torch.from_numpy(lines[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(lines[:, -1].astype(np.int64))
    count_so_far = torch.nn.functional.one_hot(y).cumsum(0)
    rank = count_so_far.gather(1, y[:, None])[:, 0]  # 1 for the first example of a class
    test = rank % _TEST_EVERY == 0
    return Dataset(
        "digits",
        x[~test],
        y[~test],
        x[test],
        y[test],
        10,
        scale=16.0,
        mean=(0.305136,),
        std=(0.376158,),
        classes=tuple("0123456789"),
    )


def _bundled() -> np.ndarray:
    """Read scikit-learn's file of digits without importing scikit-learn, which takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits needs scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",")
    except (OSError, ValueError) as error:
        raise DataError(f"digits cannot be read from scikit-learn's {path}: {error}") from error
