"""Which optimizers see the representative? w and g_c(w), one function, are trained side by side on digits.

    python benchmarks/invariance.py [--seeds N] [--steps N] [--out results/invariance.json]
    python benchmarks/invariance.py --table docs/invariance.md      # the page, from the record

Each run rescales every unit of a fresh network by e^N(0, 1) and trains both copies on the same batches in float64. The
figure is max |f(w) − f(g_c w)| / max |f(w)| on the first batch after the last step, in evaluation mode. An optimizer
that moves in G-space leaves rounding errors.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gspace
from gspace.lab import data, models
from gspace.lab.record import commit, write_json
from gspace.measure.diagnostics import InvarianceGap, invariance_gap
from gspace.optim.baselines import PathSGD

BATCH = 64


def without_norm(model: nn.Module) -> nn.Module:
    """The same network with every BatchNorm left out."""
    for m in list(model.modules()):
        for name, child in m.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(m, name, nn.Identity())
    return model


@dataclass(frozen=True)
class Network:
    """A network on 1 × 8 × 8 images and how its residual streams are scaled."""

    build: Callable[[], nn.Module]
    residual: str = "pin"


SHAPE, CLASSES = (1, 8, 8), 10
NETWORKS: Mapping[str, Network] = {
    "MLP 64-64-64-10": Network(partial(models.mlp, SHAPE, CLASSES, (64, 64))),
    "CNN": Network(partial(models.cnn, SHAPE, CLASSES, 8)),
    "ResNet-10": Network(lambda: without_norm(models.build_model("resnet-10", SHAPE, CLASSES, width=8)), "tie"),
    "ResNet-10, BatchNorm": Network(partial(models.build_model, "resnet-10", SHAPE, CLASSES, width=8), "tie"),
}


class Muon:
    """`torch.optim.Muon` for matrices and flattened convolutions, AdamW for the rest, as its authors use it."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.matrices = [p for p in model.parameters() if p.dim() > 1]
        self.views = [nn.Parameter(p.detach().flatten(1)) for p in self.matrices]
        rest = [p for p in model.parameters() if p.dim() < 2]
        self.parameters = [*self.matrices, *rest]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(self.views, lr)]
        self.optimizers += [torch.optim.AdamW(rest, lr / 10)] if rest else []

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for view, p in zip(self.views, self.matrices, strict=True):
            view.grad = None if p.grad is None else p.grad.flatten(1)
        for optimizer in self.optimizers:
            optimizer.step()


Make = Callable[[nn.Module, Mapping[str, Any]], Any]  # model, {example_input, residual}


def torch_optimizer(kind: Callable[..., Any], lr: float, **options: Any) -> Make:
    return lambda model, about: kind(model.parameters(), lr, **options)


def in_gspace(kind: Callable[..., Any], *args: Any, **options: Any) -> Make:
    rules = options if "batch_norm" in options else {"reference": "balanced", **options}
    return lambda model, about: kind(model, *args, analysis=gspace.analyze(model, residual=about["residual"]), **rules)


OPTIMIZERS: Mapping[str, Make] = {
    "SGD, lr 0.05": torch_optimizer(torch.optim.SGD, 0.05),
    "SGD, lr 0.01, momentum 0.9": torch_optimizer(torch.optim.SGD, 0.01, momentum=0.9),
    "Adam, lr 0.003": torch_optimizer(torch.optim.Adam, 0.003),
    "AdamW, lr 0.003": torch_optimizer(torch.optim.AdamW, 0.003),
    "Muon, lr 0.02": lambda model, about: Muon(model, 0.02),
    "Path-SGD, lr 0.001": lambda model, about: PathSGD(model, 0.001, example_input=about["example_input"]),
    "GSGD, lr 0.05": in_gspace(gspace.GSGD, 0.05),
    'GSGD, lr 0.05, residual="pin"': lambda model, about: gspace.GSGD(model, 0.05, reference="balanced"),
    "GSGD, lr 0.01, momentum 0.9": in_gspace(gspace.GSGD, 0.01, 0.9),
    "InGSpace(Adam), lr 0.003": in_gspace(gspace.InGSpace, torch.optim.Adam, lr=0.003),
    'GSGD, lr 0.05, batch_norm="exact"': in_gspace(gspace.GSGD, 0.05, batch_norm="exact"),
    'InGSpace(Adam), lr 0.003, batch_norm="exact"': in_gspace(
        gspace.InGSpace, torch.optim.Adam, lr=0.003, batch_norm="exact"
    ),
}


