"""`batch_norm="exact"`: training sees neither the scales of units nor those of rows that a BatchNorm absorbs."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
import zoo
from contract import assert_captured_alike
from gspace.optim import exact
from gspace.optim.skeleton import COEFFICIENTS
from turns import turns

Make = Callable[[nn.Module], Any]


def norm(c: int, eps: float, kind: Any = nn.BatchNorm2d) -> nn.Module:
    """Gains of both signs, away from 1, and shifts."""
    layer = kind(c, eps=eps)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.weight[::3] *= -1
        layer.bias.normal_(0, 0.3)
    return layer


class Grouped(nn.Module):
    """Grouped convolutions with biases that the norms swallow."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 6, 3), norm(6, eps)
        self.d, self.nd = nn.Conv2d(6, 6, 3, padding=1, groups=2), norm(6, eps)
        self.c, self.nc = nn.Conv2d(6, 9, 3, stride=2, bias=False), norm(9, eps)
        self.g = nn.Linear(9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.nd(self.d(F.relu(self.na(self.a(x))))))
        return self.g(F.relu(self.nc(self.c(x))).mean((2, 3)))


class Residual(nn.Module):
    """A stream that three norms write, the last with a gain of 0 at first."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        conv = lambda n, m: nn.Conv2d(n, m, 3, padding=1, bias=False)  # noqa: E731
        self.c0, self.n0 = conv(1, 8), norm(8, eps)
        self.c1, self.n1, self.c2, self.n2 = conv(8, 6), norm(6, eps), conv(6, 8), norm(8, eps)
        self.c3, self.n3, self.c4, self.n4 = conv(8, 6), norm(6, eps), conv(6, 8), norm(8, eps)
        self.g = nn.Linear(8, 10)
        nn.init.zeros_(self.n4.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n0(self.c0(x)))
        x = F.relu(x + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))
        x = F.relu(x + self.n4(self.c4(F.relu(self.n3(self.c3(x))))))
        return self.g(x.mean((2, 3)))


class Experts(nn.Module):
    """Three layers in one tensor, with biases `(experts, out)` that the norm swallows."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 81) / 16), nn.Parameter(torch.randn(3, 4))
        self.norm, self.g = norm(12, eps, nn.BatchNorm1d), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("eoi,ni->neo", self.weight, x.flatten(1)) + self.bias
        return self.g(F.relu(self.norm(h.flatten(1))))


class Gained(nn.Module):
    """A gain of single weights in a row that a norm absorbs; it looks like a bias there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gain, self.norm = nn.Linear(5, 4), nn.Parameter(torch.rand(4) + 0.5), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x) + self.gain * F.gelu(x[:, :4])).relu()


def perceptron(eps: float) -> nn.Sequential:
    """Norms behind some layers; units that no norm writes, one layer of them read by a row that a norm absorbs."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(81, 9), norm(9, eps, nn.BatchNorm1d), nn.ReLU(), nn.Linear(9, 8), nn.ReLU()),
        *(nn.Linear(8, 7), norm(7, eps, nn.BatchNorm1d), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 10)),
    )


# network, residual, H, absorbed rows
NETWORKS: dict[str, tuple[Callable[[float], nn.Module], str, int, int]] = {
    "grouped": (Grouped, "pin", 6 + 6 + 9, 6 + 6 + 9),
    "residual-tie": (Residual, "tie", 8 + 6 + 6, 8 + 6 + 8 + 6 + 8),
    "mlp": (perceptron, "pin", 9 + 8 + 7 + 6, 9 + 7),
    "experts": (Experts, "pin", 12, 12),
}
networks = pytest.mark.parametrize("network", NETWORKS)
EXACT = {"batch_norm": "exact"}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "GSGD": lambda m, **o: gspace.GSGD(m, 0.05, 0.9, weight_decay=1e-3, **EXACT, **o),
    "GSGD-clipped": lambda m, **o: gspace.GSGD(m, 0.1, max_path_grad_norm=0.3, **EXACT, **o),
    "SGD": lambda m, **o: gspace.InGSpace(m, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, **EXACT, **o),
    "Adam": lambda m, **o: gspace.InGSpace(m, torch.optim.Adam, lr=0.01, **EXACT, **o),
    "AdamW": lambda m, **o: gspace.InGSpace(m, torch.optim.AdamW, lr=0.01, weight_decay=0.1, **EXACT, **o),
    "RMSprop": lambda m, **o: gspace.InGSpace(m, torch.optim.RMSprop, lr=0.003, **EXACT, **o),
}


