"""H is right, not merely safe: the Jacobian of the outputs with respect to all weights has rank m − H − H_absorbed.

Every scale is a direction in weight space along which no output moves, so the rank is at most that. It is that where
the network has no other such direction; a case that has some says which and how many. BatchNorm stands in training
mode at ε = 1e-30, where the rows in front of it are free as well.
"""

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, slow_above
from invariance import build, draw_inputs

POINTS = 4
SMALL = [case for case in CASES if case.lost is not None]


def place_kinks_(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Biases such that every channel is negative for half of the data: a dead unit would cost its weights."""

    def centre(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not isinstance(module.bias, Tensor):
            return None
        channels = output.movedim(-1 if isinstance(module, nn.Linear) else 1, -1)
        median = channels.flatten(0, -2).median(0).values
        module.bias -= median
        return output - (median if isinstance(module, nn.Linear) else median.view(-1, *[1] * (output.dim() - 2)))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)]
    handles = [layer.register_forward_hook(centre) for layer in layers]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()


def jacobian(model: nn.Module, case: Case, rows: int) -> Tensor:
    """Derivatives of at least `rows` outputs over many batches, `(outputs, m)`, columns of length 1."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    blocks: list[Tensor] = []
    while sum(len(block) for block in blocks) < rows:
        output = model(*draw_inputs(case, len(blocks), torch.float64)).flatten()
        grads = torch.autograd.grad(output, parameters, torch.eye(len(output)).to(output), is_grads_batched=True)
        blocks.append(torch.cat([grad.flatten(1) for grad in grads], 1))
    J = torch.cat(blocks)
    length = J.norm(dim=0)
    # A column of rounding errors (a bias that softmax or BatchNorm takes out) must not grow to length 1.
    return torch.where(length > 1e-10 * length.max(), J / length, 0)


def numerical_rank(case: Case, seed: int) -> int:
    """Rank at one random point in weight space.

    Five rows for every weight: a narrow last layer makes many of them dependent. Null directions come out near 1e-16 of
    the largest singular value, true ones above 1e-7: the cut lies between.
    """
    model = build(case, eps=1e-30, seed=seed).train()
    place_kinks_(model, draw_inputs(case, 1000, torch.float64, batch=64))
    singular = torch.linalg.svdvals(jacobian(model, case, 5 * (case.dim + case.H)))
    return int((singular > 1e-11 * singular[0]).sum())


@pytest.mark.parametrize("case", slow_above(500, SMALL))
def test_rank_of_the_jacobian_is_the_dimension(case: Case) -> None:
    """The rank is that of a point in general position: the best of a few, since a unit may be dead at one of them."""
    assert case.lost is not None
    expected = case.dim - case.H_absorbed - case.lost
    best = 0
    for seed in range(POINTS):
        best = max(best, numerical_rank(case, seed))
        if best >= expected:
            break
    assert best == expected, (
        f"rank {best}, not m − H − H_absorbed − {case.lost} = {expected} ({case.why or 'all scales'})"
    )
