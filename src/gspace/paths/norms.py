"""Norms of a network that no rescaling changes: over all paths, and over basis paths; and the penalty made of them.

    path norm             φ_p = (Σ_paths |v|^p)^(1/p)                          (Neyshabur et al. 2015)
    basis-path norm       φ_∞ = max(|v_e|, |log |v_r||)                         (Zheng et al. 2019)

v_e runs over the basis paths with a non-skeleton weight, v_r over the trained skeleton paths. Those divide other paths,
so they must be neither large nor small. All are differentiable.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gspace.analysis import Inputs
from gspace.optim.arguments import number
from gspace.optim.coordinates import Coordinates, PathValues, basis_values, coordinates
from gspace.optim.reference import Reference
from gspace.paths.pathsum import PathGraph, path_graph

Mode = Literal["released", "sup"]
LARGEST = 16  # p: beyond it, powers of the weights of one layer lie further apart than numbers reach


@dataclass(frozen=True)
class PathNorm:
    """A path norm, known by its logarithm: at 250 layers the value itself leaves the range of float32.

    Attributes:
        log: log φ_p, a scalar; differentiable.
        p: The exponent.
    """

    log: Tensor
    p: float

    @property
    def value(self) -> Tensor:
        """φ_p, infinite where it does not fit the dtype."""
        return self.log.exp()

    def __float__(self) -> float:
        return float(self.value.detach())


def path_norm(
    model: nn.Module, p: float = 2, *, example_input: Inputs | None = None, graph: PathGraph | None = None
) -> PathNorm:
    """φ_p of `model` in evaluation mode, by one pass of one sample (what is a path: `analysis/pathrules.py`).

    Args:
        model: Any module whose operations are positively homogeneous.
        p: From 1 to 16: larger powers of the weights of one network do not fit the range of numbers.
        example_input: A batch the model accepts; the norm is that of a sample of its size. Without one, inputs are
            guessed as in `analyze`.
        graph: The result of `path_graph(model)`, to save the run when called at every step.

    Raises:
        PathError: An operation has no path sum (ReLU6, softmax, a product of activations …).

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> with torch.no_grad():
    ...     _ = [w.fill_(-3.0) for w in net.parameters()]
    >>> norm = path_norm(net, p=1)  # four paths of value 9
    >>> round(float(norm), 4)
    36.0
    """
    if not 1 <= number(p) <= LARGEST:
        raise ValueError(f"p must be at least 1 and at most {LARGEST}, got {p!r}")
    if graph is not None and not isinstance(graph, PathGraph):
        raise TypeError(f"graph is what path_graph returns, got {type(graph).__name__}")
    total, exponent = (graph if graph is not None else path_graph(model, example_input)).sum(p)
    log = total.log() if exponent is None else total.log() + exponent * math.log(2)
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in model.parameters())
    return PathNorm((log / p).to(torch.float64 if wide else torch.float32), p)


def _norm_of(values: PathValues, order: float) -> Tensor:
    """The norm of order s of (v_e, log|v_r|); scaled by its largest entry, so that no power overflows."""
    entries = torch.cat([*(v.reshape(-1).double() for v in values.edges.values()), values.roots.abs().log()]).abs()
    largest = entries.amax()
    if order == math.inf or float(largest.detach()) == 0:
        return largest
    scale = largest.detach()
    return scale * (entries / scale).pow(order).sum().pow(1 / order)


def basis_path_norm(
    model: nn.Module,
    order: float = math.inf,
    *,
    at: Coordinates | None = None,
    reference: Reference | None = None,
    **options: Any,
) -> Tensor:
    """φ_s, the norm of order s of (v_e, log|v_r|) over the basis paths; s = ∞ is the basis-path norm.

    No rescaling changes it, but for units whose skeleton weights are all 0, as behind a zero-initialised layer: their
    weights have no path value and count as they are.

    Args:
        order: s; every finite one is a smooth bound of the maximum from above.
        at: Coordinates of an earlier state of the model; otherwise `reference` and `options` are for `coordinates`,
            in the exact view, which no rescaling changes with BatchNorm either.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> bool(basis_path_norm(net) > 0)
    True
    """
    if not number(order) >= 1:
        raise ValueError(f"order must be at least 1, got {order!r}")
    at = at if at is not None else coordinates(model, reference=reference, **{"view": "exact", **options})
    return _norm_of(basis_values(at, dict(model.named_parameters())), order)


class BasisPathPenalty:
    """A term for the loss: `loss = criterion(model(x), y) + penalty(model)`, with any optimizer.

    "released": ½λ Σ v_e² over the basis paths with a non-skeleton weight, as in the authors' code. With GSGD it takes
    the step that `weight_decay=λ` takes: its gradient in v is λ·v_e, and 0 for skeleton paths. (Not before a BatchNorm:
    its rule multiplies gradients by row norms, those of the penalty too. And weights that lie on no path, which
    `weight_decay` shrinks, have no part in it.)

    "sup": ½λ φ_s², the smooth bound of order s of the basis-path norm (`order`, 8 by default). It also holds the
    trained skeleton paths near ±1.

    The coordinates are fixed at the first call with a model, as GSGD fixes them when it is made: call it, or build the
    penalty's coordinates with `at=`, before training.

    Args:
        weight: λ.
        mode: "released" or "sup".
        order: s of "sup".
        at: Coordinates to use.
        reference, options: For `coordinates`, otherwise.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> penalty = BasisPathPenalty(1e-4)
    >>> loss = net(torch.ones(1, 2)).sum() + penalty(net)
    """

    def __init__(
        self,
        weight: float,
        mode: Mode = "released",
        *,
        order: float = 8,
        at: Coordinates | None = None,
        reference: Reference | None = None,
        **options: Any,
    ) -> None:
        if mode not in _PENALTIES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _PENALTIES))}, got {mode!r}")
        if isinstance(weight, nn.Module):
            raise TypeError("the first argument is the weight λ; the model is given when the penalty is called")
        if not number(weight) >= 0 or not 1 < number(order) < math.inf:
            raise ValueError(f"weight must not be negative and order lie between 1 and ∞, got {weight!r} and {order!r}")
        self.weight, self.mode, self.order = weight, mode, order
        self._at, self._options = at, {"reference": reference, **options}
        self._coordinates: WeakKeyDictionary[nn.Module, Coordinates] = WeakKeyDictionary()

    def coordinates(self, model: nn.Module) -> Coordinates:
        """The coordinates used for `model`."""
        if self._at is not None:
            return self._at
        if model not in self._coordinates:
            self._coordinates[model] = coordinates(model, **self._options)
        return self._coordinates[model]

    def __call__(self, model: nn.Module) -> Tensor:
        return self.of(basis_values(self.coordinates(model), dict(model.named_parameters())))

    def of(self, values: PathValues) -> Tensor:
        """The penalty as a function of path values."""
        return self.weight / 2 * _PENALTIES[self.mode](values, self.order)


_PENALTIES: Mapping[str, Callable[[PathValues, float], Tensor]] = {
    "released": lambda values, order: torch.stack([v.square().sum() for v in values.edges.values()]).sum(),
    "sup": lambda values, order: _norm_of(values, order).square(),
}
