"""One step of GSGD against its definition: a dense solve of the paper's equations, and autograd with v as the leaf."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dense
import gspace
from gspace.group.balance import balanced_log_scales
from gspace.paths.explicit import Basis, autograd_step, dense_step, reference_values, skeleton_products
from turns import turns

INF = float("inf")
# Both guards off: the definition has none.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.02},
    "momentum": {"lr": 0.01, "momentum": 0.9, "dampening": 0.1},
    "nesterov": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "decay": {"lr": 0.02, "weight_decay": 0.3},
    "maximize": {"lr": 0.001, "maximize": True},
}
WAYS: dict[str, dict[str, Any]] = {"best": {}, "definition": {"foreach": False}}


def _reference(case: dense.Explicit, name: str) -> Tensor | None:
    """Values in which basis paths are measured: those of the balanced representative, or 1."""
    if name == "one":
        return None
    I, O = skeleton_products(case.basis, case.weights)
    edges = gspace.build_skeleton(case.model, case.analysis, choice="pivoted").edges
    c = balanced_log_scales(edges, dict(case.model.named_parameters()), len(I)).exp()
    return reference_values(case.basis, I * c, O / c)


def _gradient(case: dense.Explicit, weights: Tensor) -> Tensor:
    leaf = weights.clone().requires_grad_()
    (grad,) = torch.autograd.grad(case.loss(leaf), leaf)
    return grad


def _load(model: nn.Module, basis: Basis, weights: Tensor) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in basis.wiring.split(weights).items():
            parameters[name].copy_(value)


def _set_grads(model: nn.Module, basis: Basis, grad: Tensor) -> None:
    parameters = dict(model.named_parameters())
    for name, value in basis.wiring.split(grad).items():
        parameters[name].grad = value.clone()


@turns("small, option, reference, way", dense.SMALL, OPTIONS, ["one", "balanced"], WAYS)
def test_gsgd_is_sgd_on_path_values(small: dense.Small, option: str, reference: str, way: str) -> None:
    """20 steps (float64, rtol 1e-10) agree with the dense solve and with autograd on v.

    Gradients are taken at the dense solution's weights for all three: errors would otherwise grow with the curvature.
    """
    case = dense.explicit(small, choice="aligned" if reference == "one" else "pivoted")
    options = OPTIONS[option]
    measure = _reference(case, reference)
    steps = 1 if option == "sgd" else 20
    updates = [dense.OnPaths(case.basis, torch.optim.SGD, **options) for _ in range(2)]
    optimizer = gspace.GSGD(
        case.model,
        **options,
        reference=reference,
        analysis=gspace.analyze(case.model, residual=small.residual),
        max_ratio=INF,
        max_drift=INF,  # type: ignore[arg-type]
        **WAYS[way],
    )
    by_solve = by_autograd = case.weights
    for _ in range(steps):
        grad = _gradient(case, by_solve)
        _set_grads(case.model, case.basis, grad)
        by_autograd = autograd_step(case.basis, by_solve, case.loss, updates[1], measure)
        by_solve = dense_step(case.basis, by_solve, grad, updates[0], measure)
        optimizer.step()
        ours = case.basis.wiring.flatten(dict(case.model.named_parameters())).detach()
        torch.testing.assert_close(by_autograd, by_solve, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(ours, by_solve, rtol=1e-10, atol=1e-13)
        _load(case.model, case.basis, by_solve)


@pytest.mark.parametrize("small", dense.SMALL, ids=lambda c: c.name)
def test_a_weight_of_zero_moves(small: dense.Small) -> None:
    """The update is additive: a ratio could never move a weight that is 0."""
    case = dense.explicit(small)
    kept = case.basis.kept[~case.basis.on_skeleton]
    weights = case.weights.clone()
    weights[kept[0]] = 0
    _load(case.model, case.basis, weights)
    found = gspace.analyze(case.model, residual=small.residual)
    optimizer = gspace.GSGD(case.model, 0.01, reference="balanced", analysis=found, max_ratio=INF, max_drift=INF)
    skeleton = optimizer.skeleton
    basis = gspace.paths.basis_paths(skeleton, dict(case.model.named_parameters()))
    I, O = skeleton_products(basis, weights)
    c = balanced_log_scales(skeleton.edges, dict(case.model.named_parameters()), len(I)).exp()
    expected = autograd_step(
        basis, weights, case.loss, dense.OnPaths(basis, torch.optim.SGD, lr=0.01), reference_values(basis, I * c, O / c)
    )
    _set_grads(case.model, case.basis, _gradient(case, weights))
    optimizer.step()
    ours = case.basis.wiring.flatten(dict(case.model.named_parameters())).detach()
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)
