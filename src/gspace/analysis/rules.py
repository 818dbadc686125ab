"""What each operation does to scales. A rule reads nodes, adds equations, and returns the nodes of the outputs.

One node tensor per output, or one for all of them; None is ground. Nodes broadcast to the sizes of the output. Which
operation has which rule is said in `operations.py`.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gspace.analysis.equations import ANY, constant, squash
from gspace.analysis.follow import Follow, Nodes, Norm
from gspace.analysis.memory import Raw, key_of
from gspace.analysis.run import Call
from gspace.analysis.weights import ZERO

EPSILON = 1e-2  # a number below it that is added to a scaled value is an ε: without it, the scale would be exact


def pinning(reason: str) -> Callable[[Follow, Call], None]:
    """Sets what is read and what is returned to ground."""

    def rule(s: Follow, c: Call) -> None:
        for t in tree_leaves(c.args):
            if isinstance(t, Tensor) and t in s.memory:
                s.pin(s.content(t), reason)

    return rule


unknown = pinning("no rule is known for it")
nonlinear = pinning("not positively homogeneous")
read_out = pinning("its value is read")


def ground(s: Follow, c: Call) -> Nodes:
    """Reads no value, or only signs and zeros, which no positive scale changes."""
    return None


def drawn(s: Follow, c: Call) -> Nodes:
    """normal, bernoulli …: reads what says how to draw, but not the tensor that it fills or only takes the size of."""
    filled = c.in_place or c.get("p") is not None
    return nonlinear(s, Call(c.name, c.function, {k: v for k, v in c.args.items() if k != "self" or not filled}))


def created(s: Follow, c: Call) -> Nodes:
    """zeros, full, fill …: a literal 0 takes any scale."""
    value = 0.0 if "zero" in c.name else c.get("fill_value", "value", "s")
    return s.ids(value)


def homogeneous(s: Follow, c: Call) -> list[Nodes]:
    """f(c·x) = c·f(x), entry by entry; dropout returns its mask too."""
    return [s.ids(c.get("self", "input")), None]


def copied(s: Follow, c: Call) -> Nodes:
    return s.content(c.get("src", "self"))


# Movement -------------------------------------------------------------------------------------------------------------


def moved(s: Follow, c: Call) -> Nodes | list[Nodes]:
    """Moves elements about: so it does with their nodes. Where data decide how, all of them have one scale."""
    tensors = [t for t in tree_leaves(c.args) if isinstance(t, Tensor)]
    if any(s.unknown(t) for t in tensors if not t.is_floating_point()):
        return reduce(s.tied, [s.reduce(s.ids(t)).reshape(()) for t in tensors if t.is_floating_point()])

    def nodes(t: Any) -> Any:
        return s.ids(t).contiguous() if isinstance(t, Tensor) and t.is_floating_point() else _here(t)

    changed = {name: tree_map(nodes, value) for name, value in c.args.items() if name not in ("dtype", "layout")}
    return tree_leaves(c.function(**{k: v for k, v in changed.items() if k != "out"}))


def _here(value: Any) -> Any:
    """Indices beside the nodes, on the CPU; those without values choose the first."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.cpu()


def diagonal(s: Follow, c: Call) -> Nodes:
    """diag_embed: zeros all around, which take any scale."""
    return c.run(self=s.ids(c["self"]) - ANY) + ANY


def joined(s: Follow, c: Call) -> Nodes:
    """cat: dimensions that no node changes along stay expanded."""
    nodes = [s.ids(t) for t in c["tensors"] if t.numel() or t.dim() != 1]
    rank = nodes[0].dim()
    for d in set(range(rank)) - {c["dim"] % rank}:
        if all(t.stride(d) == 0 for t in nodes):
            nodes = [t.narrow(d, 0, 1) for t in nodes]
    return torch.cat(nodes, c["dim"])


