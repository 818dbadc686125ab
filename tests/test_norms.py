"""Path norms against enumeration, their invariance and gradients; the basis-path norm and its penalty."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dense
import gspace
import zoo
from cases import CASES, Case, slow_above
from gspace.analysis.operations import TABLE
from gspace.optim.coordinates import basis_values, coordinates, displaced, unflatten
from gspace.optim.gsgd import GSGD
from gspace.paths.explicit import odot
from gspace.paths.norms import BasisPathPenalty, basis_path_norm, path_norm
from gspace.paths.pathsum import PathError, path_graph
from invariance import build, draw_inputs, randomize_
from parts import Net
from programs import WRITES
from unrolled import SMALL, Small, enumerated

# What has no path sum: operations that are not positively homogeneous, attention, products of activations.
REFUSED = {
    **dict.fromkeys(("mobilenet-relu6", "mobilenet-v2", "mobilenet-v2-tie"), r"\(ReLU6\), hardtanh"),
    **dict.fromkeys(("transformer", "transformer-example"), "layer_norm"),
    "transformer-torch": r"\(MultiheadAttention\), bmm: it multiplies two activations",
    "gated": "two activations",
    "signs": "depends on the input",
}


def small(kind: type[Small]) -> Small:
    """One of the networks of `unrolled`, float64, running statistics and all weights away from 0 and 1."""
    model = randomize_(kind(), 0).double()
    x = torch.randn(16, *kind.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.train()(x)
    return model.eval()


# All paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 1.5, 16])
@pytest.mark.parametrize("kind", SMALL)
def test_path_norm_is_the_sum_over_enumerated_paths(kind: type[Small], p: float) -> None:
    model = small(kind)
    norm = path_norm(model, p, example_input=torch.zeros(2, *kind.shape).double())
    expected = enumerated(model, model.unrolled()).total(p) ** (1 / p)
    torch.testing.assert_close(norm.value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [1, 2, 16])
@pytest.mark.parametrize("kind", SMALL)
def test_gradients_of_the_path_norm_are_those_of_the_enumerated_sum(kind: type[Small], p: int) -> None:
    model = small(kind)
    parameters = list(model.parameters())
    found = torch.autograd.grad(path_norm(model, p, example_input=torch.zeros(2, *kind.shape).double()).log, parameters)
    expected = torch.autograd.grad(enumerated(model, model.unrolled()).total(p).log() / p, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_phase_of_complex_weights_does_not_count() -> None:
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False, dtype=torch.complex128) for sizes in ((3, 4), (4, 2))))
    real = gspace.path_norm(model)
    with torch.no_grad():
        model[0].weight *= 1j
    assert real.log.isfinite()
    torch.testing.assert_close(gspace.path_norm(model).log, real.log)


def test_gradients_of_the_path_norm_match_finite_differences() -> None:
    case = next(c for c in CASES if c.name == "functional")
    model = build(case)
    graph = path_graph(model, draw_inputs(case, 0, torch.float64))
    weights = list(model.parameters())
    generator = torch.Generator().manual_seed(3)
    step = 1e-6
    for p in (1, 2):
        grads = torch.autograd.grad(path_norm(model, p, graph=graph).log, weights)
        for w, grad in zip(weights, grads, strict=True):
            direction = torch.randn(w.shape, generator=generator, dtype=w.dtype)
            with torch.no_grad():
                w.add_(step * direction)
                ahead = path_norm(model, p, graph=graph).log
                w.sub_(2 * step * direction)
                behind = path_norm(model, p, graph=graph).log
                w.add_(step * direction)
            slope = (ahead - behind) / (2 * step)
            torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-6, atol=1e-8)  # central differences


@pytest.mark.parametrize("case", slow_above(12_000))
def test_path_norm_does_not_change_under_rescaling(case: Case) -> None:
    model, inputs = build(case), draw_inputs(case, 0, torch.float64, batch=2)
    analysis = gspace.analyze(model, inputs, residual=case.residual)
    if case.name in REFUSED:
        with pytest.raises(PathError, match=REFUSED[case.name]):
            path_norm(model, example_input=inputs)
        return
    graph = path_graph(model, inputs)
    before = [path_norm(model, p, graph=graph).log.detach() for p in (1, 2)]
    scales = gspace.random_scales(model, torch.Generator().manual_seed(5), analysis=analysis)
    gspace.rescale_(model, scales, analysis=analysis)
    after = [path_norm(model, p, graph=graph).log.detach() for p in (1, 2)]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    if analysis.H and case.residual == "pin":  # and the number is not blind: half a rescaling changes it
        name = next(e.name for e in analysis.edges if bool((e.head == 1).any()))
        with torch.no_grad():
            edges = next(e for e in analysis.edges if e.name == name)
            edges.view(dict(model.named_parameters())[name])[edges.head == 1] *= 2
        assert abs(float(path_norm(model, 1, graph=graph).log.detach() - before[0])) > 1e-6


def plain(depth: int, width: int, dtype: torch.dtype) -> nn.Sequential:
    """He-initialised convolutions of one width: a path norm beyond the range of any float."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in pairwise([3, *[width] * (depth - 1)]):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return randomize_(model, 0).to(dtype)


