"""Small modules: the count each dictates, a rescaling that no output notices, and a rank that leaves no scale out."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from invariance import randomize_
from layers import Experts, LanguageModel
from modules import MODULES, Module
from moved import call, moved, tensors
from parts import Net
from scale_rank import scale_symmetries

BATCH = 6
every_module = pytest.mark.parametrize("case", MODULES, ids=lambda case: case.name)


def draw(case: Module, seed: int, batch: int = BATCH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if case.vocabulary:
        return tuple(torch.randint(case.vocabulary, (batch, *shape), generator=generator) for shape in case.shapes)
    return tuple(torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in case.shapes)


def build(case: Module, seed: int = 0, eps: float | None = None) -> nn.Module:
    """The module in float64 with random weights and running statistics of two batches."""
    model = randomize_(case.build(), seed).double().train()
    for part in model.modules():
        if eps is not None and hasattr(part, "eps"):
            part.eps = eps
    with torch.no_grad():
        for step in (100, 101):
            model(*draw(case, step))
    return model


def analyze(case: Module) -> gspace.Analysis:
    return gspace.analyze(build(case), draw(case, 0), residual="tie")


@every_module
def test_counts(case: Module) -> None:
    found = analyze(case)
    assert (found.H, found.H_absorbed) == (case.H, case.H_absorbed)
    assert not found.unseen


@every_module
def test_rescaling_keeps_the_outputs_on_another_batch(case: Module) -> None:
    """In float64: rounding of a few layers stays near 1e-15."""
    found = analyze(case)
    for mode, change in moved(build(case), draw(case, 1), found).items():
        assert change <= 1e-12, mode


@pytest.mark.parametrize("case", [case for case in MODULES if case.H_absorbed], ids=lambda case: case.name)
def test_absorbed_scales_keep_the_outputs_at_tiny_eps(case: Module) -> None:
    """Statistics of BatchNorm move along; 1e-9 because a norm amplifies the rounding of small rows."""
    model = build(case, eps=1e-30)
    for mode, change in moved(model, draw(case, 1), analyze(case), absorbed=True).items():
        assert change <= 1e-9, mode


@pytest.mark.parametrize("case", [case for case in MODULES if case.free is not None], ids=lambda case: case.name)
def test_no_scale_is_missing(case: Module) -> None:
    """With a large ε the exact units are all that is free; as ε → 0 those that a norm absorbs are free as well."""

    def outputs(eps: float, seed: int) -> tuple[nn.Module, Tensor]:
        model = build(case, seed, eps)
        return model, torch.cat([t.flatten() for t in tensors(call(model, draw(case, seed)))])

    assert case.free is not None
    assert scale_symmetries(partial(outputs, 2.0)) == case.H + case.free
    if case.H_absorbed:
        assert scale_symmetries(partial(outputs, 1e-30)) == case.H + case.H_absorbed + case.free


def by_name(name: str) -> Module:
    return next(case for case in MODULES if case.name == name)


def test_units_name_what_writes_and_reads_them() -> None:
    found = analyze(by_name("attention-fused"))
    assert sum(group.count for group in found.units) == 8
    assert (4, ("v.weight",), ("o.weight",)) in {(group.count, group.written, group.read) for group in found.units}


def test_what_both_modes_pin_is_counted_once() -> None:
    pins = [pin for pin in analyze(by_name("tanh")).pinned if pin.operation == "tanh"]
    assert sum(pin.count for pin in pins) == 5
    assert all(pin.where and pin.reason for pin in pins)


def test_a_sum_that_fixes_a_scale_is_listed() -> None:
    """h + h³, as in a GELU that is written out: 5 channels."""
    model = Net(lambda s, x: s.b((lambda h: h + h**3)(s.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    found = gspace.analyze(model, torch.randn(2, 4))
    pins = [(pin.operation, pin.count, pin.reason) for pin in found.pinned if pin.operation != "output"]
    assert found.H == 0
    assert pins == [("add", 5, "added to a power of itself, or to what scales otherwise")]


def test_modes_can_be_restricted() -> None:
    """A network that is a tanh in training and a ReLU otherwise has 5 units in evaluation mode alone."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(torch.tanh(net.a(x)) if net.training else torch.relu(net.a(x)))

    model = Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    modes = {("train", "eval"): 0, ("train",): 0, ("eval",): 5}
    assert {chosen: gspace.analyze(model, torch.randn(2, 4), modes=chosen).H for chosen in modes} == modes


def test_pinning_sums_leaves_rotary_embeddings_alone() -> None:
    """q·cos + rotate(q)·sin adds a value to a permutation of itself, which is no residual sum."""
    case = by_name("attention-rotary")
    assert gspace.analyze(build(case), draw(case, 0), residual="pin").H == case.H


def biased_experts(chosen: float) -> Experts:
    """Experts whose router prefers (+) or avoids (−) the last one for positive data."""
    model = randomize_(Experts(), 0).double()
    with torch.no_grad():
        model.router.weight[2] = chosen
    return model


