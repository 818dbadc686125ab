"""Why does one chain through all layers of Plain-34 need a guard? Path values and multipliers, measured in training.

    export GSPACE_DATA=…                                    # where CIFAR-10 lies
        python benchmarks/chain.py                              # width 8, seed 0: about 12 minutes on one core
    python benchmarks/chain.py --seed 1 --variants 0 1 6    # adds to the record, as do the next two: 4 minutes
    python benchmarks/chain.py --width 64 --iterations 15 --variants 0 1 4 6    # 18 minutes
    python benchmarks/chain.py --width 64 --iterations 11 --variants 3          # 3 minutes
    python benchmarks/chain.py --table docs/chain.md        # writes the page from the record

Plain-34 by G-SGD from the skeleton with the settings of table 1 (rate 1.0, batch 128, rule `released`) in float32, at
an eighth of the width for 200 iterations and, as a CPU allows, the first ones at the paper's. Measured before a step:
    path value: |I(u)·O(u)| of every unit u, the product of the skeleton weights through it, which is 1 at the start;
    multiplier: n/(Ĩ(tail)·Õ(head))², what the step multiplies lr·∂ℓ/∂w by, of every weight off the skeleton;
    step: ‖lr·multiplier·∂ℓ/∂w‖/‖w‖ of each layer, off the skeleton.

Re-referenced variants measure paths anew every k steps: I_ref ← I_ref·v, so that every v is 1 again and nothing else
changes. Making a new `GSGD` would not do it: on this skeleton its reference is "one", and it measures what was there.
"""

import argparse
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

from gspace import GSGD
from gspace.lab.data import load
from gspace.lab.experiments import G_SGD, HELD, cifar
from gspace.lab.learners import initial_model, loss_and_errors
from gspace.lab.models import build_optimizer, symmetry
from gspace.lab.recipe import Recipe
from gspace.lab.record import Json, environment
from gspace.lab.seeds import derive
from gspace.lab.transform import Feed, epoch_rows, feed
from gspace.optim.coordinates import Coordinates, coordinates, off_skeleton
from gspace.optim.reference import products
from gspace.optim.step import row_norms, scaled

ITERATIONS = 200
LOOKS = (0, 1, 2, 5, 10, 14, 20, 50, 100, 150, 199)
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
THIRDS = ("first", "middle", "last")
SHOWN = (10, 199)  # those of them that are on the page
FAR = 2.0  # a path has left when its value is outside of [1/2, 2]


@dataclass(frozen=True)
class Variant:
    """A way to train: fields of the recipe, and after how many steps paths are measured anew (0: never)."""

    label: str
    fields: Mapping[str, Any]
    every: int = 0


VARIANTS = (
    Variant("stage by stage, no guard", {"pin": "stages"}),
    Variant("one chain, no guard", {"pin": "none"}),
    Variant("one chain, at most 5 % a step, 2 in all", {"pin": "none", "max_ratio": 1.05, "max_drift": 2.0}),
    Variant("one chain, paths held", {"pin": "none", **HELD}),
    Variant("one chain, no guard, re-referenced every step", {"pin": "none"}, every=1),
    Variant("one chain, no guard, re-referenced every 10 steps", {"pin": "none"}, every=10),
    Variant("one chain that ends before the linear layer, no guard", {"pin": "last"}),
)


def recipe_of(variant: Variant, width: int, seed: int, iterations: int) -> Recipe:
    base = cifar("plain-34", "cifar10", precision="float32", milestones=(), iterations=iterations)
    return G_SGD.on(base, width=width, seed=seed).but(**variant.fields)


def rereference(optimizer: GSGD) -> None:
    """Gives every skeleton path the value 1: I_ref ← I_ref·v, so that Ĩ becomes Ĩ/v. No weight changes."""
    chosen = optimizer.chosen
    value = (optimizer.incoming * optimizer.outgoing).double()
    references = chosen.references.clone()
    references[0] *= (value / value[chosen.skeleton.parent.to(value.device)]).to(references)
    optimizer.adopt(chosen._replace(references=references))


