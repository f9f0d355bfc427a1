"""The section of a recipe about its data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from fedgist.core.bounds import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
)
from fedgist.data import Augmentation
from fedgist.data.division import Division, Within
from fedgist.data.sources import DEFAULT_SOURCE, SOURCES
from fedgist.data.sources.read_modes import Read
from fedgist.options import CLOSED
from fedgist.recipe.section import OpenSection, registered_name


class PublicSection(OpenSection):
    """Rows that the server and all clients may see.

    They are training rows, the rows of one client, or rows of another source.
    """

    name: Annotated[str, registered_name(SOURCES, "data set")] | None = None
    """Another data source that supplies the public rows. Its own options are written beside it.

    Without a name, the public rows come from the training set.
    """
    rows: PositiveInt | None = None
    """Number of public rows. They are drawn from the run's seed.

    If no value is given, all rows of another source or of a client are public.
    """
    unused_rows: PositiveInt | None = None
    """Only with another source: this many training rows are removed and not used.

    Clients then have the same rows as in a run that takes this many public rows from the training
    set, so both runs can be compared.
    """
    client: NonNegativeInt | str | None = None
    """Number or name of a client whose training rows are public, or ``"largest"``.

    The client keeps these rows. ``"largest"`` is the client with the most training rows.
    """
    labelled: bool = False
    """Whether methods may see the labels of the public rows."""
    augment: tuple[Augmentation, ...] = ()
    """Augmentations of public image rows, as in ``data.augment``."""

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
    """How texts are split into tokens, and which tokens are known."""

    model_config = CLOSED

    length: PositiveInt | None = None
    """Maximum number of tokens per text. Longer texts are cut, and a note counts them.

    The default is 20 for next words. For labels of texts it is the length that 95 % of the training
    texts do not exceed; state it under privacy.
    """
    rule: Literal[1, 2] = 2
    """The rule that splits texts into words: 2, or 1 to read a run of an earlier version.

    Rule 1 cuts words at the marks of Hindi, Tamil and other scripts.
    """
    tokenizer: Annotated[str, Field(pattern="^(words|wordpiece|transformers:.+)$")] = "words"
    """How a text is split: into whole words (``words``), or into pieces of words (``wordpiece``).

    ``transformers:FOLDER`` is the tokenizer of a pretrained encoder, in a folder or by its name on
    the Hugging Face hub, with its own vocabulary.
    """
    size: PositiveInt = 10_000
    """Vocabulary size: the most frequent tokens of all training texts are kept."""
    file: str | None = None
    """A file with the vocabulary, one token per line. It replaces a vocabulary built from the data.

    Use it if the training texts of the clients must not be seen together.
    """


class ShiftSection(BaseModel):
    """How images differ between clients. Client i of N has more of it than client i - 1."""

    model_config = CLOSED

    rotate: NonNegative = 0.0
    """Degrees by which the last client's images are turned to the left; the first's are not."""
    color: Share = 0.0
    """Each client multiplies each channel by a factor from 1 - ``color`` to 1 + ``color``."""
    noise: NonNegative = 0.0
    """Deviation of the noise in the last client's images; 1 is the range of their numbers."""

    @model_validator(mode="after")
    def _shifts(self) -> ShiftSection:
        if not (self.rotate or self.color or self.noise):
            raise ValueError("give rotate, color or noise")
        return self


