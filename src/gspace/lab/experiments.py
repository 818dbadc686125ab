"""Every table and figure of the paper, and the questions it leaves open, as generators of recipes.

    gspace reproduce table-1 --list            # what it is, and what it costs
    gspace reproduce table-1 --out runs        # run what is not finished, then write the report

Above each stand its source in the paper, its question, and notes, which name the settings that the paper leaves open.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspace.lab.baseline import BASELINE, SGD_GAP
from gspace.lab.cells import Axis, Cell, Cells, Experiment, Method, Scores, best, seeds
from gspace.lab.cost import network_cost
from gspace.lab.recipe import Recipe
from gspace.lab.settings import (
    CONTROLS,
    FASHION,
    FIGURES_8_9,
    FROM_SKELETON,
    G_SGD,
    GUARDED,
    HELD,
    PATH_SGD,
    PATHS,
    QUICK_FASHION,
    SGD,
    STILL,
    TABLE_1,
    UNGUARDED,
    brief,
    cifar,
    held_out,
)

GRID = "grid of rates, validation images"
RATE = Axis("learning rate", lambda recipe: recipe.lr)
DECAY = Axis("λ", lambda recipe: recipe.weight_decay)

EXPERIMENTS: dict[str, Experiment] = {}


def experiment(name: str, source: str, question: str, *notes: str) -> Callable[[Cells], Cells]:
    """Enters the generator below it in `EXPERIMENTS`, which has the order of this file."""

    def enter(cells: Cells) -> Cells:
        EXPERIMENTS[name] = Experiment(name, source, question, notes, cells)
        return cells

    return enter


def _compared(models: Sequence[str], methods: Sequence[Method], quick: bool) -> Iterator[Cell]:
    """The paper's comparison: every method on every network and data set."""
    for data in ("cifar10",) if quick else ("cifar10", "cifar100"):
        for model in models:
            base = cifar(model, data, quick=quick)
            for method in methods:
                printed = TABLE_1.get((model, data, method.key))
                runs = seeds(method.on(base), 1 if quick else 5)
                yield Cell("test error", base.model, method, runs, printed)


@experiment(
    "table-1",
    "Tab. 1, Fig. 3",
    "Does G-SGD reach a lower test error than SGD on Plain-34 and ResNet-34?",
    "lr 1.0, ÷10 after 1/2 and 3/4 of 64,000 iterations, batch 128, no momentum, no decay.",
    "Plain-34's chains end at each stage, as in the authors' code; the paper's text has one chain.",
    "Inputs are normalized per channel, as in the authors' code; the paper scales them to [0, 1].",
    "bf16 autocast; the paper states no precision.",
)
def table_1(quick: bool, scores: Scores) -> Iterator[Cell]:
    return _compared(("plain-34", "resnet-34"), (SGD, G_SGD, *CONTROLS, STILL), quick)


def invariant_ratio(recipe: Recipe) -> float:
    """H/m of an MLP without biases (Tab. 6 prints half of it: h/m, where H = 2h).

    >>> [f"{invariant_ratio(FASHION.but(hidden=(h, h))):.2e}" for h in (8, 1024)]
    ['2.99e-02', '1.85e-03']
    """
    flops, _ = network_cost(recipe)  # a multiplication and an addition per weight
    return sum(recipe.hidden) / (flops / 2)


RATIO = Axis("invariant ratio H/m", invariant_ratio, "H/m = {:.2e}")
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


