"""From records to tables: *paper | ours mean ± std (n)*, failures kept, differences between runs of one seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import floor, log10
from statistics import fmean, stdev

from gspace.lab.cells import Cell, Method
from gspace.lab.document import Table
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record

Found = Mapping[Recipe, Record]


@dataclass(frozen=True)
class Measure:
    """A number of a summary.

    Attributes:
        scale: From the summary's unit to the label's.
        form: How it is written.
    """

    key: str
    label: str
    scale: float
    form: str

    def measured_on(self, recipe: Recipe) -> str:
        """Its label: grids are scored on held-out training images."""
        return self.label.replace("test", "validation") if recipe.validation else self.label


MEASURES = {
    measure.key: measure
    for measure in (
        Measure("test_error", "test error, %", 100, ".2f"),
        Measure("fit_loss", "training loss", 1, ".3g"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """What the runs of a cell gave.

    Attributes:
        values: Per seed, of the runs that reached their end.
        diverged: How many did not.
    """

    values: Mapping[int, float]
    diverged: int = 0

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None


def outcome(recipes: Sequence[Recipe], found: Found, measure: Measure) -> Outcome:
    summaries = {recipe.seed: found[recipe].summary for recipe in recipes if recipe in found}
    ended = {seed: summary for seed, summary in summaries.items() if summary is not None}
    values = {seed: summary.get(measure.key) for seed, summary in ended.items() if summary["status"] == "finished"}
    known = {seed: measure.scale * value for seed, value in values.items() if value is not None}
    return Outcome(known, sum(summary["status"] == "diverged" for summary in ended.values()))


def write(found: Outcome, measure: Measure) -> str:
    """Mean ± standard deviation (n), and how many diverged; – where nothing has ended.

    >>> write(Outcome({0: 7.0, 1: 7.2}, diverged=1), MEASURES["test_error"])
    '7.10 ± 0.14 (2), 1 diverged'
    """
    text = mean_std(list(found.values.values()), measure)
    diverged = f"{found.diverged} diverged" if found.diverged else ""
    return ", ".join(filter(None, (text, diverged))) or "–"


def mean_std(values: Sequence[float], measure: Measure, sign: str = "") -> str:
    """With the sample standard deviation from two values on; significant digits are counted on that then.

    >>> mean_std([0.4934, 0.5066], MEASURES["fit_loss"])
    '0.5000 ± 0.0093 (2)'
    """
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:{sign}{measure.form}} (1)"
    std, form = stdev(values), measure.form
    if form.endswith("g") and 1e-6 < std < 1e6:
        form = f".{max(0, 1 - floor(log10(std)))}f"
    return f"{fmean(values):{sign}{form}} ± {std:{form}} ({len(values)})"


def tables(cells: Sequence[Cell], found: Found, measures: Sequence[str]) -> list[Table]:
    """One table per part and measure. Settings are chosen by error alone, so a grid has that table alone."""
    made = []
    for part in dict.fromkeys(cell.part for cell in cells):
        members = [cell for cell in cells if cell.part == part]
        grid = any(cell.recipes[0].validation for cell in members)
        for k, key in enumerate(measures[:1] if grid else measures):
            made.append(
                table(part, members if k == 0 else [replace(c, setting="") for c in members], found, MEASURES[key])
            )
    return made


def table(part: str, cells: Sequence[Cell], found: Found, measure: Measure) -> Table:
    """Lines of a part against its methods, controls last; with a single line, its methods one below the other.

    A control without any run has no column; the note names it.
    """
    validation = bool(cells[0].recipes[0].validation)
    label = measure.measured_on(cells[0].recipes[0])
    title = label if part in ("test error", label) else f"{part[0].upper()}{part[1:]}: {label}"
    run = {cell.method for cell in cells if any(recipe in found for recipe in cell.recipes)}
    asked = sorted(dict.fromkeys(cell.method for cell in cells), key=lambda method: method.control)
    methods = [method for method in asked if method in run or not method.control]
    absent = ", ".join(method.label for method in asked if method not in methods)
    note = f"Not run: {absent}." if absent else ""
    lines = list(dict.fromkeys(cell.line for cell in cells))
    at = {(cell.line, cell.method): cell for cell in cells}
    printed = [m for m in methods if measure.key == "test_error" and any(c.paper for c in cells if c.method == m)]
    if len(lines) == 1 and len(methods) > 6:
        below = tuple((_name(m), _written(at.get((lines[0], m)), found, measure)) for m in methods)
        return Table(title, (lines[0], label), below, note=note)
    head = [""]
    for method in methods:
        head += [f"{_name(method)}: paper", "ours"] if method in printed else [_name(method)]
    pairs = [] if validation else _compared(methods)
    head += [f"{other.label} against {base.label}" for base, other in pairs]

    def row(line: str) -> tuple[str, ...]:
        made = [line]
        for method in methods:
            cell = at.get((line, method))
            made += [str((cell and cell.paper) or "–")] if method in printed else []
            made.append(_written(cell, found, measure))
        gaps = [difference(at.get((line, base)), at.get((line, other)), found, measure) for base, other in pairs]
        return (*made, *gaps)

    rows = tuple(map(row, lines))
    return Table(title, tuple(head), rows, note=note)


def _name(method: Method) -> str:
    return f"{method.label} (control)" if method.control else method.label


def _written(cell: Cell | None, found: Found, measure: Measure) -> str:
    if cell is None:
        return "–"
    text = write(outcome(cell.recipes, found, measure), measure)
    return f"{text}; {cell.setting}" if cell.setting else text


def _compared(methods: Sequence[Method]) -> list[tuple[Method, Method]]:
    """G-SGD with all that is SGD, controls among them; then SGD with its other starts, where they are no controls."""
    ours = [method for method in methods if method.key == "gsgd"]
    plain = [method for method in methods if method.fields.get("optimizer", "sgd").startswith("sgd")]
    starts = [method for method in plain if method.key == "sgd" or ("init" in method.fields and not method.control)]
    return [*((base, other) for other in ours for base in plain), *combinations(starts, 2)]


def gaps(base: Cell | None, other: Cell | None, found: Found, measure: Measure) -> list[float]:
    """How much more `other` has than `base`, for each seed that both finished: same initial stream, same batches."""
    if base is None or other is None:
        return []
    ours, theirs = (outcome(cell.recipes, found, measure).values for cell in (other, base))
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def difference(base: Cell | None, other: Cell | None, found: Found, measure: Measure) -> str:
    """Those gaps in a cell of a table."""
    return mean_std(gaps(base, other, found, measure), measure, "+") or "–"
