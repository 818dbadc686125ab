"""Limits where the answer is known: no unit, no learning rate, a model that others change, another memory layout."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

import gspace
import zoo
from contract import (
    Kind,
    Net,
    assert_same,
    backward,
    batches,
    chain,
    gspace_kinds,
    kinds,
    moved,
    train,
    values,
    without_units,
)
from gspace.optim.skeleton import APART

# No unit --------------------------------------------------------------------------------------------------------------

SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True, "momentum": 0.9},
    "everything": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    "foreach": {"foreach": True, "momentum": 0.9, "weight_decay": 0.1},
    "for-loop": {"foreach": False, "momentum": 0.9, "weight_decay": 0.1},
    "fused": {"fused": True, "momentum": 0.9, "weight_decay": 0.1},
    "tensor-lr": {"lr": torch.tensor(0.1), "momentum": 0.9, "foreach": False},
}
OURS: dict[str, Callable[..., Any]] = {
    "GSGD": gspace.GSGD,
    "InGSpace": lambda model, **options: gspace.InGSpace(model, torch.optim.SGD, **options),
}


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_without_units_it_is_sgd_bit_for_bit(ours: str, options: str) -> None:
    one, two = without_units(), without_units()
    chosen = {"lr": 0.1, **SGD_OPTIONS[options]}
    optimizer = OURS[ours](one, **chosen)
    assert optimizer.skeleton.H == 0
    losses = train(one, optimizer, batches(10))
    assert losses == train(two, torch.optim.SGD(two.parameters(), **chosen), batches(10))
    assert_same(one, two)


# name: learning rate that suits Net
OPTIMIZERS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "Adafactor"), 0.01),
    "Adadelta": 1.0,
    "ASGD": 0.2,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_units_every_optimizer_is_itself(name: str) -> None:
    one, two = without_units(), without_units()
    cls = getattr(torch.optim, name)
    train(one, gspace.InGSpace(one, cls, lr=0.01), batches(10))
    train(two, cls(two.parameters(), lr=0.01), batches(10))
    assert_same(one, two)


@pytest.mark.parametrize(
    "name",
    ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"],
)
def test_every_optimizer_trains_on_path_values(name: str) -> None:
    model = Net()
    losses = train(model, gspace.InGSpace(model, getattr(torch.optim, name), lr=OPTIMIZERS[name]), batches(1) * 60)
    assert losses[-1] < 0.7 * losses[0]


class Ready(torch.optim.Adagrad):
    """Has its state from the start, as Adagrad had before torch 2.13, and misses it in a step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].update(step=torch.tensor(0.0), sum=torch.full_like(p, 0.5))

    def step(self, closure: Any = None) -> Any:
        assert all("sum" in self.state[p] for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_state_that_an_inner_optimizer_is_made_with_is_kept() -> None:
    one, two, three = without_units(), without_units(), Net()
    train(one, gspace.InGSpace(one, Ready), batches(10))
    train(two, Ready(two.parameters()), batches(10))
    assert_same(one, two)
    optimizer = gspace.InGSpace(three, Ready)
    train(three, optimizer, batches(1))
    again = gspace.InGSpace(three, Ready)
    again.load_state_dict(optimizer.state_dict())
    before = {p: optimizer.state[p]["sum"].clone() for p in three.parameters() if p.grad is not None}
    train(three, again, batches(1))
    assert before
    for p, old in before.items():
        assert again.state[p]["step"] == 2
        assert (again.state[p]["sum"] >= old).all()


def test_in_gspace_sgd_is_gsgd() -> None:
    """Two implementations of one algorithm, with a schedule of learning rate and momentum."""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
    models = []
    for build in OURS.values():
        model = Net().double()
        optimizer = build(model, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=21)
        train(model, optimizer, batches(20, dtype=torch.float64), schedule)
        models.append(model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


# Nothing moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [float, torch.tensor], ids=["float", "tensor"])
@kinds
def test_without_learning_rate_nothing_moves(kind: Kind, wrap: Callable[[float], Any]) -> None:
    model = Net()
    optimizer = kind.make(model, lr=wrap(0.0), weight_decay=0.1, foreach=False)
    before = values(model)
    train(model, optimizer, batches(5))
    assert moved(model, before) == set()


@gspace_kinds
def test_without_learning_rate_nothing_moves_in_spread_allocation(kind: Kind) -> None:
    model = Net()
    before = values(model)
    train(model, kind.make(model, lr=0.0, allocation="spread"), batches(5))
    assert moved(model, before) == set()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(zoo.mlp, 5, 7, 6, 4),
    "cnn-bn": Net,
    "residual": zoo.Residual,
    "resnet": partial(zoo.ResNet, zoo.BasicBlock, (2,), 2),
    "skeleton": lambda: gspace.init_skeleton_(zoo.mlp(5, 7, 6, 4)),
    "half-trained": lambda: nn.Sequential(zoo.mlp(5, 7, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 3)),
}


@pytest.mark.parametrize(
    "options", [{}, {"reference": "balanced"}, {"max_drift": 2.0, "allocation": "spread"}], ids=str
)
@pytest.mark.parametrize("network", NETWORKS)
@gspace_kinds
def test_construction_changes_nothing(kind: Kind, network: str, options: dict[str, Any]) -> None:
    """No bit of the model, no flag, no gradient, no random number."""
    model = NETWORKS[network]()
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    kind.make(model, **options)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), (other, b) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert p.grad is None
        assert (p.requires_grad, p.stride()) == (q.requires_grad, q.stride())
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]


