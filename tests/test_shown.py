"""Path values shown to an optimizer and given back by the kernels, against the same in torch's operations."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gspace
import zoo
from cases import CASES
from contract import assert_captured_alike
from gspace.optim import fast
from invariance import draw_inputs
from test_kernels import DEVICE, NETWORKS, WAYS, gradients, put
from turns import turns

INNER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
}
RULES: dict[str, dict[str, Any]] = {
    "released": {},
    "spread": {"allocation": "spread", "reference": "balanced"},
}


def check(model: nn.Module, found: gspace.Analysis, way: str, inner: str, rules: str, rtol: float = 1e-12) -> None:
    kind, options = INNER[inner]
    models, optimizers = [model, copy.deepcopy(model)], []
    for m in models:
        optimizers.append(gspace.InGSpace(m, kind, lr=0.01, **options, analysis=found, **RULES[rules]))
    optimizers[0].use("in torch's operations")
    WAYS[way](optimizers[1])
    bound = optimizers[1]._way
    assert isinstance(bound, fast.Bound)
    for seed in range(3):
        for m, optimizer in zip(models, optimizers, strict=True):
            put(m, gradients(m, seed))
            if seed == 1:
                next(iter(m.parameters())).grad = None
            optimizer.step()
    assert optimizers[1]._way is bound
    assert isinstance(optimizers[0]._way, str)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert float((p - q).norm()) <= rtol * float(p.norm())
        for key, value in optimizers[0].state[p].items():
            torch.testing.assert_close(optimizers[1].state[q][key].double(), value.double(), rtol=1e-9, atol=1e-11)
    a, b = (torch.stack(o._built.last)[:, o.skeleton.roots] for o in optimizers)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=0)


ARCHITECTURES = {case.name: case for case in CASES if case.H_paper}


def of_case(name: str) -> tuple[nn.Module, gspace.Analysis]:
    case = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = case.build().double()
    return model, gspace.analyze(model, draw_inputs(case, 0, torch.float64, batch=2), residual=case.residual)


@turns("name, inner, rules", ARCHITECTURES, INNER, RULES)
def test_every_architecture(name: str, inner: str, rules: str) -> None:
    check(*of_case(name), "native", inner, rules)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way(network: str, way: str) -> None:
    """Stored (in, out), with taps, with groups, in several chunks; channels last."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(DEVICE if way == "triton" else "cpu", torch.float64)
    if network == "convolutional":
        model = model.to(memory_format=torch.channels_last)
    found = gspace.analyze(model, torch.zeros(1, *shape, dtype=torch.float64, device=next(model.parameters()).device))
    check(model, found, way, "AdamW", "released")


@pytest.mark.parametrize("way", WAYS)
def test_what_the_optimizer_leaves_alone_does_not_move_by_a_bit(way: str) -> None:
    torch.manual_seed(0)
    model = zoo.mlp(5, 7, 6, 3).to(DEVICE if way == "triton" else "cpu")
    optimizer = gspace.InGSpace(model, torch.optim.SGD, lr=0.1)
    put(model, gradients(model, 0))
    optimizer.step()
    WAYS[way](optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        put(model, gradients(model, seed))
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_layout_that_changes_is_followed() -> None:
    """Tensors that the optimizer sees lie like the weights."""
    models = [nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [gspace.InGSpace(m, torch.optim.AdamW, lr=0.01) for m in models]
    for seed in range(4):
        for m, optimizer in zip(models, optimizers, strict=True):
            put(m, gradients(m, seed))
            optimizer.step()
        models[1].to(memory_format=torch.channels_last)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", INNER)
def test_a_captured_step_is_the_step(inner: str) -> None:
    kind, options = INNER[inner]
    models = [NETWORKS["convolutional"][0]().cuda() for _ in range(2)]
    x = torch.zeros(1, 3, 8, 8, device="cuda")
    models[1].load_state_dict(models[0].state_dict())
    more: dict[str, Any] = {"capturable": True} if inner == "AdamW" else {"fused": True}
    optimizers = [
        gspace.InGSpace(m, kind, lr=torch.tensor(0.01, device="cuda"), **options, **more, example_input=x)
        for m in models
    ]
    for m, optimizer in zip(models, optimizers, strict=True):
        put(m, gradients(m, 0))
        optimizer.step()
        assert isinstance(optimizer._way, fast.Bound)
    assert_captured_alike(*optimizers)
