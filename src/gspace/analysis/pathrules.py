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

from gspace.analysis.follow import Call
from gspace.analysis.record import CHANCE, CHOSEN, SLOT, Kind, Record, Value, opaque
from gspace.analysis.sums import Slot

NOT_HOMOGENEOUS = "it is not positively homogeneous"
UNKNOWN = "no rule is known for it"
PRODUCT = "it multiplies two activations"
INDICES = frozenset("index indices mask condition dim size sizes".split())

LAYER = (Kind.ACTIVATION, Kind.WEIGHT)
Values = list[Value | None]


def same(record: Record, call: Call) -> Values:
    """ReLU, dropout …: nothing is negative, all of it passes."""
    x = record.read(call.get("self", "input"))
    if x.kind is Kind.WEIGHT and call.name not in ("abs", "neg", "positive"):
        raise record.refusal("it is applied to a parameter")
    return [x]


def copied(record: Record, call: Call) -> Value:
    """Also into memory that is there, expanded to its sizes."""
    t, into = call.get("src", "self"), call["self"]
    x = record.read(t)
    if not isinstance(t, Tensor) or t.shape == into.shape:
        return x
    return record.move("aten.expand.default", x, self=SLOT, size=list(into.shape))


def filled(record: Record, call: Call) -> Value | None:
    """zero_, fill_: what was there is gone; their relatives make a new tensor."""
    if call.name not in ("zero", "fill"):
        return None
    value = call.get("value")
    x = record.read(0.0 if value is None else value)
    return record.move("aten.expand.default", x, self=SLOT, size=list(call["self"].shape))


def made(record: Record, call: Call) -> None:
    """ones_like …: what does not depend on the values."""


def chosen(record: Record, call: Call) -> Values:
    """Comparisons, places of maxima: nothing a path may go through."""
    return [opaque(CHOSEN)] * 4


def moved(record: Record, call: Call) -> Value:
    """Moves, copies, joins or leaves out entries: the operation itself, on sums."""
    inputs: list[Value] = []

    def slot(t: Any) -> Any:
        if isinstance(t, list):
            return [slot(v) for v in t]
        if not isinstance(t, Tensor):
            return t
        inputs.append(record.read(t))
        return Slot(len(inputs) - 1)

    args = {name: _fixed(record, t) if name in INDICES else slot(t) for name, t in call.args.items()}
    if call.get("accumulate"):
        raise record.refusal(UNKNOWN)
    return record.step("moved", *inputs, constants=(str(call.function), args))


def _fixed(record: Record, value: Any) -> Any:
    """An index or mask, which must not depend on the input."""
    if isinstance(value, list):
        return [_fixed(record, v) for v in value]
    if not isinstance(value, Tensor):
        return value
    if _is_data(record, value):
        raise record.refusal(CHOSEN)
    return value.clone()


def _is_data(record: Record, t: Tensor) -> bool:
    known = record.find(t)
    return known is not None and known.kind is not Kind.CONSTANT


def padded(record: Record, call: Call) -> Value:
    if call["value"] != 0:
        raise record.refusal("it pads with a constant other than 0")
    return moved(record, call)


def embedding(record: Record, call: Call) -> Value:
    """Σ over the vocabulary, an all-ones one-hot vector, where tokens are an input; else the rows that are named."""
    if not _is_data(record, call["indices"]):
        return record.move(
            "aten.embedding.default", record.read(call["weight"]), weight=SLOT, indices=call["indices"].clone()
        )
    rows = record.step("sum", record.read(call["weight"]), constants=((0,), False))
    shape = (*call["indices"].shape, 1)
    column = record.move("reshaped", record.read(call["indices"]), t=SLOT, order=(), sizes=shape, back=())
    return record.product("multiply", column, rows)


# Entry by entry -------------------------------------------------------------------------------------------------------


