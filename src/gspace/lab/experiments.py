"""Every table and figure of the paper, and the questions it leaves open, as generators of recipes.

    gspace reproduce table-1 --list            # what it is, and what it costs
    gspace reproduce table-1 --out runs        # run what is not finished, then write the report

Their sources in the paper, questions and notes are in `experiments.toml`, with the numbers that the paper prints.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from typing import Any

from gspace.lab.cells import Axis, Cell, Experiment, Grid, Method, Printed, Scores, best, seeds
from gspace.lab.learners import mlp_weights
from gspace.lab.recipe import Recipe

FACTS: Mapping[str, Any] = tomllib.loads((files("gspace.lab") / "experiments.toml").read_text(encoding="utf-8"))
PRINTED = {
    (where, model, data, method): Printed(**number)
    for where, models in FACTS["printed"].items()
    for model, sets in models.items()
    for data, methods in sets.items()
    for method, number in methods.items()
}


def _methods(group: str, **fields: Any) -> tuple[Method, ...]:
    """Those of a group in `experiments.toml`; `fields` are what all of them have in common."""
    made = []
    for key, facts in FACTS["methods"][group].items():
        own = {name: None if value == "default" else value for name, value in facts["fields"].items()}
        made.append(Method(key, facts["label"], {**fields, **own}, facts.get("control", False)))
    return tuple(made)


SGD, G_SGD, GUARDED, PATH_SGD = _methods("shared")
CONTROLS = FROM_SKELETON, FROZEN = _methods("controls")
(STILL,) = _methods("still")
HELD = {name: STILL.fields[name] for name in ("max_ratio", "max_drift")}  # trained skeleton paths stay where they are

FASHION, PATHS, CIFAR = (Recipe(**FACTS["recipes"][name]) for name in ("fashion", "paths", "cifar"))
QUICK_FASHION = FASHION.but(epochs=4.0, quick=True)
QUICK_CIFAR = CIFAR.but(width=8, iterations=120, eval_every=10, batch_size=64, precision="float32", quick=True)
SMALLER = {"plain-34": "plain-10", "resnet-34": "resnet-10", "resnet-110": "resnet-18"}
PIN = {"plain": "stages", "resnet": "none"}  # where chains end; residual blocks end them by themselves


def cifar(model: str, data: str, *, quick: bool = False, **changes: Any) -> Recipe:
    """The paper's settings for a network of its tables; quick ones have few layers of an eighth of the width."""
    base, name = (QUICK_CIFAR, SMALLER[model]) if quick else (CIFAR, model)
    return base.but(**{"model": name, "data": data, "pin": PIN[model.split("-")[0]], **changes})


def brief(recipe: Recipe, **changes: Any) -> Recipe:
    """A short run: an eighth of the paper's schedule, or less if it is quick."""
    return recipe.but(iterations=80 if recipe.quick else 8000, **changes)


def held_out(recipe: Recipe) -> Recipe:
    """A short run that is judged on training images it does not see."""
    return brief(recipe, validation=1000 if recipe.quick else 5000)


def grid_cells(part: str, row: str, method: Method, grid: Grid, axis: Axis | None = None) -> list[Cell]:
    """One cell for each setting of a grid; `row` names what it has of its recipe."""
    return [Cell(part, row.format_map(vars(runs[0])), method, tuple(runs), axis=axis) for runs in grid]


GRID = "grid of rates, validation images"
RATE = Axis("learning rate", lambda recipe: recipe.lr)
WIDTH = Axis("width h", lambda recipe: recipe.hidden[0])
DECAY = Axis("λ", lambda recipe: recipe.weight_decay)


def _compared(models: Sequence[str], methods: Sequence[Method], quick: bool) -> Iterator[Cell]:
    """The paper's comparison: every method on every network and data set."""
    for data in ("cifar10",) if quick else ("cifar10", "cifar100"):
        for model in models:
            base = cifar(model, data, quick=quick)
            for method in methods:
                printed = PRINTED.get(("Tab. 1", model, data, method.key))
                runs = seeds(method.on(base), 1 if quick else 5)
                yield Cell("test error", base.model, method, runs, printed)


def table_1(quick: bool, scores: Scores) -> Iterator[Cell]:
    return _compared(("plain-34", "resnet-34"), (SGD, G_SGD, *CONTROLS, STILL), quick)


def resnet_110(quick: bool, scores: Scores) -> Iterator[Cell]:
    return _compared(("resnet-110",), (SGD, G_SGD, *CONTROLS), quick)


