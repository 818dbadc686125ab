"""How long a run is and what its learning rate is at each iteration: one schedule for every optimizer."""

from gspace.lab.errors import RecipeError
from gspace.lab.recipe import Recipe

CURVE = 100  # points of a curve when the recipe does not say how often to evaluate


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
    """The iterations at which the learning rate falls."""
    return tuple(round(milestone * total) for milestone in recipe.milestones)


def learning_rate(recipe: Recipe, iteration: int, total: int) -> float:
    """lr · gamma^k, where k milestones (fractions of the run) have passed."""
    passed = sum(iteration >= drop for drop in drops(recipe, total))
    return recipe.lr * recipe.gamma**passed


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
