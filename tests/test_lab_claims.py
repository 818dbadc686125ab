"""The table of claims: a word for each line, p-values only where there are seeds enough, numbers from the records."""

from pathlib import Path

import pytest

from gspace.lab.cells import Variant
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record
from gspace.lab.tabulate import CLAIMS, Claim, claims, p_value

TABLE_1 = EXPERIMENTS["table-1"]


def runs(errors: dict[str, tuple[float, ...]], model: str = "plain-34") -> dict[Recipe, Record]:
    """Finished runs of table 1 on CIFAR-10, by the methods' keys."""
    found = {}
    for cell in Variant().cells(TABLE_1, lambda recipe: None):
        first = cell.recipes[0]
        if (first.model, first.data) == (model, "cifar10"):
            for recipe, error in zip(cell.recipes, errors.get(cell.method.key, ()), strict=False):
                summary = {"status": "finished", "test_error": error, "fit_loss": error}
                found[recipe] = Record(Path("x"), recipe, (), (), summary)
    return found


def row(found: dict[Recipe, Record], which: int = 0) -> tuple[str, ...]:
    return claims([TABLE_1], found).rows[which][2:]


def test_a_lead_with_every_seed_is_certain_and_the_start_has_its_share() -> None:
    found = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.091, 0.099), "sgd-skeleton": (0.09, 0.10, 0.11)})
    assert row(found) == ("plain-34, CIFAR-10", "yes", "-2.00 ± 0.10 (3)", "0.00083", "50%")


def test_what_is_reversed_or_not_certain_says_so() -> None:
    assert row(runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.12, 0.131, 0.139)}))[1] == "the reverse"
    assert row(runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.12, 0.12)}))[1] == "not certain"


def test_two_seeds_leave_a_claim_open() -> None:
    found = runs({"sgd": (0.10, 0.11), "gsgd": (0.08, 0.09)})
    assert row(found) == ("plain-34, CIFAR-10", "open", "-2.00 ± 0.00 (2)", "", "")
    more = runs({"sgd": (0.10, 0.11, 0.12), "gsgd": (0.08, 0.091, 0.099)}, "resnet-34")
    assert [row({**found, **more}, k)[1] for k in range(2)] == ["open", "yes"]


def test_without_a_pair_of_runs_nothing_is_said() -> None:
    assert claims([TABLE_1], runs({"sgd": (0.1, 0.2, 0.3)})).rows == ()
    assert claims([], runs({"sgd": (0.1,), "gsgd": (0.1,)})).rows == ()


def test_no_difference_is_claimed_of_signs() -> None:
    signs = EXPERIMENTS["signs"]
    cells = {c.method.key: c for c in Variant().cells(signs, lambda recipe: None) if c.row == "h = 8"}
    errors = {"positive": 0.2, "random": 0.2}

    def said(shift: float) -> str:
        found = {
            recipe: Record(Path("x"), recipe, (), (), {"status": "finished", "test_error": errors[key] + extra})
            for key, extras in (("positive", (0.0, 0.01, 0.02)), ("random", (shift, shift + 0.011, shift + 0.019)))
            for recipe, extra in zip(cells[key].recipes, extras, strict=False)
        }
        (made,) = claims([signs], found).rows
        return made[3]

    assert said(0.0) == "yes"
    assert said(0.1) == "no"


def test_p_is_that_of_students_t() -> None:
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(0.0741799, rel=1e-5)  # t = 2·√3, two degrees of freedom
    assert p_value([1.0, 1.0, 1.0]) is None
    assert p_value([1.0, 2.0]) is None


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.experiment}-{claim.base}-{claim.other}")
def test_every_claim_is_of_methods_of_its_experiment(claim: Claim) -> None:
    cells = Variant().cells(EXPERIMENTS[claim.experiment], lambda recipe: 1 / (1 + recipe.lr))
    keys = {cell.method.key for cell in cells if claim.part in cell.part}
    assert {claim.base, claim.other, *filter(None, [claim.control])} <= keys
