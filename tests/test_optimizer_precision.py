"""Mixed precision, 16-bit parameters, and compiled models and steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from contract import Kind, Net, assert_same, backward, batches, gspace_kinds, kinds, moved, train, values

# Mixed precision ------------------------------------------------------------------------------------------------------


@kinds
def test_autocast(kind: Kind) -> None:
    """bfloat16 activations, float32 weights and updates: it trains as in float32, to the precision of bfloat16."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    exact = train(one, first, batches(1) * 20)
    rounded = []
    for x, y in batches(1) * 20:
        second.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(two(x), y)
        loss.backward()
        second.step()
        rounded.append(float(loss.detach()))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.1)  # 8 bits of mantissa and 20 steps
    assert {p.dtype for p in two.parameters()} == {torch.float32}


def scaled_step(model: nn.Module, optimizer: Any, scaler: Any, batch: tuple[Tensor, Tensor], factor: float = 1) -> None:
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@kinds
def test_a_scaled_loss_gives_the_same_steps(kind: Kind) -> None:
    """Powers of two are exact."""
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(one, first, batches(5))
    for batch in batches(5):
        scaled_step(two, second, scaler, batch)
    assert_same(one, two)


@kinds
def test_an_overflow_skips_the_step(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(one, first, batches(3))
    for batch in batches(3):
        scaled_step(two, second, scaler, batch)
    before = values(two)
    scaled_step(two, second, scaler, batches(1)[0], factor=float("inf"))
    assert moved(two, before) == set()
    assert scaler.get_scale() == 512
    two.load_state_dict(one.state_dict())  # running statistics saw the batch
    train(one, first, batches(3, seed=1))
    for batch in batches(3, seed=1):
        scaled_step(two, second, scaler, batch)
    assert_same(one, two)


@kinds
def test_gradients_may_be_clipped_and_unscaled_by_hand(kind: Kind) -> None:
    one, two = Net(), Net()
    first, second = kind.make(one), kind.make(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches(4):
        backward(one, first, batch)
        nn.utils.clip_grad_norm_(one.parameters(), 0.25)
        first.step()
        second.zero_grad()
        scaler.scale(nn.functional.cross_entropy(two(batch[0]), batch[1])).backward()
        scaler.unscale_(second)
        nn.utils.clip_grad_norm_(two.parameters(), 0.25)
        scaler.step(second)
        scaler.update()
    assert_same(one, two)


# 16-bit parameters ----------------------------------------------------------------------------------------------------


# Adam's ε of 1e-8 is 0 in float16, for torch's Adam as for parameters outside units.
SIXTEEN: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    cls: {"eps": 1e-4} for cls in (torch.optim.AdamW, torch.optim.RMSprop)
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@kinds
def test_16_bit_parameters_train(kind: Kind, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer = kind.make(model, **SIXTEEN.get(kind.twin, {}))
    losses = train(model, optimizer, [(x.to(dtype), y) for x, y in batches(1) * 60])
    assert losses[-1] < 0.6 * losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@kinds
def test_a_compiled_model_trains_the_same(kind: Kind, backend: str, dynamo: None) -> None:
    """The optimizer is made from the model or from its compiled wrapper."""
    one, two, three = Net(), Net(), Net()
    first, second = kind.make(one), kind.make(two)
    wrapped = torch.compile(three, backend=backend)
    third = kind.make(wrapped)
    train(one, first, batches(5))
    train(torch.compile(two, backend=backend), second, batches(5))
    train(wrapped, third, batches(5))
    for model in (two, three):
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@gspace_kinds
def test_a_compiled_step_is_the_step_in_one_graph(kind: Kind, dynamo: None) -> None:
    """One graph without a break, once the first step has chosen a skeleton; a learning rate in a tensor may change."""
    one, two = Net(), Net()
    options = {"foreach": False}
    first, second = (kind.make(model, lr=torch.tensor(kind.options["lr"]), **options) for model in (one, two))
    step = torch.compile(second.step, backend="aot_eager", fullgraph=True)
    for n, batch in enumerate(batches(8)):
        for model, optimizer, take in ((one, first, first.step), (two, second, step)):
            optimizer.param_groups[0]["lr"].fill_(kind.options["lr"] / (1 + n))
            backward(model, optimizer, batch)
            with torch.compiler.set_stance("default" if n < 3 else "fail_on_recompile"):
                optimizer.step() if n == 0 else take()
    assert 0 < counters["stats"]["unique_graphs"] <= 2  # the second sees what the first has kept in the groups
    assert not counters["graph_break"]
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@gspace_kinds
def test_compiled_steps_leave_a_state_that_goes_on(kind: Kind, dynamo: None) -> None:
    """Saved after compiled steps, loaded, continued without compiling; statistics are those of the last step."""
    one, two, three = Net(), Net(), Net()
    options = {"lr": torch.tensor(kind.options["lr"]), "foreach": False}
    first, second, third = (kind.make(model, **options) for model in (one, two, three))
    step = torch.compile(second.step, backend="eager")
    for batch in batches(5):
        backward(one, first, batch)
        first.step()
        backward(two, second, batch)
        step()
    ratios, compiled = (optimizer.statistics()["ratio_quantiles"] for optimizer in (first, second))
    assert list(compiled.values()) == pytest.approx(list(ratios.values()), rel=1e-4)
    assert len(set(ratios.values())) > 1
    three.load_state_dict(two.state_dict())
    third.load_state_dict(second.state_dict())
    train(one, first, batches(5, seed=1))
    train(three, third, batches(5, seed=1))
    for p, q in zip(one.parameters(), three.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)  # ten steps amplify rounding


@gspace_kinds
def test_a_compiled_step_notices_what_others_did(kind: Kind, dynamo: None) -> None:
    """Weights loaded between two steps."""
    one, two = Net(), Net()
    first, second = (kind.make(model, foreach=False) for model in (one, two))
    steps = first.step, torch.compile(second.step, backend="eager")
    first_batch, second_batch, third_batch = batches(3)
    for batch in (first_batch, second_batch):
        for model, optimizer, step in ((one, first, steps[0]), (two, second, steps[1])):
            backward(model, optimizer, batch)
            step()
            model.load_state_dict({name: value * 1.5 for name, value in Net().state_dict().items()})
    for model, optimizer, step in ((one, first, steps[0]), (two, second, steps[1])):
        backward(model, optimizer, third_batch)
        step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
