"""Tricky forward passes: how many units each has, that no rescaling moves an output, that no scale is left out."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from invariance import randomize_, set_eps_
from moved import call, moved, tensors
from movements import BATCHES, MOVEMENTS, PLACES
from operations import ALIKE, CHANGED, KEEPING, PINNING, Operation
from parts import Net
from programs import CHOICES, PARAMETERS, PRODUCTS, WRITES, Program, normal
from scale_rank import missed
from zoo import mlp

EXACT = 1e-12  # a few layers in float64: rounding stays near 1e-15
PROGRAMS = WRITES | PARAMETERS | CHOICES | PRODUCTS | PLACES | BATCHES | MOVEMENTS


def built(program: Program, seed: int = 0) -> nn.Module:
    return randomize_(program.build(), seed)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    """The count; a rescaling that another batch does not notice, with absorbed units too once ε is next to 0."""
    program = PROGRAMS[name]
    found = gspace.analyze(built(program), program.inputs(0))
    assert (found.H, found.H_absorbed, found.unseen) == (program.H, program.H_absorbed, {})
    assert max(moved(built(program), program.inputs(1), found).values()) <= EXACT
    if found.H_absorbed:
        change = moved(set_eps_(built(program), 1e-30), program.inputs(1), found, absorbed=True)
        assert max(change.values()) <= 1e-9  # a norm amplifies the rounding of small rows
    pinned = gspace.analyze(built(program), program.inputs(0), residual="pin")
    assert pinned.H <= found.H
    assert max(moved(built(program), program.inputs(1), pinned).values()) <= EXACT


RANKED = [name for name, program in PROGRAMS.items() if program.derivatives and not program.H_absorbed]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if k % 5 else []) for k, name in enumerate(RANKED)]
)
def test_no_scale_of_a_program_is_missing(name: str) -> None:
    program = PROGRAMS[name]

    def outputs(seed: int) -> tuple[nn.Module, Tensor]:
        model = built(program, seed)
        return model, torch.cat([t.flatten() for t in tensors(call(model, program.inputs(seed)))])

    if sum(p.numel() for p in built(program).parameters()) <= 400:
        assert missed(outputs, gspace.analyze(built(program), program.inputs(0))) == 0


# Single operations ----------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """5 → 7, the operation, 7 → 6 → 3: the 7 are in question, the 6 are always free."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.first, self.operation, self.rest = nn.Linear(5, 7), operation, mlp(7, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.operation(self.first(x)))


def follow(model: nn.Module) -> gspace.Analysis:
    """Analyzed along an example and along a guess alike, and rescaled on another batch."""
    found = gspace.analyze(model, normal(6, 5))
    assert not found.unseen
    assert gspace.analyze(model).H == found.H
    assert max(moved(model, normal(6, 5, seed=1), found).values()) <= EXACT
    return found


@pytest.mark.parametrize("name", PINNING)
def test_an_operation_that_is_not_homogeneous_pins(name: str) -> None:
    operation, canonical = PINNING[name]
    found = follow(Between(operation).double())
    assert found.H == 6
    (pin,) = [pin for pin in found.pinned if pin.operation != "output"]
    assert (pin.operation, pin.count) == (canonical, 7)
    assert pin.reason
    assert pin.where in ("the model", "operation")


@pytest.mark.parametrize("name", KEEPING)
def test_a_homogeneous_operation_keeps_the_units(name: str) -> None:
    found = follow(Between(KEEPING[name]).double())
    assert found.H == 13
    assert {pin.operation for pin in found.pinned} <= {"output"}


@pytest.mark.parametrize("name", ALIKE)
def test_an_operation_that_mixes_channels_gives_them_one_scale(name: str) -> None:
    operation, H, H_absorbed = ALIKE[name]
    found = follow(Between(operation).double())
    assert (found.H, found.H_absorbed) == (6 + H, H_absorbed)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", CHANGED)
def test_a_model_changed_from_outside(name: str) -> None:
    change, H = CHANGED[name]
    model = mlp(5, 7, 6, 3).double()
    change(model)
    assert follow(model).H == H


def test_a_hook_on_every_module_is_seen() -> None:
    def saturate(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output.tanh() if isinstance(module, nn.ReLU) else None

    handle = nn.modules.module.register_module_forward_hook(saturate)
    try:
        assert follow(mlp(5, 7, 6, 3).double()).H == 0
    finally:
        handle.remove()


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer], ids=["parameter", "buffer"])
def test_tensors_that_share_memory_are_pinned(kind: type) -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x))) + F.linear(x, s.b), a=nn.Linear(5, 7), o=nn.Linear(7, 3)).double()
    model.b = kind(model.a.weight.detach()[:3])
    assert "a.weight: shares its memory with b" in {pin.reason for pin in follow(model).pinned}