def invariant_ratio(recipe: Recipe) -> float:
    """H/m of an MLP (Tab. 6 prints half of it: h/m, where H = 2h).

    >>> [f"{invariant_ratio(FASHION.but(hidden=(h, h))):.2e}" for h in (8, 1024)]
    ['2.99e-02', '1.85e-03']
    """
    return sum(recipe.hidden) / mlp_weights(recipe)


RATIO = Axis("invariant ratio H/m", invariant_ratio, "H/m = {:.2e}")


def mlp_invariance(quick: bool, scores: Scores) -> Iterator[Cell]:
    base, held = (QUICK_FASHION, 2000) if quick else (FASHION, 6000)
    widths = (8, 32, 128) if quick else (8, 16, 32, 64, 128, 256, 512, 1024)
    rates = (0.01, 0.1) if quick else (0.003, 0.01, 0.03, 0.1, 0.3)
    every = [(h, method) for h in widths for method in (SGD, G_SGD, *CONTROLS)]

    def line(part: str, h: int, method: Method, recipe: Recipe, setting: str = "") -> Cell:
        runs = seeds(recipe.but(hidden=(h, h)), 2 if quick else 5)
        return Cell(part, f"h = {h}", method, runs, None, setting, RATIO)

    for h, method in every:
        yield line("the paper's rate, 0.01", h, method, method.on(base))
    for h, method in every:
        tried = (method.on(base, hidden=(h, h), lr=rate, validation=held) for rate in rates)
        grid = [seeds(recipe, 1 if quick else 2) for recipe in tried]
        yield from grid_cells(GRID, f"h = {h}, lr {{lr:g}}", method, grid)
        found = best(grid, scores)
        if found:
            yield line("best rate of each method", h, method, found.but(validation=0), f"lr {found.lr:g}")


def path_sgd(quick: bool, scores: Scores) -> Iterator[Cell]:
    base, held = (PATHS.but(epochs=2.0, quick=True), 2000) if quick else (PATHS, 5000)
    rates = [10.0**-alpha for alpha in (range(4) if quick else range(11))]
    for data in ("mnist",) if quick else ("mnist", "cifar10"):
        for method in (SGD, PATH_SGD, G_SGD, GUARDED, *CONTROLS):
            grid = [seeds(method.on(base, data=data, lr=rate, validation=held), 1) for rate in rates]
            yield from grid_cells(GRID, "lr {lr:g}", method, grid, RATE)
            found = best(grid, scores)
            if found:
                runs = seeds(found.but(validation=0), 2 if quick else 5)
                yield Cell("best rate of each method", "5 × 64", method, runs, None, f"lr {found.lr:g}")


SIGNS = _methods("signs", **G_SGD.fields)


def signs(quick: bool, scores: Scores) -> Iterator[Cell]:
    fashion = QUICK_FASHION if quick else FASHION.but(epochs=30.0)
    for h in (8, 32) if quick else (8, 32, 128):
        for method in SIGNS:
            runs = seeds(method.on(fashion, hidden=(h, h)), 3 if quick else 9)
            yield Cell("MLPs", f"h = {h}", method, runs, axis=WIDTH)
    base = brief(cifar("plain-34", "cifar10", quick=quick))
    for method in SIGNS:
        yield Cell("plain network", base.model, method, seeds(method.on(base), 1 if quick else 3))


LAMBDAS = tuple(factor * 10.0**-alpha for alpha in (6, 5, 4, 3) for factor in (0.1, 0.2, 0.5))


def regularization(quick: bool, scores: Scores) -> Iterator[Cell]:
    coarse = (1e-4, 1e-3) if quick else LAMBDAS[1::3]
    part = "grid of λ, {iterations} iterations, validation images"
    searched, chosen = [], []
    for method in (SGD, G_SGD, FROM_SKELETON):
        full = method.on(cifar("resnet-34", "cifar10", quick=quick))
        short = held_out(full)
        grid = [seeds(short.but(weight_decay=decay), 1) for decay in coarse]
        found = best(grid, scores)
        if found and not quick:
            k = LAMBDAS.index(found.weight_decay)
            grid += [seeds(short.but(weight_decay=LAMBDAS[near]), 1) for near in (k - 1, k + 1)]
            found = best(grid, scores)
        searched += grid_cells(part, "λ = {weight_decay:g}", method, grid, DECAY)
        for data in ("cifar10",) if quick else ("cifar10", "cifar100"):
            if found:
                decay = found.weight_decay
                runs = seeds(full.but(weight_decay=decay, data=data), 1 if quick else 3)
                printed = PRINTED.get(("Fig. 8, 9", "resnet-34", data, method.key))
                row = (full.model, method, runs, printed, f"λ = {decay:g}")
                chosen.append(Cell("best λ of each method, in full", *row))
    yield from sorted(searched, key=lambda cell: cell.recipes[0].weight_decay)  # methods have different λ
    yield from chosen


