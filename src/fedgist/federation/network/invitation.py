"""The two notes before a site is ready: the server's invitation to a run, and the site's hello."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedgist.core.bounds import NonNegativeInt
from fedgist.core.method import Task
from fedgist.errors import FederationError, MessageError, RefusalKind
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_options import PROTOCOL
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import EngineSection
from fedgist.runs.files.digests import of_text
from fedgist.wire.site import StageKey
from fedgist.world.facts.question import Name, Names

Hex = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]
Text = Annotated[str, Field(max_length=200)]
N = TypeVar("N", bound=BaseModel)


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Versions(_Note):
    """The versions that a server and its sites must have in common."""

    fedgist: Text
    protocol: Text

    @staticmethod
    def own() -> Versions:
        """Return the versions of this process."""
        return Versions(fedgist=version("fedgist"), protocol=PROTOCOL)


class Greeting(_Note):
    """The first words of a site: which process it is, and its versions."""

    process: Text
    versions: Versions


class Invitation(_Note):
    """What a server tells a site before anything else.

    ``recipe`` is TOML without how the work is done, and ``digest`` its digest. ``number`` is the
    site's, and ``names`` are those of all sites. ``certificate`` is the server's, with which it
    signs. ``last`` is the last stage that this site answered, if it answered any. Before training,
    ``question`` asks for facts in place of a recipe, in JSON.
    """

    run: Hex
    recipe: str
    digest: Hex
    number: NonNegativeInt
    names: tuple[Text, ...]
    certificate: str
    last: StageKey | None
    state_lost: Literal["refuse", "begin"]
    question: str = ""


class Outlined(_Note):
    """What a server must know of an architecture: the form of its inputs, features and outputs."""

    input_shape: tuple[int, ...]
    feature_width: int
    num_classes: int


class Hello(_Note):
    """What a ready site says: it has loaded its rows and its model, and has run one training step.

    ``last`` is the last stage that it remembers. If it does not take part, ``refused`` is the kind
    of its reason and ``about`` the setting behind it. The text of the error stays at the site.
    ``names`` are the categories and classes that a question of facts leaves open.
    """

    run: Hex
    digest: Hex
    number: int
    outlines: dict[Text, Outlined] = {}
    public_digest: int = 0
    last: StageKey | None = None
    began_anew: bool = False
    refused: RefusalKind | None = None
    about: Annotated[str, Field(pattern="^[a-z0-9_.]{0,60}$")] = ""
    names: dict[Name, Names] = {}


def parsed_note(kind: type[N], content: Note) -> N:
    """Return a note of this kind; raise MessageError if it is another."""
    try:
        return kind.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        raise MessageError(f"{kind.__name__}: {field}: {first['msg']}") from error


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe for sites: without the server's own engine and folders."""
    return recipe.changed({"engine": EngineSection()}).to_toml()


def digest_of_recipe(recipe: Recipe) -> str:
    """Return the digest of a recipe as this machine reads it."""
    return of_text(recipe_text(recipe))


def outlines(task: Task) -> dict[str, Outlined]:
    """Return the outlines of a task's architectures."""
    return {
        name: Outlined(
            input_shape=arch.input_shape,
            feature_width=arch.feature_width,
            num_classes=arch.num_classes,
        )
        for name, arch in task.architectures.items()
    }


def check_versions(own: Versions, other: Versions) -> None:
    """Raise FederationError, with both values, unless the versions are the same."""
    for name in type(own).model_fields:
        ours, theirs = getattr(own, name), getattr(other, name)
        if ours != theirs:
            raise FederationError(f"the server has {name} {ours}, and the site has {theirs}")


def check_hello(
    invitation: Invitation, hello: Hello, outlined: Mapping[str, Outlined], public: int
) -> None:
    """Raise FederationError, with both values, if a site prepared for something else."""
    if hello.refused:
        about = f"{hello.refused}: {hello.about}" if hello.about else hello.refused
        raise FederationError(f"the site does not take part: {about} (its log says why)")
    pairs: dict[str, tuple[object, object]] = {
        "run": (invitation.run, hello.run),
        "recipe digest": (invitation.digest, hello.digest),
        "number": (invitation.number, hello.number),
        "digest of the public rows": (public, hello.public_digest),
    }
    for name, outline in hello.outlines.items():
        pairs[f"architecture {name!r}"] = (outlined.get(name), outline)
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise FederationError(f"{name}: the server has {ours}, and the site has {theirs}")
    if invitation.last is not None and (hello.last is None or hello.last < invitation.last):
        begins = hello.began_anew and invitation.state_lost == "begin"
        if not begins:
            raise FederationError(
                f"the site lost its state: it answered round {invitation.last[0]}, and remembers "
                f"{'nothing' if hello.last is None else f'round {hello.last[0]}'} "
                "(federation.state_lost)"
            )
