"""The section of a recipe about privacy: budget, noise, and what the server sees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from fedgist.core.bounds import Fraction, PositiveInt
from fedgist.options import CLOSED

Unit = Literal["none", "record", "client"]
Accounting = Literal["tight", "paper"]
# 1e4 hides nothing, and with larger numbers the arithmetic of noise has no digits left
Amount = Annotated[float, Field(gt=0, le=1e4)]
Delta = Annotated[float, Field(ge=1e-15, lt=1)]  # draws of noise have 63 bits, and no longer tails
Bound = Annotated[float, Field(gt=0, le=1e6)]
NEEDED = ("epsilon", "delta", "clip")
NEEDED_BY_STEPS = ("sampling_rate", "gradient_clip")


class PrivacySection(BaseModel):
    """Differential privacy, and what the server may see."""

    model_config = CLOSED

    min_replies: PositiveInt = 1
    """Minimum number of clients behind a total, or behind the single messages of a round.

    With fewer clients the server sees none of their messages. Raise it to keep the server from
    seeing a total of few clients.
    """
    share_measurements: bool = True
    """Whether clients report training losses and scores. If false, the record has none."""
    unit: Unit = "none"
    """Whose presence differential privacy hides: one ``record`` (row) or one ``client``."""
    epsilon: Amount | None = None
    """Privacy budget (epsilon) of the whole run, including the first exchange.

    Needed with ``privacy.unit``. A smaller budget means more noise.
    """
    delta: Delta | None = None
    """Probability (delta) with which the epsilon guarantee may fail.

    Needed with ``privacy.unit``.
    """
    clip: Bound | None = None
    """Clipping norm (L2): of a row's features (``record``) or a client's message (``client``).

    Needed with ``privacy.unit``. A smaller norm means less noise and more distortion.
    """
    where: Literal["central", "local"] = "central"
    """Where noise is added: once to the total (``central``), or by each client (``local``).

    ``central`` needs a server that is trusted with totals.
    """
    noise: Literal["seed", "system"] = "seed"
    """Source of the noise: the run's seed, or the operating system.

    A seed makes a simulation repeatable, but anyone who knows the seed can subtract the noise. Use
    ``system`` for real private data. Such a run cannot be repeated.
    """
    repeats: Annotated[int, Field(ge=0, le=10_000)] = 0
    """How many rounds may be repeated when a stopped run is resumed.

    Each costs budget, which is set aside at the start.
    """
    accounting: Accounting = "tight"
    """How noise is calibrated: exactly, or by the formula of FedLog's theorem 4 (``paper``)."""
    bodies: Literal["fixed", "dp_sgd"] = "fixed"
    """What the guarantee for records assumes about bodies.

    ``fixed``: that they do not depend on the record. ``dp_sgd``: nothing, because bodies are
    trained with noise as well.
    """
    sampling_rate: Fraction | None = None
    """Probability that a row takes part in a private training step. Needed by ``dp_sgd``."""
    gradient_clip: Bound | None = None
    """Clipping norm (L2) of a row's gradient. Needed by ``dp_sgd``."""

    @field_validator(
        "epsilon", "delta", "clip", "where", "noise", "repeats", "accounting", "bodies"
    )
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> object:
        unit = info.data.get("unit")
        # a recorded recipe holds the defaults, too
        if unit == "none" and value != cls.model_fields[str(info.field_name)].default:
            raise ValueError("nothing reads it: privacy.unit is 'none'; use 'record' or 'client'")
        if info.field_name == "bodies" and value == "dp_sgd" and unit == "client":
            raise ValueError(
                "it is for privacy.unit = 'record'; a client's message hides all of its training"
            )
        return value

    @field_validator(*NEEDED_BY_STEPS)
    @classmethod
    def _read_by_steps(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("bodies") == "fixed" and value is not None:
            raise ValueError("nothing reads it: privacy.bodies is 'fixed'; use 'dp_sgd'")
        return value

    @model_validator(mode="after")
    def _complete(self) -> PrivacySection:
        needed: dict[str, tuple[str, ...]] = {"unit": NEEDED} if self.unit != "none" else {}
        needed |= {"bodies": NEEDED_BY_STEPS} if self.bodies == "dp_sgd" else {}
        for why, keys in needed.items():
            if missing := [key for key in keys if getattr(self, key) is None]:
                raise ValueError(f"{why} = {getattr(self, why)!r} needs privacy.{missing[0]}")
        if self.bodies == "dp_sgd" and self.accounting == "paper":
            raise ValueError("accounting = 'paper' has no term for bodies = 'dp_sgd': use 'tight'")
        return self
