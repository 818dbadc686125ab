"""From records to tables: *paper | ours mean ± std (n)*, failures kept, differences between runs of one seed.

At the top stand the claims, one line each: what the records say of them, and the numbers behind it. At the end
they stand line by line.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import floor, log10
from statistics import fmean, linear_regression, stdev
from typing import NamedTuple

from gspace.lab.archive import scores_of
from gspace.lab.cells import Cell, Experiment, Method, Variant
from gspace.lab.document import Table
from gspace.lab.experiments import FACTS
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


# Claims ---------------------------------------------------------------------------------------------------------------

LEVEL = 0.05  # of a paired t-test, two-sided, not corrected for the number of comparisons
LEAST = 3  # seeds below which nothing is said
SHOWN = 4  # lines that a claim has one by one; more are a range
NOTE = FACTS["text"]["claims"].format(level=LEVEL, least=LEAST)

# What is asked of `other` beside `base`; what is said if it has certainly less, certainly more, and neither.
SAID = {
    "less": ("yes", "the reverse", "not certain"),
    "as much": ("no", "no", "no difference seen"),
    "no more": ("yes", "no", "no difference seen"),
}
WORDS = ("yes", "no", "the reverse", "no difference seen", "not certain", "open")


class Claim(NamedTuple):
    """What `other` is said to have of the measure, beside `base`, on every line of a table; see `experiments.toml`.

    With `grows` it is its lead that is said to grow along the axis of the table. `controls` are methods that may
    explain a lead, by the name that they have here. What stands aside is in the table of all lines alone.
    """

    text: str
    source: str
    experiment: str
    part: str = ""
    base: str = "sgd"
    other: str = "gsgd"
    asks: str = "less"
    measure: str = "test_error"
    length: str = "1"
    controls: Mapping[str, str] = {}
    grows: bool = False
    aside: bool = False


class Line(NamedTuple):
    """What one line of a table says of a claim: differences by seed, a note, and the share that controls have."""

    place: str
    values: Sequence[float]
    word: str
    note: str = ""
    shares: Mapping[str, float] = {}

    def difference(self, claim: Claim) -> str:
        return ", ".join(filter(None, (mean_std(self.values, MEASURES[claim.measure], "+"), self.note)))


CLAIMS = tuple(Claim(**claim) for claim in FACTS["claims"])


def claims(experiments: Collection[Experiment], found: Found) -> tuple[Table, Table]:
    """A row for each claim of which a pair of runs is recorded, and one for each line of a table."""
    known = {experiment.name: experiment for experiment in experiments}
    said = [(c, lines) for c in CLAIMS if c.experiment in known and (lines := _lines(c, known[c.experiment], found))]
    short = tuple(summed(claim, lines) for claim, lines in said if not claim.aside)
    rows = tuple(
        (*((c.text, c.source) if k == 0 else ("", "")), line.place, line.word, line.difference(c), _p([line]))
        for c, lines in said
        for k, line in enumerate(lines)
    )
    head = ("claim", "source", "does it hold?", "difference", "p", "explained by")
    each = ("claim", "source", "on", "does it hold?", "difference", "p")
    top = Table("The paper's claims, and ours", head, short, len(head), NOTE)
    return top, Table("Claims, line by line", each, rows, 4)


def summed(claim: Claim, lines: Sequence[Line]) -> tuple[str, ...]:
    """A claim in one line. Where it has many, their differences are a range of means."""
    count = Counter(line.word for line in lines)
    said = [word if len(lines) == 1 else f"{word} on {count[word]} of {len(lines)}" for word in WORDS if count[word]]
    differences = "; ".join(f"{line.place}: {line.difference(claim)}" for line in lines)
    means = [fmean(line.values) for line in lines if line.values]
    if len(lines) > SHOWN and means:
        differences = f"{lines[0].place} to {lines[-1].place}: means from {min(means):+.2g} to {max(means):+.2g}"
    explained = []
    for name in claim.controls:
        shares = sorted(line.shares[name] for line in lines if name in line.shares)
        where = "" if len(shares) == count["yes"] else f" (on {len(shares)})"
        explained += [f"{name} {_range([f'{share:.0%}' for share in shares])}{where}"] if shares else []
    return claim.text, claim.source, ", ".join(said), differences, _p(lines), ", ".join(explained)


def _p(lines: Sequence[Line]) -> str:
    known = sorted(p for line in lines if (p := p_value(line.values)) is not None)
    return _range([f"{p:.2g}" for p in known])


def _range(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([*texts[:1], *texts[-1:]]))


def _lines(claim: Claim, experiment: Experiment, found: Found) -> list[Line]:
    """What each line of the table says of a claim; one for them all if it is about how they differ."""
    measure = MEASURES[claim.measure]
    cells = Variant(length=Fraction(claim.length)).cells(experiment, scores_of(list(found.values())))
    at = {(cell.line, cell.method.key): cell for cell in cells if claim.part in cell.part}
    lines: list[Line] = []
    along: dict[float, Mapping[int, float]] = {}
    for place in dict.fromkeys(place for place, _ in at):
        base, other = (at.get((place, key)) for key in (claim.base, claim.other))
        if base is None or other is None:
            continue
        by_seed = gaps(base, other, found, measure)
        lost = sum(outcome(cell.recipes, found, measure).diverged for cell in (base, other))
        if not by_seed and not lost:
            continue
        values, notes = list(by_seed.values()), [f"{lost} diverged"] if lost else []
        if base.paper and other.paper and measure is ERROR:
            notes.append(f"the paper {other.paper.mean - base.paper.mean:+.2f}")
        word = "open" if lost else verdict(values, claim.asks)
        parts = {name: gaps(base, at.get((place, key)), found, measure) for name, key in claim.controls.items()}
        whole = {name: part for name, part in parts.items() if word == "yes" and by_seed.keys() <= part.keys()}
        shares = {name: fmean(part[seed] for seed in by_seed) / fmean(values) for name, part in whole.items()}
        lines.append(Line(place, values, word, ", ".join(notes), shares))
        along |= {base.axis.of(base.recipes[0]): by_seed} if base.axis else {}
    if not claim.grows:
        return lines
    slopes = trend(along)
    return [Line(f"{lines[0].place} to {lines[-1].place}", slopes, verdict(slopes))] if slopes else []


def trend(differences: Mapping[float, Mapping[int, float]]) -> list[float]:
    """How much the difference of each seed changes when the quantity on the axis, the key, is ten times as large.

    >>> trend({1.0: {0: 5.0, 1: 6.0}, 100.0: {1: 10.0, 2: 0.0}})
    [2.0]
    """
    if len(differences) < 2:
        return []
    x, seeds = list(map(log10, differences)), set.intersection(*map(set, differences.values()))
    return [linear_regression(x, [some[seed] for some in differences.values()]).slope for seed in sorted(seeds)]


def p_value(values: Sequence[float]) -> float | None:
    """That the mean is 0, by a t-test; None with too few values, or without spread."""
    from scipy.stats import ttest_1samp

    spread = len(values) >= LEAST and max(values) - min(values) > 1e-9  # less is rounding
    return float(ttest_1samp(values, 0.0).pvalue) if spread else None


def verdict(values: Sequence[float], asks: str = "less") -> str:
    """What the differences of one line say.

    >>> [verdict(v) for v in ([-1.0, -1.1, -0.9], [1.0, 1.1, 0.9], [-1.0, 1.0, 0.5], [-1.0, -1.0])]
    ['yes', 'the reverse', 'not certain', 'open']
    """
    p = p_value(values)
    return "open" if p is None else SAID[asks][2 if p >= LEVEL else fmean(values) > 0]
