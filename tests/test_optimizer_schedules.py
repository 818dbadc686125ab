"""Learning rates: every scheduler of torch, tensors, and the flags that choose an implementation."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as S
from torch.optim.swa_utils import SWALR

from contract import KINDS, Kind, Net, assert_same, backward, batches, kinds, moved, train, values
from turns import turns

STEPS = 9

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: S.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 7], 0.1),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 8, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.001, 0.05, 3),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1, factor=0.3, threshold=0.5),
    "SWALR": lambda o: SWALR(o, 0.005, anneal_epochs=4),
    # warm-up chains
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 4), S.CosineAnnealingLR(o, 8)], [4]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.LinearLR(o, 0.1, 1.0, 4), S.ExponentialLR(o, 0.9)]),
}


def test_every_scheduler_is_tried() -> None:
    assert set(SCHEDULERS) == {*S.__all__, "SWALR"} - {"LRScheduler"}


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "momentum", "betas") if key in group} for group in optimizer.param_groups
    ]


@turns("kind, name", KINDS, SCHEDULERS)
def test_schedules(kind: Kind, name: str) -> None:
    """The schedule is torch's, and a step uses what it says: by hand the same values give the same weights."""
    one, two, three = Net(), Net(), Net()
    first, second = kind.make(one), kind.make(two)
    third = kind.twin(three.parameters(), **kind.options)
    ours, torchs = SCHEDULERS[name](first), SCHEDULERS[name](third)
    metric = [1.0] if name == "ReduceLROnPlateau" else []
    history = []
    for batch in batches(STEPS):
        assert hyper_parameters(first) == hyper_parameters(third)
        history.append(hyper_parameters(first))
        for model, optimizer, scheduler in ((one, first, ours), (three, third, torchs)):
            backward(model, optimizer, batch)
            optimizer.step()
            scheduler.step(*metric)
    assert len({str(h) for h in history}) > 1
    for batch, now in zip(batches(STEPS), history, strict=True):
        for group, scheduled in zip(second.param_groups, now, strict=True):
            group.update(scheduled)
        backward(two, second, batch)
        second.step()
    assert_same(one, two)
    constant = Net()
    train(constant, kind.make(constant), batches(STEPS))
    assert moved(one, values(constant))


@kinds
def test_a_schedule_resumes(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    ours, theirs = SCHEDULERS["OneCycleLR"](first), SCHEDULERS["OneCycleLR"](second)
    train(one, first, batches(4), ours)
    for saved, loaded in ((one, two), (ours, theirs), (first, second)):
        loaded.load_state_dict(deepcopy(saved.state_dict()))
    train(two, second, batches(5, seed=1), theirs)
    train(one, first, batches(5, seed=1), ours)
    assert_same(one, two)


# Tensors and flags ----------------------------------------------------------------------------------------------------

LR = 1 / 32  # exact in every floating-point type


@pytest.mark.parametrize("shape", [(), (1,)])
@kinds
def test_lr_may_be_a_tensor(kind: Kind, shape: tuple[int, ...]) -> None:
    """A single element of whatever shape; written in place, it takes effect at the next step."""
    one, two = Net(), Net()
    first, second = kind.make(one, lr=LR), kind.make(two, lr=torch.full(shape, LR), foreach=False)
    train(one, first, batches(4))
    train(two, second, batches(4))
    first.param_groups[0]["lr"] = LR / 8
    second.param_groups[0]["lr"].fill_(LR / 8)
    train(one, first, batches(4, seed=1))
    train(two, second, batches(4, seed=1))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(), (1,)])
@kinds
def test_groups_may_have_tensors_of_their_own(kind: Kind, shape: tuple[int, ...]) -> None:
    models = []
    for wrap in (float, partial(torch.full, shape)):
        model = Net()
        back = [*model.hidden.parameters(), *model.head.parameters()]
        front = [p for p in model.parameters() if not any(p is q for q in back)]
        groups = [{"params": front, "lr": wrap(LR)}, {"params": back, "lr": wrap(LR / 4)}]
        train(model, kind.make(model, groups, foreach=False), batches(5))
        models.append(model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@kinds
def test_implementations_agree(kind: Kind, flags: dict[str, bool]) -> None:
    one, two = Net(), Net()
    if not flags.keys() <= kind.make(one).defaults.keys():
        pytest.skip("torch has no such implementation of the inner optimizer")
    train(one, kind.make(one), batches(6))
    train(two, kind.make(two, **flags), batches(6))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
