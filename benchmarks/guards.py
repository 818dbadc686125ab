"""How far may trained skeleton paths move? GSGD's guards against SGD on digits, from several starting points.

    python benchmarks/guards.py --out results/guards.json

Networks start from He initialisation, as it is or rescaled by e^N(0,1) (which changes no function), or on the skeleton.
Every cell trains `SEEDS` networks for 400 steps of 64 images and records training loss and test error.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
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


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for n, out in zip(widths, widths[1:], strict=False):
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


def train(model: nn.Module, step: torch.optim.Optimizer, data: tuple[Tensor, ...], seed: int) -> tuple[float, float]:
    """Training loss and test error after `STEPS` steps; (inf, 0.9) if the loss left the finite numbers."""
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
            return INF, 0.9
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y)), float((model(x_test).argmax(1) != y_test).float().mean())


def digits() -> tuple[Tensor, ...]:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(bunch.images / 16, dtype=torch.float32)[order]
    y = torch.tensor(bunch.target)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = digits(), []
    for network, (build, rates) in NETWORKS.items():
        for how in STARTS:
            for lr in rates:
                for name, guards in METHODS.items():
                    runs = []
                    for seed in range(SEEDS):
                        model = start(build, how, seed)
                        runs.append(train(model, optimizer(model, lr, guards), data, seed))
                    row: dict[str, Any] = {"network": network, "start": how, "lr": lr, "guards": name}
                    rows.append({**row, "train_loss": [r[0] for r in runs], "test_error": [r[1] for r in runs]})
                    error = torch.tensor(rows[-1]["test_error"])
                    print(f"{network}  {how}  lr {lr}  {name}: {100 * error.mean():.1f} ± {100 * error.std():.1f}", flush=True)
    record = {"command": "python benchmarks/guards.py", "torch": torch.__version__, "machine": platform.machine()}
    options.out.write_text(json.dumps({**record, "n": SEEDS, "steps": STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
