"""Small networks made explicit: all paths, the structure matrix, basis paths, and one step of G-SGD by dense solve.

After the paper's Sec. 2.2 (paths), 3.2 (structure matrix), 4 (skeleton method, Inverse-Chain-Rule, Weight-Allocation)
and its appendix (the operation ⊙). Ground truth for the optimizer: nothing here is fast, everything is literal.

Shapes: m weights, n paths, H units. A weight vector is `(m,)`: the parameters of the edges, each flattened, one after
the other. A unit vector is `(H + 1,)`, entry 0 is ground. The structure matrix is `(m, n)`, as in the paper.

>>> import gspace, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 2, bias=False))
>>> wiring = wire(gspace.analyze(model).edges, dict(model.named_parameters()))
>>> A = structure_matrix(wiring, enumerate_paths(wiring))  # the paper's Figure 1: one hidden node, four paths
>>> A.tolist()
[[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
>>> rank(A) == wiring.m - wiring.H == 3
True
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Edges
from gspace.devices import on_cpu
from gspace.optim.skeleton import Skeleton

Step = tuple[int, int]  # index into the edges, flat index into that parameter
Path = tuple[Step, ...]
"""The weights on the way from ground to ground, one after the other."""
Update = Callable[[Tensor, Tensor], Tensor]  # (v, ∂ℓ/∂v) → v'

LIMIT = 200_000  # paths; a structure matrix of some hundred weights then still fits in memory


@dataclass(frozen=True)
class Wiring:
    """The m weights of a network one by one; position i of every `(m,)` vector is the same weight.

    Attributes:
        edges: The parameter tensors, in the order in which they fill a weight vector.
        shapes: Their shapes.
        offset: Position of the first weight of each.
        head: Unit that each weight writes, `(m,)`.
        tail: Unit that each weight reads, `(m,)`.
    """

    edges: tuple[Edges, ...]
    shapes: tuple[torch.Size, ...]
    offset: tuple[int, ...]
    head: Tensor
    tail: Tensor

    @property
    def m(self) -> int:
        """Number of weights."""
        return self.head.numel()

    @property
    def H(self) -> int:
        """Number of units."""
        return int(torch.cat([self.head, self.tail, self.head.new_zeros(1)]).max())

    @on_cpu
    def positions(self, paths: Sequence[Path]) -> Tensor:
        """Positions of the weights of each path, `(n, longest)`, filled up with m."""
        rows = [torch.tensor([self.offset[e] + i for e, i in path], dtype=torch.long) for path in paths]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.m)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight vector (or gradient vector) that holds these tensors, `(m,)`."""
        return torch.cat([tensors[e.name].detach().reshape(-1) for e in self.edges])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors that a weight vector holds, by parameter name; differentiable."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return {e.name: part.reshape(shape) for e, part, shape in zip(self.edges, parts, self.shapes, strict=True)}


@on_cpu
def wire(edges: Sequence[Edges], parameters: Mapping[str, Tensor], H: int | None = None) -> Wiring:
    """The weights of `edges` one by one. Frozen parameters count like any other.

    Units above `H` are taken as ground: with `analysis.edges` and `analysis.H`, a path ends where a BatchNorm begins.
    """
    if H is not None:
        edges = [replace(e, head=e.head * (e.head <= H), tail=e.tail * (e.tail <= H)) for e in edges]
    shapes = tuple(parameters[e.name].shape for e in edges)
    heads, tails = [], []
    for e, shape in zip(edges, shapes, strict=True):
        index = e.view(torch.arange(shape.numel()).reshape(shape))
        ones = [1] * (index.dim() - 3)
        order = index.reshape(-1).argsort()
        heads.append(e.head.reshape(*e.head.shape, 1, *ones).expand_as(index).reshape(-1)[order])
        tails.append(e.tail.reshape(len(e.tail), 1, -1, *ones).expand_as(index).reshape(-1)[order])
    offset = tuple(sum(shape.numel() for shape in shapes[:k]) for k in range(len(shapes)))
    return Wiring(tuple(edges), shapes, offset, torch.cat(heads), torch.cat(tails))


def as_function(model: nn.Module, wiring: Wiring) -> Callable[..., Any]:
    """The network as a function of its weight vector: `f(weights, *inputs)`."""
    return lambda weights, *inputs: torch.func.functional_call(model, wiring.split(weights), inputs)


# Paths and the structure matrix (Sec. 2.2, 3.2)


