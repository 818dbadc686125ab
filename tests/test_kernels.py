"""Every fast way of a step against the definition (`foreach=False`).

Without a GPU the Triton kernels run in Triton's interpreter, with tiles so small that every edge of a matrix is met.
What they read, the tables, they share with the compiled step for CPUs, which runs on every architecture of the zoo.
A step in the interpreter takes a second: there networks and options take turns, and all of their pairs are slow tests.
"""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
import zoo
from cases import CASES, Case, slow_above
from gspace.optim import fast
from gspace.optim.fast import native
from gspace.optim.fast.tables import Tile, as_matrix
from invariance import draw_inputs
from turns import turns

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tile(rows=4, width=16, loops=2, fold=8)


def refusal(way: type[fast.Bound], optimizer: gspace.GSGD, tile: Tile | None = None) -> str | None:
    return way.refusal(optimizer._current(), optimizer._rules(), tile)


def triton_way(optimizer: gspace.GSGD, tile: Tile = SMALL) -> None:
    """Binds the kernels, on a CPU in the interpreter."""
    pytest.importorskip("triton")
    from gspace.optim.fast import launch

    reason = refusal(launch.FusedStep, optimizer, tile)
    assert reason is None, reason
    optimizer.use(launch.FusedStep, tile)


def native_way(optimizer: gspace.GSGD, tile: Tile | None = None) -> None:
    reason = refusal(native.NativeStep, optimizer)
    if reason is not None and "compiler" in reason:
        pytest.skip(reason)
    assert reason is None, reason
    optimizer.use(native.NativeStep, tile)


