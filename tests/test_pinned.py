"""What is not a symmetry is pinned, with a reason, and what is left free never changes the function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import gspace
from invariance import rescaling_change
from parts import EXACT, IMAGES, VECTORS, Net
from zoo import mlp

Operation = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """5 → 7, the operation, 7 → 6 → 3: the 7 are pinned if the operation pins, the 6 are always free."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        self.first, self.rest = nn.Linear(5, 7), mlp(7, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.operation(self.first(x)))


@torch.fx.wrap
def squash(x: Tensor) -> Tensor:
    """A function no table knows."""
    return x / (1 + x.abs().sum())


class Saturate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


PINNING: dict[str, tuple[Operation, str]] = {
    "nn.ReLU6": (nn.ReLU6(), "relu6"),
    "F.relu6": (F.relu6, "relu6"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "F.gelu": (F.gelu, "gelu"),
    "nn.SiLU": (nn.SiLU(), "silu"),
    "F.silu in place": (lambda x: F.silu(x, inplace=True), "silu"),
    "nn.Tanh": (nn.Tanh(), "tanh"),
    "x.tanh_()": (lambda x: x.tanh_(), "tanh"),
    "torch.sigmoid": (torch.sigmoid, "sigmoid"),
    "x.softmax": (lambda x: x.softmax(-1), "softmax"),
    "nn.Softmax": (nn.Softmax(-1), "softmax"),
    "nn.LogSoftmax": (nn.LogSoftmax(-1), "log_softmax"),
    "nn.ELU": (nn.ELU(), "elu"),
    "nn.Softplus": (nn.Softplus(), "softplus"),
    "nn.Hardtanh": (nn.Hardtanh(), "hardtanh"),
    "nn.Hardswish": (nn.Hardswish(), "hardswish"),
    "nn.LayerNorm": (nn.LayerNorm(7), "layer_norm"),
    "nn.GroupNorm": (nn.GroupNorm(1, 7), "group_norm"),
    "F.normalize": (F.normalize, "normalize"),
    "nn.AlphaDropout": (nn.AlphaDropout(0.3), "alpha_dropout"),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.3), "feature_alpha_dropout"),
    "threshold with a value": (nn.Threshold(0.0, 0.5), "threshold"),
    "threshold above 0": (lambda x: F.threshold(x, 0.1, 0.0), "threshold"),
    "clamp from above": (lambda x: x.clamp(max=0.5), "clamp"),
    "clamp_ to an interval": (lambda x: x.clamp_(0, 1), "clamp"),
    "x + 1.0": (lambda x: x + 1.0, "add"),
    "1.0 - x": (lambda x: 1.0 - x, "sub"),
    "x.add_(1.0), result unused": (lambda x: (x.add_(1.0), x)[1], "add"),
    "1.0 / x": (lambda x: 1.0 / x, "truediv"),
    "x ** 2": (lambda x: x**2, "pow"),
    "x * x": (lambda x: x * x, "mul"),
    "x * sigmoid(x)": (lambda x: x * torch.sigmoid(x), "sigmoid"),
    "x > 0.1": (lambda x: (x > 0.1) * x, "gt"),
    "noise": (lambda x: x + torch.randn_like(x), "add"),
    "sort of the channels": (lambda x: x.sort(-1).values, "sort"),
    "cumulative sum": (lambda x: x.cumsum(-1), "cumsum"),
    "unknown function": (lambda x: squash(x), "test_pinned.squash"),
    "autograd.Function": (Saturate.apply, "clamp"),
}


@pytest.mark.parametrize("name", PINNING)
def test_an_operation_that_is_not_homogeneous_pins(name: str) -> None:
    operation, canonical = PINNING[name]
    model = Between(operation).double()
    found = gspace.analyze(model)
    assert found.H == 6
    pin = next(pin for pin in found.pinned if pin.operation == canonical)
    assert pin.count == 7
    assert pin.reason
    assert rescaling_change(model, VECTORS, found) < EXACT


