"""Records small enough to commit: one JSON file per run, with all that a report needs and no weights.

    {"recipe": {fields not at their default}, "sessions": [...], "summary": {...}, "curve": {"iteration": [...], ...}}

`test_error` is that of held-out training images where the recipe has a `validation`. Curves are thinned: the lowest
error of a run may lie between two points. A report reads run folders and such files alike.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspace.lab.errors import RecipeError, RecordError
from gspace.lab.experiment import Scores
from gspace.lab.recipe import DEFAULTS, Recipe
from gspace.lab.record import RECIPE, Line, Record, read_run, write_atomic

COLUMNS = ("iteration", "train_loss", "train_error", "test_loss", "test_error")  # the rest follows from the recipe
POINTS, GRID_POINTS = 100, 10  # most points of a curve, and of one that only helps to choose a setting
DIGITS = 5  # significant digits of what was measured


def short_recipe(recipe: Recipe) -> dict[str, Any]:
    """The fields that are not at their default: what a queue file holds."""
    usual = Recipe(epochs=1.0).to_dict() | {"epochs": DEFAULTS["epochs"]}
    return {name: value for name, value in recipe.to_dict().items() if value != usual[name]}


def to_json(record: Record) -> str:
    """A record as the text of its file: one line per entry, the curve by columns."""
    content = {
        "recipe": short_recipe(record.recipe),
        "sessions": [_rounded(session) for session in record.sessions],
        "summary": record.summary and _rounded(record.summary),
        "curve": _columns(thinned(record.metrics, GRID_POINTS if record.recipe.validation else POINTS)),
    }
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(path: Path) -> Record:
    """The record in a file that `to_json` wrote."""
    try:
        content = json.loads(path.read_bytes())
        columns = content["curve"]
        points = tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        recipe = Recipe.from_dict(content["recipe"])
        _check_summary(content["summary"], recipe)
        return Record(path, recipe, tuple(dict(session) for session in content["sessions"]), points, content["summary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecipeError) as error:
        raise RecordError(f"{path} is no record of a run: {error}") from error


def _check_summary(summary: Mapping[str, Any] | None, recipe: Recipe) -> None:
    """Raises what `from_json` reports if this is not the end of a run of this recipe."""
    if summary is None:
        return
    error = summary["test_error"] if summary["status"] == "finished" else 0.0
    if summary["status"] not in ("finished", "diverged") or not 0 <= error <= 1:
        raise ValueError(f"status {summary['status']!r} with an error of {error!r}")
    if summary.get("identity", "") not in recipe.folder:
        raise ValueError(f"its recipe is that of {recipe.folder}, its end that of {summary['identity']}")


def export(records: Iterable[Record], out: Path) -> list[Path]:
    """Writes the finished ones below `out`; returns the files."""
    written = []
    for record in records:
        if record.summary is not None:
            path = out / f"{record.recipe.folder}.json"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, to_json(record).encode())
            except OSError as error:
                raise RecordError(f"{path} cannot be written: {error}") from error
            written.append(path)
    return written


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Every run below the paths, folder or file, once, in the order of their names; a finished one before another."""
    found: dict[Recipe, Record] = {}
    for record in sorted(_each(paths), key=lambda record: record.summary is None):
        found.setdefault(record.recipe, record)
    return sorted(found.values(), key=lambda record: record.recipe.folder)


def _each(paths: Sequence[Path]) -> Iterable[Record]:
    for root in paths:
        if not root.exists():
            raise RecordError(f"{root} does not exist")
        if root.is_file():
            yield from_json(root)
            continue
        yield from (read_run(path.parent) for path in sorted(root.rglob(RECIPE)))
        yield from (from_json(path) for path in sorted(root.rglob("*-seed*-????????????.json")))


def scores_of(records: Sequence[Record]) -> Scores:
    """Test (or validation) errors of the finished runs; infinity for the diverged."""
    found = {record.recipe: error_of(record.summary) for record in records if record.summary is not None}
    return found.get


def error_of(summary: Mapping[str, Any]) -> float:
    """As a committed record has it: what is chosen among equals must not depend on where it is read."""
    error = summary.get("test_error")
    return float("inf") if error is None else float(_round(error))


def thinned(metrics: Sequence[Line], points: int) -> Sequence[Line]:
    """At most so many points, evenly, the last one kept."""
    step = -(-len(metrics) // points)
    return metrics[::-1][:: max(1, step)][::-1]


def _columns(metrics: Sequence[Line]) -> dict[str, list[Any]]:
    return {name: [_round(line[name]) for line in metrics] for name in COLUMNS}


def _rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _round(value) for name, value in line.items()}


def _round(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