def padded(s: Follow, c: Call) -> Nodes:
    """With zeros, which take any scale; where nodes do not change there is nothing to pad."""
    nodes, pad = s.ids(c["self"]), list(c["pad"])
    if c["value"] != 0:
        s.pin(nodes, "padded with a value other than 0")
        return None
    for k in range(len(pad) // 2):
        if nodes.stride(-1 - k) == 0 or nodes.shape[-1 - k] == 1:
            nodes = nodes.narrow(-1 - k, 0, 1)
            pad[2 * k : 2 * k + 2] = [0, 0]
    return torch.constant_pad_nd(nodes, pad, ANY)


def chosen(s: Follow, c: Call) -> Nodes:
    """index, gather, embedding …: rows of a table that this batch does not choose have the scale of the others."""
    name, index = "weight" if "weight" in c.args else "self", "indices" if "indices" in c.args else "index"
    source, where = c[name], tree_leaves(c[index])
    dims = [0 if c.name == "embedding" else c["dim"] % max(source.dim(), 1)] if c.name != "index" else []
    d = 0
    for w in where if c.name == "index" else ():
        width = w.dim() if isinstance(w, Tensor) and w.dtype in (torch.bool, torch.uint8) else 1
        dims += range(d, d + width) if w is not None else ()
        d += width
    raw = s.raw(source)
    if raw is not None:
        nodes = s.weights.edges(raw, ZERO, [1 if d in dims else n for d, n in enumerate(raw.sizes)]).expand(raw.sizes)
        if c.get("padding_idx") is not None and c["padding_idx"] >= 0:
            s.untrained.append(nodes[:1])
    else:
        nodes = s.ids(source)
        if any(s.unknown(w) for w in where):
            nodes = s.reduce(nodes, dims).expand(nodes.shape)
    if c.name in ("index_select", "embedding") and constant(nodes, dims[0]):
        return nodes.narrow(dims[0], 0, 1) if c.name == "index_select" else nodes[0]
    return c.run(**{name: nodes.contiguous(), index: tree_map(_here, c[index])})


def bags(s: Follow, c: Call) -> list[Nodes]:
    """Sums, means or maxima of a table's rows, in channels of one scale each; the other results are of the indices."""
    if c["per_sample_weights"] is not None and c["per_sample_weights"] in s.memory:
        return [nonlinear(s, c)] * c.results
    raw = s.raw(c["weight"])
    nodes = s.weights.edges(raw, ZERO, [1, raw.sizes[1]]) if raw is not None else s.reduce(s.ids(c["weight"]), 0)
    if raw is not None and c["padding_idx"] >= 0:
        s.untrained.append(nodes)
    return [nodes[0], *[None] * (c.results - 1)]


def collected(s: Follow, c: Call) -> Nodes:
    """Rows that are written onto others, several perhaps onto one."""
    if c.get("reduce") in ("prod", "multiply"):
        return nonlinear(s, c)
    x, rows = s.ids(c["self"]), s.ids(c.get("values", "source", "src", "value"))
    if c.name == "index_put" and not c["accumulate"] and not any(s.unknown(i) for i in c["indices"]):
        return torch.ops.aten.index_put(x.contiguous(), tree_map(_here, c["indices"]), rows)
    dims = [c["dim"]] if c.name == "index_add" or _by_rows(c) else None  # a scatter has an index for every entry
    one, other = s.reduce(x, dims), s.reduce(rows, dims)
    return s.tied(one, other if dims else other.reshape(()))


def _by_rows(c: Call) -> bool:
    """Whether a scatter moves whole rows: its index is that of a row, expanded over the entries."""
    x, index, rows = c["self"], c.get("index"), c.get("src")
    if not (isinstance(index, Tensor) and isinstance(rows, Tensor) and x.dim() == index.dim() == rows.dim() > 0):
        return False
    ends = zip(x.shape, index.shape, rows.shape, index.stride(), strict=True)
    return all(
        d == c["dim"] % x.dim() or (a == n == b and step * (n - 1) == 0) for d, (a, n, b, step) in enumerate(ends)
    )


# Arithmetic -----------------------------------------------------------------------------------------------------------


def product(s: Follow, c: Call) -> Nodes:
    """x_y = x_a ± x_b. With a parameter it makes edges: a gain, one factor per channel."""
    if c.get("rounding_mode") is not None:
        return nonlinear(s, c)
    x, y = c["self"], c["other"]
    sign = 1 if c.name == "mul" else -1
    if not isinstance(y, Tensor):
        return s.ids(x)  # also a factor of 0, which may grow
    for one, other in ((x, y), (y, x)) if sign == 1 else ():
        raw = s.raw(other)
        if raw is not None and s.raw(one) is None:
            (few,) = squash(s.ids(one))
            for _ in range(few.dim() - len(raw.sizes)):
                raw = raw.unsqueeze(0)
            varies = [n > 1 and step != 0 for n, step in zip(raw.sizes, raw.strides, strict=True)]
            if few.dim() == len(varies) and all(n == 1 or along for n, along in zip(few.shape, varies, strict=True)):
                return s.contract(few, raw)
    return s.equations.sum(1, s.ids(x), sign, s.ids(y))


POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": -1}


def power(s: Follow, c: Call) -> Nodes:
    exponent = POWERS.get(c.name) or c["exponent"]
    if isinstance(exponent, Tensor) or not isinstance(c["self"], Tensor):
        return nonlinear(s, c)
    p, simple = Fraction(float(exponent)), Fraction(float(exponent)).limit_denominator(64)
    p = simple if float(simple) == float(p) else p  # 1/3 as it was meant
    if p == 0:
        return None
    return s.equations.sum(int(p) if p.denominator == 1 else p, s.ids(c["self"]), 1, ZERO)


def added(s: Follow, c: Call) -> Nodes:
    """Things that are added, compared or chosen from have one scale. A small number is an ε; 1 + w is a gain."""
    x, y = c["self"], c.get("other", "value")
    y = y * c["alpha"] if c.get("alpha") is not None and not isinstance(y, Tensor) else y
    for one, other in ((x, y), (y, x)):
        if isinstance(one, (int, float)) and one and math.isfinite(one) and c.name in ("add", "sub", "rsub"):
            if abs(one) < EPSILON:
                return s.absorb(s.ids(other))
            raw = s.raw(other)
            if raw is not None and c.name == "add":
                return s.weights.edges(raw, ZERO, raw.sizes, float(one))
    return s.add(x, y)


def compared(s: Follow, c: Call) -> Nodes:
    added(s, c)
    return None


def clamped(s: Follow, c: Call) -> Nodes:
    """At 0, or at an ε."""
    bounds = [c.get(name) for name in ("min", "max", "min_val", "max_val", "threshold", "value")]
    bounds = [b for b in bounds if b is not None]
    if any(isinstance(b, Tensor) or (abs(b) >= EPSILON and abs(b) != math.inf) for b in bounds):
        return nonlinear(s, c)
    nodes = s.ids(c["self"])
    return s.absorb(nodes) if any(b and abs(b) != math.inf for b in bounds) else nodes


def prelu(s: Follow, c: Call) -> Nodes:
    """The slope is never scaled. A parameter loses no unit by that: no pin."""
    slope = s.content(c["weight"])
    if isinstance(slope, Raw):
        s.weights.ground(slope)
    else:
        s.pin(slope, "the slope of a PReLU, which no scale changes")
    return s.ids(c["self"])


# Reductions -----------------------------------------------------------------------------------------------------------


def reduced(s: Follow, c: Call) -> Nodes | list[Nodes]:
    """sum, mean, max, norm …: what is reduced together has one scale."""
    if isinstance(c.get("other"), Tensor):
        return s.add(c["self"], c["other"])
    dims, keep = c.get("dim"), bool(c.get("keepdim"))
    if c.get("ord", "p") == 0:
        return None  # how many are not 0
    one = s.reduce(s.ids(c["self"]), dims, keep)
    if c.get("dtype") is not None and not c["dtype"].is_floating_point:
        return one
    if c.name.startswith("var"):
        return [s.equations.sum(2, one, 1, ZERO), one]
    if c.name in ("max", "min", "median", "nanmedian", "mode", "kthvalue") and dims is not None:
        return [one, None]
    return one


def along(s: Follow, c: Call) -> Nodes | list[Nodes]:
    """cumsum, sort, topk, argmax …: along one dimension."""
    one = s.reduce(s.ids(c["self"]), c.get("dim"))
    return None if "arg" in c.name else [one, None]


def pooled(s: Follow, c: Call) -> list[Nodes]:
    """Pools and interpolations over the last dimensions."""
    nodes = s.ids(c.get("self", "input"))
    spatial = next((int(d) for d in c.name if d.isdigit()), 2)
    return [s.reduce(nodes, range(-spatial, 0)), None]


# Layers ---------------------------------------------------------------------------------------------------------------


def matrix_product(s: Follow, c: Call) -> Nodes:
    """mm, bmm, and with a bias addmm: (n, i, k, 1) · (n, 1, k, j) → (n, i, j)."""
    a, b = (s.content(c[name]) for name in (("mat1", "mat2") if c.name == "addmm" else ("self", "mat2")))
    if c.name == "bmm":
        return s.contract(a.unsqueeze(3), b.unsqueeze(1), [2])[:, :, 0]
    result = s.contract(a.unsqueeze(2), b.unsqueeze(0), [1])[:, 0]
    return s.tied(result, s.ids(c["self"])) if c.name == "addmm" and c["beta"] != 0 else result


def convolution(s: Follow, c: Call) -> Nodes:
    """View the weight as (group, out, in, taps), transposed (group, in, out, taps)."""
    x, groups, contracted, taps = c["input"], c["groups"], 1 if c["transposed"] else 2, [1] * (c["input"].dim() - 2)
    tail = s.reduce(s.ids(x), [0, *range(2, x.dim())]).reshape(groups, -1, 1, *taps)
    weight = s.content(c["weight"])
    if isinstance(weight, Raw):
        rows, step = weight.sizes[0] // groups, weight.strides[0]
        sizes = groups, rows, *weight.sizes[1:]
        strides = rows * step if groups > 1 else 0, step, *weight.strides[1:]
        weight = weight._replace(sizes=sizes, strides=strides)
    else:
        weight = weight.unflatten(0, (groups, -1))
    tail = tail if c["transposed"] else tail.transpose(1, 2)
    head = s.contract(tail, weight, [contracted, *range(3, x.dim() + 1)], groups).flatten(1)
    head = head.expand(groups, c["weight"].shape[1] if c["transposed"] else c["weight"].shape[0] // groups)
    head = head.reshape(1, -1, *taps)
    return head if c["bias"] is None else s.tied(head, s.ids(c["bias"]).reshape(1, -1, *taps))


def trilinear(s: Follow, c: Call) -> Nodes:
    """Products of three, summed."""
    total = ZERO
    for k in "123":
        nodes = s.ids(c[f"i{k}"])
        for d in c[f"expand{k}"]:
            nodes = nodes.unsqueeze(d)
        total = s.equations.sum(1, total, 1, nodes)
    return s.reduce(total, c["sumdim"], keep=False)


def grouped_product(s: Follow, c: Call) -> Nodes:
    """Rows of x, sorted by expert, times each expert's matrix; of one that gets no row nothing is known."""
    x, ends = s.ids(c["self"]), c["offs"].tolist()
    parts = []
    for k, (i, j) in enumerate(zip([0, *ends], ends, strict=False)):
        if i < j:
            row = s.reduce(x[i:j], 0).unsqueeze(2)
            parts.append(s.contract(row, s.content(c["mat2"][k]).unsqueeze(0), [1])[:, 0].expand(j - i, -1))
    rest = ZERO.expand(len(x) - ends[-1], c["mat2"].shape[2])  # rows that no expert gets
    return torch.cat([*parts, rest])


# Norms ----------------------------------------------------------------------------------------------------------------


def _affine(s: Follow, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Gain and bias write what comes out of a norm."""
    result = ZERO if weight is None else s.ids(weight)
    return result if bias is None else s.tied(result, s.ids(bias))


def layer_norm(s: Follow, c: Call) -> list[Nodes]:
    shape = c.get("normalized_shape")
    s.absorb(s.reduce(s.ids(c["input"]), range(-len(shape), 0)))
    return [_affine(s, c["weight"], c.get("bias")), None, None]


def group_norm(s: Follow, c: Call) -> list[Nodes]:
    x = c["input"]
    s.absorb(s.reduce(s.ids(x).reshape(len(x), c["group"], -1), 2))
    return [_channels(_affine(s, c["weight"], c["bias"]), x.dim()), None, None]


def batch_norm(s: Follow, c: Call) -> list[Nodes]:
    """Divides the scale of each channel out; γ and β write the units behind it, statistics follow those before it."""
    x = c["input"]
    absorbed = s.reduce(s.ids(x), [0, *range(2, x.dim())]).reshape(-1)
    statistics = [(c.get(name), power) for name, power in (("running_mean", 1), ("running_var", 2))]
    statistics = [(t, power) for t, power in statistics if isinstance(t, Tensor)]
    gain = s.raw(c["weight"])
    if gain is None and (c["weight"] is not None or not statistics):  # an InstanceNorm, or a computed gain
        s.absorb(absorbed)
        return [_channels(_affine(s, c["weight"], c["bias"]), x.dim()), None, None, None, None]
    key = tuple(absorbed.tolist())
    if gain is not None:
        written = s.weights.edges(gain, ZERO, gain.sizes, kind="norm")
        key += tuple(written.tolist())
    else:
        written = s.norms[key].written if key in s.norms else s.equations.fresh(len(absorbed))
    shift = s.raw(c["bias"])
    if shift is not None:
        s.equations.tie(s.weights.edges(shift, ZERO, shift.sizes, kind="norm"), written)
    elif c["bias"] is not None:
        s.tied(written, s.ids(c["bias"]))
    s.norms[key] = Norm(absorbed, written, gain is not None)
    for t, power in statistics:
        known, _ = s.statistics.setdefault(key_of(t), (absorbed, power))
        s.equations.tie(known, absorbed)
        s.memory.write(t, absorbed)
        s.powers[key_of(t)] = power
    return [_channels(written, x.dim()), None, None, None, None]


def _channels(nodes: Tensor, rank: int) -> Tensor:
    return nodes.reshape(1, -1, *[1] * (rank - 2)) if nodes.dim() else nodes


def weight_norm(s: Follow, c: Call) -> list[Nodes]:
    """By itself: torch's way of writing it would make one node for each entry."""
    v, g = s.ids(c["v"]), s.ids(c["g"])
    norm = s.reduce(v, [d for d in range(v.dim()) if d != c["dim"] % v.dim()])
    v = s.equations.find(v)
    return [s.equations.sum(1, s.equations.sum(1, v, -1, norm), 1, g), norm]
