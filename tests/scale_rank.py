"""How many scale symmetries a network has, from derivatives alone.

A scale symmetry multiplies each weight by its own e^(t·x_i) and moves no output, at any weights w: J(w)·diag(w)·x = 0
for all w. So their number is m minus the rank of the stacked J(w_k)·diag(w_k) over many random w_k. A single Jacobian
would count directions that depend on w too: GL of attention and of low rank, shifts in front of a norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gspace

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


def stacked(draw: Callable[[int], tuple[nn.Module, Tensor]], most: int) -> Tensor:
    """J(w)·diag(w) at many random weights, `(outputs, m)`, columns of length 1; 0 for weights that move no output.

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
    J = torch.cat(blocks)
    length = J.norm(dim=0)
    # A column of rounding errors (a bias that a softmax takes out) must not grow to length 1.
    return torch.where(length > 1e-10 * length.max(), J / length, 0)


def rank(J: Tensor) -> int:
    singular = torch.linalg.svdvals(J)
    return int((singular > 1e-9 * singular[0]).sum()) if len(singular) else 0


def scale_symmetries(draw: Callable[[int], tuple[nn.Module, Tensor]], most: int = 400) -> int:
    """m minus the rank of the stacked derivatives."""
    J = stacked(draw, most)
    return J.shape[1] - rank(J)


def directions(model: nn.Module, analysis: gspace.Analysis) -> Tensor:
    """What each unit does to the logarithms of all trainable weights, `(m, H + H_absorbed)`."""
    units = analysis.H + analysis.H_absorbed
    columns = []
    for unit in torch.eye(units, dtype=torch.float64):
        log = analysis.log_scales(torch.cat([torch.zeros(1, dtype=torch.float64), unit]))
        found = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for e in analysis.edges:
            view = e.view(found[e.name])
            change = log[e.head][:, :, None] - log[e.tail][:, None]
            view.copy_(change.reshape(*change.shape, *[1] * (view.dim() - 3)).expand_as(view))
        columns.append(torch.cat([t.flatten() for t in found.values()]))
    return torch.stack(columns, 1) if columns else torch.zeros(0, 0)


def missed(draw: Callable[[int], tuple[nn.Module, Tensor]], analysis: gspace.Analysis, most: int = 400) -> int:
    """How many scale symmetries an analysis leaves out, among the weights that move an output at all."""
    J = stacked(draw, most)
    live = J.any(0)
    found = directions(draw(0)[0], analysis)
    return int(live.sum()) - rank(J[:, live]) - (rank(found[live]) if found.numel() else 0)