@pytest.mark.parametrize("p", [1, 2])
def test_a_plain_network_of_250_layers_has_a_finite_and_right_logarithm_in_float32(p: int) -> None:
    x = torch.zeros(2, 3, 8, 8)
    single, double = plain(250, 8, torch.float32), plain(250, 8, torch.float64)
    norm = path_norm(single, p, example_input=x)
    reference = path_norm(double, p, example_input=x.double())
    assert norm.log.dtype == torch.float32
    if p == 1:
        assert float(norm.value.detach()) == math.inf  # it does not fit, its logarithm does
    # 250 layers of float32 roundings, some 1e-7 each, against a logarithm of several hundred.
    torch.testing.assert_close(norm.log.double(), reference.log, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(norm.log, list(single.parameters()))
    expected = torch.autograd.grad(reference.log, list(double.parameters()))
    largest = max(float(e.abs().max()) for e in expected)
    for g, e in zip(grads, expected, strict=True):
        # Relative to the largest gradient: those of early biases are below 1e-40 of it.
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-6 * largest)


def test_the_logarithm_at_250_layers_is_that_of_a_product_of_matrices() -> None:
    """The same sum by other means: log of a vector norm, renormalized by hand in float64."""
    torch.manual_seed(0)
    model = zoo.mlp(*[12] * 251, bias=False)
    log, x = 0.0, torch.ones(12, dtype=torch.float64)
    for layer in model:
        if isinstance(layer, nn.Linear):
            x = layer.weight.detach().double().abs() @ x
            log, x = log + float(x.sum().log()), x / x.sum()
    assert float(path_norm(model, 1).log.detach()) == pytest.approx(log, rel=1e-6)


def test_average_pooling_counts_as_the_convolution_it_is() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 3, 3, 2, groups=3, bias=False)
    with torch.no_grad():
        convolution.weight.fill_(1 / 9)
    head = (nn.Flatten(), nn.Linear(12, 2))
    x = torch.zeros(2, 3, 5, 5)
    for p in (1, 2):
        pooled, convolved = (nn.Sequential(layer, *head) for layer in (nn.AvgPool2d(3, 2), convolution))
        torch.testing.assert_close(
            path_norm(pooled, p, example_input=x).log, path_norm(convolved, p, example_input=x).log, rtol=1e-6, atol=0
        )


