"""From records to tables: *paper | ours mean ± std (n)*, failures kept, differences between runs of one seed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import floor, log10
from statistics import fmean, stdev
from typing import NamedTuple

from gspace.lab.cells import Cell, Method
from gspace.lab.document import Table
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record

Found = Mapping[Recipe, Record]


class Measure(NamedTuple):
    """A number of a summary: its key there, its label, from the summary's unit to the label's, how it is written."""

    key: str
    label: str
    scale: float
    form: str

    def measured_on(self, recipe: Recipe) -> str:
        """Its label: grids are scored on held-out training images."""
        return self.label.replace("test", "validation") if recipe.validation else self.label


ERROR = Measure("test_error", "test error, %", 100, ".2f")
LOSS = Measure("fit_loss", "training loss", 1, ".3g")
MEASURES = {measure.key: measure for measure in (ERROR, LOSS)}


def measures_of(cells: Sequence[Cell]) -> Collection[Measure]:
    """What is shown of them. Settings are chosen by error alone, so a grid shows nothing else."""
    return (ERROR,) if any(cell.recipes[0].validation for cell in cells) else MEASURES.values()


class Outcome(NamedTuple):
    """What the runs of a cell gave: a value per seed of those that reached their end, and how many did not."""

    values: Mapping[int, float]
    diverged: int = 0


def outcome(recipes: Sequence[Recipe], found: Found, measure: Measure) -> Outcome:
    summaries = {recipe.seed: found[recipe].summary for recipe in recipes if recipe in found}
    ended = {seed: summary for seed, summary in summaries.items() if summary is not None}
    values = {seed: summary.get(measure.key) for seed, summary in ended.items() if summary["status"] == "finished"}
    known = {seed: measure.scale * value for seed, value in values.items() if value is not None}
    return Outcome(known, sum(summary["status"] == "diverged" for summary in ended.values()))


def write(found: Outcome, measure: Measure) -> str:
    """Mean ± standard deviation (n), and how many diverged; – where nothing has ended.

    >>> write(Outcome({0: 7.0, 1: 7.2}, diverged=1), ERROR)
    '7.10 ± 0.14 (2), 1 diverged'
    """
    diverged = f"{found.diverged} diverged" if found.diverged else ""
    return ", ".join(filter(None, (mean_std(list(found.values.values()), measure), diverged))) or "–"


def mean_std(values: Sequence[float], measure: Measure, sign: str = "") -> str:
    """With the sample standard deviation from two values on; significant digits are counted on that then.

    >>> mean_std([0.4934, 0.5066], LOSS)
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


def parts_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    return {part: [c for c in cells if c.part == part] for part in dict.fromkeys(cell.part for cell in cells)}


def tables(cells: Sequence[Cell], found: Found) -> list[Table]:
    """One table per part and measure; the first says what was chosen."""
    return [
        table(part, members if measure is ERROR else [replace(c, setting="") for c in members], found, measure)
        for part, members in parts_of(cells).items()
        for measure in measures_of(members)
    ]


def table(part: str, cells: Sequence[Cell], found: Found, measure: Measure) -> Table:
    """Lines of a part against its methods, controls last; with a single line, its methods one below the other.

    A control without any run has no column; the note names it.
    """
    first = cells[0].recipes[0]
    label = measure.measured_on(first)
    title = label if part in ("test error", label) else f"{part}: {label}"
    title = title[0].upper() + title[1:]
    run = {cell.method for cell in cells if any(recipe in found for recipe in cell.recipes)}
    asked = sorted(dict.fromkeys(cell.method for cell in cells), key=lambda method: method.control)
    methods = [method for method in asked if method in run or not method.control]
    absent = ", ".join(method.label for method in asked if method not in methods)
    note = f"Not run: {absent}." if absent else ""
    names = {m: f"{m.label} (control)" if m.control else m.label for m in methods}
    lines = list(dict.fromkeys(cell.line for cell in cells))
    at = {(cell.line, cell.method): cell for cell in cells}
    if len(lines) == 1 and len(methods) > 6:
        below = tuple((names[m], _written(at.get((lines[0], m)), found, measure)) for m in methods)
        return Table(title, (lines[0], label), below, note=note)
    printed = [m for m in methods if measure is ERROR and any(c.paper for c in cells if c.method == m)]
    pairs = [] if first.validation else _compared(methods)
    head = [""]
    for method in methods:
        head += [f"{names[method]}: paper", "ours"] if method in printed else [names[method]]
    head += [f"{other.label} against {base.label}" for base, other in pairs]

    def row(line: str) -> tuple[str, ...]:
        made = [line]
        for method in methods:
            cell = at.get((line, method))
            made += [str((cell and cell.paper) or "–")] if method in printed else []
            made.append(_written(cell, found, measure))
        return (*made, *(difference(at.get((line, a)), at.get((line, b)), found, measure) for a, b in pairs))

    return Table(title, tuple(head), tuple(map(row, lines)), note=note)


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


def gaps(base: Cell | None, other: Cell | None, found: Found, measure: Measure) -> dict[int, float]:
    """How much more `other` has than `base`, for each seed that both finished: same initial stream, same batches."""
    if base is None or other is None:
        return {}
    ours, theirs = (outcome(cell.recipes, found, measure).values for cell in (other, base))
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def difference(base: Cell | None, other: Cell | None, found: Found, measure: Measure) -> str:
    return mean_std(list(gaps(base, other, found, measure).values()), measure, "+") or "–"
