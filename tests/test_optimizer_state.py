"""State: saved, loaded in another process, copied, moved, averaged; nothing changes the steps that follow."""

import functools
import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import contract
import dense
import gspace
from contract import KINDS, Kind, Net, assert_same, batches, gspace_kinds, kinds, moved, train, values
from gspace.optim import choice
from gspace.optim.skeleton import Skeleton

# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """Checkpoints after ten steps, continued by another process; and the weights after the same steps in this one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    expected = {}
    for kind in KINDS:
        model = Net()
        optimizer = kind.make(model)
        scheduler = StepLR(optimizer, 3, 0.7)
        train(model, optimizer, batches(10), scheduler)
        contract.save(folder, kind, model, optimizer, scheduler)
        train(model, optimizer, batches(20, seed=1), scheduler)
        expected[kind.name] = model.state_dict()
    path = [str(Path(gspace.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    subprocess.run([sys.executable, contract.__file__, folder], env=environment, check=True, timeout=300)
    return folder, expected


@pytest.mark.parametrize("source", ["torch", "safetensors"])
@kinds
def test_the_next_twenty_steps_in_a_new_process_are_the_same(kind: Kind, source: str, resumed: Any) -> None:
    folder, expected = resumed
    found = torch.load(folder / f"{kind.name}.{source}.after.pt", weights_only=True)
    assert found.keys() == expected[kind.name].keys()
    assert [name for name in found if not torch.equal(found[name], expected[kind.name][name])] == []


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@kinds
def test_the_order_of_loading_does_not_matter(kind: Kind, order: str) -> None:
    one, two = Net(), Net(seed=5)
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(5))
    pairs = [(one, two), (first, second)]
    for saved, loaded in pairs if order == "model first" else reversed(pairs):
        loaded.load_state_dict(deepcopy(saved.state_dict()))
    train(one, first, batches(10, seed=1))
    train(two, second, batches(10, seed=1))
    assert_same(one, two)


@gspace_kinds
def test_a_state_without_its_weights_measures_those_that_are_there(kind: Kind) -> None:
    """Loading twice, once into the wrong weights, leaves nothing behind."""
    one, two, other = Net(), Net(), Net(seed=5)
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(5))
    state = deepcopy(first.state_dict())
    two.load_state_dict(other.state_dict())
    second.load_state_dict(deepcopy(state))
    train(two, second, batches(3))
    two.load_state_dict(one.state_dict())
    second.load_state_dict(state)
    train(one, first, batches(5, seed=1))
    train(two, second, batches(5, seed=1))
    assert_same(one, two)


@gspace_kinds
def test_units_without_weights_at_construction_come_with_the_state(kind: Kind) -> None:
    """Which units are used depends on zeros among the first weights; a state brings its own."""
    one, two = contract.chain(), contract.chain(seed=1)
    with torch.no_grad():
        one[7].weight[:, :2] = 0
    first, second = kind.make(one), kind.make(two)
    with pytest.warns(UserWarning, match="2 units have skeleton weights of 0") as told:
        train(one, first, batches(3))
    assert len(told) == 1
    assert first.statistics()["unused"][0] in str(told[0].message)
    assert first.skeleton.H == second.skeleton.H - 2
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    train(one, first, batches(5, seed=1))
    train(two, second, batches(5, seed=1))
    assert_same(one, two)


def test_gsgd_goes_on_from_sgd_in_g_space() -> None:
    """They are one algorithm and keep one state."""
    one, two = Net().double(), Net().double()
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    first, second = gspace.GSGD(one, **options), gspace.InGSpace(two, torch.optim.SGD, **options)
    train(one, first, batches(3, dtype=torch.float64))
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    train(one, first, batches(3, seed=1, dtype=torch.float64))
    train(two, second, batches(3, seed=1, dtype=torch.float64))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_an_inner_optimizer_goes_on_from_the_state_of_its_like() -> None:
    """As torch's AdamW does from Adam's."""
    one, two = Net(), Net()
    first, second = (gspace.InGSpace(m, cls, lr=0.01) for m, cls in ((one, torch.optim.Adam), (two, torch.optim.AdamW)))
    train(one, first, batches(3))
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    train(one, first, batches(3, seed=1))
    train(two, second, batches(3, seed=1))  # its group, and what it does with decay, came with the state
    assert_same(one, two)


@kinds
def test_what_others_keep_in_the_state_is_loaded_too(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(2))
    first.state[one.head.weight]["note"] = 3
    first.state["others"] = {"count": 1}
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    assert second.state[two.head.weight]["note"] == 3
    assert second.state["others"] == {"count": 1}


# Damage ---------------------------------------------------------------------------------------------------------------

GONE = object()


def _shorter(x: Any) -> Any:
    return x[:-1] if (isinstance(x, Tensor) and x.dim() and len(x)) or (isinstance(x, list | tuple) and x) else x


def _beyond(x: Any) -> Any:
    return x + 10**6 if isinstance(x, Tensor) and x.numel() and not x.is_floating_point() else x


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "gone": lambda x: GONE,
    "none": lambda x: None,
    "text": lambda x: "x",
    "shorter": _shorter,
    "beyond": _beyond,
}