@experiment(
    "mlp-invariance",
    "Fig. 4, Tab. 6",
    "Does the gain of G-SGD over SGD grow with the invariant ratio H/m?",
    "The paper: G-SGD is ahead at every width in training loss and in test error, and Δ falls with H/m. Its Δ, and "
    "that of the figure below, is SGD minus G-SGD; the tables have G-SGD minus SGD.",
    "[49 : h : h : 10] on 7 × 7 images, lr 0.01, batch 64, 100 epochs. H/m is twice what Tab. 6 prints, which is h/m.",
    "One shared rate can favour either method, so the best rate of each is run too; "
    "it is chosen on held-out training images.",
)
def mlp_invariance(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = FASHION.but(**QUICK_FASHION) if quick else FASHION
    widths = (8, 32, 128) if quick else (8, 16, 32, 64, 128, 256, 512, 1024)
    rates = (0.01, 0.1) if quick else RATES
    methods = (SGD, G_SGD, *CONTROLS)

    def line(part: str, h: int, method: Method, recipe: Recipe, setting: str = "") -> Cell:
        runs = seeds(recipe.but(hidden=(h, h)), 2 if quick else 5)
        return Cell(part, f"h = {h}", method, runs, None, setting, RATIO)

    for h in widths:
        for method in methods:
            yield line("the paper's rate, 0.01", h, method, method.on(base))
    held = 2000 if quick else 6000
    for h in widths:
        for method in methods:
            grid = [method.on(base, hidden=(h, h), lr=rate, validation=held) for rate in rates]
            groups = [seeds(recipe, 1 if quick else 2) for recipe in grid]
            for recipe, runs in zip(grid, groups, strict=True):
                yield Cell(GRID, f"h = {h}, lr {recipe.lr:g}", method, runs)
            found = best(groups, scores)
            if found:
                yield line("best rate of each method", h, method, found.but(validation=0), f"lr {found.lr:g}")


@experiment(
    "path-sgd",
    "Fig. 5",
    "Do SGD, Path-SGD and G-SGD differ at the best rate of each?",
    "The paper: Path-SGD is as good as SGD or better, G-SGD better than both; it prints curves, no numbers.",
    "Five hidden layers of 64, rates 10^-α for α = 0 … 10, batch 64, grey images in [0, 1].",
    "The paper does not say for how long: 50 epochs here. The rate is chosen on held-out training images.",
)
def path_sgd(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = PATHS.but(epochs=2.0, quick=True) if quick else PATHS
    rates = [10.0**-alpha for alpha in (range(4) if quick else range(11))]
    held = 2000 if quick else 5000
    for data in ("mnist",) if quick else ("mnist", "cifar10"):
        for method in (SGD, PATH_SGD, G_SGD, GUARDED, *CONTROLS):
            grid = [seeds(method.on(base, data=data, lr=rate, validation=held), 1) for rate in rates]
            for runs in grid:
                yield Cell(GRID, f"lr {runs[0].lr:g}", method, runs, axis=RATE)
            found = best(grid, scores)
            if found:
                runs = seeds(found.but(validation=0), 2 if quick else 5)
                yield Cell("best rate of each method", "5 × 64", method, runs, None, f"lr {found.lr:g}")


SIGNS = (
    Method("positive", "all +1", G_SGD.fields),
    Method("common", "±1 at random, one draw for all seeds", {**G_SGD.fields, "init": "skeleton-common-signs"}),
    Method("random", "±1 at random, drawn per seed", {**G_SGD.fields, "init": "skeleton-random-signs"}),
)


@experiment(
    "signs",
    "Sec. 11.2",
    "Do the signs of the skeleton weights matter?",
    "The paper states that they do not and prints no numbers.",
    "One draw for all seeds has the spread of initial weights and batches alone; a draw per seed adds that "
    "of the signs.",
)
def signs(quick: bool, scores: Scores) -> Iterator[Cell]:
    fashion = FASHION.but(**QUICK_FASHION) if quick else FASHION.but(epochs=30.0)
    for h in (8, 32) if quick else (8, 32, 128):
        for method in SIGNS:
            runs = seeds(method.on(fashion, hidden=(h, h)), 3 if quick else 9)
            yield Cell("MLPs", f"h = {h}", method, runs)
    base = brief(cifar("plain-34", "cifar10", quick=quick))
    for method in SIGNS:
        yield Cell("plain network", base.model, method, seeds(method.on(base), 1 if quick else 3))


@experiment(
    "resnet-110",
    "Tab. 5, Fig. 7",
    "Does the gain of G-SGD last on a deeper network?",
    "Settings of table-1; [3, 8, 40, 3] basic blocks.",
)
def resnet_110(quick: bool, scores: Scores) -> Iterator[Cell]:
    return _compared(("resnet-110",), (SGD, G_SGD, *CONTROLS), quick)


LAMBDAS = tuple(factor * 10.0**-alpha for alpha in (6, 5, 4, 3) for factor in (0.1, 0.2, 0.5))


@experiment(
    "regularization",
    "Fig. 8, Fig. 9",
    "Weight decay for SGD against decay of basis paths for G-SGD, each at its best λ.",
    "λ ∈ {0.1, 0.2, 0.5}·10^-α, α = 3 … 6, chosen on held-out images of CIFAR-10, used on CIFAR-100 too.",
    "The paper searches all of it; ours are runs of an eighth of the schedule, first 0.2·10^-α, then the "
    "two λ beside the best of them.",
)
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
        searched += [Cell(part, f"λ = {runs[0].weight_decay:g}", method, runs, axis=DECAY) for runs in grid]
        for data in ("cifar10",) if quick else ("cifar10", "cifar100"):
            if found:
                decay = found.weight_decay
                runs = seeds(full.but(weight_decay=decay, data=data), 1 if quick else 3)
                printed = FIGURES_8_9.get((data, method.key))
                row = (full.model, method, runs, printed, f"λ = {decay:g}")
                chosen.append(Cell("best λ of each method, in full", *row))
    yield from sorted(searched, key=lambda cell: cell.recipes[0].weight_decay)  # methods have different λ
    yield from chosen


USUAL = Method("sgd-usual", "SGD, usual settings", SGD.fields)


@experiment(
    "momentum",
    "",
    "Does G-space help the baseline people use: momentum 0.9, weight decay, the usual schedule?",
    "Every method gets five short runs, judged on held-out training images: three rates with decay 5e-4, "
    "then two other decays with the best of them. Short runs can choose badly, so SGD is run with the settings "
    "that are usual, too.",
)
def momentum(quick: bool, scores: Scores) -> Iterator[Cell]:
    rates, decays = ((0.1,), (1e-4,)) if quick else ((0.03, 0.1, 0.3), (1e-4, 2e-3))
    in_full = "best settings of each method, in full"
    for model in ("plain-34", "resnet-34"):
        base = cifar(model, "cifar10", quick=quick, momentum=0.9, weight_decay=5e-4, lr=0.1)
        chosen = []
        for method in (SGD, G_SGD, FROM_SKELETON):
            full = method.on(base)
            short = held_out(full)
            part = "grid, {iterations} iterations, validation images"
            by_rate = [seeds(short.but(lr=rate), 1) for rate in rates]
            for runs in by_rate:
                yield Cell(part, f"{base.model}, decay {base.weight_decay:g}, lr {runs[0].lr:g}", method, runs)
            found = best(by_rate, scores)
            if found:
                by_decay = [seeds(found.but(weight_decay=decay), 1) for decay in decays]
                for runs in by_decay:
                    row = f"{base.model}, decay {runs[0].weight_decay:g}, its best rate"
                    yield Cell(part, row, method, runs, None, f"lr {found.lr:g}")
                found = best([(found,), *by_decay], scores)
            chosen.append(found)
            if found:
                runs = seeds(full.but(lr=found.lr, weight_decay=found.weight_decay), 1 if quick else 3)
                setting = f"lr {found.lr:g}, decay {found.weight_decay:g}"
                yield Cell(in_full, base.model, method, runs, None, setting)
        if all(chosen):  # beside what the searches found
            runs = seeds(USUAL.on(base), 1 if quick else 3)
            yield Cell(in_full, base.model, USUAL, runs, None, f"lr {base.lr:g}, decay {base.weight_decay:g}")


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


@experiment(
    "one-chain",
    "Sec. 5.1 (text)",
    "What makes one chain through all layers of Plain-34 train, and does it beat stage by stage?",
    "The paper's text has one chain; its authors' code ends it at each stage.",
    "The best is that of the lowest test error of a short run. The chain that ends before the linear layer came later "
    "(docs/chain.md) and is not among those it was chosen from; it is run in full too.",
)
def one_chain(quick: bool, scores: Scores) -> Iterator[Cell]:
    base = cifar("plain-34", "cifar10", quick=quick)
    short = brief(base)
    stages = Method("stages", "stage by stage (as in table-1)", G_SGD.fields)
    row = f"{base.model}, {{iterations}} iterations"
    beside = (stages, SGD, FROM_SKELETON)
    for method in (*CHAINS, CHAIN_LAST, *beside, CHAIN_START):
        yield Cell("short runs", row, method, seeds(method.on(short), 1))
    found = best([seeds(method.on(short), 1) for method in CHAINS], scores)
    last = (CHAIN_LAST,) if scores(CHAIN_LAST.on(short)) is not None else ()
    for method in (*(m for m in CHAINS if found == m.on(short, seed=0)), *((*last, *beside) if found else ())):
        yield Cell("the best of them in full", base.model, method, seeds(method.on(base), 1))


@experiment(
    "rates",
    "",
    "Is the gain of table-1 a gain of G-space, or of a smaller learning rate?",
    "Settings of table-1 for 8,000 iterations at rates around the paper's 1.0.",
    "Before a BatchNorm the authors' rule multiplies gradients by the norm of a row, about 0.2 at the "
    "start at most taps: if that is all, G-SGD at 1.0 takes the steps of SGD at a smaller rate.",
    "The best rate is that of the lowest test error of a short run: every method has the same choices.",
)
def rates(quick: bool, scores: Scores) -> Iterator[Cell]:
    for model in ("plain-34",) if quick else ("plain-34", "resnet-34"):
        full = cifar(model, "cifar10", quick=quick)
        short = brief(full)
        for method in (SGD, G_SGD, *CONTROLS):
            grid = [seeds(method.on(short, lr=rate), 1) for rate in ((0.3, 1.0) if quick else (0.1, 0.3, 1.0, 3.0))]
            for runs in grid:
                yield Cell("short runs", f"{full.model}, lr {runs[0].lr:g}", method, runs, axis=RATE)
            found = best(grid, scores)
            if found:
                runs = seeds(method.on(full, lr=found.lr), 1 if quick else 3)
                yield Cell("in full, at the best of these rates", full.model, method, runs, None, f"lr {found.lr:g}")


@experiment(
    "initial-weights",
    "",
    "Is what our SGD lacks beside the paper's a matter of the initial weights?",
    "The paper names torchvision's ResNet and PyTorch's default methods, which are two: torch draws w of a "
    "convolution with variance 1/(3·fan-in), torchvision with 2/fan-out. Here it is torchvision's draw, in "
    "`table-1` and `rates` torch's, which the authors' code has.",
    "Before a BatchNorm larger weights are a smaller rate: mostly six times the variance, a sixth of lr.",
)
def initial_weights(quick: bool, scores: Scores) -> Iterator[Cell]:
    for model in ("plain-34",) if quick else ("plain-34", "resnet-34"):
        base = cifar(model, "cifar10", quick=quick)
        for method in (SGD, G_SGD, *CONTROLS):
            full = method.on(base)
            full = full.but(init="torchvision" if full.init == "default" else f"torchvision-{full.init}")
            yield Cell("short runs", f"{base.model}, {{iterations}} iterations", method, seeds(brief(full), 1))
            if not quick:
                printed = TABLE_1.get((model, "cifar10", method.key))
                yield Cell("in full", base.model, method, seeds(full, 3), printed)


EXPERIMENTS |= {experiment.name: experiment for experiment in (BASELINE, SGD_GAP)}