KEEPING: dict[str, Operation] = {
    "nn.Threshold(0, 0)": nn.Threshold(0.0, 0.0),
    "clamp from below at 0": lambda x: x.clamp(min=0),
    "clamp_min_": lambda x: x.clamp_min_(0),
    "nn.RReLU": nn.RReLU(),
    "abs": torch.abs,
    "-x": lambda x: -x,
    "0.5 * x": lambda x: 0.5 * x,
    "x / 3": lambda x: x / 3,
    "x.mul_(2.0), result unused": lambda x: (x.mul_(2.0), x)[1],
    "F.relu in place, result unused": lambda x: (F.relu(x, inplace=True), x)[1],
    "dropout": nn.Dropout(0.5),
    "random mask": lambda x: x * torch.rand_like(x),
    "there and back": lambda x: x.unsqueeze(-2).transpose(-1, -2).squeeze(-1).contiguous(),
    "detach": lambda x: x.detach(),
    "torch.jit ignored identity": nn.Identity(),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_homogeneous_operation_keeps_the_units(name: str) -> None:
    model = Between(KEEPING[name]).double()
    found = gspace.analyze(model)
    assert found.H == 13
    assert {pin.operation for pin in found.pinned} <= {"output"}
    assert rescaling_change(model, VECTORS, found) < EXACT


# Models changed from outside


def unknown_hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.tanh()


def prepared(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = mlp(5, 7, 6, 3).double()
    change(model)
    return model


def patch(model: nn.Sequential) -> None:
    layer = model[2]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias).tanh()


CHANGED: dict[str, tuple[Callable[[nn.Sequential], object], int, str]] = {
    # what is done to the MLP 5-7-6-3, the units that stay free, a word of the reason
    "weight_norm, first layer": (lambda m: weight_norm(m[0]), 6, "hook"),
    "weight_norm": (lambda m: weight_norm(m[2]), 0, "hook"),
    "spectral_norm": (lambda m: spectral_norm(m[2]), 0, "hook"),
    "weight_norm, parametrized": (lambda m: parametrizations.weight_norm(m[2]), 0, "parametrized"),
    "weight_norm, parametrized first layer": (lambda m: parametrizations.weight_norm(m[0]), 6, "parametrized"),
    "spectral_norm, parametrized": (lambda m: parametrizations.spectral_norm(m[2]), 0, "parametrized"),
    "orthogonal": (lambda m: parametrizations.orthogonal(m[2]), 0, "parametrized"),
    "pruned weight": (lambda m: prune.l1_unstructured(m[2], "weight", 0.5), 0, "hook"),
    "pruned bias": (lambda m: prune.random_unstructured(m[2], "bias", 0.5), 0, "hook"),
    "forward hook on a layer": (lambda m: m[2].register_forward_hook(unknown_hook), 0, "hook"),
    "forward hook on an activation": (lambda m: m[1].register_forward_hook(unknown_hook), 6, "hook"),
    "forward pre-hook": (lambda m: m[2].register_forward_pre_hook(lambda m, x: (x[0].tanh(),)), 0, "hook"),
    "forward hook on the model": (lambda m: m.register_forward_hook(unknown_hook), 0, "hook"),
    "forward replaced": (patch, 0, "forward"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_changed_from_outside_is_pinned_there(name: str) -> None:
    change, H, word = CHANGED[name]
    model = prepared(change)
    found = gspace.analyze(model)
    assert rescaling_change(model, VECTORS, found) < EXACT
    assert found.H == H
    assert any(word in pin.reason for pin in found.pinned), f"nothing says why: {[str(pin) for pin in found.pinned]}"


def test_a_backward_hook_pins_nothing() -> None:
    assert gspace.analyze(prepared(lambda m: m[2].register_full_backward_hook(lambda *_: None))).H == 13


def test_a_hook_on_every_module_is_seen() -> None:
    def saturate(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output.tanh() if isinstance(module, nn.ReLU) else None

    model = mlp(5, 7, 6, 3).double()
    handle = nn.modules.module.register_module_forward_hook(saturate)
    try:
        assert rescaling_change(model, VECTORS, gspace.analyze(model)) < EXACT
    finally:
        handle.remove()


class AbsoluteWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.abs(), self.bias)


class ShiftedReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.1)


@pytest.mark.parametrize(
    ("model", "H"),
    [
        (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), AbsoluteWeight(7, 6), nn.ReLU(), nn.Linear(6, 3)), 0),
        (nn.Sequential(nn.Linear(5, 7), ShiftedReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)), 6),
    ],
    ids=["of Linear", "of ReLU"],
)
def test_a_subclass_is_not_its_base(model: nn.Module, H: int) -> None:
    found = gspace.analyze(model.double())
    assert found.H == H
    assert rescaling_change(model, VECTORS, found) < EXACT


