"""The papers' experiments at their own sizes: their recipes, with random rows as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedgist.cli.recipe_files import find_recipe
from fedgist.data.dataset import Dataset
from fedgist.recipe.overrides import Overrides, apply_overrides
from fedgist.recipe.reading import read
from fedgist.recipe.resolve import Setup, resolve
from fedgist.recipe.schema import Recipe


@dataclass(frozen=True)
class PaperSize:
    """A paper's recipe, and the shape and the numbers of its data's rows.

    ``settings`` are changes of the recipe, as in ``--set``.
    """

    recipe: str
    shape: tuple[int, ...]
    classes: int
    rows: int
    tests: int
    settings: tuple[str, ...] = ()

    def data(self) -> Dataset:
        """Return random images in the shape of the paper's: their content changes no time."""
        draw = torch.Generator().manual_seed(0)
        x, x_test = (
            torch.randint(0, 256, (count, *self.shape), dtype=torch.uint8, generator=draw)
            for count in (self.rows, self.tests)
        )
        y, y_test = (torch.arange(count) % self.classes for count in (self.rows, self.tests))
        groups = tuple(label // 5 for label in range(self.classes))
        return Dataset("random", x, y, x_test, y_test, self.classes, 255.0, superclasses=groups)

    def read(self, method: str, *settings: str) -> Recipe:
        """Return the paper's recipe of a method, with further changes."""
        changes = (f"method.name={method}", *self.settings, *settings)
        return read(find_recipe(self.recipe), changes)

    def setup(self, method: str, *settings: str) -> Setup:
        """Return the same, resolved with the random images."""
        given = Overrides(self.data())
        return resolve(apply_overrides(self.read(method, *settings), given, None), given)


# 50 clients x 60 images
FEDLOG_MNIST = PaperSize("fedlog/mnist", (1, 28, 28), 10, 3000, 10_000)
# 5 clients x 240 images
REPSHARE_MNIST = PaperSize("repshare/mnist", (1, 28, 28), 10, 1200, 10_000)
# 315 clients x 100 images; 31 of them in the large pool as well; 13,500 public images
CODISTILLATION_CIFAR = PaperSize("codistillation/cifar100", (3, 32, 32), 100, 50_000, 10_000)
# 6 clients, 5,000 images in all; no size of the paper, whose nets and rows take hours a round
FLESD_SMALL = PaperSize("flesd/small", (3, 32, 32), 10, 5000, 10_000)