def test_with_positive_weights_the_sum_is_the_network_itself_on_ones() -> None:
    """Transposed, grouped and dilated convolutions and pads, all coefficients positive; p by powers of weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2),
        nn.LeakyReLU(0.5),
        nn.Conv2d(6, 4, 3, 2, 2, 2, groups=2),
        nn.PReLU(4),
        nn.ConvTranspose2d(4, 2, (2, 3), (1, 2), dilation=2),
        nn.ReplicationPad2d(1),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.ZeroPad2d(1),
        nn.Flatten(2),
        nn.Linear(640, 3),
    ).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.abs_()
        model[3].weight.fill_(1)
    x, graph = torch.ones(1, 4, 5, 5).double(), path_graph(model, torch.zeros(2, 4, 5, 5))
    for p in (1, 2, 7):
        raised = copy.deepcopy(model)
        with torch.no_grad():
            for weight in raised.parameters():
                weight.pow_(p)
        found = path_norm(model, p, graph=graph).log * p
        torch.testing.assert_close(found, raised(x).sum().log(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_counts_with_its_coefficients(mode: str) -> None:
    up = partial(F.interpolate, scale_factor=2, mode=mode)
    model = nn.Sequential(nn.Upsample(scale_factor=2, mode=mode))
    model.register_parameter("unused", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    basis = torch.eye(12, dtype=torch.float64).reshape(12, 1, 3, 4)
    coefficients = up(basis)
    for p in (1, 2):
        norm = path_norm(model, p, example_input=torch.zeros(2, 1, 3, 4))
        torch.testing.assert_close(norm.value, coefficients.abs().pow(p).sum() ** (1 / p), rtol=1e-12, atol=0)


REFUSALS = {
    "hardtanh": nn.ReLU6(),
    "gelu": nn.GELU(),
    "native_layer_norm": nn.LayerNorm(4),
    "native_batch_norm": nn.BatchNorm1d(4, track_running_stats=False),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_homogeneous_is_refused_with_its_place_and_reason(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), REFUSALS[name], nn.Linear(4, 2))
    with pytest.raises(PathError, match=rf"'1' \({type(REFUSALS[name]).__name__}\), {name}: it "):
        path_norm(model)


@pytest.mark.parametrize("constant", [1.0, -50.0, 0.3])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_constant_beside_activations_is_a_path_from_ground(constant: float, p: int) -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.b(torch.cat([h, torch.full_like(h[:, :1], constant)], 1))

    model = Net(forward, a=nn.Linear(3, 4, bias=False), b=nn.Linear(5, 2, bias=False)).double()
    x = torch.ones(2, 3).double()
    inner, outer = (w.detach().abs() ** p for w in (model.a.weight, model.b.weight))
    expected = (outer[:, :4] @ inner).sum() + outer[:, 4].sum() * abs(constant) ** p
    torch.testing.assert_close(path_norm(model, p, example_input=x).value ** p, expected, rtol=1e-12, atol=0)
    scales = torch.tensor([10.0, 0.1, 5.0, 3.0])
    scaled = gspace.rescale_(copy.deepcopy(model), scales, example_input=x)
    torch.testing.assert_close(path_norm(scaled, p, example_input=x).value ** p, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("constant", [torch.tensor([[3, 5]]), torch.tensor([[True, False]])], ids=["int", "bool"])
def test_integers_beside_activations_are_paths_too(constant: Tensor) -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        return s.b(torch.cat([F.relu(s.a(x)), s.c.expand(x.shape[0], -1)], 1))

    model = Net(forward, a=nn.Linear(4, 6, bias=False), b=nn.Linear(8, 3, bias=False)).double()
    model.register_buffer("c", constant)
    inner, outer = (w.detach().square() for w in (model.a.weight, model.b.weight))
    expected = (outer @ torch.cat([inner.sum(1), constant[0].double().square()])).sum()
    found = path_norm(model, 2, example_input=torch.ones(2, 4).double()).value ** 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_zeros_beside_small_activations_do_not_hide_them() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = s.a(x)
        return s.b(torch.cat([h, h.new_zeros(len(x), 2)], 1))

    body = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(4, 4, bias=False), nn.ReLU())])
    model = Net(forward, a=body, b=nn.Linear(6, 2, bias=False))
    for p in model.parameters():
        nn.init.uniform_(p, 1e-3, 2e-3)
    double = copy.deepcopy(model).double()
    found, expected = (path_norm(m, example_input=torch.ones(2, 4)).log.detach() for m in (model, double))
    assert float(expected) < -60
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_a_sample_of_another_rank_is_guessed() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return s.b(F.relu(s.a(x.reshape(batch * tokens, width))).reshape(batch, tokens, 7).mean(1))

    model = Net(forward, a=nn.Linear(5, 7), b=nn.Linear(7, 3))
    guessed, given = (path_norm(model, 1, example_input=x).log for x in (None, torch.zeros(2, 7, 5)))
    torch.testing.assert_close(guessed, given)


def differences(s: nn.Module, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    return s.o(F.relu(s.b(torch.cat([h[:, :1], h[:, 1:] - h[:, :-1]], 1))))


def test_a_model_that_asks_for_vectors_needs_no_example() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        torch._assert(x.dim() == 2, "expected (batch, features)")
        return s.o(F.relu(s.a(x)).flip(1))

    model = Net(forward, a=nn.Linear(5, 6), o=nn.Linear(6, 3)).double()
    torch.testing.assert_close(path_norm(model).log, path_norm(model, example_input=torch.zeros(2, 5).double()).log)


@pytest.mark.parametrize(
    "forward",
    [
        differences,
        lambda s, x: s.o(s.b(F.relu(s.a(x)).flip(1))),
        lambda s, x: s.o(s.b(F.relu(s.a(torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1))))),
        lambda s, x: s.o(F.relu(s.b(s.a(x)))).mean(1),
    ],
    ids=["differences", "flip", "differences of the input", "mean"],
)
def test_the_sum_over_sequences_does_not_change_under_rescaling(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 6), o=nn.Linear(6, 3)).double()
    x = torch.randn(4, 7, 5).double()
    found = gspace.analyze(model, x, residual="tie")
    before = path_norm(model, example_input=x).log
    scales = gspace.random_scales(model, torch.Generator().manual_seed(1), analysis=found)
    gspace.rescale_(model, scales, analysis=found)
    assert found.H
    torch.testing.assert_close(path_norm(model, example_input=x).log, before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.o(F.relu(s.b(F.relu(s.a(x.flatten(1)))))),
        lambda s, x: s.o(F.relu(s.b(s.n(s.a(x))))),
        lambda s, x: s.o(s.slopes(s.b(s.a(x.view(x.size(0), -1))))),
        lambda s, x: s.o(s.slopes(s.a(x))),
        lambda s, x: s.wide(torch.cat([s.a(x), s.b(s.a(x))], 1)),
        lambda s, x: s.narrow(s.a(x).relu().chunk(2, 1)[1]),
        lambda s, x: s.o(s.b(s.a(x)).softmax(1) if s.training else s.b(s.a(x))),
    ],
    ids=["flatten", "BatchNorm", "view", "PReLU", "cat", "chunk", "another branch in training"],
)
def test_a_model_of_vectors_needs_no_example(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(5, 6), "b": nn.Linear(6, 6), "n": nn.BatchNorm1d(6), "o": nn.Linear(6, 3)}
    model = Net(forward, **parts, slopes=nn.PReLU(6), wide=nn.Linear(12, 3), narrow=nn.Linear(3, 3))
    before = torch.random.get_rng_state()
    found, expected = path_norm(model).log, path_norm(model, example_input=torch.zeros(2, 5)).log
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_input_that_cannot_be_guessed_is_asked_for() -> None:
    with pytest.raises(gspace.TraceError, match="pass example_input="):
        path_norm(Net(lambda s, x, y: s.a(x) + s.b(y), a=nn.Linear(3, 2), b=nn.Linear(4, 2)))


def test_a_hook_is_a_part_of_the_model() -> None:
    model = zoo.mlp(3, 4, 2)
    before = path_norm(model, 1).log
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(path_norm(model, 1).log, before + math.log(2))


def test_p_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        path_norm(zoo.mlp(3, 4, 2), 0.5)


def test_an_addition_in_place_reaches_later_readers() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.add_(self.b(x))
            return y

    class Plain(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    one, other = InPlace(), Plain()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(path_norm(one).log, path_norm(other).log)


class WritesThroughAView(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b, self.again = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False), again

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        half = y[:, :2]
        half.add_(self.b(x))
        return y if self.again else half


def test_a_write_through_a_view_is_followed() -> None:
    model = WritesThroughAView(again=True).double()
    a, b = (w.detach().abs().sum(1) for w in (model.a.weight, model.b.weight))
    torch.testing.assert_close(path_norm(model, 1).value, a.sum() + b.sum(), rtol=1e-12, atol=0)
    model.again = False
    torch.testing.assert_close(path_norm(model, 1).value, a[:2].sum() + b.sum(), rtol=1e-12, atol=0)


def test_max_pooling_that_returns_its_indices_is_the_same_pooling() -> None:
    class Pooled(nn.Module):
        def __init__(self, pool: nn.Module) -> None:
            super().__init__()
            self.pool, self.head = pool, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.pool(x)
            return self.head((y[0] if self.pool.return_indices else y).flatten(1))

    torch.manual_seed(0)
    x = torch.zeros(2, 1, 4, 4)
    for pool in (partial(nn.MaxPool2d, 2), partial(nn.AdaptiveMaxPool2d, 2)):
        models = [Pooled(pool(return_indices=flag)) for flag in (True, False)]
        models[1].load_state_dict(models[0].state_dict())
        logs = [path_norm(m, example_input=x).log for m in models]
        torch.testing.assert_close(logs[0], logs[1])


def shuffled(x: Tensor) -> Tensor:
    b, c, h, w = x.size()
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)


def test_a_channel_shuffle_by_views_has_a_path_sum() -> None:
    """The first layer's outputs in another order: the sum with the second layer's columns in that order."""
    torch.manual_seed(0)
    x = torch.zeros(2, 3, 4, 4).double()
    parts = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 2, 1)}
    model = Net(lambda s, x: s.b(shuffled(s.a(x).relu())), **parts).double()
    order = shuffled(torch.arange(8.0).reshape(1, 8, 1, 1)).flatten().long()
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)).double()
    plain.load_state_dict({f"{i}.{k}": v for i, m in ((0, model.a), (2, model.b)) for k, v in m.state_dict().items()})
    with torch.no_grad():
        plain[2].weight.copy_(model.b.weight[:, order.argsort()])
    for p in (1, 2):
        found, expected = path_norm(model, p, example_input=x).log, path_norm(plain, p, example_input=x).log
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gspace.PathSGD(model, example_input=x)


def test_a_model_that_fails_on_its_input_says_so() -> None:
    model = Net(lambda s, x: s.b(s.a(x).view(-1, 5)), a=nn.Linear(3, 4), b=nn.Linear(5, 2))
    with pytest.raises(gspace.TraceError, match=r"does not accept this example_input: RuntimeError: shape"):
        path_norm(model, example_input=torch.zeros(2, 3))


class FromConstant(nn.Module):
    """A recurrent network that starts at a constant of its own, or at a given state."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.step, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        h = x.new_ones(x.shape[0], 6) if h is None else h
        for t in range(3):
            h = F.relu(self.read(x[:, t]) + F.relu(self.step(h)))
        return self.out(h)


