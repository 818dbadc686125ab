"""Every optimizer of ours refuses what the database of error inputs lists, in one line, and changes nothing."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import gspace
from away import Away
from contract import Kind, Net, assert_same, backward, batches, chain, flatten, moved, train, values
from error_inputs import LOADING, MAKING, OURS, STEPS
from gspace.optim.arguments import require_one_device


def entries(table: Mapping[str, Any]) -> Any:
    rows = [(kind, name) for kind in OURS for name, entry in table.items() if entry.to(kind)]
    return pytest.mark.parametrize(("kind", "name"), rows, ids=lambda value: getattr(value, "name", value))


def assert_same_state(optimizer: Any, before: Any) -> None:
    """Bit for bit, hyper-parameters included."""
    (a, rest), (b, other) = flatten(optimizer.state_dict()), flatten(before)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert rest == other


@entries(MAKING)
def test_it_is_not_made(kind: Kind, name: str) -> None:
    entry = MAKING[name]
    with pytest.raises(entry.error, match=entry.says) as caught:
        entry.call(kind)
    assert "\n" not in str(caught.value)


@entries(STEPS)
def test_a_step_is_refused_and_changes_nothing(kind: Kind, name: str) -> None:
    entry, model = STEPS[name], chain()
    optimizer = kind.make(model)
    train(model, optimizer, batches(2))
    backward(model, optimizer, batches(1)[0])
    entry.spoil(model)
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=entry.says) as caught:
            optimizer.step()
        assert "\n" not in str(caught.value)
    assert moved(model, before) == set()
    assert_same_state(optimizer, state)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_a_refused_first_step_leaves_no_state(kind: Kind) -> None:
    model = chain()
    optimizer = kind.make(model)
    backward(model, optimizer, batches(1)[0])
    STEPS["nan in the first"].spoil(model)
    with pytest.raises(RuntimeError, match="is not finite"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


@entries(LOADING)
def test_a_state_is_refused_and_changes_nothing(kind: Kind, name: str) -> None:
    """The training goes on as that of a twin whom nobody handed a wrong state."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, batches(2))
    before = copy.deepcopy(first.state_dict())
    with pytest.raises(ValueError, match=LOADING[name].says) as caught:
        first.load_state_dict(LOADING[name].state(kind, copy.deepcopy(before)))
    assert "\n" not in str(caught.value)
    assert_same_state(first, before)
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, batches(2, seed=1))
    assert_same(one, two)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_a_group_of_strangers_leaves_no_trace(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    with pytest.raises(ValueError, match=r"shape \(2,\) that is no parameter of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
    before = values(model)
    train(model, optimizer, batches(1))
    assert "head.weight" in moved(model, before)


def test_weights_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    analysis = gspace.analyze(model)
    model[2].weight = nn.Parameter(Away(model[2].weight.detach()))
    monkeypatch.setattr("gspace.optim.arguments.require_values", lambda model: None)  # meta, the second device here
    optimizer = gspace.GSGD(model, 0.1, analysis=analysis)
    with pytest.raises(ValueError, match=r"one device, and '0.bias' is on cpu, '2.weight' on meta: move them"):
        optimizer.step()
    assert require_one_device(analysis.transparent, model, {"0.weight", "0.bias"}, "GSGD") is None  # its own are on one
