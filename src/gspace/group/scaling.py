"""The positive scaling group 𝒢 (Sec. 3.1 of the paper): g_c multiplies weight w by c[head]/c[tail].

    v · relu(u · x) = (v/c) · relu(c · u · x)   for every hidden unit and every c > 0.

Everything acts in place under `no_grad` and keeps Parameter objects, so optimizer state stays valid; biases,
BatchNorm's γ, β and running statistics are scaled along. Units absorbed by a BatchNorm (rows before it) are left at 1
unless asked for: scaling them is exact only as ε → 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, analyzed
from gspace.devices import on_cpu
from gspace.group.balance import Report, balanced_log_scales
from gspace.optim.arguments import number, require_seen, require_values
from gspace.sharding import edges_here, local, require, reshard, shared, weights_of


@dataclass(frozen=True, eq=False)
class Scales:
    """An element of 𝒢: one positive factor per unit, exact units first, then absorbed ones.

    >>> a, b = Scales(torch.tensor([2.0, 4.0])), Scales(torch.tensor([0.5, 3.0]))
    >>> (a @ b).values
    tensor([ 1., 12.], dtype=torch.float64)
    >>> bool(((a @ a.inverse()).values == Scales.identity(2).values).all())
    True
    """

    values: Tensor

    def __post_init__(self) -> None:
        device = self.values.device if isinstance(self.values, Tensor) else "cpu"
        try:
            given = torch.as_tensor(self.values, device=device).detach()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"scales must be real numbers, got {type(self.values).__name__}") from None
        if given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"scales must be real numbers, got {given.dtype}")
        values = given.double()
        if values.dim() != 1:
            raise ValueError(f"scales must be one value per unit, got a tensor of shape {tuple(values.shape)}")
        bad = ~(values.isfinite() & (values > 0))
        if bool(bad.any()):
            u = int(bad.nonzero()[0])
            raise ValueError(f"scales must be positive and finite; that of unit {u + 1} is {float(values[u])}")
        object.__setattr__(self, "values", values)

    def __len__(self) -> int:
        return len(self.values)

    def __matmul__(self, other: "Scales") -> "Scales":
        """g_a ∘ g_b = g_(a·b)."""
        if not isinstance(other, Scales):
            return NotImplemented
        if len(self) != len(other):
            raise ValueError(f"cannot compose scales of {len(self)} and of {len(other)} units")
        return Scales(self.values * other.values)

    def inverse(self) -> "Scales":
        """What undoes these."""
        return Scales(1 / self.values)

    def log(self) -> Tensor:
        """Logarithms: products of scales are their sums."""
        return self.values.log()

    @staticmethod
    def identity(units: int) -> "Scales":
        """Factors of 1."""
        return Scales(torch.ones(units, dtype=torch.float64, device="cpu"))


def random_scales(
    model: nn.Module,
    generator: torch.Generator | None = None,
    *,
    std: float = 1.0,
    absorbed: bool = False,
    analysis: Analysis | None = None,
    **options: Any,
) -> Scales:
    """Scales e^N(0, std²), independent for every unit; absorbed units stay at 1 unless `absorbed`.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> len(random_scales(net, torch.Generator().manual_seed(0)))
    3
    """
    found = analyzed(model, analysis, options)
    if not 0 <= number(std) < math.inf:
        raise ValueError(f"std must be finite and not negative, got {std!r}")
    log = std * torch.randn(found.H + found.H_absorbed, generator=generator, dtype=torch.float64, device="cpu")
    if not absorbed:
        log[found.H :] = 0
    return Scales(shared(dict(model.named_parameters()), log).exp())


def rescale_(
    model: nn.Module, scales: Scales | Tensor, *, analysis: Analysis | None = None, **options: Any
) -> nn.Module:
    """Applies g_c to `model` in place; its function does not change.

    Args:
        model: The model, or any with parameters of the same names.
        scales: H factors, or H + H_absorbed to scale the rows before BatchNorm too.
        analysis: The result of `analyze(model)`, to save running it again.
        options: `example_input`, `residual`, `pin` for `analyze`.

    Raises:
        ValueError: Scales that are not positive and finite, of the wrong number, or that would overflow or flush a
            weight to zero in its dtype. Nothing has been touched then.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> x = torch.randn(4, 2)
    >>> before = net(x)
    >>> torch.allclose(rescale_(net, [2.0, 0.5, 3.0])(x), before, atol=1e-5)
    True
    """
    scales = scales if isinstance(scales, Scales) else Scales(scales)
    require_values(model)
    found = analyzed(model, analysis, options)
    if len(scales) not in (found.H, found.H + found.H_absorbed):
        also = f" or {found.H + found.H_absorbed} (with absorbed rows)" if found.H_absorbed else ""
        raise ValueError(f"the model has {found.H}{also} units to scale, got {len(scales)} scales")
    log = torch.zeros(1 + found.H + found.H_absorbed, dtype=torch.float64, device="cpu")
    log[1 : 1 + len(scales)] = scales.log()
    parameters = dict(model.named_parameters())
    same = bool((shared(parameters, log) == log).all())
    require(parameters, "" if same else "these are other scales than those of the first rank")
    _apply(model, found, log)
    return model


def _apply(model: nn.Module, analysis: Analysis, units: Tensor) -> None:
    """Multiplies by e^(x[head] − x[tail]) what each unit's log-scale x says; a gain 1 + w is multiplied as a whole."""
    require_seen(analysis)
    parameters, buffers = dict(reshard(model).named_parameters()), dict(model.named_buffers())
    changes: list[tuple[str, Tensor, Tensor, float]] = []
    c = analysis.log_scales(units).exp()
    for e in analysis.edges:
        if bool((c[e.head] != 1).any()) or bool((c[e.tail] != 1).any()):
            here = edges_here(e, parameters[e.name])
            view = here.view(local(parameters[e.name].detach()))
            changes.append((e.name, view, factors(here, c, view), e.shift))
    for s in analysis.statistics:
        factor = c[s.unit] ** s.power
        if bool((factor != 1).any()):
            changes.append((s.name, buffers[s.name], factor.to(buffers[s.name].device), 0.0))
    require(parameters, next(filter(None, (_doubt(*change) for change in changes)), ""))
    with torch.no_grad():
        for _, view, factor, shift in changes:
            view.copy_((view + shift) * factor - shift if shift else view * factor)


