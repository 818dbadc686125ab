"""Training, and parameter groups."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import gspace
from contract import (
    KINDS,
    Kind,
    Net,
    assert_same,
    backward,
    batches,
    gspace_kinds,
    kinds,
    moved,
    train,
    values,
)
from gspace.optim.step import scaled


@kinds
def test_it_trains(kind: Kind) -> None:
    model = Net()
    losses = train(model, kind.make(model), batches(1) * 60)
    assert losses[-1] < 0.3 * losses[0]


# Groups ---------------------------------------------------------------------------------------------------------------


def halves(model: Net) -> tuple[list[Tensor], list[Tensor]]:
    """Both halves share units."""
    back = [*model.hidden.parameters(), *model.head.parameters()]
    return [p for p in model.parameters() if not any(p is q for q in back)], back


@kinds
def test_equal_groups_are_one_group(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = halves(two)
    train(one, kind.make(one), batches(6))
    train(two, kind.make(two, [{"params": first}, {"params": second}]), batches(6))
    assert_same(one, two)


# (default, other) value of each hyper-parameter, and what else is set with it
OWN: dict[type[torch.optim.Optimizer], dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    torch.optim.SGD: {
        "lr": (0.1, 0.02, {}),
        "weight_decay": (0.0, 0.1, {}),
        "momentum": (0.0, 0.5, {"dampening": 0.3, "nesterov": False}),
        "dampening": (0.0, 0.5, {"momentum": 0.9, "nesterov": False}),
        "nesterov": (False, True, {"momentum": 0.9, "dampening": 0.0}),
        "maximize": (False, True, {}),
    },
    torch.optim.RMSprop: {
        "lr": (0.01, 0.002, {}),
        "weight_decay": (0.0, 0.1, {}),
        "alpha": (0.99, 0.5, {}),
        "momentum": (0.0, 0.9, {}),
        "centered": (False, True, {}),
    },
    torch.optim.AdamW: {
        "lr": (0.01, 0.002, {}),
        "weight_decay": (0.0, 0.1, {}),
        "betas": ((0.9, 0.999), (0.5, 0.9), {}),
        "eps": (1e-8, 1e-3, {}),
        "amsgrad": (False, True, {"betas": (0.9, 0.1)}),
    },
}


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind in KINDS for key in OWN[kind.twin]],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_group_has_its_own_hyper_parameters(kind: Kind, key: str) -> None:
    """Given by the group or by default, a value acts on its group; and it matters in which."""
    default, other, more = OWN[kind.twin][key]
    by_group, by_default, swapped = (
        ([{}, {key: other}], default),
        ([{key: default}, {}], other),
        ([{key: other}, {}], default),
    )
    models = []
    for own, rest in (by_group, by_default, swapped):
        model = Net()
        groups = [{"params": params, **mine} for params, mine in zip(halves(model), own, strict=True)]
        train(model, kind.make(model, groups, **{**more, key: rest}), batches(6))
        models.append(model)
    assert_same(models[0], models[1])
    assert moved(models[0], values(models[2]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.twin is torch.optim.SGD], ids=lambda kind: kind.name)
def test_dampening_means_nothing_without_momentum(kind: Kind) -> None:
    models = []
    for dampening in (0.0, 0.5):
        model = Net()
        first, second = halves(model)
        groups = [{"params": first, "momentum": 0.0, "dampening": dampening}, {"params": second, "momentum": 0.9}]
        train(model, kind.make(model, groups, nesterov=False), batches(6))
        models.append(model)
    assert_same(*models)


@gspace_kinds
def test_a_group_without_learning_rate_keeps_its_path_values(kind: Kind) -> None:
    """lr = 0 stops v, not w: the weights of that group still take their 1/R."""
    model = Net().double()
    first, second = halves(model)
    optimizer = kind.make(model, [{"params": first}, {"params": second, "lr": 0.0}])
    optimizer.rechoose()
    plan = optimizer._look().plan
    k = next(k for k, layer in enumerate(plan.layers) if layer.edges.name == "head.weight")
    layer = plan.layers[k]

    def values_of_paths() -> Tensor:
        w = model.head.weight.detach().clone()
        w[layer.entries] = 0
        return scaled(layer.edges.view(w), plan.ends(optimizer.incoming, optimizer.outgoing)[k])

    before, weights = values_of_paths(), values(model)
    train(model, optimizer, batches(6, dtype=torch.float64))
    torch.testing.assert_close(values_of_paths(), before, rtol=1e-13, atol=0)
    assert "conv.weight" in moved(model, weights)


@kinds
def test_a_layer_is_unfrozen_with_a_group_of_its_own(kind: Kind) -> None:
    model = Net()
    late = [*model.head.parameters()]
    early = [p for p in model.parameters() if not any(p is q for q in late)]
    for p in late:
        p.requires_grad_(False)
    optimizer = kind.make(model, early)
    before = values(model)
    train(model, optimizer, batches(5))
    assert moved(model, before) == set(before) - {"head.weight", "head.bias", "unused.weight", "unused.bias"}
    for p in late:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": late, "lr": 0.02})
    before = values(model)
    losses = train(model, optimizer, batches(1) * 40)
    assert moved(model, before) == set(before) - {"unused.weight", "unused.bias"}
    assert losses[-1] < 0.5 * losses[0]


def half_frozen(thaw: str) -> tuple[Net, gspace.GSGD]:
    """Five steps with the head frozen, which is then thawed by its flag or comes in a group of its own."""
    model = Net()
    late = [*model.head.parameters()]
    early = [p for p in model.parameters() if not any(p is q for q in late)]
    for p in late:
        p.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": early}] if thaw == "group" else [{"params": early}, {"params": late}]
    optimizer = gspace.GSGD(model, 0.05, params=groups)
    with pytest.warns(
        UserWarning, match="GSGD cannot use all units of this model: 8 units touch a parameter that is not"
    ):
        train(model, optimizer, batches(5))
    assert optimizer.skeleton.H == 4 + 5
    for p in late:
        p.requires_grad_(True)
    if thaw == "group":
        optimizer.add_param_group({"params": late})
    return model, optimizer


@pytest.mark.parametrize("thaw", ["group", "flag"])
def test_a_layer_thawed_late_is_trained_in_plain_coordinates_and_said_so_once(thaw: str) -> None:
    model, optimizer = half_frozen(thaw)
    backward(model, optimizer, batches(1)[0])
    expected = model.head.weight - 0.05 * model.head.weight.grad
    with pytest.warns(UserWarning, match=r"head\.weight: trained only since GSGD has chosen its skeleton"):
        optimizer.step()
    torch.testing.assert_close(model.head.weight, expected, rtol=1e-6, atol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batches(2, seed=1))
    assert optimizer.skeleton.H == 4 + 5


@pytest.mark.parametrize("thaw", ["group", "flag"])
def test_rechoosing_brings_the_units_of_a_thawed_layer_in(thaw: str) -> None:
    """From then on the optimizer is the one that would be made now."""
    model, optimizer = half_frozen(thaw)
    other = Net()
    other.load_state_dict(model.state_dict())
    fresh = gspace.GSGD(other, 0.05)
    optimizer.rechoose()
    train(model, optimizer, batches(5, seed=1))
    train(other, fresh, batches(5, seed=1))
    assert optimizer.skeleton.H == 4 + 5 + 8
    assert optimizer.statistics()["unused"] == ()
    assert_same(model, other)


@kinds
def test_a_group_without_units_disturbs_nothing(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two, [p for n, p in two.named_parameters() if "unused" not in n])
    train(one, first, batches(4))
    train(two, second, batches(4))
    second.add_param_group({"params": two.unused.parameters()})
    train(one, first, batches(4, seed=1))
    train(two, second, batches(4, seed=1))
    assert_same(one, two)


@kinds
def test_named_parameters_are_accepted(kind: Kind) -> None:
    one, two = Net(), Net()
    train(one, kind.make(one), batches(3))
    optimizer = kind.make(two, two.named_parameters())
    train(two, optimizer, batches(3))
    assert_same(one, two)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in two.named_parameters()]
