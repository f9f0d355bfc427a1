"""A method under test, with the runs that several laws use for comparison."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgist.core.method import Method
from fedgist.testing.small_worlds import ALONE, Trace, federation, law_world, loopback, trace
from fedgist.testing.stages import Stage, stages
from fedgist.world.world import World


@dataclass(frozen=True, eq=False)
class MethodUnderTest:
    """A method under test in worlds changed by ``sections``; its plain runs are made once."""

    method: Method
    sections: Mapping[str, object] = field(default_factory=dict)
    enlarges: float = 1.0  # how many times its layers may enlarge a rounding

    def world(self, **sections: object) -> World:
        """Return a world for the method; the plain world is made once."""
        return law_world(self.method, **self.sections, **sections) if sections else self._plain

    @functools.cached_property
    def _plain(self) -> World:
        return law_world(self.method, **self.sections)

    @functools.cached_property
    def walk(self) -> list[Stage]:
        """All stages of three rounds, which have run; for laws that change nothing in them."""
        return list(stages(federation(self.world())))

    @functools.cached_property
    def alone(self) -> Trace:
        """Three rounds of unstacked clients."""
        return trace(self.world(), ALONE)

    @functools.cached_property
    def in_pairs(self) -> Trace:
        """Four rounds of clients in stacks of two."""
        return trace(self.world(), rounds=4)

    @functools.cached_property
    def over_a_wire(self) -> Trace:
        """Three rounds of clients that are separate sites, over the loop-back."""
        return trace(self.world(), ALONE, make_engine=loopback)
