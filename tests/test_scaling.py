"""The group of rescalings: its laws, its balanced representatives, and who lies in one orbit."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
from away import Away
from cases import CASES, Case, slow_above
from gspace.group import balance
from invariance import analyze, build, draw_inputs, outputs, relative_change
from test_zoo import BY_NAME, analysis
from zoo import mlp

with_units = pytest.mark.parametrize("case", slow_above(12_000, [case for case in CASES if case.H]))
small = pytest.mark.parametrize("case", slow_above(1_000, [case for case in CASES if case.H and case.dim < 12_000]))


def rescaled(model: nn.Module, found: gspace.Analysis, seed: int) -> tuple[nn.Module, gspace.Scales]:
    """A rescaled copy and its scales."""
    scales = gspace.random_scales(model, torch.Generator().manual_seed(seed), analysis=found)
    return gspace.rescale_(copy.deepcopy(model), scales, analysis=found), scales


def assert_same_weights(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest weight of each tensor."""
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        largest = y.abs().max().item() if y.numel() and y.is_floating_point() else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * largest, msg=lambda m, name=name: f"{name}: {m}")


# Laws of the group (Sec. 3.1 of the paper)


@small
def test_rescaling_is_a_group_action(case: Case) -> None:
    """g_a(g_b(w)) = g_(a·b)(w), g_1(w) = w, and the inverse undoes; a product of two factors rounds twice, 1e-15."""
    found, model = analysis(case.name), build(case)
    once, a = rescaled(model, found, 1)
    twice, b = rescaled(once, found, 2)
    assert_same_weights(twice, gspace.rescale_(copy.deepcopy(model), b @ a, analysis=found), 1e-14)
    assert_same_weights(gspace.rescale_(twice, (a @ b).inverse(), analysis=found), model, 1e-14)
    identity = gspace.Scales.identity(found.H + found.H_absorbed)
    assert_same_weights(gspace.rescale_(copy.deepcopy(model), identity, analysis=found), model, 0.0)
    torch.testing.assert_close((a @ b).log(), a.log() + b.log(), rtol=1e-12, atol=1e-12)


def test_random_scales_leave_absorbed_rows_unless_asked() -> None:
    model = build(BY_NAME["mlp-bn"])
    plain = gspace.random_scales(model, torch.Generator().manual_seed(0)).values
    every = gspace.random_scales(model, torch.Generator().manual_seed(0), absorbed=True).values
    assert len(plain) == len(every) == 14 + 14
    assert bool((plain[14:] == 1).all())
    assert not bool((every[14:] == 1).any())
    assert gspace.random_scales(model, std=0.0).values.tolist() == [1.0] * 28