def test_a_recurrent_network_that_starts_at_a_constant_has_a_path_sum() -> None:
    """Ones count as the input of ones that a path sum is taken at."""
    torch.manual_seed(0)
    model = FromConstant().double()
    x, h = torch.zeros(2, 3, 4), torch.zeros(2, 6)
    for p in (1, 2):
        found, expected = (path_norm(model, p, example_input=inputs).log for inputs in (x, (x, h)))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gspace.PathSGD(model, example_input=x)


class Products(nn.Module):
    """Two linear maps without bias, written in several ways."""

    def __init__(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))
        self.body = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.one, self.two)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, a, b: (x @ a).relu() @ b,
        lambda x, a, b: torch.einsum("nj,jk->nk", torch.einsum("ni,ij->nj", x, a).relu(), b),
        lambda x, a, b: torch.bmm(torch.bmm(x[:, None], a.expand(len(x), 3, 4)).relu(), b.expand(len(x), 4, 2)),
        lambda x, a, b: F.linear(F.linear(x, a.t()).relu(), b.mT),
        lambda x, a, b: ((x[..., None] * a).sum(1).relu()[..., None] * b).sum(1),
        lambda x, a, b: torch.cat([(x @ a[:, :1]).relu(), (x @ a[:, 1:]).relu()], 1) @ b,
        lambda x, a, b: torch.stack([(x @ a).relu() @ column for column in b.unbind(1)], 1),
        lambda x, a, b: torch.addmm(x.new_zeros(2), (x @ (0.5 * a)).relu(), b, alpha=2),
    ],
    ids=["matmul", "einsum", "bmm", "linear", "sum of products", "slices", "columns", "factors"],
)
def test_weights_in_products_of_every_kind_are_edges(body: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Products(body).double()
    for p in (1, 2, 7):
        expected = (model.one.abs().pow(p) @ model.two.abs().pow(p)).sum()
        found = path_norm(model, p, example_input=torch.zeros(5, 3)).log * p
        torch.testing.assert_close(found, expected.log(), rtol=1e-12, atol=1e-12)


def test_a_graph_convolution_counts_its_adjacency() -> None:
    torch.manual_seed(0)
    adjacency = torch.rand(5, 5).double()
    model = Net(lambda s, x: s.b(s.adjacency @ F.relu(s.adjacency @ s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    model.double().register_buffer("adjacency", adjacency)
    power = adjacency.square()
    h = power @ (model.a.weight.square().sum(1) + model.a.bias.square()).expand(5, 4)
    expected = (power @ h @ model.b.weight.square().t() + model.b.bias.square()).sum()
    found = path_norm(model, 2, example_input=torch.zeros(2, 5, 3)).value ** 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [1, 2, 6])
def test_a_relu_rnn_has_the_sum_of_the_loop_it_is(p: int) -> None:
    torch.manual_seed(0)
    model = nn.RNN(3, 4, nonlinearity="relu", batch_first=True).double()
    w, u, b, c = (t.detach().abs().pow(p) for t in model.parameters())
    h, total = torch.zeros(4).double(), torch.tensor(0.0).double()
    for _ in range(5):
        h = w.sum(1) + b + u @ h + c
        total += h.sum()
    norm = path_norm(model, p, example_input=torch.zeros(2, 5, 3))
    torch.testing.assert_close(norm.log * p, (total + h.sum()).log(), rtol=1e-12, atol=0)  # outputs, and the last state


def test_entries_written_one_after_the_other_are_those_of_the_whole() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        out = torch.empty(len(x), 3, 4, dtype=x.dtype)
        for k in range(3):
            out[:, k] = s.a(x).relu()
        out[:, 1].mul_(3)
        out[:, 2].zero_()
        return s.b(out)

    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2, bias=False)).double()
    first = model.a.weight.abs().sum(1) + model.a.bias.abs()
    expected = (1 + 3 + 0) * (model.b.weight.abs() @ first).sum()
    for p in (1, 5):
        if p == 5:
            powers = [t.abs() ** 5 for t in (model.a.weight, model.a.bias, model.b.weight)]
            expected = (1 + 3**5) * (powers[2] @ (powers[0].sum(1) + powers[1])).sum()
        norm = path_norm(model, p, example_input=torch.zeros(2, 3))
        torch.testing.assert_close(norm.log * p, expected.log(), rtol=1e-12, atol=0)


def test_a_draw_on_a_path_is_refused() -> None:
    with pytest.raises(PathError, match="it depends on chance"):
        path_norm(Net(lambda s, x: s.b(F.dropout(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)))


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h / float(h.abs().max()),
        lambda h: h[:, : int(h.argmax())],
        lambda h: h + torch.from_numpy(h.detach().numpy()),
        lambda h: h * h.tolist()[0][0],
    ],
    ids=["float", "index", "numpy", "list"],
)
def test_values_that_are_read_are_refused(read: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PathError, match=r"its values are read outside|chosen depends on the input"):
        path_norm(Net(lambda s, x: read(s.a(x)), a=nn.Linear(3, 4)))


