"""Diagnostics: what they measure is right, and no rescaling changes it, while its weight-space counterpart changes."""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import dense
import gspace
import zoo
from cases import CASES
from gspace.measure.diagnostics import RatioStatistics, balancedness, compare_invariance, distance, invariance_gap
from gspace.measure.flatness import psi_flatness
from gspace.optim.baselines import PathSGD
from gspace.optim.coordinates import coordinates
from gspace.paths.explicit import inverse_chain_rule, odot
from invariance import analyze, build, draw_inputs, randomize_
from parts import Net

CASES_BY_NAME = {case.name: case for case in CASES}
NETWORKS = ["mlp", "mlp-bn", "conv1d", "inception", "residual-tie", "resnet-small-tie", "shufflenet"]


def mlp(seed: int = 0) -> nn.Sequential:
    return randomize_(zoo.mlp(5, 7, 6, 4), seed).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 5, generator=generator, dtype=torch.float64), torch.randint(4, (16,), generator=generator)


def sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr)


def rescaled(model: nn.Module, analysis: gspace.Analysis, seed: int = 1) -> nn.Module:
    other = copy.deepcopy(model)
    scales = gspace.random_scales(other, torch.Generator().manual_seed(seed), analysis=analysis)
    return gspace.rescale_(other, scales, analysis=analysis)


def weight_distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return math.sqrt(sum(float((p - q).detach().square().sum()) for p, q in pairs))


# invariance_gap ------------------------------------------------------------------------------------------------------


def test_invariance_gap_tells_sgd_from_optimizers_in_g_space() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    table = compare_invariance(
        {
            "SGD": sgd(0.05),
            "Path-SGD": lambda m: PathSGD(m, 0.05),
            "GSGD": lambda m: gspace.GSGD(m, 0.05, reference="balanced"),
        },
        model,
        [batch(k) for k in range(20)],
        generator=torch.Generator().manual_seed(0),
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for gap in table.rows.values():
        assert len(gap.gaps) == 21
        assert gap.gaps[0] < 1e-13
        assert gap.moved > 0.01
    assert table.rows["SGD"].final > 0.01
    assert table.rows["Path-SGD"].final < 1e-10
    assert table.rows["GSGD"].final < 1e-10
    lines = str(table).splitlines()
    assert len(lines) == 7
    assert lines[2].startswith("| SGD | ")
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[-1].startswith("gap: ")


def test_a_gap_along_residual_streams_is_shown() -> None:
    """Scales of streams are drawn too: an optimizer that pins them parts, one that follows them does not."""
    torch.manual_seed(0)
    model = dense.Residual().double()
    data = [(torch.randn(16, 2).double(), torch.randint(2, (16,))) for _ in range(5)]
    made = {
        "pin": lambda m: gspace.GSGD(m, 0.1, reference="balanced"),
        "tie": lambda m: gspace.GSGD(m, 0.1, reference="balanced", analysis=gspace.analyze(m)),
    }
    rows = gspace.compare_invariance(made, model, data).rows
    assert rows["pin"].final > 1e-6
    assert rows["tie"].final < 1e-12


def test_outputs_may_come_in_an_object() -> None:
    model = Net(lambda s, x: SimpleNamespace(logits=s.o(s.a(x).relu())), a=nn.Linear(6, 5), o=nn.Linear(5, 4)).double()
    gap = invariance_gap(sgd(0.1), model, [(torch.randn(8, 6).double(), torch.randint(4, (8,)))] * 3)
    assert gap.gaps[0] < 1e-13
    assert gap.final > 1e-6


def test_the_first_batch_is_the_example_of_the_analysis() -> None:
    class Sequences(nn.Module):  # of at least eleven vectors, which no guess shows
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.hidden(x)).unfold(1, 11, 1).amax(-1)).mean(1)

    torch.manual_seed(0)
    data = [(torch.randn(8, 12, 6).double(), torch.randint(4, (8,)))] * 2
    model = Sequences().double()
    inside = lambda m: gspace.GSGD(m, 0.05, example_input=data[0][0])  # noqa: E731
    rows = compare_invariance({"SGD": sgd(0.1), "GSGD": inside}, model, data).rows
    assert rows["GSGD"].final < 1e-9 < rows["SGD"].final


