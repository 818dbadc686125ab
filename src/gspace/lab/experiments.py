"""Every table and figure of the paper, and the questions it leaves open, as generators of recipes.

    gspace reproduce table-1 --list            # what it is, and what it costs
    gspace reproduce table-1 --out runs        # run what is not finished, then write the report

Their sources in the paper, questions and notes are in `experiments.toml`, with the numbers that the paper prints.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from gspace.lab.cells import Axis, Cell, Experiment, Method, Printed, Scores, best, seeds
from gspace.lab.cost import network_cost
from gspace.lab.recipe import Recipe

FACTS: Mapping[str, Any] = tomllib.loads((files("gspace.lab") / "experiments.toml").read_text(encoding="utf-8"))
PRINTED = {
    (where, model, data, method): Printed(**number)
    for where, models in FACTS["printed"].items()
    for model, sets in models.items()
    for data, methods in sets.items()
    for method, number in methods.items()
}

# Methods --------------------------------------------------------------------------------------------------------------

UNGUARDED = {"max_ratio": math.inf, "max_drift": math.inf}  # the paper's algorithm has no guard
HELD = {"max_ratio": math.inf, "max_drift": 1 + 1e-6}  # trained skeleton paths stay where they are

SGD = Method("sgd", "SGD", {"optimizer": "sgd"})
G_SGD = Method("gsgd", "G-SGD", {"optimizer": "gsgd", "init": "skeleton", **UNGUARDED})
GUARDED = Method("gsgd-guarded", "G-SGD, guarded", {"optimizer": "gsgd", "init": "skeleton"})
PATH_SGD = Method("path-sgd", "Path-SGD", {"optimizer": "path-sgd"})
FROM_SKELETON = Method("sgd-skeleton", "SGD from skeleton init", {"optimizer": "sgd", "init": "skeleton"}, True)
FROZEN = Method("sgd-frozen", "SGD, free skeleton frozen", {"optimizer": "sgd-frozen", "init": "skeleton"}, True)
STILL = Method("gsgd-still", "G-SGD, skeleton paths held", {"optimizer": "gsgd", "init": "skeleton", **HELD}, True)
CONTROLS = (FROM_SKELETON, FROZEN)

# Networks and how the paper trains them -------------------------------------------------------------------------------

FASHION = Recipe(data="fashion_mnist", inputs="pooled", lr=0.01, batch_size=64, epochs=100.0, hidden=(8, 8))
QUICK_FASHION = FASHION.but(epochs=4.0, quick=True)
PATHS = Recipe(data="mnist", inputs="grey", hidden=(64,) * 5, lr=1.0, batch_size=64, epochs=50.0)
CIFAR = Recipe(
    data="cifar10",
    model="plain-34",
    lr=1.0,
    iterations=64_000,
    milestones=(0.5, 0.75),
    batch_size=128,
    augment="crop-flip",
    precision="bf16",
)
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


def grid_cells(
    part: str, row: str, method: Method, grid: Sequence[Sequence[Recipe]], axis: Axis | None = None
) -> list[Cell]:
    """One cell for each setting of a grid; `row` names what it has of its recipe."""
    return [Cell(part, row.format_map(vars(runs[0])), method, tuple(runs), axis=axis) for runs in grid]


GRID = "grid of rates, validation images"
RATE = Axis("learning rate", lambda recipe: recipe.lr)
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
    """H/m of an MLP without biases (Tab. 6 prints half of it: h/m, where H = 2h).

    >>> [f"{invariant_ratio(FASHION.but(hidden=(h, h))):.2e}" for h in (8, 1024)]
    ['2.99e-02', '1.85e-03']
    """
    flops, _ = network_cost(recipe)  # a multiplication and an addition per weight
    return sum(recipe.hidden) / (flops / 2)


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


SIGNS = (
    Method("positive", "all +1", G_SGD.fields),
    Method("common", "±1 at random, one draw for all seeds", {**G_SGD.fields, "init": "skeleton-common-signs"}),
    Method("random", "±1 at random, drawn per seed", {**G_SGD.fields, "init": "skeleton-random-signs"}),
)


def signs(quick: bool, scores: Scores) -> Iterator[Cell]:
    fashion = QUICK_FASHION if quick else FASHION.but(epochs=30.0)
    for h in (8, 32) if quick else (8, 32, 128):
        for method in SIGNS:
            yield Cell("MLPs", f"h = {h}", method, seeds(method.on(fashion, hidden=(h, h)), 3 if quick else 9))
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


USUAL = Method("sgd-usual", "SGD, usual settings", SGD.fields)


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


def _chain(key: str, label: str, **fields: Any) -> Method:
    return Method(key, label, {"optimizer": "gsgd", "init": "skeleton", "pin": "none", **UNGUARDED, **fields})


CHAINS = (
    _chain("chain-released", "`released`, no guard"),
    _chain("chain-paper", "`paper`, no guard", batch_norm="paper"),
    _chain("chain-guard", "`released`, the default guard", max_ratio=None, max_drift=None),
    _chain("chain-paper-guard", "`paper`, the default guard", batch_norm="paper", max_ratio=None, max_drift=None),
    _chain("chain-drift-2", "`released`, ratio 1.05, drift 2", max_ratio=1.05, max_drift=2.0),
    _chain("chain-drift-10", "`released`, ratio 1.05, drift 10", max_ratio=1.05, max_drift=10.0),
    _chain("chain-spread", "`released`, spread, ratio 1.5", allocation="spread", max_ratio=1.5),
    _chain("chain-still", "`released`, skeleton paths held", **HELD),
)
CHAIN_LAST = _chain("chain-last", "`released`, no guard, ends before the linear layer", pin="last")
CHAIN_START = Method(
    "sgd-chain", "SGD from the chain's skeleton init", {"optimizer": "sgd", "init": "skeleton", "pin": "none"}, True
)


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


def initial_weights(quick: bool, scores: Scores) -> Iterator[Cell]:
    for model in ("plain-34",) if quick else ("plain-34", "resnet-34"):
        base = cifar(model, "cifar10", quick=quick)
        for method in (SGD, G_SGD, *CONTROLS):
            full = method.on(base)
            full = full.but(init="torchvision" if full.init == "default" else f"torchvision-{full.init}")
            yield Cell("short runs", f"{base.model}, {{iterations}} iterations", method, seeds(brief(full), 1))
            if not quick:
                printed = PRINTED.get(("Tab. 1", model, "cifar10", method.key))
                yield Cell("in full", base.model, method, seeds(full, 3), printed)


def _start(key: str, label: str) -> Method:
    return Method(f"sgd-{key}", f"SGD from {label}", {"optimizer": "sgd", "init": key})


SKELETON = Method(FROM_SKELETON.key, FROM_SKELETON.label, FROM_SKELETON.fields)  # no control here: it is asked about
STARTS = (
    _start("dirac-added", "torch's draw plus `dirac_`"),
    _start("dirac", "`dirac_`"),
    _start("delta-orthogonal", "delta-orthogonal init"),
)
DECAYS = {
    Method("gsgd", "G-SGD, decay 0.0005", G_SGD.fields): 5e-4,
    Method("gsgd-0.0001", "G-SGD, decay 0.0001", G_SGD.fields): 1e-4,
}


def usual(model: str, data: str, *, quick: bool = False) -> Recipe:
    """Momentum, decay and a cosine behind a short warm-up, on a network of the paper's tables."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "milestones": ()}
    return cifar(model, data, quick=quick, **settings, schedule="cosine", warm_up=0.02)


