"""Rare circumstances in which a step once went wrong without a word."""

import copy
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import gspace
import zoo
from contract import (
    GSPACE,
    KINDS,
    Kind,
    Net,
    assert_same,
    batches,
    chain,
    gspace_kinds,
    moved,
    train,
    values,
)
from gspace import PathSGD

WAYS: dict[str, dict[str, Any]] = {"best": {}, "definition": {"foreach": False}}
ways = pytest.mark.parametrize("way", WAYS)
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> None:
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@ways
def test_deterministic_algorithms_take_the_same_step(way: str, deterministic: None) -> None:
    one, two = zoo.mlp(6, 7, 5, 3).double(), zoo.mlp(6, 7, 5, 3).double()
    two.load_state_dict(one.state_dict())
    step(one, gspace.GSGD(one, 0.1, **WAYS[way]))
    torch.use_deterministic_algorithms(False)
    step(two, gspace.GSGD(two, 0.1, foreach=False))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@ways
@pytest.mark.parametrize(
    "switches", [{3: (0.9, 0.9)}, {2: (0.9, 0.9), 4: (0.0, 0.9), 6: (0.9, 0.9)}], ids=["on", "on, off and on"]
)
def test_momentum_switched_for_one_of_two_groups(way: str, switches: dict[int, tuple[float, float]]) -> None:
    one, two = zoo.mlp(6, 7, 7, 3).double(), zoo.mlp(6, 7, 7, 3).double()
    two.load_state_dict(one.state_dict())

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        parts = (list(model[:2].parameters()), 0.0), (list(model[2:].parameters()), 0.9)
        return [{"params": params, "momentum": momentum} for params, momentum in parts]

    ours = gspace.GSGD(one, 0.1, params=groups(one), **WAYS[way])
    inner = gspace.InGSpace(two, torch.optim.SGD, params=groups(two), lr=0.1)
    for i in range(8):
        for optimizer in (ours, inner):
            for group, momentum in zip(optimizer.param_groups, switches.get(i, ()), strict=False):
                group["momentum"] = momentum
        step(one, ours)
        step(two, inner)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@gspace_kinds
def test_memory_that_a_model_leaves_is_free(kind: Kind) -> None:
    model = chain()
    optimizer = kind.make(model, foreach=False)
    train(model, optimizer, batches(1))
    memory = StorageWeakRef(model[2].weight.untyped_storage())
    model.double()
    assert memory.expired()
    train(model, optimizer, batches(1, dtype=torch.float64))


@pytest.mark.parametrize("kind", GSPACE[:2], ids=lambda kind: kind.name)
def test_complex_parameters_are_checked_too(kind: Kind) -> None:
    model = zoo.mlp(6, 7, 3)
    model.z = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = kind.make(model)
    (model(X.float()).square().mean() + model.z.abs().square().sum()).backward()
    model.z.grad[1] = complex(0, float("inf"))
    before = values(model)
    with pytest.raises(RuntimeError, match="gradient of z is not finite"):
        optimizer.step()
    assert moved(model, before) == set()


@ways
def test_a_gradient_that_torch_has_not_negated_yet(way: str) -> None:
    model = zoo.mlp(6, 7, 1).double()
    model.phase = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
    optimizer = gspace.GSGD(model, 0.1, **WAYS[way])
    z = torch.complex(torch.ones(1, dtype=torch.float64), model.phase).conj()
    (model(X).square().mean() + z.imag.square().sum() + z.real.sum()).backward()
    assert model.phase.grad.is_neg()
    optimizer.step()
    assert model.phase.item() == pytest.approx(0.24)


