"""Weights that anybody writes at any time: the next step is that of `step.py`, with the skeleton of the first step."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gspace
import zoo
from contract import Batches, Kind, Net, assert_same, backward, batches, chain, gspace_kinds, kinds, train, values
from gspace.optim import plan as plans
from gspace.optim import step

LR, MOMENTUM = 0.05, 0.9
FREE: dict[str, Any] = {"max_ratio": math.inf, "max_drift": math.inf}


def defined(model: nn.Module, chosen: Any, grads: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step of SGD with momentum on path values, by the functions of `step.py` alone; `state` is momentum."""
    weights = values(model)
    plan = plans.plan(chosen.skeleton, plans.layers_of(chosen.skeleton, weights), chosen.references)
    named = [layer.edges.name for layer in plan.layers]
    w, g = [weights[name] for name in named], [grads[name] for name in named]
    at, sums = step.observe(plan, w, g, torch.float64, "released")
    root_grad = step.root_gradient(plan, sums, at)
    moves, ends = [], plan.ends(*at)
    for layer, weight, grad, name, of in zip(plan.layers, w, g, named, ends, strict=True):
        path_grad = torch.zeros_like(weight)
        view = layer.edges.view(weight)
        layer.edges.view(path_grad).copy_(step.path_gradient(layer, view, grad, of, "released"))
        path_grad[layer.entries] = root_grad[layer.at.root]
        moves.append(path_grad + MOMENTUM * state[name] if name in state else path_grad)
    direction = torch.zeros_like(at[0])
    for layer, move in zip(plan.layers, moves, strict=True):
        direction[layer.at.root] = move[layer.entries]
    direction[0] = 0
    ratio, _ = step.path_ratio(at[0] * at[1], direction, LR, math.inf, math.inf)
    every, ones = ratio[plan.root], torch.ones_like(ratio)
    entries = step.entries_after(plan.entries, plan.at_entries(w), every, ones)
    for layer, weight, move, of, ratio_of in zip(plan.layers, w, moves, ends, plan.ends(every, ones), strict=True):
        view, change = layer.edges.view(weight), -LR * layer.edges.view(move)
        view.copy_(step.weights_after(view, step.unscaled(change, of), ratio_of))
    plan.put(w, entries)
    for name in weights.keys() - set(named):
        weights[name] -= LR * (grads[name] + MOMENTUM * state[name] if name in state else grads[name])
    return weights


Pair = tuple[nn.Sequential, Any]


def _data(model: nn.Sequential, optimizer: Any) -> Pair:
    for p in model.parameters():
        p.data.mul_(1.1)
    return model, optimizer


def _copy_into_data(model: nn.Sequential, optimizer: Any) -> Pair:
    for p, q in zip(model.parameters(), chain(seed=3).double().parameters(), strict=True):
        p.data.copy_(p.data + 0.1 * q.data)
    return model, optimizer


def _new_data(model: nn.Sequential, optimizer: Any) -> Pair:
    for p in model.parameters():
        p.data = p.data * 1.1
    return model, optimizer


def _average(model: nn.Sequential, optimizer: Any) -> Pair:
    """An EMA that is put into the model."""
    average = torch.optim.swa_utils.AveragedModel(chain(seed=3).double())
    with torch.no_grad():
        for p, q in zip(average.module.parameters(), model.parameters(), strict=True):
            p.lerp_(q, 0.9)
            q.copy_(p)
    return model, optimizer


def _load(model: nn.Sequential, optimizer: Any) -> Pair:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    return model, optimizer


def _reload_optimizer(model: nn.Sequential, optimizer: Any) -> Pair:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return _load(model, optimizer)


def _rescale(model: nn.Sequential, optimizer: Any) -> Pair:
    gspace.rescale_(model, gspace.random_scales(model, torch.Generator().manual_seed(2)))
    return model, optimizer


def _there_and_back(model: nn.Sequential, optimizer: Any) -> Pair:
    return model.float().double(), optimizer


def _deepcopy(model: nn.Sequential, optimizer: Any) -> Pair:
    model, optimizer = copy.deepcopy((model, optimizer))
    return _data(model, optimizer)


WRITES = (_data, _copy_into_data, _new_data, _average, _load, _reload_optimizer, _rescale, _there_and_back, _deepcopy)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "make",
    [
        lambda m: gspace.GSGD(m, LR, MOMENTUM, **FREE),
        lambda m: gspace.GSGD(m, LR, MOMENTUM, foreach=False, **FREE),
        lambda m: gspace.InGSpace(m, torch.optim.SGD, lr=LR, momentum=MOMENTUM, **FREE),
    ],
    ids=["GSGD", "GSGD in torch's operations", "InGSpace"],
)
def test_the_next_step_is_that_of_the_definition(make: Callable[[nn.Module], Any], write: Any) -> None:
    model = chain().double()
    optimizer = make(model)
    train(model, optimizer, batches(4, dtype=torch.float64))
    chosen = optimizer.chosen
    model, optimizer = write(model, optimizer)
    backward(model, optimizer, batches(1, seed=7, dtype=torch.float64)[0])
    grads = {name: p.grad for name, p in model.named_parameters()}
    momentum = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in model.named_parameters()}
    expected = defined(model, chosen, grads, momentum)
    optimizer.step()
    assert torch.equal(optimizer.skeleton.in_index, chosen.skeleton.in_index)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-10, atol=1e-13)


