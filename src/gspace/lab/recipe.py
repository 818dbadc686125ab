"""A run as data: everything that decides its result, frozen, checked, and named by its hash."""

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gspace.lab.data import SETS
from gspace.lab.errors import RecipeError
from gspace.lab.models import MODELS
from gspace.lab.optimizers import INITS, OPTIMIZERS, PINS
from gspace.lab.transform import AUGMENTS, INPUTS

PRECISIONS = ("float64", "float32", "tf32", "bf16")


def _field(
    default: Any, help: str, choices: Collection[str] = (), low: float = -math.inf, high: float = sys.float_info.max
) -> Any:
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. Two recipes are the same run exactly if their `identity` is the same.

    Each field's metadata holds its help text, its choices and its bounds; the command line is generated from them.
    """

    data: str = _field("digits", "data set", SETS)
    model: str = _field("mlp", "network", MODELS)
    hidden: tuple[int, ...] = _field((64, 64), "widths of the hidden layers (mlp)", low=1)
    width: int = _field(64, "channels of the first stage (all networks but mlp)", low=1)
    optimizer: str = _field("sgd", "optimizer", OPTIMIZERS)
    lr: float = _field(0.1, "initial learning rate", low=0)
    momentum: float = _field(0.0, "momentum", low=0, high=1)
    nesterov: bool = _field(False, "Nesterov's momentum")
    weight_decay: float = _field(0.0, "λ of ½λ‖w‖², for optimizers in G-space of ½λΣv² over basis paths", low=0)
    batch_size: int = _field(128, "images per iteration", low=1)
    iterations: int | None = _field(None, "length of the run in iterations", low=1, high=1e9)
    epochs: float | None = _field(None, "length of the run in epochs, instead of iterations", low=0, high=1e6)
    milestones: tuple[float, ...] = _field((), "where the rate drops, as fractions of the run", low=0, high=1)
    gamma: float = _field(0.1, "factor of the rate at each milestone", low=0)
    schedule: str = _field("steps", "how the rate falls: at the milestones, or as a cosine to 0", ("steps", "cosine"))
    warm_up: float = _field(0.0, "the rate rises in a line for this fraction of the run", low=0, high=1)
    seed: int = _field(0, "decides the initial weights and the batches", low=0)
    precision: str = _field("float32", "arithmetic of forward and backward pass", PRECISIONS)
    init: str = _field(
        "default", "initial weights: the network's own, with skeleton weights ±1, or another start", INITS
    )
    batch_norm: str = _field("released", "G-SGD's rule for BatchNorm", ("released", "paper", "exact"))
    allocation: str = _field("fixed", "where G-SGD puts the change of a path", ("fixed", "spread"))
    residual: str = _field("pin", "units of residual streams", ("pin", "tie"))
    pin: str = _field("none", "where chains of units end besides", PINS)
    reference: str | None = _field(
        None, "unit of path values; chosen by the optimizer if left out", ("one", "balanced")
    )
    max_ratio: float | None = _field(
        None, "bound on path ratios per step; the optimizer's own if left out", low=1, high=math.inf
    )
    max_drift: float | None = _field(
        None, "bound on path ratios in all; the optimizer's own if left out", low=1, high=math.inf
    )
    inputs: str = _field("standard", "what the network sees of the pixels", INPUTS)
    augment: str = _field("none", "random change of the training images", AUGMENTS)
    train_size: int | None = _field(None, "use only the first training images", low=1)
    test_size: int | None = _field(None, "use only the first test images", low=1)
    validation: int = _field(0, "measure on this many training images, held out, instead of the test images", low=0)
    eval_every: int | None = _field(None, "iterations between two points of the curve", low=1)
    quick: bool = _field(False, "marks a run of reduced size")
    stands_for: str = _field("", "the data set that the digits of a quick run stand in for")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Recipe).items():
            object.__setattr__(self, name, _checked(name, kind, getattr(self, name)))
        if (self.iterations is None) == (self.epochs is None):
            raise RecipeError("a recipe needs either iterations or epochs, not both")
        if self.epochs == 0:
            raise RecipeError("epochs must be more than 0")
        if self.nesterov and self.momentum == 0:
            raise RecipeError("nesterov needs a momentum above 0")
        if list(self.milestones) != sorted(self.milestones):
            raise RecipeError(f"milestones {self.milestones} are not in order")
        if self.schedule == "cosine" and self.milestones:
            raise RecipeError("a cosine has no milestones: leave them out")

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits: SHA-256 of the fields that are not at their default.

        A field added later, at its default, leaves the identity of every earlier run as it was.
        """
        values = {name: value for name, value in self.to_dict().items() if value != _plain(DEFAULTS[name])}
        return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.data}-{self.model}-{self.optimizer}-seed{self.seed}-{self.identity}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; infinity is written "inf"."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        for name in values:
            check_name("recipe field", name, DEFAULTS)
        return cls(**values)

    def but(self, **changes: Any) -> "Recipe":
        """The same recipe with some fields changed."""
        for name in changes:
            check_name("recipe field", name, DEFAULTS)
        return replace(self, **changes)


DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Recipe) if f.default is not MISSING}
_METADATA = {f.name: f.metadata for f in fields(Recipe)}


def check_name(what: str, name: Any, known: Collection[str]) -> str:
    """`name` if it is among `known`; else an error with the nearest of them."""
    if isinstance(name, str) and name in known:
        return name
    near = difflib.get_close_matches(str(name), known, 1, 0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    raise RecipeError(f"unknown {what} {name!r}: {hint}")


def check_fields(values: Mapping[str, Any]) -> None:
    """An error if one of these fields, each by itself, can be in no recipe."""
    hints = get_type_hints(Recipe)
    for name, value in values.items():
        _checked(name, hints[check_name("recipe field", name, DEFAULTS)], value)


def _checked(name: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`, within the field's choices and bounds."""
    if isinstance(kind, UnionType):
        kinds = [k for k in get_args(kind) if k is not NoneType]
        return None if value is None else _checked(name, kinds[0], value)
    if get_origin(kind) is tuple:
        if isinstance(value, str) or not isinstance(value, Collection):
            raise RecipeError(f"{name} must be a list, not {value!r}")
        return tuple(_checked(name, get_args(kind)[0], item) for item in value)
    if kind is float and (type(value) is int or value == "inf"):
        value = float(value)
    if type(value) is not kind:
        raise RecipeError(f"{name} must be {_KINDS[kind]}, not {value!r}")
    metadata = _METADATA[name]
    if metadata["choices"]:
        return check_name(name, value, metadata["choices"])
    if kind in (int, float) and not metadata["low"] <= value <= metadata["high"]:
        bounds = (
            f"at least {metadata['low']}"
            if value < metadata["low"] or value != value
            else f"at most {metadata['high']:g}"
        )
        raise RecipeError(f"{name} must be {bounds}, not {value}")
    return value


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value
