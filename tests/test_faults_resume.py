"""Deep networks in float32, saved and loaded often on the way, end where an uninterrupted training ends, to the bit.

Coordinates that were remembered used to drift from the weights, 6e-8 a step; beyond √ε a resumed run measured anew.
"""

import io
from typing import Any

import pytest
import torch
from torch import nn

import gspace
from contract import assert_same
from zoo import mlp

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4},
    "spread": {"lr": 0.05, "allocation": "spread"},
    "unbounded": {"lr": 0.01, "max_ratio": float("inf"), "max_drift": float("inf")},
    "balanced": {"lr": 0.05, "reference": "balanced", "momentum": 0.5},
}
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


def network(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = mlp(6, *[8] * depth, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # signals reach the end
    return model


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for k in range(first, last):
        optimizer.zero_grad()
        (model(X.roll(k, 0)[:16]) - X[:16, :3].roll(k, 0)).square().mean().backward()
        optimizer.step()


def resumed(depth: int, options: dict[str, Any], total: int, every: int) -> None:
    straight, parts = network(depth), network(depth)
    steps(straight, gspace.GSGD(straight, **options), 0, total)
    optimizer = gspace.GSGD(parts, **options)
    for start in range(0, total, every):
        steps(parts, optimizer, start, start + every)
        file = io.BytesIO()
        torch.save((parts.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        parts = network(depth)
        optimizer = gspace.GSGD(parts, **options)
        parts.load_state_dict(weights)
        optimizer.load_state_dict(state)
    assert all(bool(p.isfinite().all()) for p in straight.parameters())
    assert_same(straight, parts)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_deep_network_resumes_to_the_bit(name: str) -> None:
    resumed(10, SETTINGS[name], 60, 15)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "depth"), list(zip(SETTINGS, (10, 12, 10, 12, 12), strict=True)))
def test_a_deep_network_resumes_to_the_bit_after_8000_steps(name: str, depth: int) -> None:
    resumed(depth, SETTINGS[name], 8000, 1000)
