"""How many scale symmetries a network has, from derivatives alone.

A scale symmetry multiplies each weight by its own e^(t·x_i) and moves no output, at any weights w: J(w)·diag(w)·x = 0
for all w. So their number is m minus the rank of the stacked J(w_k)·diag(w_k) over many random w_k. A single Jacobian
would count directions that depend on w too: GL of attention and of low rank, shifts in front of a norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

POINTS = 24  # at least: a unit may be dead at several of them
OFFSET = "offset"  # a gain written offset + w is scaled as a whole


def factors(model: nn.Module) -> Tensor:
    """What e^x multiplies: w, or offset + w, for all trainable weights in order."""
    owner = {id(p): getattr(m, OFFSET, 0) for m in model.modules() for p in m.parameters(recurse=False)}
    return torch.cat([(p + owner[id(p)]).detach().flatten() for p in model.parameters() if p.requires_grad])


def rows(model: nn.Module, output: Tensor) -> Tensor:
    """J(w)·diag(w) of one batch, `(outputs, m)`, of length 1."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(y, parameters, retain_graph=True, materialize_grads=True) for y in output]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients]) * factors(model)
    return J / J.norm()


def scale_symmetries(draw: Callable[[int], tuple[nn.Module, Tensor]], most: int = 400) -> int:
    """m minus the rank of the stacked derivatives.

    Args:
        draw: For every seed a model with other weights and its outputs, a vector, on another batch.
        most: Refuses models with more weights.
    """
    blocks: list[Tensor] = []
    while len(blocks) < POINTS or sum(len(block) for block in blocks) < 3 * blocks[0].shape[1]:
        model, output = draw(len(blocks))
        blocks.append(rows(model, output[torch.randperm(len(output))[:48]]))
        if (m := blocks[0].shape[1]) > most:
            raise ValueError(f"{m} weights are too many for dense derivatives")
    stacked = torch.cat(blocks)
    length = stacked.norm(dim=0)
    # A column of rounding errors (a bias that a softmax takes out) must not grow to length 1.
    stacked = torch.where(length > 1e-10 * length.max(), stacked / length, 0)
    singular = torch.linalg.svdvals(stacked)
    return m - int((singular > 1e-9 * singular[0]).sum())
