"""The library does not depend on torch's default device.

Users call `torch.set_default_device("cuda")`, or wrap their code in `with torch.device("cuda")`. "meta" stands in for
"cuda" here: a tensor that the library makes without a device would be one without values, and what reads it fails or
comes out different. Everything is compared with the same call without a default device, to rounding (LAPACK and oneDNN
sum in an order that depends on where memory lies), and must lie where the parameters lie, on the CPU.

Nothing is exempt: draws that a user asks for (`random_scales`, `init_skeleton_(sign="random")`, `psi_flatness`) come
from a CPU generator whatever the default device is, so that a seed means one thing.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
import statements
from gspace import paths
from gspace.devices import on_cpu
from gspace.optim.coordinates import coordinates
from test_kernels import native_way, triton_way
from turns import turns


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (conv_net, (6, 2, 7, 7)),
    "mlp": (mlp, (6, 5)),
}
Case = Callable[[nn.Module, Tensor, Tensor], Any]


@pytest.fixture(params=MODELS)
def problem(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and targets, all made on the CPU."""
    make, shape = MODELS[request.param]
    torch.manual_seed(0)
    return make(), torch.randn(shape), torch.randint(3, shape[:1])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and plain values inside dataclasses, models, dicts and lists, each with its place."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for k, inside in enumerate(value):
            yield from leaves(inside, f"{path}/{k}")
    else:
        yield path, value


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    assert any(isinstance(b, (Tensor, float, int, str)) for _, (_, b) in pairs)
    for (at, a), (there, b) in pairs:
        assert at == there
        if isinstance(b, Tensor):
            assert a.device.type == b.device.type == "cpu", at
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda message, at=at: f"{at}: {message}")
        elif isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-9, nan_ok=True), at
        elif not callable(b):
            assert a == b, at