class Tokens(nn.Module):
    """A table with sparse gradients, outside of every unit, before an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.rest = zoo.mlp(6, 8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.table(x)))


def test_a_sparse_gradient_outside_of_units_slows_nothing_down() -> None:
    model = Tokens()
    optimizer = gspace.GSGD(model, 0.1, example_input=torch.arange(8))
    before = values(model)
    for _ in range(2):
        step(model, optimizer, torch.arange(8))
    assert model.table.weight.grad.is_sparse
    assert optimizer.statistics()["way"] == gspace_way(zoo.mlp(6, 8, 8, 3))
    assert moved(model, before) == set(before)


def gspace_way(model: nn.Module) -> str:
    optimizer = gspace.GSGD(model, 0.1)
    step(model, optimizer, X.float())
    return str(optimizer.statistics()["way"])


def test_a_sparse_gradient_that_comes_late() -> None:
    model = Tokens()
    optimizer = gspace.GSGD(model, 0.1, example_input=torch.arange(8))
    (model(torch.arange(8)) - 1).square().mean().backward()
    model.table.weight.grad = None
    optimizer.step()
    way = optimizer.statistics()["way"]
    twin = copy.deepcopy(model)
    definition = gspace.GSGD(twin, 0.1, example_input=torch.arange(8), foreach=False)
    definition.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin, definition)):
        o.param_groups[0]["foreach"] = None if m is model else False
        step(m, o, torch.arange(8))
    assert optimizer.statistics()["way"] == way == gspace_way(zoo.mlp(6, 8, 8, 3))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_fused_is_refused_before_anything_moves() -> None:
    model = Tokens()
    optimizer = gspace.GSGD(model, 0.1, example_input=torch.arange(8))
    step(model, optimizer, torch.arange(8))
    if optimizer.statistics()["way"] != "NativeStep":
        pytest.skip("no C compiler")
    optimizer.param_groups[0]["fused"] = True
    before = values(model)
    with pytest.raises(RuntimeError, match="sparse"):
        step(model, optimizer, torch.arange(8))
    assert moved(model, before) == set()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hooks_see_the_whole_state(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(3))
    first.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    second.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    saved = copy.deepcopy(first.state_dict())  # torch hands out the tensors themselves
    assert any("skeleton" in kept for kept in saved["wrapped"]["state"].values()) == (
        kind.gspace or kind.name == "FrozenSkeletonSGD"
    )
    two.load_state_dict(one.state_dict())
    second.load_state_dict(saved)
    train(one, first, batches(3, seed=1))
    train(two, second, batches(3, seed=1))
    assert_same(one, two)
    assert list(first.state_dict()) == ["wrapped"]  # once, however often


@gspace_kinds
def test_a_layer_of_width_zero_is_no_hindrance(kind: Kind) -> None:
    model = nn.Sequential(nn.Linear(6, 0), nn.ReLU(), nn.Linear(0, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[2].bias.fill_(0.5)  # nothing else reaches the units behind
    optimizer = kind.make(model)
    before = values(model)
    step(model, optimizer, X.float())
    assert "4.weight" in moved(model, before)


# Path-SGD -------------------------------------------------------------------------------------------------------------


def test_kappa_of_half_precision_does_not_vanish() -> None:
    def trained(scale: float) -> Tensor:
        torch.manual_seed(0)
        model = zoo.mlp(6, 7, 3).half()
        with torch.no_grad():
            model[0].weight.mul_(scale)
            model[0].bias.mul_(scale)
            model[2].weight.div_(scale)
        optimizer = PathSGD(model, 0.1, interval=2)
        for _ in range(3):
            step(model, optimizer, X.half())
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        kappa = optimizer.state[model[0].weight]["kappa"]
        assert kappa.dtype == torch.float32
        assert bool((kappa > 0).all())
        return model(X.half()).detach().float()

    torch.testing.assert_close(trained(512.0), trained(1.0), rtol=0.02, atol=0.01)  # 16 bits: three digits


def flatten_(model: nn.Module, own_counters: bool) -> nn.Module:
    """All parameters as neighbours in one buffer, with a version counter each or one for all."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    if own_counters:
        nn.utils.vector_to_parameters(flat, model.parameters())
        return model
    parts = flat.split([p.numel() for p in model.parameters()])
    for (name, p), part in zip(list(model.named_parameters()), parts, strict=True):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(part.view_as(p)))
    return model