class Data(OpenSection):
    """The data source, its normalization, and rows held out or public."""

    name: Annotated[str, registered_name(SOURCES, "data set", "function")] = DEFAULT_SOURCE
    """The data source. Its own options (``path``, ``label``, ...) are written beside it.

    Your own source is ``package.module:function``. It returns a map-style torch data set of pairs
    (x, y), two of them (train, test), a list with one for each client, or a ``fedgist.Dataset``.
    """
    read: Read = "auto"
    """How rows are read: ``once``, into memory, or ``lazy``, when a batch needs them.

    ``auto`` reads torch data sets once if they fill at most a quarter of the memory and have no
    random transforms. It reads image folders once if they fill at most half of the memory. Use
    ``lazy`` for data that are larger than memory.
    """
    classes: tuple[str, ...] = ()
    """Names of all classes, in the order of their numbers. The default is the source's own order.

    State them if sites hold different classes, so that a class has the same number at all sites. A
    label that is not listed is refused.
    """
    missing_labels: Literal["refuse", "mask"] = "refuse"
    """What to do with missing labels.

    ``refuse``: they are an error. ``mask``: a row without any label is left out, and a missing
    number, label or pixel of another row is ignored in loss and metrics. In tables a cell with a
    sign of a missing value is missing, in arrays NaN, or -1 for pixels, and in Hugging Face data
    sets None, or a class of -1.
    """
    missing_clients: Literal["refuse", "drop"] = "refuse"
    """What to do with rows whose client is empty.

    ``refuse``: they are an error. ``drop``: they are left out, with a note.
    """
    unlisted: Literal["refuse", "drop"] = "refuse"
    """What to do with rows that are of no class in ``data.classes`` or hold a number that is not
    finite.

    ``refuse``: they are an error. ``drop``: they are left out, with a note, and an unlisted
    category is none of the listed ones, as at the sites of a private run.
    """
    normalize: Literal["pooled", "client", "none"] = "pooled"
    """How inputs are normalized.

    ``pooled`` uses the mean and standard deviation of all training rows. ``client`` uses those of
    each client's own training rows. ``none`` leaves inputs as they are (images: 0 to 1).
    """
    mean: tuple[float, ...] = ()
    """Means to normalize with: one per channel or numeric column, or one for all.

    They are measured if not given. With ``normalize = "client"`` only rows that belong to no client
    use them: the server's test and validation sets, and public rows. State them in a real
    federation, where the rows are never together.
    """
    std: tuple[Positive, ...] = ()
    """Standard deviations to normalize with, in the same form as ``data.mean``."""
    ranges: Annotated[
        dict[str, tuple[float, float]] | None, Field(json_schema_extra={"role": "record"})
    ] = None
    """Usual range of each numeric column of a table, ``{age = [18, 90]}``.

    ``fedgist predict`` names the values of new rows outside it. If given, other numeric columns
    have no range. The default is from the 1 % to the 99 % quantile of at least 20 training rows,
    rounded to two digits, and under privacy none. A site may state its own in its ``site.toml``.
    """
    divide: Within = "client"
    """Where test rows are chosen, if the data have none of their own.

    ``client`` divides the rows of each natural client by themselves, as the sites of a federation
    do. Then each client has a test row that has two rows of a class. ``pooled`` divides all
    together.
    """
    folds: Annotated[int, Field(ge=2)] | None = None
    """Number of folds: test rows are those of one fold, and of every fold in another run.

    Each client's rows of a class are dealt into the folds in turn. ``fedgist sweep`` runs all
    folds. With ``privacy.unit = "record"`` the fold of a row is its keyed digest modulo ``folds``.
    """
    repeats: PositiveInt = 1
    """How many times rows are divided anew, into folds or by ``test_fraction``."""
    division: Annotated[NonNegativeInt, Field(json_schema_extra={"role": "seed"})] = 0
    """Which division this run tests, from 0: the folds of the first repeat, then of the second.

    ``fedgist sweep`` sets it.
    """
    train_rows: PositiveInt | None = None
    """Use only this number of training rows. The default is all."""
    draw: Literal["first", "random"] = "first"
    """Which rows ``data.train_rows`` keeps: the first, or random rows drawn from the run's seed."""
    long_tail: Fraction = 1.0
    """Rows of the rarest class beside those of the most frequent, such as 0.01; 1 keeps all rows.

    Class j of K keeps the share ``long_tail^(j / (K - 1))`` of its training rows, drawn from the
    seed, which also draws the order of the classes (Cao et al. 2019, the exponential tail).
    """
    validation: BelowOne = 0.0
    """Fraction of each client's training rows held out for validation.

    The record then has the columns ``eval/validation/...``. Set it to tune or to stop early. With
    ``data.group`` they are whole groups, as many as fit. With ``privacy.unit = "record"`` each row
    is held out with this probability, independently of the others.
    """
    held_out: NonNegativeInt = 0
    """Number of training rows held out for validation at the server.

    The columns ``eval/validation/...`` then hold the mean score of the server's models on these
    rows. They are single rows, so ``data.group`` is refused beside it.
    """
    shift: ShiftSection | None = None
    """How images differ between clients: the same classes look another way."""
    augment: tuple[Augmentation, ...] = ()
    """Augmentations of training images. The order in the list does not matter.

    ``crop`` pads by 4 pixels. ``batch_crop`` and ``batch_flip`` are drawn once per batch.
    ``resized_crop`` keeps 0.2 to 1 of the area. ``color_jitter`` changes brightness, contrast,
    saturation (strength 0.8 each) and hue (0.2) of 80 % of the images. ``grayscale`` applies to
    20 %.
    """
    public: PublicSection | None = None
    """Rows that the server and all clients may see. Distillation methods need them."""
    words: WordsSection | None = None
    """How texts are split into tokens, and which tokens are known."""

    @property
    def test_rows(self) -> Division:
        """How test rows are chosen, but for the source's own option ``test_fraction``."""
        return Division(None, self.folds, self.division, self.repeats, self.divide)

    @property
    def divisions(self) -> int:
        """Number of divisions into training rows and test rows."""
        return (self.folds or 1) * self.repeats

    @model_validator(mode="after")
    def _draws_some(self) -> Data:
        if self.division >= self.divisions:
            raise ValueError(
                f"division = {self.division} is not below folds x repeats = {self.divisions}"
            )
        if self.held_out and self.validation:
            raise ValueError(
                "validation and held_out both hold rows out, at the clients and at the server: "
                "give one"
            )
        for name, (low, high) in (self.ranges or {}).items():
            if not low <= high:
                raise ValueError(
                    f"ranges.{name} = [{low:g}, {high:g}]: give the smaller number first"
                )
        if self.draw != "first" and self.train_rows is None:
            raise ValueError(f"draw = {self.draw!r} needs data.train_rows: how many rows are drawn")
        return self