def test_inputs_are_given_to_the_model_as_analyze_gives_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(11, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.hidden(torch.cat([x, y], -1))))

    torch.manual_seed(0)
    model, x, y, target = Two().double(), torch.randn(4, 6).double(), torch.randn(4, 5).double(), torch.randint(3, (4,))
    inside = lambda m: gspace.GSGD(m, 0.05, example_input=(x, y))  # noqa: E731
    for inputs in ((x, y), {"x": x, "y": y}):
        gap = invariance_gap(inside, model, [(inputs, target)] * 3, generator=torch.Generator().manual_seed(0))
        assert gap.final < 1e-9 < gap.moved


def test_identity_scales_give_no_gap_for_any_optimizer() -> None:
    gap = invariance_gap(sgd(0.1), mlp(), [batch(k) for k in range(3)], gspace.Scales.identity(13))
    assert gap.gaps == (0.0, 0.0, 0.0, 0.0)
    assert gap.moved > 0


def test_scales_are_applied_as_given() -> None:
    data = [batch(k) for k in range(5)]
    gaps = [invariance_gap(sgd(0.05), mlp(), data, torch.full((13,), c)).final for c in (1.01, 1.5, 8.0)]
    assert 0 < gaps[0] < gaps[1] < gaps[2]


def test_dropout_does_not_tell_the_two_copies_apart() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    gap = invariance_gap(lambda m: gspace.GSGD(m, 0.05, reference="balanced"), model, [batch(k) for k in range(5)])
    assert gap.final < 1e-10


def test_a_divergence_is_reported_not_raised() -> None:
    gap = invariance_gap(sgd(1e200), mlp(), [batch(k) for k in range(4)])
    assert math.isnan(gap.final)


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch"):
        invariance_gap(sgd(0.1), mlp(), [])


# Balance -------------------------------------------------------------------------------------------------------------


def test_balancedness_of_an_mlp_is_row_minus_column() -> None:
    model = zoo.mlp(3, 4, 2).double()
    balance = balancedness(model)
    rows = model[0].weight.square().sum(1) + model[0].bias.square()
    torch.testing.assert_close(balance.difference, (rows - model[2].weight.square().sum(0)).detach())


@pytest.mark.parametrize("name", [*NETWORKS, "gated", "tied-weights"])
def test_gradient_flow_conserves_the_balance(name: str) -> None:
    """SGD at half the rate for twice the steps drifts half as much: the drift is of the steps, not of the flow."""
    case = CASES_BY_NAME[name]
    analysis = analyze(case)
    inputs = draw_inputs(case, 0, torch.float64)
    drifts = []
    for halving in range(3):
        model = build(case)
        start = balancedness(model, analysis=analysis)
        target = torch.zeros_like(model(*inputs))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3 / 2**halving)
        for _ in range(4 * 2**halving):
            optimizer.zero_grad()
            (model(*inputs) - target).square().mean().backward()
            optimizer.step()
        drifts.append(float(balancedness(model, analysis=analysis).drift(start).max()))
    assert drifts[0] > 1e-12
    assert drifts[1] / drifts[0] == pytest.approx(0.5, abs=0.1)
    assert drifts[2] / drifts[1] == pytest.approx(0.5, abs=0.1)


def test_the_balanced_representative_is_balanced() -> None:
    model = mlp()
    gspace.balance_(model)
    assert float(balancedness(model).difference.abs().max()) < 1e-10


# Distance ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_distance_does_not_change_under_rescaling_and_weight_distance_does(name: str) -> None:
    case = CASES_BY_NAME[name]
    analysis = analyze(case)
    a, b = build(case), build(case)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        for p in b.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    apart, apart_in_weights = distance(a, b, analysis=analysis), weight_distance(a, b)
    c, d = rescaled(a, analysis, 1), rescaled(b, analysis, 2)
    assert apart > 0.01
    for x, y in ((c, b), (a, d), (c, d)):
        assert distance(x, y, analysis=analysis) == pytest.approx(apart, rel=1e-8)
        assert weight_distance(x, y) > 1.5 * apart_in_weights
    assert distance(a, c, analysis=analysis) < 1e-10
    assert weight_distance(a, c) > 1