@on_cpu
def count_paths(wiring: Wiring) -> float:
    """The number of paths, without enumerating them; a path counts once per choice of uses of its weights.

    Uses in topological order: what has arrived at the tails before a use arrives at the heads through it.
    """
    arrived = torch.zeros(wiring.H + 1, dtype=torch.float64)
    finished = 0.0
    for _, k in sorted((use, k) for k, e in enumerate(wiring.edges) for use in {e.first, e.last}):
        e, shape = wiring.edges[k], wiring.shapes[k]
        arrived[0] = 1.0  # a path starts at ground once
        taps = shape.numel() / (e.head.numel() * e.tail.shape[1])
        through = (arrived[e.tail].sum(1, keepdim=True) * taps).expand_as(e.head)
        finished += float(through[e.head == 0].sum())
        arrived.index_add_(0, e.head.reshape(-1), through.reshape(-1))
    return finished


def enumerate_paths(wiring: Wiring, limit: int = LIMIT) -> tuple[Path, ...]:
    """Every path from ground to ground whose weights are used one after the other.

    Units alone do not order a network: where residual streams are tied, one unit is a channel of the stream at every
    depth, and a walk over units could run in circles or backwards. So each weight on a path must be used later than
    the one before it (`Edges.first`, `Edges.last`); at the earliest such use, so that a sequence comes out once.

    Every path of the network is found (of a weight used three times or more, the first and last use). Two things make
    sequences that are none: tied activations read one by one before they meet (write a, read b, later a + b), and a
    weight used twice (its input and output share units, so it can be skipped). `tests/statements.py` tells them
    apart. They do no harm: any sequence balances every unit, so it lies in the space of dimension m − H that the basis
    paths span. The network's own paths span it, too, if each weight is used once: a flow through the tied units can be
    routed along the additions that tie them.
    """
    n = count_paths(wiring)
    if n > limit:
        raise ValueError(f"this network has {n:.6g} paths, more than limit={limit}; gspace.paths is for small networks")
    leaving: list[list[tuple[Step, int]]] = [[] for _ in range(wiring.H + 1)]
    heads, tails = wiring.head.tolist(), wiring.tail.tolist()
    for k, (offset, shape) in enumerate(zip(wiring.offset, wiring.shapes, strict=True)):
        for i in range(shape.numel()):
            leaving[tails[offset + i]].append(((k, i), heads[offset + i]))

    def walk(unit: int, position: int, path: Path) -> Iterator[Path]:
        for step, head in leaving[unit]:
            e = wiring.edges[step[0]]
            use = e.first if e.first > position else e.last
            if use <= position:
                continue
            if head == 0:
                yield (*path, step)
            else:
                yield from walk(head, use, (*path, step))

    return tuple(walk(0, -1, ()))


@on_cpu
def structure_matrix(wiring: Wiring, paths: Sequence[Path]) -> Tensor:
    """A, `(m, n)`: how often each weight occurs on each path; more than once only where a weight is used twice."""
    A = torch.zeros(len(paths), wiring.m + 1, dtype=torch.long)
    positions = wiring.positions(paths)
    return A.scatter_add_(1, positions, torch.ones_like(positions))[:, : wiring.m].T.contiguous()


def rank(A: Tensor) -> int:
    """The rank of an integer matrix, from A·Aᵀ: exact in float64 and no larger than m × m, however many paths."""
    A = A.double()
    return int(torch.linalg.matrix_rank(A @ A.T, hermitian=True))


def path_values(wiring: Wiring, weights: Tensor, paths: Sequence[Path]) -> Tensor:
    """v_p(w), the product of the weights on each path, `(n,)`."""
    return torch.cat([weights, weights.new_ones(1)])[wiring.positions(paths)].prod(1)


def activation_status(wiring: Wiring, paths: Sequence[Path], active: Tensor) -> Tensor:
    """a_p(x), `(batch, n)`: whether every hidden unit on the path is active; `active` is `(batch, H + 1)`.

    The product ranges over hidden units: an output has no ReLU, and Eq. (1) would lose its negative values.
    """
    units = torch.cat([wiring.head, wiring.head.new_zeros(1)])[wiring.positions(paths)]
    return torch.stack([active[:, column] | (column == 0) for column in units.T]).all(0)


# The operation ⊙ (appendix), basis paths (Sec. 4.1) and their matrices