def factors(e: Edges, c: Tensor, view: Tensor) -> Tensor:
    """What the scales c of all ids make of the view of a parameter, to broadcast with it."""
    factor = c[e.head][:, :, None] / c[e.tail][:, None, :]
    return factor.reshape(*factor.shape, *[1] * (view.dim() - 3)).to(view.device)


def _doubt(name: str, view: Tensor, factor: Tensor, shift: float) -> str:
    """What speaks against these factors, or nothing."""
    limits, before = torch.finfo(view.dtype), (view + shift).abs()
    after = before * factor
    low, high = after.aminmax() if after.numel() else (limits.tiny, limits.max)
    if low >= limits.tiny and high <= limits.max:  # the usual case
        return ""
    if not bool(before.isfinite().all()):
        return f"{name} holds values that are not finite, which no scale changes"
    lost = (after < limits.tiny * limits.eps) & (before > 0)
    # Single weights may lose digits below the normal numbers, but not all of a row.
    faint = (_row_sizes(after) < limits.tiny) & (_row_sizes(before) >= limits.tiny)
    if bool((after <= limits.max).all()) and not bool(lost.any()) and not bool(faint.any()):
        return ""
    low, high = after[before > 0].aminmax()
    return (
        f"these scales take {name} out of the range of {view.dtype} (it would be {float(low):.3g} to {float(high):.3g})"
    )


def _row_sizes(view: Tensor) -> Tensor:
    """Largest |w| of each row of a parameter's view that has several entries."""
    return view.flatten(2).amax(2) if view.numel() and view.dim() > 2 and view[0, 0].numel() > 1 else view.new_empty(0)


def balance_(
    model: nn.Module,
    *,
    absorbed: bool = False,
    progress: Report | None = None,
    analysis: Analysis | None = None,
    **options: Any,
) -> Scales:
    """Moves `model` to the representative of its orbit with ‖incoming‖ = ‖outgoing‖ at every unit; returns the scales.

    It is unique where every unit lies on a path of non-zero weights from ground to ground; other units keep their
    scale (`gspace.group.balance`). The function does not change.

    Large models take seconds. `progress(iteration, error)` is called in every iteration of the solver, before a weight
    is changed; it stops behind an error below 1e-13, or 1e-6 if no weight is float64.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data, net[2].weight.data = torch.tensor([[3.0, 4.0]]), torch.tensor([[20.0]])
    >>> _ = balance_(net)
    >>> net[0].weight.norm().item(), net[2].weight.norm().item()  # 5 and 20 before
    (10.0, 10.0)
    >>> _ = balance_(net, progress=lambda iteration, error: print(iteration, error))
    0 0.0
    """
    require_values(model)
    found = analyzed(model, analysis, options)
    log = balanced(found, weights_of(model), absorbed, progress)
    _apply(model, found, log)
    return Scales(log[1:].exp())


@on_cpu
def balanced(
    found: Analysis, weights: Mapping[str, Tensor], absorbed: bool = True, progress: Report | None = None
) -> Tensor:
    """Log-scales of ground and units that balance these weights; absorbed units stay at 0 unless `absorbed`."""
    n = 1 + found.H + found.H_absorbed
    fixed = torch.arange(n) > found.H
    if absorbed:  # but for rows that no weight reads: F falls for ever with their scale
        of_forms = torch.tensor([0, *(u for form in found.forms.values() for u, _ in form)])
        read = torch.cat([of_forms, *(e.tail.reshape(-1) for e in found.edges)])
        fixed[read[read < n]] = False
    return balanced_log_scales(found.edges, weights, n, fixed, found.forms, progress).cpu()