def problem(network: str, eps: float) -> tuple[nn.Module, gspace.Analysis, Tensor, Tensor]:
    build, residual, H, rows = NETWORKS[network]
    torch.manual_seed(5)
    model = build(eps).double()
    analysis = gspace.analyze(model, residual=residual)  # type: ignore[arg-type]
    assert (analysis.H, analysis.H_absorbed) == (H, rows)
    return model, analysis, torch.randn(64, 1, 9, 9).double(), torch.randint(0, 10, (64,))


def train(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, steps: int, between: Any = None
) -> tuple[Tensor, Tensor]:
    """Outputs in training and in evaluation mode at the end; `between` happens in the middle."""
    for k in range(steps):
        if between is not None and k == steps // 2:
            between(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    trained = model(x).detach()
    return trained, model.eval()(x).detach()


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


def rescaled(model: nn.Module, analysis: gspace.Analysis, rows: bool, seed: int = 2) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    scales = gspace.random_scales(model, generator, analysis=analysis, absorbed=rows)
    return gspace.rescale_(model, scales, analysis=analysis)


@turns("network, name", NETWORKS, OPTIMIZERS)
def test_units_and_rows_are_not_seen(network: str, name: str) -> None:
    """100 steps in float64 at ε = 1e-30, all scales e^N(0,1), at the start and in the middle; and units at any ε."""
    model, analysis, x, y = problem(network, 1e-30)
    outputs = []
    for at in ("nowhere", "start", "middle"):
        m = copy.deepcopy(model)
        if at == "start":
            rescaled(m, analysis, rows=True)
        between = (lambda m: rescaled(m, analysis, rows=True)) if at == "middle" else None
        outputs.append(train(m, OPTIMIZERS[name](m, analysis=analysis), x, y, 100, between))
    for trained, evaluated in outputs[1:]:
        assert gap(outputs[0][0], trained) < 1e-10
        assert gap(outputs[0][1], evaluated) < 1e-10
    assert gap(model(x).detach(), outputs[0][0]) > 0.1


@networks
def test_units_are_not_seen_at_the_usual_epsilon(network: str) -> None:
    """Rows are: ε sets a scale, and no algorithm can help that."""
    model, analysis, x, y = problem(network, 1e-5)
    outputs = []
    for rows in (None, False, True):
        m = copy.deepcopy(model)
        if rows is not None:
            rescaled(m, analysis, rows=rows)
        outputs.append(train(m, OPTIMIZERS["GSGD"](m, analysis=analysis), x, y, 100)[0])
    assert gap(outputs[0], outputs[1]) < 1e-10
    assert 1e-4 < gap(outputs[0], outputs[2]) < 1.5


@pytest.mark.parametrize(
    "make",
    [lambda m, a: torch.optim.SGD(m.parameters(), 0.05), lambda m, a: gspace.GSGD(m, 0.05, analysis=a)],
    ids=["SGD", "released"],
)
def test_others_see_them(make: Any) -> None:
    """The tests above can fail."""
    model, analysis, x, y = problem("grouped", 1e-30)
    other = rescaled(copy.deepcopy(model), analysis, rows=True)
    a, b = (train(m, make(m, analysis), x, y, 20)[0] for m in (model, other))
    assert gap(a, b) > 0.05


@networks
def test_one_step_is_that_of_autograd_on_the_coordinates(network: str) -> None:
    """b and t as leaves, w as their function: the same step (float64, rtol 1e-10), and ∂ℓ/∂t has no radial part."""
    lr = 0.03
    model, analysis, x, y = problem(network, 1e-5)
    optimizer = gspace.GSGD(model, lr, analysis=analysis, **EXACT)
    optimizer.rechoose()
    G = optimizer.incoming.abs()
    masks, shared = exact.absorbed_rows(analysis)
    assert shared == 0
    edges = {e.name: e for e in optimizer.skeleton.edges}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    leaves, back, sizes = {}, {}, {}
    for name, w in weights.items():
        e = edges[name]
        view = e.view(w)
        ones = [1] * (view.dim() - 3)
        factor = G[e.tail].reshape(len(e.tail), 1, -1, *ones) / G[e.head].reshape(*e.head.shape, 1, *ones)
        rows = masks.get(name, torch.zeros_like(e.head, dtype=torch.bool)).reshape(*e.head.shape, 1, *ones)
        norms = (view * factor).flatten(2).norm(dim=2).reshape(rows.shape)
        size = torch.where(rows & (view[0, 0].numel() > 1), norms, 1)
        leaves[name] = (view * factor / size).requires_grad_()
        back[name], sizes[name] = size / factor, rows

    def weight(name: str, value: Tensor) -> Tensor:
        rows, e = sizes[name], edges[name]
        if value[0, 0].numel() > 1:
            unit = value / value.flatten(2).norm(dim=2).reshape(rows.shape)
            value = torch.where(rows, unit, value)
        result = value * back[name]
        result = result.transpose(1, 2) if e.swap else result
        return result.reshape(weights[name].shape)

    named = {name: weight(name, leaf) for name, leaf in leaves.items()}
    F.cross_entropy(torch.func.functional_call(copy.deepcopy(model), named, (x,)), y).backward()
    fixed = {name: torch.zeros(w.numel(), dtype=torch.bool) for name, w in weights.items()}
    skeleton = optimizer.skeleton
    for u in range(1, skeleton.H + 1):
        fixed[skeleton.edges[int(skeleton.in_edge[u])].name][int(skeleton.in_index[u])] = True
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        expected = weight(name, (leaves[name] - lr * leaves[name].grad)).detach()
        still = fixed[name].reshape(p.shape)
        if "bias" in name and name in masks:
            still = still | masks[name].reshape(p.shape)
        expected = torch.where(still, weights[name], expected)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-10, atol=1e-13)