def assert_unmoved(case: Case, problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    """`case` gives the same whatever the default device is."""
    model, x, y = problem
    torch.manual_seed(1)
    expected = case(copy.deepcopy(model), x, y)
    here = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.device("meta"):
        found = case(here, x, y)
        assert torch.empty(0).device.type == "meta"  # and is left as it was
    assert_same(found, expected)


# Functions ------------------------------------------------------------------------------------------------------------


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def gradients(value: Tensor, model: nn.Module) -> list[Tensor | None]:
    return list(torch.autograd.grad(value, list(model.parameters()), allow_unused=True))


def equivalent(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    other = gspace.rescale_(copy.deepcopy(m), gspace.random_scales(m, seeded()))
    changed = copy.deepcopy(m)
    with torch.no_grad():
        next(changed.parameters()).mul_(1.5)
    return gspace.are_equivalent(m, other, absorbed=True), gspace.are_equivalent(m, changed, rtol=1e-4)


def norm(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = gspace.path_norm(m.eval(), example_input=x)
    return found.log, gradients(found.log, m)


def penalty(mode: Any) -> Case:
    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        value = gspace.BasisPathPenalty(0.1, mode)(m)
        return value, gradients(value, m)

    return case


def gap(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    return gspace.invariance_gap(lambda n: gspace.GSGD(n, 0.1), m, [(x, y)] * 2, generator=seeded())


def invariance(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    optimizers = {"sgd": lambda n: torch.optim.SGD(n.parameters(), 0.1), "gsgd": lambda n: gspace.GSGD(n, 0.1)}
    return gspace.compare_invariance(optimizers, m, [(x, y)] * 2, generator=seeded())


def ratios(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    statistics = gspace.RatioStatistics.of(m)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.1)
    return statistics.update(), statistics.history


def explicit(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    """`gspace.paths`, from the wiring to a step by dense solve."""
    m = m.double()
    analysis, weights = gspace.analyze(m), dict(m.named_parameters())
    skeleton = gspace.build_skeleton(m, analysis, choice="pivoted")
    basis = paths.basis_paths(skeleton, weights)
    wiring, w = basis.wiring, basis.wiring.flatten(weights)
    some = paths.enumerate_paths(wiring, limit=20_000)[:200]
    A = paths.structure_matrix(wiring, some)
    moved = paths.dense_step(basis, w, w.square(), lambda v, g: v - 1e-3 * g)
    active = torch.ones(2, wiring.H + 1, dtype=torch.bool, device="cpu")
    values = paths.path_values(wiring, w, some), paths.activation_status(wiring, some, active)
    return paths.count_paths(wiring), wiring.H, basis, A, paths.rank(A), values, paths.combine(some[0], basis), moved


FUNCTIONS: dict[str, Case] = {
    "analyze": lambda m, x, y: gspace.analyze(m),
    "analyze-input": lambda m, x, y: gspace.analyze(m, x, residual="tie", pin=["0"]),
    "skeleton-aligned": lambda m, x, y: gspace.build_skeleton(m, gspace.analyze(m)),
    "skeleton-pivoted": lambda m, x, y: gspace.build_skeleton(m, gspace.analyze(m), choice="pivoted"),
    "init_skeleton_": lambda m, x, y: gspace.init_skeleton_(m),
    "init_skeleton_-random": lambda m, x, y: gspace.init_skeleton_(m, "random", seeded()),
    "init_skeleton_-global-seed": lambda m, x, y: gspace.init_skeleton_(m, "random"),
    "random_scales": lambda m, x, y: gspace.random_scales(m, seeded(), absorbed=True),
    "random_scales-global-seed": lambda m, x, y: gspace.random_scales(m),
    "rescale_": lambda m, x, y: gspace.rescale_(m, gspace.random_scales(m, seeded(), absorbed=True)),
    "scales": lambda m, x, y: gspace.Scales([2.0, 4.0]) @ gspace.Scales.identity(2).inverse(),  # type: ignore[arg-type]
    "balance_": lambda m, x, y: (gspace.balance_(m), m),
    "balance_-absorbed": lambda m, x, y: (gspace.balance_(m, absorbed=True), m),
    "are_equivalent": equivalent,
    "path_norm": norm,
    "basis_path_norm": lambda m, x, y: (gspace.basis_path_norm(m), gspace.basis_path_norm(m, 3)),
    "penalty-released": penalty("released"),
    "penalty-sup": penalty("sup"),
    "coordinates": lambda m, x, y: (coordinates(m), coordinates(m, reference="one", view="exact")),
    "balancedness": lambda m, x, y: gspace.balancedness(m),
    "distance": lambda m, x, y: gspace.distance(m, gspace.init_skeleton_(copy.deepcopy(m))),
    "RatioStatistics": ratios,
    "psi_flatness": lambda m, x, y: gspace.psi_flatness(m, x, y, radius=0.01, samples=3, generator=seeded()),
    "psi_flatness-global-seed": lambda m, x, y: gspace.psi_flatness(m, x, y, radius=0.01, bound="relative", samples=3),
    "invariance_gap": gap,
    "compare_invariance": invariance,
    "paths": explicit,
}


@turns("name, problem", FUNCTIONS, MODELS, indirect=["problem"])
def test_a_function_gives_the_same(name: str, problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    assert_unmoved(FUNCTIONS[name], problem)


def test_a_model_without_parameters() -> None:
    """No parameter says where tensors belong."""

    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = gspace.analyze(m)
        skeletons = [gspace.build_skeleton(m, found, choice=choice) for choice in ("aligned", "pivoted")]
        return found, skeletons, gspace.balance_(m), gspace.balancedness(m), gspace.path_norm(m, example_input=x)

    assert_unmoved(case, (nn.ReLU(), torch.ones(2, 3), torch.zeros(2)))


def test_the_statements_of_the_paper(generator: torch.Generator) -> None:
    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        weights = dict(m.named_parameters())
        basis = paths.basis_paths(gspace.build_skeleton(m, gspace.analyze(m)), weights)
        wiring, w = basis.wiring, basis.wiring.flatten(weights)
        every, network = paths.enumerate_paths(wiring), paths.as_function(m, wiring)
        other = statements.scales_between(wiring, w, wiring.flatten(dict(gspace.rescale_(m, c).named_parameters())))
        return (
            statements.output_by_paths(m, wiring, every, x),
            statements.occurrences(m, wiring, every, torch.ones_like(x[:1])),
            other,
            statements.theorem_3_4(wiring, every),
            statements.corollary_3_8(basis, w, lambda w: network(w, x), seeded()),
            statements.theorem_4_1(basis, w, lambda w: network(w, x).square().mean(), 1e-3, 2, seeded()),
        )

    small = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    c = gspace.random_scales(small, generator)
    assert_unmoved(case, (small, torch.randn(4, 2, dtype=torch.float64), torch.zeros(4)))


# Training -------------------------------------------------------------------------------------------------------------


def two_groups(m: nn.Module) -> list[dict[str, Any]]:
    first, *rest = m.parameters()
    return [{"params": [first], "lr": 0.02, "momentum": 0.5, "nesterov": True}, {"params": rest}]


OPTIMIZERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gsgd": lambda m, x: gspace.GSGD(m, 0.05),
    "gsgd-example-input": lambda m, x: gspace.GSGD(m, 0.05, example_input=x),
    "gsgd-skeleton": lambda m, x: gspace.GSGD(gspace.init_skeleton_(m), 0.05),
    "gsgd-momentum": lambda m, x: gspace.GSGD(m, 0.05, 0.9, weight_decay=0.01),
    "gsgd-clipped": lambda m, x: gspace.GSGD(m, 0.05, max_path_grad_norm=0.1),
    "gsgd-paper": lambda m, x: gspace.GSGD(m, 0.05, batch_norm="paper"),
    "gsgd-spread": lambda m, x: gspace.GSGD(m, 0.05, allocation="spread"),
    "gsgd-groups": lambda m, x: gspace.GSGD(m, 0.05, 0.9, params=two_groups(m)),
    "gsgd-tensor-rate": lambda m, x: gspace.GSGD(m, torch.tensor(0.05, device="cpu")),
    "gsgd-partial": lambda m, x: gspace.GSGD(m, 0.05, params=list(m.parameters())[:3]),
    "definition": lambda m, x: gspace.GSGD(m, 0.05, foreach=False),
    "definition-momentum": lambda m, x: gspace.GSGD(m, 0.05, 0.9, nesterov=True, weight_decay=0.01, foreach=False),
    "definition-groups": lambda m, x: gspace.GSGD(m, 0.05, 0.9, params=two_groups(m), foreach=False),
    "definition-clipped": lambda m, x: gspace.GSGD(m, 0.05, 0.9, max_path_grad_norm=0.1, foreach=False),
    "bfloat16": lambda m, x: gspace.GSGD(m.bfloat16(), 0.05, 0.9),
    "in-sgd": lambda m, x: gspace.InGSpace(m, torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    # torch's own Adam makes its step count on the CPU; releases that make it on the default device fail under "meta".
    "in-adam": lambda m, x: gspace.InGSpace(m, torch.optim.Adam, lr=0.01),
    "path-sgd": lambda m, x: gspace.PathSGD(m, 0.01, 0.9, example_input=x),
    "frozen-skeleton": lambda m, x: gspace.FrozenSkeletonSGD(m, 0.05, momentum=0.9),
}


def train(optimizer: Any, m: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(m(x.to(next(m.parameters()))).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@turns("name, problem", OPTIMIZERS, MODELS, indirect=["problem"])
def test_a_training_is_the_same(name: str, problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Three steps; a state that is saved and loaded into a new optimizer; one step more."""

    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        optimizer = OPTIMIZERS[name](m, x)
        losses = train(optimizer, m, x, y, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        other = OPTIMIZERS[name](copy.deepcopy(m), x)
        other.load_state_dict(saved)
        resumed = OPTIMIZERS[name](m, x)
        resumed.load_state_dict(saved)
        losses += train(resumed, m, x, y, 1)
        report = resumed.statistics() if hasattr(resumed, "statistics") else None
        return losses, m, saved, other.state_dict(), resumed.state_dict(), report

    assert_unmoved(case, problem)


@pytest.mark.parametrize("way", [triton_way, native_way], ids=["triton", "native"])
def test_every_way_of_a_step(way: Callable[[gspace.GSGD], None]) -> None:
    """The way is bound and taken under the default device; Triton's kernels in its interpreter."""

    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        optimizer = gspace.GSGD(m, 0.05, 0.9)
        way(optimizer)
        return train(optimizer, m, x, y, 2), m, optimizer.state_dict()

    torch.manual_seed(0)
    assert_unmoved(case, (conv_net(), torch.randn(6, 2, 7, 7), torch.randint(3, (6,))))


@pytest.mark.parametrize(
    "make", [lambda m: gspace.GSGD(m, 0.05), lambda m: gspace.InGSpace(m, torch.optim.SGD, lr=0.05)]
)
def test_weights_that_others_change(
    make: Callable[[nn.Module], Any], problem: tuple[nn.Module, Tensor, Tensor]
) -> None:
    """Frozen, written and moved parameters: what a step measures anew."""

    def case(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        optimizer = make(m)
        train(optimizer, m, x, y, 1)
        last = list(m.parameters())[-1]
        last.requires_grad_(False)
        train(optimizer, m, x, y, 1)
        last.requires_grad_(True)
        with torch.no_grad():
            last.mul_(2)
        train(optimizer, m, x, y, 1)
        m.double()
        return train(optimizer, m, x, y, 1), m, optimizer.state_dict()

    assert_unmoved(case, problem)


# The user's code ------------------------------------------------------------------------------------------------------

SEEN: list[str] = []


class Watching(nn.Module):
    """Notes where a tensor without a device would be made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(torch.empty(0).device.type)
        return self.inner(x)


CALLERS: dict[str, Case] = {
    "analyze": lambda m, x, y: gspace.analyze(m, x),
    "init_skeleton_": lambda m, x, y: gspace.init_skeleton_(m, example_input=x),
    "rescale_": lambda m, x, y: gspace.rescale_(m, gspace.random_scales(m, seeded(), example_input=x), example_input=x),
    "path_norm": lambda m, x, y: gspace.path_norm(m, example_input=x).log,
    "psi_flatness": lambda m, x, y: gspace.psi_flatness(m, x, y, radius=0.01, generator=seeded(), example_input=x),
    "GSGD": lambda m, x, y: train(gspace.GSGD(m, 0.05, example_input=x), m, x, y, 1),
    "PathSGD": lambda m, x, y: train(gspace.PathSGD(m, 0.01, example_input=x), m, x, y, 1),
}


@pytest.mark.parametrize("name", CALLERS)
def test_the_model_finds_the_default_device(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Watching(mlp()), torch.randn(6, 5), torch.randint(3, (6,))
    expected = CALLERS[name](copy.deepcopy(model), x, y)
    SEEN.clear()
    with torch.device("meta"):
        found = CALLERS[name](model, x, y)
    assert_same(found, expected)
    assert set(SEEN) == {"meta"}


def test_a_default_device_set_for_good(problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    """`torch.set_default_device` instead of a context."""
    model, x, y = problem

    def case(m: nn.Module) -> Any:
        return gspace.analyze(m), train(gspace.GSGD(m, 0.05, 0.9), m, x, y, 3), m

    expected = case(copy.deepcopy(model))
    torch.set_default_device("meta")
    try:
        found = case(model)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


def test_on_cpu_adds_no_context_where_the_default_is_the_cpu() -> None:
    contexts = on_cpu(torch._C._len_torch_function_stack)
    assert contexts() == 0
    with torch.device("cpu"):
        assert contexts() == 1


@turns("name, problem", OPTIMIZERS, MODELS, indirect=["problem"])
def test_a_step_does_not_ask_for_the_default_device(
    name: str, problem: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_cpu` asks by making a tensor: the first step may, to bind what takes it, later ones name their devices."""
    model, x, y = problem
    optimizer = OPTIMIZERS[name](model, x)
    train(optimizer, model, x, y, 1)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("asked for the default device"))
    optimizer.step()
