"""The base of a recipe's sections, and checks that several sections use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from fedgist.errors import InputError, one_of


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name, re.ASCII):
        raise ValueError("must be auto, cpu, cuda or cuda:NUMBER")
    return name


Device = Annotated[str, AfterValidator(_device)]  # whether there is one, the run finds out


class OpenSection(BaseModel):
    """A section that accepts the options of its source, model or method as further keys."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


GIVEN = "given"  # recorded as the name of what was given as an object, in Python
KEPT = ("natural", GIVEN)  # partitions that do not depend on the seed


def registered_name(
    names: Iterable[str], kind: str, own: str = "", base: Callable[[str], str] = str
) -> Any:
    """Return a pydantic check that a value is one of ``names``.

    ``base`` maps the value to the part that is looked up. The check also accepts GIVEN, and with
    ``own`` a user's own ``package.module:own``.
    """

    def check(name: str) -> str:
        if name == GIVEN or (own and ":" in name):
            return name
        try:
            one_of(base(name), names, kind)
        except InputError as error:
            raise ValueError(
                f"{error} (or your own: 'package.module:{own}')" if own else str(error)
            ) from error
        return name

    return AfterValidator(check)
