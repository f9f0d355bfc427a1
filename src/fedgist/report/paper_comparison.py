"""A paper's table: ours beside the paper's, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgist.federation.recipe import Recipe
from fedgist.report.comparison import Study
from fedgist.report.formatting import bits
from fedgist.report.tables import Sheet


def side_by_side(
    studies: Mapping[str, Study], recipes: Mapping[str, Recipe], methods: Sequence[str], source: str
) -> list[Sheet]:
    """Return accuracy and communication.

    Methods that were not run have the paper's numbers alone.
    """
    columns = ["method", *(f"{name} {whose}" for name in recipes for whose in ("ours", "paper"))]
    accuracy, traffic = [], []
    for method in methods:
        ours, cost = [method], [method]
        for name, recipe in recipes.items():
            row = (
                next((r for r in studies[name].rows if r.method == method), None)
                if name in studies
                else None
            )
            final = row.final if row else None
            mean = f"{100 * final.mean:.2f}" if final else "-"
            error = f" ± {100 * final.error:.2f}" if final and final.error is not None else ""
            printed = recipe.paper.accuracy.get(method)
            ours += [mean + error, f"{printed[0]:.2f} ± {printed[1]:.2f}" if printed else "-"]
            target = row.target if row else None
            mark = " †" if target and target.reached < target.rounds.count else ""
            until = recipe.paper.communication.get(method)
            cost += [
                bits(8 * target.both.mean) + mark if target else "-",
                bits(until) if until else "-",
            ]
        accuracy.append(tuple(ours))
        traffic.append(tuple(cost))
    seeds = {len(row.runs) for study in studies.values() for row in study.rows}
    how_many = "-".join(str(n) for n in sorted({min(seeds), max(seeds)})) if seeds else "0"
    goals = ", ".join(
        f"{name} {r.paper.target_accuracy:g} %"
        for name, r in recipes.items()
        if r.paper.target_accuracy
    )
    return [
        Sheet(
            "Accuracy in the last round, mean over clients (%)",
            tuple(columns),
            tuple(accuracy),
            f"mean ± standard error over seeds (ours: {how_many}). paper: {source}. -: not run, "
            "or not in this version",
        ),
        Sheet(
            "Communication, both ways, until the target accuracy",
            tuple(columns),
            tuple(traffic),
            f"bits; targets: {goals}. †: not reached by every seed: until the round of its "
            "highest accuracy",
        ),
    ]