def test_what_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got NoneType"):
        path_norm(None)  # type: ignore[arg-type]


def test_a_graph_runs_the_model_once_and_follows_its_weights_and_statistics() -> None:
    runs = []

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        runs.append(len(x))
        return s.b(s.n(s.a(x)).relu())

    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(3, 4), n=nn.BatchNorm1d(4), b=nn.Linear(4, 2)).double()
    graph = path_graph(model, torch.zeros(5, 3))
    assert runs == [1]
    first = path_norm(model, graph=graph).log
    for change in (lambda: model(torch.randn(9, 3).double()), lambda: nn.init.normal_(model.a.weight)):
        change()
        second = path_norm(model, graph=graph).log
        assert abs(float((second - first).detach())) > 1e-3
        torch.testing.assert_close(second, path_norm(model, example_input=torch.zeros(5, 3)).log)
        first = second
    assert not any(p.grad is not None for p in model.parameters())


def test_a_copied_or_pickled_graph_is_that_of_the_copy() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.ZeroPad1d(2), nn.MaxPool1d(2), nn.Conv1d(4, 2, 1)
    )
    graph = path_graph(model, torch.zeros(2, 2, 8))
    before = path_norm(model, graph=graph).log
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        with torch.no_grad():
            other.model[0].weight.mul_(3)
        assert float((path_norm(other.model, graph=other).log - before).detach()) > 0.1
        torch.testing.assert_close(path_norm(model, graph=graph).log, before, rtol=0, atol=0)


