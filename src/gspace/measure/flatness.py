"""PSI-flatness: how much the loss changes when the values of the basis paths are perturbed.

Flatness in weight space can be made anything by rescaling a network (Dinh et al. 2017). Path values do not change under
rescaling, so neither does this. The perturbation Δ of v is bounded entry by entry,

    |Δ| ≤ radius ("absolute")   or   |Δ| ≤ radius·|v| ("relative"),

drawn at random, or the worst one to first order, Δ = bound · sign(∂ℓ/∂v).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gspace.optim.arguments import require_one_of
from gspace.optim.coordinates import Coordinates, basis_values, coordinates, displaced, unflatten


@dataclass(frozen=True)
class Flatness:
    """Loss changes under perturbations of v.

    Attributes:
        loss: Without one.
        random: Change for each random perturbation, `(samples,)`.
        adversarial: Change for the worst perturbation to first order.
        radius: Bound of the perturbations.
    """

    loss: float
    random: Tensor
    adversarial: float
    radius: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}; within {self.radius:g} of v: random {float(self.random.mean()):+.3g} "
            f"(worst of {len(self.random)}: {float(self.random.max()):+.3g}), adversarial {self.adversarial:+.3g}"
        )


def psi_flatness(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    radius: float = 0.05,
    bound: Literal["absolute", "relative"] = "absolute",
    samples: int = 8,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    generator: torch.Generator | None = None,
    at: Coordinates | None = None,
    **options: Any,
) -> Flatness:
    """Loss changes of `model` on one batch under perturbations of its path values. The model is left as it is.

    Args:
        radius: Bound of the perturbation; below 1 if relative, below every skeleton path's |v| if absolute.
        bound: "absolute" or "relative".
        samples: Number of random perturbations, uniform within the bound.
        loss: Of (outputs, targets); outputs in the model's current mode.
        at: Coordinates; otherwise `options` are for `coordinates` (exact view, balanced reference).

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = psi_flatness(net, torch.randn(16, 4), torch.randint(3, (16,)), radius=0.01)
    >>> found.adversarial > 0
    True
    """
    require_one_of("bound", bound, ("absolute", "relative"))
    at = at if at is not None else coordinates(model, **{"reference": "balanced", "view": "exact", **options})
    weights = {name: p.detach() for name, p in model.named_parameters()}
    values = basis_values(at, weights)
    v = values.vector()
    limit = radius * (torch.ones_like(v) if bound == "absolute" else v.abs())
    if not radius > 0 or bool((limit[len(v) - len(values.roots) :] >= values.roots.abs()).any()):
        raise ValueError(f"radius must be positive and keep every skeleton path from 0, got {radius} ({bound})")

    def loss_at(change: Tensor) -> Tensor:
        # Copies of the buffers: a BatchNorm in training mode would update its statistics.
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        state = {**displaced(at, weights, unflatten(change, values)), **buffers}
        with torch.random.fork_rng():
            torch.manual_seed(0)  # dropout draws one mask for all: the change is that of v alone
            return loss(torch.func.functional_call(model, state, (inputs,)), targets)

    zero = torch.zeros_like(v, requires_grad=True)
    base = loss_at(zero)
    (path_grad,) = torch.autograd.grad(base, zero)
    with torch.no_grad():
        start = base.detach()
        like: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        draws = [2 * torch.rand(v.shape, **like) - 1 for _ in range(samples)]
        random = torch.stack([loss_at(limit * draw.to(limit)) - start for draw in draws])
        adversarial = float(loss_at(limit * path_grad.sign()) - start)
    return Flatness(float(start), random.double().cpu(), adversarial, radius)