WAYS: dict[str, Callable[[gspace.GSGD], None]] = {
    "triton": triton_way,
    "native": native_way,
    "native-small-tiles": partial(native_way, tile=Tile(4, 60, 2, 1)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "dampening": {"momentum": 0.8, "dampening": 0.1, "max_ratio": float("inf"), "max_drift": float("inf")},
    "spread": {"allocation": "spread", "momentum": 0.9, "nesterov": True},
    "clip": {"max_path_grad_norm": 0.3, "momentum": 0.8, "maximize": True},
}


def gradients(model: nn.Module, seed: int, scale: float = 0.3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale for p in model.parameters()]


def put(model: nn.Module, grads: list[Tensor]) -> None:
    """Gradients laid out as autograd lays them out."""
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = torch.empty_like(p).copy_(g)


def pair(model: nn.Module, bind: Callable[[gspace.GSGD], None], **options: Any) -> tuple[gspace.GSGD, gspace.GSGD]:
    """The definition and a fast way, on two copies of a model."""
    other = copy.deepcopy(model)
    definition = gspace.GSGD(model, 0.05, foreach=False, **options)
    optimizer = gspace.GSGD(other, 0.05, **options)
    bind(optimizer)
    return definition, optimizer


def run(definition: gspace.GSGD, optimizer: gspace.GSGD, steps: int = 3) -> None:
    bound = optimizer._way
    for seed in range(steps):
        for o in (definition, optimizer):
            put(o.model, gradients(o.model, seed))
            o.step()
    assert optimizer._way is bound
    assert isinstance(bound, fast.Bound)
    assert definition._way == "foreach=False"


def assert_equal(definition: gspace.GSGD, optimizer: gspace.GSGD, rtol: float = 1e-12) -> None:
    """Relative to the norm of each tensor: single entries may cancel."""

    def same(a: Tensor, b: Tensor) -> None:
        assert float((a.double() - b.double()).norm()) <= rtol * (float(a.double().norm()) + 1e-30)

    for p, q in zip(definition.model.parameters(), optimizer.model.parameters(), strict=True):
        same(p.detach(), q.detach())
        buffers = [o.state[x].get("momentum_buffer") for o, x in ((definition, p), (optimizer, q))]
        if buffers[0] is not None:
            same(*buffers)
    roots = definition.skeleton.roots
    ratios = [[x[roots] for x in o._built.last] for o in (definition, optimizer)]
    for a, b in zip(
        (definition.incoming, definition.outgoing, *ratios[0]),
        (optimizer.incoming, optimizer.outgoing, *ratios[1]),
        strict=True,
    ):
        same(a, b)


def build(
    case: Case, dtype: torch.dtype = torch.float64, layout: torch.memory_format = torch.contiguous_format
) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().to(dtype)
    return model.to(memory_format=layout) if any(p.dim() == 4 for p in model.parameters()) else model


# The same step --------------------------------------------------------------------------------------------------------

WITH_UNITS = [case for case in CASES if case.H_paper]
by_name = pytest.mark.parametrize("case", WITH_UNITS, ids=lambda case: case.name)
by_size = pytest.mark.parametrize("case", slow_above(12_000, WITH_UNITS))


def check_architecture(case: Case, way: str, name: str, layout: torch.memory_format) -> None:
    model, inputs = build(case, layout=layout), draw_inputs(case, 0, torch.float64, batch=2)
    found = gspace.analyze(model, inputs, residual=case.residual)
    definition, optimizer = pair(model, WAYS[way], analysis=found, **OPTIONS[name])
    run(definition, optimizer)
    assert_equal(definition, optimizer)


@by_size
def test_every_architecture(case: Case) -> None:
    """Options and layouts take turns."""
    turn = WITH_UNITS.index(case)
    layout = (torch.contiguous_format, torch.channels_last)[turn // 2 % 2]
    check_architecture(case, ("native", "native-small-tiles")[turn % 2], list(OPTIONS)[turn % len(OPTIONS)], layout)


@pytest.mark.slow
@by_name
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", ["native", "native-small-tiles"])
def test_every_architecture_in_every_way(case: Case, way: str, name: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        check_architecture(case, way, name, layout)


def transposed() -> nn.Sequential:
    """Weights stored (in, out), with taps, with groups, before a BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    )


def convolutional() -> nn.Sequential:
    """Taps that fill no tile, groups, depthwise, a flatten; rows of 16 bytes and others; γ, β and a GELU outside."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()),
        *(nn.Conv2d(8, 6, (1, 3), groups=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(5 * 8, 7), nn.ReLU(), nn.Linear(7, 18), nn.GELU(), nn.Linear(18, 2)),
    )


def wide_rows() -> nn.Sequential:
    """Several chunks in each direction."""
    return nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 3, bias=False))


NETWORKS = {
    "transposed": (transposed, (2, 6, 6)),
    "convolutional": (convolutional, (3, 8, 8)),
    "wide": (wide_rows, (20,)),
    "unequal": (partial(zoo.mlp, 4, 6, 2, 5, 3), (4,)),
}


# Every option once, every network, and BatchNorm with the options that treat it in their own way.
TURNS = {
    ("convolutional", "nesterov"),
    ("transposed", "spread"),
    ("transposed", "clip"),
    ("wide", "decay"),
    ("unequal", "plain"),
    ("unequal", "dampening"),
}
BY_TURNS = [
    pytest.param(network, options, marks=[] if (network, options) in TURNS else pytest.mark.slow)
    for network, options in itertools.product(NETWORKS, OPTIONS)
]


@pytest.mark.parametrize(("network", "options"), BY_TURNS)
def test_triton(network: str, options: str) -> None:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(DEVICE, torch.float64)
    analysis = gspace.analyze(model, torch.zeros(1, *shape, dtype=torch.float64, device=DEVICE))
    definition, optimizer = pair(model, triton_way, analysis=analysis, **OPTIONS[options])
    run(definition, optimizer, steps=2)
    assert_equal(definition, optimizer)


def on_cpu(network: str, options: str, way: str) -> bool:
    return way != "triton"


@turns("network, options, way", NETWORKS, OPTIONS, WAYS, allowed=on_cpu)
def test_on_a_cpu(network: str, options: str, way: str) -> None:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().double()
    analysis = gspace.analyze(model, torch.zeros(1, *shape, dtype=torch.float64))
    definition, optimizer = pair(model, WAYS[way], analysis=analysis, **OPTIONS[options])
    run(definition, optimizer, steps=2)
    assert_equal(definition, optimizer)


@pytest.mark.parametrize("way", WAYS)
def test_channels_last(way: str) -> None:
    torch.manual_seed(0)
    model = convolutional().to(DEVICE if way == "triton" else "cpu", torch.float64, memory_format=torch.channels_last)
    definition, optimizer = pair(model, WAYS[way], momentum=0.9)
    run(definition, optimizer, steps=2)
    assert_equal(definition, optimizer)
    built = optimizer._built
    assert as_matrix(built.plan.layers[0].edges.view(built.weights[0])) is not None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("width", [2100, 8300])
def test_long_rows(width: int, momentum: float) -> None:
    """Rows that four of them share a pass over, that one has left, and that are longer than a pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, 2)).double()
    definition, optimizer = pair(model, native_way, momentum=momentum)
    run(definition, optimizer, steps=2)
    assert_equal(definition, optimizer)


# Differences of rounding: `step.py` rounds to float32 after each operation, the kernels less often. Weights of 16 bits
# are rounded once in either, but Triton's interpreter truncates: one unit in the last place.
PRECISIONS = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_triton_in_other_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = convolutional().to(DEVICE, dtype)
    definition, optimizer = pair(model, triton_way)
    put(definition.model, gradients(definition.model, 0))
    put(optimizer.model, gradients(optimizer.model, 0))
    definition.step()
    optimizer.step()
    assert_equal(definition, optimizer, rtol=PRECISIONS[dtype])


def normalized() -> nn.Sequential:
    """Small, for a hundred steps in the interpreter."""
    layers = (nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("way", ["native", "compiled", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_a_hundred_recorded_gradients(way: str, dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    model = normalized().to(DEVICE, dtype) if way == "triton" else convolutional().to(dtype)
    definition, optimizer = pair(model, WAYS.get(way, lambda o: None), momentum=0.9, weight_decay=1e-3)
    step = torch.compile(optimizer.step, backend="aot_eager") if way == "compiled" else optimizer.step
    for seed in range(100):
        for o, take in ((definition, definition.step), (optimizer, step)):
            put(o.model, gradients(o.model, seed, scale=0.01))
            take()
    assert_equal(definition, optimizer, rtol)


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WORK", 1)
    results = []
    for threads in (1, 3):
        torch.manual_seed(0)
        optimizer = gspace.GSGD(wide_rows(), 0.05, momentum=0.9)
        native_way(optimizer, Tile(4, 8, 2, 1))
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        for seed in range(3):
            put(optimizer.model, gradients(optimizer.model, seed))
            optimizer.step()
        results.append([p.detach().clone() for p in optimizer.model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# What is handed in ----------------------------------------------------------------------------------------------------

ways = pytest.mark.parametrize("way", WAYS)


def make(way: str, **options: Any) -> tuple[gspace.GSGD, gspace.GSGD]:
    torch.manual_seed(0)
    return pair(wide_rows().to(DEVICE if way == "triton" else "cpu", torch.float64), WAYS[way], **options)


@ways
def test_missing_gradients(way: str) -> None:
    """A missing gradient is 0: the weight still takes its share of the path ratios."""
    definition, optimizer = make(way, momentum=0.5)
    for seed, missing in enumerate(("0.weight", "2.bias", "4.weight")):
        for o in (definition, optimizer):
            put(o.model, gradients(o.model, seed))
            o.model.get_parameter(missing).grad = None
            o.step()
    assert_equal(definition, optimizer)


@ways
def test_gradients_with_other_strides(way: str) -> None:
    definition, optimizer = make(way)
    for o in (definition, optimizer):
        put(o.model, gradients(o.model, 0))
        for p in o.model.parameters():
            if p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()
        o.step()
    assert_equal(definition, optimizer)


@ways
def test_weights_moved_in_memory_are_found(way: str) -> None:
    """An address that was written down must not be written to once the weight has gone."""
    definition, optimizer = make(way)
    run(definition, optimizer, 1)
    old = optimizer.model[2].weight.detach()
    for o in (definition, optimizer):
        o.model[2].weight.data = o.model[2].weight.detach().clone()
    before = old.clone()
    for o in (definition, optimizer):
        put(o.model, gradients(o.model, 1))
        o.step()
    assert torch.equal(old, before)
    assert_equal(definition, optimizer)


@ways
def test_groups_keep_their_own_rates(way: str) -> None:
    torch.manual_seed(0)
    optimizers = []
    for bind in (None, WAYS[way]):
        torch.manual_seed(0)
        model = wide_rows().to(DEVICE if way == "triton" else "cpu", torch.float64)
        groups = [
            {"params": [model[0].weight, model[4].weight], "lr": 0.1, "momentum": 0.9},
            {"params": [model[0].bias, *model[2].parameters()], "lr": torch.tensor(0.03), "weight_decay": 0.1},
        ]
        options = {"foreach": False} if bind is None else {}
        optimizers.append(gspace.GSGD(model, 0.05, params=groups, **options))
        if bind is not None:
            bind(optimizers[-1])
    definition, optimizer = optimizers
    run(definition, optimizer)
    for o in (definition, optimizer):
        o.param_groups[0]["lr"] = 0.01
        o.param_groups[1]["lr"].fill_(0.2)
    run(definition, optimizer)
    assert_equal(definition, optimizer)


@ways
def test_a_gradient_that_is_not_finite_changes_nothing(way: str) -> None:
    for name in ("0.weight", "2.bias", "4.weight"):
        _, optimizer = make(way, momentum=0.9)
        put(optimizer.model, gradients(optimizer.model, 0))
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in optimizer.model.parameters()]
        optimizer.model.get_parameter(name).grad.view(-1)[-1] = float("inf")
        if way == "triton" and DEVICE.type == "cuda":
            optimizer.step()
            assert optimizer.statistics()["skipped"] == 1
        elif way == "triton":  # in the interpreter the device is the host, which would refuse before the kernels do
            assert optimizer._way.step(optimizer.param_groups, optimizer.state)
            assert optimizer.statistics()["skipped"] == 1
            with pytest.warns(RuntimeWarning, match="1 steps were not taken"):
                optimizer.state_dict()
        else:
            with pytest.raises(RuntimeError, match=f"the gradient of {name} is not finite"):
                optimizer.step()
        for p, old in zip(optimizer.model.parameters(), weights, strict=True):
            assert torch.equal(p, old)
        after = optimizer.state_dict()
        for a, b in zip(before["state"].values(), after["state"].values(), strict=True):
            assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])
        put(optimizer.model, gradients(optimizer.model, 1))
        optimizer.step()
        assert all(bool(p.isfinite().all()) for p in optimizer.model.parameters())
        assert not torch.equal(next(optimizer.model.parameters()), weights[0])


def skip_a_step(optimizer: gspace.GSGD) -> None:
    """What a GPU does with a gradient that is not finite; in the interpreter the host would refuse it before."""
    next(optimizer.model.parameters()).grad.view(-1)[0] = float("nan")
    assert optimizer._way.step(optimizer.param_groups, optimizer.state)
    assert optimizer.statistics()["skipped"] == 1


def test_a_first_step_that_was_not_taken_leaves_momentum_new() -> None:
    definition, optimizer = make("triton", momentum=0.9)
    put(optimizer.model, gradients(optimizer.model, 7))
    skip_a_step(optimizer)
    run(definition, optimizer)
    assert_equal(definition, optimizer)


class Sparse(nn.Module):
    """An embedding outside every unit, with sparse gradients, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 5, sparse=True)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.body(torch.sigmoid(self.tokens(x)))) * torch.sigmoid(self.gain)