# Weights that others change ------------------------------------------------------------------------------------------


def _in_place(model: nn.Module, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)


def _data(model: nn.Module, weights: list[Tensor]) -> None:
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data = w


def _vector(model: nn.Module, weights: list[Tensor]) -> None:
    vector_to_parameters(torch.cat([w.reshape(-1) for w in weights]), model.parameters())


def _load(model: nn.Module, weights: list[Tensor]) -> None:
    model.load_state_dict({name: w for (name, _), w in zip(model.named_parameters(), weights, strict=True)})


@pytest.mark.parametrize("write", [_in_place, _data, _vector, _load])
@gspace_kinds
def test_coordinates_follow_weights_that_others_write(kind: Kind, write: Callable[..., None]) -> None:
    """Somebody rescales the network during training: its function goes on as if nothing had happened."""
    one, two = chain().double(), chain().double()
    first, second = kind.make(one), kind.make(two)
    for seed in range(3):
        data = batches(8, seed, dtype=torch.float64)
        train(one, first, data)
        train(two, second, data)
        scaled = copy.deepcopy(two)
        gspace.rescale_(scaled, gspace.random_scales(scaled, torch.Generator().manual_seed(seed)))
        write(two, [p.detach().clone() for p in scaled.parameters()])
    x = batches(1, seed=9, dtype=torch.float64)[0][0]
    torch.testing.assert_close(one(x), two(x), rtol=1e-9, atol=1e-9)
    train(one, first, data)
    train(two, second, data)
    torch.testing.assert_close(one(x), two(x), rtol=1e-9, atol=1e-9)


# Memory layouts -------------------------------------------------------------------------------------------------------


