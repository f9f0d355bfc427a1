"""Schedules of the learning rate over the rounds of a run.

A schedule is a pure function of the round's number and the number of rounds, so a resumed run and a
site that missed rounds continue with the same rate. It multiplies the rate of every training phase
of a round, including phases with their own optimizer. Phases before a test keep the full rate.

The factors are those of ``torch.optim.lr_scheduler``, with a round in place of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "step", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A schedule and its settings.

    In the first ``warmup_rounds`` w the rate rises linearly: w' / (w + 1) of the full rate in round
    w'. After the warm-up, ``constant`` keeps the rate, and ``step`` multiplies it by
    ``step_factor`` every ``step_rounds`` rounds. ``linear`` and ``cosine`` (Loshchilov and Hutter
    2017, eq. 5, without restarts) let it fall to the fraction ``min_factor``, which they would
    reach in the round after the last.
    """

    name: ScheduleName = "constant"
    warmup_rounds: int = 0
    step_rounds: int = 10
    step_factor: float = 0.1
    min_factor: float = 0.0

    def factor(self, number: int, num_rounds: int) -> float:
        """Return the factor of the rate in round ``number``; round 0 counts as round 1.

        >>> [Schedule("step", step_rounds=2, step_factor=0.5).factor(r, 4) for r in (1, 2, 3, 4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        done = max(number, 1) - 1 - self.warmup_rounds  # rounds since the warm-up
        if done < 0:
            return (done + 1 + self.warmup_rounds) / (self.warmup_rounds + 1)
        if self.name == "step":
            return self.step_factor ** (done // self.step_rounds)
        if self.name == "constant":
            return 1.0
        share = done / (num_rounds - self.warmup_rounds)
        left = 1.0 - share if self.name == "linear" else (1.0 + math.cos(math.pi * share)) / 2
        return self.min_factor + (1.0 - self.min_factor) * left