def _places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested dicts, lists and tuples, hyper-parameters of groups apart."""
    if path:
        yield path
    if isinstance(state, dict):
        names = ["params"] if "params" in state else list(state)
        for key in names:
            yield from _places(state[key], (*path, key))
    elif isinstance(state, list | tuple):
        for key, value in enumerate(state):
            yield from _places(value, (*path, key))


def _damaged(state: Any, path: tuple[Any, ...], damage: Callable[[Any], Any]) -> Any:
    if not path:
        return damage(state)
    items = dict(state) if isinstance(state, dict) else dict(enumerate(state))
    items[path[0]] = _damaged(items[path[0]], path[1:], damage)
    left = {key: value for key, value in items.items() if value is not GONE}
    return left if isinstance(state, dict) else type(state)(left.values())


OURS = ("skeleton", "momentum_buffer", "kappa")


def _harmless(path: tuple[Any, ...], damage: str) -> bool:
    """What torch makes anew or does not look at, and what belongs to an inner optimizer."""
    if path[0] == "state":
        return damage in ("gone", "none") or (len(path) == 3 and path[2] not in OURS)
    return "params" in path[:-1]


@pytest.mark.parametrize("kind", [kind for kind in contract.KINDS if kind.name != "SGD"], ids=lambda kind: kind.name)
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Kind) -> None:
    """Every part of a state, damaged in five ways: one line says so. In C such a state would write anywhere."""
    one, two = contract.chain(), contract.chain()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(2))
    train(two, second, batches(2))
    good = deepcopy(first.state_dict())
    told = refused = 0
    for path in _places(good):
        for name, damage in DAMAGES.items():
            part = functools.reduce(operator.getitem, path, good)
            if damage(part) is part:
                continue
            try:
                first.load_state_dict(_damaged(deepcopy(good), path, damage))
            except ValueError as error:
                refused += len(str(error).splitlines()) == 1
                told += 1
            else:
                assert _harmless(path, name), (path, name)
                first.load_state_dict(deepcopy(good))
    assert told == refused > 10
    train(one, first, batches(3, seed=1))
    train(two, second, batches(3, seed=1))
    assert_same(one, two)


def test_a_skeleton_that_goes_round_in_a_circle_is_refused() -> None:
    model = dense.Shared()
    optimizer = gspace.GSGD(model, 0.1, analysis=gspace.analyze(model))
    optimizer.rechoose()
    state = deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    for name, at in (("stem.weight", (-1, -1)), ("shared.weight", (1, 2))):  # in(u) reads the other unit
        table = state["state"][names.index(name)]["skeleton"]
        table[1:3, :8] = torch.tensor(at).view(torch.uint8).reshape(2, 8)
        table[1:3, 8:] = torch.ones(2, dtype=torch.float64).view(torch.uint8).reshape(2, 8)
    with pytest.raises(ValueError, match="goes round in a circle"):
        optimizer.load_state_dict(state)


# Casts ----------------------------------------------------------------------------------------------------------------


def test_positions_and_references_survive_torchs_casts() -> None:
    """`load_state_dict` casts to the dtype of the parameter; position 2²⁴ + 3 is no float32, 257 no bfloat16."""
    none, first = torch.zeros(2, dtype=torch.long), torch.tensor([-1, 0])
    edges = gspace.Edges("w", torch.tensor([[1, 0]]), torch.tensor([[0]]), False, False, 0, 0)
    skeleton = Skeleton((edges,), 1, first, torch.tensor([0, 2**24 + 3]), -torch.ones(2).long(), *[none] * 4)
    references = torch.tensor([[1, 1 / 3], [1, 0.1]], dtype=torch.float64)
    table = choice.written(choice.Chosen(skeleton, references, True), [edges], {"w": 2**25})["w"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        positions, values = choice._lines(table[:3].to(dtype), 3)
        assert positions.tolist() == [choice.FINAL, 2**24 + 3, -1]
        assert values[1] == references[0, 1]


@gspace_kinds
def test_a_state_of_16_bits_goes_on_as_it_was(kind: Kind) -> None:
    one, two = Net().bfloat16(), Net(seed=5).bfloat16()
    first, second = (kind.make(model, **({"eps": 1e-4} if "Adam" in kind.name else {})) for model in (one, two))
    data = [(x.bfloat16(), y) for x, y in batches(8)]
    train(one, first, data[:4])
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    train(one, first, data[4:])
    train(two, second, data[4:])
    assert_same(one, two)


# Copies ---------------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("copy", COPIES)
@kinds
def test_a_copy_goes_on_identically_and_independently(kind: Kind, copy: str) -> None:
    """Also with a scheduler attached and a hook that cannot be pickled."""
    one = Net()
    first = kind.make(one)
    scheduler = StepLR(first, 2)
    first.register_step_post_hook(lambda *_: None)
    train(one, first, batches(5), scheduler)
    two, second = COPIES[copy]((one, first))
    before = values(one)
    train(two, second, batches(10, seed=1))
    assert moved(one, before) == set()
    train(one, first, batches(10, seed=1))
    assert_same(one, two)


@gspace_kinds
def test_a_copy_follows_weights_that_were_changed_before_it(kind: Kind) -> None:
    one, two = contract.chain(), contract.chain()
    first, second = kind.make(one), kind.make(two)
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, batches(3))
        gspace.rescale_(model, gspace.random_scales(model, torch.Generator().manual_seed(3)))
    two, second = deepcopy((two, second))
    train(one, first, batches(5, seed=1))
    train(two, second, batches(5, seed=1))
    assert_same(one, two)


# Moves ----------------------------------------------------------------------------------------------------------------


def tensors(tree: Any) -> list[torch.Tensor]:
    return list(contract.flatten(tree)[0].values())


@kinds
def test_resume_in_another_dtype(kind: Kind) -> None:
    """Loaded into a float64 network, and moved to float64 as it is: the same steps, close to those in float32."""
    one, two = Net(), Net(seed=5).double()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(5))
    three, third = deepcopy((one, first))
    three.double()
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    train(one, first, batches(5, seed=1))
    train(two, second, batches(5, seed=1, dtype=torch.float64))
    train(three, third, batches(5, seed=1, dtype=torch.float64))
    for p, q, r in zip(one.parameters(), two.parameters(), three.parameters(), strict=True):
        torch.testing.assert_close(p, q.float(), rtol=1e-3, atol=1e-4)  # five steps of training amplify rounding
        if kind.gspace:  # torch leaves the momentum of parameters that are moved in float32
            torch.testing.assert_close(q, r, rtol=1e-12, atol=1e-12)
    state = {p: s for p, s in second.state.items() if p.dtype == torch.float64}
    assert all(t.dtype == torch.float64 for s in state.values() for t in tensors(s) if t.dim())


@pytest.mark.gpu
@kinds
def test_resume_on_another_device(kind: Kind) -> None:
    one, two = Net(), Net(seed=5).cuda()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(5))
    three, third = deepcopy((one, first))
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    there = [(x.cuda(), y.cuda()) for x, y in batches(5, seed=1)]
    train(one, first, batches(5, seed=1))
    train(two, second, there)
    runs = [two]
    if kind.gspace:  # torch cannot move the state of an optimizer that exists
        train(three.cuda(), third, there)
        runs.append(three)
    for model in runs:
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q.cpu(), rtol=1e-3, atol=1e-4)  # sums in another order, five steps


# Averages -------------------------------------------------------------------------------------------------------------


@kinds
def test_averaging_watches_and_does_not_disturb(kind: Kind) -> None:
    """SWA with its schedule and EMA beside plain training; BatchNorm is updated afterwards."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    swa = AveragedModel(two)
    ema = AveragedModel(two, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedules = SWALR(first, 0.01), SWALR(second, 0.01)
    seen: list[dict[str, torch.Tensor]] = []
    for batch in batches(6):
        train(one, first, [batch], schedules[0])
        train(two, second, [batch], schedules[1])
        swa.update_parameters(two)
        ema.update_parameters(two)
        seen.append(values(two))
    assert_same(one, two)
    for name, p in swa.module.named_parameters():
        torch.testing.assert_close(p, torch.stack([v[name] for v in seen]).mean(0), rtol=1e-5, atol=1e-6)
    update_bn([x for x, _ in batches(4)], swa)
    train(one, first, batches(3, seed=1))
    train(two, second, batches(3, seed=1))
    assert_same(one, two)
    assert moved(ema.module, values(two))


@kinds
def test_weights_lent_to_an_average_come_back(kind: Kind) -> None:
    """Evaluating averaged weights in the model itself, then putting its own back, changes no later step."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    train(one, first, batches(5))
    train(two, second, batches(5))
    own, average = deepcopy(two.state_dict()), Net(seed=7).state_dict()
    two.load_state_dict(average)
    two.load_state_dict(own)
    train(one, first, batches(5, seed=1))
    train(two, second, batches(5, seed=1))
    assert_same(one, two)


@gspace_kinds
def test_a_state_taken_before_the_first_step_starts_over(kind: Kind) -> None:
    """torch's state is empty then: momentum that comes later is not in it. Coordinates follow the weights to √eps."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    weights, state = deepcopy(one.state_dict()), first.state_dict()
    train(one, first, batches(5, seed=1))
    one.load_state_dict(weights)
    first.load_state_dict(state)
    train(one, first, batches(5))
    train(two, second, batches(5))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_state_of_another_shape_does_not_reach_a_fused_step(name: str) -> None:
    """torch's fused AdamW writes behind it and ends the process."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = gspace.InGSpace(model, torch.optim.AdamW, lr=1e-3, fused=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = deepcopy(optimizer.state_dict())
    state["state"][0][name] = torch.zeros(3)
    with pytest.raises(ValueError, match=f"damaged: {name} has another shape"):
        optimizer.load_state_dict(state)
    optimizer.step()