USUAL = replace(SGD, key="sgd-usual", label="SGD, usual settings")


def momentum(quick: bool, scores: Scores) -> Iterator[Cell]:
    rates, decays = ((0.1,), (1e-4,)) if quick else ((0.03, 0.1, 0.3), (1e-4, 2e-3))
    in_full, count = "best settings of each method, in full", 1 if quick else 3
    part = "grid, {iterations} iterations, validation images"
    for model in ("plain-34", "resnet-34"):
        base = cifar(model, "cifar10", quick=quick, momentum=0.9, weight_decay=5e-4, lr=0.1)
        chosen = []
        for method in (SGD, G_SGD, FROM_SKELETON):
            full = method.on(base)
            by_rate = [seeds(held_out(full).but(lr=rate), 1) for rate in rates]
            yield from grid_cells(part, "{model}, decay {weight_decay:g}, lr {lr:g}", method, by_rate)
            found = best(by_rate, scores)
            if found:
                by_decay = [seeds(found.but(weight_decay=decay), 1) for decay in decays]
                for runs in by_decay:
                    row = f"{base.model}, decay {runs[0].weight_decay:g}, its best rate"
                    yield Cell(part, row, method, runs, None, f"lr {found.lr:g}")
                found = best([(found,), *by_decay], scores)
            chosen.append(found)
            if found:
                runs = seeds(full.but(lr=found.lr, weight_decay=found.weight_decay), count)
                setting = f"lr {found.lr:g}, decay {found.weight_decay:g}"
                yield Cell(in_full, base.model, method, runs, None, setting)
        if all(chosen):  # beside what the searches found
            setting = f"lr {base.lr:g}, decay {base.weight_decay:g}"
            yield Cell(in_full, base.model, USUAL, seeds(USUAL.on(base), count), None, setting)


*CHAINS, CHAIN_LAST = _methods("chains", pin="none", **G_SGD.fields)
CHAIN_START = Method("sgd-chain", "SGD from the chain's skeleton init", {**FROM_SKELETON.fields, "pin": "none"}, True)


