"""Analyses beside other threads: those that draw numbers, run models, or analyze."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import gspace
from parts import VECTORS
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
def test_what_another_thread_draws_changes_nothing(draw: Callable[[], object]) -> None:
    with beside(draw) as failed:
        for _ in range(5):
            assert gspace.analyze(mlp(5, 7, 3).double(), VECTORS[0]).H == 7
    assert not failed


def test_models_of_other_threads_run_while_one_is_analyzed() -> None:
    other, x = mlp(5, 7, 3).double(), VECTORS[0]
    expected = other(x)
    with beside(lambda: torch.testing.assert_close(other(x), expected)) as failed:
        for _ in range(20):
            assert gspace.analyze(mlp(5, 7, 3)).H == 7
    assert not failed


def test_another_thread_may_run_the_model_that_is_analyzed() -> None:
    model, x = mlp(8, *[8] * 20, 3).double(), torch.ones(2, 8).double()
    expected = model(x)
    with beside(lambda: torch.testing.assert_close(model(x), expected)) as failed:
        found = [gspace.analyze(model, pin=["20"]) for _ in range(10)]
    assert {analysis.H for analysis in found} == {152}
    assert {pin.where for analysis in found for pin in analysis.pinned} == {"20", "the model"}
    assert not failed


def test_analyses_of_one_model_take_turns() -> None:
    """Each puts back what it found: were they to overlap, one would take the other's flags and statistics for it."""
    model = mlp(5, 7, 6, 3, norm=True).double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def analyze() -> None:
        assert gspace.analyze(model, VECTORS[0]).H == 13

    with beside(analyze) as one, beside(analyze) as two:
        for _ in range(10):
            analyze()
    assert not one + two
    assert not any(m.training for m in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_several_threads_train() -> None:
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
