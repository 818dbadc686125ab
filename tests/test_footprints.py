"""What the Python of a forward pass asks, keeps, writes and computes on the way is seen by the analysis."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace

TOLERANCE = 1e-12  # float64


class Net(nn.Module):
    """5 → 8 → 3, and whatever `body` does."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.o, self.body = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(8, 3), body
        self.kept: Any = None
        self.double()

    def forward(self, x: Tensor, c: Any = None) -> Any:
        return self.body(self, x, c)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def change(model: nn.Module, inputs: tuple[Any, ...], analysis: gspace.Analysis) -> float:
    """How far a random rescaling, absorbed ones too, moves the output."""
    other = copy.deepcopy(model)
    scales = gspace.random_scales(other, torch.Generator().manual_seed(0), analysis=analysis, absorbed=True)
    gspace.rescale_(other, scales, analysis=analysis)
    with torch.no_grad():
        return float((model(*inputs) - other(*inputs)).abs().max())


# Questions


def conditioned(net: Net, x: Tensor, c: Any, ask: Callable[[Any], bool]) -> Tensor:
    h = net.a(x).relu()
    return net.o(h + net.b(c) if ask(c) else h)


@pytest.mark.parametrize("ask", [lambda c: isinstance(c, Tensor), torch.is_tensor], ids=["isinstance", "is_tensor"])
def test_an_activation_passes_for_a_tensor(ask: Callable[[Any], bool]) -> None:
    net = Net(lambda net, x, c: conditioned(net, x, c, ask))
    both, one = (draw(6, 5), draw(6, 4)), (draw(6, 5),)
    assert gspace.analyze(net, both).H == 0  # the sum pins
    for analysis in (gspace.analyze(net), gspace.analyze(net, one)):
        assert analysis.H == 8
        assert change(net, one, analysis) < TOLERANCE


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x, c: net.o(torch.where(net.a(x) > 0, net.a(x), 0.0)),
        lambda net, x, c: net.o(net.a(x).relu() * torch.as_tensor(x.sum())),
        lambda net, x, c: net.o(net.a(x).relu() * torch.isin(x, x).sum()),
    ],
    ids=["where", "as_tensor", "isin"],
)
def test_an_activation_does_not_pass_for_a_tensor_in_torch(body: Callable[..., Tensor]) -> None:
    net = Net(body)
    for example in (None, draw(6, 5)):
        try:
            analysis = gspace.analyze(net, example)
        except gspace.TraceError:  # a refusal, not a crash
            assert example is None
            continue
        assert change(net, (draw(6, 5),), analysis) < TOLERANCE
    assert isinstance(draw(1), Tensor)
    assert isinstance.__module__ == "builtins"


def test_a_size_does_not_pass_for_a_tensor() -> None:
    net = Net(lambda net, x, c: net.o(net.a(x).tanh() if isinstance(x.size(0), Tensor) else net.a(x).relu()))
    assert gspace.analyze(net).H == 8


@pytest.mark.parametrize("named", [False, True])
def test_what_is_no_tensor_in_an_example_stays_what_it_is(named: bool) -> None:
    net = Net(lambda net, x, c: net.o(net.a(x).tanh() if c is None else net.a(x).relu() * c))
    for c, H in ((None, 0), (2.0, 8), (draw(6, 1), 8)):
        example: Any = {"x": draw(6, 5), "c": c} if named else (draw(6, 5), c)
        assert gspace.analyze(net, example).H == H, c


def test_a_container_in_an_example_is_one() -> None:
    def body(net: Net, batch: Any, c: Any) -> Tensor:
        h = net.a(batch["x"][0]).relu()
        return net.o(h if batch.get("mask") is None else h * batch["mask"])

    for batch in ({"x": [draw(6, 5)]}, {"x": [draw(6, 5)], "mask": draw(6, 1)}):
        assert gspace.analyze(Net(body), (batch,)).H == 8


def test_any_number_of_inputs_needs_an_example() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches, self.o = nn.ModuleList([nn.Linear(5, 8), nn.Linear(5, 8)]), nn.Linear(8, 3)
            self.double()

        def forward(self, *inputs: Tensor) -> Any:
            return self.o(sum(b(x) for b, x in zip(self.branches, inputs, strict=False)).relu())

    with pytest.raises(gspace.TraceError, match="any number of inputs"):
        gspace.analyze(Fused())
    inputs = (draw(6, 5), draw(6, 5))
    assert change(Fused(), inputs, gspace.analyze(Fused(), inputs)) < TOLERANCE


