"""A step commutes with rescaling: w and g_c(w) stay the same network; SGD's do not."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import dense
import gspace
import zoo
from gspace.optim.skeleton import NO_PATH
from invariance import draw_inputs
from turns import turns


def _train(models: list[nn.Module], make: Any, x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    """Outputs of each model after full-batch training on the same data."""
    outputs = []
    for model in models:
        optimizer = make(model)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        outputs.append(model(x).detach())
    return outputs


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def _pair(
    build: Any, shape: tuple[int, ...], *, skeleton: bool, residual: str
) -> tuple[list[nn.Module], Tensor, Tensor]:
    """A network, the same rescaled by e^N(0,1), inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = build().double()
    if skeleton:
        gspace.init_skeleton_(model, residual=residual)
    x = torch.randn(32, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(model(x).shape, generator=generator, dtype=torch.float64)
    other = copy.deepcopy(model)
    gspace.rescale_(other, gspace.random_scales(other, generator, residual=residual), residual=residual)
    return [model, other], x, y


NETWORKS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "mlp": (lambda: zoo.mlp(8, 16, 6, 12, 4), (8,), "pin"),
    "concat": (dense.Concat, (3,), "pin"),
    "conv": (dense.ConvResidual, (1, 4), "pin"),
    "residual": (dense.Residual, (2,), "pin"),
    "residual-tie": (dense.Residual, (2,), "tie"),
    "shared": (dense.Shared, (2,), "tie"),
    "dead-ends": (zoo.DeadEnds, (5,), "pin"),
    "dead-stream": (zoo.DeadStream, (4,), "tie"),
    "dead-stream-unread": (lambda: zoo.DeadStream(head=False), (4,), "tie"),
}


@pytest.mark.parametrize("reference", ["one", "balanced"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gsgd_does_not_see_the_scales(name: str, reference: str) -> None:
    """200 steps from w and from g_c(w), float64: outputs agree to 1e-6; both guards at their defaults."""
    build, shape, residual = NETWORKS[name]
    models, x, y = _pair(build, shape, skeleton=reference == "one", residual=residual)
    found = gspace.analyze(models[0], residual=residual)  # type: ignore[arg-type]
    a, b = _train(models, lambda m: gspace.GSGD(m, 0.02, reference=reference, analysis=found), x, y, 200)  # type: ignore[arg-type]
    assert _gap(a, b) < 1e-6


def test_no_skeleton_leads_through_what_nobody_reads() -> None:
    model = zoo.DeadEnds()
    before = copy.deepcopy(model.dropped.state_dict())
    gspace.init_skeleton_(model)
    for key, value in model.dropped.state_dict().items():
        assert torch.equal(value, before[key])
    for choice in ("aligned", "pivoted"):
        skeleton = gspace.build_skeleton(model, gspace.analyze(model), choice=choice)
        assert skeleton.H == 7 + 3
        assert skeleton.unused == (f"9 units {NO_PATH}",)
        assert {skeleton.edges[k].name for k in skeleton.out_edge[1:].tolist()} == {"second.weight", "out.weight"}
        assert set(skeleton.child[1:].tolist()) == {0, 8, 9, 10}  # the three channels that are read, and outputs


def test_sgd_does() -> None:
    """The same pair drifts by more than 0.1 under `torch.optim.SGD`: the test above can fail."""
    build, shape, residual = NETWORKS["mlp"]
    models, x, y = _pair(build, shape, skeleton=False, residual=residual)
    a, b = _train(models, lambda m: torch.optim.SGD(m.parameters(), 0.02), x, y, 200)
    assert _gap(a, b) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        {"max_path_grad_norm": 0.1},
        {"allocation": "spread"},
        {"max_ratio": 1.01, "max_drift": 1.02},
    ],
    ids=["nesterov-decay", "clipped", "spread", "guards"],
)
def test_options_are_invariant(options: dict[str, Any]) -> None:
    build, shape, residual = NETWORKS["mlp"]
    models, x, y = _pair(build, shape, skeleton=False, residual=residual)
    a, b = _train(models, lambda m: gspace.GSGD(m, 0.02, reference="balanced", **options), x, y, 200)
    assert _gap(a, b) < 1e-6


INNER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Muon": (torch.optim.Muon, {}),  # takes matrices alone
}


@turns(
    "name, reference, inner",
    [*NETWORKS, "no-bias"],
    ["one", "balanced"],
    INNER,
    allowed=lambda name, reference, inner: inner != "Muon" or name in ("residual", "residual-tie", "shared", "no-bias"),
)
def test_any_optimizer_in_g_space_is_invariant(name: str, reference: Any, inner: str) -> None:
    build, shape, residual = {**NETWORKS, "no-bias": (lambda: zoo.mlp(8, 16, 6, bias=False), (8,), "pin")}[name]
    models, x, y = _pair(build, shape, skeleton=reference == "one", residual=residual)
    found = gspace.analyze(models[0], residual=residual)  # type: ignore[arg-type]
    make, options = INNER[inner]
    first = models[0](x).detach()
    a, b = _train(
        models, lambda m: gspace.InGSpace(m, make, lr=1e-3, reference=reference, analysis=found, **options), x, y, 200
    )
    assert _gap(a, b) < 1e-6
    assert _gap(first, a) > 1e-3


def test_guards_are_invariant() -> None:
    """The drift bound acts on v_r = Ĩ·Õ. Ĩ alone depends on the representative: the rescaled copy would be clipped."""
    build, shape, residual = NETWORKS["mlp"]
    models, x, y = _pair(build, shape, skeleton=False, residual=residual)
    optimizers = [gspace.GSGD(m, 0.1, reference="balanced", max_drift=1.005) for m in models]
    spread = [float((o.incoming[1:].log()).abs().max()) for o in optimizers]
    assert max(spread) > 1, "the copy lies outside the bound if it were on Ĩ"
    clipped = 0
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(50):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            clipped += optimizer.statistics()["clipped"]
    values = [o.incoming * o.outgoing for o in optimizers]
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=0)
    assert float(values[0].max()) <= 1.005 + 1e-12
    assert float(values[0].min()) >= 1 / 1.005 - 1e-12
    assert clipped > 0, "the bound was never met: nothing was tested"


def test_two_projections_give_one_trajectory() -> None:
    """Theorem 4.1: path values after 100 steps agree to 1e-9, whatever the weights are."""
    build, shape, residual = NETWORKS["mlp"]
    (model, _), x, y = _pair(build, shape, skeleton=False, residual=residual)
    runs = []
    for allocation in ("fixed", "spread"):
        net = copy.deepcopy(model)
        optimizer = gspace.GSGD(net, 0.05, reference="balanced", allocation=allocation)  # type: ignore[arg-type]
        for _ in range(100):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        basis = gspace.paths.basis_paths(optimizer.skeleton, dict(net.named_parameters()))
        weights = basis.wiring.flatten(dict(net.named_parameters())).detach()
        runs.append((gspace.paths.odot(weights, basis.A), weights))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-9, atol=1e-12)
    assert float((runs[0][1] - runs[1][1]).abs().max()) > 1e-3, "the two projections gave the same weights"


@pytest.mark.parametrize("case", cases.slow_above(12_000, [c for c in cases.CASES if c.H]))
def test_construction_changes_nothing(case: Any) -> None:
    """GSGD never changes the function it is given: not a bit of any parameter, on every network of the zoo."""
    model = case.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = gspace.analyze(model, draw_inputs(case, 0, torch.float32, batch=2), residual=case.residual)
    gspace.GSGD(model, 0.1, analysis=found)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
