"""One step on a CPU in few operations: the mathematics of `step.py` for small networks, where each operation counts.

Products w·g of all small weights lie side by side in one scratch vector: all their skeleton entries are one gather, the
sums of layers of equal shape are one reduction, and everything between the two passes is arithmetic on vectors of roots
or units. A weight is then updated in place by two operations, a large one block by block, so that each block is read
from memory once per pass. Skeleton entries are kept in one vector (free ones never change, trained ones follow the path
ratios) and written back, never read.

Shapes: a unit vector is `(H + 1,)`; a vector of roots is `(roots + 1,)`, its last entry stands for what has no root.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspace.devices import on_cpu
from gspace.fast.network import Given, Groups, Task
from gspace.step import row_norms
from gspace.watch import fingerprint

BLOCK = 1 << 16  # elements of a weight that stay in the cache between two operations


def refusal(task: Task) -> str | None:
    """Why this way is not open, None if it is."""
    if not task.layers:
        return "no parameter touches a unit"
    if any(w.device.type != "cpu" for w in task.weights):
        return "parameters are not on a CPU"
    if len({w.dtype for w in task.weights}) > 1 or task.weights[0].dtype not in (torch.float32, torch.float64):
        return "parameters differ in dtype, or are narrower than float32"
    if task.spread or task.max_path_grad_norm is not None:
        return "free weights that move, and clipping, take other sums"
    return None


class Entries(NamedTuple):
    """Skeleton entries of one layer.

    Attributes:
        layer: Which one.
        place: Their flat index in the parameter.
        norm: Flat index of their row norms.
        value: Their values, a part of one vector.
        flow: Their w·g, a part of one vector.
    """

    layer: int
    place: Tensor
    norm: Tensor
    value: Tensor
    flow: Tensor


class ForeachStep:
    """One step on the parameters that touch units; free weights stay fixed."""

    @on_cpu
    def __init__(self, task: Task) -> None:
        self.layers, self.weights, self.groups = list(task.layers), list(task.weights), list(task.groups)
        self.rule, self.max_ratio, self.max_drift = task.rule, task.max_ratio, task.max_drift
        self.ratio, self.raw, self.dtype, root = task.ratio, task.raw, task.weights[0].dtype, task.root
        self.normal = [k for k, layer in enumerate(self.layers) if layer.edges.normalized]
        # A linear weight is its own view but for a leading dimension: it is spared the detour.
        self.bare = [w.dim() == 2 and not e.swap and len(e.head) == 1 and not e.normalized for w, e in self._pairs()]
        self.views = [self._view(k, w.detach()) for k, w in enumerate(self.weights)]
        units = torch.arange(len(root))
        self.root_units = ((root == units) & (units > 0)).nonzero()[:, 0]
        self.root_group = task.unit_group[self.root_units]
        rank = torch.full_like(root, len(self.root_units))
        rank[self.root_units] = torch.arange(len(self.root_units))
        self.rank = rank[root]
        self.one = self._ones()
        self.flow, self.bounded, self.unbounded = (self._ones(len(self.root_units) + 1) for _ in range(3))
        self.of_roots = tuple(x[:-1] for x in (self.flow, self.bounded, self.unbounded))
        self._plan_sums()
        self._plan_entries()
        self.seen: list[tuple[int, int]] = []
        self.outgoing_seen = (0, 0)

    def _pairs(self) -> list[tuple[Tensor, Any]]:
        return [(w, layer.edges) for layer, w in zip(self.layers, self.weights, strict=True)]

    def _view(self, k: int, value: Tensor) -> Tensor:
        return value if self.bare[k] else self.layers[k].edges.view(value)

    def _ones(self, *size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype)

    # What is where ----------------------------------------------------------------------------------------------------

    def _plan_sums(self) -> None:
        """Layers that read units, equal shapes side by side; their columns are one vector."""
        tail = [layer.edges.tail for layer in self.layers]
        reads = sorted((k for k, t in enumerate(tail) if bool(t.any())), key=lambda k: self.views[k].shape)
        self.tails = torch.cat([torch.empty(0, dtype=torch.long), *(tail[k].reshape(-1) for k in reads)])
        self.sums, self.shrink, self.scale = (self._ones(len(self.tails)) for _ in range(3))
        kept = [k for k in reads if self.views[k].numel() <= BLOCK]
        self.products = self._ones(sum(self.views[k].numel() for k in kept))
        self.product: dict[int, Tensor] = {}
        self.stacks: list[tuple[Tensor, list[int], Tensor]] = []  # products of equal layers, what to add up, sums
        self.large: dict[int, Tensor] = {}  # sums of layers whose products are not kept
        self.columns: dict[int, tuple[Tensor, Tensor]] = {}  # factors of the columns: of the weight, of the gradient
        at = here = 0
        for shape, some in groupby(reads, key=lambda k: self.views[k].shape):
            stack, size = list(some), math.prod(shape)
            bare = self.bare[stack[0]]
            groups = () if bare else (shape[0],)
            inputs = shape[1] if bare else shape[0] * shape[2]
            across = (*groups, 1, inputs // math.prod(groups), *[1] * (len(shape) - 3))
            for i, k in enumerate(stack):
                part = slice(here + i * inputs, here + (i + 1) * inputs)
                self.columns[k] = (self.shrink[part].view(across), self.scale[part].view(across))
            sums = self.sums[here : here + len(stack) * inputs].view(len(stack), *groups, -1)
            here += sums.numel()
            if size > BLOCK:
                self.large |= zip(stack, sums.unbind(), strict=True)
                continue
            block = self.products[at : at + len(stack) * size].view(len(stack), *shape)
            at += block.numel()
            self.product |= zip(stack, block.unbind(), strict=True)
            self.stacks.append((block, [1] if bare else [2, *range(4, block.dim())], sums))
        self.sums_to = self.rank[self.tails]
        self.rest = [k for k in range(len(self.layers)) if k not in self.columns]

    def _plan_entries(self) -> None:
        """Skeleton entries, those of layers whose products are kept first."""
        order = [*self.product, *(k for k in range(len(self.layers)) if k not in self.product)]
        size = sum(len(layer.root) for layer in self.layers)
        self.values, self.flows = self._ones(size), self._ones(size)
        self.entries: list[Entries] = []
        gather: list[Tensor] = [torch.empty(0, dtype=torch.long)]
        root, free, tail = list(gather), list(gather), list(gather)
        at = 0
        for k in order:
            layer, weight = self.layers[k], self.weights[k]
            part = slice(at, at + len(layer.root))
            at = part.stop
            number = torch.arange(weight.numel()).reshape(weight.shape)
            view = layer.edges.view(number)
            taps = view.shape[3:] if self.rule == "released" else (1,) * (view.dim() - 3)
            norm = torch.arange(math.prod((*view.shape[:2], *taps))).reshape(*view.shape[:2], 1, *taps)
            norm_of, place_of = torch.empty_like(number), torch.empty_like(number)
            layer.edges.view(norm_of).copy_(norm.expand(view.shape))
            layer.edges.view(place_of).copy_(torch.arange(weight.numel()).reshape(view.shape))
            value = (number[layer.entries], norm_of[layer.entries], self.values[part], self.flows[part])
            if part.stop > part.start:
                self.entries.append(Entries(k, *value))
            if k in self.product:
                gather.append(place_of[layer.entries] + int(self.product[k].storage_offset()))
            root.append(layer.root)
            free.append(layer.free)
            tail.append(layer.entry_tail)
        roots, frees, tails = torch.cat(root), torch.cat(free), torch.cat(tail)
        self.gather = torch.cat(gather)
        self.gathered = self.flows[: len(self.gather)]
        # A free entry keeps its value: it follows the ratio of ground, which is 1.
        self.entry_root, self.entry_tail = roots, torch.where(roots > 0, tails, 0)
        self.on_ground = not bool(self.entry_tail.any())
        self.entries_to = torch.where(roots > 0, self.rank[roots], self.rank[frees])

    def _follow(self, outgoing: Tensor) -> None:
        """Reads what only others change: skeleton entries, and factors of rows."""
        if fingerprint(self.weights) != self.seen:
            self.views = [self._view(k, w.detach()) for k, w in enumerate(self.weights)]
            for e in self.entries:
                torch.take(self.weights[e.layer], e.place, out=e.value)
        if (id(outgoing), outgoing._version) != self.outgoing_seen:
            self.outgoing_seen = (id(outgoing), outgoing._version)
            self.out_roots = outgoing[self.root_units]
            inverse = 1 / outgoing
            self.rows = [
                inverse[layer.edges.head[0]][:, None] if bare else layer.rows(inverse, view)
                for layer, view, bare in zip(self.layers, self.views, self.bare, strict=True)
            ]
            self.rows_twice = [x * x for x in self.rows]
            self.rows_are_one = [bool((x == 1).all()) for x in self.rows]
            self.rows_twice_are_one = [bool((x == 1).all()) for x in self.rows_twice]
            self.tame = _tame(outgoing)

    # One step ---------------------------------------------------------------------------------------------------------

    def step(self, given: Given) -> bool:
        """Moves weights, buffers and `incoming` in place; False, and nothing moved, if a sum is not finite."""
        incoming = given.incoming
        self._follow(given.outgoing)
        grads = [torch.zeros_like(w) if g is None else g for w, g in zip(self.weights, given.grads, strict=True)]
        grad_views = [g if bare else self._view(k, g) for k, (g, bare) in enumerate(zip(grads, self.bare, strict=True))]
        of_layer = [given.groups[i] for i in self.groups]
        norms = {k: row_norms(self.views[k], self.rule) for k in self.normal}
        if not self._reduce(grad_views, grads, norms):
            return False
        self._move_roots(given.groups, norms, incoming, given.root_buffer, given.root_fresh)
        at_once = given.root_buffer is None and self.tame and _tame(incoming)  # g/(Ĩ·Õ)², where that is in range
        self._factors(incoming, twice=at_once)
        rates = [float(group["lr"]) for group in of_layer]
        if not at_once:
            directions = self._directions(grad_views, of_layer, norms, incoming, given.buffers, given.fresh)
            self._update(directions, rates, self.rows, self.rows_are_one)
        else:
            directions = [g * norms[k] if k in norms else g for k, g in enumerate(grad_views)]
            for k, group in enumerate(of_layer):
                if group["weight_decay"] != 0:
                    self.views[k].mul_(1 - rates[k] * float(group["weight_decay"]))
                if group["maximize"]:
                    rates[k] = -rates[k]
            self._update(directions, rates, self.rows_twice, self.rows_twice_are_one)
        incoming.mul_(self.ratio)
        self.seen = fingerprint(self.weights)
        return True

    def _reduce(self, grad_views: Sequence[Tensor], grads: Sequence[Tensor], norms: Mapping[int, Tensor]) -> bool:
        """Inverse chain rule: q of the roots into `flow`. Sums of w·g are finite only if every gradient is."""
        weighted = norms if self.rule == "paper" else {}
        for k, product in self.product.items():
            torch.mul(self.views[k], grad_views[k], out=product)
        for k in weighted.keys() & self.product.keys():
            self.product[k].mul_(weighted[k])
        for stack, dims, sums in self.stacks:
            torch.sum(stack, dims, out=sums)
        for k, sums in self.large.items():
            self._sum_blocks(k, grad_views[k], weighted.get(k), sums)
        torch.index_select(self.products, 0, self.gather, out=self.gathered)
        for e in self.entries:
            if e.layer not in self.product:
                torch.mul(grads[e.layer].take(e.place), e.value, out=e.flow)
                if e.layer in weighted:
                    e.flow.mul_(weighted[e.layer].take(e.norm))
        self.flow.zero_().index_add_(0, self.sums_to, self.sums, alpha=-1).index_add_(0, self.entries_to, self.flows)
        total = self.flow.sum().item()
        for k in self.rest:
            total += grad_views[k].sum().item()
        return math.isfinite(total)

    def _sum_blocks(self, k: int, g: Tensor, norm: Tensor | None, sums: Tensor) -> None:
        axis, w = (0 if self.bare[k] else 1), self.views[k]
        dims = [axis, *range(axis + 2, w.dim())]
        sums.zero_()
        for start, length in _blocks(w, axis):
            product = w.narrow(axis, start, length) * g.narrow(axis, start, length)
            if norm is not None:
                product.mul_(norm.narrow(axis, start, length))
            sums += product.sum(dims)

    def _move_roots(
        self,
        groups: Groups,
        norms: Mapping[int, Tensor],
        incoming: Tensor,
        root_buffer: Tensor | None,
        root_fresh: bool,
    ) -> None:
        """Path ratios of the roots, as `step.path_ratio`, and from them `ratio` of every unit."""
        value = incoming.index_select(0, self.root_units).mul_(self.out_roots)
        q, ratio, raw = self.of_roots
        d = q / value
        if norms and self.rule == "released":
            d /= self._root_norms(norms)
        if any(group["maximize"] for group in groups):
            d *= 1 - 2 * self._per_root(groups, "maximize")
        if root_buffer is not None:
            d = self._root_direction(groups, d, root_buffer, root_fresh)
        lr = self._per_root(groups, "lr")
        if isinstance(lr, Tensor):
            torch.sub(1, lr * d / value, out=raw)
        else:
            torch.addcdiv(self.one, d, value, value=-lr, out=raw)
        bound, drift = self.max_ratio, self.max_drift
        if bound == math.inf:
            ratio.copy_(raw)
        else:
            torch.clamp(raw, 1 / bound, bound, out=ratio)
        if drift != math.inf:
            size = value.abs_()
            low, high = size.clamp(max=1 / drift).div_(size), size.clamp(min=drift).div_(size)
            torch.clamp(ratio, low, high, out=ratio)
        torch.index_select(self.bounded, 0, self.rank, out=self.ratio)
        torch.index_select(self.unbounded, 0, self.rank, out=self.raw)

    def _root_norms(self, norms: Mapping[int, Tensor]) -> Tensor:
        norm = torch.ones_like(self.flow)
        for e in self.entries:
            if e.layer in norms:
                norm[self.rank[self.layers[e.layer].root]] = norms[e.layer].take(e.norm)
        return norm[:-1]

    def _root_direction(self, groups: Groups, d: Tensor, root_buffer: Tensor, root_fresh: bool) -> Tensor:
        momentum, dampening = self._per_root(groups, "momentum"), self._per_root(groups, "dampening")
        old = root_buffer.index_select(0, self.root_units)
        new = d.clone() if root_fresh else old * momentum + d * (1 - dampening)
        still = torch.as_tensor(momentum, device="cpu") == 0  # their buffer waits
        root_buffer.index_copy_(0, self.root_units, torch.where(still, old, new))
        nesterov = torch.as_tensor(self._per_root(groups, "nesterov"), device="cpu")
        ahead = torch.where(nesterov > 0, d + momentum * new, new)
        return torch.where(still, d, ahead)

    def _per_root(self, groups: Groups, key: str) -> Any:
        """A hyper-parameter for every root: a number, or a vector where groups differ."""
        values = [float(group[key]) for group in groups]
        if len(values) == 1 or values.count(values[0]) == len(values):
            return values[0]
        return torch.tensor(values, dtype=self.dtype, device="cpu")[self.root_group]

    def _factors(self, incoming: Tensor, *, twice: bool) -> None:
        """Factors of columns, 1/R and 1/(Ĩ·R), Ĩ² where a gradient has not been divided by Ĩ yet; skeleton entries."""
        shrink = self.ratio.reciprocal()
        scale = shrink / incoming
        if twice:
            scale.div_(incoming)
        torch.index_select(shrink, 0, self.tails, out=self.shrink)
        torch.index_select(scale, 0, self.tails, out=self.scale)
        self.values.mul_(self.ratio.index_select(0, self.entry_root))
        if not self.on_ground:
            self.values.mul_(shrink.index_select(0, self.entry_tail))

    def _directions(
        self,
        grads: Sequence[Tensor],
        groups: Groups,
        norms: Mapping[int, Tensor],
        incoming: Tensor,
        buffers: Sequence[Tensor | None],
        fresh: Sequence[bool],
    ) -> list[Tensor]:
        """What momentum and decay make of ∂ℓ/∂v."""
        result = []
        into = 1 / incoming
        for k, (layer, group, buffer) in enumerate(zip(self.layers, groups, buffers, strict=True)):
            columns = into[layer.edges.tail[0]] if self.bare[k] else layer.columns(into, self.views[k])
            inverse = self.rows[k] * columns
            d = grads[k] * inverse
            if k in norms:
                d.mul_(norms[k])
            if group["maximize"]:
                d.neg_()
            if group["weight_decay"] != 0:
                d.addcdiv_(self.views[k], inverse, value=float(group["weight_decay"]))
            if buffer is not None:
                old = self._view(k, buffer)
                if fresh[k]:
                    old.copy_(d)
                else:
                    old.mul_(group["momentum"]).add_(d, alpha=1 - group["dampening"])
                d = d.add_(old, alpha=group["momentum"]) if group["nesterov"] else old
            result.append(d)
        return result

    def _update(
        self, directions: list[Tensor], rates: Sequence[float], rows: Sequence[Tensor], plain: Sequence[bool]
    ) -> None:
        """w ← (w − lr·d·i)·m, with the factors of columns at hand, and those of rows where they are not all 1."""
        for k, is_one in enumerate(plain):
            if not is_one and k not in self.large:
                directions[k] = directions[k] * rows[k]
        for k in self.large:
            (shrink, scale), axis = self.columns[k], 0 if self.bare[k] else 1
            for start, length in _blocks(self.views[k], axis):
                w, d = (x.narrow(axis, start, length) for x in (self.views[k], directions[k]))
                move = d if plain[k] else d * rows[k].narrow(axis, start, length)
                w.mul_(shrink).addcmul_(move, scale, value=-rates[k])
        if self.product:
            some, factors = [self.views[k] for k in self.product], [self.columns[k] for k in self.product]
            torch._foreach_mul_(some, [shrink for shrink, _ in factors])
            moves, steps = [directions[k] for k in self.product], [-rates[k] for k in self.product]
            torch._foreach_addcmul_(some, moves, [scale for _, scale in factors], steps)
        for k in self.rest:
            self.views[k].add_(directions[k], alpha=-rates[k])
        for e in self.entries:
            self.weights[e.layer].index_put_(self.layers[e.layer].entries, e.value)


def _tame(x: Tensor) -> bool:
    """Whether squares are far from the limits of the dtype."""
    low, high = (float(bound) for bound in x.abs().aminmax())
    far = torch.finfo(x.dtype).max ** 0.4
    return low * far > 1 and high < far


def _blocks(view: Tensor, axis: int) -> list[tuple[int, int]]:
    """Outputs of a weight, a few at a time: start and length."""
    rows = view.shape[axis]
    step = max(1, BLOCK * rows // max(1, view.numel()))
    return [(i, min(step, rows - i)) for i in range(0, rows, step)]
