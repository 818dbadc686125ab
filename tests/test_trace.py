"""How a model is followed: wrappers, modes, shapes, torch.export, and what cannot be followed at all."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import gspace
from cases import CASES
from invariance import build, draw_inputs, rescaling_change
from parts import EXACT, IMAGES, TOKENS, VECTORS, Net
from zoo import mlp

BY_NAME = {case.name: case for case in CASES}

# Modes


def test_a_head_that_only_training_runs_is_seen() -> None:
    """The auxiliary head reads the 7 through a tanh in training mode alone."""

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.o(h) + s.aux(torch.tanh(h)) if s.training else s.o(h)

    model = Net(forward, a=nn.Linear(5, 7), o=nn.Linear(7, 3), aux=nn.Linear(7, 3)).double().eval()
    found = gspace.analyze(model)
    assert found.H == 0
    assert "tanh" in {pin.operation for pin in found.pinned}
    assert not model.training
    assert rescaling_change(model, VECTORS, found) < EXACT


def test_a_linear_head_that_only_training_runs_takes_part() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return torch.cat([s.o(h), s.aux(h)], 1) if s.training else s.o(h)

    model = Net(forward, a=nn.Linear(5, 7), o=nn.Linear(7, 3), aux=nn.Linear(7, 3)).double().eval()
    found = gspace.analyze(model)
    assert found.H == 7
    assert rescaling_change(model, VECTORS, found) < EXACT


# Wrappers and frozen parameters

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "AveragedModel": AveragedModel,
    "torch.compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "DataParallel inside": lambda model: nn.Sequential(nn.DataParallel(model)),
    "torch.compile inside": lambda model: nn.Sequential(torch.compile(model, backend="eager")),
    "fx.symbolic_trace": torch.fx.symbolic_trace,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_looked_through(name: str) -> None:
    model = WRAPPERS[name](mlp(5, 7, 6, 3)).double()
    found = gspace.analyze(model)
    assert found.H == 13
    assert {edges.name for edges in found.edges} == {name for name, _ in model.named_parameters()}
    assert rescaling_change(model, VECTORS, found) < EXACT


def test_frozen_parameters_are_rescaled_and_do_not_count() -> None:
    """Units of a frozen layer can be rescaled but span no direction of the trainable space."""
    model = mlp(5, 7, 6, 3).double()
    model[0].requires_grad_(False)
    found = gspace.analyze(model)
    assert found.H == 13
    assert found.m == 7 * 6 + 6 + 6 * 3 + 3
    assert found.dim == found.m - 6
    assert rescaling_change(model, VECTORS, found) < EXACT
    assert not model[0].weight.requires_grad


def test_sync_batch_norm_is_a_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    found = gspace.analyze(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert (found.H, found.H_absorbed, found.H_paper) == (4, 4, 4)


def test_pin_ends_a_chain_at_a_module() -> None:
    model = mlp(5, 7, 6, 3).double()
    found = gspace.analyze(model, pin=["2"])
    assert found.H == 7
    assert [(pin.operation, pin.count) for pin in found.pinned if pin.operation != "output"] == [("pin", 6)]
    with pytest.raises(ValueError, match="no module 'layer9'"):
        gspace.analyze(model, pin=["layer9"])


# Shapes: without an example input the rank of an activation may be unknown, and nothing may be guessed from it

SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int]] = {
    # a network, its inputs, and the units found with an example input
    "last token": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x))[:, -1]), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "select": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).select(1, 0)), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "unbind": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).unbind(1)[0]), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "narrow": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).narrow(1, 0, 1).squeeze(1)), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "later tokens": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x))[:, 1:].mean(1)), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "first token of the first sequence": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x))[0, 0]), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "tokens split": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).split(1, 1)[0].mean(1)), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "mean over tokens": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).mean(1)), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "max over tokens": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).max(1)[0]), a=nn.Linear(5, 7), o=nn.Linear(7, 3)),
        TOKENS,
        7,
    ),
    "tokens flattened": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).flatten(1)), a=nn.Linear(5, 7), o=nn.Linear(35, 3)),
        TOKENS,
        7,
    ),
    "tokens joined": (  # one scale for both: 5
        lambda: Net(
            lambda s, x: s.o(torch.cat([F.relu(s.a(x)), F.relu(s.b(x))], 1)),
            **{"a": nn.Linear(5, 5), "b": nn.Linear(5, 5), "o": nn.Linear(5, 3)},
        ),
        TOKENS,
        5,
    ),
    "tokens mixed": (  # the linear layer contracts the tokens, not the units
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).transpose(1, 2)), a=nn.Linear(5, 5), o=nn.Linear(5, 3)),
        TOKENS,
        0,
    ),
    "first token of an embedding": (
        lambda: Net(lambda s, x: s.o(s.e(x)[:, 0]), e=nn.Embedding(9, 7), o=nn.Linear(7, 3)),
        (torch.arange(20).reshape(4, 5) % 9,),
        7,
    ),
    "spatial positions first": (
        lambda: Net(
            lambda s, x: s.o(F.relu(s.a(x)).permute(0, 2, 3, 1).flatten(1)), a=nn.Conv2d(5, 4, 3), o=nn.Linear(64, 3)
        ),
        IMAGES,
        4,
    ),
    "frames folded into the batch": (
        lambda: Net(
            lambda s, x: s.o(F.relu(s.a(x.reshape(-1, 5, 6, 6))).view(x.size(0), -1)),
            **{"a": nn.Conv2d(5, 4, 3), "o": nn.Linear(128, 3)},
        ),
        (torch.randn(3, 2, 5, 6, 6, dtype=torch.float64),),
        4,
    ),
    "view with a constant": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).view(-1, 64)), a=nn.Conv2d(5, 4, 3), o=nn.Linear(64, 3)),
        IMAGES,
        4,
    ),
    "linear layer over the width": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x))), a=nn.Conv2d(5, 4, 3), o=nn.Linear(4, 3)),
        IMAGES,
        0,
    ),
    "pooling over channels": (
        lambda: Net(
            lambda s, x: s.o(F.max_pool1d(F.relu(s.a(x)).unsqueeze(1), 2).squeeze(1)),
            a=nn.Linear(5, 8),
            o=nn.Linear(4, 3),
        ),
        VECTORS,
        0,
    ),
}


# Ranks that a symbolic trace takes for granted, and that only an example input corrects: images come in batches, and
# what a linear layer hands to BatchNorm1d is a matrix.
TAKEN_FOR_GRANTED = {
    "BatchNorm1d over tokens": (  # it normalizes dimension 1, the linear layers act on dimension 2
        lambda: Net(lambda s, x: s.o(F.relu(s.n(s.a(x)))), a=nn.Linear(5, 5), n=nn.BatchNorm1d(5), o=nn.Linear(5, 3)),
        TOKENS,
        0,
    ),
    "BatchNorm1d first": (
        lambda: Net(lambda s, x: s.o(F.relu(s.n(x))), n=nn.BatchNorm1d(5), o=nn.Linear(5, 3)),
        TOKENS,
        0,
    ),
    "unbatched image": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x)).flatten(1)), a=nn.Conv2d(5, 8, 3), o=nn.Linear(16, 3)),
        (IMAGES[0][0],),
        0,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_symbolic_trace_guesses_no_shape(name: str) -> None:
    build, inputs, _ = SHAPES[name]
    model = build().double()
    assert rescaling_change(model, inputs, gspace.analyze(model)) < EXACT


@pytest.mark.parametrize("name", [*SHAPES, *TAKEN_FOR_GRANTED])
def test_an_example_input_tells_the_shapes(name: str) -> None:
    build, inputs, H = {**SHAPES, **TAKEN_FOR_GRANTED}[name]
    model = build().double()
    found = gspace.analyze(model, inputs)
    assert found.H == H
    assert rescaling_change(model, inputs, found) < EXACT


# torch.export, where symbolic tracing stops


class Exported(nn.Module):
    """Asks for the size of the batch, which no symbolic trace knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs[0].shape[0] == 0:
            raise ValueError("an empty batch")
        return self.model(*inputs)


