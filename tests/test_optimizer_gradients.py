"""Gradients that are missing, sparse, not finite, maximized; closures and hooks."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gspace
from contract import Kind, Net, assert_same, backward, batches, gspace_kinds, kinds, moved, train, values


@kinds
def test_frozen_and_unused_parameters_do_not_move(kind: Kind) -> None:
    model = Net()
    model.second.weight.requires_grad_(False)
    before = values(model)
    train(model, kind.make(model), batches(5))
    assert moved(model, before) == set(before) - {"second.weight", "unused.weight", "unused.bias"}


@kinds
def test_a_layer_frozen_during_training_does_not_move(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    train(model, optimizer, batches(5))
    model.hidden.weight.requires_grad_(False)
    before = values(model)
    losses = train(model, optimizer, batches(1) * 30)
    assert moved(model, before) == set(before) - {"hidden.weight", "unused.weight", "unused.bias"}
    assert losses[-1] < losses[0]


@gspace_kinds
def test_a_missing_gradient_is_a_gradient_of_zero(kind: Kind) -> None:
    """The weight behind a unit whose path changed still receives its 1/R."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    for batch in batches(4):
        before = values(one)
        backward(one, first, batch)
        backward(two, second, batch)
        one.head.weight.grad = None
        two.head.weight.grad = torch.zeros_like(two.head.weight)
        first.step()
        second.step()
        assert "head.weight" in moved(one, before)
    assert_same(one, two)


