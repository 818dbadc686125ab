"""The paper's claims, one line each: what the records say of them, and the numbers behind it."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

from gspace.lab.archive import scores_of
from gspace.lab.cells import Experiment, Variant, data_label
from gspace.lab.document import Table
from gspace.lab.tabulate import MEASURES, Found, gaps, mean_std

LEVEL = 0.05  # of a paired t-test, two-sided, not corrected for the number of comparisons
LEAST = 3  # seeds below which nothing is said


@dataclass(frozen=True)
class Claim:
    """`other` has less of the measure than `base`, or as much, on every line of a table.

    Attributes:
        part: Text in the heading of the table.
        control: The method that may explain the difference, and has a share of it.
        less: Whether less is claimed; else no difference.
    """

    text: str
    source: str
    experiment: str
    part: str
    base: str
    other: str
    measure: str = "test_error"
    length: Fraction = Fraction(1)
    control: str = ""
    less: bool = True


CLAIMS = (
    Claim("G-SGD ends at a lower test error than SGD", "Tab. 1", "table-1", "", "sgd", "gsgd", control="sgd-skeleton"),
    Claim("so it does beside SGD that starts where it starts", "our control", "table-1", "", "sgd-skeleton", "gsgd"),
    Claim("so it does beside SGD with the free skeleton frozen", "our control", "table-1", "", "sgd-frozen", "gsgd"),
    Claim("G-SGD ends at a lower training loss than SGD", "Fig. 3", "table-1", "", "sgd", "gsgd", "fit_loss"),
    Claim("lower test error on ResNet-110", "Tab. 5", "resnet-110", "", "sgd", "gsgd", length=Fraction(1, 2)),
    Claim(
        "lower training loss on MLPs of every width", "Fig. 4", "mlp-invariance", "the paper's rate", "sgd", "gsgd",
        "fit_loss", control="sgd-skeleton",
    ),
    Claim("lower test error on MLPs of every width", "Fig. 4", "mlp-invariance", "the paper's rate", "sgd", "gsgd"),
    Claim("so it is at the best rate of each", "ours", "mlp-invariance", "best rate", "sgd", "gsgd"),
    Claim("G-SGD is ahead of Path-SGD at the best rate of each", "Fig. 5", "path-sgd", "best rate", "path-sgd", "gsgd"),
    Claim("G-SGD is ahead of SGD at the best rate of each", "Fig. 5", "path-sgd", "best rate", "sgd", "gsgd"),
    Claim("G-SGD is ahead with decay, each at its best λ", "Fig. 8, 9", "regularization", "in full", "sgd", "gsgd"),
    Claim("signs of the skeleton weights do not matter", "Sec. 11.2", "signs", "", "positive", "random", less=False),
)  # fmt: skip

NOTE = (
    "Differences between runs of one seed, mean ± sample standard deviation (number of seeds); p is that of a paired "
    f"t-test, two-sided, not corrected for the number of comparisons. *Certain* is p < {LEVEL:g}; with fewer than "
    f"{LEAST} seeds a line is *open*. Errors in points."
)


def claims(experiments: Collection[Experiment], found: Found) -> Table:
    """One row for each claim of which a pair of runs is recorded."""
    rows = []
    known = {experiment.name: experiment for experiment in experiments}
    for claim in CLAIMS:
        lines = list(_lines(claim, known[claim.experiment], found)) if claim.experiment in known else []
        if lines:
            words, numbers = zip(*lines, strict=True)
            rows.append((claim.text, claim.source, verdict(words), "; ".join(numbers)))
    return Table("The paper's claims", ("claim", "where", "reproduced?", "numbers"), tuple(rows), 4, NOTE)


def _lines(claim: Claim, experiment: Experiment, found: Found) -> Iterator[tuple[str, str]]:
    """What each line of the table says of a claim, in a word and in numbers."""
    measure = MEASURES[claim.measure]
    cells = Variant(length=claim.length).cells(experiment, scores_of(list(found.values())))
    at = {(cell.row, data_label(cell.recipes[0]), cell.method.key): cell for cell in cells if claim.part in cell.part}
    for row, data in dict.fromkeys((row, data) for row, data, _ in at):
        base, other, control = (at.get((row, data, key)) for key in (claim.base, claim.other, claim.control))
        values, part = gaps(base, other, found, measure), gaps(base, control, found, measure)
        if values:
            p, said = p_value(values), word(values, less=claim.less)
            share = fmean(part) / fmean(values) if said == "yes" and len(part) == len(values) else None
            notes = ("" if p is None else f"p = {p:.2g}", "" if share is None else f"{share:.0%} of it by the start")
            yield said, ", ".join(filter(None, (f"{row}, {data}: {mean_std(values, measure, '+')}", *notes)))


def p_value(values: Sequence[float]) -> float | None:
    """That the mean is 0, by a t-test; None with too few values, or without spread."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, 0.0).pvalue) if len(values) >= LEAST and len(set(values)) > 1 else None


def word(values: Sequence[float], *, less: bool = True) -> str:
    """What the differences of one line say.

    >>> [word(v) for v in ([-1.0, -1.1, -0.9], [1.0, 1.1, 0.9], [-1.0, 1.0, 0.5], [-1.0, -1.0])]
    ['yes', 'the reverse', 'not certain', 'open']
    """
    p = p_value(values)
    if p is None:
        return "open"
    if p >= LEVEL:
        return "not certain" if less else "yes"
    return "yes" if less and fmean(values) < 0 else "the reverse" if less else "no"


def verdict(words: Sequence[str]) -> str:
    """The words of all lines as one.

    >>> verdict(["yes", "yes"]), verdict(["yes", "open", "yes"])
    ('yes', 'yes on 2 of 3, open on 1')
    """
    (first, count), *others = Counter(words).most_common()
    return first if not others else f"{first} on {count} of {len(words)}" + "".join(f", {w} on {n}" for w, n in others)