# Parameters used in several ways


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(1)))


WEIGHTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # a network on 5 numbers (batch of 6), and the units left free
    "decoder is the transposed encoder": (
        lambda: Net(lambda s, x: F.linear(F.relu(F.linear(x, s.w)), s.w.t()), w=parameter(7, 5)),
        0,
    ),
    "transposed by matmul": (lambda: Net(lambda s, x: F.relu(x @ s.w) @ s.w.T, w=parameter(5, 7)), 0),
    "weight also in the output": (
        lambda: Net(lambda s, x: s.o(F.relu(F.linear(x, s.w))) + s.w.sum(), w=parameter(7, 5), o=nn.Linear(7, 3)),
        0,
    ),
    "weight divided by its norm": (
        lambda: Net(lambda s, x: s.o(F.relu(F.linear(x, s.w / s.w.norm()))), w=parameter(7, 5), o=nn.Linear(7, 3)),
        0,
    ),
    "a column of the weight is the bias": (
        lambda: Net(lambda s, x: s.o(F.relu(F.linear(x, s.w, s.w[:, 0]))), w=parameter(7, 5), o=nn.Linear(7, 3)),
        0,
    ),
    "one bias for two layers": (
        lambda: Net(
            lambda s, x: s.o(F.relu(F.linear(F.relu(F.linear(x, s.v, s.b)), s.w, s.b))),
            **{"v": parameter(7, 5), "w": parameter(7, 7), "b": parameter(7), "o": nn.Linear(7, 3)},
        ),
        7,
    ),
    "one value as bias of all channels": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x) + s.b)), a=nn.Linear(5, 7), b=parameter(1), o=nn.Linear(7, 3)),
        0,
    ),
    "one learned factor for all channels": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)) * s.g), a=nn.Linear(5, 7), g=parameter(1), o=nn.Linear(7, 3)),
        7,
    ),
    "a learned factor per channel": (  # its head and its tail are units: 7 + 7
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)) * s.g), a=nn.Linear(5, 7), g=parameter(7), o=nn.Linear(7, 3)),
        14,
    ),
    "γ also in the output": (
        lambda: Net(
            lambda s, x: s.o(F.relu(s.n(s.a(x)))) + s.n.weight.sum(),
            **{"a": nn.Linear(5, 7, bias=False), "n": nn.BatchNorm1d(7), "o": nn.Linear(7, 3)},
        ),
        0,
    ),
    "running mean also added": (
        lambda: Net(
            lambda s, x: s.o(F.relu(s.n(s.a(x))) + s.n.running_mean),
            **{"a": nn.Linear(5, 7, bias=False), "n": nn.BatchNorm1d(7), "o": nn.Linear(7, 3)},
        ),
        0,
    ),
    "one BatchNorm twice": (
        lambda: Net(
            lambda s, x: s.o(F.relu(s.n(s.c(F.relu(s.n(s.a(x))))))),
            **{"a": nn.Linear(5, 7), "c": nn.Linear(7, 7), "n": nn.BatchNorm1d(7), "o": nn.Linear(7, 3)},
        ),
        7,
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_parameter_used_in_several_ways(name: str) -> None:
    build, H = WEIGHTS[name]
    model = build().double()
    found = gspace.analyze(model)
    assert found.H == H
    assert rescaling_change(model, VECTORS, found) < EXACT


UNFOLLOWED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    # a network whose first 7 units only an operation without a rule writes, the operation, the parameter
    "EmbeddingBag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 7), nn.ReLU(), nn.Linear(7, 3)), "EmbeddingBag", "0."),
    "einsum": (
        lambda: Net(lambda s, x: s.o(torch.einsum("bi,ih->bh", x, s.w).relu()), w=parameter(5, 7), o=nn.Linear(7, 3)),
        "einsum",
        "w",
    ),
    "view": (
        lambda: Net(lambda s, x: s.o(F.linear(x, s.w.view(7, 5)).relu()), w=parameter(5, 7), o=nn.Linear(7, 3)),
        "view",
        "w",
    ),
    "GRU": (lambda: Net(lambda s, x: s.o(s.g(x)[0]), g=nn.GRU(5, 7), o=nn.Linear(7, 3)), "GRU", "g.weight_hh"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_no_units_and_nothing_says_why(name: str) -> None:
    build, operation, held = UNFOLLOWED[name]
    found = gspace.analyze(build())
    assert found.H == 0
    pins = [pin for pin in found.pinned if pin.operation == operation and pin.reason.startswith(held)]
    assert len(pins) == 1
    assert pins[0].count > 0


def test_the_slopes_of_a_prelu_are_no_channels_that_are_pinned() -> None:
    assert [pin.operation for pin in gspace.analyze(nn.Sequential(nn.Linear(5, 7), nn.PReLU(7))).pinned] == ["output"]


def test_an_embedding_that_is_also_the_output_layer_is_pinned() -> None:
    model = Net(lambda s, x: F.linear(s.e(x), s.e.weight), e=nn.Embedding(9, 6)).double()
    assert gspace.analyze(model).H == 0


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_tensors_that_share_memory_are_pinned(kind: str) -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x))) + F.linear(x, s.b), a=nn.Linear(5, 7), o=nn.Linear(7, 3)).double()
    shared = model.a.weight.detach()[:3]
    if kind == "parameter":
        model.b = nn.Parameter(shared)
    else:
        model.register_buffer("b", shared)
    found = gspace.analyze(model)
    assert rescaling_change(model, VECTORS, found) < EXACT
    assert "a.weight: shares its memory with b" in {pin.reason for pin in found.pinned}


