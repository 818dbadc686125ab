"""What each operation does to a sum over paths: one rule per row of the table in `operations`.

Every parameter w is |w|^p, and every operation the sum of the paths that run through it. Nothing is negative, so
a ReLU passes all of it. An operation with fixed coefficients a (average pooling, interpolation, a constant factor) is
made of edges of weight a, which enter as |a|^p. One that picks one of several values (max pooling, `maximum`) has a
path from each of them, so it sums. A constant among activations is a path from ground of its own. BatchNorm is the
affine map of evaluation mode, γ/σ·(x − mean) + β, and has the three edges it is written with: −mean (fixed, from
ground), γ/σ and β (from ground). A leaky slope a counts as max(1, |a|), a token as the sum of all tokens. All of this
commutes with rescaling. What is not positively homogeneous is refused.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gspace.analysis.memory import key_of
from gspace.analysis.run import Call
from gspace.analysis.sums import CHANCE, CHOSEN, Sums

NOT_HOMOGENEOUS = "it is not positively homogeneous"
UNKNOWN = "no rule is known for it"
PRODUCT = "it multiplies two activations"
INDICES = frozenset("index indices mask condition dim size sizes".split())


def same(s: Sums, c: Call) -> Tensor:
    """ReLU, dropout …: nothing is negative, all of it passes."""
    t = c.get("self", "input")
    if s.is_weight(t) and c.name not in ("abs", "neg", "positive"):
        raise s.refusal("it is applied to a parameter")
    return s.merged(torch.clone, t)


def copied(s: Sums, c: Call) -> Tensor:
    """Also into memory that is there; sums keep their dtype."""
    return s.merged(lambda x: x.clone(memory_format=c.get("memory_format")), c.get("src", "self"))


def filled(s: Sums, c: Call) -> Tensor | None:
    """zero_, fill_: what was there is gone; their relatives make a new tensor."""
    return s.read(c.get("value") or 0.0) if c.in_place else None


def nothing(s: Sums, c: Call) -> None:
    """ones_like …: does not depend on values. Comparisons, places of maxima: nothing that a path may go through."""
    if c.in_place:
        s.scales.pop(key_of(c["self"]), None)


def moved(s: Sums, c: Call) -> Tensor:
    """Moves, copies, joins or leaves out entries: the operation itself. Indices must not depend on data."""
    given = {k: v if isinstance(v, list) else [v] for k, v in c.args.items()}
    if any(t in s.scales for k in INDICES & given.keys() for t in given[k]):
        raise s.refusal(CHOSEN)
    tensors = {id(t): t for k, v in given.items() if k not in INDICES for t in v if isinstance(t, Tensor)}

    def run(*values: Tensor) -> Tensor:
        sums: dict[int, Any] = dict(zip(tensors, values, strict=True))
        changed: dict[str, Any] = {
            k: [sums.get(id(t), t) for t in v] if isinstance(v, list) else sums.get(id(v), v) for k, v in c.args.items()
        }
        if c.in_place:
            changed["self"] = changed["self"].clone()
        out: Tensor = c.function(**changed)
        return out

    return s.merged(run, *tensors.values())


def padded(s: Sums, c: Call) -> Tensor:
    if c["value"] != 0:
        raise s.refusal("it pads with a constant other than 0")
    return moved(s, c)


def embedding(s: Sums, c: Call) -> Tensor:
    """Σ over the vocabulary, an all-ones one-hot vector, where tokens are an input; else the rows that are named."""
    table, tokens = c["weight"], c["indices"]
    if tokens not in s.scales:
        return s.merged(lambda t: t[tokens], table)
    return s.multiplied(torch.mul, s.merged(lambda t: t.unsqueeze(-1), tokens), s.merged(lambda t: t.sum(0), table))


# Entry by entry -------------------------------------------------------------------------------------------------------


def added(s: Sums, c: Call) -> Tensor:
    y, alpha = c["other"], c.get("alpha")
    return s.merged(torch.add, c["self"], y if alpha in (None, 1) else s.multiplied(torch.mul, y, alpha))


def product(s: Sums, c: Call) -> Tensor:
    x, y = c["self"], c["other"]
    if s.is_activation(x) and s.is_activation(y):
        raise s.refusal(PRODUCT)
    return s.merged(torch.clone, x) if isinstance(y, int) and y == 1 else s.multiplied(torch.mul, x, y)


def divided(s: Sums, c: Call) -> Tensor:
    y = c["other"]
    if y in s.scales or c.get("rounding_mode") is not None:
        raise s.refusal("it divides by an activation or a parameter")
    return s.multiplied(torch.mul, c["self"], s.mark(s.constant(y).reciprocal()))


def clamped(s: Sums, c: Call) -> Tensor:
    """Those that are a ReLU."""
    bounds = [c.get(*names) for names in (("min", "min_val", "threshold"), ("max", "max_val", "value"))]
    numbers = [0.0 if b is None else b for b in bounds]
    if any(isinstance(b, Tensor) or not (b == 0 or math.isinf(b)) for b in numbers):
        raise s.refusal(NOT_HOMOGENEOUS)
    return same(s, c)


def leaky(s: Sums, c: Call) -> Tensor:
    """The larger of the two slopes. In evaluation mode the slope of RReLU is the mean of its bounds."""
    slope = c.get("negative_slope")
    if slope is None:
        if c["training"]:
            raise s.refusal(CHANCE)
        slope = (c["lower"] + c["upper"]) / 2
    x = same(s, c)
    return x if abs(slope) <= 1 else s.multiplied(torch.mul, x, slope)


def prelu(s: Sums, c: Call) -> Tensor:
    return s.multiplied(torch.mul, c["self"], s.merged(lambda slope, one: slope.maximum(one), c["weight"], 1.0))


# Sums -----------------------------------------------------------------------------------------------------------------


def reduced(s: Sums, c: Call) -> Tensor:
    """sum; mean, where each of n counts with (1/n)^p; the largest or smallest, with one path from every entry."""
    if isinstance(c.get("other"), Tensor):
        return added(s, c)
    t, dims, keep = c.get("self", "input"), c.get("dim"), bool(c.get("keepdim"))
    listed = [dims] if isinstance(dims, int) else list(dims or range(t.dim()))
    result = s.merged(lambda x: x.sum(listed, keep) if listed else x.clone(), t)
    return result if c.name != "mean" else s.multiplied(torch.mul, result, 1 / math.prod(t.shape[d] for d in listed))


def windows(s: Sums, c: Call) -> Tensor:
    """Pooling and interpolation: Σ_s |a(o, s)|^p·x(s) for the coefficients a of the operation, which is asked for them.

    a factors over the dimensions: a(o, s) = L(1)(o) · Π_i L(δ(s_i))(o)/L(1)(o), with δ(s_i) the indicator of coordinate
    s_i and L the operation. For a maximum both are indicators of the window, and the sum is over the window.
    """
    name = "self" if "self" in c.args else "input"
    value, dims = c[name], next(int(digit) for digit in c.name if digit.isdigit())
    space, like = value.shape[-dims:], {"dtype": torch.float64, "device": value.device}

    def run(x: Tensor) -> Tensor:
        y = c.run(**{name: x})
        return y if isinstance(y, Tensor) else y[0]  # with the indices of the maxima

    total = run(torch.ones(1, 1, *space, **like))
    for i, n in enumerate(space):
        one_hot = torch.eye(n, **like).reshape([n, 1] + [n if j == i else 1 for j in range(dims)])
        share = run(one_hot.expand(n, 1, *space).contiguous()) / total
        line: list[Any] = [slice(None), 0] + [slice(None) if j == i else 0 for j in range(dims)]
        along = share[tuple(line)]
        value = s.multiplied(lambda x, a, d=i - dims: (x.movedim(d, -1) @ a).movedim(-1, d), value, along)
    return s.multiplied(torch.mul, value, total[0, 0])


# Layers ---------------------------------------------------------------------------------------------------------------


def _contracted(s: Sums, function: Any, x: Tensor, y: Tensor) -> Tensor:
    """A constant that is contracted with a weight is an input of the network."""
    if s.is_activation(x) and s.is_activation(y):
        raise s.refusal(PRODUCT)
    out = s.multiplied(function, x, y)
    s.given([out] if x not in s.scales or y not in s.scales else [])
    return out


def matrix_product(s: Sums, c: Call) -> Tensor:
    return _contracted(s, torch.matmul, c["self"], c["mat2"])


def convolution(s: Sums, c: Call) -> Tensor:
    """A bias is an edge from ground, which carries 1."""
    options = [c[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    value = _contracted(s, lambda x, w: torch.convolution(x, w, None, *options), c["input"], c["weight"])
    return value if c["bias"] is None else s.merged(torch.add, value, _per_channel(c["bias"], value))


def _per_channel(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape(-1, *[1] * (like.dim() - 2))


def batch_norm(s: Sums, c: Call) -> tuple[Tensor, ...]:
    """(x + |mean|^p)·|γ|^p/σ^p + |β|^p, σ² = running variance + ε."""
    x, mean, var = c["input"], c["running_mean"], c["running_var"]
    if c.get("training") or mean is None or var is None:
        raise s.refusal("it has no running statistics, so its scale depends on the batch")
    value = s.merged(torch.add, x, _per_channel(mean, x))
    gain = s.mark((var.double() + c.get("eps", "epsilon")).pow(-s.p / 2))
    gain = gain if c["weight"] is None else s.multiplied(torch.mul, gain, c["weight"])
    value = s.multiplied(torch.mul, value, _per_channel(gain, x))
    value = value if c["bias"] is None else s.merged(torch.add, value, _per_channel(c["bias"], x))
    return value, *[value.new_zeros(0)] * (c.results - 1)
