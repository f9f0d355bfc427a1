"""The 8x8 digits that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from fedgist.data.dataset import Dataset
from fedgist.data.sources.optional_packages import need

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
    bundled = need(
        "sklearn.datasets", "digits needs scikit-learn: pip install scikit-learn"
    ).load_digits()
    x = torch.from_numpy(bundled.images.astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(bundled.target.astype(np.int64))
    count_so_far = torch.nn.functional.one_hot(y).cumsum(0)
    rank = count_so_far.gather(1, y[:, None])[:, 0]  # 1 for the first of its class
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