@networks
def test_gains_stand_still_and_rows_keep_their_norm(network: str) -> None:
    model, analysis, x, y = problem(network, 1e-5)
    optimizer = OPTIMIZERS["AdamW"](model, analysis=analysis)
    optimizer.rechoose()
    before, gauge = copy.deepcopy(model.state_dict()), optimizer.incoming.clone()
    edges = {e.name: e for e in optimizer.skeleton.edges}
    masks, _ = exact.absorbed_rows(analysis)
    train(model, optimizer, x, y, 20)
    assert torch.equal(optimizer.incoming, gauge)
    for name, mask in masks.items():
        now, then = (edges[name].view(w) for w in (model.get_parameter(name).detach(), before[name]))
        if "bias" in name:
            assert torch.equal(now, then)
            continue
        columns = gauge.abs()[edges[name].tail].reshape(len(now), 1, -1, *[1] * (now.dim() - 3))
        norms = [(w * columns).flatten(2).norm(dim=2)[mask] for w in (now, then)]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        assert gap(then, now) > 1e-3


def test_a_gain_in_a_row_before_a_norm_is_trained() -> None:
    torch.manual_seed(0)
    model, x = Gained(), torch.randn(16, 5)
    before = model.gain.detach().clone()
    optimizer = gspace.GSGD(model, 0.1, analysis=gspace.analyze(model, x), **EXACT)
    model(x)[:, 0].mean().backward()
    with pytest.warns(UserWarning, match="4 scales before a norm are each shared by several rows or other weights"):
        optimizer.step()
    torch.testing.assert_close(model.gain.detach(), before - 0.1 * model.gain.grad)
    assert float(model.gain.grad.abs().max()) > 1e-3


