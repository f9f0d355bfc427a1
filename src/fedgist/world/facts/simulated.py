"""The exchange of facts in a simulation: the sums of all clients, added up as a server would."""

from __future__ import annotations

from collections.abc import Sequence

from fedgist.core.message import Form, total
from fedgist.core.tree import Tree
from fedgist.data.dataset import Dataset
from fedgist.data.sources.splits import in_order
from fedgist.errors import DataError
from fedgist.wire.secure.ring import decoded, encoded
from fedgist.world.data import read_data
from fedgist.world.facts.pooled import PooledFacts, pooled, scales
from fedgist.world.facts.question import CLASSES, COLUMNS, Filling, Plan, Question
from fedgist.world.facts.rows import TABLE, as_asked, rows_of
from fedgist.world.facts.sums import FactsSums, ScaleSums, facts_sums, scale_sums, with_noise
from fedgist.world.world import World


def simulated_facts(world: World, question: Question) -> tuple[Plan, PooledFacts]:
    """Return the facts that the clients of a simulation would give together.

    Raises
    ------
    DataError
        If the data do not have the form that the question states.
    """
    data, rows = _whole_rows(world, question, None), world.partition.train
    clients = [rows[client] for client in range(len(rows))]
    filling = Filling(names=_names(data, question))
    data = _whole_rows(world, question, filling)
    if question.searched:
        plan = Plan(question, filling)
        first = _total(question, [scale_sums(plan, rows_of(plan, data, c)) for c in clients])
        assert isinstance(first, ScaleSums)  # a total has the type of its parts
        found = scales(question, first, len(clients))
        filling = filling.model_copy(update={"scales": found})
    plan = Plan(question, filling)
    sums = _total(question, [facts_sums(plan, rows_of(plan, data, c)) for c in clients])
    assert isinstance(sums, FactsSums)  # a total has the type of its parts
    return plan, pooled(plan, sums, len(clients))


def _total(question: Question, sums: Sequence[Tree]) -> Tree:
    """Return a total as a server gets it: with noise, or in the ring of secure sums."""
    noisy = [with_noise(question, each) for each in sums]
    if question.sums == "plain":
        return total(noisy)
    ring = encoded(noisy[0], len(noisy))
    for each in noisy[1:]:
        ring = ring + encoded(each, len(noisy))
    return decoded(ring, Form.of(noisy[0]))


def _whole_rows(world: World, question: Question, filling: Filling | None) -> Dataset:
    """Return the run's rows as a question reads them, with their missing numbers."""
    setup, data = world.server.setup, world.data
    section = as_asked(setup.recipe.data, question, filling)
    if section.name != TABLE:
        return data
    raw = read_data(
        section,
        setup.recipe.seed,
        root=setup.given.root,
        target=question.target,
        code=setup.recipe.engine.code_folder,
        unlisted="keep",
    )
    if len(raw.y) != len(data.y):
        raise DataError(f"{data.name}: rows are left out of training: facts would count them")
    return raw


def _names(data: Dataset, question: Question) -> dict[str, tuple[str, ...]]:
    """Return the classes and the categories that the data have."""
    found = dict[str, tuple[str, ...]]()
    for key in question.unnamed:
        if key == CLASSES:
            found[key] = data.names
            continue
        columns = {column.name: column for column in data.columns}
        column = columns.get(key.removeprefix(COLUMNS))
        if column is None or column.categories is None:
            raise DataError(f"{data.name}: {key} is no column of categories")
        found[key] = in_order(column.categories)
    return found
