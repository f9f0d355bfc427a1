"""``site.toml``: a site's own data, model and device, and its release policy."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from fedgist.core.bounds import Positive, PositiveInt
from fedgist.data.sources import SOURCES
from fedgist.errors import InputError, SiteError, first_line, shown
from fedgist.models import PREFIX
from fedgist.options import CLOSED, checked
from fedgist.recipe.schema import ModelSection
from fedgist.recipe.section import Device, OpenSection, registered_name
from fedgist.world.facts.question import Kind

LEAST_ROWS_TELL = (
    "policy.least_rows above 1 lets one row decide whether many are used, which no epsilon covers: "
    "leave it out, or name the rare classes in policy.never_released"
)
STATE = "state"  # the folder of a site's state, beside its file
# options of sources that may name files; those beside site.toml are named in full
FILES = ("path", "test", "file", "test_file")


class SiteData(OpenSection):
    """The site's rows: a data source and its options, as in a recipe's ``[data]``."""

    name: Annotated[str, registered_name(SOURCES, "data set", "function")]
    """The data source. Its own options (``path``, ``label``, ...) are written beside it."""


class PolicySection(BaseModel):
    """What may leave the site. Anything else is refused before any training."""

    model_config = CLOSED

    methods: tuple[str, ...] = ()
    """Methods that may run here. The default is every method of fedgist."""
    code: tuple[str, ...] = ()
    """Other code that a recipe may name, as ``package.module:object``. It must be installed here.
    """
    recipe: str | None = None
    """A recipe file that was approved. The server's recipe must have the same settings."""
    most_rounds: PositiveInt | None = None
    """Largest number of rounds of a run."""
    epsilon: Positive | None = None
    """Privacy budget of these data over all runs. A run without privacy is then refused."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Largest sum of the deltas of all private runs. It should be below 1 / rows.

    A run spends its ``privacy.delta`` once. The default recipe spends all of the default.
    """
    max_rows: PositiveInt | None = None
    """Largest number of rows that these data may ever have, test rows of the same file included.

    Private runs need it. The server learns that ``clients.max_rows`` is not below it, and nothing
    of the rows. The default is ``clients.max_rows`` of ``policy.recipe``.
    """
    trust_server: bool = False
    """Whether the server may add the noise (``privacy.where = "central"``) under this budget."""
    least_rows: PositiveInt = 1
    """Smallest number of training rows of a class. Rows of rarer classes are not used at all.

    It cannot stand beside ``policy.epsilon``: one row would decide over many.
    """
    never_released: tuple[str, ...] = ()
    """Names of classes of which nothing may leave. Their rows are not used at all."""
    most_requests: PositiveInt = 10
    """How often a run may have one stage trained, one set of rows scored, or its model completed.

    An answer that is given again from memory does not count. A server asks again if it returns to a
    checkpoint. The site's process counts, from its start.
    """
    most_local_steps: PositiveInt = 1_000_000
    """Largest number of local steps in one round of a run."""
    most_parameters: PositiveInt = 1_000_000_000
    """Largest number of parameters of all models that a run keeps here."""
    largest_upload: PositiveInt | None = None
    """Largest reply in bytes."""
    sums: Literal["plain", "secure"] = "plain"
    """``secure`` refuses each run whose server would see a message of the site by itself."""
    least_sites: Annotated[int, Field(ge=3)] = 3
    """Smallest number of sites of a total that this site takes part in, if sums are secure."""
    sites: dict[str, str] = {}
    """Fingerprints of the other sites' keys by name: no others may share a secure total.

    Without any, the federation's root decides who is a site. A fingerprint is what ``fedgist
    provision`` prints when a site makes its key, and again when the authority signs it.
    """
    scores_leave: bool | None = None
    """Whether training losses and scores leave the site.

    The default is true, but false if ``policy.epsilon`` is set.
    """

    facts: tuple[Kind, ...] = ()
    """Kinds of facts that may leave before training (``fedgist facts``): none by default.

    ``"counts"``: rows, missing values, classes. ``"moments"``: means, deviations and correlations.
    ``"histograms"``, and ``"categories"``, which are counts of categories, and names of categories
    and classes that the question leaves open, if ``least_rows`` is above 1. Each count is of
    ``least_rows`` rows or more. Columns that ``data.ignore`` names, or ``data.columns`` does not,
    are not told of.
    """
    differences: Literal["log", "refuse"] = "log"
    """What the site does if facts of its rows differ from those of all sites, such as by a unit.

    Its log says how. With ``refuse`` the server is told in which columns, unless sums are secure or
    noised.
    """

    @model_validator(mode="after")
    def _private(self) -> PolicySection:
        if self.epsilon is not None and self.least_rows > 1:
            raise ValueError(LEAST_ROWS_TELL)
        if self.epsilon is not None and self.differences == "refuse":
            raise ValueError("differences = 'refuse' tells of rows what no epsilon covers")
        return self

    @property
    def shares_scores(self) -> bool:
        """Whether losses and scores leave the site."""
        return self.epsilon is None if self.scores_leave is None else self.scores_leave