class Conditioned(nn.Module):
    """A layer of one input, in a module that is named like a bias, adds to rows before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias_net = nn.Linear(4, 6, bias=False), nn.Linear(1, 6, bias=False)
        self.norm, self.c = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.norm(self.a(x) + self.bias_net(x[:, :1]))))


def test_a_weight_of_a_module_that_is_named_like_a_bias_is_none() -> None:
    torch.manual_seed(0)
    model, x = Conditioned(), torch.randn(16, 4)
    before = model.bias_net.weight.detach().clone()
    optimizer = gspace.GSGD(model, 0.1, analysis=gspace.analyze(model, x), **EXACT)
    model(x)[:, 0].mean().backward()
    with pytest.warns(UserWarning, match="6 scales before a norm are each shared by several rows or other weights"):
        optimizer.step()
    assert not torch.equal(model.bias_net.weight.detach(), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_learning_rate_nothing_moves(name: str) -> None:
    model, analysis, x, y = problem("residual-tie", 1e-5)
    optimizer = OPTIMIZERS[name](model, analysis=analysis)
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, x, y, 3)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_networks_without_norms_are_trained_too() -> None:
    torch.manual_seed(0)
    model = zoo.mlp(8, 16, 6, 12, 4).double()
    x, y = torch.randn(32, 8).double(), torch.randint(0, 4, (32,))
    outputs, losses = [], []
    for scaled in (False, True):
        m = copy.deepcopy(model)
        if scaled:
            gspace.rescale_(m, gspace.random_scales(m, torch.Generator().manual_seed(2)))
        optimizer = gspace.GSGD(m, 0.1, 0.9, **EXACT)
        losses.append(float(F.cross_entropy(m(x), y).detach()))
        outputs.append(train(m, optimizer, x, y, 100)[0])
    assert gap(*outputs) < 1e-9
    assert float(F.cross_entropy(outputs[0], y)) < 0.5 * losses[0]


def test_what_has_no_gain_or_no_sphere_is_counted() -> None:
    """A gain of 0 alone; and rows of two layers whose sum a norm reads, which share one scale."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 5), nn.Linear(4, 5), nn.BatchNorm1d(5)
            self.out = nn.Linear(5, 3)
            nn.init.zeros_(self.norm.weight[:2])

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.a(x) + self.b(x)).relu())

    model = Sum().double()
    optimizer = gspace.GSGD(model, 0.1, analysis=gspace.analyze(model, residual="tie"), **EXACT)
    x, y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    with pytest.warns(
        UserWarning, match=r"2 units have only zeros in the gains .*; 5 scales before a norm are each shared"
    ):
        train(model, optimizer, x, y, 2)
    assert optimizer.skeleton.H == 3


@networks
def test_a_saved_state_goes_on(network: str) -> None:
    model, analysis, x, y = problem(network, 1e-5)
    for name in ("GSGD", "AdamW"):
        one, two = copy.deepcopy(model), copy.deepcopy(model)
        first, second = (OPTIMIZERS[name](m, analysis=analysis) for m in (one, two))
        train(one, first, x, y, 3)
        one.train()
        two.load_state_dict(one.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        a, b = (train(m, o, x, y, 5)[1] for m, o in ((one, first), (two, second)))
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{"allocation": "spread"}, {"reference": "one"}], ids=str)
def test_what_it_has_no_use_for_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="has coordinates of its own"):
        gspace.GSGD(zoo.mlp(3, 4, 2), 0.1, **options, **EXACT)


class Functional(nn.Module):
    """A norm that is no module, with a gain and a shift of any name."""

    def __init__(self, norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.g, self.s = nn.Linear(81, 8), nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.b, self.c, self.norm = nn.Linear(8, 6), nn.Linear(6, 10), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.norm(self.a(x.flatten(1)), self.g, self.s)))))


