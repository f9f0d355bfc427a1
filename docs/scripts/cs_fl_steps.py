"""Tries what CS-FL's second learning rate may be: the rate of the step that is reconstructed.

    python docs/scripts/cs_fl_steps.py RULE [--sum] [--no-feedback] [--rounds N]

The numbers of docs/methods/cs_fl.md are of 50 rounds of fedlog/mnist, seed 0. The server
reconstructs the mean of the measurements and moves the model by it: RULE is whole, sgd or adam.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.core.method import Context, Replies
from fedgist.methods.cs_fl import CSFL
from fedgist.recipe.reading import make, read

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


@dataclass(frozen=True)
class Stepping(CSFL):
    """CS-FL whose reconstructed mean is applied with the second rate."""

    rule: str = "whole"
    summed: bool = False
    moments: list[Tensor] = field(default_factory=list)

    def _step(self, key: Tensor, like: Tensor, replies: Replies, ctx: Context) -> Tensor:
        step = CSFL._step(self, key, like, replies, ctx)  # noqa: SLF001  # a variant of its inside
        step = step * len(list(replies.clients)) if self.summed else step
        if self.rule == "whole":
            return step
        if self.rule == "sgd":
            return self.second_phase_lr * step
        m, v = self.moments or (torch.zeros_like(step), torch.zeros_like(step))
        self.moments[:] = [m.lerp(step, 1 - BETAS[0]), v.lerp(step.square(), 1 - BETAS[1])]
        m, v = (x / (1 - b**ctx.round) for x, b in zip(self.moments, BETAS, strict=True))
        return self.second_phase_lr * m / (v.sqrt() + EPS)


def main() -> None:
    """Run a variant and print the accuracy after every ten rounds, in percent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rule", choices=["whole", "sgd", "adam"])
    parser.add_argument("--sum", action="store_true", help="the sum over clients, not the mean")
    parser.add_argument("--no-feedback", action="store_true")
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    settings = ["method.name=cs_fl", f"train.num_rounds={given.rounds}", "evaluate.every=10"]
    recipe = read(find_recipe("fedlog/mnist"), [*settings, "evaluate.trained_every=0"])
    options = {k: v for k, v in recipe.method.options.items() if k != "reconstruct"}
    method = Stepping(
        **options,
        reconstruct="mean",
        error_feedback=not given.no_feedback,
        rule=given.rule,
        summed=given.sum,
    )
    sections = recipe.model_dump(exclude_unset=True, exclude={"method", "methods"})
    for line in fedgist.run(make(sections), method=method).rounds:
        if "eval/client/accuracy_mean" in line:
            print(line["round"], f"{100 * line['eval/client/accuracy_mean']:.1f}")


if __name__ == "__main__":
    main()
