"""What each operation does to a sum over paths: one rule per row of the table in `operations`.

Every parameter w becomes |w|^p, and every operation the sum of the paths that run through it. Nothing is negative, so
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

from gspace.analysis.run import Call
from gspace.analysis.sums import CHANCE, CHOSEN, Power, Sums, merged, multiplied

NOT_HOMOGENEOUS = "it is not positively homogeneous"
UNKNOWN = "no rule is known for it"
PRODUCT = "it multiplies two activations"
INDICES = frozenset("index indices mask condition dim size sizes".split())
Powers = list[Power | None]


def same(s: Sums, c: Call) -> Powers:
    """ReLU, dropout …: nothing is negative, all of it passes."""
    t = c.get("self", "input")
    if s.is_weight(t) and c.name not in ("abs", "neg", "positive"):
        raise s.refusal("it is applied to a parameter")
    return [s.read(t)]


def copied(s: Sums, c: Call) -> Power:
    """Also into memory that is there."""
    return s.read(c.get("src", "self"))


def filled(s: Sums, c: Call) -> Power | None:
    """zero_, fill_: what was there is gone; their relatives make a new tensor."""
    return s.read(c.get("value") or 0.0) if c.name in ("zero", "fill") else None


def nothing(s: Sums, c: Call) -> None:
    """ones_like …: does not depend on values. Comparisons, places of maxima: nothing that a path may go through."""


def moved(s: Sums, c: Call) -> Power:
    """Moves, copies, joins or leaves out entries: the operation itself, on sums. Indices must not depend on data."""
    tensors: list[Any] = []
    for name, value in c.args.items():
        parts = [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
        if name not in INDICES:
            tensors += parts
        elif any(t in s.memory for t in parts):
            raise s.refusal(CHOSEN)
    if c.get("accumulate"):
        raise s.refusal(UNKNOWN)

    def run(*values: Tensor) -> Tensor:
        sums = {id(t): value.clone() if c.in_place else value for t, value in zip(tensors, values, strict=True)}
        changed = {k: [sums.get(id(t), t) for t in v] if isinstance(v, list) else sums.get(id(v), v)
                   for k, v in c.args.items()}  # fmt: skip
        out: Tensor = c.function(**changed)
        return out

    return merged(run, *map(s.read, tensors))


def padded(s: Sums, c: Call) -> Power:
    if c["value"] != 0:
        raise s.refusal("it pads with a constant other than 0")
    return moved(s, c)


def embedding(s: Sums, c: Call) -> Power:
    """Σ over the vocabulary, an all-ones one-hot vector, where tokens are an input; else the rows that are named."""
    table, tokens = s.read(c["weight"]), c["indices"]
    if tokens not in s.memory:
        return merged(lambda t: t[tokens], table)
    return multiplied(torch.mul, s.read(tokens.unsqueeze(-1)), table._replace(values=table.values.sum(0)))


# Entry by entry -------------------------------------------------------------------------------------------------------


def added(s: Sums, c: Call) -> Power:
    x, y, alpha = c["self"], c["other"], c.get("alpha")
    a, b = s.read(x), s.read(y)
    if alpha not in (None, 1):
        factor = s.constant(alpha)
        a, b = (multiplied(torch.mul, a, factor), b) if c.name == "rsub" else (a, multiplied(torch.mul, b, factor))
    return merged(torch.add, a, b)


def product(s: Sums, c: Call) -> Power:
    x, y = c["self"], c["other"]
    if s.is_activation(x) and s.is_activation(y):
        raise s.refusal(PRODUCT)
    return multiplied(torch.mul, s.read(x), s.read(y))


def divided(s: Sums, c: Call) -> Power:
    y = c["other"]
    if s.is_activation(y) or s.is_weight(y) or c.get("rounding_mode") is not None:
        raise s.refusal("it divides by an activation or a parameter")
    return multiplied(torch.div, s.read(c["self"]), s.read(y)._replace(exponent=None))


def masked(s: Sums, c: Call) -> Power:
    """masked_fill, where: each entry has the paths of what it is taken from."""
    x, y = (c["self"], c["other"]) if c.name == "where" else (c["value"], c["self"])
    mask = c.get("condition", "mask")
    if mask in s.memory:
        raise s.refusal(CHOSEN)
    return merged(lambda a, b: torch.where(mask, a, b), s.read(x), s.read(y))


def clamped(s: Sums, c: Call) -> Powers:
    """Those that are a ReLU."""
    bounds = [c.get(*names) for names in (("min", "min_val", "threshold"), ("max", "max_val", "value"))]
    numbers = [0.0 if b is None else b for b in bounds]
    if any(isinstance(b, Tensor) or not (b == 0 or math.isinf(b)) for b in numbers):
        raise s.refusal(NOT_HOMOGENEOUS)
    return same(s, c)


def leaky(s: Sums, c: Call) -> Power | None:
    """The larger of the two slopes. In evaluation mode the slope of RReLU is the mean of its bounds."""
    slope = c.get("negative_slope")
    if slope is None:
        if c["training"]:
            raise s.refusal(CHANCE)
        slope = (c["lower"] + c["upper"]) / 2
    (x,) = same(s, c)
    return x if x is None or abs(slope) <= 1 else multiplied(torch.mul, x, s.constant(slope))


def prelu(s: Sums, c: Call) -> Power:
    slope = s.read(c["weight"])
    return multiplied(torch.mul, s.read(c["self"]), Power(slope.at(torch.zeros_like(s.p)).clamp(min=1)))


# Sums -----------------------------------------------------------------------------------------------------------------


def reduced(s: Sums, c: Call) -> Powers | Power:
    """sum; mean, where each of n counts with (1/n)^p; the largest or smallest, with one path from every entry."""
    if isinstance(c.get("other"), Tensor):
        return added(s, c)
    t, dims, keep = c.get("self", "input"), c.get("dim"), bool(c.get("keepdim"))
    listed = [dims] if isinstance(dims, int) else list(dims or range(t.dim()))
    result = merged(lambda x: x.sum(listed, keep) if listed else x, s.read(t))
    if c.name == "mean":
        result = multiplied(torch.mul, result, s.constant(1 / math.prod(t.shape[d] for d in listed)))
    return [result, None]


def windows(s: Sums, c: Call) -> Powers:
    """Pooling and interpolation: Σ_s |a(o, s)|^p·x(s) for the coefficients a of the operation, which is asked for them.

    a factors over the dimensions: a(o, s) = L(1)(o) · Π_i L(δ(s_i))(o)/L(1)(o), with δ(s_i) the indicator of coordinate
    s_i and L the operation. For a maximum both are indicators of the window, and the sum is over the window.
    """
    name, t = ("self", c["self"]) if "self" in c.args else ("input", c["input"])
    dims = next(int(digit) for digit in c.name if digit.isdigit())
    space = t.shape[-dims:]

    def run(x: Tensor) -> Tensor:
        y = c.run(**{name: x})
        return y if isinstance(y, Tensor) else y[0]  # with the indices of the maxima

    total = run(torch.ones(1, 1, *space, dtype=torch.float64, device=t.device))
    value = s.read(t)
    for i, n in enumerate(space):
        one_hot = torch.eye(n, dtype=torch.float64, device=t.device)
        one_hot = one_hot.reshape([n, 1] + [n if j == i else 1 for j in range(dims)])
        share = run(one_hot.expand(n, 1, *space).contiguous()) / total
        line: list[Any] = [slice(None), 0] + [slice(None) if j == i else 0 for j in range(dims)]
        along = s.constant(share[tuple(line)])
        value = multiplied(lambda x, a, d=i - dims: (x.movedim(d, -1) @ a).movedim(-1, d), value, along)
    return [multiplied(torch.mul, value, s.constant(total[0, 0])), None]


# Layers ---------------------------------------------------------------------------------------------------------------


def _contracted(s: Sums, function: Any, x: Tensor, y: Tensor) -> Power:
    """A constant that is contracted with a weight is an input of the network."""
    if s.is_activation(x) and s.is_activation(y):
        raise s.refusal(PRODUCT)
    s.starts = x not in s.memory or y not in s.memory
    return multiplied(function, s.read(x), s.read(y))


def matrix_product(s: Sums, c: Call) -> Power:
    """With `add` in its name, what is added is the first argument."""
    adds = "add" in c.name
    x = c.get("mat1", "batch1", "mat") if adds else c["self"]
    value = _contracted(s, torch.matmul, x, c.get("mat2", "batch2", "vec", "tensor", "other"))
    if not adds:
        return value
    alpha, beta = (s.constant(c[name]) for name in ("alpha", "beta"))
    value = value if c["alpha"] == 1 else multiplied(torch.mul, value, alpha)
    bias = s.read(c["self"])
    return merged(torch.add, value, bias if c["beta"] == 1 else multiplied(torch.mul, bias, beta))


def convolution(s: Sums, c: Call) -> Power:
    """A bias is an edge from ground, which carries 1."""
    options = [c[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    value = _contracted(s, lambda x, w: torch.convolution(x, w, None, *options), c["input"], c["weight"])
    return value if c["bias"] is None else merged(torch.add, value, _per_channel(s.read(c["bias"]), c["input"]))


def _per_channel(x: Power, like: Tensor) -> Power:
    return x._replace(values=x.values.reshape(-1, *[1] * (like.dim() - 2)))


def batch_norm(s: Sums, c: Call) -> Powers:
    """(x + |mean|^p)·|γ|^p/σ^p + |β|^p, σ² = running variance + ε."""
    x, mean, var = c["input"], c["running_mean"], c["running_var"]
    if c.get("training") or mean is None or var is None:
        raise s.refusal("it has no running statistics, so its scale depends on the batch")
    value = merged(torch.add, s.read(x), _per_channel(s.read(mean), x))
    deviation = Power((var.double() + c.get("eps", "epsilon")).pow(-s.p / 2))
    gain = deviation if c["weight"] is None else multiplied(torch.mul, deviation, s.read(c["weight"]))
    value = multiplied(torch.mul, value, _per_channel(gain, x))
    return [value if c["bias"] is None else merged(torch.add, value, _per_channel(s.read(c["bias"]), x))]