def test_no_operation_has_two_rows() -> None:
    names = [name for row, _, _ in TABLE for name in row.split(" ")]
    assert len(names) == len(set(names))


# Basis paths ---------------------------------------------------------------------------------------------------------


def small_basis(case: dense.Small, reference: str) -> tuple[dense.Explicit, gspace.Analysis]:
    explicit = dense.explicit(case, choice="aligned" if reference == "one" else "pivoted")
    return explicit, explicit.analysis


@pytest.mark.parametrize("reference", ["one", "balanced"])
@pytest.mark.parametrize("case", dense.SMALL, ids=lambda case: case.name)
def test_path_values_are_those_of_the_explicit_basis(case: dense.Small, reference: str) -> None:
    explicit, analysis = small_basis(case, reference)
    at = coordinates(explicit.model, reference=reference, analysis=analysis)  # type: ignore[arg-type]
    values = basis_values(at, dict(explicit.model.named_parameters()))
    mine = torch.cat([values.edges[layer.edges.name].reshape(-1) for layer in at.layers])
    mine = torch.cat([mine[mine != 0], values.roots])
    basis = explicit.basis
    expected = odot(explicit.weights, basis.A)
    outside = {e.name for e in basis.wiring.edges} & set(at.others)
    touching = torch.ones(len(basis.kept), dtype=torch.bool)
    for e, offset, shape in zip(basis.wiring.edges, basis.wiring.offset, basis.wiring.shapes, strict=True):
        if e.name in outside:
            touching &= ~((basis.kept >= offset) & (basis.kept < offset + shape.numel()))
    if reference == "one":
        torch.testing.assert_close(mine.sort().values, expected[touching].sort().values, rtol=1e-12, atol=1e-14)
    else:  # trained skeleton paths start at ±1
        torch.testing.assert_close(values.roots.abs(), torch.ones_like(values.roots), rtol=1e-12, atol=0)


