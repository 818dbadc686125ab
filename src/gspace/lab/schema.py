"""What a record may hold, and the digest that tells a changed one: checked here, wherever a record is read.

A `ValueError` says what is wrong; whoever reads the file names it. A digest is the SHA-256 of an object as JSON and of
the run that it belongs to, so a file of another run has a wrong one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from gspace.lab.recipe import Recipe

Line = dict[str, Any]
Rule = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _positive(value: Any) -> bool:
    return _number(value) and value >= 0


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _loss(value: Any) -> bool:
    """JSON has no number for a loss that is not finite."""
    return value is None or _number(value)


COLUMNS = ("iteration", "train_loss", "train_error", "test_loss", "test_error")
"""What every point of a curve has; the rest follows from the recipe."""

POINT: Mapping[str, Rule] = {
    "iteration": _whole,
    "epoch": _positive,
    "lr": _positive,
    "train_loss": _loss,
    "train_error": _share,
    "test_loss": _loss,
    "test_error": _share,
    "seconds": _positive,
}
SUMMARY: Mapping[str, Rule] = {
    **POINT,
    "status": lambda value: value in ("finished", "diverged"),
    "identity": lambda value: isinstance(value, str),
    "iterations": _whole,
    "stacked": _whole,
    "best_test_error": _share,
    "fit_loss": _loss,
    "fit_error": _share,
    "images_per_second": _positive,
    "wall_seconds": _positive,
    "overhead_seconds": _positive,
}
DIGEST = "digest"


def parsed(content: bytes) -> Line:
    """The JSON object in a file or a line."""
    try:
        value = json.loads(content, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def sealed(value: Mapping[str, Any], identity: str) -> Line:
    """With the digest that makes it a part of the run."""
    return {**value, DIGEST: _digest(value, identity)}


def unsealed(value: Line, identity: str) -> Line:
    """Without its digest, once that is compared."""
    rest = {name: entry for name, entry in value.items() if name != DIGEST}
    if DIGEST not in value:
        raise ValueError("it has no digest: it was written before gspace 0.2")
    if value[DIGEST] != _digest(rest, identity):
        raise ValueError("its digest differs: it was changed, or is another run's")
    return rest


def _digest(value: Mapping[str, Any], identity: str) -> str:
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(f"{identity} {text}".encode()).hexdigest()[:16]


def check_summary(summary: Line, recipe: Recipe) -> Line:
    """The end of a run of this recipe."""
    rules = dict(SUMMARY)
    if summary.get("status") == "diverged":
        rules["test_error"] = lambda value: value is None
    _check(summary, rules, ("status", "identity", "iteration", "iterations", "test_error"))
    if summary["identity"] != recipe.identity:
        raise ValueError(f"it is the end of run {summary['identity']}, not of {recipe.folder}")
    return summary


def check_sessions(sessions: Any) -> tuple[Line, ...]:
    """Where and with what a run was computed: its environments, oldest first."""
    if not isinstance(sessions, list) or not all(isinstance(one, dict) for one in sessions):
        raise ValueError("it has no list of sessions")
    return tuple(sessions)


def check_curve(points: Sequence[Line]) -> Sequence[Line]:
    """Points of a curve, in order."""
    for point in points:
        _check(point, POINT, COLUMNS)
    iterations = [point["iteration"] for point in points]
    if iterations != sorted(set(iterations)):
        raise ValueError("the points of its curve are not in order")
    return points


def check_end(summary: Line | None, points: Sequence[Line]) -> None:
    """The curve of a run that has ended ends where its summary says."""
    if summary is None:
        return
    names = ("iteration", "test_error") if summary["status"] == "finished" else ("iteration",)
    last = points[-1] if points else {}
    for name in names:
        if last.get(name) != summary[name]:
            raise ValueError(f"its curve ends with {name} {last.get(name)}, its summary has {summary[name]}")


def _check(value: Line, rules: Mapping[str, Rule], needed: Sequence[str]) -> None:
    for name in needed:
        if name not in value:
            raise ValueError(f"it has no {name!r}")
    for name, entry in value.items():
        if name not in rules:
            raise ValueError(f"{name!r} is no field of a record")
        if not rules[name](entry):
            raise ValueError(f"{name} is {entry!r}")