def batches(seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    digits = data.load("digits")
    generator = torch.Generator().manual_seed(seed)
    images = digits.x_train.double() / digits.white
    picks = (torch.randint(len(images), (BATCH,), generator=generator) for _ in range(steps))
    return [(images[pick], digits.y_train[pick]) for pick in picks]


def measure(network: Network, make: Make, seed: int, steps: int) -> InvarianceGap:
    torch.manual_seed(seed)
    model = network.build().double()
    steps_data = batches(seed, steps)
    about = {"example_input": steps_data[0][0], "residual": network.residual}
    generator = torch.Generator().manual_seed(1000 + seed)
    return invariance_gap(lambda m: make(m, about), model, steps_data, generator=generator, residual=network.residual)


def cell(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.median(found):.1e} ({min(found):.0e} … {max(found):.0e})"


def table(rows: Sequence[Mapping[str, Any]], figure: str) -> str:
    found = {(row["network"], row["optimizer"]): cell(row[figure]) for row in rows}
    lines = ["| optimizer | " + " | ".join(NETWORKS) + " |", "|---" * (len(NETWORKS) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(found[network, name] for network in NETWORKS) + " |" for name in OPTIMIZERS]
    return "\n".join(lines)


def page(record: Mapping[str, Any]) -> str:
    return f"""# Invariance of optimizers under rescaling

A network w and a rescaled copy g_c(w) are the same function. Every unit of the copy is scaled by e^N(0, 1). Both train
on the same {record["steps"]} batches of {BATCH} digits, in float64. How far apart are their outputs at the end?

- Every entry is the median (smallest … largest) over n = {record["seeds"]} seeds of weights, scales and batches.
- GSGD and InGSpace use `reference="balanced"`. With `batch_norm="exact"` there is no reference.
- The residual streams of ResNets are rescaled too. Optimizers in G-space follow them
  (`analysis=analyze(model, residual="tie")`). The "pin" row uses the default, which follows only the scales inside
  blocks.
- Path-SGD takes BatchNorm as the affine map that it is in evaluation mode.

One such pair over 400 steps, training loss (`gspace bench twins`):

![Training loss of a network and its rescaled copy: SGD's curves drift apart, G-SGD's coincide](twins.svg)

## max |f(w) − f(g_c w)| / max |f(w)| after {record["steps"]} steps

{table(record["rows"], "final")}

With BatchNorm, GSGD and InGSpace use the paper's view by default, in which BatchNorm is ignored. That view is no
symmetry of the network, and the table shows it. `batch_norm="exact"` is one.

## For comparison: how far f(w) itself moves in training

{table(record["rows"], "moved")}

Generated by `python benchmarks/invariance.py --table docs/invariance.md` from `results/invariance.json` (torch
{record["torch"]}, {record["machine"]} CPU).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/invariance.json"), help="the record")
    parser.add_argument("--table", type=Path, help="write this page from the record, train nothing")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(page(json.loads(options.out.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    torch.set_num_threads(1)
    rows = []
    for name, network in NETWORKS.items():
        for optimizer, make in OPTIMIZERS.items():
            gaps = [measure(network, make, seed, options.steps) for seed in range(options.seeds)]
            figures = {"final": [gap.final for gap in gaps], "moved": [gap.moved for gap in gaps]}
            rows.append({"network": name, "optimizer": optimizer, **figures})
            print(f"{name:22}{optimizer:45}{cell(figures['final'])}", file=sys.stderr, flush=True)
    about = {"torch": torch.__version__, "machine": platform.machine(), "commit": commit()}
    write_json(options.out, {"seeds": options.seeds, "steps": options.steps, **about, "rows": rows})


if __name__ == "__main__":
    main()