def test_parameters_side_by_side_in_one_buffer_are_not_pinned() -> None:
    model = mlp(5, 7, 6, 3).double()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    found = gspace.analyze(model)
    assert found.H == 13
    assert rescaling_change(model, VECTORS, found) < EXACT


def test_a_parameter_in_the_gaps_of_another_counts_as_sharing_its_memory() -> None:
    model = mlp(5, 7, 3).double()
    buffer = torch.randn(7, 2, dtype=torch.float64)
    model[0].bias = nn.Parameter(buffer[:, 0])
    model.register_parameter("other", nn.Parameter(buffer[:, 1]))
    assert "0.bias: shares its memory with other" in {pin.reason for pin in gspace.analyze(model).pinned}


# Padding


@pytest.mark.parametrize(
    ("pad", "H"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1), value=1.0), 0),
        (nn.ConstantPad2d(1, 0.5), 0),
        (lambda x: F.pad(x, (1, 1, 1, 1)), 4),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 4),
        (nn.ReplicationPad2d(1), 4),
        (nn.ZeroPad2d(1), 4),
    ],
    ids=["F.pad 1.0", "ConstantPad2d", "F.pad", "F.pad reflect", "ReplicationPad2d", "ZeroPad2d"],
)
def test_padding_with_anything_but_zero_or_itself_pins(pad: Operation, H: int) -> None:
    model = Net(lambda s, x: s.c(s.pad(F.relu(s.a(x)))), a=nn.Conv2d(5, 4, 3), c=nn.Conv2d(4, 2, 3), pad=pad).double()
    found = gspace.analyze(model)
    assert found.H == H
    assert ("pad" in {pin.operation for pin in found.pinned}) == (H == 0)
    assert rescaling_change(model, IMAGES, found) < EXACT


@pytest.mark.parametrize(("value", "H"), [(1.0, 0), (0.0, 4)])
@pytest.mark.parametrize("example", [None, IMAGES], ids=["symbolic", "example"])
def test_the_value_of_constant_pad_nd_is_the_fourth_of_pad_but_its_third(value: float, H: int, example: Any) -> None:
    pad = lambda x: torch.constant_pad_nd(x, (1, 1, 1, 1), value)  # noqa: E731
    model = Net(lambda s, x: s.c(pad(F.relu(s.a(x)))), a=nn.Conv2d(5, 4, 3), c=nn.Conv2d(4, 2, 3)).double()
    found = gspace.analyze(model, example)
    assert found.H == H
    assert rescaling_change(model, IMAGES, found) < EXACT


