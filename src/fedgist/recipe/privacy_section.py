"""The section of a recipe about privacy: what the server may see, and what protects it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from fedgist.recipe.section import CLOSED, Positive

Unit = Literal["none", "record", "client"]
Accounting = Literal["tight", "paper"]
# 1e4 hides nothing, and with larger numbers the arithmetic of noise has no digits left
Amount = Annotated[float, Field(gt=0, le=1e4)]
Bound = Annotated[float, Field(gt=0, le=1e6)]
NEEDED = ("epsilon", "delta", "clip")
NEEDED_BY_STEPS = ("sampling_rate", "gradient_clip")


class PrivacySection(BaseModel):
    """What the server may see, and how much it may learn of a record or a client."""

    model_config = CLOSED

    min_replies: Positive = 1  # what comes from fewer clients is withheld from the server
    share_measurements: bool = True  # training losses and scores leave the clients
    # whose presence is hidden by differential privacy: one row's, or one client's
    unit: Unit = "none"
    # what the whole run may spend
    epsilon: Amount | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    # bound of the norm of a row's features, or of a client's message
    clip: Bound | None = None
    # noise once on the total, by a server that is trusted with sums, or at each client
    where: Literal["central", "local"] = "central"
    # of a simulation, which its seed repeats, or of the operating system: a run that is recorded
    # and cannot be repeated
    noise: Literal["seed", "system"] = "seed"
    # rounds that may be done again with other noise, after a stop: they are paid in advance
    repeats: Annotated[int, Field(ge=0, le=10_000)] = 0
    accounting: Accounting = "tight"  # or by the formula of FedLog's theorem 4
    # of a record: the promise holds for bodies that do not depend on it, or bodies learn in private
    bodies: Literal["fixed", "dp_sgd"] = "fixed"
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # of rows, in a private step
    gradient_clip: Bound | None = None  # bound of the norm of a row's gradient

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
