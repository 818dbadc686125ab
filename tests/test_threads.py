"""Tracing beside other threads: those that draw numbers, run models, or trace."""

import builtins
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from parts import VECTORS, Net
from zoo import mlp


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Another thread that does `work` over and over; what it raised."""
    stop, failed = threading.Event(), []

    def loop() -> None:
        while not stop.is_set():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - shown by the test
                failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield failed
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(3)], ids=["python", "torch"])
@pytest.mark.parametrize("example", [None, VECTORS[0]], ids=["symbolic", "example"])
def test_what_another_thread_draws_is_not_held_against_the_model(
    draw: Callable[[], object], example: Tensor | None
) -> None:
    with beside(draw) as failed:
        for _ in range(5):
            assert gspace.analyze(mlp(5, 7, 3).double(), example).H == 7
    assert not failed


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h * 2 if random.random() < 0.5 else h,
        lambda h: h + random.random(),
        lambda h: h + torch.rand(7).double(),
    ],
    ids=["branch", "number", "tensor"],
)
def test_a_model_that_draws_is_refused_beside_other_threads_too(draw: Callable[[Tensor], Tensor]) -> None:
    model = Net(lambda s, x: s.o(draw(F.relu(s.a(x)))), a=nn.Linear(5, 7), o=nn.Linear(7, 3)).double()
    with beside(lambda: None), pytest.raises(gspace.TraceError, match="draws random numbers"):
        gspace.analyze(model)


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_draw_is_refused_beside_a_thread_that_waits(seed: int) -> None:
    """Progress bars and notebooks have such threads. Nine draws out of ten take the same branch."""

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.o(h if random.random() < 0.9 else h * 2)

    model, done = Net(forward, a=nn.Linear(5, 7), o=nn.Linear(7, 3)), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    random.seed(seed)
    state = random.getstate()
    try:
        with pytest.raises(gspace.TraceError, match="draws random numbers"):
            gspace.analyze(model)
    finally:
        done.set()
        thread.join()
    assert random.getstate() == state


def test_a_refused_model_leaves_the_generators_as_they_were() -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x)) * random.random()), a=nn.Linear(5, 7), o=nn.Linear(7, 3))
    state, own = random.getstate(), torch.get_rng_state()
    with pytest.raises(gspace.TraceError, match="draws random numbers"):
        gspace.analyze(model)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), own)


def test_models_of_other_threads_run_while_one_is_traced() -> None:
    other, x = mlp(5, 7, 3).double(), VECTORS[0]
    expected = other(x)
    with beside(lambda: torch.testing.assert_close(other(x), expected)) as failed:
        for _ in range(20):
            gspace.analyze(mlp(5, 7, 3))
    assert not failed


def test_another_thread_may_run_the_model_that_is_traced() -> None:
    model, x = mlp(8, *[8] * 20, 3).double(), torch.ones(2, 8).double()
    expected = model(x)
    with beside(lambda: torch.testing.assert_close(model(x), expected)) as failed:
        assert {gspace.analyze(model).H for _ in range(10)} == {160}
    assert not failed


def test_several_threads_train() -> None:
    original = builtins.isinstance

    def study() -> None:
        model = mlp(5, 7, 3).double()
        optimizer = gspace.GSGD(model, 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(VECTORS[0]).square().sum().backward()
            optimizer.step()

    with beside(study) as one, beside(study) as two:
        for _ in range(10):
            study()
    assert not one + two
    assert builtins.isinstance is original