def test_weights_on_no_path_have_no_value() -> None:
    model = randomize_(zoo.DeadEnds(), 0).double()
    other = rescaled(model, gspace.analyze(model), 1)
    assert distance(model, other) < 1e-12
    norms = [float(gspace.basis_path_norm(m, reference="balanced")) for m in (model, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    with torch.no_grad():
        for p in model.dropped.parameters():
            p.mul_(100)
    assert float(gspace.basis_path_norm(model, reference="balanced")) == pytest.approx(norms[0], rel=1e-12)


def test_a_dropped_branch_with_batch_norm_has_no_value() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(5, 6), nn.Linear(6, 2)
            self.branch = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            F.relu(self.branch(h))
            return self.out(h)

    model = randomize_(Dropped(), 0).double()
    other = rescaled(model, gspace.analyze(model), 1)
    assert distance(model, other) < 1e-12
    before = gspace.basis_path_norm(model, reference="balanced").item()
    with torch.no_grad():
        for p in model.branch.parameters():
            p.mul_(100)
    assert gspace.basis_path_norm(model, reference="balanced").item() == pytest.approx(before, rel=1e-12)


def test_what_paths_do_not_tell_is_said() -> None:
    """Attention has units that no basis path has: distance and norms change with their scale."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double(), torch.randn(4, 5, 8).double()
    analysis = gspace.analyze(model, x)
    same = gspace.rescale_(copy.deepcopy(model), gspace.random_scales(model, analysis=analysis), analysis=analysis)
    with pytest.warns(UserWarning, match="8 units have other coefficients than one .* What is measured may change"):
        assert distance(model, same, analysis=analysis) > 1e-3
    with pytest.warns(UserWarning, match="units of this model have no path value"):
        gspace.basis_path_norm(model, analysis=analysis)


def test_networks_of_other_sizes_have_no_distance() -> None:
    with pytest.raises(ValueError, match="other names or sizes"):
        distance(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 4)))


def test_distance_is_that_of_explicit_path_values() -> None:
    case = next(c for c in dense.SMALL if c.name == "mlp")
    explicit = dense.explicit(case, choice="aligned")
    other = copy.deepcopy(explicit.model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    found = distance(explicit.model, other, reference="one", analysis=explicit.analysis)
    basis = explicit.basis
    values = [odot(w, basis.A) for w in (explicit.weights, basis.wiring.flatten(dict(other.named_parameters())))]
    assert found == pytest.approx(float((values[0] - values[1]).norm()), rel=1e-12)


# Ratios --------------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()


def test_ratios_are_those_that_gsgd_reports() -> None:
    model = mlp()
    optimizer = gspace.GSGD(model, 0.05, reference="balanced")
    ratios = RatioStatistics.of(model)
    for k in range(5):
        step(model, optimizer, batch(k))
        ratios.update()
        quantiles = optimizer.statistics()["ratio_quantiles"]
        assert ratios.history[k][0] == pytest.approx(quantiles[0.0], rel=1e-9)
        assert ratios.history[k][2] == pytest.approx(quantiles[1.0], rel=1e-9)
    assert len(str(ratios).splitlines()) == 6


@pytest.mark.parametrize("make", [lambda m: gspace.GSGD(m, 0.05, reference="balanced"), lambda m: PathSGD(m, 0.05)])
def test_ratios_do_not_change_under_rescaling(make: Any) -> None:
    histories = []
    for model in (mlp(), rescaled(mlp(), gspace.analyze(mlp()))):
        optimizer, ratios = make(model), RatioStatistics.of(model)
        for k in range(5):
            step(model, optimizer, batch(k))
            ratios.update()
        histories.append(ratios.history)
    torch.testing.assert_close(torch.tensor(histories[0]), torch.tensor(histories[1]), rtol=1e-5, atol=0)
    assert abs(histories[0][0][2] - 1) > 1e-4


def test_a_network_without_units_has_no_ratios() -> None:
    with pytest.raises(ValueError, match="rescaled"):
        RatioStatistics.of(nn.Linear(3, 2))


# PSI-flatness --------------------------------------------------------------------------------------------------------


def weight_sharpness(model: nn.Module, inputs: Tensor, target: Tensor, radius: float) -> float:
    """Loss change when every weight moves by `radius` along the gradient's sign: the counterpart in weight space."""
    model = copy.deepcopy(model)
    start = F.mse_loss(model(inputs), target)
    grads = torch.autograd.grad(start, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p.add_(radius * g.sign())
        return float(F.mse_loss(model(inputs), target) - start)


def flatness_case(name: str) -> tuple[gspace.Analysis, nn.Module, Tensor, Tensor]:
    case = CASES_BY_NAME[name]
    model = build(case).eval()
    (inputs,) = draw_inputs(case, 0, torch.float64)
    return analyze(case), model, inputs, torch.zeros_like(model(inputs))


@pytest.mark.parametrize("bound", ["absolute", "relative"])
@pytest.mark.parametrize("name", NETWORKS)
def test_psi_flatness_does_not_change_under_rescaling_and_weight_sharpness_does(name: str, bound: Any) -> None:
    analysis, model, inputs, target = flatness_case(name)
    found = []
    for m in (model, rescaled(model, analysis, 3)):
        options = {"radius": 0.01, "bound": bound, "loss": F.mse_loss, "analysis": analysis}
        found.append(psi_flatness(m, inputs, target, generator=torch.Generator().manual_seed(0), **options))
    a, b = found
    assert a.adversarial > 1e-6
    assert b.adversarial == pytest.approx(a.adversarial, rel=1e-6)
    torch.testing.assert_close(b.random, a.random, rtol=1e-6, atol=1e-12)
    sharp = [weight_sharpness(m, inputs, target, 0.001) for m in (model, rescaled(model, analysis, 3))]
    assert abs(sharp[1] / sharp[0] - 1) > 0.05


def test_to_first_order_the_adversarial_change_is_the_norm_of_the_path_gradient() -> None:
    case = next(c for c in dense.SMALL if c.name == "mlp")
    explicit = dense.explicit(case, choice="aligned")
    target = torch.zeros_like(explicit.model(explicit.x))
    weights = explicit.weights.clone().requires_grad_()
    loss = F.mse_loss(explicit.network(weights, explicit.x), target)
    (grad,) = torch.autograd.grad(loss, weights)
    path_grad, _ = inverse_chain_rule(explicit.basis, explicit.weights, grad)
    at = coordinates(explicit.model, reference="one", analysis=explicit.analysis)
    flat = psi_flatness(explicit.model, explicit.x, target, radius=1e-6, loss=F.mse_loss, at=at)
    assert flat.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert flat.adversarial / 1e-6 == pytest.approx(float(path_grad.abs().sum()), rel=1e-4)  # a difference quotient


def test_the_adversarial_perturbation_is_worse_than_random_ones() -> None:
    x, y = batch()
    flat = psi_flatness(mlp(), x, y, radius=0.02, samples=32)
    assert flat.adversarial > float(flat.random.max())
    assert float(flat.random.std()) > 0
    assert "adversarial" in str(flat)


def test_flatness_leaves_the_model_as_it_is() -> None:
    model = build(CASES_BY_NAME["mlp-bn"]).train()
    before = copy.deepcopy(model.state_dict())
    (x,) = draw_inputs(CASES_BY_NAME["mlp-bn"], 0, torch.float64)
    psi_flatness(model, x, torch.zeros(len(x), dtype=torch.long), radius=0.01)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("radius", [0.0, 1.5])
def test_a_radius_that_lets_skeleton_paths_vanish_is_refused(radius: float) -> None:
    x, y = batch()
    with pytest.raises(ValueError, match="radius"):
        psi_flatness(mlp(), x, y, radius=radius)


def test_measuring_invariance_leaves_the_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    batch = (torch.randn(4, 5), torch.randint(2, (4,)))
    before = torch.get_rng_state()
    gspace.invariance_gap(lambda m: gspace.GSGD(m, 0.1), model, [batch], generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_rate_of_a_unit_is_that_of_its_root() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2))
    gspace.init_skeleton_(model)
    groups = [{"params": model[2:].parameters(), "lr": 0.5}, {"params": model[0].parameters(), "lr": 0.1}]
    rates = gspace.GSGD(model, 0.1, params=groups).statistics()["effective_lr"]
    assert rates.tolist() == pytest.approx([0.1] * 12)


def test_flatness_is_not_that_of_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(16, 5, dtype=torch.float64), torch.randint(3, (16,))
    found = psi_flatness(model, x, y, radius=1e-6, generator=torch.Generator().manual_seed(0))
    assert float(found.random.abs().max()) < 1e-4


@pytest.mark.parametrize("keep", [lambda m: prune.l1_unstructured(m, "weight", 0.5), nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_model_that_torch_cannot_copy_is_refused_in_one_line(keep: Callable[[nn.Module], Any]) -> None:
    model = zoo.mlp(3, 4, 2)
    keep(model[0])
    batch = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^'0\.weight' is computed from parameters and kept, so torch cannot copy"):
        compare_invariance({"SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1)}, model, [batch])