def test_an_expert_that_no_token_reached_is_unseen() -> None:
    """Behind |x| no batch reaches the last one; without it, one that is drawn at random does."""
    x = torch.rand(BATCH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = biased_experts(-9)
    unseen = {"experts.2.0.weight": 20, "experts.2.0.bias": 5, "experts.2.2.weight": 10, "experts.2.2.bias": 2}
    hidden = Net(lambda s, x: s.model(x.abs()), model=model)
    found = gspace.analyze(hidden, x)
    assert found.unseen == {f"model.{name}": n for name, n in unseen.items()}
    with pytest.raises(ValueError, match=r"did not use 20 weights of .model\.experts\.2\.0\.weight. and 3 more"):
        gspace.rescale_(hidden, gspace.random_scales(hidden, analysis=found), analysis=found)
    assert gspace.analyze(hidden, x, pin="model.experts.2").unseen == {}
    found = gspace.analyze(model, x)
    assert (found.unseen, found.H) == ({}, 15)


def test_positions_beyond_the_example_have_the_scales_of_the_others() -> None:
    model = randomize_(LanguageModel(tied=False, norm=False), 0).double()
    found = gspace.analyze(model, torch.tensor([[0, 1], [2, 3]]))
    assert found.unseen == {}
    for mode, change in moved(model, (torch.tensor([[0, 1, 2], [3, 2, 1]]),), found).items():
        assert change <= 1e-12, mode


def test_a_cut_by_the_number_of_rows_is_that_of_the_example() -> None:
    """Three rows leave three of eight channels in the output; an analysis along two of them would leave two."""
    model = Net(lambda s, x: F.relu(s.a(x))[..., : len(x)], a=nn.Linear(5, 8)).double()
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, before = gspace.analyze(model, x), model(x)
    assert found.H == 5
    gspace.rescale_(model, gspace.random_scales(model, analysis=found), analysis=found)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_a_group_norm_over_one_value_writes_its_bias_whatever_the_scale() -> None:
    """At an ε of 1e-30 rounding in torch's formula would hide that: x·10¹⁵ − mean·10¹⁵."""
    model = nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(4, 4), nn.Linear(4, 3)).double()
    x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = gspace.analyze(model, x)
    assert (found.H, found.H_absorbed) == (4, 4)
    assert max(moved(model, (x,), found, absorbed=True).values()) <= 1e-12


def test_experts_in_one_tensor_are_followed_at_any_size() -> None:
    """600 of the stem and 500 of each of 4 experts, whose 1.2 million weights are too many to follow one by one."""

    def forward(s: Net, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eoi->ebo", F.relu(s.stem(x)), s.up).relu()
        return (hidden @ s.down).sum(0)

    generator = torch.Generator().manual_seed(0)
    model = Net(forward, stem=nn.Linear(8, 600))
    model.up = nn.Parameter(torch.randn(4, 500, 600, generator=generator) / 25)
    model.down = nn.Parameter(torch.randn(4, 500, 3, generator=generator) / 25)
    x = torch.randn(2, BATCH, 8, generator=generator, dtype=torch.float64)
    found = gspace.analyze(model.double(), x[0])
    assert (found.H, found.H_paper) == (2600, 2600)
    assert max(moved(model, (x[1],), found).values()) <= 1e-12


@pytest.mark.parametrize("reached", [[0, 3], [0, 1, 2, 3]])
def test_grouped_products_say_nothing_of_experts_without_rows(reached: list[int]) -> None:
    """Each of 4 experts has 16 units. What one would do that no row goes to is not known, and no unit is made of it."""

    def forward(s: Net, x: Tensor) -> Tensor:
        ends = torch.tensor([sum(e <= k for e in reached) * 8 for k in range(4)], dtype=torch.int32)
        hidden = F.relu(F.grouped_mm(x[: len(reached) * 8], s.up, offs=ends))
        return F.grouped_mm(hidden, s.down, offs=ends)

    model = Net(forward)
    model.up, model.down = nn.Parameter(torch.randn(4, 16, 16)), nn.Parameter(torch.randn(4, 16, 8))
    found = gspace.analyze(model, torch.randn(32, 16))
    missing = 4 - len(reached)
    assert 16 * len(reached) == found.H
    assert found.unseen == ({"up": missing * 256, "down": missing * 128} if missing else {})


SHARED = {
    # overlapping windows of one vector; and a gain that is used with 1 added to it and without
    "that is no block of it": (
        lambda s, x: s.c(F.relu(x @ s.w.unfold(0, 5, 1).t())),
        {"c": nn.Linear(4, 3)},
        8,
    ),
    "with 1 added to it and without": (
        lambda s, x: s.c(F.relu(s.a(x)) * s.w) + s.d(F.relu(s.a(x)) * (1 + s.w)),
        {"a": nn.Linear(5, 4), "c": nn.Linear(4, 3), "d": nn.Linear(4, 3)},
        4,
    ),
}


@pytest.mark.parametrize("reason", SHARED)
def test_uses_of_a_parameter_that_contradict_each_other_are_pinned_with_the_reason(reason: str) -> None:
    forward, parts, size = SHARED[reason]
    model = Net(forward, **parts)
    model.w = nn.Parameter(torch.rand(size, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = gspace.analyze(model.double(), x)
    assert found.H == 0
    assert any(pin.reason.endswith(reason) for pin in found.pinned)


@pytest.mark.parametrize("kept", ["buffer", "pinned parameter"])
def test_a_number_that_the_model_keeps_is_no_literal_zero(kept: str) -> None:
    """It is 0 before the training, and takes any scale only then."""
    model = Net(lambda n, x: n.b(F.relu(n.a(x)) + n.shift), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    if kept == "buffer":
        model.register_buffer("shift", torch.zeros(()))
    else:
        model.shift = nn.Parameter(torch.zeros(()))
    assert gspace.analyze(model, torch.randn(2, 4), pin=["shift"] if kept != "buffer" else ()).H == 0