def added(record: Record, call: Call) -> Value:
    x, y = call["self"], call["other"]
    alpha = call.get("alpha")
    scaled = x if call.name == "rsub" else y
    values = {id(t): record.read(t) for t in (x, y)}
    if alpha not in (None, 1):
        values[id(scaled)] = record.product("multiply", values[id(scaled)], record.constant(alpha))
    if not isinstance(y, Tensor) and y == 0:
        return values[id(x)]
    return record.step("add", values[id(x)], values[id(y)])


def product(record: Record, call: Call) -> Value:
    return record.product("multiply", record.read(call["self"]), record.read(call["other"]))


def divided(record: Record, call: Call) -> Value:
    x, y = record.read(call["self"]), record.read(call["other"])
    if y.kind is not Kind.CONSTANT or call.get("rounding_mode") is not None:
        raise record.refusal("it divides by an activation or a parameter")
    return record.product("multiply", x, record.step("inverse", y))


def masked(record: Record, call: Call) -> Value:
    """masked_fill, where: each entry has the paths of what it is taken from."""
    if call.name == "where":
        x, y = call["self"], call["other"]
    else:
        x, y = call["value"], call["self"]
    mask = _fixed(record, call.get("condition", "mask"))
    return record.move("aten.where.self", record.read(x), record.read(y), condition=mask, self=SLOT, other=Slot(1))


def clamped(record: Record, call: Call) -> Values:
    """Those that are a ReLU."""
    bounds = [call.get(*names) for names in (("min", "min_val", "threshold"), ("max", "max_val", "value"))]
    numbers = [0.0 if b is None else b for b in bounds]
    if any(isinstance(b, Tensor) or not (b == 0 or math.isinf(b)) for b in numbers):
        raise record.refusal(NOT_HOMOGENEOUS)
    return same(record, call)


def leaky(record: Record, call: Call) -> Value:
    """The larger of the two slopes. In evaluation mode the slope of RReLU is the mean of its bounds."""
    slope = call.get("negative_slope")
    if slope is None:
        if call["training"]:
            raise record.refusal(CHANCE)
        slope = (call["lower"] + call["upper"]) / 2
    (x,) = same(record, call)
    assert x is not None
    return x if abs(slope) <= 1 else record.product("multiply", x, record.constant(slope))


def prelu(record: Record, call: Call) -> Value:
    slope = record.step("at_least_one", record.read(call["weight"]))
    return record.product("multiply", record.read(call["self"]), slope)


# Sums -----------------------------------------------------------------------------------------------------------------


def reduced(record: Record, call: Call) -> Values | Value:
    """sum; mean, where each of n counts with (1/n)^p; the largest or smallest, with one path from every entry."""
    t = call.get("self", "input")
    if isinstance(call.get("other"), Tensor):
        return added(record, call)
    dims, keep = call.get("dim"), bool(call.get("keepdim"))
    listed = [dims] if isinstance(dims, int) else list(dims or range(t.dim()))
    result = record.step("sum", record.read(t), constants=(tuple(listed), keep))
    if call.name == "mean":
        n = math.prod(t.shape[d] for d in listed)
        result = record.step("multiply", result, record.constant(1 / n))
    return [result, opaque(CHOSEN)]


def windows(record: Record, call: Call) -> Values:
    """Pooling and interpolation: Σ_s |a(o, s)|^p·x(s) for the coefficients a of the operation, which is asked for them.

    a factors over the dimensions: a(o, s) = L(1)(o) · Π_i L(δ(s_i))(o)/L(1)(o), with δ(s_i) the indicator of coordinate
    s_i and L the operation. For a maximum both are indicators of the window, and the sum is over the window.
    """
    name, t = ("self", call["self"]) if "self" in call.args else ("input", call["input"])
    dims = next(int(c) for c in call.name if c.isdigit())
    space = t.shape[-dims:]

    def run(x: Tensor) -> Tensor:
        y = call.run(**{name: x})
        return y if isinstance(y, Tensor) else y[0]  # with the indices of the maxima

    ones = torch.ones(1, 1, *space, dtype=torch.float64, device=t.device)
    total = run(ones)
    value = record.read(t)
    for i, n in enumerate(space):
        one_hot = torch.eye(n, dtype=torch.float64, device=t.device)
        one_hot = one_hot.reshape([n, 1] + [n if j == i else 1 for j in range(dims)])
        share = run(one_hot.expand(n, 1, *space).contiguous()) / total
        line: list[Any] = [slice(None), 0] + [slice(None) if j == i else 0 for j in range(dims)]
        last = list(range(t.dim()))
        last.append(last.pop(i - dims))
        back = sorted(range(t.dim()), key=lambda d: last[d])
        value = record.move("aten.permute.default", value, self=SLOT, dims=last)
        value = record.step("matmul", value, record.constant(share[tuple(line)]))
        value = record.move("aten.permute.default", value, self=SLOT, dims=back)
    value = record.step("multiply", value, record.constant(total[0, 0]))
    return [value, opaque(CHOSEN)]