def odot(W: Tensor, A: Tensor) -> Tensor:
    """W ⊙ A, entry (b, k) = Π_j W[b, j]^A[j, k], for integer powers; differentiable, 0⁰ = 1.

    The appendix multiplies *all* signs, whatever the power, so that W ⊙ A ⊙ A⁻¹ = W fails as soon as a row holds a
    negative number. With integer powers (W ⊙ A) ⊙ B = W ⊙ (A·B) holds, signs included, and Ã⁻¹ is integer.
    """
    if A.is_floating_point():
        raise TypeError("⊙ needs integer powers: a negative number has no real fractional power")
    return (W.unsqueeze(-1) ** A).prod(-2)


@dataclass(frozen=True)
class Basis:
    """The m − H basis paths of a skeleton. Column j of A' is the one basis path of the non-free weight `kept[j]`.

    Attributes:
        wiring: The weights.
        free: Positions of the free skeleton weights out(1) … out(H), `(H,)`.
        kept: Positions of all others, `(m - H,)`, ascending.
        on_skeleton: Whether `kept[j]` is a trained skeleton weight, in(r), `(m - H,)`.
        paths: in-path(tail) · e · out-path(head) of each.
        A: A', `(m, m - H)`.
        A_tilde: Ã = [B, A'], `(m, m)`; B selects the free weights.
        inverse: Ã⁻¹, integer.
        in_paths, out_paths: Weights on in-path(u) and out-path(u), `(m, H + 1)`; column 0 is empty.
    """

    wiring: Wiring
    free: Tensor
    kept: Tensor
    on_skeleton: Tensor
    paths: tuple[Path, ...]
    A: Tensor
    A_tilde: Tensor
    inverse: Tensor
    in_paths: Tensor
    out_paths: Tensor


@on_cpu
def basis_paths(skeleton: Skeleton, parameters: Mapping[str, Tensor]) -> Basis:
    """The skeleton method: one basis path for every weight that is not free (design of the skeleton: `skeleton.py`).

    Ã is unimodular: O(u) is a product of free weights; a trained skeleton path gives I(r) = v_r/O(r), and with it I(u)
    of every unit below r; then w_e = v_e/(I(tail)·O(head)). Every exponent on the way is an integer.
    """
    wiring = wire(skeleton.edges, parameters)
    steps = [(k, i) for k, shape in enumerate(wiring.shapes) for i in range(shape.numel())]
    offset, units = torch.tensor(wiring.offset), torch.arange(1, skeleton.H + 1)
    first = offset[skeleton.in_edge[1:]] + skeleton.in_index[1:]
    free = offset[skeleton.out_edge[1:]] + skeleton.out_index[1:]
    if not (torch.equal(wiring.head[first], units) and torch.equal(wiring.tail[free], units)):
        raise ValueError("no skeleton: in(u) must write and out(u) must read unit u, for every unit")

    def chains(chosen: Tensor, onward: Tensor) -> Iterator[Path]:
        for u in range(skeleton.H + 1):
            path: list[Step] = []
            while u:
                if len(path) == skeleton.H:
                    raise ValueError(f"no skeleton: its weights run in a circle through unit {u}")
                path.append(steps[chosen[u - 1]])
                u = int(onward[chosen[u - 1]])
            yield tuple(path)

    in_path = [path[::-1] for path in chains(first, wiring.tail)]
    out_path = list(chains(free, wiring.head))
    kept = torch.ones(wiring.m, dtype=torch.bool).index_fill_(0, free, False).nonzero()[:, 0]
    paths = tuple((*in_path[wiring.tail[p]], steps[p], *out_path[wiring.head[p]]) for p in kept)
    A = structure_matrix(wiring, paths)
    A_tilde = torch.cat([torch.eye(wiring.m, dtype=torch.long)[:, free], A], 1)
    inverse = torch.linalg.inv(A_tilde.double()).round().long()
    ins, outs = structure_matrix(wiring, in_path), structure_matrix(wiring, out_path)
    return Basis(wiring, free, kept, torch.isin(kept, first), paths, A, A_tilde, inverse, ins, outs)


def combine(path: Path, basis: Basis) -> Tensor:
    """The integers α, `(m - H,)`, with p = A'·α: any path as a combination of basis paths."""
    alpha = basis.inverse @ structure_matrix(basis.wiring, [path])[:, 0]
    H = len(basis.free)
    if bool(alpha[:H].any()):
        raise ValueError(f"{path} does not run from ground to ground: it is no combination of basis paths")
    return alpha[H:]


def skeleton_products(basis: Basis, weights: Tensor) -> tuple[Tensor, Tensor]:
    """I(u) and O(u), the products of the weights on in-path(u) and out-path(u), `(H + 1,)` each, entry 0 is 1."""
    return odot(weights, basis.in_paths), odot(weights, basis.out_paths)