# Before the first step ------------------------------------------------------------------------------------------------


def _other_weights(model: nn.Module) -> None:
    model.load_state_dict(chain(seed=2).state_dict())


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "load": _other_weights,
    "data": lambda m: [p.data.mul_(1.5) for p in m.parameters()],
    "init": gspace.init_skeleton_,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("between", ["nothing", "a state of its own", "a step without rate", "a copy"])
@kinds
def test_what_happens_before_the_first_step_does_not_matter(kind: Kind, change: str, between: str) -> None:
    """Accelerate reloads the optimizer's own state; `torch.distributed.checkpoint` steps at a rate of 0."""
    early, late = chain(), chain()
    optimizer = kind.make(early)
    if between == "a state of its own":
        optimizer.load_state_dict(optimizer.state_dict())
    elif between == "a step without rate":
        without_rate(early, optimizer)
    elif between == "a copy":
        early, optimizer = copy.deepcopy((early, optimizer))
    CHANGES[change](early)
    CHANGES[change](late)
    train(early, optimizer, batches(4))
    train(late, kind.make(late), batches(4))
    assert_same(early, late)


def without_rate(model: nn.Module, optimizer: Any) -> None:
    """As `torch.distributed.checkpoint` makes state: a step with rates and gradients of 0."""
    before = values(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "steps" in group:  # PathSGD counts
            group["steps"] = 0
    for state in optimizer.state.values():
        for name in state.keys() - {"skeleton", "kappa"}:
            del state[name]
    optimizer.zero_grad()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@gspace_kinds
def test_a_step_without_rate_keeps_nothing_for_good(kind: Kind) -> None:
    """Saved and loaded in between."""
    early, late = chain(), chain()
    first = kind.make(early)
    without_rate(early, first)
    second = kind.make(early)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _other_weights(early)
    _other_weights(late)
    train(early, second, batches(3))
    train(late, kind.make(late), batches(3))
    assert_same(early, late)


@gspace_kinds
def test_a_warm_up_from_zero_chooses_once(kind: Kind) -> None:
    model = chain()
    optimizer = kind.make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / 3))
    train(model, optimizer, batches(2), schedule)
    chosen = optimizer.chosen
    assert chosen.final
    train(model, optimizer, batches(3), schedule)
    assert optimizer.chosen is chosen


def test_ranks_that_start_apart_and_are_given_the_same_weights_stay_together() -> None:
    """`DistributedDataParallel` around a model that has its optimizer already."""
    for make in (lambda m: gspace.GSGD(m, LR, MOMENTUM), lambda m: gspace.InGSpace(m, torch.optim.Adam, lr=0.01)):
        models = [Net(), Net(seed=1)]
        optimizers = [make(m) for m in models]
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
        models[1].load_state_dict(models[0].state_dict())
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, batches(6))
        assert_same(*models)


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda m: gspace.GSGD(m, LR), lambda m: gspace.FrozenSkeletonSGD(m, LR)])
def test_no_skeleton_is_chosen_in_weights_that_are_not_finite(make: Any) -> None:
    model = chain()
    optimizer = make(model)
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"2\.weight is not finite: paths and scales of such a network have no values"):
        optimizer.rechoose()
    assert not optimizer.state


@pytest.mark.parametrize("seed", range(3))
def test_units_that_were_not_put_on_the_skeleton_are_not_measured_by_it(seed: int) -> None:
    """`init_skeleton_` leaves frozen layers alone: thawed, their path values would be far from 1."""
    torch.manual_seed(seed)
    model = zoo.mlp(10, 16, 16, 4).double()
    model[0].requires_grad_(False)
    gspace.init_skeleton_(model)
    model.requires_grad_(True)
    optimizer = gspace.GSGD(model, 0.01)
    assert optimizer.reference == "balanced"
    torch.testing.assert_close(optimizer.statistics()["path_value"], torch.ones(32).double())


def test_ones_behind_units_are_not_a_skeleton_alone() -> None:
    model = zoo.mlp(10, 16, 3).double()
    with torch.no_grad():
        model[2].weight.copy_(model[2].weight.sign())
    assert gspace.GSGD(model, 0.01).reference == "balanced"
    assert gspace.GSGD(gspace.init_skeleton_(model), 0.01).reference == "one"


def test_what_cannot_be_used_is_told_in_one_line_and_stays_in_the_statistics() -> None:
    model = chain()
    with torch.no_grad():
        model[7].weight[:, :2] = 0
    model[0].weight.requires_grad_(False)
    optimizer = gspace.GSGD(model, LR)
    with pytest.warns(UserWarning, match="cannot use all units") as told:
        train(model, optimizer, batches(2))
    (message,) = [str(w.message) for w in told]
    assert told[0].filename == train.__code__.co_filename
    assert "4 units touch a parameter that is not trained (frozen, or not in params=); 2 units have skeleton" in message
    assert "; ".join(optimizer.statistics()["unused"]) in message


def test_a_closure_may_load_the_weights() -> None:
    model, late = chain(), chain(seed=2)
    optimizer, other = gspace.GSGD(model, LR), gspace.GSGD(late, LR)
    batch: Batches = batches(1)

    def closure() -> Tensor:
        model.load_state_dict(chain(seed=2).state_dict())
        return backward(model, optimizer, batch[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
    train(late, other, batch)
    assert_same(model, late)