# Layers ---------------------------------------------------------------------------------------------------------------


def matrix_product(record: Record, call: Call) -> Value:
    """With `add` in its name, what is added is the first argument."""
    adds = "add" in call.name
    left = call.get("mat1", "batch1", "mat") if adds else call["self"]
    x, y = record.read(left), record.read(call.get("mat2", "batch2", "vec", "tensor", "other"))
    alpha, beta = (call["alpha"], call["beta"]) if adds else (1, 1)
    if call.name in ("mm", "addmm") and len(left) == alpha == beta == 1 and (x.kind, y.kind) == LAYER:
        return record.step("row", x, y, *([record.read(call["self"])] if adds else []), layers=1)
    value = record.product("matmul", x, y)
    value = value if alpha == 1 else record.product("multiply", value, record.constant(alpha))
    if not adds:
        return value
    b = record.read(call["self"])
    return record.step("add", value, b if beta == 1 else record.product("multiply", b, record.constant(beta)))


def linear(record: Record, call: Call) -> Value:
    turned = record.move("aten.t.default", record.read(call["weight"]), self=SLOT)
    value = record.product("matmul", record.read(call.get("input", "self")), turned)
    return value if call.get("bias") is None else record.step("add", value, record.read(call["bias"]))


def convolution(record: Record, call: Call) -> Value:
    """A bias is an edge from ground, which carries 1."""
    dims = call["weight"].dim() - 2
    transposed, output_padding = bool(call.get("transposed")), list(call.get("output_padding") or [0])
    options = [*(list(call[name]) for name in ("stride", "padding", "dilation")), output_padding]
    stride, padding, dilation, more = (o * dims if len(o) == 1 else o for o in options)
    x, w = record.read(call.get("input", "self")), record.read(call["weight"])
    value = record.product("convolve", x, w, stride, padding, dilation, transposed, more, call["groups"])
    if call.get("bias") is None:
        return value
    return record.step("add", value, _per_channel(record, record.read(call["bias"]), dims))


def _per_channel(record: Record, x: Value, dims: int) -> Value:
    """A vector over the channels, which `dims` dimensions follow."""
    return record.move("reshaped", x, t=SLOT, order=(), sizes=(-1, *[1] * dims), back=()) if dims else x


def batch_norm(record: Record, call: Call) -> Values:
    """(x + |mean|^p)·|γ|^p/σ^p + |β|^p, σ² = running variance + ε."""
    mean, var, dims = call["running_mean"], call["running_var"], call["input"].dim() - 2
    if call.get("training") or mean is None or var is None:
        raise record.refusal("it has no running statistics, so its scale depends on the batch")

    def per_channel(t: Tensor) -> Value:
        return _per_channel(record, record.read(t), dims)

    deviation = record.step("deviation", constants=(record.source(var), call["eps"]))
    value = record.step("add", record.read(call["input"]), per_channel(mean))
    value = record.product("multiply", value, _per_channel(record, deviation, dims))
    if call["weight"] is not None:
        value = record.product("multiply", value, per_channel(call["weight"]))
    return [value if call["bias"] is None else record.step("add", value, per_channel(call["bias"]))]
