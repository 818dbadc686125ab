"""A network and its rescaled copy, trained by SGD and by G-SGD: the figure of the README.

    gspace bench twins                                # trains four networks per seed on a CPU, half a minute in all
    gspace bench twins --out results/twins.json       # and keeps the record
    gspace bench twins --figure docs/twins.svg        # draws seed 0 of that record, trains nothing

Both copies compute the same function and see the same batches, in float64. The record keeps the training loss on all
training images every few steps.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import nn
from torch.nn import functional as F

import gspace
from benchmarks.invariance import BATCH, CLASSES, SHAPE, batches
from gspace.lab import data, models
from gspace.lab.figures import STYLE, save
from gspace.lab.record import environment, write_json

HIDDEN = (64, 64)
LR = 0.05
STEPS, EVERY = 400, 5
SEEDS = 5

OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), LR),
    "G-SGD": lambda model: gspace.GSGD(model, LR),
}
COPIES = ("network", "rescaled copy")


def measure(seeds: int, steps: int) -> dict[str, Any]:
    """The record: recipe, versions, and one row per seed, optimizer and copy."""
    torch.set_num_threads(1)
    recipe = {"data": "digits", "model": "mlp", "hidden": HIDDEN, "lr": LR, "batch": BATCH, "dtype": "float64"}
    rows = [row for seed in range(seeds) for row in runs(seed, steps)]
    return {"command": "gspace bench twins", "recipe": {**recipe, "steps": steps}, **environment(), "rows": rows}


def runs(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Four runs: each optimizer from a network and from the same network with every unit rescaled by e^N(0, 1)."""
    torch.manual_seed(seed)
    network = models.mlp(SHAPE, CLASSES, HIDDEN).double()
    scales = gspace.random_scales(network, torch.Generator().manual_seed(1000 + seed))
    starts = (network, gspace.rescale_(copy.deepcopy(network), scales))
    for name, make in OPTIMIZERS.items():
        for which, start in zip(COPIES, starts, strict=True):
            model = copy.deepcopy(start)
            points = list(losses(model, make(model), seed, steps))
            yield {"seed": seed, "optimizer": name, "start": which, "train_loss": points}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int) -> Iterator[float]:
    """Training loss on all training images, before the first step and after every few."""
    digits = data.load("digits")
    images = digits.x_train.double() / digits.white
    for step, (x, y) in enumerate(batches(seed, steps)):
        if step % EVERY == 0:
            yield _loss(model, images, digits.y_train)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    yield _loss(model, images, digits.y_train)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def curves(record: Mapping[str, Any], seed: int = 0) -> dict[tuple[str, str], Sequence[float]]:
    """Training loss by optimizer and copy."""
    return {(r["optimizer"], r["start"]): r["train_loss"] for r in record["rows"] if r["seed"] == seed}


def apart(record: Mapping[str, Any], optimizer: str) -> list[float]:
    """Per seed, the largest gap between the losses of the two copies, relative to that of the network."""
    found = []
    for seed in sorted({row["seed"] for row in record["rows"]}):
        one, other = (curves(record, seed)[optimizer, which] for which in COPIES)
        found.append(max(abs(a - b) / a for a, b in zip(one, other, strict=True)))
    return found


TITLE = "The same function with other weights: SGD trains it differently, G-SGD does not"
INK = "#7d8590"  # of text and axes; this and the colours of the curves can be read on white and on black
DASHED = (0, (3, 1.6))
LOOKS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("SGD", "network"): {"color": "#3b8ed0", "linewidth": 2.2},
    ("SGD", "rescaled copy"): {"color": "#3b8ed0", "linewidth": 1.6, "linestyle": DASHED},
    ("G-SGD", "network"): {"color": "#f2a65a", "linewidth": 5.5},
    ("G-SGD", "rescaled copy"): {"color": "#b83c00", "linewidth": 1.8, "linestyle": DASHED},
}
LABELS = {  # at the end of a curve: text, colour, points above it
    ("SGD", "network"): ("SGD, network", "#3b8ed0", 5),
    ("G-SGD", "network"): ("G-SGD, network\nand rescaled copy", "#e07b2a", -6),
    ("SGD", "rescaled copy"): ("SGD, rescaled copy", "#3b8ed0", 0),
}


def figure(record: Mapping[str, Any]) -> Figure:
    """Seed 0: two curves of SGD apart, two of G-SGD on top of each other, on a transparent ground."""
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with matplotlib.rc_context({**STYLE, **dict.fromkeys(inks, INK), "font.size": 10, "grid.alpha": 0.2}):
        made = Figure(figsize=(7.6, 3.8), layout="constrained", facecolor="none")
        made.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # room at the right for fonts that are wider than ours
        axes = made.add_subplot(facecolor="none")
        for key, loss in curves(record).items():
            axes.plot(at(record), loss, **LOOKS[key])
        axes.set(yscale="log", xlabel="step", ylabel="training loss", xlim=(0, record["recipe"]["steps"]))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0)
        made.suptitle(TITLE, x=0.01, ha="left", size=11, weight="bold")
        for key, (text, colour, above) in LABELS.items():
            end = (record["recipe"]["steps"], curves(record)[key][-1])
            axes.annotate(text, end, (8, above), textcoords="offset points", va="center", color=colour)
    return made


def at(record: Mapping[str, Any]) -> list[int]:
    """The steps at which losses were measured."""
    steps: int = record["recipe"]["steps"]
    return [*range(0, steps, EVERY), steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the record here")
    parser.add_argument("--figure", type=Path, help="draw this file from results/twins.json, train nothing")
    options = parser.parse_args()
    if options.figure:
        save(figure(json.loads(Path("results/twins.json").read_text(encoding="utf-8"))), options.figure)
        return
    print("largest relative gap between the training losses of a network and its rescaled copy, by seed")
    record = measure(SEEDS, STEPS)
    for name in OPTIMIZERS:
        print(f"{name:6}", *(f"{gap:.1e}" for gap in apart(record, name)))
    if options.out:
        write_json(options.out, record)


if __name__ == "__main__":
    main()
