"""What layers and norms do to scales: operations that contract with weights, or divide a scale out.

The rules are as in `rules.py`.
"""

import torch
from torch import Tensor

from gspace.analysis.follow import Follow, Nodes, Norm
from gspace.analysis.memory import Raw, key_of
from gspace.analysis.run import Call
from gspace.analysis.weights import ZERO

# Layers ---------------------------------------------------------------------------------------------------------------


def matrix_product(s: Follow, c: Call) -> Nodes:
    """mm, bmm, and with a bias addmm."""
    x, y = (c["mat1"], c["mat2"]) if c.name == "addmm" else (c["self"], c["mat2"])
    a, b = s.content(x), s.content(y)
    if c.name == "bmm":
        return s.contract(a, b)
    result = s.contract(_batch_of_one(a), _batch_of_one(b))[0]
    return s.tied(result, s.ids(c["self"])) if c.name == "addmm" and c["beta"] != 0 else result


def _batch_of_one(content: Tensor | Raw) -> Tensor | Raw:
    if isinstance(content, Tensor):
        return content[None]
    return content._replace(sizes=(1, *content.sizes), strides=(0, *content.strides))


def convolution(s: Follow, c: Call) -> Nodes:
    """View the weight as (group, out, in, taps), transposed (group, in, out, taps)."""
    x, groups, transposed = c["input"], c["groups"], c["transposed"]
    tail = s.reduce(s.ids(x), [0, *range(2, x.dim())]).reshape(groups, -1)
    weight = s.content(c["weight"])
    taps = [1] * (x.dim() - 2)
    tail = tail.reshape(groups, -1, 1, *taps) if transposed else tail.reshape(groups, 1, -1, *taps)
    if isinstance(weight, Raw):
        rows, step = weight.sizes[0] // groups, weight.strides[0]
        weight = weight._replace(
            sizes=(groups, rows, *weight.sizes[1:]),
            strides=(rows * step if groups > 1 else 0, step, *weight.strides[1:]),
        )
        shape = (groups, 1, weight.sizes[2], *taps) if transposed else (groups, rows, 1, *taps)
        head = s.weights.edges(weight, tail, shape, groups=groups)
    else:
        head = s.equations.sum(1, weight.unflatten(0, (groups, -1)), 1, tail)
        head = s.reduce(head, [1 if transposed else 2, *range(3, head.dim())])
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
    """Rows of x, sorted by expert, times each expert's matrix; where one gets no row, all read the same units."""
    x, ends = s.ids(c["self"]), c["offs"].tolist()
    parts = [x[i:j] for i, j in zip([0, *ends], ends, strict=False)]
    if not all(len(p) for p in parts):
        parts = [x] * len(parts)
    rows = torch.stack([s.reduce(p, 0) for p in parts])
    result = s.contract(rows, s.content(c["mat2"]))[:, 0]
    which = torch.searchsorted(torch.tensor(ends), torch.arange(len(x)), right=True)
    return result[which.clamp(max=len(ends) - 1)]


def attention(s: Follow, c: Call) -> list[Nodes]:
    """Q and K cancel in every product; the result has the scale of V. Grouped heads share K and V."""
    q, k, v = (s.ids(c[name]) for name in ("query", "key", "value"))
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    mask = c.get("attn_mask", "attn_bias")
    if isinstance(mask, Tensor):
        s.pin(s.ids(mask), "inside of a softmax")
    products = s.equations.sum(1, s.reduce(q, -2), 1, s.reduce(k, -2))
    s.pin(products, "queries and keys meet in a softmax: one scale for both", "scaled_dot_product_attention")
    return [s.reduce(v, -2)] + [None] * 8


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
    v, g = s.ids(c["v"]), s.ids(c["g"])
    norm = s.reduce(v, [d for d in range(v.dim()) if d != c["dim"] % v.dim()])
    v = s.equations.find(v)
    return [s.equations.sum(1, s.equations.sum(1, v, -1, norm), 1, g), norm]