class Stream(nn.Module):
    """A stream that a layer writes first, then a norm."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.c = nn.Linear(81, 8), nn.Linear(8, 8), norm(8, 1e-5, kind), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x.flatten(1)))
        return self.c(F.relu(x + self.norm(self.b(x))))


def convolutions(*norms: nn.Module) -> nn.Sequential:
    """Of 6 and 8 channels, with norms behind them, and a layer of 7 behind those."""
    layers = (nn.Conv2d(1, 6, 3), norms[0], nn.ReLU(), nn.Conv2d(6, 8, 3), norms[1], nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, 10))


def flat(kind: Any) -> nn.Sequential:
    layers = nn.Linear(81, 8), norm(8, 1e-5, kind), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10)
    return nn.Sequential(nn.Flatten(), *layers)


# network, H, scales that several rows share
NORMS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "LayerNorm": (lambda: flat(nn.LayerNorm), 14, 1),
    "RMSNorm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(81, 8), nn.RMSNorm(8), nn.ReLU(), nn.Linear(8, 10)),
        8,
        1,
    ),
    "GroupNorm": (lambda: convolutions(norm(6, 1e-5), nn.GroupNorm(2, 8)), 21, 2),
    "InstanceNorm": (lambda: convolutions(norm(6, 1e-5), nn.InstanceNorm2d(8, affine=True)), 21, 0),
    "F.batch_norm": (lambda: Functional(lambda x, g, s: F.batch_norm(x, None, None, g, s, True)), 14, 0),
    "F.layer_norm": (lambda: Functional(lambda x, g, s: F.layer_norm(x, (8,), g, s)), 14, 1),
    "by hand": (lambda: Functional(lambda x, g, s: x * x.square().mean(1, True).add(1e-6).rsqrt() * g + s), 14, 1),
    "behind a layer": (lambda: Stream(nn.BatchNorm1d), 8, 0),
    "LayerNorm behind a layer": (lambda: Stream(nn.LayerNorm), 8, 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_units_that_any_norm_writes_are_not_seen(name: str) -> None:
    """Units behind norms other than BatchNorm modules were left out, and a warning said that they had no weights."""
    build, H, shared = NORMS[name]
    torch.manual_seed(5)
    model, x, y = build().double(), torch.randn(32, 1, 9, 9).double(), torch.randint(0, 10, (32,))
    analysis, outputs = gspace.analyze(model, x, residual="tie"), []
    for scaled in (False, True):
        m = rescaled(copy.deepcopy(model), analysis, rows=False) if scaled else copy.deepcopy(model)
        optimizer = gspace.GSGD(m, 0.05, 0.9, weight_decay=1e-3, analysis=analysis, **EXACT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            outputs.append(train(m, optimizer, x, y, 20)[0])
        assert optimizer.skeleton.H == H
        told = optimizer.statistics()["unused"]
        assert told == ((f"{shared} {exact.SHARED}",) if shared else ())
    assert gap(*outputs) < 1e-10
    assert gap(model(x).detach(), outputs[0]) > 0.01


def test_a_bias_of_any_name_is_no_gain() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.o = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.linear(x, self.w, self.b).relu())

    skeleton = gspace.GSGD(Linear(), 0.1, example_input=torch.randn(5, 3), **EXACT).skeleton
    assert {skeleton.edges[k].name for k in skeleton.in_edge[1:]} == {"w"}


class Attending(nn.Module):
    """Rows before a BatchNorm beside scales that are no units: queries and keys, a gate with two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 12, 3, padding=1, groups=3), nn.BatchNorm1d(12, eps=1e-30)
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20, bias=False), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        h = self.attend(h, h, h, need_weights=False)[0]
        return self.down(torch.relu(self.gate(h)) * self.up(h)).mean(1)


@pytest.mark.filterwarnings("ignore:.*cannot use all units")
def test_exact_beside_attention_and_gates() -> None:
    """It counted ids of linear forms as units. These stay in plain coordinates."""
    torch.manual_seed(0)
    model, x = Attending().double(), torch.randn(8, 3, 9).double()
    analysis = gspace.analyze(model, x, residual="pin")
    assert analysis.forms
    assert analysis.special
    optimizer = gspace.InGSpace(model, torch.optim.SGD, lr=0.01, analysis=analysis, batch_norm="exact")
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert optimizer.statistics()["unused"] == (f"{analysis.special} units {COEFFICIENTS}",)


@networks
def test_gsgd_is_sgd_in_these_coordinates(network: str) -> None:
    """No skeleton path is trained here, so the two take the same steps, to the bit."""
    model, analysis, x, y = problem(network, 1e-5)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "analysis": analysis, **EXACT}
    models = [model, copy.deepcopy(model)]
    before = [p.clone() for p in model.parameters()]
    train(models[0], gspace.GSGD(models[0], **options), x, y, 5)
    train(models[1], gspace.InGSpace(models[1], torch.optim.SGD, **options), x, y, 5)
    after = [list(m.parameters()) for m in models]
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["exact", "paper"])
def test_a_captured_step_without_kernels_is_the_step(rule: Any) -> None:
    model, analysis, x, y = problem("residual-tie", 1e-5)
    models = [copy.deepcopy(model).float().cuda() for _ in range(2)]
    x, y, rate = x.float().cuda(), y.cuda(), torch.tensor(0.05, device="cuda")
    optimizers = [gspace.GSGD(m, rate, momentum=0.9, batch_norm=rule, analysis=analysis) for m in models]
    for m, optimizer in zip(models, optimizers, strict=True):
        F.cross_entropy(m(x), y).backward()
        optimizer.step()
        assert "batch_norm" in str(optimizer.statistics()["way"])
    assert_captured_alike(*optimizers)
