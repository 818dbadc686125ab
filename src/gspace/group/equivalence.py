"""Are two networks one point of weight space modulo 𝒢? (Theorem 3.3 of the paper, by constructing the scales.)"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, analyzed, magnitude
from gspace.devices import on_cpu
from gspace.group.scaling import Scales, balanced, factors
from gspace.optim.arguments import number, require_values
from gspace.sharding import weights_of


@dataclass(frozen=True)
class Equivalence:
    """True if `scales` carry model a to model b; otherwise `reason` names the weight that refutes it."""

    equivalent: bool
    reason: str
    scales: Scales | None = None

    def __bool__(self) -> bool:
        return self.equivalent


def are_equivalent(
    model_a: nn.Module,
    model_b: nn.Module,
    *,
    rtol: float | None = None,
    absorbed: bool = False,
    analysis: Analysis | None = None,
    **options: Any,
) -> Equivalence:
    """Whether positive scales carry `model_a` to `model_b`. Permutations of units are not considered.

    The scale of a unit follows from any non-zero weight that joins it to a unit whose scale is known, starting from
    ground, where it is 1; the largest such weight is used. All weights are then compared.

    Args:
        rtol: Largest difference of a weight, relative to the largest of its layer, both in the balanced representative
            of `model_b`: steps that are the same but for rounding leave weights near 0 with no digit in common. By
            default 1e3 roundings of its dtype, 10 if it has 16 bits.
        absorbed: Also allow scaling of the rows before BatchNorm, which is exact only as ε → 0.

    >>> import copy, gspace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> found = gspace.are_equivalent(net, gspace.rescale_(copy.deepcopy(net), [2.0, 4.0, 8.0]))
    >>> bool(found), found.scales.values.round().tolist()
    (True, [2.0, 4.0, 8.0])
    """
    found = analyzed(model_a, analysis, options)
    for model in (model_a, model_b):
        require_values(model)
    if rtol is not None and not 0 <= number(rtol) < math.inf:
        raise ValueError(f"rtol must be finite and not negative, got {rtol!r}")
    a, b = ({**weights_of(m), **dict(m.named_buffers())} for m in (model_a, model_b))
    if a.keys() != b.keys():
        return Equivalence(False, f"only one of the models has {sorted(a.keys() ^ b.keys())[0]!r}")
    for name in a:
        shapes = tuple(a[name].shape), tuple(b[name].shape)
        if a[name].is_complex() != b[name].is_complex():
            return Equivalence(False, f"{name} is complex in one of the models")
        if shapes[0] != shapes[1]:
            return Equivalence(False, f"{name} has shape {shapes[0]} in one and {shapes[1]} in the other")
    units = _solve(found, a, b)
    if not absorbed:
        units[1 + found.H :] = 0
    c, balance = found.log_scales(units).exp(), _balance(found, b)
    edges = {e.name: e for e in found.edges}
    powers = {s.name: c[s.unit] ** s.power for s in found.statistics}
    for name in a:
        x, y = _comparable(a[name]), _comparable(b[name])
        size = y.abs()
        if name in edges:
            e = edges[name]
            x, y = e.view(x) + e.shift, e.view(y) + e.shift
            x, share = x * factors(e, c, x), factors(e, balance, y)
            size = (y * share).abs().amax() / share if y.numel() else y.abs()
        elif name in powers:
            x = x * powers[name]
        tolerance, least = _tolerance(b[name].dtype) if rtol is None else (rtol, 0.0)
        wrong = x != y  # NaN agrees with nothing, and inf with itself alone
        if tolerance:
            wrong &= ~((x - y).isfinite() & ((x - y).abs() <= tolerance * size + least))
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            return Equivalence(False, _difference(name, at, x[tuple(at)], y[tuple(at)]))
    return Equivalence(True, "every weight agrees", Scales(units[1:].exp()))


def _comparable(x: Tensor) -> Tensor:
    """On the CPU, dense, in a dtype that has differences: float64, int64 or complex."""
    x = x.detach().cpu()
    x = x.dequantize() if x.is_quantized else x
    x = x if x.layout == torch.strided else x.to_dense()
    return x if x.is_complex() else x.double() if x.is_floating_point() else x.to(torch.int64)


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """1e3 roundings, 10 where one is large already (16 bits and less), and the smallest number there is."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    limits = torch.finfo(dtype)
    return limits.eps * (1e3 if limits.eps < 1e-4 else 10), limits.tiny * limits.eps


def _difference(name: str, at: list[int], x: Tensor, y: Tensor) -> str:
    """In as few digits as show it."""
    values = x.item(), y.item()
    digits = next((d for d in range(6, 17) if f"{values[0]:.{d}g}" != f"{values[1]:.{d}g}"), 17)
    would_be, found = (f"{value:.{digits}g}" for value in values)
    signs = "signs differ: " if not x.is_complex() and x.sign() != y.sign() else ""
    return f"{signs}{name} {at} would be {would_be} but is {found}"


def _balance(found: Analysis, weights: dict[str, Tensor]) -> Tensor:
    """Scales of the balanced representative, for all ids; 1 where there is none, because weights are not finite."""
    sizes = {e.name: magnitude(weights[e.name].detach()).cpu() for e in found.edges}
    finite = all(bool(w.isfinite().all()) for w in sizes.values())
    one = torch.zeros(1 + found.H + found.H_absorbed, dtype=torch.float64, device="cpu")
    return found.log_scales(balanced(found, sizes) if finite else one).exp()


@on_cpu
def _solve(found: Analysis, a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    """log c of ground and units, x[head] − x[tail] = log|w_b/w_a|, spread from ground; 0 where no weight reaches."""
    n = 1 + found.H + found.H_absorbed
    log = found.log_scales(torch.zeros(n, dtype=torch.float64))
    known = torch.zeros(len(log), dtype=torch.bool)
    known[0] = True
    links = []
    for e in (e for e in found.edges if e.head.numel() and e.tail.numel()):
        wa, wb = (magnitude(e.view(x[e.name].detach()).cpu() + e.shift) for x in (a, b))
        size, tap = (wa * (wb > 0)).reshape(*wa.shape[:3], -1).max(3)
        ratio = (wb / wa).reshape(*wa.shape[:3], -1).gather(3, tap[..., None])[..., 0].log()
        links += [(e.tail, e.head, size, ratio), (e.head, e.tail, size.mT, -ratio.mT)]
    while True:
        before = int(known.sum())
        for source, target, size, ratio in links:
            best, at = (size * known[source][:, None, :]).max(2)
            value = log[source].gather(1, at) + ratio.gather(2, at[..., None])[..., 0]
            new = (best > 0) & ~known[target]
            log[target[new]] = value[new]
            known[target[new]] = True
        for node, form in found.forms.items():
            missing = [(u, float(c)) for u, c in form if not known[u]]
            sum_of_known = sum(float(c) * log[u] for u, c in form if known[u])
            if known[node] and len(missing) == 1:
                ((u, c),) = missing
                log[u] = (log[node] - sum_of_known) / c
                known[u] = True
            elif not known[node] and not missing:
                log[node] = sum_of_known
                known[node] = True
        if int(known.sum()) == before:
            if bool(known[:n].all()):
                return log[:n]
            known[int((~known[:n]).nonzero()[0])] = True  # a part that no weight joins to ground: its scale is free