EXPORTED = (
    *(
        "mlp",
        "prelu",
        "mlp-bn",
        "bn-no-affine",
        "lenet",
        "resnet-small-tie",
        "mobilenet-v2",
        "unet",
        "transformer-torch",
    ),
    *("gated", "tied-weights", "recurrent", "siamese", "conv1d", "conv3d", "functional-tie", "embedding", "separable"),
    *("masked", "signs"),
)


@pytest.mark.parametrize("name", EXPORTED)
def test_export_finds_what_symbolic_tracing_finds(name: str) -> None:
    """The operations have other names there (a BatchNorm is one of aten), the symmetry is the same."""
    case = BY_NAME[name]
    model = Exported(build(case))
    found = gspace.analyze(model, draw_inputs(case, 0, torch.float64, batch=4), residual=case.residual)
    assert (found.H, found.H_absorbed, found.H_paper, found.dim) == (case.H, case.H_absorbed, case.H_paper, case.dim)
    assert rescaling_change(model, draw_inputs(case, 1, torch.float64), found) < EXACT


def test_pin_is_heeded_in_an_exported_graph() -> None:
    found = gspace.analyze(Exported(mlp(5, 7, 6, 3)), torch.randn(2, 5), pin=["model.2"])
    assert found.H == 7


# What cannot be traced


