"""Whether networks train: BatchNorm under both rules, a chain through 34 layers, usual initialisations.

By default networks, rules and rates take turns and the chain is short; the rest are slow tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
import zoo

datasets = pytest.importorskip("sklearn.datasets", reason="the bundled digits come with scikit-learn")


slow = pytest.mark.slow


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bunch = datasets.load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(bunch.images / 16, dtype=torch.float32)[order, None], torch.tensor(bunch.target)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def _error(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> float:
    """Test error in % after `steps` batches of 64 digits."""
    x, y, x_test, y_test = _digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(x_test).argmax(1) != y_test).float().mean())


class Residual(nn.Module):
    """Two basic blocks with BatchNorm behind a stem, for 8×8 images."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def layer(n: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(n, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

        self.stem, self.head = layer(1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList([nn.ModuleList([layer(width), layer(width)]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for first, second in self.blocks:  # type: ignore[misc]
            x = (x + second(first(x).relu())).relu()
        return self.head(x.mean((2, 3)))


def _plain() -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, out in ((1, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(n, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (_plain, "released"),
        (Residual, "paper"),
        pytest.param(_plain, "paper", marks=slow),
        pytest.param(Residual, "released", marks=slow),
    ],
)
def test_batch_norm_networks_learn_from_scratch(build: Callable[[], nn.Module], rule: Any) -> None:
    """Chance is 90 % error."""
    torch.manual_seed(0)
    model = gspace.init_skeleton_(build())
    assert _error(model, gspace.GSGD(model, 0.5, batch_norm=rule), steps=200, seed=0) < 15


@pytest.mark.parametrize(
    ("rule", "steps"),
    [("paper", 150), pytest.param("paper", 500, marks=slow), pytest.param("released", 500, marks=slow)],
)
def test_a_chain_through_34_layers_does_not_blow_up(rule: Any, steps: int) -> None:
    """Default guards: Ĩ of every unit stays in [0.1, 10] and the loss falls.

    Without guards Ĩ leaves [10⁻², 10²] within 50 steps of the same run, as the test below shows.
    """
    losses, spread = _chain(rule, steps)
    assert spread <= 10
    assert sum(losses[-50:]) < 0.9 * sum(losses[:50])


def test_without_guards_it_does() -> None:
    _, spread = _chain("paper", 50, max_ratio=float("inf"), max_drift=float("inf"))
    assert spread > 100


def _chain(rule: Any, steps: int, **guards: float) -> tuple[list[float], float]:
    """Losses on synthetic data, and the largest factor by which some Ĩ was away from 1."""
    torch.manual_seed(0)
    model = gspace.init_skeleton_(zoo.plain(8))
    x = torch.randn(256, 3, 8, 8)
    y = (x.mean((2, 3)) @ torch.randn(3, 10)).argmax(1)
    optimizer = gspace.GSGD(model, 0.5, batch_norm=rule, **guards)  # type: ignore[arg-type]
    losses, spread = [], 1.0
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        size = optimizer.incoming[1:].abs()
        spread = max(spread, float(size.max()), 1 / float(size.min()))
    return losses, spread


def _cnn() -> nn.Sequential:
    convolutions = (nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1), nn.Conv2d(8, 16, 3, padding=1))
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def _he(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), zoo.mlp(64, 32, 32, 32, 10)),
    "cnn": _cnn,
}


@pytest.mark.parametrize(
    ("network", "lr"),
    [("mlp", 0.2), ("cnn", 0.05), pytest.param("mlp", 0.05, marks=slow), pytest.param("cnn", 0.2, marks=slow)],
)
def test_usual_initialisations_train_as_well_as_with_sgd(network: str, lr: float) -> None:
    """n = 5, same rate, no `init_skeleton_`: mean error at most SGD's plus two standard errors of the difference."""
    errors: dict[str, list[float]] = {"sgd": [], "gsgd": []}
    for seed in range(5):
        for name, make in (
            ("sgd", lambda m: torch.optim.SGD(m.parameters(), lr)),
            ("gsgd", lambda m: gspace.GSGD(m, lr)),
        ):
            model = _he(NETWORKS[network], seed)
            errors[name].append(_error(model, make(model), steps=150, seed=seed))
    sgd, ours = (torch.tensor(errors[name]) for name in ("sgd", "gsgd"))
    noise = ((sgd.var() + ours.var()) / 5).sqrt()
    assert ours.mean() < 30, "not trained at all"
    assert ours.mean() <= sgd.mean() + 2 * noise