@kinds
def test_no_gradient_at_all_moves_nothing(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    optimizer.step()
    assert moved(model, values(Net())) == set()
    train(model, optimizer, batches(3))
    before = values(model)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert moved(model, before) == set()


@kinds
def test_zero_grad_both_ways(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    for batch in batches(5):
        for model, optimizer, none in ((one, first, True), (two, second, False)):
            optimizer.zero_grad(set_to_none=none)
            grads = [p.grad for n, p in model.named_parameters() if "unused" not in n]
            assert all(g is None if none else g is None or not g.any() for g in grads)
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
    assert_same(one, two)


@pytest.mark.parametrize("build", [lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda m: gspace.GSGD(m, 0.1)])
def test_sparse_gradients_outside_units_are_sgds(build: Any) -> None:
    model = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.GELU(), nn.Linear(5, 2))
    optimizer = build(model)
    model(torch.tensor([[1, 3]])).sum().backward()
    assert model[0].weight.grad.is_sparse
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert (before != model[0].weight).any(1).nonzero()[:, 0].tolist() == [1, 3]


@gspace_kinds
def test_gradients_whose_sum_overflows_are_finite_still(kind: Kind) -> None:
    model = Net().half()
    optimizer = kind.make(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    model.head.bias.grad = torch.full_like(model.head.bias, 6e4)  # two of them are more than float16 holds
    before = values(model)
    optimizer.step()
    assert "hidden.weight" in moved(model, before)


@kinds
def test_maximize_ascends(kind: Kind) -> None:
    """On −ℓ it takes the steps that it takes on ℓ otherwise."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two, maximize=True)
    for x, y in batches(5):
        for model, optimizer, sign in ((one, first, 1), (two, second, -1)):
            optimizer.zero_grad()
            (sign * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
    assert_same(one, two)


# Closures and hooks ---------------------------------------------------------------------------------------------------


@kinds
def test_a_closure_is_evaluated_once_with_gradients(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    losses = train(one, first, batches(4))
    calls = []
    for batch, expected in zip(batches(4), losses, strict=True):

        def closure(batch: Any = batch) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return backward(two, second, batch)

        assert float(second.step(closure)) == expected
    assert calls == [True] * 4
    assert second.step() is None
    first.step()
    assert_same(one, two)


@kinds
def test_hooks_run_around_a_step(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    seen: list[tuple[str, set[str]]] = []
    before = values(model)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", moved(model, before)))),
        optimizer.register_step_post_hook(lambda *_: seen.append(("post", moved(model, before)))),
    ]
    train(model, optimizer, batches(1))
    (first, untouched), (second, touched) = seen
    assert (first, untouched, second) == ("pre", set(), "post")
    assert touched == set(before) - {"unused.weight", "unused.bias"}
    for handle in handles:
        handle.remove()
    train(model, optimizer, batches(1))
    assert len(seen) == 2


@kinds
@pytest.mark.parametrize("of_all", [False, True], ids=["its own", "of all optimizers"])
def test_a_pre_hook_changes_gradients_once(kind: Kind, of_all: bool) -> None:
    """As gradient clipping or noise does; also where another optimizer takes the step inside of ours."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
            p.grad.mul_(0.5)

    for x, y in batches(4):
        for model, optimizer, scale in ((one, first, 1), (two, second, 0.5)):
            optimizer.zero_grad()
            (scale * nn.functional.cross_entropy(model(x), y)).backward()
        handle = register_optimizer_step_pre_hook(halve) if of_all else first.register_step_pre_hook(halve)
        first.step()
        handle.remove()
        second.step()
    assert_same(one, two)


@kinds
def test_hooks_of_every_optimizer_run_too(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda of, *_: seen.append("pre") if of is optimizer else None),
        register_optimizer_step_post_hook(lambda of, *_: seen.append("post") if of is optimizer else None),
    ]
    try:
        train(model, optimizer, batches(1))
        handles.pop(0).remove()
        train(model, optimizer, batches(1))
    finally:
        for handle in handles:
            handle.remove()
    train(model, optimizer, batches(1))
    assert seen == ["pre", "post", "post"]


@kinds
@pytest.mark.parametrize("which", ["pre", "post"])
def test_one_hook_alone_runs(kind: Kind, which: str) -> None:
    model = Net()
    optimizer = kind.make(model)
    seen: list[str] = []
    getattr(optimizer, f"register_step_{which}_hook")(lambda *_: seen.append(which))
    train(model, optimizer, batches(1))
    assert seen == [which]


@kinds
def test_a_profiler_sees_steps_by_name_and_changes_nothing(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    name = f"Optimizer.step#{type(first).__name__}.step"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(one, first, batches(3))
    assert [event.count for event in profile.key_averages() if event.key == name] == [3]
    train(two, second, batches(3))
    assert_same(one, two)


@kinds
def test_a_hook_that_a_closure_registers_runs_in_the_same_step(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    seen: list[str] = []
    batch = batches(1)[0]

    def closure() -> torch.Tensor:
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        return backward(model, optimizer, batch)

    optimizer.step(closure)
    assert seen == ["post"]
    optimizer.step(closure=closure)
    assert seen == ["post"] * 3


@gspace_kinds
def test_a_profiler_of_all_threads_sees_steps_too(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as profile:
        train(model, optimizer, batches(2))
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert [event.count for event in profile.key_averages() if event.key == name] == [2]


@gspace_kinds
def test_gradients_are_cleared_as_torch_does_and_by_name_under_a_profiler(kind: Kind) -> None:
    model = Net()
    optimizer = kind.make(model)
    train(model, optimizer, batches(1))
    optimizer.zero_grad(set_to_none=False)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert not any(bool(g.any()) for g in grads)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, batches(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.zero_grad()
    name = f"Optimizer.zero_grad#{type(optimizer).__name__}.zero_grad"
    assert [event.count for event in profile.key_averages() if event.key == name] == [1]
    assert all(p.grad is None for p in model.parameters())


class Watched(torch.optim.SGD):
    """Counts its steps, in ways that others wrap a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def test_an_inner_optimizer_keeps_its_own_step_and_hooks() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on torch's wrapper is around its step
    model = Net()
    optimizer = gspace.InGSpace(model, Watched, lr=0.1)
    train(model, optimizer, batches(2))
    assert optimizer.inner.count == 2

    optimizer = gspace.InGSpace(model, torch.optim.SGD, lr=0.1)
    train(model, optimizer, batches(1))
    seen: list[str] = []
    handle = optimizer.inner.register_step_post_hook(lambda *_: seen.append("own"))
    train(model, optimizer, batches(1))
    handle.remove()
    plain = optimizer.inner.step
    optimizer.inner.step = lambda: (seen.append("put there"), plain())[1]
    train(model, optimizer, batches(1))
    assert seen == ["own", "put there"]