@pytest.mark.parametrize("reference", ["one", "balanced"])
@pytest.mark.parametrize("case", dense.SMALL, ids=lambda case: case.name)
def test_displacing_path_values_gives_weights_that_have_them(case: dense.Small, reference: str) -> None:
    explicit, analysis = small_basis(case, reference)
    at = coordinates(explicit.model, reference=reference, analysis=analysis)  # type: ignore[arg-type]
    weights = {name: p.detach() for name, p in explicit.model.named_parameters()}
    values = basis_values(at, weights)
    v = values.vector()
    noise = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change = 0.1 * noise * (v != 0)
    after = basis_values(at, displaced(at, weights, unflatten(change, values)))
    torch.testing.assert_close(after.vector(), v + change, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mode", ["released", "sup"])
@pytest.mark.parametrize("case", dense.SMALL, ids=lambda case: case.name)
def test_gradients_of_the_penalty_are_those_of_explicit_path_values(case: dense.Small, mode: str) -> None:
    explicit, analysis = small_basis(case, "one")
    basis = explicit.basis
    penalty = BasisPathPenalty(0.3, mode, reference="one", analysis=analysis)  # type: ignore[arg-type]
    parameters = {
        name: p for name, p in explicit.model.named_parameters() if name in {e.name for e in basis.wiring.edges}
    }
    found = torch.autograd.grad(penalty(explicit.model), list(parameters.values()), allow_unused=True)
    weights = explicit.weights.clone().requires_grad_()
    v = odot(weights, basis.A)
    edges, roots = v[~basis.on_skeleton], v[basis.on_skeleton]
    others = [p for name, p in explicit.model.named_parameters() if name not in parameters]
    every = torch.cat([edges, *(p.detach().reshape(-1) for p in others), roots.abs().log()])
    value = edges.square().sum() if mode == "released" else every.abs().pow(8).sum().pow(1 / 4)
    (expected,) = torch.autograd.grad(0.15 * value, weights)
    for (name, p), grad in zip(parameters.items(), found, strict=True):
        grad = torch.zeros_like(p) if grad is None else grad
        torch.testing.assert_close(grad, basis.wiring.split(expected)[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reference", ["one", "balanced"])
@pytest.mark.parametrize("case", dense.SMALL, ids=lambda case: case.name)
def test_decay_inside_gsgd_is_the_released_penalty(case: dense.Small, reference: str) -> None:
    explicit, analysis = small_basis(case, reference)
    decay, lr = 0.05, 0.01
    stepped = []
    for inside in (True, False):
        model = copy.deepcopy(explicit.model)
        options = {"reference": reference, "analysis": analysis}
        optimizer = GSGD(
            model, lr, weight_decay=decay if inside else 0.0, max_ratio=math.inf, max_drift=math.inf, **options
        )
        penalty = BasisPathPenalty(decay, "released", **options)
        target = torch.ones_like(model(explicit.x))
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(explicit.x) - target).square().mean()
            (loss if inside else loss + penalty(model)).backward()
            optimizer.step()
        stepped.append(dict(model.named_parameters()))
    moved = max(float((stepped[0][n] - p).abs().max().detach()) for n, p in explicit.model.named_parameters())
    assert moved > 1e-4
    for name, p in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], p, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("order", [math.inf, 8, 2])
def test_basis_path_norm_does_not_change_under_rescaling(order: float, norm: bool) -> None:
    model = randomize_(zoo.mlp(5, 7, 6, 4, norm=norm), 0).double()
    before = basis_path_norm(model, order)
    gspace.rescale_(model, gspace.random_scales(model, torch.Generator().manual_seed(1)))
    torch.testing.assert_close(basis_path_norm(model, order), before, rtol=1e-10, atol=0)
    at = coordinates(model, view="exact")
    with torch.no_grad():
        model[-1].weight.mul_(3)
    assert float(basis_path_norm(model, order, at=at).detach()) > float(before.detach())


def test_the_surrogate_bounds_the_maximum_and_comes_close_to_it() -> None:
    model = randomize_(zoo.mlp(5, 7, 6, 4), 0).double()
    norms = [float(basis_path_norm(model, order).detach()) for order in (2, 8, 64, math.inf)]
    assert norms == sorted(norms, reverse=True)
    assert norms[2] < 1.1 * norms[3]


def test_sup_penalty_returns_skeleton_paths_to_one_and_released_does_not() -> None:
    away = {}
    for mode in ("released", "sup"):
        model = randomize_(zoo.mlp(5, 7, 6, 4), 0).double()
        penalty = BasisPathPenalty(1.0, mode, reference="balanced")  # type: ignore[arg-type]
        at = penalty.coordinates(model)
        layer = next(layer for layer in at.layers if layer.edges.name == "0.weight")
        with torch.no_grad():
            model[0].weight[tuple(i[layer.at.root > 0] for i in layer.entries)] *= 5
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(300):
            optimizer.zero_grad()
            penalty(model).backward()
            optimizer.step()
        away[mode] = float(basis_values(at, dict(model.named_parameters())).roots.abs().log().abs().max().detach())
    assert away["released"] > 1  # log 5 = 1.6 at the start: nothing pulls them
    assert away["sup"] < away["released"] / 2


def test_penalty_refuses_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="released"):
        BasisPathPenalty(0.1, "l2")  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [0.5, 17, math.inf, math.nan])