# What is kept


@pytest.mark.parametrize("exported", [False, True], ids=["fx", "export"])
@pytest.mark.parametrize(
    ("keep", "H"),
    [
        (lambda h: h, 0),
        (lambda h: (h,), 0),
        (lambda h: {"l": [h]}, 0),
        (lambda h: deque([h]), 0),
        (lambda h: "a word", 8),
    ],
    ids=["it", "in a tuple", "in a list in a dict", "in a deque", "something else"],
)
def test_an_activation_left_in_an_attribute_is_an_output(keep: Callable[[Any], Any], H: int, exported: bool) -> None:
    def body(net: Net, x: Tensor, c: Any) -> Tensor:
        if exported and x.shape[0] > 1000:  # fx cannot follow that
            x = x[:1000]
        h = net.a(x).relu()
        net.kept = keep(h)
        return net.o(h)

    net = Net(body)
    assert gspace.analyze(net, draw(4, 5)).H == H
    assert net.kept is None


@pytest.mark.parametrize("again", [False, True])
def test_an_activation_is_kept_of_the_trace_that_counts(again: bool) -> None:
    """With `*inputs` a second trace finds out whether two would do."""

    class Variable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o, self.kept = nn.Linear(5, 8), nn.Linear(8, 3), []

        def forward(self, *inputs: Tensor) -> Tensor:
            h = self.a(inputs[0]).relu()
            if again:
                self.kept.append(h)
            (one,) = inputs
            return self.o(h) + 0 * one.sum()

    assert (0 if again else 8) == gspace.analyze(Variable()).H


def test_containers_in_containers_are_left_as_they_were() -> None:
    def body(net: Net, x: Tensor, c: Any) -> Tensor:
        h = net.a(x).relu()
        net.kept["h"].append(h)
        net.kept["last"].append(h)
        return net.o(h)

    net = Net(body)
    net.kept = {"h": [], "last": deque([1], maxlen=1)}
    gspace.analyze(net)
    assert net.kept == {"h": [], "last": deque([1], maxlen=1)}


# What is written


def assigned(k: Tensor, q: Tensor) -> None:
    k.data = k.data * 0.9 + q.data * 0.1


def in_place(k: Tensor, q: Tensor) -> None:
    k.data.mul_(0.9).add_(q.data)


@torch.no_grad()
def without_gradient(k: Tensor, q: Tensor) -> None:
    k.mul_(0.9).add_(q)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("average", [assigned, in_place, without_gradient])
def test_a_forward_pass_that_writes_parameters_is_refused(average: Callable[..., None], example: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                    average(k, q)
            return (self.q(x) * self.k(x)).sum(-1)

    model = Pair()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(gspace.TraceError, match=r"writes into parameter 'k\.weight'"):
        gspace.analyze(model, torch.randn(3, 6) if example else None)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not model.k.weight.requires_grad


# What is computed


@pytest.mark.parametrize(
    "factor",
    [
        lambda net: net.a.state_dict()["weight"].norm(),
        lambda net: float(net.a.state_dict()["weight"].norm()),
        lambda net: net.a.state_dict()["weight"][0, 0],
    ],
    ids=["a norm", "a number", "an entry"],
)
def test_a_constant_made_of_detached_weights_pins_them(factor: Callable[[Net], Tensor]) -> None:
    net = Net(lambda net, x, c: net.o(net.a(x).relu()) * factor(net))
    assert change(net, (draw(6, 5),), gspace.analyze(net)) < TOLERANCE


def test_a_constant_made_of_a_statistic_pins_it() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.o = nn.Linear(5, 8), nn.BatchNorm1d(8, eps=1e-14), nn.Linear(8, 3)
            self.double().eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.n(self.a(x)).relu()) * torch.rsqrt(self.n.running_var + 1e-5).sum()

    assert change(Normed(), (draw(6, 5),), gspace.analyze(Normed())) < TOLERANCE


# Ranks and shapes


