"""The section of a recipe about its examples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from fedgist.data import Augmentation
from fedgist.data.sources import DEFAULT_SOURCE, SOURCES
from fedgist.recipe.section import CLOSED, OpenSection, Positive, known


class PublicSection(OpenSection):
    """Rows that server and sites may all see.

    So many training rows, those of one client, or of another source.
    """

    name: Annotated[str, known(SOURCES, "data set")] | None = None
    rows: Positive | None = None  # drawn from the run's seed; of another source all if not given
    # with another source: as many training rows are taken out, the same as `rows` would, and not
    # used, so that clients hold the same rows whichever source is public
    unused_rows: Positive | None = None
    # whose rows all may see, or so many `rows` of them; "largest": of the client with most rows
    client: Annotated[int, Field(ge=0)] | str | None = None
    labelled: bool = False  # whether methods see their labels, which the data must have
    augment: tuple[Augmentation, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> PublicSection:
        if self.name is not None and self.labelled:
            raise ValueError(
                f"the labels of {self.name} are not those of the task: labelled needs rows alone"
            )
        if self.unused_rows is not None and self.name is None:
            raise ValueError(
                "unused_rows takes training rows out beside another source: it needs name"
            )
        if self.client is not None and self.name is not None:
            raise ValueError(
                "public rows are one client's, or of another source: give client or name"
            )
        return self


class WordsSection(BaseModel):
    """How texts are read: at how many places of each, and which words are known."""

    model_config = CLOSED

    length: Positive = 20  # what is longer is cut
    tokenizer: Literal["words", "wordpiece"] = "words"
    size: Positive = 10_000  # the most frequent of the training texts
    file: str | None = None  # of those that are known, one in each line, in their place


class Data(OpenSection):
    """Which examples are used."""

    name: Annotated[str, known(SOURCES, "data set")] = DEFAULT_SOURCE
    classes: tuple[str, ...] = ()  # their names in order; the source's own if not given
    normalize: Literal["pooled", "client", "none"] = "pooled"  # over whose training rows
    # of each channel or column of numbers, or one for all; measured if not given
    mean: tuple[float, ...] = ()
    std: tuple[Annotated[float, Field(gt=0)], ...] = ()
    train_rows: Positive | None = None  # only this many training rows
    draw: Literal["first", "random"] = "first"  # which: the first, or drawn from the run's seed
    # share of each client's training rows that is held out
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # so many training rows are held out at the server, for its own models
    held_out: Annotated[int, Field(ge=0)] = 0
    augment: tuple[Augmentation, ...] = ()
    public: PublicSection | None = None  # rows that all may see
    words: WordsSection | None = None  # of texts

    @model_validator(mode="after")
    def _draws_some(self) -> Data:
        if self.held_out and self.validation:
            raise ValueError(
                "validation and held_out both hold rows out, at the clients and at the server: "
                "give one"
            )
        if self.draw != "first" and self.train_rows is None:
            raise ValueError(f"draw = {self.draw!r} needs data.train_rows: how many rows are drawn")
        return self
