"""Checkpoints of torch and of frameworks: fifty further steps are those of an uninterrupted training, bit for bit."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import gspace
from contract import KINDS, Kind, Net, assert_same, batches, train

STEPS = 50
PATH = next(kind for kind in KINDS if kind.name == "PathSGD")
OURS = [kind for kind in KINDS if kind.name != "SGD"] + [
    Kind("GSGD-exact", gspace.GSGD, {"lr": 0.05, "momentum": 0.9, "batch_norm": "exact"}),
    Kind("PathSGD-interval", PATH.build, {**PATH.options, "interval": 3, "lr": 0.005}, gspace=False),
]
ours = pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one: `torch.distributed.checkpoint` asks for its rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def by_file(model: nn.Module, optimizer: Any, other: nn.Module, fresh: Any, folder: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "all.pt")
    state = torch.load(folder / "all.pt", weights_only=True)
    assert set(state["optimizer"]) == {"state", "param_groups"}
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])


def by_names(model: nn.Module, optimizer: Any, other: nn.Module, fresh: Any, folder: Path) -> None:
    """`get_optimizer_state_dict` and `set_optimizer_state_dict`, by parameter names."""
    state = deepcopy(get_optimizer_state_dict(model, optimizer))
    set_model_state_dict(other, get_model_state_dict(model))
    set_optimizer_state_dict(other, fresh, state)


def by_dcp(flat: bool, model: nn.Module, optimizer: Any, other: nn.Module, fresh: Any, folder: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def states(m: nn.Module, o: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, o, options=options)}

    dcp.save(states(model, optimizer), checkpoint_id=folder)
    target = states(other, fresh)
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, fresh, target["optimizer"], options=options)


WAYS: dict[str, Callable[..., None]] = {
    "torch.save": by_file,
    "names": by_names,
    "dcp": lambda *args: by_dcp(False, *args),
    "dcp-flat": lambda *args: by_dcp(True, *args),
}


@pytest.mark.parametrize("way", WAYS)
@ours
def test_a_round_trip_into_an_optimizer_that_never_stepped(kind: Kind, way: str, tmp_path: Path) -> None:
    one, two = Net(), Net(seed=5)
    del one.unused, two.unused  # torch's own functions want state for every parameter that is trained
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(7))
    WAYS[way](one, first, two, second, tmp_path)
    data = batches(STEPS, seed=1)
    train(one, first, data)
    train(two, second, data)
    assert_same(one, two)


@ours
def test_a_round_trip_before_the_first_step(kind: Kind, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` steps at a rate of 0 to make state exist: nothing is bound to those weights."""
    one, two = Net(), Net(seed=5)
    del one.unused, two.unused
    plain = {} if kind.twin is not torch.optim.SGD else {"momentum": 0, "nesterov": False, "dampening": 0}
    first, second = kind.make(one, **plain), kind.make(two, **plain)
    before = deepcopy(one.state_dict())
    state = get_optimizer_state_dict(one, first)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    assert state["param_groups"]
    one.load_state_dict(Net(seed=9).state_dict(), strict=False)
    two.load_state_dict(one.state_dict())
    if kind.twin is not torch.optim.SGD or kind.name.startswith("PathSGD"):  # their steps are counted
        return
    train(one, first, batches(5))
    train(two, second, batches(5))
    assert_same(one, two)
