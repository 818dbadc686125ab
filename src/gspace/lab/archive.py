"""Records small enough to commit: all that a report needs of a run, and no weights.

    {"recipe": {fields not at their default}, "sessions": [...], "summary": {...}, "curve": {"iteration": [...], ...}}

with a digest. A record is a JSON file of its own or a line of a JSON-lines file. `test_error` is that of held-out
training images where the recipe has a `validation`. Curves are thinned: the lowest error of a run may lie between two
points. A report reads run folders and such files alike.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspace.lab.errors import RecordError, reason
from gspace.lab.experiment import Scores
from gspace.lab.recipe import DEFAULTS, Recipe
from gspace.lab.record import METRICS, RECIPE, Record, make_folder, read_run, write_atomic
from gspace.lab.schema import COLUMNS, Line, check_curve, check_end, check_summary, parsed, sealed, unsealed

POINTS, GRID_POINTS = 100, 10  # most points of a curve, and of one that only helps to choose a setting
DIGITS = 5  # significant digits of what was measured
LINES = ".jsonl"
ENTRIES = {"recipe", "sessions", "summary", "curve"}


def short_recipe(recipe: Recipe) -> dict[str, Any]:
    """The fields that are not at their default: what a queue file holds."""
    usual = Recipe(epochs=1.0).to_dict() | {"epochs": DEFAULTS["epochs"]}
    return {name: value for name, value in recipe.to_dict().items() if value != usual[name]}


def to_json(record: Record) -> str:
    """A record as the text of its file: one line per entry, the curve by columns."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in _content(record).items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _content(record: Record) -> Line:
    content = {
        "recipe": short_recipe(record.recipe),
        "sessions": [_rounded(session) for session in record.sessions],
        "summary": record.summary and _rounded(record.summary),
        "curve": _columns(thinned(record.metrics, GRID_POINTS if record.recipe.validation else POINTS)),
    }
    return sealed(content, record.recipe.identity)


def from_json(path: Path) -> Record:
    """The record in a file that `to_json` wrote; its name is the run's."""
    record = _record(_bytes(path), path, str(path))
    if record.recipe.folder != path.stem:
        raise RecordError(f"{path} is no record of a run: its recipe is that of {record.recipe.folder}")
    return record


def from_json_lines(path: Path) -> list[Record]:
    """The records in a file with one on each line."""
    lines = _bytes(path).splitlines()
    return [_record(line, path, f"{path}, line {k}") for k, line in enumerate(lines, 1)]


def _record(text: bytes, path: Path, where: str) -> Record:
    try:
        content = parsed(text)
        recipe = Recipe.from_dict(content["recipe"])
        content = unsealed(content, recipe.identity)
        if content.keys() - ENTRIES:
            raise ValueError(f"{min(content.keys() - ENTRIES)!r} is no entry of a record")
        columns, summary = content["curve"], content["summary"]
        points = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if summary is not None:
            check_summary(summary, recipe)
        check_end(summary, check_curve(points))
        return Record(path, recipe, tuple(map(dict, content["sessions"])), tuple(points), summary)
    except KeyError as error:
        raise RecordError(f"{where} is no record of a run: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"{where} is no record of a run: {reason(error)}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error


def export(records: Iterable[Record], out: Path) -> list[Path]:
    """Writes the finished ones below `out`, each to its file, or to `out` if that is a .jsonl file; returns the files.

    Records that the .jsonl file has of other runs stay in it.
    """
    finished = [record for record in records if record.summary is not None]
    if out.suffix != LINES:
        make_folder(out)
        texts = {out / f"{record.recipe.folder}.json": to_json(record) for record in finished}
    else:
        make_folder(out.parent)
        known = {record.recipe: record for record in (*(from_json_lines(out) if out.exists() else ()), *finished)}
        ordered = sorted(known.values(), key=lambda record: record.recipe.folder)
        texts = {out: "".join(json.dumps(_content(record), ensure_ascii=False) + "\n" for record in ordered)}
    for path, text in texts.items():
        write_atomic(path, text.encode())
    return list(texts)


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
        if root.is_file():
            yield from from_json_lines(root) if root.suffix == LINES else [from_json(root)]
            continue
        yield from (read_run(path.parent) for path in sorted(root.rglob(RECIPE)))
        yield from (from_json(path) for path in sorted(root.rglob("*-seed*-????????????.json")))
        for path in sorted(root.rglob(f"*{LINES}")):
            yield from from_json_lines(path) if path.name != METRICS else ()


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
