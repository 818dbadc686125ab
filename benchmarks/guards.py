"""How far may trained skeleton paths move? GSGD's guards against SGD on digits, from several starting points.

    python benchmarks/guards.py --out results/guards.json       # trains, about 15 minutes
    python benchmarks/guards.py --table docs/guards.md          # writes the page from that record

Networks start from He initialisation, as it is or rescaled by e^N(0,1) (which changes no function), or on the skeleton.
Every cell trains `SEEDS` networks for 400 steps of 64 images and records training loss and test error.
"""

import argparse
import itertools
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gspace

SEEDS = 5
STEPS = 400
INF = float("inf")

# (max_ratio, max_drift); None is SGD.
METHODS: dict[str, tuple[float, float] | None] = {
    "SGD": None,
    "1.5, 1.1": (1.5, 1.1),
    "1.5, 1.25": (1.5, 1.25),
    "1.5, 2": (1.5, 2.0),
    "1.5, 10": (1.5, 10.0),
    "none": (INF, INF),
}
DEFAULT = "1.5, 1.1"


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for n, out in itertools.pairwise(widths):
        layers += [nn.Linear(n, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8))]
    for n, out in ((1, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(n, out, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "MLP 64-16-16-10": (lambda: mlp(64, 16, 16, 10), (0.05, 0.2)),
    "MLP 64-64-64-10": (lambda: mlp(64, 64, 64, 10), (0.05, 0.2)),
    "MLP 64-4×32-10": (lambda: mlp(64, 32, 32, 32, 32, 10), (0.05, 0.2)),
    "CNN 16-16-32-32": (cnn, (0.05, 0.2)),
}
STARTS = ("He", "He, rescaled", "skeleton")


def start(build: Callable[[], nn.Module], how: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build()
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    if how == "He, rescaled":
        gspace.rescale_(model, gspace.random_scales(model, torch.Generator().manual_seed(seed)))
    if how == "skeleton":
        gspace.init_skeleton_(model)
    return model


def optimizer(model: nn.Module, lr: float, guards: tuple[float, float] | None) -> torch.optim.Optimizer:
    if guards is None:
        return torch.optim.SGD(model.parameters(), lr)
    return gspace.GSGD(model, lr, max_ratio=guards[0], max_drift=guards[1])


Ends = tuple[float | None, float | None]


def ends(model: nn.Module, step: torch.optim.Optimizer, data: tuple[Tensor, ...], seed: int) -> Ends:
    """Training loss and test error after `STEPS` steps; (None, None) if the loss left the finite numbers."""
    x, y, x_test, y_test = data
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (64,), generator=generator)
        step.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        try:
            step.step()
        except RuntimeError:
            return None, None
    with torch.no_grad():
        loss = float(F.cross_entropy(model(x), y))
        error = float((model(x_test).argmax(1) != y_test).float().mean())
    return (loss, error) if math.isfinite(loss) else (None, None)


def digits() -> tuple[Tensor, ...]:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(bunch.images / 16, dtype=torch.float32)[order]
    y = torch.tensor(bunch.target)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def table(record: dict[str, Any]) -> str:
    """The page: test error in %, mean ± std over seeds."""
    cells: dict[tuple[str, str, float], dict[str, str]] = {}
    means: dict[str, list[float]] = {}
    for row in record["rows"]:
        ended = [100 * error for error in row["test_error"] if error is not None]
        lost = len(row["test_error"]) - len(ended)
        key = (row["network"], row["start"], row["lr"])
        means.setdefault(row["guards"], []).append(round(fmean(ended), 1))
        diverged = f" ({len(ended)}), {lost} diverged" if lost else ""
        cells.setdefault(key, {})[row["guards"]] = f"{fmean(ended):.1f} ± {stdev(ended):.1f}{diverged}"
    names = list(METHODS)
    below = {name: sum(map(float.__lt__, means[DEFAULT], means[name])) for name in ("SGD", "none")}
    over_all = ", ".join(f"{fmean(means[name]):.1f} ({name})" for name in names)
    lines = [
        "# Guards: how far trained skeleton paths may move",
        "",
        f"Digits, {record['steps']} steps of 64 images, test error in %, mean ± std over n = {record['n']} seeds "
        f"(torch {record['torch']}, {record['machine']} CPU). Columns: SGD, and GSGD with (`max_ratio`, `max_drift`); "
        f'"{DEFAULT}" is the default, "none" the algorithm as printed. Generated by '
        "`python benchmarks/guards.py --table docs/guards.md` from `results/guards.json`.",
        "",
        f"With the default the mean is below SGD's in {below['SGD']} of the {len(cells)} rows, and below that without "
        f"guards in {below['none']}. Means over all rows, diverged runs left out: {over_all}.",
        "",
        f"| network | start | lr | {' | '.join(names)} |",
        f"|{'---|' * (3 + len(names))}",
    ]
    for (network, how, lr), values in cells.items():
        lines.append(f"| {network} | {how} | {lr} | {' | '.join(values[name] for name in names)} |")
    return "\n".join(lines) + "\n"


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    data, rows = digits(), []
    for network, (build, rates) in NETWORKS.items():
        for how, lr, (name, guards) in itertools.product(STARTS, rates, METHODS.items()):
            runs = []
            for seed in range(SEEDS):
                model = start(build, how, seed)
                runs.append(ends(model, optimizer(model, lr, guards), data, seed))
            row: dict[str, Any] = {"network": network, "start": how, "lr": lr, "guards": name}
            rows.append({**row, "train_loss": [r[0] for r in runs], "test_error": [r[1] for r in runs]})
            print(row, rows[-1]["test_error"], flush=True)
    machine = {"torch": torch.__version__, "machine": platform.machine()}
    return {"command": "python benchmarks/guards.py", **machine, "n": SEEDS, "steps": STEPS, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/guards.json"), help="the record")
    parser.add_argument("--table", type=Path, help="write this page from the record, train nothing")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(table(json.loads(options.out.read_text())))
    else:
        options.out.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
