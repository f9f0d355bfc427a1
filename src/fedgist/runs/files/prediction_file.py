"""The file of a run's predictions of test and validation rows, which is read without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fedgist.errors import DataError
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import PREDICTIONS

Numbers = NDArray[Any]
TEST, VALIDATION = 0, 1  # in ``split``


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of each client's model for its own rows.

    ``split`` (rows,) is :data:`TEST` or :data:`VALIDATION`. ``client``, ``label`` and ``predicted``
    (rows,) are numbers of clients and classes. ``row`` (rows,) is a digest of the row's content, by
    which it is known in other divisions and other runs. ``log_odds`` (rows, classes) are those of
    each class against all others, or (rows, 0) if no metric of the run needs them.
    """

    split: Numbers
    client: Numbers
    label: Numbers
    row: Numbers
    predicted: Numbers
    log_odds: Numbers

    @property
    def probability(self) -> Numbers:
        """Probability of each class, (rows, classes) in float64."""
        return np.asarray(np.exp(-np.logaddexp(0, -self.log_odds.astype(np.float64))))

    def of(self, split: int) -> Predictions:
        """Return the predictions of test rows, or those of validation rows."""
        return self.take(self.split == split)

    def take(self, which: Numbers) -> Predictions:
        """Return some rows, by Booleans or numbers."""
        return Predictions(**{name: array[which] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, Numbers]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def write(self, folder: Path) -> None:
        """Write the file into a run's folder."""
        atomic_files.write(folder / PREDICTIONS, safetensors.numpy.save(self.arrays()))


def read_predictions(folder: Path) -> Predictions | None:
    """Return the predictions in a run's folder, or None if there are none.

    Raises
    ------
    DataError
        If the file is damaged.
    """
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    try:
        predictions = Predictions(**safetensors.numpy.load(path.read_bytes()))
        lengths = {len(array) for array in predictions.arrays().values()}
    except (safetensors.SafetensorError, TypeError) as error:
        raise DataError(f"{path} cannot be used: {error}") from error
    if len(lengths) != 1 or predictions.log_odds.ndim != 2:  # noqa: PLR2004
        raise DataError(f"{path} cannot be used: its arrays do not fit each other")
    return predictions


def joined(parts: list[Predictions]) -> Predictions:
    """Return the rows of all parts, in order."""
    names = [field.name for field in fields(Predictions)]
    return Predictions(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})
