"""The paper's tables as recipes: its settings, its numbers, one schedule per comparison, controls everywhere."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import gspace
from gspace.lab import cells as cost
from gspace.lab import reproduce
from gspace.lab.cells import LENGTHS, Cell, Experiment, Variant, best, data_label, jobs, seeds, shorten, stand_in
from gspace.lab.data import load
from gspace.lab.experiments import CONTROLS, EXPERIMENTS, FROM_SKELETON, PRINTED, cifar, invariant_ratio
from gspace.lab.learners import batches, initial_model, stackable
from gspace.lab.models import build_model, build_optimizer
from gspace.lab.recipe import Recipe
from gspace.lab.sweep import read_queue
from gspace.lab.transform import feed

VARIANTS = {
    "full": Variant(),
    "an eighth": Variant(length=Fraction(1, 8)),
    "quick": Variant(quick=True),
}
EVERY = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)


def unknown(recipe: Recipe) -> None:
    """Scores before anything was run."""


def decided(recipe: Recipe) -> float:
    """Scores that let every grid end: the larger rate or decay wins."""
    return 1 / (1 + recipe.lr + recipe.weight_decay)


# What is run


@EVERY
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_cell_stands_alone(experiment: Experiment, variant: Variant) -> None:
    cells = variant.cells(experiment, decided)
    places = [(cell.part, cell.line, cell.method) for cell in cells]
    assert len(places) == len(set(places))
    for cell in cells:
        assert [recipe.seed for recipe in cell.recipes] == list(range(len(cell.recipes)))
        assert {recipe.quick for recipe in cell.recipes} == {variant.quick}
        assert {recipe.but(seed=0) for recipe in cell.recipes} == {cell.recipes[0]}


def schedule(recipe: Recipe) -> Recipe:
    """The recipe without what a method may choose."""
    method = {"optimizer": "sgd", "init": "default", "pin": "none", "max_ratio": None, "max_drift": None}
    return recipe.but(**method, batch_norm="released", residual="pin", allocation="fixed", lr=0.0, weight_decay=0.0)


@EVERY
def test_a_line_of_a_table_has_one_schedule_and_one_list_of_seeds(experiment: Experiment) -> None:
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in Variant().cells(experiment, decided):
        lines.setdefault((cell.part, cell.line), []).append(cell)
    for cells in lines.values():
        assert len({tuple(map(schedule, cell.recipes)) for cell in cells}) == 1


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("signs", "one-chain", "sgd-gap")])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_comparison_carries_its_controls(name: str, variant: Variant) -> None:
    lines: dict[tuple[str, str], set[str]] = {}
    for cell in variant.cells(EXPERIMENTS[name], decided):
        lines.setdefault((cell.part, cell.line), set()).add(cell.method.key)
    tuned = name in ("regularization", "momentum", "baseline")  # a grid for each control: one is dear enough
    controls = [FROM_SKELETON] if tuned else CONTROLS
    for methods in lines.values():
        assert methods >= {"sgd", "gsgd", *(control.key for control in controls)}


def test_table_1_has_the_papers_settings() -> None:
    cells = Variant().cells(EXPERIMENTS["table-1"], unknown)
    assert {cell.recipes[0].model for cell in cells} == {"plain-34", "resnet-34"}
    assert {cell.recipes[0].data for cell in cells} == {"cifar10", "cifar100"}
    for cell in cells:
        recipe = cell.recipes[0]
        assert len(cell.recipes) == 5
        assert (recipe.iterations, recipe.lr, recipe.batch_size) == (64_000, 1.0, 128)
        assert [milestone * 64_000 for milestone in recipe.milestones] == [32_000, 48_000]
        assert (recipe.gamma, recipe.momentum, recipe.weight_decay) == (0.1, 0.0, 0.0)
        assert (recipe.augment, recipe.width) == ("crop-flip", 64)
        if cell.method.key == "gsgd":
            assert (recipe.max_ratio, recipe.max_drift, recipe.batch_norm) == (math.inf, math.inf, "released")
            assert recipe.pin == ("stages" if recipe.model == "plain-34" else "none")
            assert recipe.init == "skeleton"
        if cell.method.key == "sgd":
            assert (recipe.init, recipe.pin) == ("default", "none")


def test_the_papers_numbers_stand_beside_runs_of_its_size_only() -> None:
    def printed(variant: Variant) -> dict[tuple[str, str, str], str]:
        cells = [c for name in ("table-1", "resnet-110") for c in variant.cells(EXPERIMENTS[name], unknown)]
        return {(c.recipes[0].model, c.recipes[0].data, c.method.key): str(c.paper) for c in cells if c.paper}

    assert printed(Variant()) == {key[1:]: str(number) for key, number in PRINTED.items() if key[0] == "Tab. 1"}
    assert printed(Variant())["plain-34", "cifar10", "gsgd"] == "7.00 ± 0.10 (5)"
    assert printed(Variant(quick=True)) == printed(Variant(length=Fraction(1, 2))) == {}


def test_the_mlps_are_those_of_table_6() -> None:
    weights = [536, 1200, 2912, 7872, 23936, 80640, 292352, 1108992]
    cells = Variant().cells(EXPERIMENTS["mlp-invariance"], unknown)
    recipes = {c.recipes[0].hidden: c.recipes[0] for c in cells}
    found = [gspace.analyze(build_model("mlp", (1, 7, 7), 10, hidden=hidden)) for hidden in recipes]
    assert [f.m for f in found] == weights
    assert [f.H for f in found] == [2 * h for h, _ in recipes]
    assert [f.invariant_ratio for f in found] == pytest.approx([invariant_ratio(r) for r in recipes.values()])
    assert cells[0].line == "h = 8 (H/m = 2.99e-02), Fashion-MNIST"
    assert {(c.recipes[0].batch_size, c.recipes[0].epochs, c.recipes[0].inputs) for c in cells} == {(64, 100, "pooled")}
    assert {c.recipes[0].lr for c in cells if c.part.startswith("the paper")} == {0.01}


def test_rates_and_lambdas_are_the_papers() -> None:
    grid = [c.recipes[0] for c in Variant().cells(EXPERIMENTS["path-sgd"], unknown)]
    assert sorted({r.lr for r in grid}) == pytest.approx(sorted(10.0**-a for a in range(11)))
    assert {(r.hidden, r.batch_size, r.inputs) for r in grid} == {((64,) * 5, 64, "grey")}
    grid = [c.recipes[0] for c in Variant().cells(EXPERIMENTS["regularization"], unknown)]
    assert sorted({r.weight_decay for r in grid}) == pytest.approx([2e-7, 2e-6, 2e-5, 2e-4])


@pytest.mark.parametrize("coarse", [2e-7, 2e-6, 2e-5, 2e-4])
def test_a_grid_of_lambdas_is_refined_beside_its_best(coarse: float) -> None:
    lambdas = sorted(f * 10.0**-a for f in (0.1, 0.2, 0.5) for a in (3, 4, 5, 6))
    k = lambdas.index(pytest.approx(coarse))

    def scores(recipe: Recipe) -> float | None:
        near = [recipe.weight_decay == pytest.approx(value) for value in (lambdas[k + 1], coarse)]
        return 0.6 - 0.2 * near[0] - 0.1 * near[1] if recipe.validation else None

    cells = Variant().cells(EXPERIMENTS["regularization"], scores)
    for method in ("sgd", "gsgd", "sgd-skeleton"):
        tried = [c.recipes[0].weight_decay for c in cells if c.method.key == method and c.recipes[0].validation]
        assert tried == pytest.approx(sorted({2e-7, 2e-6, 2e-5, 2e-4, lambdas[k - 1], lambdas[k + 1]}))
        best = {c.recipes[0].weight_decay for c in cells if c.method.key == method and not c.recipes[0].validation}
        assert list(best) == pytest.approx([lambdas[k + 1]])


def test_three_patterns_of_signs_meet_three_seeds_and_differ_in_nothing_else() -> None:
    cells = Variant().cells(EXPERIMENTS["signs"], unknown)
    lines: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        lines.setdefault(cell.line, {})[cell.recipes[0].init] = cell
    for found in lines.values():
        assert set(found) == {"skeleton", "skeleton-common-signs", "skeleton-random-signs"}
        assert len({cell.recipes[0].but(init="default") for cell in found.values()}) == 1
    assert {len(cell.recipes) for cell in cells if cell.recipes[0].model == "plain-34"} == {3}
    assert all(len(cell.recipes) >= 3 for cell in cells)


def test_rates_are_those_of_table_1_and_its_neighbours() -> None:
    table = {c.recipes[0] for c in Variant(length=Fraction(1, 8)).cells(EXPERIMENTS["table-1"], unknown)}
    cells = Variant().cells(EXPERIMENTS["rates"], unknown)
    assert {cell.recipes[0].lr for cell in cells} == {0.1, 0.3, 1.0, 3.0}
    for cell in cells:
        assert cell.recipes[0].but(lr=1.0) in table  # an eighth of the schedule, and shared with it
        assert cell.axis is not None
        assert cell.axis.of(cell.recipes[0]) == cell.recipes[0].lr


def test_initial_weights_differ_from_table_1_in_the_draw_alone() -> None:
    table = {recipe for c in Variant().cells(EXPERIMENTS["table-1"], unknown) for recipe in c.recipes}
    cells = [c for c in Variant().cells(EXPERIMENTS["initial-weights"], unknown) if c.part == "in full"]
    starts = {
        "default": "default", "torchvision": "default", "uniform-gains": "default",
        "skeleton": "skeleton", "torchvision-skeleton": "skeleton", "uniform-gains-skeleton": "skeleton",
    }  # fmt: skip
    assert {c.recipes[0].init for c in cells} == set(starts)
    assert len({c.line for c in cells}) == 6
    for cell in cells:
        assert {recipe.but(init=starts[cell.recipes[0].init]) for recipe in cell.recipes} <= table


def test_the_baseline_is_the_usual_one_and_its_starts_differ_in_the_init_alone() -> None:
    every = Variant().cells(EXPERIMENTS["baseline"], unknown)
    rates, cells = ([c for c in every if c.part.startswith("rates") is varied] for varied in (True, False))
    usual = {recipe for cell in cells for recipe in cell.recipes}
    assert sorted({c.recipes[0].lr for c in rates}) == [0.01, 0.03, 0.1, 0.3]
    assert len(rates) == 24
    assert {c.recipes[0].but(lr=0.1) for c in rates} <= usual
    for cell in cells:
        recipe, key = cell.recipes[0], cell.method.key
        assert (recipe.momentum, recipe.schedule, recipe.warm_up) == (0.9, "cosine", 0.02)
        if recipe.batch_norm == "exact":
            assert (recipe.model, recipe.weight_decay, recipe.residual) == ("resnet-34", 0, "tie")
        else:
            assert (recipe.lr, recipe.weight_decay) == (0.1, 1e-4 if key == "gsgd-0.0001" else 5e-4)
        assert (recipe.pin == "stages") == (recipe.init == "skeleton" and recipe.model == "plain-34")
    short = [c.recipes[0] for c in cells if c.recipes[0].validation and c.recipes[0].optimizer == "sgd"]
    starts = {"default", "skeleton", "dirac-added", "dirac", "delta-orthogonal"}
    assert {recipe.init for recipe in short} == starts
    assert len({recipe.but(init="default", pin="none") for recipe in short}) == 2  # two networks on CIFAR-100
    assert {c.recipes[0].lr for c in cells if c.recipes[0].batch_norm == "exact"} == {0.1, 0.3, 1.0, 3.0}
    longer = [cell for cell in cells if cell.recipes[0].iterations == 16_000]
    assert sorted({cell.method.key for cell in longer}) == ["sgd", "sgd-skeleton"]
    assert sum(len(cell.recipes) for cell in longer) == 24


def test_what_may_explain_our_sgd_differs_from_table_1_in_one_thing() -> None:
    table = {recipe for c in Variant().cells(EXPERIMENTS["table-1"], unknown) for recipe in c.recipes}
    cells = Variant().cells(EXPERIMENTS["sgd-gap"], unknown)
    assert [(c.recipes[0].precision, c.recipes[0].iterations) for c in cells] == [
        ("bf16", 64_000), ("tf32", 64_000), ("float32", 64_000), ("bf16", 62_560)
    ]  # fmt: skip
    for cell in cells:
        assert {recipe.but(precision="bf16", iterations=64_000) for recipe in cell.recipes} <= table
        assert str(cell.paper) == "7.76 ± 0.17 (5)"


# What follows from results


@pytest.mark.parametrize("name", ["mlp-invariance", "path-sgd", "regularization", "momentum"])
def test_a_grid_is_judged_on_validation_images_and_its_winner_on_test_images(name: str) -> None:
    before = Variant().cells(EXPERIMENTS[name], unknown)
    after = Variant().cells(EXPERIMENTS[name], decided)
    grid = [cell.recipes[0] for cell in after if cell.recipes[0].validation]
    ended = [cell for cell in after if cell.setting and cell.recipes[0] not in grid]
    chosen = [cell for cell in ended if cell.method.key != "sgd-usual"]  # which is beside them, not chosen
    assert not any(cell.setting for cell in before)
    assert [cell for cell in after if cell in before] == before
    assert chosen
    assert grid
    largest = max(recipe.lr + recipe.weight_decay for recipe in grid)
    for cell in chosen:
        assert cell.recipes[0].validation == 0
        assert len(cell.recipes) >= 3
        assert cell.recipes[0].lr + cell.recipes[0].weight_decay == largest  # what `decided` prefers


def test_methods_with_momentum_are_tuned_with_equal_effort() -> None:
    cells = Variant().cells(EXPERIMENTS["momentum"], decided)
    runs: dict[tuple[str, str], list[Recipe]] = {}
    for cell in cells:
        if cell.recipes[0].validation:
            runs.setdefault((cell.recipes[0].model, cell.method.key), []).extend(cell.recipes)
    assert {model for model, _ in runs} == {"plain-34", "resnet-34"}
    assert {key for _, key in runs} == {"sgd", "gsgd", "sgd-skeleton"}
    for tried in runs.values():
        assert len(set(tried)) == 5
        assert {recipe.iterations for recipe in tried} == {8000}
        assert {recipe.weight_decay for recipe in tried} == {1e-4, 5e-4, 2e-3}
        assert {recipe.lr for recipe in tried if recipe.weight_decay == 5e-4} == {0.03, 0.1, 0.3}
        assert {recipe.lr for recipe in tried if recipe.weight_decay != 5e-4} == {0.3}  # what `decided` prefers


@pytest.mark.parametrize("winner", ["dirac-added", "dirac", "delta-orthogonal"])
def test_the_best_start_over_both_networks_is_run_further(winner: str) -> None:
    def score(recipe: Recipe) -> float:
        lucky = recipe.init == "dirac" and recipe.model == "plain-34"  # once is not enough
        return 0.1 if lucky else 0.2 if recipe.init == winner else 0.9 + recipe.weight_decay - 0.1 * recipe.lr

    cells = Variant().cells(EXPERIMENTS["baseline"], score)
    longer = [cell for cell in cells if cell.recipes[0].iterations == 16_000]
    keys = {"sgd", "sgd-skeleton", f"sgd-{winner}", "gsgd", "gsgd-exact"}
    assert {cell.method.key for cell in longer} == keys
    assert {len(cell.recipes) for cell in longer} == {3}
    assert len(longer) == 4 * 4 + 2  # exact on ResNet-34 alone
    chosen = {cell.method.key: (cell.recipes[0].lr, cell.recipes[0].weight_decay) for cell in longer}
    assert chosen.pop("gsgd") == (0.1, 1e-4)  # the smaller decay won
    assert chosen.pop("gsgd-exact") == (3.0, 0.0)
    assert set(chosen.values()) == {(0.1, 5e-4)}


def test_best_waits_for_all_runs_and_never_prefers_one_that_diverged() -> None:
    candidates = [seeds(Recipe(epochs=1.0, lr=lr), 2) for lr in (0.1, 0.2, 0.3)]
    scores = {run: score for runs, score in zip(candidates, (0.3, math.inf, 0.4), strict=True) for run in runs}
    assert best(candidates, scores.get) == candidates[0][0]
    assert best(candidates, unknown) is None
    assert best(candidates, {**scores, candidates[2][1]: None}.get) is None
    one_fails = {**scores, candidates[0][1]: math.inf}
    assert best(candidates, one_fails.get) == candidates[2][0]
    assert best(candidates[:2], one_fails.get) == candidates[0][0]  # nothing better is there


def test_the_best_chain_is_run_in_full() -> None:
    def score(recipe: Recipe) -> float:
        return 0.1 if recipe.allocation == "spread" else 0.2

    cells = Variant().cells(EXPERIMENTS["one-chain"], score)
    full = [cell for cell in cells if cell.recipes[0].iterations == 64_000]
    assert [cell.method.key for cell in full] == ["chain-spread", "chain-last", "stages", "sgd", "sgd-skeleton"]
    assert full[0].recipes[0].pin == "none"
    short = {cell.method.key: cell.recipes[0] for cell in cells if cell.part == "short runs"}
    assert (short["sgd-chain"].optimizer, short["sgd-chain"].pin) == ("sgd", "none")
    assert short["chain-last"].pin == "last"
    table_1 = jobs(Variant().cells(EXPERIMENTS["table-1"], score))  # what it is compared with costs nothing
    assert all(recipe in table_1 for cell in full[2:] for recipe in cell.recipes)


# Sizes


def test_a_shorter_schedule_keeps_its_shape() -> None:
    recipe = cifar("plain-34", "cifar10")
    assert shorten(recipe, LENGTHS["1/8"]) == recipe.but(iterations=8000)
    assert shorten(Recipe(epochs=30.0), LENGTHS["1/4"]) == Recipe(epochs=7.5)


@EVERY
def test_a_stand_in_says_so(experiment: Experiment) -> None:
    for cell in Variant(quick=True).cells(experiment, decided):
        assert "digits in place of" in cell.line
        assert {recipe.data for recipe in cell.recipes} == {"digits"}
    assert data_label(stand_in(cifar("plain-34", "cifar10"))) == "digits in place of CIFAR-10"


BUILDS = "model width hidden inputs augment optimizer init pin max_ratio max_drift batch_norm allocation".split()


def test_quick_recipes_are_accepted_by_network_and_optimizer() -> None:
    """One of each kind that is built."""
    data = load("digits")
    recipes = [r for e in EXPERIMENTS.values() for r in jobs(Variant(quick=True).cells(e, decided)) if r.seed == 0]
    kinds = {tuple(getattr(recipe, name) for name in BUILDS): recipe for recipe in recipes}
    assert len(kinds) > 30
    for recipe in kinds.values():
        source = feed(data, recipe.inputs, recipe.augment)
        model = initial_model(recipe)
        optimizer = build_optimizer(model, recipe, recipe.lr, torch.zeros(1, *source.x_test.shape[1:]))
        assert optimizer.param_groups[0]["lr"] == recipe.lr


# Order, queue, cost


@EVERY
def test_every_run_is_listed_once_and_stacks_stand_together(experiment: Experiment) -> None:
    cells = Variant().cells(experiment, decided)
    runs = jobs(cells)
    assert sorted(r.folder for r in runs) == sorted({r.folder for c in cells for r in c.recipes})
    mlps = [r for r in runs if stackable(r)]
    groups = list(batches(mlps, 10_000))
    assert len(groups) == len({group[0].but(seed=0, lr=1.0) for group in groups})


def test_an_early_stop_leaves_every_method_with_the_same_seeds() -> None:
    runs = [r for r in jobs(Variant().cells(EXPERIMENTS["table-1"], unknown)) if r.model == "plain-34"]
    first = runs[:5]
    assert {r.seed for r in first} == {0}
    assert len({(r.optimizer, r.init, r.max_drift) for r in first}) == 5


def test_the_queue_file_holds_the_same_recipes(tmp_path: Path) -> None:
    for name, experiment in EXPERIMENTS.items():
        cells = Variant().cells(experiment, decided)
        path = tmp_path / f"{name}.json"
        path.write_text(reproduce.as_queue(jobs(cells)))
        assert read_queue(path) == jobs(cells)


def test_cost_follows_the_work() -> None:
    one = cifar("plain-34", "cifar10")
    alone = cost.estimate([one], cost.GPU)
    assert 180 < alone < 420  # about 4.2 minutes were seen, and start and evaluation come on top
    assert 1.7 * alone < cost.estimate([one, one.but(seed=1)], cost.GPU) < 2 * alone  # compiled once
    assert cost.estimate([one.but(iterations=8000)], cost.GPU) < alone / 3
    assert cost.estimate([cifar("resnet-110", "cifar10")], cost.GPU) > 2 * alone
    mlps = seeds(Recipe(data="fashion_mnist", inputs="pooled", hidden=(8, 8), epochs=10.0), 5)
    assert cost.estimate(mlps, cost.CPU) < 2 * cost.estimate(mlps[:1], cost.CPU)  # stacked
    flops, layers = cost.network_cost(cost.code_key(one))
    assert layers == 34
    assert flops == pytest.approx(2.306e9, rel=1e-3)  # counted once with torch's own counter


def test_a_network_is_compiled_when_it_is_another_one_than_before() -> None:
    plain, residual = cifar("plain-34", "cifar10"), cifar("resnet-34", "cifar10")
    ordered = cost.estimate([plain, plain.but(lr=0.5), residual, residual.but(seed=1)], cost.GPU)
    mixed = cost.estimate([plain, residual, plain.but(lr=0.5), residual.but(seed=1)], cost.GPU)
    layers = sum(cost.network_cost(cost.code_key(recipe))[1] for recipe in (plain, residual))
    assert mixed - ordered == pytest.approx(layers * cost.GPU.compile_seconds)


def test_a_stack_of_mlps_on_a_gpu_starts_in_seconds() -> None:
    mlps = seeds(Recipe(data="fashion_mnist", inputs="pooled", hidden=(8, 8), epochs=100.0, batch_size=64), 5)
    assert 9 < cost.estimate(mlps, cost.GPU) < 36  # 18 s were seen, 1.4 of them before the first step


def test_no_quick_experiment_is_expected_to_take_long() -> None:
    for experiment in EXPERIMENTS.values():
        runs = jobs(Variant(quick=True).cells(experiment, decided))
        assert cost.estimate(runs, cost.CPU) < 300
        assert cost.estimate(runs, cost.GPU) < 300


@EVERY
def test_the_list_costs_the_runs_in_the_order_they_are_run(experiment: Experiment) -> None:
    variant = Variant(quick=True)
    cells = variant.cells(experiment, decided)
    text = reproduce.as_text(experiment, variant, cells, unknown)
    assert text.splitlines()[-1] == f"left: {len(jobs(cells))} runs, about {reproduce.costs(jobs(cells))}"


@pytest.mark.parametrize("name", ["momentum", "regularization"])
def test_headings_say_how_long_their_runs_are(name: str) -> None:
    cells = Variant(length=Fraction(1, 8)).cells(EXPERIMENTS[name], unknown)
    assert {cell.recipes[0].iterations for cell in cells} == {1000}
    assert all("1,000 iterations" in cell.part for cell in cells)
