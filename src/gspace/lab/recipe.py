"""A run as data: everything that decides its result, frozen, checked, and named by its hash."""

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from gspace.lab.data import SETS
from gspace.lab.errors import RequestError
from gspace.lab.models import INITS, MODELS, OPTIMIZERS, PINS
from gspace.lab.transform import AUGMENTS, INPUTS


def option(
    default: Any, help: str, choices: Collection[str] = (), low: float = -math.inf, high: float = sys.float_info.max
) -> Any:
    """A field that is an option of the command line, with its help text, choices and bounds."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. Two recipes are the same run exactly if their `identity` is the same."""

    data: str = option("digits", "data set", SETS)
    model: str = option("mlp", "network", MODELS)
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers (mlp)", low=1)
    width: int = option(64, "channels of the first stage (all networks but mlp)", low=1)
    optimizer: str = option("sgd", "optimizer", OPTIMIZERS)
    lr: float = option(0.1, "initial learning rate", low=0)
    momentum: float = option(0.0, "momentum", low=0, high=1)
    nesterov: bool = option(False, "Nesterov's momentum")
    weight_decay: float = option(0.0, "λ of ½λ‖w‖², for optimizers in G-space of ½λΣv² over basis paths", low=0)
    batch_size: int = option(128, "images per iteration", low=1)
    iterations: int | None = option(None, "length of the run in iterations", low=1, high=1e9)
    epochs: float | None = option(None, "length of the run in epochs, instead of iterations", low=0, high=1e6)
    milestones: tuple[float, ...] = option((), "where the rate drops, as fractions of the run", low=0, high=1)
    gamma: float = option(0.1, "factor of the rate at each milestone", low=0)
    schedule: str = option("steps", "how the rate falls: at the milestones, or as a cosine to 0", ("steps", "cosine"))
    warm_up: float = option(0.0, "the rate rises in a line for this fraction of the run", low=0, high=1)
    seed: int = option(0, "decides the initial weights and the batches", low=0)
    precision: str = option("float32", "arithmetic of the passes", ("float64", "float32", "tf32", "bf16"))
    init: str = option("default", "initial weights: the network's own, skeleton weights ±1, or another start", INITS)
    batch_norm: str = option("released", "G-SGD's rule for BatchNorm", ("released", "paper", "exact"))
    allocation: str = option("fixed", "where G-SGD puts the change of a path", ("fixed", "spread"))
    residual: str = option("pin", "units of residual streams", ("pin", "tie"))
    pin: str = option("none", "where chains of units end besides", PINS)
    reference: str | None = option(None, "unit of path values; else the optimizer chooses", ("one", "balanced"))
    max_ratio: float | None = option(None, "bound on path ratios per step; else the optimizer's", low=1, high=math.inf)
    max_drift: float | None = option(None, "bound on path ratios in all; else the optimizer's", low=1, high=math.inf)
    inputs: str = option("standard", "what the network sees of the pixels", INPUTS)
    augment: str = option("none", "random change of the training images", AUGMENTS)
    train_size: int | None = option(None, "use only the first training images", low=1)
    test_size: int | None = option(None, "use only the first test images", low=1)
    validation: int = option(0, "measure on this many training images, held out, instead of the test images", low=0)
    eval_every: int | None = option(None, "iterations between two points of the curve", low=1)
    quick: bool = option(False, "marks a run of reduced size")
    stands_for: str = option("", "the data set that the digits of a quick run stand in for")

    def __post_init__(self) -> None:
        for name in KINDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        refused = {
            "a run needs a length: iterations or epochs, for example epochs 20": self.iterations is self.epochs is None,
            "a run has one length: iterations or epochs, not both": None not in (self.iterations, self.epochs),
            "epochs must be more than 0": self.epochs == 0,
            "nesterov needs a momentum above 0": self.nesterov and self.momentum == 0,
            f"milestones {self.milestones} are not in order": list(self.milestones) != sorted(self.milestones),
            "a cosine has no milestones: leave them out": self.schedule == "cosine" and self.milestones,
        }
        for why, so in refused.items():
            if so:
                raise RequestError(why)

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits: SHA-256 of the fields that are not at their default.

        A field added later, at its default, leaves the identity of every earlier run as it was.
        """
        text = json.dumps(self.short(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def folder(self) -> str:
        return f"{self.data}-{self.model}-{self.optimizer}-seed{self.seed}-{self.identity}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; infinity is written "inf"."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def short(self) -> dict[str, Any]:
        """The fields that are not at their default: what a queue file holds."""
        return {name: value for name, value in self.to_dict().items() if value != _plain(DEFAULTS[name])}

    @classmethod
    def from_dict(cls, values: Any) -> "Recipe":
        if not isinstance(values, Mapping):
            raise RequestError(f"{values!r} is no recipe")
        return cls(**{check_name("recipe field", name, KINDS): value for name, value in values.items()})

    def but(self, **changes: Any) -> "Recipe":
        return replace(self, **{check_name("recipe field", name, KINDS): value for name, value in changes.items()})


class Kind(NamedTuple):
    """The type of a field, of its items if there may be several, and whether None is a value of it."""

    item: type
    many: bool = False
    optional: bool = False


def kind_of(hint: Any) -> Kind:
    if isinstance(hint, UnionType):
        return Kind(next(kind for kind in get_args(hint) if kind is not NoneType), optional=True)
    return Kind(get_args(hint)[0], many=True) if get_origin(hint) is tuple else Kind(hint)


KINDS: Mapping[str, Kind] = {name: kind_of(hint) for name, hint in get_type_hints(Recipe).items()}
DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Recipe)}
_METADATA = {field.name: field.metadata for field in fields(Recipe)}
_SAID = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def check_name(what: str, name: Any, known: Collection[str]) -> str:
    """`name` if it is among `known`; else an error with the nearest of them."""
    if isinstance(name, str) and name in known:
        return name
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    raise RequestError(f"unknown {what} {name!r}: {hint}")


def checked(name: str, value: Any) -> Any:
    """The value of a field as its type, within its choices and bounds."""
    kind = KINDS[name]
    if kind.optional and value is None:
        return None
    if not kind.many:
        return _item(name, kind.item, value)
    if isinstance(value, str) or not isinstance(value, Collection):
        raise RequestError(f"{name} must be a list, not {value!r}")
    return tuple(_item(name, kind.item, item) for item in value)


def _item(name: str, kind: type, value: Any) -> Any:
    if kind is float and (type(value) is int or value == "inf"):
        value = float(value)
    if type(value) is not kind:
        raise RequestError(f"{name} must be {_SAID[kind]}, not {value!r}")
    choices, low, high = (_METADATA[name][key] for key in ("choices", "low", "high"))
    if choices:
        return check_name(name, value, choices)
    if kind in (int, float) and not low <= value <= high:
        bounds = f"at most {high:g}" if value > high else f"at least {low}"
        raise RequestError(f"{name} must be {bounds}, not {value}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


# How long a run is, and its learning rate at each iteration: one schedule for every optimizer. ------------------------


def images_of(recipe: Recipe) -> int:
    there = SETS[recipe.data].train - recipe.validation
    return min(recipe.train_size or there, there)


def steps_per_epoch(recipe: Recipe, images: int) -> int:
    """Whole batches in the training set; the rest of each permutation is left out."""
    if recipe.batch_size > images:
        raise RequestError(f"batch_size {recipe.batch_size} is more than the {images} training images")
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


def curve_interval(recipe: Recipe, total: int) -> int:
    """Iterations between two points of the curve, which has about a hundred if the recipe does not say."""
    return recipe.eval_every if recipe.eval_every is not None else max(1, total // 100)


def points(interval: int, total: int, iteration: int) -> list[int]:
    """Where the curve has points once `iteration` is reached: every `interval` iterations, and at the end.

    >>> points(7, 20, 15), points(7, 20, 20)
    ([7, 14], [7, 14, 20])
    """
    last = [total] if iteration == total and total % interval else []
    return [*range(interval, iteration + 1, interval), *last]
