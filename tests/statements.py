"""The paper's statements about paths, executable: Eq. (1), Theorems 3.3, 3.4, 3.6, Corollary 3.8 and Theorem 4.1.

Each takes a small network made explicit (`gspace.paths`) and returns a `Statement`: true or false, with the numbers
that say so. The theorems assume what the paper assumes, weights other than 0; where a statement has a premise, a
network that does not meet it is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from gspace.paths.explicit import (
    Basis,
    Path,
    Wiring,
    activation_status,
    allocate_weights,
    as_function,
    inverse_chain_rule,
    jacobian,
    odot,
    path_values,
    rank,
    structure_matrix,
)

RTOL = 1e-9  # two float64 numbers closer than this are the same number to these statements


@dataclass(frozen=True)
class Statement:
    """Whether a statement holds on one network, and the evidence."""

    name: str
    holds: bool
    evidence: Mapping[str, float]

    def __bool__(self) -> bool:
        return self.holds


# Eq. (1), for multi-layer perceptrons


def _mlp_layers(model: nn.Module, wiring: Wiring) -> list[tuple[str, nn.Linear]]:
    layers = [(name, layer) for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    heads = {e.name: e.head for e in wiring.edges}
    other = [type(layer).__name__ for layer in model.children() if not isinstance(layer, (nn.Linear, nn.ReLU))]
    if not isinstance(model, nn.Sequential) or other or not layers:
        raise ValueError(f"Eq. (1) is written out for nn.Sequential of Linear and ReLU, this one has {other or model}")
    for name, _ in layers[:-1]:
        if bool((heads[f"{name}.weight"] == 0).any()):
            raise ValueError(
                f"units of layer {name!r} are pinned: no path runs through them, Eq. (1) needs all of them"
            )
    return layers


def active_units(model: nn.Module, wiring: Wiring, x: Tensor) -> Tensor:
    """Which units of an MLP are active, `(batch, H + 1)`."""
    heads = {f"{name}.weight": name for name, _ in _mlp_layers(model, wiring)}
    units = {heads[e.name]: e.head.reshape(-1) for e in wiring.edges if e.name in heads}
    active = x.new_ones(len(x), wiring.H + 1, dtype=torch.bool)
    for name, layer in model.named_children():
        x = layer(x)
        if name in units:
            active[:, units[name]] = x > 0
    return active


def output_by_paths(model: nn.Module, wiring: Wiring, paths: Sequence[Path], x: Tensor) -> Tensor:
    """Eq. (1): N_k(x) = Σ_p v_p(w)·a_p(x; w)·x_i over the paths from input i to output k, `(batch, K)`.

    A path that starts at a bias starts at an input that is always 1.
    """
    layers = _mlp_layers(model, wiring)
    d, K = layers[0][1].in_features, layers[-1][1].out_features
    fan_in = {f"{name}.weight": layer.in_features for name, layer in layers}
    names = [e.name for e in wiring.edges]
    source = torch.tensor([p[0][1] % d if names[p[0][0]] in fan_in else d for p in paths], device=x.device)
    sink = torch.tensor([p[-1][1] // fan_in.get(names[p[-1][0]], 1) for p in paths], device=x.device)
    weights = wiring.flatten(dict(model.named_parameters()))
    active = activation_status(wiring, paths, active_units(model, wiring, x))
    terms = path_values(wiring, weights, paths) * active * torch.cat([x, x.new_ones(len(x), 1)], 1)[:, source]
    return x.new_zeros(len(x), K).index_add_(1, sink, terms)


# Which sequences are paths of the network


def occurrences(model: nn.Module, wiring: Wiring, paths: Sequence[Path], x: Tensor) -> tuple[Tensor, float]:
    """How often the network contains the weights of each path, `(n,)`, and how many paths it has in all, by running it.

    With weights in {0, 1} and an input of ones no ReLU closes and the summed output N(S) counts the paths inside the
    set S of weights that are 1. Inclusion and exclusion, Σ_{T ⊆ S} (−1)^|S∖T| N(T), leaves those that use all of S.
    `x` is an input of ones. For networks of linear layers, convolutions, ReLU, additions and concatenations, pinned
    nowhere inside; all other parameters and modules would have to be 1, too.
    """
    sets = sorted({frozenset(row) - {wiring.m} for row in map(tuple, wiring.positions(paths).tolist())}, key=sorted)
    subsets = sorted({frozenset(t) for s in sets for r in range(len(s) + 1) for t in combinations(s, r)}, key=sorted)
    masks = x.new_zeros(len(subsets) + 1, wiring.m)
    for row, subset in zip(masks, subsets, strict=False):
        row[list(subset)] = 1
    masks[-1] = 1
    network = as_function(model, wiring)
    with torch.no_grad():
        N = torch.func.vmap(lambda weights: network(weights, x).sum(), chunk_size=4096)(masks)
    counted = dict(zip(subsets, N.tolist(), strict=False))
    exact = {
        s: sum((-1) ** (len(s) - r) * counted[frozenset(t)] for r in range(len(s) + 1) for t in combinations(s, r))
        for s in sets
    }
    rows = wiring.positions(paths).tolist()
    return x.new_tensor([exact[frozenset(row) - {wiring.m}] for row in rows]), float(N[-1])


# The theorems


def scales_between(wiring: Wiring, weights: Tensor, other: Tensor) -> Tensor | None:
    """The scales c > 0, `(H + 1,)`, with other = g_c(weights), or None: by definition, no path is involved.

    other/weights = c[head]/c[tail] is linear in log c.
    """
    if bool((weights.sign() != other.sign()).any()):
        return None
    units = torch.eye(wiring.H + 1, dtype=weights.dtype, device=weights.device)
    log_ratio = (other / weights).log()
    log_c = torch.linalg.lstsq((units[wiring.head] - units[wiring.tail])[:, 1:], log_ratio[:, None]).solution[:, 0]
    c = torch.cat([log_c.new_zeros(1), log_c]).exp()
    return c if _same(weights * c[wiring.head] / c[wiring.tail], other) else None


def theorem_3_3(
    wiring: Wiring, paths: Sequence[Path], first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> Statement:
    """w ~ w' if and only if all path values and all activation statuses agree.

    `first` and `second` are (weights, active units) of the two networks on the same inputs; the status is compared on
    these inputs, so there must be enough of them to tell two networks apart.
    """
    (w, active), (w2, active2) = first, second
    equivalent = scales_between(wiring, w, w2) is not None
    same_values = _same(path_values(wiring, w, paths), path_values(wiring, w2, paths))
    status, status2 = (activation_status(wiring, paths, a) for a in (active, active2))
    same_status = bool((status == status2).all())
    evidence = {"equivalent": equivalent, "same path values": same_values, "same activation status": same_status}
    return Statement("Theorem 3.3", equivalent == (same_values and same_status), evidence)


def theorem_3_4(wiring: Wiring, paths: Sequence[Path]) -> Statement:
    """rank(A) = m − H, over the weights and units that lie on a path.

    Off the paths are, for example, the weights in front of a BatchNorm in its exact view: nothing reads their units.
    """
    A = structure_matrix(wiring, paths)
    used = A.any(1)
    units = torch.cat([wiring.head[used], wiring.tail[used]]).unique()
    m, H, r = int(used.sum()), int((units > 0).sum()), rank(A)
    return Statement("Theorem 3.4", r == m - H, {"rank": r, "m": m, "H": H, "weights on no path": wiring.m - m})


def theorem_3_6(basis: Basis, weights: Tensor, other: Tensor) -> Statement:
    """Given equal signs of the free skeleton weights: w ~ w' if and only if the values of the basis paths agree."""
    differ = (weights.sign() != other.sign())[basis.free].nonzero()[:, 0].tolist()
    if differ:
        raise ValueError(
            f"the free skeleton weights of {len(differ)} units differ in sign, the first is {differ[0] + 1}"
        )
    equivalent = scales_between(basis.wiring, weights, other) is not None
    same_values = _same(odot(weights, basis.A), odot(other, basis.A))
    evidence = {"equivalent": equivalent, "same basis path values": same_values}
    return Statement("Theorem 3.6", equivalent == same_values, evidence)


