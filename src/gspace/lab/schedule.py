"""How long a run is and what its learning rate is at each iteration: one schedule for every optimizer."""

import math
from collections.abc import Collection

from gspace.lab.data import SETS
from gspace.lab.errors import RecipeError
from gspace.lab.recipe import Recipe

CURVE = 100  # points of a curve when the recipe does not say how often to evaluate


def images_of(recipe: Recipe) -> int:
    """Training images of a run."""
    there = SETS[recipe.data].train - recipe.validation
    return min(recipe.train_size or there, there)


def steps_per_epoch(recipe: Recipe, images: int) -> int:
    """Whole batches in the training set; the rest of each permutation is left out."""
    if recipe.batch_size > images:
        raise RecipeError(f"batch_size {recipe.batch_size} is more than the {images} training images")
    return images // recipe.batch_size


def total_iterations(recipe: Recipe, images: int) -> int:
    if recipe.iterations is not None:
        return recipe.iterations
    assert recipe.epochs is not None, "a recipe has a length"
    return max(1, round(recipe.epochs * steps_per_epoch(recipe, images)))


def drops(recipe: Recipe, total: int) -> tuple[int, ...]:
    """The iterations at which a schedule of steps falls."""
    return tuple(round(milestone * total) for milestone in recipe.milestones)


def changes(recipe: Recipe, total: int) -> Collection[int]:
    """The iterations before which the learning rate has to be set."""
    return range(total) if recipe.schedule == "cosine" or recipe.warm_up else drops(recipe, total)


def learning_rate(recipe: Recipe, iteration: int, total: int) -> float:
    """lr · gamma^k, where k milestones (fractions of the run) have passed, or half a cosine; first a line upwards.

    >>> recipe = Recipe(iterations=100, lr=1.0, schedule="cosine", warm_up=0.04)
    >>> [round(learning_rate(recipe, i, 100), 3) for i in (0, 3, 4, 52, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """
    rise = round(recipe.warm_up * total)
    if iteration < rise:
        return recipe.lr * (iteration + 1) / rise
    if recipe.schedule == "cosine":
        return recipe.lr * (1 + math.cos(math.pi * (iteration - rise) / (total - rise))) / 2
    return recipe.lr * recipe.gamma ** sum(iteration >= drop for drop in drops(recipe, total))


def evaluation_interval(recipe: Recipe, total: int) -> int:
    """Iterations between two points of the curve."""
    return recipe.eval_every if recipe.eval_every is not None else max(1, total // CURVE)


def points(interval: int, total: int, iteration: int) -> list[int]:
    """Where the curve has points once `iteration` is reached: every `interval` iterations, and at the end.

    >>> points(7, 20, 15), points(7, 20, 20)
    ([7, 14], [7, 14, 20])
    """
    last = [total] if iteration == total and total % interval else []
    return [*range(interval, iteration + 1, interval), *last]