# What is measured -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Depths:
    """Which third of the convolutions each unit `(H + 1,)`, ground: −1, and each layer of the coordinates lies in."""

    unit: Tensor
    layer: tuple[int, ...]


def depths(model: nn.Module, at: Coordinates) -> Depths:
    place = {name: k for k, name in enumerate(n for n, p in model.named_parameters() if p.dim() == 4)}
    count = len(place)
    unit = torch.full((at.skeleton.H + 1,), -1)
    for e in at.skeleton.edges:
        if e.name in place:
            unit[e.head.reshape(-1)] = len(THIRDS) * place[e.name] // count
    unit[0] = -1
    layer = tuple(len(THIRDS) * min(place.get(x.edges.name, count), count - 1) // count for x in at.layers)
    return Depths(unit, layer)


@torch.no_grad()
def path_sizes(at: Coordinates, model: nn.Module) -> Tensor:
    """|I(u)·O(u)| of every unit, `(H + 1,)`: 1 at the start, whatever an optimizer measures by."""
    into, out = products(at.skeleton, dict(model.named_parameters()))
    return (into * out).abs()


def multiplier(optimizer: GSGD, at: Coordinates, k: int, weight: Tensor) -> Tensor:
    """n/(Ĩ(tail)·Õ(head))² of layer k, as the view of its weight: Weight-Allocation takes w − lr·multiplier·∂ℓ/∂w."""
    layer = at.layers[k]
    view = layer.edges.view(weight)
    factor = scaled(torch.ones_like(view), at.plan.ends(optimizer.incoming, optimizer.outgoing)[k])
    norms = row_norms(view, optimizer.batch_norm) if layer.edges.normalized else torch.ones_like(view)
    return norms / factor.square()


def digits(x: Tensor | float) -> float:
    """Four of them."""
    return float(f"{float(x):.4g}")


def quantiles(values: Tensor) -> list[float]:
    """`QUANTILES` of them."""
    ordered = values.double().sort().values
    return [digits(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES]


@torch.no_grad()
def look(optimizer: GSGD, at: Coordinates, where: Depths, model: nn.Module, lr: float) -> Json:
    """Everything of one iteration, by thirds: with gradients, before the step."""
    weights = dict(model.named_parameters())
    sizes = path_sizes(at, model)
    found: Json = {"path": [quantiles(sizes[where.unit == third]) for third in range(len(THIRDS))]}
    factors: list[list[Tensor]] = [[] for _ in THIRDS]
    steps: list[list[float]] = [[] for _ in THIRDS]
    sizes_of_weights: list[list[float]] = [[] for _ in THIRDS]
    for k, layer in enumerate(at.layers):
        weight = weights[layer.edges.name]
        grad = layer.edges.view(weight.grad if weight.grad is not None else torch.zeros_like(weight))
        off = off_skeleton(layer, weight) > 0
        factor = multiplier(optimizer, at, k, weight)[off]
        factors[where.layer[k]].append(factor)
        kept = layer.edges.view(weight)[off]
        steps[where.layer[k]].append(float((lr * factor * grad[off]).norm() / kept.norm()))
        sizes_of_weights[where.layer[k]].append(float(kept.square().mean().sqrt()))
    found["multiplier"] = [quantiles(torch.cat(parts)) for parts in factors]
    found["step"] = [digits(median(parts)) for parts in steps]
    found["weight"] = [digits(median(parts)) for parts in sizes_of_weights]
    return found


# Training -------------------------------------------------------------------------------------------------------------


def watched(variant: Variant, width: int, seed: int, source: Feed, iterations: int) -> Json:
    """One run: the loss of each batch, the share of units whose path has left [1/2, 2], and the looks."""
    recipe = recipe_of(variant, width, seed, iterations)
    model = initial_model(recipe).train()
    example, _ = source.batch(source.still_rows()[:2])
    torch.manual_seed(derive(seed, "training"))
    optimizer = build_optimizer(model, recipe, recipe.lr, example)
    assert isinstance(optimizer, GSGD)
    at = coordinates(model, reference="one", **symmetry(model, recipe))
    where = depths(model, at)
    rows = epoch_rows(seed, 0, len(source.labels), recipe.batch_size, source.augment)
    losses: list[float] = []
    left: list[float] = []
    extremes: list[list[float]] = []
    ratios: list[list[float]] = []
    looks: dict[str, Json] = {}
    ended, begun = "finished", time.perf_counter()
    for k in range(iterations):
        optimizer.zero_grad()
        loss, _ = loss_and_errors(
            model, source.images, source.labels, source.augment.take, source.finish, rows[k], recipe.precision
        )
        loss.backward()
        losses.append(round(float(loss.detach()), 4))
        sizes = path_sizes(at, model)[1:]
        left.append(round(float(((sizes > FAR) | (sizes < 1 / FAR)).float().mean()), 4))
        extremes.append([digits(sizes.min()), digits(sizes.max())])
        if k in LOOKS:
            looks[str(k)] = look(optimizer, at, where, model, recipe.lr)
        try:
            optimizer.step()
        except RuntimeError as error:
            ended = str(error)
            break
        ratio = optimizer.statistics()["ratio_quantiles"]
        ratios.append([digits(ratio[0.0]), digits(ratio[1.0])])
        if variant.every and (k + 1) % variant.every == 0:
            rereference(optimizer)
    return {
        "width": width,
        "variant": variant.label,
        "seed": seed,
        "recipe": recipe.identity,
        "units": [int((where.unit == third).sum()) for third in range(len(THIRDS))],
        "roots": len(at.roots),
        "ended": ended,
        "seconds": round(time.perf_counter() - begun, 1),
        "loss": losses,
        "left": left,
        "extremes": extremes,
        "ratios": ratios,
        "looks": looks,
    }


def measure(numbers: Sequence[int], width: int, seed: int, iterations: int, out: Path, data_dir: Path | None) -> None:
    """Trains these variants; all other runs that `out` has are kept."""
    torch.set_num_threads(1)
    source = feed(load("cifar10", data_dir), "standard", "crop-flip")
    kept: list[Json] = json.loads(out.read_text())["runs"] if out.exists() else []
    for number in numbers:
        run = watched(VARIANTS[number], width, seed, source, iterations)
        kept = [old for old in kept if key(old) != key(run)] + [run]
        record = {"command": "python benchmarks/chain.py", "environment": environment(), "runs": sorted(kept, key=key)}
        out.write_text(json.dumps(record) + "\n")
        print(*key(run), run["variant"], run["seconds"], run["ended"], run["loss"][-1], flush=True)


def key(run: Json) -> tuple[int, int, int]:
    """Width, place of the variant, seed: what a record has once."""
    return run["width"], [variant.label for variant in VARIANTS].index(run["variant"]), run["seed"]


# The page -------------------------------------------------------------------------------------------------------------


PROSE = (
    """G-SGD on one chain through all layers of Plain-34 needs a bound on path values. This page looks for the reason
    in the values themselves. How such trainings end is in [fidelity](fidelity.md).""",
    """The runs start from the skeleton: CIFAR-10, rate 1.0, batch 128, rule `released`, float32. At the paper's width
    of 64 only the first batches were run, at width 8 there are 200. A path is *outside* when its value is not in
    [1/2, 2]. "Stage by stage" means chains that end at each stage.""",
    """*At width 64 paths leave at once, and only in one chain* (n = 1). The first are outside before step 2, a fifth
    of the units before step 7. The largest value is 1,000. It stays there, because the step of a path is divided by
    the square of its own value. Behind it multipliers are 1e-7, so nothing learns there any more. In rows that have
    grown they are up to 190. Stage by stage no path leaves.""",
    """*The square is not the whole cause.* All units of a path share one Ĩ, so the square does not compound with
    depth. What grows with the layers behind a path is the sum in its gradient. It does not begin with path values
    either: before step 0 the medians of the multipliers agree (0.19). Yet in one chain the first step is 13 to 16
    times larger beside the weights (0.56 instead of 0.042 in the first third; medians over layers, `step` in the
    record). R is 0.70 to 1.19 instead of 0.99 to 1.01. In this one step the loss goes from 3.2 to 12.1, with all
    paths still inside. With paths held it goes to 12.8 too, but is back at 2.4 before step 7 (4.5 without a guard;
    single batches, n = 1). Our reading: the start makes the burst. A guard keeps the burst from carrying paths to
    where they do not return from.""",
    """*The burst comes from the ones in the linear layer.* The skeleton of one chain runs through the linear layer
    too. It has ones where torch draws at most 0.044. We ran a chain that ends before that layer, with all else the
    same and no guard (n = 1). Its first step is 0.046, 0.025 and 0.021 by thirds, nearly that of stage by stage
    (0.042, 0.025 and 0.021). Its loss rises no further than there (5.1 and 6.3). R stays within 0.68 and 1.82. At
    worst 0.45 % of the units are outside, at 0.43. At width 8 nothing leaves with either seed, and the losses of the
    last 50 batches are 1.82 and 1.84, the lowest of all. This chain was tried after the others, because of what they
    showed. How it ends in a full training is not known.""",
    """*Re-referencing does not help.* A new `GSGD` changes nothing: on this skeleton its reference is "one", and it
    finds the values that were there (equal to rounding, `tests/test_results.py`). So these runs set I_ref ← I_ref·v.
    That makes every v 1 and takes the square out of the step. Even if it is done at every step, paths leave at width
    64, and the loss goes to 19.1 (n = 1). Weights off the skeleton grow from an rms of 0.024 to 0.92 in the first
    third (`weight` in the record). They are divided by R as before, and nothing bounds R.""",
    """*At width 8 it depends on the seed, and costs little* (200 batches; n = 2 for chains without a bound or a new
    reference, else 1). With seed 0 one path is outside at one iteration. With seed 1 a path changes its sign in step
    11, and another value is multiplied by 521. Later steps multiply by −2,438 and 14,760. A fifth of the units stays
    outside, the largest value at 410. Yet the loss over the last 50 batches is 2.00 and 1.93, and stage by stage 1.94
    and 1.87. So paths that have left do not stop a narrow network in so short a time. Among chains through all layers
    with seed 0, the loss is lowest with paths held (1.91) and highest with a new reference at every step (2.07).""",
)

SAID = {
    "all": """n is the number of seeds. Of the losses of single batches the table has the largest, and the mean over
        the last quarter (± std over the seeds). R is what one step multiplies a path value by. Of R and of path
        values it has the smallest and the largest over all paths, iterations and seeds. *Outside since* is the step
        before which a path was first outside, with the number of such iterations in brackets, by seed. *Outside, %*
        is the largest share of units at one iteration.""",
    "path": """Smallest, 5 %, median, 95 % and largest |path value| over the units of the first, middle and last 11 of
        the 33 convolutions. Each is the median over the seeds. Units on one path share its value, so the thirds
        differ only by the paths that begin between them. All values are 1.00 before step 0.""",
    "multiplier": """The same for n/(Ĩ·Õ)², by which the step multiplies the rate of a weight off the skeleton, over
        the weights of those layers. The linear layer belongs to the last third.""",
}


def grouped(runs: Sequence[Json]) -> dict[tuple[int, str], list[Json]]:
    """Runs that differ in their seed alone, by width and variant."""
    found: dict[tuple[int, str], list[Json]] = {}
    for run in runs:
        found.setdefault((run["width"], run["variant"]), []).append(run)
    return found


def ends(runs: Sequence[Json], name: str) -> tuple[float, float]:
    """The smallest and the largest of all pairs called `name`, in all iterations of all runs."""
    pairs = [pair for run in runs for pair in run[name]]
    return min(low for low, _ in pairs), max(high for _, high in pairs)


def last_loss(run: Json) -> float:
    """Mean over the last quarter of the batches."""
    return fmean(run["loss"][-(len(run["loss"]) // 4) :])


def number(x: float) -> str:
    return f"{x:.2f}" if 0.1 <= abs(x) < 100 else f"{x:.1e}"


def away(run: Json) -> str:
    """Since when some path was outside of [1/2, 2], and how often."""
    iterations = [k for k, share in enumerate(run["left"]) if share > 0]
    return f"{iterations[0]} ({len(iterations)})" if iterations else "never"


def summary(runs: Sequence[Json]) -> str:
    """Cells of the first table, behind width and variant."""
    losses = [last_loss(run) for run in runs]
    std = f" ± {stdev(losses):.2f}" if len(losses) > 1 else ""
    cells = [
        str(len(runs)),
        ", ".join(sorted({str(len(run["loss"])) for run in runs})),
        f"{max(max(run['loss']) for run in runs):.2f}",
        f"{fmean(losses):.2f}{std}",
        " to ".join(map(number, ends(runs, "ratios"))),
        " to ".join(map(number, ends(runs, "extremes"))),
        ", ".join(map(away, runs)),
        f"{100 * max(max(run['left']) for run in runs):.1f}",
    ]
    return " | ".join(cells)


def by_depth(runs: Sequence[Json], name: str) -> list[str]:
    """One line for each look of `SHOWN` that all have: quantiles by thirds, each the median over the seeds."""
    lines = []
    for step in (str(k) for k in SHOWN if all(str(k) in run["looks"] for run in runs)):
        thirds = zip(*(run["looks"][step][name] for run in runs), strict=True)
        cells = [", ".join(number(median(values)) for values in zip(*third, strict=True)) for third in thirds]
        lines.append(" | ".join([step, *cells]))
    return lines


def table(head: Sequence[str], rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {row} |" for row in rows)]


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def page(record: Json) -> str:
    where = record["environment"]
    groups = [(f"{width} | {label}", runs) for (width, label), runs in grouped(record["runs"]).items()]
    machine = f"torch {where['torch']}, {where['platform']}, one thread of a CPU"
    text = [
        *PROSE,
        f"Generated by `python benchmarks/chain.py --table docs/chain.md` from `results/chain.json` ({machine}).",
    ]
    lines = ["# One chain through Plain-34: path values in training", ""]
    lines += [f"{wrapped(part)}\n" for part in text]
    head = ["n", "batches", "largest loss", "last loss", "R", "path values", "outside since", "outside, %"]
    lines += ["## All of the training", "", wrapped(SAID["all"]), ""]
    lines += table(["width", "variant", *head], [f"{name} | {summary(runs)}" for name, runs in groups])
    head = ["before step", *(f"{third} third" for third in THIRDS)]
    for title, name in (("Path values by depth", "path"), ("Multipliers by depth", "multiplier")):
        lines += ["", f"## {title}", "", wrapped(SAID[name]), ""]
        rows = [f"{at} | {line}" for at, runs in groups for line in by_depth(runs, name)]
        lines += table(["width", "variant", *head], rows)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/chain.json"), help="the record")
    parser.add_argument("--variants", type=int, nargs="+", default=range(len(VARIANTS)), help="these alone, by number")
    parser.add_argument("--width", type=int, default=8, help="of the first stage; the paper's is 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies (default: $GSPACE_DATA)")
    parser.add_argument("--table", type=Path, help="write this page from the record, train nothing")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(page(json.loads(options.out.read_text())))
    else:
        where = options.out, options.data_dir
        measure(options.variants, options.width, options.seed, options.iterations, *where)


if __name__ == "__main__":
    main()