@ways
@pytest.mark.parametrize("own_counters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_in_one_flat_buffer_train_as_in_buffers_of_their_own(
    way: str, own_counters: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = zoo.mlp(6, 7, 5, 3).to(dtype)  # 49 entries in the first layer: what follows is aligned to no vector
    flat = flatten_(copy.deepcopy(model), own_counters)
    optimizers = [gspace.GSGD(m, 0.1, momentum=0.9, weight_decay=1e-3, **WAYS[way]) for m in (model, flat)]
    assert [len(o.incoming) for o in optimizers] == [13, 13]
    for _ in range(10):
        for m, optimizer in zip((model, flat), optimizers, strict=True):
            step(m, optimizer, X.to(dtype))
    assert len({p.untyped_storage().data_ptr() for p in flat.parameters()}) == 1
    assert optimizers[0].statistics()["way"] == optimizers[1].statistics()["way"]
    for p, q in zip(model.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@gspace_kinds
def test_a_scripted_part_gets_the_plain_step(kind: Kind) -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind.make(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


@ways
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_groups_that_differ_in_maximize_share_the_gradient_of_a_path(way: str, momentum: float) -> None:
    one, two = zoo.mlp(6, 7, 5, 3).double(), zoo.mlp(6, 7, 5, 3).double()
    two.load_state_dict(one.state_dict())

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        p = list(model.parameters())
        return [{"params": p[:3], "maximize": True}, {"params": p[3:], "lr": 0.02}]

    free: dict[str, Any] = {"max_ratio": float("inf"), "max_drift": float("inf"), "momentum": momentum}
    ours = gspace.GSGD(one, 0.01, params=groups(one), **free, **WAYS[way])
    inner = gspace.InGSpace(two, torch.optim.SGD, lr=0.01, params=groups(two), **free)
    for _ in range(5):
        step(one, ours)
        step(two, inner)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@ways
@pytest.mark.parametrize("scales", [(1e20, 1e20), (1e-20, 1e-20), (1e-12, 1e12), (1e12, 1e-12), (1e-9, 1e9)], ids=str)
def test_float32_is_trained_where_squares_of_scales_leave_its_range(way: str, scales: tuple[float, float]) -> None:
    one, two = zoo.mlp(6, 7, 5, 3), zoo.mlp(6, 7, 5, 3)
    two.load_state_dict(one.state_dict())
    gspace.rescale_(two, torch.tensor([scales[0]] * 7 + [scales[1]] * 5))
    for model in (one, two):
        optimizer = gspace.GSGD(model, 0.05, **WAYS[way])
        for _ in range(3):
            step(model, optimizer, X.float())
    torch.testing.assert_close(two(X.float()), one(X.float()), rtol=1e-5, atol=1e-6)


def test_path_sgd_trains_float32_where_kappa_leaves_its_range() -> None:
    one, two = zoo.mlp(6, 7, 5, 3), zoo.mlp(6, 7, 5, 3)
    two.load_state_dict(one.state_dict())
    gspace.rescale_(two, torch.full((12,), 1e20))
    for model, dtype in ((one, torch.float32), (two, torch.float64)):
        optimizer = PathSGD(model, 0.05, interval=2)
        for _ in range(3):
            step(model, optimizer, X.float())
        assert optimizer.state[model[0].weight]["kappa"].dtype == dtype
    torch.testing.assert_close(two(X.float()), one(X.float()), rtol=1e-5, atol=1e-6)


class LookedUp(nn.Module):
    """An embedding, looked up in one of torch's ways."""

    def __init__(self, look: str, padding: int | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 4)
        self.look_up = LOOKS[look]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.look_up(self.embedding, x, self.embedding.padding_idx))


class Questioned(nn.Module):
    """Asks for a number, which only `torch.export` answers."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 3 else -x


LOOKS: dict[str, Any] = {
    "module": lambda table, x, padding: table(x),
    "functional": lambda table, x, padding: nn.functional.embedding(x, table.weight, padding_idx=padding),
    "ATen": lambda table, x, padding: torch.embedding(table.weight, x, -1 if padding is None else padding),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("padding", [2, None])
def test_the_row_of_padding_is_left_alone(look: str, padding: int | None) -> None:
    model = LookedUp(look, padding)
    with torch.no_grad():
        model.embedding.weight[2] = 5.0
    before, x = model.embedding.weight.detach()[2].clone(), torch.arange(9).expand(8, 9)
    exported = nn.Sequential(model, Questioned())
    for one in (exported, model):
        found = gspace.analyze(one, x)
        assert (found.H, found.H_paper) == (6, 6 if padding is None else 0)
    gspace.init_skeleton_(model)
    step(model, gspace.GSGD(model, 0.1), x)
    assert torch.equal(model.embedding.weight[2], before) == (padding is not None)


def test_a_parameter_that_changes_its_group_takes_its_rate() -> None:
    model = zoo.mlp(6, 7, 5, 3).double()
    p = list(model.parameters())
    optimizer = gspace.GSGD(model, params=[{"params": p[:3], "lr": 0.1}, {"params": p[3:], "lr": 0.0}])
    step(model, optimizer)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    assert len(optimizer.param_groups[1]["params"]) == 4
    other = zoo.mlp(6, 7, 5, 3).double()
    other.load_state_dict(model.state_dict())
    q = list(other.parameters())
    fresh = gspace.GSGD(other, params=[{"params": q[:2], "lr": 0.1}, {"params": q[2:], "lr": 0.0}])
    fresh.load_state_dict({**fresh.state_dict(), "state": optimizer.state_dict()["state"]})
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, o)
    for a, b in zip(p, q, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([branch(x).relu() for branch in self.branches], -1))

    def groups(self) -> list[dict[str, Any]]:
        a, b, c, d = (list(branch.parameters()) for branch in self.branches)
        return [{"params": a + b}, {"params": c + d}, {"params": list(self.out.parameters())}]


def move_one(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def move_weights(groups: list[dict[str, Any]]) -> None:
    groups[2]["params"] += groups[0]["params"] + groups[1]["params"]
    groups[0]["params"], groups[1]["params"] = [], []


def exchange(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def exchange_half(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"][2:], groups[1]["params"][2:] = groups[1]["params"][2:], groups[0]["params"][2:]


@pytest.mark.parametrize("saved", [False, True], ids=["", "and saved"])
@pytest.mark.parametrize("change", [move_one, move_weights, exchange, exchange_half])
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_state_follows_parameters_into_other_groups(inner: Any, change: Any, saved: bool) -> None:
    """Groups are alike: nothing may change."""
    models = [Branches().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"momentum": 0.9} if inner is torch.optim.SGD else {}
    made = [gspace.InGSpace(m, inner, lr=0.02, params=m.groups(), **options) for m in models]
    for turn in range(6):
        if turn == 3:
            change(made[0].param_groups)
            if saved:
                made[0].load_state_dict(copy.deepcopy(made[0].state_dict()))
        for model, optimizer in zip(models, made, strict=True):
            step(model, optimizer)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_groups_whose_state_has_other_parts_can_be_joined() -> None:
    model = Branches().double()
    groups = model.groups()
    groups[0]["amsgrad"] = True
    optimizer = gspace.InGSpace(model, torch.optim.Adam, lr=0.02, params=groups)
    step(model, optimizer)
    move_weights(optimizer.param_groups)
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    assert all(bool((before[name] != value).any()) for name, value in model.state_dict().items())


def test_a_group_that_the_inner_optimizer_refuses_changes_nothing() -> None:
    models = [zoo.mlp(6, 7, 5, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    made = [
        gspace.InGSpace(m, torch.optim.Muon, lr=0.01, params=[p for p in m.parameters() if p.dim() == 2])
        for m in models
    ]
    for turn in range(6):
        if turn == 3:
            with pytest.raises(ValueError, match="2D"):
                made[0].add_param_group({"params": [models[0][0].bias, models[0][2].bias]})
            assert len(made[0].param_groups) == 1
            assert len(made[0].inner.state) == len(made[1].inner.state) > 0
        for model, optimizer in zip(models, made, strict=True):
            step(model, optimizer)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


class Counting(torch.optim.SGD):
    """Keeps the number of its steps in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("count", 0)
        self.defaults["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


def test_what_an_inner_optimizer_keeps_in_its_groups_stays_there() -> None:
    model = zoo.mlp(6, 7, 5, 3).double()
    optimizer = gspace.InGSpace(model, Counting, lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    assert [group["count"] for group in optimizer.inner.param_groups] == [3]
    other = gspace.InGSpace(model, Counting, lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    step(model, other)
    assert other.param_groups[0]["count"] == 4


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(1, 7).expand(5, 7),
        torch.randn(11).as_strided((5, 7), (1, 1)),
        torch.randn(40).as_strided((5, 7), (5, 1)),
    ],
    ids=["expanded", "Hankel", "rows that overlap"],
)
def test_entries_that_share_memory_are_pinned(weight: Tensor) -> None:
    model = zoo.mlp(6, 7, 5, 3)
    model[2].weight = nn.Parameter(weight)
    analysis = gspace.analyze(model)
    assert analysis.H == 1  # what it reads and what it writes may grow together
    assert any("share memory" in pin.reason for pin in analysis.pinned)


@pytest.mark.parametrize("weight", [torch.randn(7, 5).T, torch.randn(5, 14)[:, ::2], torch.randn(1, 7)], ids=len)
def test_entries_with_gaps_between_them_do_not(weight: Tensor) -> None:
    model = zoo.mlp(6, 7, len(weight), 3)
    model[2].weight = nn.Parameter(weight)
    assert gspace.analyze(model).H - len(weight) == 7


def test_a_state_of_other_kernel_sizes_is_refused() -> None:
    def net(k: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, k), nn.ReLU(), nn.Conv2d(4, 4, k), nn.ReLU(), nn.Conv2d(4, 2, k))

    for make in (gspace.GSGD, gspace.FrozenSkeletonSGD):
        for mine, other in ((1, 3), (3, 1)):
            optimizer, foreign = make(net(mine), 0.1), make(net(other), 0.1)
            foreign.rechoose()
            with pytest.raises(ValueError, match="another network: its layers have other sizes"):
                optimizer.load_state_dict(foreign.state_dict())
            assert not optimizer.state


def test_a_rate_of_one_element_in_statistics() -> None:
    optimizer = gspace.GSGD(zoo.mlp(6, 7, 5, 3), torch.tensor([0.05]))
    assert optimizer.statistics()["effective_lr"].shape == (12,)


def test_printed_statistics_are_one_short_line_per_key() -> None:
    model = zoo.mlp(6, 70, 3)
    for optimizer in (gspace.GSGD(model, 0.1), gspace.InGSpace(model, torch.optim.Adam)):
        lines = str(optimizer.statistics()).splitlines()
        assert lines[0] == "ratio_quantiles  0: 1, 0.05: 1, 0.5: 1, 0.95: 1, 1: 1"
        assert {"path_value       70 values, 1 to 1", "unused           none"} <= {*lines}
        assert max(map(len, lines)) < 80


@pytest.mark.parametrize("bound", [np.float32(1.5), torch.tensor(1.5), Fraction(3, 2)], ids=lambda x: type(x).__name__)
def test_numbers_of_other_libraries_are_bounds(bound: Any) -> None:
    model = zoo.mlp(6, 7, 3).double()
    optimizer = gspace.GSGD(model, 0.1, max_ratio=bound, max_drift=bound, max_path_grad_norm=bound)
    step(model, optimizer)
    kept = (optimizer.max_ratio, optimizer.max_drift, optimizer.max_path_grad_norm)
    assert kept == (1.5, 1.5, 1.5)
    assert all(type(value) is float for value in kept)


class OneNumber(nn.Module):
    """A shift without a dimension that touches the one hidden unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 1), nn.Parameter(torch.tensor(0.2)), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x) + self.b))


def test_a_parameter_without_a_dimension_moves_alike_in_every_way() -> None:
    torch.manual_seed(3)
    models = [OneNumber().double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    assert gspace.analyze(models[0], X).H == 1
    optimizers = [
        gspace.GSGD(models[0], 0.05, example_input=X),
        gspace.GSGD(models[1], 0.05, foreach=False, example_input=X),
        gspace.InGSpace(models[2], torch.optim.SGD, lr=0.05, example_input=X),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            step(model, optimizer)
    assert float((models[0].b - 0.2).abs()) > 1e-4
    for other in models[1:]:
        for p, q in zip(models[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_step_in_inference_mode_leaves_nothing_that_the_next_cannot_write() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = gspace.GSGD(model, 0.05, foreach=False)
    optimizer.rechoose()
    (model(X) - 1).square().mean().backward()
    with torch.inference_mode():
        optimizer.step()
    before = values(model)
    step(model, optimizer)
    assert moved(model, before)