class Branch(nn.Module):
    """`wanted` chooses the condition of a branch."""

    def __init__(self, wanted: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.wanted = wanted
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        if self.wanted(h):
            h = 2 * h
        return self.last(h)


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    model = Branch(lambda h: h.sum() > 0).double()
    with pytest.raises(gspace.TraceError, match=r"(?s)test_trace\.py.*if self\.wanted\(h\).*example_input"):
        gspace.analyze(model)
    with pytest.raises(gspace.TraceError, match=r"(?s)test_trace\.py.*branch"):
        gspace.analyze(model, VECTORS)


def test_a_branch_on_a_shape_is_followed_along_an_example() -> None:
    model = Branch(lambda h: h.shape[0] > 2).double()
    with pytest.raises(gspace.TraceError, match="example_input"):
        gspace.analyze(model)
    found = gspace.analyze(model, VECTORS)
    assert found.H == 7
    assert {edges.name for edges in found.edges} == {name for name, _ in model.named_parameters()}
    assert rescaling_change(model, VECTORS, found) < EXACT


def test_an_example_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(gspace.TraceError, match="example_input"):
        gspace.analyze(mlp(5, 7, 3), torch.randn(2, 4))


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(gspace.TraceError, match="one batch"):
        gspace.analyze(nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 3)))


def test_the_model_is_left_as_it_was() -> None:
    """Tracing restores modes, draws no random numbers, runs no BatchNorm and leaves no attribute behind."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(), nn.Linear(7, 3))
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    for example in (None, VECTORS[0].float()):
        gspace.analyze(model, example)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# What the forward pass writes


class Writes(nn.Module):
    """Follows the mean of its inputs, and leaves activations in attributes."""

    def __init__(self, *, feature: bool, carried: bool) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("mean", torch.ones(5))
        self.feature, self.carried = feature, carried
        self.log: list[Tensor] = []
        self.seen: dict[str, Tensor] = {}
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        h = F.relu(self.a(x - self.mean))
        if self.feature:
            self.last = h
            self.log.append(h.mean())
            self.seen["h"] = h
        if self.carried:
            h = h if self.state is None else h + self.state
            self.state = h.detach()
        return self.o(h)


@pytest.mark.parametrize("example", [None, VECTORS], ids=["symbolic", "example"])
@pytest.mark.parametrize("feature", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_tracing_leaves_the_model_as_it_was(feature: bool, carried: bool, example: Any) -> None:
    model = Writes(feature=feature, carried=carried).double().eval()
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    found = gspace.analyze(model, example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert (model.log, model.seen, model.state) == ([], {}, None)
    pickle.dumps(model)
    expected = 0 if feature or carried else 7  # what an attribute holds is read by others
    assert expected == found.H
    model.mean[0] = math.nan
    gspace.analyze(model, example)
    assert model.mean.isnan().tolist() == [True, False, False, False, False]


BUFFERS: dict[str, Callable[[], Tensor | None]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0),
    "meta": lambda: torch.empty(3, device="meta"),
    "none": lambda: None,
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("kind", [*BUFFERS, "inference"])
@pytest.mark.parametrize("example", [None, VECTORS], ids=["symbolic", "example"])
def test_buffers_of_every_kind_are_no_obstacle(kind: str, example: Any) -> None:
    model = mlp(5, 6, 3).double()
    with torch.inference_mode(kind == "inference"):
        model.register_buffer("held", BUFFERS.get(kind, lambda: torch.ones(3))())
    assert gspace.analyze(model, example).H == 6


def test_an_analysis_of_the_model_inside_a_wrapper_is_of_another_model() -> None:
    model = mlp(5, 6, 3)
    with pytest.raises(ValueError, match="a wrapped model is another one"):
        gspace.GSGD(nn.DataParallel(model), 0.1, analysis=gspace.analyze(model))


@pytest.mark.parametrize("example", [(8, 5), (torch.ones(2, 5), torch.ones(2, 5)), {"y": torch.ones(2, 5)}])
def test_an_example_that_forward_does_not_take_is_named(example: Any) -> None:
    with pytest.raises(gspace.TraceError, match="forward does not take this example_input: "):
        gspace.analyze(mlp(5, 6, 3), example)


def test_a_model_compiled_in_place_is_looked_through_and_stays_compiled() -> None:
    model = mlp(5, 6, 3)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    assert compiled is not None
    assert gspace.analyze(model).H == 6
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
def test_what_has_no_forward_to_follow_is_said(known: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    example = x if known else None
    with pytest.raises(gspace.TraceError, match="TorchScript module cannot be followed"):
        gspace.analyze(torch.jit.trace(model, x), example)
    with pytest.raises(gspace.TraceError, match="ModuleList has no forward"):
        gspace.analyze(nn.ModuleList([model]), example)