def test_a_power_that_is_none_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="p must be"):
        path_norm(nn.Linear(3, 2), p)


class Written(nn.Module):
    """A tensor with two names, written under one of them and read under the other."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(2, 4, bias=False), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x))


def base_written(h: Tensor) -> Tensor:
    view = h.view(-1, 2, 2)
    h.mul_(3)
    return view


def same_memory_written(h: Tensor) -> Tensor:
    other = h.contiguous()
    other.mul_(3)
    return h


@pytest.mark.parametrize("body", [base_written, same_memory_written])
def test_memory_with_two_names_is_followed(body: Callable[[Tensor], Tensor]) -> None:
    model = Written(body)
    expected = 3 * model.layer.weight.detach().abs().sum()
    torch.testing.assert_close(path_norm(model, 1, example_input=torch.ones(1, 2)).value, expected)


def test_what_is_written_to_a_copy_does_not_reach_the_original() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = s.a(x)
        y = h.relu()
        y.mul_(3)
        return h + y

    model = Net(forward, a=nn.Linear(3, 2, bias=False)).double()
    norm = path_norm(model, 1, example_input=torch.zeros(2, 3))
    torch.testing.assert_close(norm.value, (1 + 3) * model.a.weight.abs().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", WRITES)
def test_gradients_reach_what_is_written_in_place(name: str) -> None:
    case = WRITES[name]
    model = randomize_(case.build(), 0).double()
    try:
        graph = path_graph(model, case.inputs(0))
    except PathError:
        pytest.skip("no path sum")
    weights, generator, step = list(model.parameters()), torch.Generator().manual_seed(1), 1e-6
    grads = torch.autograd.grad(path_norm(model, graph=graph).log, weights, allow_unused=True)
    for w, grad in zip(weights, grads, strict=True):
        direction = torch.randn(w.shape, generator=generator, dtype=w.dtype)
        ends = []
        for sign in (1, -2):
            with torch.no_grad():
                w.add_(sign * step * direction)
            ends.append(float(path_norm(model, graph=graph).log.detach()))
        with torch.no_grad():
            w.add_(step * direction)
        expected = 0.0 if grad is None else float((grad * direction).sum())
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)  # central differences


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_keep_their_range_in_memory_that_the_model_makes(dtype: torch.dtype) -> None:
    """Twenty layers of 1e-12, written beside ones into memory of any dtype: squares are far below what that holds."""

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 2, dtype=dtype)
        out[:, :1] = s.body(x)
        if s.beside:
            out[:, 1] = 1
        return s.head(out)

    body = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(20)])
    model = Net(forward, body=body, head=nn.Linear(2, 1, bias=False)).to(dtype)
    nn.init.constant_(model.head.weight, 1.0)
    for layer in body:
        nn.init.constant_(layer.weight, 1e-12)
    for model.beside, expected in ((False, 20 * math.log(1e-12)), (True, 0.0)):
        log = path_norm(model, 2, example_input=torch.zeros(2, 1)).log
        torch.testing.assert_close(float(log.detach()), expected, rtol=1e-6, atol=1e-6)


class Masked(nn.Module):
    """Sizes computed by `&` are no write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.one(x))
        n = h.size(1)
        k = n & 4
        return self.two(h[:, :n] * (k > 0))


def test_and_of_sizes_is_no_write_in_place() -> None:
    torch.manual_seed(0)
    model = Masked().double()
    plain = nn.Sequential(model.one, nn.ReLU(), model.two)
    found = path_norm(model, 2, example_input=torch.zeros(1, 3)).log
    torch.testing.assert_close(found, path_norm(plain, 2).log, rtol=1e-12, atol=0)


def test_a_penalty_given_the_model_at_once_says_when_it_is_due() -> None:
    with pytest.raises(TypeError, match="the model is given when the penalty is called"):
        gspace.BasisPathPenalty(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_buffer_that_forward_writes_is_left_alone_by_the_sum() -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        s.count.add_(1)
        return s.a(x) * s.count

    model = Net(forward, a=nn.Linear(3, 2, bias=False)).double()
    model.register_buffer("count", torch.tensor(2.0).double())
    norm = path_norm(model, 1, example_input=torch.zeros(2, 3))
    assert float(model.count) == 2
    torch.testing.assert_close(norm.value, 3 * model.a.weight.abs().sum())