class Halves(nn.Module):
    def __init__(self, layer: nn.Module, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.view, self.p, self.q = layer, view, nn.Linear(1, 3), nn.Linear(1, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        halves = self.view(self.layer(x).relu()).chunk(2, -1)
        return self.p(halves[0].sum(-1, keepdim=True)) + self.q(halves[1].sum(-1, keepdim=True))


@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5), (2, 3, 2, 5)])
@pytest.mark.parametrize(
    ("view", "released"),
    [
        (lambda h: h.flatten(1), False),
        (lambda h: h.view(h.size(0), -1), False),
        (lambda h: h.view(h.size(0), 2, -1).transpose(-1, -2).amax(-2), False),
        (lambda h: h.view(-1, 2, h.shape[1] // 2).amax(-1), False),
        (lambda h: h.view(-1, 2, 4).amax(-1), True),
        (lambda h: h.reshape(-1, 8), True),
    ],
    ids=["flatten", "view", "view in two", "view of shape[1]", "view of the end", "reshape"],
)
def test_a_view_of_an_activation_of_unknown_rank_is_not_guessed(
    view: Callable[[Tensor], Tensor], released: bool, shape: tuple[int, ...]
) -> None:
    model = Halves(nn.Linear(5, 8), view)
    analysis = gspace.analyze(model)
    assert (analysis.H > 0) == released
    try:
        model(draw(*shape))
    except RuntimeError:
        return  # such an input it does not accept
    for found in (analysis, gspace.analyze(model, draw(*shape))):
        assert change(model, (draw(*shape),), found) < TOLERANCE


@pytest.mark.parametrize("join", [lambda h, c: h * c, lambda h, c: h / c, lambda h, c: torch.where(c > 1, h, 0)])
def test_a_factor_of_unknown_rank_may_add_dimensions(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Gated(Halves):
        def forward(self, x: Tensor, c: Any = None) -> Tensor:
            halves = join(self.layer(x).relu(), c).flatten(1).chunk(2, -1)
            return self.p(halves[0].sum(-1, keepdim=True)) + self.q(halves[1].sum(-1, keepdim=True))

    class Required(Gated):
        def forward(self, x: Tensor, c: Any) -> Tensor:
            return super().forward(x, c)

    model = Required(nn.Conv2d(3, 4, 1), lambda h: h)
    inputs = (draw(2, 3, 2, 2), draw(5, 1, 1, 1, 1) + 3)
    for analysis in (gspace.analyze(model), gspace.analyze(model, inputs)):
        assert change(model, inputs, analysis) < TOLERANCE


def test_a_sum_has_the_shape_of_both() -> None:
    model = Halves(nn.Conv2d(3, 4, 3), lambda h: (F.adaptive_avg_pool2d(h, 1) + h).permute(0, 2, 3, 1).flatten(1))
    for analysis in (gspace.analyze(model), gspace.analyze(model, draw(2, 3, 4, 4))):
        assert change(model, (draw(2, 3, 4, 4),), analysis) < TOLERANCE


# Examples that cannot be followed on the meta device


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x, c: net.o(net.a(x).relu()[x[:, 0] > -9]),
        lambda net, x, c: net.o(net.a(x).relu().cpu()),
        lambda net, x, c: net.o(net.a(x).relu() * torch.unique(x).sum()),
        lambda net, x, c: net.o(torch.cat([net.a(x).relu()[:, :7], torch.ones(6, 1, dtype=x.dtype)], 1)),
    ],
    ids=["a mask", "cpu", "unique", "a constant"],
)
def test_sizes_that_depend_on_values_do_not_stop_the_analysis(body: Callable[..., Tensor]) -> None:
    net = Net(body)
    analysis = gspace.analyze(net, draw(6, 5))
    assert change(net, (draw(6, 5),), analysis) < TOLERANCE
    with pytest.raises(gspace.TraceError, match="does not accept this example_input"):
        gspace.analyze(net, draw(6, 4))


def test_a_cast_in_an_exported_model_pins_nothing() -> None:
    def body(net: Net, x: Tensor, c: Any) -> Tensor:
        x = x[:1000] if x.shape[0] > 1000 else x
        return net.o(net.a(x).relu().to(torch.float64))

    assert gspace.analyze(Net(body), draw(6, 5)).H == 8
