"""H is right, not merely safe: the networks of the zoo have as many scale symmetries as `analyze` finds.

The stacked rank of `scale_rank` at ε = 1e-30, in training mode, where what a norm absorbs is free as well. Sums are
tied: to pin them is a choice.
"""

import pytest
import torch
from torch import Tensor, nn

import gspace
from cases import CASES, Case, slow_above
from invariance import build, draw_inputs
from scale_rank import missed

LARGEST = 1100
SMALL = [case for case in CASES if case.dim + case.H <= LARGEST and f"{case.name}-tie" not in {c.name for c in CASES}]


@pytest.mark.parametrize("case", slow_above(170, SMALL))
def test_no_scale_of_a_network_is_missing(case: Case) -> None:
    def outputs(seed: int) -> tuple[nn.Module, Tensor]:
        model = build(case, eps=1e-30, seed=seed).train()
        return model, model(*draw_inputs(case, seed, torch.float64)).flatten()

    found = gspace.analyze(case.build(), draw_inputs(case, 0, torch.float32, batch=2))
    assert missed(outputs, found, LARGEST) == 0
