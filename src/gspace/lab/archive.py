"""Records small enough to commit: all that a report needs of a run, and no weights. One JSON line each:

    {"recipe": {fields not at their default}, "sessions": [...], "summary": {...}, "curve": {"iteration": [...], ...}}

with a digest. `gspace report RUNS --export FOLDER` collects finished runs there, in a file per experiment, and a report
reads such files and run folders alike. `test_error` is that of held-out training images where the recipe has a
`validation`. Curves are thinned: the lowest error of a run may lie between two points.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from gspace.lab.cells import Scores
from gspace.lab.errors import RecordError, reason
from gspace.lab.recipe import Recipe
from gspace.lab.record import COLUMNS, METRICS, RECIPE, Record, parsed, read_run, sealed, unsealed, write_atomic

POINTS, GRID_POINTS = 100, 10  # most points of a curve, and of one that only helps to choose a setting
OLD = "*-seed*-????????????.json"
ENTRIES = {"recipe", "sessions", "summary", "curve"}


def to_line(record: Record) -> str:
    """A record as the text of its line, curve by columns."""
    curve = thinned(record.metrics, GRID_POINTS if record.recipe.validation else POINTS)
    content = {
        "recipe": record.recipe.short(),
        "sessions": _rounded(record.sessions),
        "summary": _rounded(record.summary),
        "curve": {name: _rounded([line[name] for line in curve]) for name in COLUMNS},
    }
    return json.dumps(sealed(content, record.recipe.identity), ensure_ascii=False) + "\n"


def from_line(text: bytes, where: str) -> Record:
    """The record in a line that `to_line` wrote; `where` names it in an error."""
    try:
        content = parsed(text)
        recipe = Recipe.from_dict(content["recipe"])
        content = unsealed(content, recipe.identity)
        if content.keys() - ENTRIES:
            raise ValueError(f"{min(content.keys() - ENTRIES)!r} is no entry of a record")
        columns, summary = content["curve"], dict(content["summary"])  # only what has ended is kept
        points = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return Record.checked(recipe, content["sessions"], points, summary)
    except KeyError as error:
        raise RecordError(f"{where} is no record of a run: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"{where} is no record of a run: {reason(error)}") from error


def from_lines(path: Path) -> list[Record]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    return [from_line(line, f"{path}, line {k}") for k, line in enumerate(lines, 1)]


def collect(records: Iterable[Record], out: Path, home: Callable[[Recipe], str]) -> dict[Path, int]:
    """Adds finished runs to the files below `out`, each to the one that `home` names; returns how many went where.

    A run that is recorded there stays as it is, and where it is.
    """
    there = {path: {record.recipe: record for record in from_lines(path)} for path in sorted(out.glob("*.jsonl"))}
    known = {recipe for some in there.values() for recipe in some}
    added: dict[Path, int] = {}
    for record in records:
        if record.summary is not None and record.recipe not in known:
            path = out / f"{home(record.recipe)}.jsonl"
            there.setdefault(path, {})[record.recipe] = record
            added[path] = added.get(path, 0) + 1
    for path in added:
        ordered = sorted(there[path].values(), key=lambda record: record.recipe.folder)
        write_atomic(path, "".join(map(to_line, ordered)).encode())
    return added


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Every run below the paths, folder or file, once, in the order of their names; a finished one before another."""
    found: dict[Recipe, Record] = {}
    for record in sorted(_each(paths), key=lambda record: record.summary is None):
        found.setdefault(record.recipe, record)
    return sorted(found.values(), key=lambda record: record.recipe.folder)


def _each(paths: Sequence[Path]) -> Iterator[Record]:
    for root in paths:
        if not root.exists():
            raise RecordError(f"{root} does not exist")
        for path in root.rglob(OLD):
            raise RecordError(f"{path} is a record of gspace 0.1, without a digest: now they are lines of .jsonl files")
        yield from (read_run(path.parent) for path in sorted(root.rglob(RECIPE)))
        for path in [root] if root.is_file() else sorted(root.rglob("*.jsonl")):
            yield from from_lines(path) if path.name != METRICS else ()


def scores_of(records: Iterable[Record]) -> Scores:
    """Test (or validation) errors of the finished runs; infinity for the diverged."""
    errors = {record.recipe: record.summary.get("test_error") for record in records if record.summary is not None}
    # As a committed record has it: what is chosen among equals must not depend on where it is read.
    return {recipe: inf if error is None else float(_rounded(error)) for recipe, error in errors.items()}.get


def thinned(metrics: Sequence[Any], points: int) -> Sequence[Any]:
    """At most so many points, evenly, the last one kept."""
    step = -(-len(metrics) // points)
    return metrics[::-1][:: max(1, step)][::-1]


def _rounded(value: Any) -> Any:
    """To five significant digits, whatever was measured."""
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