def _channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def _transposed(model: nn.Module) -> nn.Module:
    """Every weight is a view into other memory, its dimensions in reverse order."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                reverse = tuple(reversed(range(p.dim())))
                room = torch.zeros(*(2 * n for n in reversed(p.shape)), dtype=p.dtype)
                view = room[tuple(slice(0, n) for n in reversed(p.shape))].permute(reverse)
                module._parameters[name] = nn.Parameter(view.copy_(p.detach()))
    return model


@pytest.mark.parametrize("layout", [_channels_last, _transposed])
@kinds
def test_the_memory_layout_does_not_matter(kind: Kind, layout: Callable[[nn.Module], nn.Module]) -> None:
    one, two = Net().double(), layout(Net().double())
    strides = [p.stride() for p in two.parameters()]
    assert strides != [p.stride() for p in one.parameters()]
    train(one, kind.make(one), batches(10, dtype=torch.float64))
    train(two, kind.make(two), batches(10, dtype=torch.float64))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    assert strides == [p.stride() for p in two.parameters()]


# What contradicts itself ---------------------------------------------------------------------------------------------


@gspace_kinds
def test_a_state_leaves_what_is_frozen_here_alone(kind: Kind) -> None:
    """The units that touch it are not used while it is."""
    one, two = chain(), chain()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(2))
    two.load_state_dict(one.state_dict())
    two[0].weight.requires_grad_(False)
    second.load_state_dict(first.state_dict())
    before = values(two)
    train(two, second, batches(2))
    assert moved(two, before) == set(before) - {"0.weight"}
    assert second.skeleton.H == first.skeleton.H - 4


@pytest.mark.parametrize("make", [gspace.GSGD, gspace.FrozenSkeletonSGD], ids=["GSGD", "FrozenSkeletonSGD"])
def test_an_analysis_and_options_for_one_are_not_both_taken(make: Any) -> None:
    model = chain()
    found = gspace.analyze(model)
    with pytest.raises(ValueError, match="either analysis= or example_input=, not both"):
        make(model, 0.1, analysis=found, example_input=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="either analysis= or nonsense=, not both"):
        gspace.balancedness(model, analysis=found, nonsense=1)


def test_the_frozen_skeleton_is_that_of_the_parameters_it_trains() -> None:
    model = zoo.mlp(5, 6, 7, 3)
    mine = list(model.parameters())[:-2]
    control = gspace.FrozenSkeletonSGD(model, 0.1, params=mine)
    assert control.skeleton.H == gspace.GSGD(model, 0.1, params=mine).skeleton.H < gspace.GSGD(model, 0.1).skeleton.H


def test_a_way_chosen_later_is_taken() -> None:
    model = zoo.mlp(5, 6, 3)
    optimizer = gspace.GSGD(model, 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    first = optimizer.statistics()["way"]
    assert first == "NativeStep" or "no C compiler" in first
    optimizer.param_groups[0]["foreach"] = False
    optimizer.step()
    assert optimizer.statistics()["way"] == "torch's operations: foreach=False"
    optimizer.param_groups[0]["foreach"] = None
    optimizer.step()
    assert optimizer.statistics()["way"] == first


def test_a_weight_with_gaps_in_memory_is_checked_by_whoever_takes_the_step() -> None:
    """The way that checked gradients itself is gone with the old memory."""
    model = zoo.mlp(5, 6, 6, 3)
    optimizer = gspace.GSGD(model, 0.1, allocation="spread")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    weight = model[2].weight
    weight.data = torch.stack([weight.data, weight.data], -1)[..., 0]
    weight.grad = torch.ones_like(weight)
    before = copy.deepcopy(model.state_dict())
    model[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="is not finite"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@gspace_kinds
def test_freezing_what_takes_every_root_of_a_group_is_noticed(kind: Kind) -> None:
    model = zoo.mlp(5, 6, 3)
    optimizer = kind.make(model)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before["0.weight"]) == frozen
        assert not torch.equal(model[2].weight, before["2.weight"])


@gspace_kinds
def test_an_empty_parameter_is_no_obstacle(kind: Kind) -> None:
    model = Net()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    optimizer = kind.make(model)
    for batch in batches(2):
        backward(model, optimizer, batch)
        model.nothing.grad = torch.empty(0)
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Mirrored(nn.Module):
    """An autoencoder whose decoder has the weights of its encoder: five units that the paper's view does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(5, 3, 3, 3)), nn.Parameter(torch.randn(4, 5, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(F.conv2d(x, self.w).relu(), self.v).relu()
        return F.conv_transpose2d(F.conv_transpose2d(h, self.v).relu(), self.w)


def test_units_that_the_papers_view_lacks_are_told_once() -> None:
    model, x = Mirrored(), torch.randn(2, 3, 8, 8)
    optimizer = gspace.GSGD(model, lr=0.1, example_input=x)
    with pytest.warns(UserWarning, match="cannot use all units of this model: 5 units are not in the paper's") as told:
        optimizer.rechoose()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gspace.GSGD(model, lr=0.1, example_input=x, batch_norm="exact").skeleton.H == 5
    table = nn.Sequential(nn.Embedding(7, 5, padding_idx=0), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    assert gspace.build_skeleton(table, gspace.analyze(table)).unused == (f"5 units {APART}",)


@pytest.mark.parametrize("make", [gspace.GSGD, lambda model, lr: gspace.InGSpace(model, torch.optim.SGD, lr=lr)])
def test_a_model_without_units_is_said_to_have_none(make: Any) -> None:
    with pytest.warns(UserWarning, match="no unit of this model can be rescaled, so") as caught:
        make(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)), lr=0.1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), lr=0.1)
