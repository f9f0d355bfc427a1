"""The sections of a recipe that only a real federation needs: its data, and its patience."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from fedgist.core.bounds import Positive, PositiveInt
from fedgist.options import CLOSED

NUMBER = "number"  # a numeric column
Seconds = Annotated[float, Field(gt=0, le=1e7)]


class FactsSection(BaseModel):
    """The form of the rows, on which the server and all sites of a real federation agree.

    The server has no rows, so the recipe states what it needs to know of them. Each site compares
    its own data with this section. `fedgist site --check` prints it for a site's data.
    """

    model_config = CLOSED

    input_shape: tuple[PositiveInt, ...] = ()
    """Shape of one example: ``[12]`` for 12 numbers, ``[3, 32, 32]`` for color images.

    With ``facts.columns`` it follows from them.
    """
    element: Literal["float32", "uint8"] = "float32"
    """Type of the numbers of an example: ``uint8`` for images of whole numbers, else ``float32``.
    """
    scale: Positive = 1.0
    """Number by which inputs are divided first: 255 for images of whole numbers 0..255."""
    columns: dict[str, Literal["number"] | tuple[str, ...]] = {}
    """The columns of a table, in order: ``"number"`` or the list of its categories.

    All sites encode their tables by them.
    """
    annotations: dict[str, tuple[float, float]] = {}
    """Smallest and largest value of each annotation of the rows, by name."""
    feature_width: PositiveInt | None = None
    """Width of the features, if each site has a private model of its own.

    The server then knows only the heads. Leave ``[model]`` out: each site names its model in its
    own file. Only methods that share no part of the body allow it.
    """
    encoder: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Digest of the encoder of all sites, whose weights and preparation of images it covers.

    Each site names its own copy in its file, ``model.name = "transformers:FOLDER"``, with
    ``model.frozen = true``; another encoder is refused. State ``facts.feature_width`` beside it.
    ``fedgist site --check`` prints the digest.
    """

    @model_validator(mode="after")
    def _has_a_width(self) -> FactsSection:
        if self.encoder is not None and self.feature_width is None:
            raise ValueError("encoder needs feature_width, the width of its features")
        return self

    @model_validator(mode="after")
    def _has_a_shape(self) -> FactsSection:
        if bool(self.input_shape) == bool(self.columns):
            raise ValueError("give input_shape or, for a table, columns")
        for name, kind in self.columns.items():
            if kind != NUMBER and (not kind or len(set(kind)) < len(kind)):
                raise ValueError(
                    f"columns.{name} must be {NUMBER!r} or the list of its different categories"
                )
        return self

    @field_validator("annotations")
    @classmethod
    def _ordered(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in ranges.items():
            if low > high:
                raise ValueError(f"{name} = [{low:g}, {high:g}]: give the smaller number first")
        return ranges


class FederationSection(BaseModel):
    """How many sites a round of a real federation needs, and how long the server waits.

    Only `fedgist server` reads these keys.
    """

    model_config = CLOSED

    sums: Literal["plain", "secure"] = "plain"
    """``secure``: the server gets totals of messages, and no message of a site by itself.

    A total needs three sites of an architecture. Methods whose messages are read one by one are
    refused, and losses and scores stay at the sites.
    """
    least_sites: PositiveInt = 2
    """Number of sites that must be ready before a round begins. The server waits for them."""
    least_replies: PositiveInt | None = None
    """Number of replies that a stage of a round needs to count.

    With fewer, the sites without a reply are asked again. The default is ``privacy.min_replies``.
    """
    deadline_s: Seconds = 600.0
    """Seconds after which a site without a reply is absent from a stage."""
    first_deadline_s: Seconds = 3600.0
    """The same in the first round, and in the exchange before it."""
    most_attempts: PositiveInt = 10
    """Number of times that a stage is asked before the server stops, with its checkpoint."""
    state_lost: Literal["refuse", "begin"] = "refuse"
    """What happens to a site that lost its state during a run.

    ``refuse``: it cannot go on with this run. ``begin``: it begins anew with its first model, which
    the record says.
    """
