"""Gradients of training steps as recorded programs, one for each form of a step.

The first steps of a form are taken as they are, one is recorded, and the next is done in both ways,
which must agree to the bit. From then on the program is called. Programs are kept for the whole
run, by all that their operations depend on but tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from fedgist.core.cuda_graphs import FAILURES
from fedgist.core.recorded import Program, record
from fedgist.core.tree import Tree

# The steps of a form that are recorded, and done in both ways. A recording of a small model takes
# as long as it saves in eight steps, so forms that come seldom are not recorded.
RECORDED, CHECKED = 8, 9
MOST_FORMS = 64  # of one description: steps of further forms are taken as they are
MOST_SPECS = 16  # descriptions that are kept: a state may have a static field that changes
#: A function of trees of tensors, (clients, ...), that returns such a tree.
Calculation: TypeAlias = Callable[..., Tree]


@dataclass(eq=False)
class _Form:
    """Steps of one form: how many there were, and the program with the form of its results."""

    seen: int = 0
    program: tuple[Program, TreeSpec] | None = None


#: The forms of steps whose trees have one description, by the shapes of their tensors.
Forms: TypeAlias = dict[object, _Form]


@dataclass(eq=False)
class Recordings:
    """The recorded programs of a host's clients, which stay for the whole run."""

    forms: dict[tuple[object, ...], list[tuple[TreeSpec, Forms]]] = field(default_factory=dict)

    def of(self, about: tuple[object, ...], fixed: Tree) -> Forms:
        """Return the forms of the steps with this description and these trees."""
        spec = tree_structure(fixed)
        known = self.forms.setdefault(about, [])
        for other, forms in known:
            if other == spec:
                return forms
        known.append((spec, {}))
        del known[:-MOST_SPECS]
        return known[-1][1]


class RecordedCalculation:
    """A calculation of steps, by the program of their form as soon as there is one.

    ``fixed`` are the trees that are the same in all calls, ``module`` the model's. ``watched`` is
    the same calculation for recordings: it refuses to read what differs between rounds.
    """

    def __init__(
        self,
        calculation: Calculation,
        watched: Calculation,
        fixed: Tree,
        forms: Forms,
        module: nn.Module,
    ) -> None:
        self.calculation, self.watched, self.module = calculation, watched, module
        self.fixed, self.forms = fixed, forms
        self.leaves, self.spec = tree_flatten(fixed)
        self.geometry = _geometry(self.leaves)

    def __call__(self, *changing: Tree) -> Tree:
        """Return the results for the trees that change from step to step."""
        leaves, spec = tree_flatten(changing)
        key = self.geometry, _geometry(leaves)
        if key not in self.forms and len(self.forms) >= MOST_FORMS:
            return self.calculation(*self.fixed, *changing)
        form = self.forms.setdefault(key, _Form())
        form.seen += 1
        if form.seen == RECORDED:
            return self._recorded(form, leaves, spec)
        if form.program is None:
            return self.calculation(*self.fixed, *changing)
        program, structure = form.program
        results = program(*self.leaves, *leaves)
        if form.seen == CHECKED:
            true = self.calculation(*self.fixed, *changing)
            if not _same(tree_leaves(true), results):
                form.program = None
                return true
        return tree_unflatten(results, structure)

    def _recorded(self, form: _Form, leaves: list[Tensor], spec: TreeSpec) -> Tree:
        """Take a step and record it, if that can be done."""
        count, structures = len(self.leaves), list[TreeSpec]()

        def function(*tensors: Tensor) -> Sequence[Tensor]:
            fixed = tree_unflatten(tensors[:count], self.spec)
            changing = tree_unflatten(tensors[count:], spec)
            results, structure = tree_flatten(self.watched(*fixed, *changing))
            structures.append(structure)
            return results

        before = _plain_values(self.module)
        try:
            program, results = record(function, [*self.leaves, *leaves])
        except FAILURES:  # it reads the round, or does more than torch's operations
            return self.calculation(*self.fixed, *tree_unflatten(leaves, spec))
        if _plain_values(self.module) == before:
            form.program = program, structures[-1]
        return tree_unflatten(results, structures[-1])


def _geometry(leaves: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves)


def _plain_values(module: nn.Module) -> list[object]:
    """Return what layers hold beside tensors; a model that counts its calls changes it."""
    plain = int, float, str, bool
    return [
        (name, value)
        for layer in module.modules()
        for name, value in vars(layer).items()
        if isinstance(value, plain)
    ]


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal to the bit, in NaN and the sign of zero as well."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in zip(first, second, strict=True)
    )
