"""Another network put under an optimizer, or layers thawed: it goes on as if it were made then."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
import zoo

Make = Callable[[nn.Module], Any]

MAKE: dict[str, Make] = {
    "GSGD": lambda m: gspace.GSGD(m, 0.05, momentum=0.9),
    "InGSpace": lambda m: gspace.InGSpace(m, torch.optim.Adam, lr=1e-2),
    "FrozenSkeletonSGD": lambda m: gspace.FrozenSkeletonSGD(m, 0.05, momentum=0.9),
    "PathSGD": lambda m: gspace.PathSGD(m, 0.05, momentum=0.9),
}
IN_G_SPACE = ["GSGD", "InGSpace"]
START = ("from a zero head", "from zeros")


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return zoo.mlp(10, 16, 16, 4).double()


def train(model: nn.Module, optimizer: Any, first: int = 0, last: int = 6) -> list[float]:
    losses = []
    for k in range(first, last):
        x = torch.randn(16, 10, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("change", ["load", "init", "scale the head", "biases", "from a zero head", "from zeros"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_before_the_first_step_it_is_as_if_it_were_made_later(make: Make, change: str) -> None:
    def changed(model: nn.Sequential) -> nn.Sequential:
        if change == "load":
            model.load_state_dict(net(2).state_dict())
        elif change == "init":
            gspace.init_skeleton_(model)
        elif change == "biases":
            with torch.no_grad():
                for layer in model[::2]:
                    layer.bias.zero_()
        elif change in START:
            model.load_state_dict(net(2).state_dict())
        else:
            with torch.no_grad():
                model[4].weight *= 1.5
        return model

    early, late = net(1), changed(net(1))
    for p in early.parameters() if change == "from zeros" else early[4].parameters() if change in START else ():
        nn.init.zeros_(p)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*skeleton weights of 0")
        optimizers = [make(early), make(late)]
    changed(early)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [train(model, optimizer) for model, optimizer in zip((early, late), optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert max(losses[0]) < 6


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_processes_that_start_apart_and_are_given_the_same_weights_stay_together(make: Make) -> None:
    """`DistributedDataParallel` around a model that has its optimizer already."""
    models = [net(1), net(2)]
    optimizers = [make(model) for model in models]
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)
    assert all(map(torch.equal, state(models[0]), state(models[1])))


@pytest.mark.parametrize("make", [MAKE[name] for name in IN_G_SPACE], ids=IN_G_SPACE)
@pytest.mark.parametrize("on_skeleton", [True, False])
def test_a_rescaled_network_is_no_other_network(make: Make, on_skeleton: bool) -> None:
    models = [net(1), net(1)]
    if on_skeleton:
        for model in models:
            gspace.init_skeleton_(model)
    optimizers = [make(model) for model in models]
    reference, skeleton = optimizers[1].reference, optimizers[1].skeleton
    scales = gspace.random_scales(models[1], generator=torch.Generator().manual_seed(0))
    gspace.rescale_(models[1], scales)
    losses = [train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    assert optimizers[1].reference == reference
    assert torch.equal(optimizers[1].skeleton.in_index, skeleton.in_index)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", [MAKE[name] for name in IN_G_SPACE], ids=IN_G_SPACE)
def test_in_mid_run_it_says_so_and_starts_again(make: Make) -> None:
    model, fresh = net(1), net(2)
    optimizer = make(model)
    train(model, optimizer)
    model.load_state_dict(fresh.state_dict())
    with pytest.warns(UserWarning, match="the weights are not those that .* left"):
        found = train(model, optimizer)
    assert found == train(fresh, make(fresh))


@pytest.mark.parametrize("make", [MAKE[name] for name in IN_G_SPACE], ids=IN_G_SPACE)
def test_small_changes_by_others_keep_skeleton_and_state(make: Make) -> None:
    model = net(1)
    optimizer = make(model)
    train(model, optimizer)
    skeleton = optimizer.skeleton
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)
    assert optimizer.skeleton is skeleton


@pytest.mark.filterwarnings("ignore:the weights are not those")
def test_small_changes_by_others_do_not_add_up() -> None:
    """Weight decay by hand takes all path values toward 0, and a step is divided by their squares."""
    model = net(1)
    optimizer = gspace.GSGD(model, 0.01)
    for k in range(60):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.97)
        train(model, optimizer, k, k + 1)
        size = optimizer.statistics()["path_value"].abs()
        assert float(size.min()) > 0.4
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_without_guards_paths_go_where_the_steps_take_them() -> None:
    """How far they are from 1 says nothing then; what others do in one go does."""
    model = net(1)
    optimizer = gspace.GSGD(model, 0.05, max_ratio=math.inf, max_drift=math.inf)
    skeleton = optimizer.skeleton
    optimizer.incoming[1:] *= 5  # as after many steps
    with torch.no_grad():
        model[0].weight.mul_(5), model[0].bias.mul_(5)
    optimizer._mark()
    optimizer._begun = True
    with torch.no_grad():
        model[0].weight.mul_(1.2), model[0].bias.mul_(1.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 0, 1)
    assert optimizer.skeleton is skeleton


def test_a_reference_that_is_asked_for_is_kept() -> None:
    model = net(1)
    optimizer = gspace.GSGD(model, 1e-4, reference="one")
    for seed in (2, 3):
        model.load_state_dict(net(seed).state_dict())
        train(model, optimizer, 0, 1)
        assert optimizer.reference == "one"


def test_path_values_outside_of_a_guard_are_no_sign_of_others_when_a_run_goes_on() -> None:
    one, two = net(1), net(1)
    first = gspace.GSGD(one, 1e-4, momentum=0.9, reference="one")
    train(one, first)
    two.load_state_dict(one.state_dict())
    second = gspace.GSGD(two, 1e-4, momentum=0.9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(one, first, 6, 12) == train(two, second, 6, 12)
    assert second.reference == "one"


class Picky(torch.optim.SGD):
    """An inner optimizer that cannot always be made."""

    fails = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if Picky.fails:
            raise MemoryError
        super().__init__(*args, **options)


@pytest.mark.filterwarnings("ignore:the weights are not those")
def test_starting_again_happens_in_full_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fresh = net(1), net(2)
    optimizer = gspace.InGSpace(model, Picky, lr=0.05, momentum=0.9)
    train(model, optimizer)
    model.load_state_dict(fresh.state_dict())
    monkeypatch.setattr(Picky, "fails", True)
    with pytest.raises(MemoryError):
        train(model, optimizer)
    monkeypatch.setattr(Picky, "fails", False)
    assert train(model, optimizer) == train(fresh, gspace.InGSpace(fresh, Picky, lr=0.05, momentum=0.9))


def test_weights_that_are_not_finite_are_refused_and_nothing_is_lost() -> None:
    model = net(1)
    optimizer = gspace.GSGD(model, 0.05)
    train(model, optimizer, 0, 1)
    kept, incoming = copy.deepcopy(model.state_dict()), optimizer.incoming.clone()
    with torch.no_grad():
        model[2].weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    model.load_state_dict(kept)
    train(model, optimizer, 1, 2)
    torch.testing.assert_close(optimizer.incoming, incoming, rtol=0.2, atol=0)  # two steps, each guarded to 10 %


# Layers that are frozen and thawed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_units_that_were_not_put_on_the_skeleton_are_not_measured_by_it(seed: int) -> None:
    """`init_skeleton_` leaves frozen layers alone: thawed, their path values would be far from 1."""
    model = net(seed)
    model[0].requires_grad_(False)
    gspace.init_skeleton_(model)
    optimizer = gspace.GSGD(model, 0.01)
    before = train(model, optimizer, 0, 20)
    model.requires_grad_(True)
    after = train(model, optimizer, 20, 40)
    assert optimizer.reference == "balanced"
    assert optimizer.skeleton.H == 32
    assert max(after) < max(before)


def test_ones_behind_units_are_not_a_skeleton_alone() -> None:
    model = zoo.mlp(10, 16, 3).double()
    with torch.no_grad():
        model[2].weight.copy_(model[2].weight.sign())
    optimizer = gspace.GSGD(model, 0.01)
    assert optimizer.reference == "balanced"
    torch.testing.assert_close(optimizer.statistics()["path_value"], torch.ones(16).double())
    assert gspace.GSGD(gspace.init_skeleton_(model), 0.01).reference == "one"


@pytest.mark.parametrize("thawed", ["after saving", "before saving"])
@pytest.mark.parametrize("make", [MAKE[name] for name in IN_G_SPACE], ids=IN_G_SPACE)
def test_a_layer_thawed_between_saving_and_loading_enters_as_in_one_process(make: Make, thawed: str) -> None:
    one, two = net(1), net(1)
    one[0].requires_grad_(False)
    first = make(one)
    train(one, first, 0, 4)
    if thawed == "before saving":
        one.requires_grad_(True)
    saved = copy.deepcopy((one.state_dict(), first.state_dict()))
    one.requires_grad_(True)
    second = make(two)
    two.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert train(one, first, 4, 8) == train(two, second, 4, 8)
    assert first.skeleton.H == second.skeleton.H == 32
    assert all(map(torch.equal, state(one), state(two)))


# States under other names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_frozen_weights_are_found_whatever_is_around_the_model(prefix: str) -> None:
    one, two = net(1), net(1)
    first = gspace.FrozenSkeletonSGD(nn.DataParallel(one), 0.05, momentum=0.9)
    train(one, first, 0, 3)
    saved = copy.deepcopy(first.state_dict())
    for key in ("frozen", "shapes"):
        saved[key] = {prefix + name: value for name, value in saved[key].items()}
    second = gspace.FrozenSkeletonSGD(two, 0.05, momentum=0.9)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(saved)
    assert train(one, first, 3, 6) == train(two, second, 3, 6)


def test_a_layer_that_is_frozen_by_now_does_not_make_it_another_network() -> None:
    one, two = net(1), net(1)
    first = gspace.FrozenSkeletonSGD(one, 0.05)
    two[0].requires_grad_(False)
    second = gspace.FrozenSkeletonSGD(two, 0.05)
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["frozen"].keys() == first.state_dict()["frozen"].keys()


def test_frozen_weights_of_another_network_or_optimizer_are_refused() -> None:
    optimizer = gspace.FrozenSkeletonSGD(net(1), 0.05)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(net(1).parameters(), 0.05).state_dict())
    saved = optimizer.state_dict()
    saved["frozen"] = {f"body.{name}": value for name, value in saved["frozen"].items()}
    with pytest.raises(ValueError, match="it freezes body"):
        optimizer.load_state_dict(saved)


def test_a_closure_may_load_the_weights() -> None:
    model = net(1)
    optimizer = gspace.FrozenSkeletonSGD(model, 0.0)

    def closure() -> Tensor:
        model.load_state_dict(net(2).state_dict())
        loss = model(torch.ones(2, 10).double()).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert all(map(torch.equal, state(model), state(net(2))))
