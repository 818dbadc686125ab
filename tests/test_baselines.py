"""Path-SGD: κ against enumeration, its invariance, and what a torch optimizer must do; SGD with the skeleton frozen."""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
import zoo
from cases import CASES
from gspace.measure.diagnostics import invariance_gap
from gspace.optim.baselines import FrozenSkeletonSGD, PathSGD
from gspace.optim.initial import init_skeleton_
from gspace.paths.pathsum import PathError, path_graph, path_kappa
from invariance import build, draw_inputs, randomize_
from parts import Net
from test_norms import small
from turns import turns
from unrolled import SMALL, Small, enumerated

Make = Callable[..., torch.optim.Optimizer]


def mlp(seed: int = 0) -> nn.Sequential:
    return randomize_(zoo.mlp(5, 7, 6, 4), seed).double()


def batches(n: int, *shape: int, classes: int = 4, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(8, *shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n))
    return [(x, torch.randint(classes, (8,), generator=generator)) for x in inputs]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def kappas(model: nn.Module, example: Tensor | None = None) -> list[Tensor]:
    """κ of every parameter."""
    factors, _, _ = path_kappa(path_graph(model, example), list(model.parameters()))()
    return [math.prod(some[1:], start=some[0]) for some in factors]


# κ -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
def test_kappa_is_the_sum_over_enumerated_paths(kind: type[Small]) -> None:
    model = small(kind)
    kappa = kappas(model, torch.zeros(2, *kind.shape).double())
    expected = enumerated(model, model.unrolled()).kappa()
    for (name, _), found in zip(model.named_parameters(), kappa, strict=True):
        torch.testing.assert_close(
            found, expected[name], rtol=1e-10, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_one_step_is_gradient_over_kappa() -> None:
    model = mlp()
    ((x, y),) = batches(1, 5)
    kappa = kappas(model)
    F.cross_entropy(model(x), y).backward()
    expected = [p - 0.1 * p.grad / k for p, k in zip(model.parameters(), kappa, strict=True)]
    PathSGD(model, 0.1).step()
    torch.testing.assert_close(state(model), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "around", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode], ids=["autocast", "inference"]
)
def test_a_step_inside_of_a_mode_is_the_same_step(around: Callable[[], AbstractContextManager[Any]]) -> None:
    steps = []
    for mode in (nullcontext, around):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        optimizer = PathSGD(model, lr=0.01)
        model(torch.randn(4, 12)).square().mean().backward()
        with mode():
            optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_a_network_without_hidden_units_is_trained_by_plain_sgd_bit_for_bit() -> None:
    models = [nn.Linear(5, 4).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    train(models[0], PathSGD(models[0], 0.1), batches(5, 5))
    train(models[1], torch.optim.SGD(models[1].parameters(), 0.1), batches(5, 5))
    for a, b in zip(state(models[0]), state(models[1]), strict=True):
        assert torch.equal(a, b)


def test_a_weight_on_no_path_stays_and_slopes_move() -> None:
    model = zoo.prelu_mlp().double()
    with torch.no_grad():
        model[2].weight[:, 3] = 0  # unit 3 leads nowhere
        model[2].weight[2] = 0  # and unit 2 of the next layer gets nothing but its bias
    before = copy.deepcopy(model)
    train(model, PathSGD(model, 0.01), batches(1, 5))
    assert torch.equal(model[0].weight[3], before[0].weight[3])
    assert bool((model[2].weight[2] != 0).any())  # κ > 0: the paths through these weights have no other zero
    assert bool((model[1].weight != before[1].weight).any())
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_head_that_only_training_runs_is_trained_by_plain_sgd() -> None:
    model = Net(
        lambda s, x: s.out(F.relu(s.a(x))) + (s.aux(F.relu(s.a(x))) if s.training else 0),
        a=nn.Linear(5, 7),
        out=nn.Linear(7, 4),
        aux=nn.Linear(7, 4),
    ).double()
    ((x, y),) = batches(1, 5)
    with pytest.warns(UserWarning, match=r"runs through aux.weight, aux.bias: plain SGD"):
        optimizer = PathSGD(model, 0.1)
    F.cross_entropy(model(x), y).backward()
    expected = [p - 0.1 * p.grad for p in model.aux.parameters()]
    optimizer.step()
    torch.testing.assert_close(state(model.aux), expected, rtol=1e-12, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PathSGD(model, 0.1, params=[*model.a.parameters(), *model.out.parameters()])
    model.requires_grad_(False)
    optimizer = PathSGD(model, 0.1)
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"plain SGD"):
        train(model, optimizer, batches(1, 5))
    assert not torch.equal(model.aux.weight, expected[0])


CASES_BY_NAME = {case.name: case for case in CASES}


COMMUTING = ["mlp", "mlp-bn", "conv1d", "inception", "residual-tie", "resnet-small-tie", "embedding"]


@turns("name, options", COMMUTING, [{}, {"momentum": 0.9}, {"interval": 4}])
def test_the_update_commutes_with_rescaling(name: str, options: dict[str, Any]) -> None:
    """Twenty steps in float64. SGD beside it shows that the test can fail."""
    case = CASES_BY_NAME[name]
    model, one = build(case), [draw_inputs(case, k, torch.float64) for k in range(20)]
    analysis = gspace.analyze(model, one[0], residual=case.residual)
    width = model(*one[0]).shape[1]
    generator = torch.Generator().manual_seed(1)
    data = [(x[0], torch.randint(width, (len(x[0]),), generator=generator)) for x in one]

    def path_sgd(m: nn.Module) -> PathSGD:
        return PathSGD(m, 2e-3, example_input=one[0], **options)

    gap = invariance_gap(path_sgd, model, data, analysis=analysis, generator=torch.Generator().manual_seed(2))
    assert gap.final < 1e-6
    assert gap.moved > 1e-4
    plain = invariance_gap(
        lambda m: torch.optim.SGD(m.parameters(), 2e-3),
        model,
        data,
        analysis=analysis,
        generator=torch.Generator().manual_seed(2),
    )
    assert plain.final > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_kappa_of_a_deep_network_is_right_in_float32(seed: int) -> None:
    """Squares of 100 layers reach 1e±30 on the way."""
    single = randomize_(zoo.mlp(5, *[16] * 100, 4), seed)
    double = copy.deepcopy(single).double()
    found, expected = (kappas(m) for m in (single, double))
    for k, e in zip(found, expected, strict=True):
        torch.testing.assert_close(k.double(), e, rtol=1e-4, atol=0)  # 100 layers of float32 roundings


def test_kappa_of_a_linear_layer_is_an_outer_product_that_is_never_made() -> None:
    model = nn.Sequential(nn.Flatten(), *zoo.mlp(12, 30, 20, 10)).double()
    found = path_kappa(path_graph(model, torch.zeros(2, 3, 4).double()), list(model.parameters()))
    assert list(found.counts) == [2, 1, 2, 1, 2, 1]
    sizes = {w.shape for w in model.parameters() if w.dim() == 2}
    factors, least, most = found()
    assert not sizes & {f.shape for some in factors for f in some}
    assert [line.function for line in found.program.lines].count("aten.mm.default") == 4  # two matrices, both ways
    assert float(least) == min(1.0, *(float(f.min()) for some in factors for f in some))
    assert float(most) == max(1.0, *(float(f.max()) for some in factors for f in some))


@pytest.mark.parametrize("name", ["mlp", "mlp-bn", "conv1d", "resnet-small-tie"])
def test_kappa_by_float32_is_that_by_float64(name: str) -> None:
    case = CASES_BY_NAME[name]
    model = build(case).float()
    found = path_kappa(path_graph(model, draw_inputs(case, 0, torch.float32)), list(model.parameters()))
    for some, wide in zip(found(torch.float32)[0], found()[0], strict=True):
        for f, e in zip(some, wide, strict=True):
            assert f.dtype == torch.float32
            torch.testing.assert_close(f.double(), e, rtol=1e-5, atol=0)  # sums of some hundred terms, layer by layer


def rescaled(size: float) -> tuple[nn.Module, gspace.Analysis, Tensor]:
    """A float32 MLP, and scales that are `size` or its inverse."""
    model = randomize_(zoo.mlp(5, 7, 6, 4), 0)
    analysis = gspace.analyze(model)
    up = torch.rand(analysis.H, generator=torch.Generator().manual_seed(0)) < 0.5
    return model, analysis, torch.where(up, size, 1 / size)


@pytest.mark.parametrize("size", [1e5, 1e6, 1e12])
def test_large_scales_do_not_cost_invariance_in_float32(size: float) -> None:
    model, analysis, scales = rescaled(size)
    data = batches(100, 5, dtype=torch.float32)
    gap = invariance_gap(lambda m: PathSGD(m, 1e-3), model, data, scales, analysis=analysis)
    assert gap.final < 5e-6  # float32 roundings of 100 steps
    assert gap.moved > 1e-2


@pytest.mark.parametrize("size", [1e5, 1e6, 1e12])
def test_kappa_does_not_vanish_under_large_scales_in_float32(size: float) -> None:
    model, analysis, scales = rescaled(size)
    other = gspace.rescale_(copy.deepcopy(model), scales, analysis=analysis)
    found = [kappas(m) for m in (model, other)]
    for p, q, before, after in zip(model.parameters(), other.parameters(), *found, strict=True):
        ratio = q.detach().double() / p.detach().double()
        torch.testing.assert_close(after * ratio.square(), before.double(), rtol=1e-6, atol=0)  # weights are float32


class Mixed(nn.Module):
    """The head in float64, the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = randomize_(zoo.mlp(5, 7, 6), 0), randomize_(zoo.mlp(6, 6, 4), 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(self.body[0].weight.dtype)).relu().double())


def test_parameters_may_differ_in_dtype() -> None:
    mixed = Mixed()
    double = copy.deepcopy(mixed).double()
    for model in (mixed, double):
        train(model, PathSGD(model, 0.01, momentum=0.9), batches(3, 5))
    torch.testing.assert_close([p.double() for p in state(mixed)], state(double), rtol=1e-5, atol=1e-7)


def test_what_has_no_path_norm_is_refused_at_construction() -> None:
    with pytest.raises(PathError, match="ReLU6"):
        PathSGD(nn.Sequential(nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 2)), 0.1)


# On a GPU ----------------------------------------------------------------------------------------------------------

MAKE: dict[str, Make] = {
    "PathSGD": lambda model, lr, **options: PathSGD(model, lr, momentum=0.9, interval=3, **options),
    "FrozenSkeletonSGD": lambda model, lr, **options: FrozenSkeletonSGD(model, lr, momentum=0.9, **options),
}


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKE[request.param]


@pytest.mark.gpu
def test_on_a_gpu_the_steps_are_those_of_the_cpu(make: Make) -> None:
    data = batches(3, 3, 8, 8, classes=3)
    models = [randomize_(zoo.Functional(), 0).double() for _ in range(2)]
    models[1].cuda()
    train(models[0], make(models[0], 1e-3, example_input=data[0][0]), data)
    moved = [(x.cuda(), y.cuda()) for x, y in data]
    train(models[1], make(models[1], 1e-3, example_input=moved[0][0]), moved)
    torch.testing.assert_close([p.cpu() for p in state(models[1])], state(models[0]), rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
def test_a_captured_step_is_the_step() -> None:
    """κ, its division and SGD inside a CUDA graph, with a learning rate that the device reads."""
    x, y = (t.cuda() for t in batches(1, 3, 8, 8, classes=3, dtype=torch.float32)[0])
    models = [randomize_(zoo.Functional(), 0).cuda() for _ in range(2)]
    rates = [torch.tensor(1e-3, device="cuda") for _ in models]
    optimizers = [PathSGD(m, lr, 0.9, fused=True, example_input=x) for m, lr in zip(models, rates, strict=True)]

    def step(k: int) -> None:
        for p in models[k].parameters():
            p.grad = None
        F.cross_entropy(models[k](x), y).backward()
        optimizers[k].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    for _ in range(5):
        graph.replay()
    for _ in range(8):
        step(1)
    torch.testing.assert_close(state(models[0]), state(models[1]), rtol=1e-4, atol=1e-6)  # atomics of cuDNN
    rates[0].zero_()
    before = state(models[0])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(before, state(models[0]), strict=True))


# SGD with the free skeleton frozen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_skeleton", [True, False])
def test_free_skeleton_weights_never_move_and_all_others_follow_sgd(on_skeleton: bool) -> None:
    model = mlp()
    if on_skeleton:
        init_skeleton_(model)
    other = copy.deepcopy(model)
    before = state(model)
    optimizer = FrozenSkeletonSGD(model, 0.1, weight_decay=0.01, momentum=0.9)
    weights = dict(model.named_parameters())
    free = {name: torch.zeros(p.numel(), dtype=torch.bool) for name, p in weights.items()}
    skeleton = optimizer.skeleton
    for u in range(1, skeleton.H + 1):
        free[skeleton.edges[int(skeleton.out_edge[u])].name][int(skeleton.out_index[u])] = True
    assert sum(int(f.sum()) for f in free.values()) == skeleton.H == 13
    data = batches(1, 5)
    train(model, optimizer, data)
    train(other, torch.optim.SGD(other.parameters(), 0.1, weight_decay=0.01, momentum=0.9), data)
    for (name, p), start, sgd in zip(weights.items(), before, state(other), strict=True):
        expected = torch.where(free[name].reshape(p.shape), start, sgd)
        assert torch.equal(p.detach(), expected)
    train(model, optimizer, batches(5, 5))
    for (name, p), start in zip(weights.items(), before, strict=True):
        mask = free[name].reshape(p.shape)
        assert torch.equal(p.detach()[mask], start[mask])


def test_path_sgd_takes_no_first_step_from_weights_that_are_not_finite() -> None:
    """It went on without a word, where the others refuse."""
    model = zoo.mlp(3, 4, 2)
    optimizer = PathSGD(model, 0.1)
    nn.init.constant_(model[0].weight, math.nan)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model[2].bias.detach().clone()
    with pytest.raises(ValueError, match=r"0\.weight is not finite"):
        optimizer.step()
    assert torch.equal(model[2].bias.detach(), before)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"fused": True}], ids=str)
def test_a_sparse_gradient_of_a_frozen_skeleton_is_torchs_or_refused_in_one_line(options: dict[str, Any]) -> None:
    """With decay torch said "add(sparse, dense) is not supported", of no parameter."""
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.ReLU(), nn.Linear(6, 3))
    x = torch.tensor([1, 4])
    optimizer = FrozenSkeletonSGD(model, 0.1, example_input=x, **options)
    model(x).sum().backward()
    if options.keys() & {"weight_decay", "fused"}:
        with pytest.raises(RuntimeError, match=r"^0\.weight has a sparse gradient: .*; use dense ones$"):
            optimizer.step()
    else:
        optimizer.step()


def test_the_frozen_weights_are_those_that_gsgd_keeps() -> None:
    model = init_skeleton_(mlp())
    frozen, moving = FrozenSkeletonSGD(model, 0.1).skeleton, gspace.GSGD(copy.deepcopy(model), 0.1).skeleton
    assert torch.equal(frozen.out_edge, moving.out_edge)
    assert torch.equal(frozen.out_index, moving.out_index)
