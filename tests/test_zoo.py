"""Every architecture of the zoo: the counts its structure dictates, and a function that no rescaling moves."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import gspace
from cases import CASES, Case
from invariance import analyze, build, draw_inputs, outputs, relative_change

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("name", BY_NAME)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@cache
def analysis(name: str) -> gspace.Analysis:
    return analyze(BY_NAME[name])


def change(
    case: Case,
    move: Callable[[nn.Module], object],
    *,
    training: bool,
    dtype: torch.dtype = torch.float64,
    eps: float | None = None,
) -> float:
    """Relative change of the case's output when `move` acts on its network."""
    model, inputs = build(case, dtype, eps), draw_inputs(case, 1, dtype)
    before = outputs(model, inputs, training)
    move(model)
    return relative_change(before, outputs(model, inputs, training))


def rescaling(name: str, absorbed: bool = False) -> Callable[[nn.Module], object]:
    """A random rescaling with factors e^N(0, 1)."""
    found = analysis(name)

    def move(model: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(2)
        scales = gspace.random_scales(model, generator, absorbed=absorbed, analysis=found)
        return gspace.rescale_(model, scales, analysis=found)

    return move


@every_case
def test_counts(name: str) -> None:
    case, found = BY_NAME[name], analysis(name)
    assert (found.H, found.H_absorbed, found.H_paper) == (case.H, case.H_absorbed, case.H_paper)
    assert (found.m, found.dim) == (case.dim + case.H, case.dim)
    assert found.invariant_ratio == case.H / (case.dim + case.H)


@every_case
def test_pinned_operations(name: str) -> None:
    pinned = [pin for pin in analysis(name).pinned if pin.operation != "output"]
    assert {pin.operation for pin in pinned} == BY_NAME[name].pinned
    assert all(pin.count > 0 and pin.reason and pin.where for pin in pinned)


@every_case
def test_groups_edges_and_report_agree(name: str) -> None:
    """Every unit is in one group, is touched by an edge of the group's parameters, and is reported."""
    found = analysis(name)
    for kind, count in (("exact", found.H), ("absorbed", found.H_absorbed)):
        assert sum(group.count for group in found.units if group.kind == kind) == count
    touched = torch.cat([ids.flatten() for edges in found.edges for ids in (edges.head, edges.tail)]).unique().tolist()
    units = {unit for node in touched for unit, _ in found.forms.get(node, ((node, 1),))}
    assert units - {0} == set(range(1, found.H + found.H_absorbed + 1))
    assert not found.unseen
    parameters = dict(BY_NAME[name].build().named_parameters())
    for edges in (*found.edges, *found.transparent):
        view = edges.view(parameters[edges.name])
        assert view.shape[:3] == (*edges.head.shape, edges.tail.shape[1])
        assert view.numel() == parameters[edges.name].numel()
        assert view.untyped_storage().data_ptr() == parameters[edges.name].untyped_storage().data_ptr()
    report = found.to_dict()
    assert (report["H"], report["m"], len(report["units"])) == (found.H, found.m, len(found.units))
    assert all(pin.operation in str(found) for pin in found.pinned if pin.operation != "output")


@every_case
@both_modes
def test_rescaling_keeps_the_function(name: str, training: bool) -> None:
    """Default ε, absorbed rows at 1. Rounding moves float64 by about 1e-14 a layer; BatchNorm amplifies it."""
    assert change(BY_NAME[name], rescaling(name), training=training) < 1e-9


@pytest.mark.parametrize("name", [case.name for case in CASES if case.H_absorbed])
@both_modes
def test_rescaling_absorbed_rows_keeps_the_function_at_tiny_eps(name: str, training: bool) -> None:
    assert change(BY_NAME[name], rescaling(name, absorbed=True), training=training, eps=1e-30) < 1e-9


@every_case
@pytest.mark.parametrize(("training", "limit"), [(True, 1e-3), (False, 1e-4)], ids=["train", "eval"])
def test_rescaling_keeps_the_function_in_float32(name: str, training: bool, limit: float) -> None:
    """Rounding, 6e-8 an operation, adds up over 50 layers; in training mode BatchNorm divides by small variances."""
    assert change(BY_NAME[name], rescaling(name), training=training, dtype=torch.float32) < limit


@pytest.mark.parametrize("name", [case.name for case in CASES if case.H])
def test_a_wrong_scale_would_show(name: str) -> None:
    """The measure can fail: scaling what units are written by, but not what reads them, moves the output."""
    found = analysis(name)
    units = torch.randn(1 + found.H + found.H_absorbed, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    units[0] = units[found.H + 1 :] = 0
    scales = found.log_scales(units).exp()

    def write_only(model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for edges in found.edges:
                view, factor = edges.view(parameters[edges.name]), scales[edges.head]
                view.mul_(factor.reshape(*factor.shape, *[1] * (view.dim() - 2)))

    assert change(BY_NAME[name], write_only, training=False) > 1e-3


def conv_net(groups: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=groups),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, groups=groups),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channels_last_weights_are_rescaled_in_place(groups: int) -> None:
    """A view of a parameter with other strides must still reach its memory."""
    model = conv_net(groups).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    before = outputs(model, (x,), training=False)
    gspace.rescale_(model, gspace.random_scales(model))
    assert relative_change(before, outputs(model, (x,), training=False)) < 1e-12  # three layers in float64
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)


@pytest.mark.parametrize(
    "name", ["mlp", "lenet", "conv3d", "resnet-small-tie", "gated", "unet", "siamese", "masked", "shufflenet"]
)
def test_a_guess_finds_what_an_example_does(name: str) -> None:
    case = BY_NAME[name]
    found = gspace.analyze(case.build(), residual=case.residual)
    assert (found.H, found.H_absorbed, found.H_paper, found.dim) == (case.H, case.H_absorbed, case.H_paper, case.dim)