def baseline(quick: bool, scores: Scores) -> Iterator[Cell]:
    sets, count = (("cifar10",), 1) if quick else (("cifar10", "cifar100"), 3)
    bases = [usual(model, data, quick=quick) for data in sets for model in ("plain-34", "resnet-34")]

    def tried(method: Method, base: Recipe) -> Recipe:
        return held_out(method.on(base, weight_decay=DECAYS.get(method, base.weight_decay)))

    def found(methods: Sequence[Method]) -> tuple[Method, ...]:
        """The best of these, by the mean over all networks and data sets; none while one is unfinished."""
        winner = best([[tried(method, base) for base in bases] for method in methods], scores)
        return tuple(method for method in methods if winner == tried(method, bases[0]))

    for base in bases:
        for method in (SGD, SKELETON, *STARTS, *DECAYS):
            part = "short runs, {iterations} iterations, validation images"
            yield Cell(part, base.model, method, seeds(tried(method, base), 1))
    start, decays = found(STARTS), [DECAYS[method] for method in found(list(DECAYS))]
    for base in bases:
        for method in (SGD, SKELETON, *start):
            yield Cell("in full", base.model, method, seeds(method.on(base), count))
        for decay in decays:
            runs = seeds(G_SGD.on(base, weight_decay=decay), count)
            yield Cell("in full", base.model, G_SGD, runs, None, f"decay {decay:g}")


def sgd_gap(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = SGD.on(cifar("plain-34", "cifar10", quick=quick))
    epochs = (base.iterations or 0) * 62_560 // 64_000  # 160 of the authors'
    changed = [base.but(precision=name) for name in (("float32",) if quick else ("bf16", "tf32", "float32"))]
    for recipe in (*changed, base.but(iterations=epochs)):
        row, printed = f"{base.model} in {recipe.precision}, {{iterations}} iterations", PRINTED[_OURS]
        yield Cell("test error", row, SGD, seeds(recipe, 1 if quick else 2), printed)


_OURS = ("Tab. 1", "plain-34", "cifar10", "sgd")
_CELLS = (table_1, mlp_invariance, path_sgd, signs, resnet_110, regularization, momentum, one_chain, rates)
_BY_NAME = {cells.__name__.replace("_", "-"): cells for cells in (*_CELLS, initial_weights, baseline, sgd_gap)}
EXPERIMENTS = {name: Experiment(name, _BY_NAME[name], **facts) for name, facts in FACTS["experiments"].items()}
