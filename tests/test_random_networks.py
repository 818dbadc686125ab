"""Random programs: whatever the grammar draws, the units that `analyze` finds can be rescaled by e^N(0, 1).

`check` is what `benchmarks/programs.py` records for 5,000 of them; here they are 300.
"""

import copy
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

import gspace
from grammar import Program, program
from invariance import randomize_, set_eps_
from moved import change, moved, run

PROGRAMS, PART = 300, 30
drawn = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
)


def prepared(drawn: Program, eps: float = 1e-5) -> torch.nn.Module:
    """In float64 with random weights and running statistics of two batches."""
    model = set_eps_(randomize_(drawn.model, 0).double(), eps).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(1) if buffer.is_floating_point() else buffer.zero_()
        for seed in (10, 11):
            model(drawn.inputs(seed))
    return model


def noise(model: torch.nn.Module, x: torch.Tensor) -> float:
    """How far rounding errors of the weights move the output: a norm of a constant channel makes values of them."""
    near, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in near.parameters():
            p.mul_(1 + 1e-15 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return max(change(run(model, x, mode), run(near, x, mode)) for mode in (True, False))


def check(drawn: Program) -> tuple[gspace.Analysis, bool]:
    """Analyzes one batch and rescales on another; what norms absorb too, at ε = 1e-30, unless that is all noise."""
    found = gspace.analyze(prepared(drawn), drawn.inputs(0), residual=drawn.residual)
    assert not found.unseen
    x = drawn.inputs(1)
    assert max(moved(prepared(drawn), x, found).values()) <= 1e-9
    noisy = False
    if found.H_absorbed:
        model = prepared(drawn, 1e-30)
        noisy = noise(model, x) >= 1e-12
        assert noisy or max(moved(model, x, found, absorbed=True).values()) <= 1e-9
    return found, noisy


@pytest.mark.parametrize("start", range(0, PROGRAMS, PART))
def test_random_programs(start: int) -> None:
    """`Random(seed)` draws what `benchmarks/programs.py` records."""
    units = [check(program(Random(seed)))[0].H for seed in range(start, start + PART)]
    assert sum(map(bool, units)) > PART / 2  # the grammar does not leave most programs without a unit


@drawn
@given(st.randoms(use_true_random=False))
def test_programs_that_are_shrunk_where_they_fail(rng: Random) -> None:
    made = program(rng)
    note(f"residual={made.residual!r} {made.model}")
    found, _ = check(made)
    event(f"units: {'some' if found.H else 'none'}, absorbed: {'some' if found.H_absorbed else 'none'}")