def corollary_3_8(
    basis: Basis, weights: Tensor, network: Callable[[Tensor], Tensor], generator: torch.Generator | None = None
) -> Statement:
    """G-space has dimension m − H: v has that many independent coordinates, and they determine the function.

    `network` maps weights to outputs. The function is compared along a fibre: free weights multiplied by e^N(0,1), v
    fixed. Its own Jacobian cannot have a larger rank; where the rank is smaller, these inputs do not see every path.
    """
    dimension = basis.wiring.m - basis.wiring.H
    like: dict[str, Any] = {"generator": generator, "dtype": weights.dtype, "device": weights.device}
    free_ratio = torch.randn(len(basis.free), **like).exp()
    moved = allocate_weights(basis, weights, weights.new_ones(dimension), free_ratio)
    gap = _gap(network(moved), network(weights))
    outputs = torch.func.jacrev(network)(weights).reshape(-1, basis.wiring.m) * weights  # ∂/∂log w, better scaled
    evidence = {
        "m - H": dimension,
        "rank of dv/dw": int(torch.linalg.matrix_rank(jacobian(basis, weights) * weights)),
        "rank of dN/dw": int(torch.linalg.matrix_rank(outputs)),
        "gap along a fibre": gap,
    }
    holds = evidence["rank of dv/dw"] == dimension >= evidence["rank of dN/dw"] and gap < RTOL
    return Statement("Corollary 3.8", holds, evidence)


def theorem_4_1(
    basis: Basis,
    weights: Tensor,
    loss: Callable[[Tensor], Tensor],
    lr: float,
    steps: int,
    generator: torch.Generator | None = None,
) -> Statement:
    """Two projections of the path ratios, same signs of the free weights: the same v after every step.

    One keeps the free weights, the other multiplies them by e^N(0, 0.1) in every step.
    """
    w = [weights, weights]
    like: dict[str, Any] = {"generator": generator, "dtype": weights.dtype, "device": weights.device}
    gap = 0.0
    for _ in range(steps):
        for side in (0, 1):
            grad = torch.func.grad(loss)(w[side])
            v = odot(w[side], basis.A)
            path_grad, _ = inverse_chain_rule(basis, w[side], grad)
            free_ratio = (side * 0.1 * torch.randn(len(basis.free), **like)).exp()
            w[side] = allocate_weights(basis, w[side], 1 - lr * path_grad / v, free_ratio)
        gap = max(gap, _gap(odot(w[1], basis.A), odot(w[0], basis.A)))
    evidence = {
        "gap in v": gap,
        "gap in w": _gap(w[1], w[0]),
        "moved in v": _gap(odot(w[0], basis.A), odot(weights, basis.A)),
    }
    return Statement("Theorem 4.1", gap < RTOL, evidence)


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors agree entry by entry."""
    return bool(((a - b).abs() <= RTOL * b.abs()).all())