def one_chain(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = cifar("plain-34", "cifar10", quick=quick)
    short = brief(base)
    beside = (Method("stages", "stage by stage (as in table-1)", G_SGD.fields), SGD, FROM_SKELETON)
    row = f"{base.model}, {{iterations}} iterations"
    for method in (*CHAINS, CHAIN_LAST, *beside, CHAIN_START):
        yield Cell("short runs", row, method, seeds(method.on(short), 1))
    found = best([seeds(method.on(short), 1) for method in CHAINS], scores)
    last = (CHAIN_LAST,) if scores(CHAIN_LAST.on(short)) is not None else ()
    for method in (*(m for m in CHAINS if found == m.on(short, seed=0)), *((*last, *beside) if found else ())):
        yield Cell("the best of them in full", base.model, method, seeds(method.on(base), 1))


def rates(quick: bool, scores: Scores) -> Iterator[Cell]:
    for model in ("plain-34",) if quick else ("plain-34", "resnet-34"):
        full = cifar(model, "cifar10", quick=quick)
        for method in (SGD, G_SGD, *CONTROLS):
            tried = (0.3, 1.0) if quick else (0.1, 0.3, 1.0, 3.0)
            grid = [seeds(method.on(brief(full), lr=rate), 1) for rate in tried]
            yield from grid_cells("short runs", "{model}, lr {lr:g}", method, grid, RATE)
            found = best(grid, scores)
            if found:
                runs = seeds(method.on(full, lr=found.lr), 1 if quick else 3)
                yield Cell("in full, at the best of these rates", full.model, method, runs, None, f"lr {found.lr:g}")


DRAWS = {"torch's weights": "", "torchvision's weights": "torchvision", "gains from U(0, 1)": "uniform-gains"}


def _drawn(recipe: Recipe, draw: str) -> Recipe:
    """The recipe with other initial weights, on which a skeleton is set where the recipe has one."""
    start = "" if recipe.init == "default" else recipe.init
    return recipe.but(init="-".join(filter(None, (DRAWS[draw], start))) or "default")


def initial_weights(quick: bool, scores: Scores) -> Iterator[Cell]:
    for model in ("plain-34",) if quick else ("plain-34", "resnet-34"):
        base = cifar(model, "cifar10", quick=quick)
        for draw, method in product(DRAWS, (SGD, G_SGD, *CONTROLS)):
            full, row = _drawn(method.on(base), draw), f"{base.model}, {draw}"
            yield Cell("short runs", f"{row}, {{iterations}} iterations", method, seeds(brief(full), 1))
            if not quick:
                printed = PRINTED.get(("Tab. 1", model, "cifar10", method.key))
                yield Cell("in full", row, method, seeds(full, 3), printed)


SKELETON = replace(FROM_SKELETON, control=False)  # it is asked about here
STARTS = _methods("starts")
(EXACT,) = _methods("exact")


def _tries(method: Method, name: str, values: Sequence[float]) -> list[Method]:
    """The method with each of these values of a field; the first keeps its key."""
    label = {"weight_decay": "decay"}.get(name, name)
    return [
        Method(f"{method.key}-{x:g}" if k else method.key, f"{method.label}, {label} {x:g}", {**method.fields, name: x})
        for k, x in enumerate(values)
    ]


DECAYS, EXACT_RATES = _tries(G_SGD, "weight_decay", (5e-4, 1e-4)), _tries(EXACT, "lr", (0.1, 0.3, 1.0, 3.0))


def baseline(quick: bool, scores: Scores) -> Iterator[Cell]:
    sets, count, size = (("cifar10",), 1, {}) if quick else (("cifar10", "cifar100"), 3, {"iterations": 16_000})
    usual: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "milestones": (), "schedule": "cosine"}
    usual |= {"warm_up": 0.02, **size}
    bases = [cifar(model, data, quick=quick, **usual) for data in sets for model in ("plain-34", "resnet-34")]
    searched = *_, resnet = bases[-2:]  # CIFAR-100, where starts differ most

    def found(methods: Sequence[Method], on: Sequence[Recipe]) -> list[Method]:
        """The best of these, by the mean over these networks; none while a run is unfinished."""
        grid = [[held_out(method.on(base)) for base in on] for method in methods]
        winner = best(grid, scores)
        return [method for method, runs in zip(methods, grid, strict=True) if runs[0] == winner]

    length = "{iterations} iterations, validation images"
    for base in searched:
        for method in (SGD, SKELETON, *STARTS, *DECAYS, *(EXACT_RATES if base == resnet else ())):
            yield Cell(f"short runs, {length}", base.model, method, seeds(held_out(method.on(base)), 1))
        for method in () if quick else (SGD, SKELETON, G_SGD):
            grid = [seeds(held_out(method.on(base, lr=rate)), 1) for rate in (0.01, 0.03, 0.1, 0.3)]
            yield from grid_cells(f"rates, {length}", "{model}, lr {lr:g}", method, grid, RATE)
    start = found(STARTS, searched)
    tuned = {G_SGD: found(DECAYS, searched), EXACT: found(EXACT_RATES, [resnet])}
    for base in bases:
        for method in (SGD, SKELETON, *start):
            yield Cell("{iterations} iterations", base.model, method, seeds(method.on(base), count))
        for method, chosen in tuned.items():
            for recipe in (one.on(base) for one in chosen if method is G_SGD or base.model == resnet.model):
                usual_ones = (recipe.lr, recipe.weight_decay) == (base.lr, base.weight_decay)
                setting = "" if usual_ones else f"lr {recipe.lr:g}, decay {recipe.weight_decay:g}"
                yield Cell("{iterations} iterations", base.model, method, seeds(recipe, count), None, setting)


def sgd_gap(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = SGD.on(cifar("plain-34", "cifar10", quick=quick))
    epochs = (base.iterations or 0) * 62_560 // 64_000  # 160 of the authors'
    changed = [base.but(precision=name) for name in (("float32",) if quick else ("bf16", "tf32", "float32"))]
    printed = PRINTED["Tab. 1", "plain-34", "cifar10", "sgd"]
    for recipe in (*changed, base.but(iterations=epochs)):
        row = f"{base.model} in {recipe.precision}, {{iterations}} iterations"
        yield Cell("test error", row, SGD, seeds(recipe, 1 if quick else 2), printed)


_CELLS = (table_1, mlp_invariance, path_sgd, signs, resnet_110, regularization, momentum, one_chain, rates)
_BY_NAME = {cells.__name__.replace("_", "-"): cells for cells in (*_CELLS, initial_weights, baseline, sgd_gap)}
EXPERIMENTS = {
    name: Experiment(name, _BY_NAME[name], command=f"gspace reproduce {name}", **facts)
    for name, facts in FACTS["experiments"].items()
}
