"""Are two networks one point of weight space modulo 𝒢? (Theorem 3.3 of the paper, by constructing the scales.)"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, magnitude
from gspace.devices import on_cpu
from gspace.graph import analyzed
from gspace.scaling import Scales


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
        rtol: Largest relative difference of a weight; by default 1e3 roundings of its dtype, 10 if it has 16 bits.
        absorbed: Also allow scaling of the rows before BatchNorm, which is exact only as ε → 0.
    """
    found = analyzed(model_a, analysis, options)
    a, b = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model_a, model_b))
    if a.keys() != b.keys():
        return Equivalence(False, f"only one of the models has {sorted(a.keys() ^ b.keys())[0]!r}")
    for name in a:
        if a[name].is_complex() != b[name].is_complex():
            return Equivalence(False, f"{name} is complex in one of the models")
        if a[name].shape != b[name].shape:
            return Equivalence(
                False, f"{name} has shape {tuple(a[name].shape)} in one and {tuple(b[name].shape)} in the other"
            )
    for e in found.edges:
        wa, wb = (e.view(x[e.name].detach()).cpu() for x in (a, b))
        if not wa.is_complex() and bool((wa.sign() != wb.sign()).any()):  # a complex weight has no scale: pinned
            at = (wa.sign() != wb.sign()).nonzero()[0].tolist()
            return Equivalence(
                False, f"signs differ: {e.name} (group, out, in, tap) {at} is {_at(wa, at)} and {_at(wb, at)}"
            )
    log = _solve(found.edges, a, b, 1 + found.H + found.H_absorbed)
    if not absorbed:
        log[1 + found.H :] = 0
    c = log.exp()
    factors = {e.name: (e, c[e.head][:, :, None] / c[e.tail][:, None, :]) for e in found.edges}
    powers = {s.name: c[s.unit] ** s.power for s in found.statistics}
    for name in a:
        x, y = _comparable(a[name]), _comparable(b[name])
        if name in factors:
            e, factor = factors[name]
            x, y = e.view(x), e.view(y)
            x = x * factor.reshape(*factor.shape, *[1] * (x.dim() - 3))
        elif name in powers:
            x = x * powers[name]
        tolerance, least = _tolerance(b[name].dtype) if rtol is None else (rtol, 0.0)
        right = x == y  # NaN agrees with nothing, and inf with itself alone
        if tolerance:
            right |= (x - y).isfinite() & ((x - y).abs() <= tolerance * y.abs() + least)
        wrong = ~right
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            return Equivalence(False, f"{name} {at} would be {_at(x, at)} but is {_at(y, at)}")
    return Equivalence(True, "every weight agrees", Scales(c[1:]))


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


def _at(x: Tensor, index: list[int]) -> str:
    return f"{x[tuple(index)].item():.6g}"


@on_cpu
def _solve(edges: Sequence[Edges], a: dict[str, Tensor], b: dict[str, Tensor], n: int) -> Tensor:
    """log c with log c[head] − log c[tail] = log|w_b/w_a|, spread from ground; 0 for units no weight reaches."""
    log = torch.zeros(n, dtype=torch.float64)
    known = torch.zeros(n, dtype=torch.bool)
    known[0] = True
    links = []
    for e in (e for e in edges if e.head.numel() and e.tail.numel()):
        wa, wb = (magnitude(e.view(x[e.name].detach()).cpu()) for x in (a, b))
        size, tap = (wa * (wb > 0)).reshape(*wa.shape[:3], -1).max(3)
        ratio = (wb / wa).reshape(*wa.shape[:3], -1).gather(3, tap[..., None])[..., 0].log()
        links.append((e.head, e.tail, size, ratio))
    while True:
        before = int(known.sum())
        for head, tail, size, ratio in links:
            for source, target, strength, jump in (
                (tail, head, size, ratio),
                (head, tail, size.transpose(1, 2), -ratio.transpose(1, 2)),
            ):
                best, at = (strength * known[source][:, None, :]).max(2)
                value = log[source].gather(1, at) + jump.gather(2, at[..., None])[..., 0]
                new = (best > 0) & ~known[target]
                log[target[new]] = value[new]
                known[target[new]] = True
        if int(known.sum()) == before:
            if bool(known.all()):
                return log
            known[int((~known).nonzero()[0])] = True  # a part that no weight joins to ground: its scale is free