def reference_values(basis: Basis, I_ref: Tensor, O_ref: Tensor) -> Tensor:
    """The value in which each basis path is measured, `(m - H,)`; all 1 for `reference="one"`.

    I_ref(tail)·O_ref(head) for a non-skeleton weight, which leaves w_e·Ĩ·Õ, and I_ref(r)·O_ref(r) for a trained
    skeleton path, which leaves Ĩ(r)·Õ(r).
    """
    head, tail = basis.wiring.head[basis.kept], basis.wiring.tail[basis.kept]
    return torch.where(basis.on_skeleton, I_ref[head], I_ref[tail]) * O_ref[head]


# One step of SGD on v (Algorithm 1)


def jacobian(basis: Basis, weights: Tensor) -> Tensor:
    """G, `(m - H, m)`: ∂v_p/∂w_e = p_e·v_p/w_e, the matrix of the Inverse-Chain-Rule."""
    _refuse_zeros(basis, weights)
    return basis.A.T * odot(weights, basis.A)[:, None] / weights


def inverse_chain_rule(basis: Basis, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """∂ℓ/∂v, `(m - H,)`, from ∂ℓ/∂w = Gᵀ·∂ℓ/∂v, and what the equations leave over, `(H,)`.

    These are m equations for m − H unknowns. Multiplied by w_e they read s = A'·q, with s = w·∂ℓ/∂w and
    q = v·∂ℓ/∂v. Solving s = Ã·(r, q) instead leaves nothing to choose: r_u = ∂ℓ/∂log|out(u)| at fixed v, which is 0
    exactly because the loss does not see the scale of unit u.
    """
    _refuse_zeros(basis, weights)
    solution = torch.linalg.solve(basis.A_tilde.to(weights.dtype), weights * grad)
    H = len(basis.free)
    return solution[H:] / odot(weights, basis.A), solution[:H]


def allocate_weights(basis: Basis, weights: Tensor, path_ratio: Tensor, free_ratio: Tensor | None = None) -> Tensor:
    """Weight-Allocation: w·r with r = (1 … 1, R) ⊙ Ã⁻¹; `free_ratio` in place of the ones is another projection."""
    ones = weights.new_ones(len(basis.free)) if free_ratio is None else free_ratio
    return weights * odot(torch.cat([ones, path_ratio]), basis.inverse)


def weights_of(basis: Basis, free: Tensor, v: Tensor) -> Tensor:
    """The weights with these values of the free weights and of the basis paths: (free, v) ⊙ Ã⁻¹; differentiable."""
    return odot(torch.cat([free, v]), basis.inverse)


def dense_step(basis: Basis, weights: Tensor, grad: Tensor, update: Update, reference: Tensor | None = None) -> Tensor:
    """The weights after one step on v by dense solve: ICR, update, path ratios, WA.

    With `reference` (from `reference_values`) the coordinates are ṽ = v/reference, and ∂ℓ/∂ṽ = reference·∂ℓ/∂v;
    `update` maps (ṽ, ∂ℓ/∂ṽ) to ṽ', for SGD ṽ − lr·∂ℓ/∂ṽ. `grad` is ∂ℓ/∂w, `(m,)`.
    """
    k = weights.new_ones(len(basis.kept)) if reference is None else reference
    path_grad, _ = inverse_chain_rule(basis, weights, grad)
    v = odot(weights, basis.A) / k
    return allocate_weights(basis, weights, update(v, path_grad * k) / v)


def autograd_step(
    basis: Basis, weights: Tensor, loss: Callable[[Tensor], Tensor], update: Update, reference: Tensor | None = None
) -> Tensor:
    """The same step with v as the leaf: w = w(v), ∂ℓ/∂v by autograd through the network; `loss` is a function of w.

    Neither ICR nor WA is solved, and a non-skeleton weight may be 0.
    """
    k = weights.new_ones(len(basis.kept)) if reference is None else reference
    free = weights[basis.free]
    v = (odot(weights, basis.A) / k).requires_grad_()
    (path_grad,) = torch.autograd.grad(loss(weights_of(basis, free, v * k)), v)
    return weights_of(basis, free, update(v.detach(), path_grad) * k)


def _refuse_zeros(basis: Basis, weights: Tensor) -> None:
    names = [name for name, w in basis.wiring.split(weights).items() if bool((w == 0).any())]
    if names:
        way_out = "autograd_step allows zeros off the skeleton"
        raise ValueError(f"path ratios need weights other than 0, there are some in {', '.join(names)}; {way_out}")
