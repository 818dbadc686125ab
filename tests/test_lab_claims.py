"""The table of claims: a word for each line, p-values only where there are seeds enough, numbers from the records."""

import math
from collections.abc import Sequence

import pytest

from gspace.lab.cells import Variant
from gspace.lab.claims import CLAIMS, Claim, claims, p_value, verdict
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record

TABLE_1 = EXPERIMENTS["table-1"]


def ended(recipe: Recipe, value: float | None) -> Record:
    """A finished run with this error and loss; diverged without one."""
    summary = {"status": "diverged" if value is None else "finished", "test_error": value, "fit_loss": value}
    return Record(recipe, (), (), summary)


def runs(errors: dict[str, Sequence[float | None]], model: str = "plain-34", first: int = 0) -> dict[Recipe, Record]:
    """Runs of table 1 on CIFAR-10 by the methods' keys, from a seed on."""
    found = {}
    for cell in Variant().cells(TABLE_1, lambda recipe: None):
        if (cell.recipes[0].model, cell.recipes[0].data) == (model, "cifar10"):
            some = zip(cell.recipes[first:], errors.get(cell.method.key, ()), strict=False)
            found |= {recipe: ended(recipe, error) for recipe, error in some}
    return found


def line(found: dict[Recipe, Record]) -> tuple[str, ...]:
    return claims([TABLE_1], found)[1].rows[0][2:]


def summary(found: dict[Recipe, Record]) -> tuple[str, ...]:
    return claims([TABLE_1], found)[0].rows[0][2:]


def test_a_lead_with_every_seed_is_certain_and_the_start_has_its_share() -> None:
    found = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.091, 0.099), "sgd-skeleton": (0.09, 0.10, 0.11)})
    gap = "-2.00 ± 0.10 (3), the paper -0.76"
    assert line(found) == ("plain-34, CIFAR-10", "yes", gap, "0.00083")
    assert summary(found) == ("yes", f"plain-34, CIFAR-10: {gap}", "0.00083", "the start 50%")


def test_what_is_reversed_or_not_certain_says_so() -> None:
    assert summary(runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.12, 0.131, 0.139)}))[0] == "the reverse"
    unsure = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.12, 0.12), "sgd-skeleton": (0.09, 0.10, 0.11)})
    assert summary(unsure)[::3] == ("not certain", "")  # no lead, so nothing has a share of it


def test_two_seeds_leave_a_claim_open_and_a_claim_counts_its_lines() -> None:
    found = runs({"sgd": (0.10, 0.11), "gsgd": (0.08, 0.09)})
    assert line(found) == ("plain-34, CIFAR-10", "open", "-2.00 ± 0.00 (2), the paper -0.76", "")
    more = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.091, 0.099)}, "resnet-34")
    said, gaps, p, _ = summary({**found, **more})
    assert (said, p) == ("yes on 1 of 2, open on 1 of 2", "0.00083")
    assert gaps.count("; ") == 1


def test_without_a_pair_of_runs_nothing_is_said() -> None:
    assert [table.rows for table in claims([TABLE_1], runs({"sgd": (0.1, 0.2, 0.3)}))] == [(), ()]
    assert [table.rows for table in claims([], runs({"sgd": (0.1,), "gsgd": (0.1,)}))] == [(), ()]


def test_a_control_has_a_share_where_it_has_every_seed() -> None:
    found = runs({"sgd": (0.1, 0.11, 0.12, 0.3), "gsgd": (0.08, 0.091, 0.099)})
    assert summary(found | runs({"sgd-skeleton": (0.09, 0.1, 0.11, 0.1)}))[-1] == "the start 50%"
    assert summary(found | runs({"sgd-skeleton": (0.1, 0.11, 0.1)}, first=1))[-1] == ""  # as many, of other seeds
    more = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.091, 0.099)}, "resnet-34")
    assert summary(found | more | runs({"sgd-skeleton": (0.09, 0.1, 0.11)}))[-1] == "the start 50% (on 1)"


def test_what_diverged_is_said_and_leaves_a_line_open() -> None:
    some = runs({"sgd": (0.10, 0.11, 0.12, 0.13), "gsgd": (0.08, 0.091, 0.099, None)})
    assert line(some)[1:3] == ("open", "-2.00 ± 0.10 (3), 1 diverged, the paper -0.76")
    every = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (None, None, None)})
    assert line(every) == ("plain-34, CIFAR-10", "open", "3 diverged, the paper -0.76", "")