class SiteTable(BaseModel):
    """The content of a ``site.toml``."""

    model_config = CLOSED

    name: str = "data"
    """Name of these data, under which their privacy budget is kept."""
    data: SiteData
    target: Literal["class", "numbers", "labels", "pixels"] = "class"
    """What the labels are, if a check has no recipe whose objective says it."""
    model: ModelSection | None = None
    """The site's private model, if the recipe states ``facts.feature_width``."""
    public: dict[str, object] = {}
    """Options of the source of public rows at this site, such as ``path``."""
    settings: dict[str, object] = {}
    """The site's own settings of the method, if the method has such settings.

    The table ``settings.train`` says how long the site trains in a round: ``local_epochs`` or
    ``local_steps``.
    """
    policy: PolicySection = PolicySection()
    device: Device = "cpu"
    """The device to train on: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``."""
    state: str = STATE
    """Folder of the site's state and audit log. A relative path starts at this file."""
    data_root: str | None = None
    """Folder of downloaded data sets. The default is that of ``fedgist run``."""
    code_folder: str | None = None
    """Folder in which the site's own code is looked for first."""


@dataclass(frozen=True)
class SiteFile:
    """A ``site.toml`` that was read. Relative paths in it start at its folder."""

    file: Path
    table: SiteTable

    @property
    def policy(self) -> PolicySection:
        """The site's release policy."""
        return self.table.policy

    @property
    def state_folder(self) -> Path:
        """The folder of the site's state."""
        return self.file.parent / Path(self.table.state).expanduser()

    @property
    def model(self) -> ModelSection | None:
        """The site's private model; a file of weights is named in full."""
        section = self.table.model
        if section is None or section.weights is None:
            return section
        return section.model_copy(update={"weights": str(self._path(section.weights))})

    @property
    def data_root(self) -> Path | None:
        """The folder of downloaded data sets; None for the default."""
        return self._path(self.table.data_root)

    @property
    def code_folder(self) -> Path | None:
        """The folder of the site's own code, if there is any."""
        return self._path(self.table.code_folder)

    @property
    def data_options(self) -> dict[str, object]:
        """The options of the data source; files beside ``site.toml`` are named in full."""
        return {key: self._in_full(key, value) for key, value in self.table.data.options.items()}

    @property
    def public_options(self) -> dict[str, object]:
        """The options of the public source; files beside ``site.toml`` are named in full."""
        return {key: self._in_full(key, value) for key, value in self.table.public.items()}

    def _path(self, name: str | None) -> Path | None:
        return None if name is None else self.file.parent / Path(name).expanduser()

    def _in_full(self, key: str, value: object) -> object:
        if key in FILES and isinstance(value, str) and (self.file.parent / value).exists():
            return str(self.file.parent / value)
        return value


def read_site_file(path: Path) -> SiteFile:
    """Read a ``site.toml``.

    Raises
    ------
    SiteError
        If it cannot be read: one line that names the file, the key, the value and the choices.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        table: SiteTable = checked(SiteTable, raw)
    except FileNotFoundError as error:
        raise SiteError(
            f"there is no {path}: it names the site's data (docs/federation.md has examples)"
        ) from error
    except InputError as error:
        raise SiteError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SiteError(f"{path}: {first_line(error)}") from error
    return SiteFile(path.resolve(), _with_own_encoder(table, path.resolve()))


def _with_own_encoder(table: SiteTable, file: Path) -> SiteTable:
    """Return the table with the path of an encoder's folder, which starts at the file's folder.

    A name that is no folder there may be a repository of the hub.
    """
    model = table.model
    if model is None or not model.name.startswith(PREFIX):
        return table
    place = model.name.removeprefix(PREFIX)
    folder = file.parent / Path(place).expanduser()
    if folder.is_dir():
        own = model.model_copy(update={"name": f"{PREFIX}{folder.resolve()}"})
        return table.model_copy(update={"model": own})
    if place.startswith((".", "~", "/")):
        raise SiteError(f"{file}: model.name = {shown(model.name)}: there is no folder {folder}")
    return table