@pytest.mark.filterwarnings("ignore:.*This overload of")
@pytest.mark.parametrize("residual", ["pin", "tie"])
@pytest.mark.parametrize("example", [None, VECTORS], ids=["symbolic", "example"])
@pytest.mark.parametrize(
    "plus", [lambda x, y: torch.add(x, 2, y), lambda x, y: x.sub(2, y)], ids=["torch.add(x, 2, y)", "x.sub(2, y)"]
)
def test_an_addition_with_the_factor_in_the_middle_pins_both(plus: Any, example: Any, residual: Any) -> None:
    parts = {"a": nn.Linear(5, 7), "b": nn.Linear(5, 7), "o": nn.Linear(7, 3)}
    model = Net(lambda s, x: s.o(plus(F.relu(s.a(x)), F.relu(s.b(x)))), **parts).double()
    found = gspace.analyze(model, example, residual=residual)
    assert found.H == 0
    assert rescaling_change(model, VECTORS, found) < EXACT


# An input of three dimensions, of which a symbolic trace does not know

TOKENS = (torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
TAKEN: dict[str, Operation] = {
    "transpose(0, 1)[-1]": lambda h: h.transpose(0, 1)[-1],
    "transpose(0, 1)[1:]": lambda h: h.transpose(0, 1)[1:],
    "select": lambda h: h.transpose(0, 1).select(0, -1),
    "narrow": lambda h: h.transpose(0, 1).narrow(0, 0, 2),
    "split": lambda h: h.transpose(0, 1).split(1, 0)[0][0],
    "mT[0]": lambda h: h.mT[0].mT,
    "cat, then the first": lambda h: torch.cat([h, -h], 1)[..., :8],
    "flatten, then the second": lambda h: h.flatten(1)[..., 8:16],
    "h[0][-1]": lambda h: h[0][-1],
    "mean(-2)[:2]": lambda h: h.mean(-2)[:2],
    "amax(-2)[0:1]": lambda h: h.amax(-2)[0:1],
    "chunk": lambda h: h.transpose(0, 1).chunk(2, 0)[0],
    "transpose(1, -1) twice": lambda h: (h.transpose(1, -1) @ torch.ones(3, 3, dtype=h.dtype)).transpose(1, -1),
}


@pytest.mark.parametrize("example", [None, TOKENS], ids=["symbolic", "example"])
@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_taken_from_an_activation_of_unknown_rank_is_not_guessed(taken: str, example: Any) -> None:
    parts = {"a": nn.Linear(5, 8), "b": nn.Linear(8, 2)}
    model = Net(lambda s, x: s.b(TAKEN[taken](F.relu(s.a(x)))), **parts).double()
    found = gspace.analyze(model, example)
    assert rescaling_change(model, TOKENS, found) < EXACT


@pytest.mark.parametrize("example", [None, "given"])
def test_layers_across_tokens_and_across_channels_in_turn(example: str | None) -> None:
    """As many tokens as channels: only the rank tells which of them a layer reads."""
    tokens = (torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
    parts = {"a": nn.Linear(5, 8), "tokens": nn.Linear(8, 8), "o": nn.Linear(8, 3)}
    model = Net(lambda s, x: s.o(F.relu(s.tokens(F.relu(s.a(x)).transpose(1, -1)).transpose(1, -1))), **parts).double()
    assert rescaling_change(model, tokens, gspace.analyze(model, tokens if example else None)) < EXACT


def test_an_unsqueeze_says_nothing_about_the_rank() -> None:
    parts = {"a": nn.Linear(5, 8), "o": nn.Linear(8, 3)}
    model = Net(lambda s, x: s.o(F.relu(s.a(x)).unsqueeze(1)).squeeze(1), **parts).double()
    found = gspace.analyze(model)
    assert found.H == 8
    assert rescaling_change(model, VECTORS, found) < EXACT