def test_no_difference_is_claimed_of_signs() -> None:
    signs = EXPERIMENTS["signs"]
    cells = {c.method.key: c for c in Variant().cells(signs, lambda recipe: None) if c.row == "h = 8"}

    def said(shift: float) -> str:
        found = {
            recipe: ended(recipe, 0.2 + extra)
            for key, extras in (("positive", (0.0, 0.01, 0.02)), ("random", (shift, shift + 0.011, shift + 0.019)))
            for recipe, extra in zip(cells[key].recipes, extras, strict=False)
        }
        ((*_, word, _, _, _),) = claims([signs], found)[0].rows
        return word

    assert said(0.0) == "no difference seen"
    assert said(0.1) == "no"


def test_a_lead_that_grows_with_width_shrinks_with_the_invariant_ratio() -> None:
    """H/m is 16/536 at h = 8 and 64/2912 at h = 32: 0.133 decades, over which leads differ by 0.0204 in the mean."""
    widths = EXPERIMENTS["mlp-invariance"]
    found, leads = {}, {8: 0.01, 32: 0.03}
    for cell in Variant().cells(widths, lambda recipe: None):
        lead = leads.get(cell.recipes[0].hidden[0], 0.0) * (cell.method.key == "gsgd")
        if cell.recipes[0].hidden[0] in leads and cell.method.key in ("sgd", "gsgd") and "paper's rate" in cell.part:
            found |= {recipe: ended(recipe, 0.5 - lead * (1 + k / 100)) for k, recipe in enumerate(cell.recipes)}
    row = next(row for row in claims([widths], found)[0].rows if "grows with H/m" in row[0])
    mean = 0.0204 / (math.log10(16 / 536) - math.log10(64 / 2912))
    assert row[2] == "the reverse"
    assert row[3].startswith("h = 8 (H/m = 2.99e-02), Fashion-MNIST to h = 32 (H/m = 2.20e-02), Fashion-MNIST")
    assert f": +{mean:.4f} ±" in row[3]
    del found[next(recipe for recipe in found if recipe.optimizer == "gsgd")]  # of one seed at one width: left out
    (again,) = (row for row in claims([widths], found)[0].rows if "grows with H/m" in row[0])
    assert again[2] == "the reverse"
    assert f": +{mean * 1.025 / 1.02:.4f} ±" in again[3]
    assert again[3].endswith("(4)")
    gone = next(recipe for recipe in found if recipe.optimizer == "gsgd")
    (open_line,) = (r for r in claims([widths], found | {gone: ended(gone, None)})[0].rows if "grows with H/m" in r[0])
    assert open_line[2] == "open"
    assert open_line[3].endswith("(3), 1 diverged")
    wide = [recipe for recipe in found if recipe.optimizer == "gsgd" and recipe.hidden[0] == 8]
    (none_left,) = (
        r for r in claims([widths], found | {one: ended(one, None) for one in wide})[0].rows if "grows with H/m" in r[0]
    )
    assert none_left[2] == "open"


def test_what_has_less_is_not_behind() -> None:
    less, more = [-1.0, -1.1, -0.9], [1.0, 1.1, 0.9]
    assert [verdict(less, "no more"), verdict(more, "no more")] == ["yes", "no"]
    assert [verdict(less, "as much"), verdict(more, "as much")] == ["no", "no"]


def test_p_is_that_of_students_t() -> None:
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(0.0741799, rel=1e-5)  # t = 2·√3, two degrees of freedom
    assert p_value([1.0, 1.0, 1.0]) is None
    assert p_value([1.0, 2.0]) is None


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.experiment}-{claim.base}-{claim.other}")
def test_every_claim_is_of_methods_of_its_experiment(claim: Claim) -> None:
    cells = Variant().cells(EXPERIMENTS[claim.experiment], lambda recipe: 1 / (1 + recipe.lr))
    keys = {cell.method.key for cell in cells if claim.part in cell.part}
    assert {claim.base, claim.other, *claim.controls.values()} <= keys