@pytest.mark.parametrize(("pin", "H"), [((), 13), ("0.weight", 6), ("0.bias", 6), ("2.weight", 1), ("2.bias", 7)])
def test_parameters_side_by_side_in_one_buffer_are_followed_one_by_one(pin: str | tuple[()], H: int) -> None:
    model = mlp(5, 7, 6, 3).double()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    found = gspace.analyze(model, normal(6, 5), pin=pin)
    assert (found.H, found.unseen) == (H, {})
    assert max(moved(model, normal(6, 5, seed=1), found).values()) <= EXACT


def test_a_parameter_in_the_gaps_of_another_counts_as_sharing_its_memory() -> None:
    model = mlp(5, 7, 3).double()
    buffer = torch.randn(7, 2, dtype=torch.float64)
    model[0].bias = nn.Parameter(buffer[:, 0])
    model.register_parameter("other", nn.Parameter(buffer[:, 1]))
    assert "0.bias: shares its memory with other" in {pin.reason for pin in gspace.analyze(model).pinned}


def test_frozen_parameters_are_rescaled_and_do_not_count() -> None:
    """Units of a frozen layer can be rescaled but span no direction of the trainable space."""
    model = mlp(5, 7, 6, 3).double()
    model[0].requires_grad_(False)
    found = follow(model)
    assert (found.H, found.m, found.dim) == (13, 7 * 6 + 6 + 6 * 3 + 3, 69 - 6)
    assert not model[0].weight.requires_grad


def test_an_operation_of_another_library_is_not_taken_for_one_of_torch() -> None:
    """Both are named relu."""

    @torch.library.custom_op("gspace_tests::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return torch.tanh(x)

    found = follow(Net(lambda s, x: s.o(relu(s.a(x))), a=nn.Linear(5, 7), o=nn.Linear(7, 3)).double())
    assert found.H == 0
    assert "gspace_tests::relu" in {pin.operation for pin in found.pinned}


def test_sync_batch_norm_is_a_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    found = gspace.analyze(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert (found.H, found.H_absorbed, found.H_paper) == (4, 4, 4)


@pytest.mark.parametrize(("pin", "H"), [("2", 7), (["0", "2"], 0), ("2.weight", 1), ("2.bias", 7)])
def test_pin_ends_a_chain_at_a_module_and_keeps_a_parameter(pin: str, H: int) -> None:
    """A weight that stays gives what it reads and writes one scale. A bias that stays grounds its 6."""
    found = gspace.analyze(mlp(5, 7, 6, 3).double(), pin=pin)
    assert found.H == H
    assert "pin" in {pin.operation for pin in found.pinned}


# Modes and questions --------------------------------------------------------------------------------------------------


def auxiliary(activation: Operation) -> nn.Module:
    """A second head, which training alone runs."""

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return torch.cat([s.o(h), s.aux(activation(h))], 1) if s.training else s.o(h)

    return Net(forward, a=nn.Linear(5, 7), o=nn.Linear(7, 3), aux=nn.Linear(7, 3)).double().eval()


@pytest.mark.parametrize(("activation", "H"), [(torch.tanh, 0), (F.relu, 7)])
def test_a_head_that_only_training_runs_takes_part(activation: Operation, H: int) -> None:
    model = auxiliary(activation)
    found = gspace.analyze(model)
    assert found.H == H
    assert ("tanh" in {pin.operation for pin in found.pinned}) == (H == 0)
    assert not model.training
    assert max(moved(model, normal(6, 5), found).values()) <= EXACT


def asking(net: nn.Module, x: Tensor, c: object = None) -> Tensor:
    h = net.a(x).relu()
    return net.o(h.tanh() if c is None else h * c if isinstance(c, (Tensor, float)) else h + net.b(c["x"][0]))


@pytest.mark.parametrize(
    ("c", "H", "parts"),
    [(None, 0, ""), (2.0, 8, ""), (normal(6, 1), 8, ""), ({"x": [normal(6, 4)]}, 8, "b")],
    ids=["None", "number", "tensor", "container"],
)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_no_tensor_in_an_example_stays_what_it_is(c: object, H: int, parts: str, named: bool) -> None:
    extra = {name: nn.Linear(4, 8) for name in parts}
    net = Net(asking, a=nn.Linear(5, 8), o=nn.Linear(8, 3), **extra).double()
    example = {"x": normal(6, 5), "c": c} if named else (normal(6, 5), c)
    net.forward = partial(asking, net)  # type: ignore[method-assign]
    assert gspace.analyze(net, example).H == H