@pytest.mark.parametrize("where", ["a unit, beside a sparse gradient", "outside, and no unit has a gradient"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=["default", "definition"])
def test_what_is_left_to_the_definition_is_checked_too(where: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Sparse()
    optimizer = gspace.GSGD(model, 0.1, example_input=torch.arange(4), **options)
    model(torch.arange(4)).sum().backward()
    bad = model.body[0].weight if where.startswith("a unit") else model.gain
    bad.grad.view(-1)[0] = float("nan")
    if bad is model.gain:
        for p in model.body.parameters():
            p.grad = None
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="is not finite"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("of", "momentum"), [(0, 0.9), (1, 0.0)])
def test_groups_that_differ_in_maximize(of: int, momentum: float, way: str) -> None:
    torch.manual_seed(0)
    model = wide_rows().to(DEVICE if way == "triton" else "cpu", torch.float64)
    other = copy.deepcopy(model)
    made = []
    for m, foreach in ((model, False), (other, None)):
        some = list(m.parameters())
        groups = [{"params": some[:2], "maximize": of == 0}, {"params": some[2:], "maximize": of == 1, "lr": 0.02}]
        made.append(gspace.GSGD(m, 0.05, momentum, params=groups, foreach=foreach))
    WAYS[way](made[1])
    run(*made)
    assert_equal(*made)


@pytest.mark.parametrize("way", WAYS)
def test_momentum_switched_for_one_of_two_groups(way: str) -> None:
    """The buffers of a group without momentum wait; `test_optimizer_unusual` compares the definition with torch."""
    torch.manual_seed(0)
    models = [wide_rows().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = []
    for model in models:
        some = list(model.parameters())
        groups = [{"params": some[:2], "momentum": 0.9}, {"params": some[2:], "momentum": 0.0}]
        optimizers.append(gspace.GSGD(model, 0.05, params=groups, foreach=False if model is models[0] else None))
    WAYS[way](optimizers[1])
    for seed, momenta in enumerate([(0.9, 0.0), (0.9, 0.5), (0.0, 0.5), (0.0, 0.5), (0.9, 0.0), (0.9, 0.5)]):
        for o in optimizers:
            for group, momentum in zip(o.param_groups, momenta, strict=True):
                group["momentum"] = momentum
            put(o.model, gradients(o.model, seed))
            o.step()
    assert_equal(*optimizers)


CHANGES: dict[str, list[dict[str, Any]]] = {
    "decay on and off": [{"weight_decay": 0.1}, {"weight_decay": 0.0}],
    "momentum on, off and on": [{"momentum": 0.9}, {"momentum": 0}, {"momentum": 0.5}],
    "nesterov, maximize": [{"momentum": 0.9}, {"nesterov": True}, {"maximize": True}],
    "rates": [{"lr": 0.1}, {"lr": 0.0}, {"lr": torch.tensor(0.02)}],
}


@pytest.mark.parametrize("name", CHANGES)
def test_recorded_launches_notice_what_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on a GPU gets the calls of the second again; without one the interpreter is made to."""
    pytest.importorskip("triton")
    from gspace.optim.fast import kernels, launch

    def remembered(self: Any, kernel: str, programs: int, tensors: tuple[Any, ...], **options: Any) -> None:
        def call() -> None:
            getattr(kernels, kernel)[(programs,)](*tensors, EARLY=False, **options)

        key = (kernel, programs, *options.values())
        call()
        if key in self.compiled:
            self.calls.append((call, ()))
        else:
            self.compiled[key], self.complete = (call, []), False

    if DEVICE.type == "cpu":
        monkeypatch.setattr(launch.FusedStep, "_launch", remembered)
    torch.manual_seed(0)
    definition, optimizer = pair(zoo.mlp(3, 4, 2).to(DEVICE, torch.float64), triton_way)
    for p in optimizer.model.parameters():
        p.grad = torch.zeros_like(p)  # gradients stay where they are
    replays = 0
    for seed, change in enumerate([{}, *CHANGES[name]]):
        for o in (definition, optimizer):
            o.param_groups[0].update(change)
        for k in range(3):
            grads = gradients(definition.model, 10 * seed + k)
            put(definition.model, grads)
            for p, new in zip(optimizer.model.parameters(), grads, strict=True):
                p.grad.copy_(new)
            definition.step()
            calls = optimizer._way.calls
            optimizer.step()
            replays += calls is optimizer._way.calls and len(calls) > 0
    assert replays >= 2
    assert_equal(definition, optimizer)


def test_rates_that_only_the_device_knows_are_told_from_zero() -> None:
    pytest.importorskip("triton")
    from gspace.optim.fast import launch, network

    cpu, elsewhere = torch.device("cpu"), torch.tensor(0.1, device="meta")
    assert launch._rate(0.0, cpu) == launch._rate(torch.tensor(0.1), cpu) == 0
    assert launch._rate(elsewhere.double(), torch.device("meta")) == launch._rate(elsewhere, cpu) == -1
    group = {"lr": elsewhere, "momentum": 0, "nesterov": False, "weight_decay": 0.5, "maximize": True}
    assert list(network.hyper_parameters([group], read=False)) == [0, 0, 0, 0.5, -1]
    with pytest.raises(RuntimeError, match="meta"):
        network.hyper_parameters([group], read=True)


def test_guards_set_later_count() -> None:
    definition, optimizer = make("native")
    run(definition, optimizer)
    for o in (definition, optimizer):
        o.max_drift = 1.0001
        put(o.model, gradients(o.model, 7))
        o.step()
    assert_equal(definition, optimizer)


def test_weights_that_lie_otherwise_at_the_same_address_are_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = gspace.GSGD(model, 0.1)
    put(model, gradients(model, 0))
    optimizer.step()
    bound = optimizer._way
    optimizer.step()
    assert optimizer._way is bound
    model[0].weight.data = model[0].weight.data.t()
    optimizer.step()
    turned = optimizer._way
    assert isinstance(turned, fast.Bound)
    assert turned is not bound
    storage = model[2].weight.data.untyped_storage()
    model[2].weight.data = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (8, 8))
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    optimizer.step()
    assert optimizer._way == "parameters differ in dtype or device"


@pytest.mark.gpu
def test_a_rate_on_the_device_takes_late_and_sparse_gradients() -> None:
    from gspace.optim.gsgd import plain_sgd

    a, b, table = (torch.ones(4, 2, device="cuda") for _ in range(3))
    group = dict.fromkeys(("foreach", "fused")) | {"lr": torch.tensor(0.1, device="cuda"), "momentum": 0.9}
    group |= {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
    state: dict[Tensor, dict[str, Any]] = {p: {} for p in (a, b, table)}
    plain_sgd(group, state, [a], [torch.ones_like(a)])
    plain_sgd(group, state, [a, b], [torch.ones_like(a), torch.ones_like(b)])
    assert torch.allclose(b, torch.full_like(b, 0.9))
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), device="cuda")
    plain_sgd({**group, "momentum": 0}, state, [table], [sparse])
    assert torch.allclose(table[1], torch.full_like(table[1], 0.9))


# Which way ------------------------------------------------------------------------------------------------------------


def chosen(model: nn.Module, **options: Any) -> str:
    optimizer = gspace.GSGD(model, 0.1, **options)
    way = optimizer._find_way(optimizer._current())
    return type(way).__name__ if isinstance(way, fast.Bound) else way


def test_foreach_and_fused_choose() -> None:
    assert chosen(wide_rows(), foreach=True) == "foreach=True"
    assert chosen(wide_rows(), fused=False) == "fused=False"
    assert chosen(wide_rows(), foreach=False) == "foreach=False"
    assert "no parameter touches a unit" in chosen(nn.Sequential(nn.Linear(2, 2)))
    assert chosen(normalized(), batch_norm="exact") == "batch_norm='exact'"
    assert chosen(normalized(), batch_norm="paper") == "0.weight feeds a BatchNorm, and batch_norm='paper'"
    assert chosen(wide_rows(), batch_norm="paper", max_path_grad_norm=1.0) == chosen(wide_rows())
    with pytest.raises(RuntimeError, match=r"fused=True, but .*bfloat16.* Leave fused=None"):
        chosen(wide_rows().bfloat16(), fused=True)


def test_without_a_compiler_it_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda real: "no C compiler was found (CC, cc, gcc, clang)")
    assert "no C compiler" in chosen(wide_rows())
    with pytest.raises(RuntimeError, match="no C compiler"):
        chosen(wide_rows(), fused=True)


def test_what_has_gaps_in_memory_is_left_to_the_definition() -> None:
    torch.manual_seed(0)
    model = wide_rows().double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for m in (model, other):
            m[2].weight = nn.Parameter(torch.stack([m[2].weight, m[2].weight], -1)[..., 0])
    assert "not dense" in chosen(other, allocation="spread")
    definition, optimizer = gspace.GSGD(model, 0.05, foreach=False), gspace.GSGD(other, 0.05)
    for seed in range(2):
        for o in (definition, optimizer):
            put(o.model, gradients(o.model, seed))
            o.step()
    assert_equal(definition, optimizer)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(self.kernel.fn.__name__)
        return self.kernel[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


@pytest.mark.parametrize(("options", "expected"), [({}, 5), ({"momentum": 0.9, "weight_decay": 0.1}, 5)])
def test_launches_do_not_depend_on_depth(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: int
) -> None:
    pytest.importorskip("triton")
    from gspace.optim.fast import launch

    launches: list[str] = []
    for name in ("walk_pass", "flow_pass", "fold_pass", "roots_pass", "update_pass"):
        monkeypatch.setattr(launch.kernels, name, Counted(getattr(launch.kernels, name), launches))
    counts = []
    for depth in (2, 12):
        model = zoo.mlp(3, *[4] * depth, 2).to(DEVICE)
        optimizer = gspace.GSGD(model, 0.1, **options)
        optimizer.use(launch.FusedStep, SMALL)
        put(model, gradients(model, 0))
        launches.clear()
        optimizer.step()
        counts.append(len(launches))
    assert counts == [expected, expected]


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_on_a_gpu(options: str) -> None:
    torch.manual_seed(0)
    definition, optimizer = pair(convolutional().double().cuda(), lambda o: None, **OPTIONS[options])
    optimizer._find_way(optimizer._current())
    run(definition, optimizer)
    assert_equal(definition, optimizer)


@pytest.mark.gpu
def test_kernels_counted_by_the_profiler() -> None:
    counts = []
    for depth in (2, 12):
        model = zoo.mlp(32, *[64] * depth, 10).cuda()
        optimizer = gspace.GSGD(model, 0.1, momentum=0.9)
        for seed in range(2):
            put(model, gradients(model, seed))
            optimizer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        counts.append(sum(1 for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA))
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("moved", [False, True])
def test_a_captured_step_follows_the_rate_and_equals_the_definition(moved: bool) -> None:
    torch.manual_seed(0)
    rates = [torch.tensor(0.05, device="cuda") for _ in range(2)]
    one = convolutional().double().cuda()
    two = copy.deepcopy(one)
    definition = gspace.GSGD(one, rates[0], momentum=0.9, foreach=False)
    optimizer = gspace.GSGD(two, rates[1], momentum=0.9)
    for o in (definition, optimizer):
        put(o.model, gradients(o.model, 0))
        o.step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        put(two, gradients(two, 1))
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    before = [p.grad for p in two.parameters()]  # alive: what is put next lies elsewhere
    if moved:
        put(two, gradients(two, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert (optimizer._way.header.last is None) == moved  # the graph copies, or reads what the step before it read
    put(one, gradients(one, 1))
    definition.step()
    static = [p.grad for p in two.parameters()]
    assert all((a is b) != moved for a, b in zip(before, static, strict=True))
    for seed in range(2, 100):
        for rate in rates:
            rate.fill_(0.1 / seed)
        put(one, gradients(one, seed, scale=0.01))
        definition.step()
        if seed % 10 == 5:  # a step between replays, with gradients that lie elsewhere
            put(two, gradients(two, seed, scale=0.01))
            optimizer.step()
            continue
        for g, new in zip(static, gradients(two, seed, scale=0.01), strict=True):
            g.copy_(new)
        graph.replay()
    assert_equal(definition, optimizer)