def test_scales_of_the_exact_units_alone_are_accepted() -> None:
    model = build(BY_NAME["mlp-bn"])
    before = outputs(model, draw_inputs(BY_NAME["mlp-bn"], 1, torch.float64), training=False)
    gspace.rescale_(model, torch.linspace(0.5, 2, 14))
    after = outputs(model, draw_inputs(BY_NAME["mlp-bn"], 1, torch.float64), training=False)
    assert relative_change(before, after) < 1e-12  # two layers in float64


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_parameters_and_optimizer_state_stay_valid(optimizer: type[torch.optim.Optimizer]) -> None:
    """Every Parameter stays the object it was, at the address it was; the optimizer's state still belongs to it."""
    model = mlp(5, 7, 6, 3)
    kwargs = {"lr": 0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})}
    steps = optimizer(model.parameters(), **kwargs)

    def step() -> None:
        steps.zero_grad()
        model(torch.randn(8, 5)).square().sum().backward()
        steps.step()

    step()
    parameters = list(model.parameters())
    where = [(id(p), p.data_ptr(), p.requires_grad, p.grad) for p in parameters]
    states = [{k: id(v) for k, v in steps.state[p].items()} for p in parameters]
    gspace.rescale_(model, gspace.random_scales(model))
    gspace.balance_(model)
    assert [(id(p), p.data_ptr(), p.requires_grad, p.grad) for p in model.parameters()] == where
    assert [{k: id(v) for k, v in steps.state[p].items()} for p in parameters] == states
    before = [p.clone() for p in parameters]
    step()
    assert all(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


# Refusals

REFUSED: dict[str, tuple[Tensor, str]] = {
    "zero": (torch.tensor([1.0] * 12 + [0.0]), "positive"),
    "negative": (torch.tensor([-1.0] + [1.0] * 12), "positive"),
    "nan": (torch.tensor([1.0] * 12 + [torch.nan]), "finite"),
    "infinite": (torch.tensor([torch.inf] + [1.0] * 12), "finite"),
    "one too few": (torch.ones(12), "13"),
    "one too many": (torch.ones(14), "13"),
    "a matrix": (torch.ones(13, 1), "one value per unit"),
    "overflow": (torch.tensor([1.0] * 12 + [1e45], dtype=torch.float64), "range"),
    "underflow": (torch.tensor([1.0] * 12 + [1e-50], dtype=torch.float64), "range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_scales_are_refused_before_anything_is_touched(name: str) -> None:
    scales, word = REFUSED[name]
    model = mlp(5, 7, 6, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=word):
        gspace.rescale_(model, scales)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_overflow_of_running_statistics_is_refused_before_anything_is_touched() -> None:
    """The variance scales with the square: 1e25 fits a weight, 1e50 no float32 variance."""
    model = build(BY_NAME["mlp-bn"], torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="range"):
        gspace.rescale_(model, torch.tensor([1.0] * 27 + [1e25], dtype=torch.float64))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# Balance


def norms(model: nn.Module, found: gspace.Analysis) -> tuple[Tensor, Tensor]:
    """‖incoming‖ and ‖outgoing‖ of the exact units, by looping over the edges; forms count with their coefficients."""
    units = 1 + found.H + found.H_absorbed
    into, out = (torch.zeros(max([units, *(node + 1 for node in found.forms)]), dtype=torch.float64) for _ in range(2))
    parameters = dict(model.named_parameters())
    for edges in found.edges:
        squares = edges.view(parameters[edges.name].detach()).double().square()
        squares = squares.reshape(*squares.shape[:3], -1).sum(-1)
        into.index_add_(0, edges.head.flatten(), squares.sum(2).flatten())
        out.index_add_(0, edges.tail.flatten(), squares.sum(1).flatten())
    for node, form in found.forms.items():
        for unit, c in form:
            grows, shrinks = (into[node], out[node]) if c > 0 else (out[node], into[node])
            into[unit] += abs(c) * grows
            out[unit] += abs(c) * shrinks
    return into.sqrt()[1 : found.H + 1], out.sqrt()[1 : found.H + 1]


@with_units
def test_balance_makes_incoming_and_outgoing_norms_equal(case: Case) -> None:
    """To 1e-6 at every unit with weights on both sides, and the function stays (the limit of test_zoo)."""
    found = analysis(case.name)
    model, inputs = build(case), draw_inputs(case, 1, torch.float64)
    before = outputs(model, inputs, training=False)
    gspace.balance_(model, analysis=found)
    into, out = norms(model, found)
    both = (into > 0) & (out > 0)
    assert bool(both.all())  # in the zoo every unit is written and read
    torch.testing.assert_close(into[both], out[both], rtol=1e-6, atol=0)
    assert relative_change(before, outputs(model, inputs, training=False)) < 1e-9


@with_units
def test_balance_is_idempotent_and_forgets_the_scales(case: Case) -> None:
    """One representative for the whole orbit, 1e-9 in float64."""
    found, model = analysis(case.name), build(case)
    other, _ = rescaled(model, found, 3)
    gspace.balance_(model, analysis=found)
    gspace.balance_(other, analysis=found)
    assert_same_weights(other, model, 1e-9)
    again = gspace.balance_(other, analysis=found)
    assert float(again.log().abs().max()) < 1e-9
    assert_same_weights(other, model, 1e-9)


def test_balanced_scales_of_weights_on_two_devices() -> None:
    model = mlp(5, 7, 7, 3).double()
    found, weights = gspace.analyze(model), {name: p.detach() for name, p in model.named_parameters()}
    first = next(iter(weights))
    apart = {name: w if name == first else Away(w) for name, w in weights.items()}
    one, two = (balance.balanced_log_scales(found.edges, some, 1 + found.H) for some in (weights, apart))
    assert torch.equal(one, two)
    assert float(one.abs().max()) > 0.1


@pytest.mark.parametrize("depth", [10, 200])
def test_balancing_a_deep_network_takes_no_more_products(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """39 and 59 products with the Hessian were counted; with a diagonal preconditioner 99 and 1,611."""
    products, solve = 0, balance.conjugate_gradients

    def counted(operator: Callable[[Tensor], Tensor], *args: Any) -> Tensor:
        def product(d: Tensor) -> Tensor:
            nonlocal products
            products += 1
            return operator(d)

        return solve(product, *args)

    monkeypatch.setattr(balance, "conjugate_gradients", counted)
    torch.manual_seed(0)
    gspace.balance_(mlp(*[16] * (depth + 1), 10))
    assert 0 < products < 100


def test_balance_forgets_the_scales_where_layers_are_many_orders_apart() -> None:
    """Each layer times its own e^N(0, 10): Newton's method alone, at most a factor e at a time, did not arrive."""
    torch.manual_seed(0)
    model = mlp(*[16] * 101, 10).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_((10 * torch.randn(())).exp())
    found = gspace.analyze(model)
    other, _ = rescaled(model, found, 3)
    gspace.balance_(model, analysis=found)
    gspace.balance_(other, analysis=found)
    assert_same_weights(other, model, 1e-9)
    into, out = norms(model, found)
    torch.testing.assert_close(into, out, rtol=1e-6, atol=0)


def test_balance_returns_the_scales_it_applied() -> None:
    model = build(BY_NAME["lenet"])
    by_hand = copy.deepcopy(model)
    scales = gspace.balance_(model)
    assert_same_weights(gspace.rescale_(by_hand, scales), model, 1e-14)


def test_balance_leaves_units_that_no_path_meets() -> None:
    """Unit 1 writes nothing, unit 2 reads nothing: their weights could shrink for ever, so they keep their scale."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    with torch.no_grad():
        model[2].weight[:, 0] = 0
        model[0].weight[1] = 0
    before = copy.deepcopy(model)
    scales = gspace.balance_(model)
    assert scales.values[:2].tolist() == [1.0, 1.0]
    assert torch.equal(model[0].weight[0], before[0].weight[0])
    assert torch.equal(model[2].weight[:, 1], before[2].weight[:, 1])
    into, out = norms(model, gspace.analyze(model))
    torch.testing.assert_close(into[2:], out[2:], rtol=1e-6, atol=0)


# Equivalence


@with_units
def test_a_rescaled_copy_is_equivalent_and_its_scales_are_found(case: Case) -> None:
    found, model = analysis(case.name), build(case)
    other, scales = rescaled(model, found, 4)
    answer = gspace.are_equivalent(model, other, analysis=found)
    assert answer, answer.reason
    assert answer.scales is not None
    # A scale is found along a chain of weights, one rounding each.
    torch.testing.assert_close(answer.scales.values, scales.values, rtol=1e-10, atol=0)


def test_rescaled_absorbed_rows_are_equivalent_only_if_allowed() -> None:
    case = BY_NAME["mlp-bn"]
    found, model = analysis(case.name), build(case)
    scales = gspace.random_scales(model, torch.Generator().manual_seed(0), absorbed=True, analysis=found)
    other = gspace.rescale_(copy.deepcopy(model), scales, analysis=found)
    assert not gspace.are_equivalent(model, other)
    answer = gspace.are_equivalent(model, other, absorbed=True)
    assert answer, answer.reason
    torch.testing.assert_close(answer.scales.values, scales.values, rtol=1e-10, atol=0)


@small
def test_one_changed_weight_refutes_equivalence(case: Case) -> None:
    """Every parameter in turn: its last entry, off by a hundredth, is seen after rescaling."""
    found, model = analysis(case.name), build(case)
    for parameter_name, _ in model.named_parameters():
        other, _ = rescaled(model, found, 5)
        with torch.no_grad():
            dict(other.named_parameters())[parameter_name].flatten()[-1:].mul_(1.01)
        answer = gspace.are_equivalent(model, other, analysis=found)
        assert not answer, f"{parameter_name} was changed"


def test_the_weight_that_refutes_is_named() -> None:
    """The bias of the output joins ground to ground: no scale explains it away, so it must be the one named."""
    model = mlp(5, 7, 6, 3).double()
    other, _ = rescaled(model, gspace.analyze(model), 6)
    with torch.no_grad():
        other[4].bias[1] += 0.1
    answer = gspace.are_equivalent(model, other)
    assert not answer
    assert answer.scales is None
    assert "4.bias" in answer.reason


def test_a_changed_buffer_refutes_equivalence() -> None:
    model = build(BY_NAME["mlp-bn"])
    other = copy.deepcopy(model)
    other[1].running_mean[3] += 0.1
    answer = gspace.are_equivalent(model, other)
    assert not answer
    assert "1.running_mean" in answer.reason


def test_a_flipped_unit_is_not_equivalent_because_signs_differ() -> None:
    """A linear unit could be flipped; a positive scale never does it."""
    model = mlp(5, 7, 6, 3).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[2] *= -1
        other[0].bias[2] *= -1
        other[2].weight[:, 2] *= -1
    answer = gspace.are_equivalent(model, other)
    assert not answer
    assert "sign" in answer.reason
    assert "0.weight" in answer.reason


def test_models_of_other_shape_or_names_are_not_equivalent() -> None:
    assert "shape" in gspace.are_equivalent(mlp(5, 7, 3), mlp(5, 8, 3)).reason
    assert not gspace.are_equivalent(mlp(5, 7, 3), mlp(5, 7, 6, 3))


def test_a_ready_analysis_excludes_its_options() -> None:
    model = mlp(5, 7, 3)
    with pytest.raises(ValueError, match="either analysis= or residual="):
        gspace.random_scales(model, analysis=gspace.analyze(model), residual="tie")


@pytest.mark.parametrize("name", ["residual-tie", "shufflenet", "resnet-small-tie"])
def test_every_function_takes_the_options_of_analyze(name: str) -> None:
    case = BY_NAME[name]
    options = {"residual": case.residual, "example_input": draw_inputs(case, 0, torch.float64, batch=2)}
    model = build(case)
    other = gspace.rescale_(copy.deepcopy(model), gspace.random_scales(model, **options), **options)
    assert gspace.are_equivalent(model, other, **options)
    gspace.balance_(model, **options)
    gspace.balance_(other, **options)
    assert_same_weights(other, model, 1e-9)
    assert analyze(case).H == case.H


def test_a_unit_is_known_from_its_readers_alone() -> None:
    model = mlp(3, 4, 2)
    with torch.no_grad():
        model[0].weight[1] = 0
        if model[0].bias is not None:
            model[0].bias[1] = 0
    other = copy.deepcopy(model)
    gspace.rescale_(other, gspace.random_scales(other, torch.Generator().manual_seed(1)))
    assert gspace.are_equivalent(model, other)


def test_units_before_rows_that_a_norm_absorbs_are_balanced_too() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).double()
    model.append(nn.Flatten()).append(nn.Linear(3, 2).double())
    found = gspace.analyze(model, torch.zeros(2, 2, 5, 5, dtype=torch.float64))
    assert found.H_absorbed == 3
    scales = gspace.balance_(model, absorbed=True, analysis=found)
    balance = gspace.balancedness(model, analysis=found)
    torch.testing.assert_close(balance.incoming, balance.outgoing, rtol=1e-12, atol=0)
    assert bool((scales.values[found.H :] == 1).all()), "nothing takes their scale back"


def test_what_flows_into_a_dead_unit_does_not_move_the_balance() -> None:
    model = mlp(3, 4, 4, 2).double()
    with torch.no_grad():
        model[4].weight[:, 1] = 0
        other = copy.deepcopy(model)
        other[2].weight[1] *= 1000
    gspace.balance_(model)
    gspace.balance_(other)
    torch.testing.assert_close(other[0].weight, model[0].weight, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.0]).to(torch.float8_e4m3fn), True),
        (torch.tensor([7], dtype=torch.uint16), torch.tensor([8], dtype=torch.uint16), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), False),
        (torch.tensor([0]), torch.tensor([-(2**63)]), False),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), True),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), False),
        (torch.tensor([1.0]), torch.tensor([math.inf]), False),
        (torch.tensor([1.0 + 0j]), torch.tensor([1.0]), False),
    ],
    ids=[
        "equal flags",
        "other flags",
        "NaN",
        "other counts",
        "equal complex",
        "other complex",
        "equal float8",
        "other uint16",
        "equal sparse",
        "other large counts",
        "counts too far apart",
        "equal inf",
        "other inf",
        "inf",
        "complex and real",
    ],
)
def test_buffers_of_any_kind_are_compared(mine: Tensor, theirs: Tensor, equal: bool) -> None:
    one, two = mlp(3, 4, 2), mlp(3, 4, 2)
    two.load_state_dict(one.state_dict())
    one.register_buffer("kept", mine)
    two.register_buffer("kept", theirs)
    assert bool(gspace.are_equivalent(one, two)) == equal


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.narrow(1, -2, 2),
        lambda h: h.narrow(1, 1, 2),
        lambda h: h.sum((2, 3), dtype=torch.long, keepdim=True)[:, :2].double(),
    ],
    ids=["the last two", "two in the middle", "a sum of whole numbers"],
)
@torch.no_grad()
def test_what_a_view_or_a_sum_takes_is_followed(view: Callable[[Tensor], Tensor], example: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(2, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(view(torch.relu(10 * self.a(x))))

    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = model(x)
    analysis = gspace.analyze(model, x) if example else gspace.analyze(model)
    gspace.rescale_(
        model, gspace.random_scales(model, torch.Generator().manual_seed(0), analysis=analysis), analysis=analysis
    )
    assert relative_change(before, model(x)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equivalence_allows_roundings_and_no_more(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(8, *[8] * 10, 4).to(dtype)
    other = gspace.rescale_(copy.deepcopy(model), gspace.random_scales(model, torch.Generator().manual_seed(0)))
    assert gspace.are_equivalent(model, other)
    with torch.no_grad():
        other[0].weight[0, 1] *= 1.5
    assert not gspace.are_equivalent(model, other)


def test_an_analysis_of_other_widths_is_refused() -> None:
    """Also where sizes are multiples of each other."""
    narrow, wide = (nn.Sequential(nn.Linear(8, h, bias=False), nn.ReLU(), nn.Linear(h, 4, bias=False)) for h in (4, 8))
    before = copy.deepcopy(wide.state_dict())
    with pytest.raises(ValueError, match="the analysis is of another model"):
        gspace.rescale_(wide, torch.full((4,), 2.0, dtype=torch.float64), analysis=gspace.analyze(narrow))
    longer = nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match="the analysis is of another model"):
        gspace.random_scales(longer, analysis=gspace.analyze(narrow))
    with pytest.raises(TypeError, match=r"analysis is what gspace\.analyze returns, got int"):
        gspace.random_scales(wide, analysis=3)
    assert all(torch.equal(before[name], value) for name, value in wide.state_dict().items())


def test_scales_that_a_dtype_cannot_hold_are_refused() -> None:
    """Zeros and rows without their digits are; single weights may lose some."""

    def tiny(bias: float) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1)).half()
        nn.init.constant_(model[0].bias, bias)
        return model

    scaled = gspace.rescale_(tiny(1e-4), torch.tensor([0.5]))
    assert scaled[0].bias.detach().item() == pytest.approx(5e-5, rel=1e-2)
    with pytest.raises(ValueError, match=r"take 0\.bias out of the range of torch\.float16 \(it would be 1\.19e-08"):
        gspace.rescale_(tiny(1e-7), torch.tensor([0.1]))
    row = tiny(0.0)
    nn.init.constant_(row[0].weight, 1e-4)
    with pytest.raises(ValueError, match=r"take 0\.weight out of the range of torch\.float16 \(it would be 5e-05"):
        gspace.rescale_(row, torch.tensor([0.5]))
    assert row[0].weight.detach()[0, 0].item() == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("entries", [slice(None), slice(1)], ids=["all", "one"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(entries: slice, value: float) -> None:
    model = mlp(6, 7, 3)
    with torch.no_grad():
        model[0].weight.view(-1)[entries] = value
    with pytest.raises(ValueError, match=r"^0\.weight holds values that are not finite"):
        gspace.rescale_(model, torch.full((7,), 2.0))


class Complex(nn.Module):
    """A complex layer between real ones, whose units stay free."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)).double()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.complex128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.second(self.first(self.front(x).to(torch.complex128)))).flatten(1)


def test_complex_weights_are_pinned_and_get_the_plain_optimizer() -> None:
    model = Complex()
    found = gspace.analyze(model)
    assert found.H == 5
    assert {"first.weight", "second.weight"} <= {pin.where for pin in found.pinned if pin.operation == "complex"}
    other = gspace.rescale_(copy.deepcopy(model), gspace.random_scales(model))
    assert gspace.are_equivalent(model, other)
    with torch.no_grad():
        other.second.weight[0, 0] *= 1j
    assert not gspace.are_equivalent(model, other)
    x = torch.randn(6, 3, dtype=torch.float64)
    for make in (lambda m: gspace.GSGD(m, 0.01), lambda m: gspace.InGSpace(m, torch.optim.SGD, lr=0.01)):
        mine, plain = copy.deepcopy(model), copy.deepcopy(model)
        for m, optimizer in ((mine, make(mine)), (plain, torch.optim.SGD(plain.parameters(), 0.01))):
            m(x).square().mean().backward()
            optimizer.step()
        assert torch.equal(mine.second.weight, plain.second.weight)
        assert torch.equal(mine.first.weight, plain.first.weight)
        assert not torch.equal(mine.first.weight, model.first.weight)


def test_scales_that_leave_the_normal_numbers_are_refused() -> None:
    model = mlp(5, 6, 3).half()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.3)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="range of torch"):
        gspace.rescale_(model, torch.full((6,), 1e-5))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_layers_of_width_0_are_equivalent_to_themselves() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(5, 0), nn.ReLU(), nn.Linear(0, 3))
    assert gspace.are_equivalent(model, model)


def test_what_an_analysis_holds_is_compared_by_identity() -> None:
    model = mlp(5, 6, 3)
    one, two = gspace.analyze(model), gspace.analyze(model)
    assert one != two
    assert one.edges[0] != two.edges[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_gsgd_keeps_equivalent_is_found_equivalent(dtype: torch.dtype) -> None:
    """Weights that pass near 0 differ in every digit then, and in sign."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = mlp(10, 32, 32, 5).to(dtype)
        other = gspace.rescale_(copy.deepcopy(model), gspace.random_scales(model))
        data = torch.randn(30, 16, 10, dtype=dtype)
        for m in (model, other):
            optimizer = gspace.GSGD(m, 0.05, momentum=0.9, weight_decay=1e-3)
            for x in data:
                optimizer.zero_grad()
                (m(x) - 1).square().mean().backward()
                optimizer.step()
        assert gspace.are_equivalent(model, other)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_small_change_of_a_small_weight_is_found_whatever_the_scales(scale: float) -> None:
    model = mlp(5, 7, 6, 3).double()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e-6
    other = gspace.rescale_(copy.deepcopy(model), torch.full((13,), scale))
    assert gspace.are_equivalent(model, other)
    with torch.no_grad():
        other[2].weight[0, 0] *= 1 + 1e-5
    answer = gspace.are_equivalent(model, other)
    assert not answer
    assert answer.reason == "2.weight [0, 0, 0] would be 1e-06 but is 1.00001e-06"
    with torch.no_grad():
        other[2].weight[0, 0] *= -1
    assert gspace.are_equivalent(model, other).reason.startswith("signs differ: 2.weight [0, 0, 0]")


def test_the_reason_has_as_many_digits_as_it_needs() -> None:
    model = mlp(5, 7, 3).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model[2].bias[1], other[2].bias[1] = 1.0, 1 + 1e-9
    assert "would be 1 but is 1.000000001" in gspace.are_equivalent(model, other).reason


@pytest.mark.parametrize(
    "change", [lambda m: gspace.rescale_(m, torch.ones(4)), gspace.balance_], ids=["rescale_", "balance_"]
)
def test_weights_without_values_are_not_rescaled(change: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device"):
        change(model)


def test_balancing_reports_its_progress_before_it_changes_a_weight() -> None:
    """Iterations from 0 on, with errors that end below the goal of float64; who raises in between stops it."""
    model = mlp(8, 16, 16, 4).double()
    gspace.rescale_(model, gspace.random_scales(model, torch.Generator().manual_seed(0), std=3.0))
    before, told = copy.deepcopy(model), []

    def stop(iteration: int, error: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gspace.balance_(model, progress=stop)
    assert_same_weights(model, before, 0)
    gspace.balance_(model, progress=lambda *seen: told.append(seen))
    assert [iteration for iteration, _ in told] == list(range(len(told)))
    assert len(told) > 1
    assert told[-1][1] < 1e-13 < told[0][1]
    gspace.balance_(before)
    assert_same_weights(model, before, 0)
