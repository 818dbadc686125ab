"""What experiments share: the methods, the paper's settings for its networks, and the numbers it prints.

Numbers of the paper are in per cent of test error.
"""

import math
from collections.abc import Mapping
from typing import Any

from gspace.lab.cells import Method, Printed
from gspace.lab.recipe import Recipe

# Methods --------------------------------------------------------------------------------------------------------------

UNGUARDED = {"max_ratio": math.inf, "max_drift": math.inf}  # the paper's algorithm has no guard
HELD = {"max_ratio": math.inf, "max_drift": 1 + 1e-6}  # trained skeleton paths stay where they are

SGD = Method("sgd", "SGD", {"optimizer": "sgd"})
G_SGD = Method("gsgd", "G-SGD", {"optimizer": "gsgd", "init": "skeleton", **UNGUARDED})
GUARDED = Method("gsgd-guarded", "G-SGD, guarded", {"optimizer": "gsgd", "init": "skeleton"})
PATH_SGD = Method("path-sgd", "Path-SGD", {"optimizer": "path-sgd"})
FROM_SKELETON = Method("sgd-skeleton", "SGD from skeleton init", {"optimizer": "sgd", "init": "skeleton"}, True)
FROZEN = Method("sgd-frozen", "SGD, free skeleton frozen", {"optimizer": "sgd-frozen", "init": "skeleton"}, True)
STILL = Method("gsgd-still", "G-SGD, skeleton paths held", {"optimizer": "gsgd", "init": "skeleton", **HELD}, True)
CONTROLS = (FROM_SKELETON, FROZEN)

# Networks and how the paper trains them -------------------------------------------------------------------------------

FASHION = Recipe(data="fashion_mnist", inputs="pooled", lr=0.01, batch_size=64, epochs=100.0, hidden=(8, 8))
QUICK_FASHION: Mapping[str, Any] = {"epochs": 4.0, "quick": True}

PATHS = Recipe(data="mnist", inputs="grey", hidden=(64,) * 5, lr=1.0, batch_size=64, epochs=50.0)

CIFAR = Recipe(
    data="cifar10",
    model="plain-34",
    lr=1.0,
    iterations=64_000,
    milestones=(0.5, 0.75),
    batch_size=128,
    augment="crop-flip",
    precision="bf16",
)
QUICK_CIFAR: Mapping[str, Any] = {
    "width": 8,
    "iterations": 120,
    "eval_every": 10,
    "batch_size": 64,
    "precision": "float32",
    "quick": True,
}
SMALLER = {"plain-34": "plain-10", "resnet-34": "resnet-10", "resnet-110": "resnet-18"}
PIN = {"plain": "stages", "resnet": "none"}  # where chains end; residual blocks end them by themselves


def cifar(model: str, data: str, *, quick: bool = False, **changes: Any) -> Recipe:
    """The paper's settings for a network of its tables; quick ones have few layers of an eighth of the width."""
    small = {**QUICK_CIFAR, "model": SMALLER[model]} if quick else {"model": model}
    return CIFAR.but(**{**small, "data": data, "pin": PIN[model.split("-")[0]], **changes})


def brief(recipe: Recipe, **changes: Any) -> Recipe:
    """A short run: an eighth of the paper's schedule, or less if it is quick."""
    return recipe.but(iterations=80 if recipe.quick else 8000, **changes)


def held_out(recipe: Recipe) -> Recipe:
    """A short run that is judged on training images it does not see."""
    return brief(recipe, validation=1000 if recipe.quick else 5000)


# Numbers the paper prints ---------------------------------------------------------------------------------------------

TABLE_1 = {
    ("plain-34", "cifar10", "sgd"): Printed(7.76, 0.17),
    ("plain-34", "cifar10", "gsgd"): Printed(7.00, 0.10),
    ("plain-34", "cifar100", "sgd"): Printed(36.41, 0.54),
    ("plain-34", "cifar100", "gsgd"): Printed(30.74, 0.29),
    ("resnet-34", "cifar10", "sgd"): Printed(7.13, 0.22),
    ("resnet-34", "cifar10", "gsgd"): Printed(6.66, 0.13),
    ("resnet-34", "cifar100", "sgd"): Printed(28.60, 0.51),
    ("resnet-34", "cifar100", "gsgd"): Printed(27.74, 0.24),
    ("resnet-110", "cifar10", "sgd"): Printed(6.83, 0.25),
    ("resnet-110", "cifar10", "gsgd"): Printed(6.49, 0.06),
    ("resnet-110", "cifar100", "sgd"): Printed(29.44, 0.66),
    ("resnet-110", "cifar100", "gsgd"): Printed(27.74, 0.36),
}
FIGURES_8_9 = {  # stated as accuracies: 94.29, 94.67, 74.39, 75.20
    ("cifar10", "sgd"): Printed(5.71, None, None),
    ("cifar10", "gsgd"): Printed(5.33, None, None),
    ("cifar100", "sgd"): Printed(25.61, None, None),
    ("cifar100", "gsgd"): Printed(24.80, None, None),
}
