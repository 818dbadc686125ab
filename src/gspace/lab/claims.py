"""What the records say of each claim: one line each at the top of a report, and line by line at its end.

The claims are data, in `experiments.toml`: the paper's, and ours.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from math import log10
from statistics import fmean, linear_regression
from typing import NamedTuple

from gspace.lab.archive import scores_of
from gspace.lab.cells import Experiment, Variant
from gspace.lab.document import Table
from gspace.lab.experiments import FACTS
from gspace.lab.tabulate import ERROR, MEASURES, Found, gaps, mean_std, outcome

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
    cells = Variant(length=Fraction(claim.length)).cells(experiment, scores_of(found.values()))
    at = {(cell.line, cell.method.key): cell for cell in cells if claim.part in cell.part}
    lines: list[Line] = []
    along: dict[float, Mapping[int, float]] = {}
    diverged = 0
    for place in dict.fromkeys(place for place, _ in at):
        base, other = (at.get((place, key)) for key in (claim.base, claim.other))
        if base is None or other is None:
            continue
        by_seed = gaps(base, other, found, measure)
        lost = sum(outcome(cell.recipes, found, measure).diverged for cell in (base, other))
        diverged += lost
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
    slopes, where = trend(along), f"{lines[0].place} to {lines[-1].place}" if lines else ""
    if diverged:
        return [Line(where, slopes, "open", f"{diverged} diverged")]
    return [Line(where, slopes, verdict(slopes))] if slopes else []


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
