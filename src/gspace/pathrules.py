"""What each operation does to a sum over paths: one rule per operation, under the names of `operations.FUNCTIONS`.

Every parameter w becomes |w|^p, and every operation the sum of the paths that run through it. Nothing is negative, so
a ReLU passes all of it. An operation with fixed coefficients a (average pooling, interpolation, a constant factor) is
made of edges of weight a, which enter as |a|^p. One that picks one of several values (max pooling, `maximum`) has a
path from each of them, so it sums. BatchNorm is the affine map of evaluation mode, γ/σ·(x − mean) + β, and has the
three edges it is written with: −mean (fixed, from ground), γ/σ and β (from ground). A leaky slope a counts as
max(1, |a|), a token as the sum of all tokens. All of this commutes with rescaling. What is not positively homogeneous
is refused.

Numbers: a `Power` is values · 2^exponent with one exponent per tensor, renormalized behind every layer, so that any
depth fits into float32. The exponent is a constant to autograd, which is right: the product does not depend on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gspace.graph.arithmetic import NOT_HOMOGENEOUS, flatten_arguments
from gspace.graph.operations import CASTS, COPIES, LIKE, POINTWISE


class PathError(ValueError):
    """A network has no path sum, or its input is not known; the message names the place and the way out."""


@dataclass(frozen=True)
class Power:
    """|t|^p of a tensor, or a sum of such: values · 2^exponent, nowhere negative.

    Attributes:
        values: Any shape, largest entry near 1.
        exponent: A scalar.
        activation: Depends on the input of the network; otherwise it is a parameter, moved about.
    """

    values: Tensor
    exponent: Tensor
    activation: bool = True

    def renormalized(self) -> "Power":
        """The same number with its largest entry in [½, 1)."""
        shift = _exponent(self.values)
        return replace(self, values=torch.ldexp(self.values, -shift), exponent=self.exponent + shift)

    def at(self, exponent: Tensor) -> Tensor:
        """The values that go with another exponent."""
        return torch.ldexp(self.values, self.exponent - exponent)


def _exponent(values: Tensor) -> Tensor:
    if not values.numel():
        return values.new_zeros(())
    return torch.frexp(values.detach().amax()).exponent.to(values.dtype).clamp(min=-100)


def power(tensor: Tensor, p: float) -> Power:
    """|t|^p, scaled before it is raised: squares of float32 weights neither overflow nor vanish."""
    size = tensor.abs()
    shift = _exponent(size)
    return Power(torch.ldexp(size, -shift).pow(p), p * shift, activation=False)


@dataclass(frozen=True)
class Call:
    """One operation of the graph, about to be summed over paths.

    Attributes:
        p: The exponent.
        name: Its canonical name, as in `operations.FUNCTIONS`.
        where: The node or module path that a refusal names.
        run: The operation itself.
        raised: Raises a constant (tensor or number) to |·|^p.
    """

    p: float
    name: str
    where: str
    run: Callable[..., Any]
    raised: Callable[[Any], Power]

    def refuse(self, reason: str) -> PathError:
        return PathError(
            f"no sum over paths: {self.where} ({self.name}): {reason}.\n"
            "Only positively homogeneous operations pass values along paths: replace this one, or measure the parts "
            "before and behind it."
        )


Rule = Callable[..., Any]
CHOSEN = object()  # stands for the indices of maxima, which are not those of the pass of ones


class Extremum(NamedTuple):
    """What `max` and `min` over a dimension return."""

    values: Power
    indices: object


def common_exponent(*powers: Power) -> Tensor:
    return torch.stack([x.exponent for x in powers]).amax()


def _wrapped(values: Any, exponent: Tensor, activation: bool) -> Any:
    if isinstance(values, Tensor):
        return Power(values, exponent, activation)
    return type(values)([_wrapped(v, exponent, activation) for v in values])


def same(call: Call, x: Any, *args: Any, **kwargs: Any) -> Power:
    """ReLU, abs, dropout …: nothing is negative, all of it passes."""
    if not x.activation:
        raise call.refuse("applied to a parameter")
    return x


def copied(call: Call, x: Power, *args: Any, **kwargs: Any) -> Power:
    return x


def moved(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Moves, copies, joins or adds up entries: the operation itself, on values with one exponent.

    A constant among them is a path from ground of its own, such as a column of ones beside activations.
    """
    joins = call.name in _JOINS

    def constant(t: Tensor) -> Tensor | Power:
        if not (t.is_floating_point() or joins):  # indices, masks
            return t
        return call.raised(t) if bool(t.any()) else call.raised(t).values  # zeros have no exponent

    args, kwargs = pytree.tree_map_only(Tensor, constant, (args, kwargs))
    powers = [x for x in flatten_arguments([args, kwargs]) if isinstance(x, Power)]
    exponent = common_exponent(*powers)
    # Contiguous: the rules order memory in their own way, and a `view` of the model must be one of these values too.
    plain_args, plain_kwargs = pytree.tree_map_only(Power, lambda x: x.at(exponent).contiguous(), (args, kwargs))
    return _wrapped(call.run(*plain_args, **plain_kwargs), exponent, any(x.activation for x in powers))


def read(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Sizes, `zeros_like` …: what does not depend on the values."""
    plain_args, plain_kwargs = pytree.tree_map_only(Power, lambda x: x.values, (args, kwargs))
    return call.run(*plain_args, **plain_kwargs)


def attribute(call: Call, x: Power, name: str) -> Any:
    return moved(call, x, name) if name in ("T", "mT") else read(call, x, name) if name != "data" else x


def add(call: Call, x: Any, y: Any, alpha: Any = 1, **kwargs: Any) -> Any:
    x, y = call.raised(x), call.raised(y)
    y = y if alpha == 1 else product(call, y, alpha)
    exponent = common_exponent(x, y)
    return Power(x.at(exponent) + y.at(exponent), exponent, x.activation or y.activation).renormalized()


def product(call: Call, x: Any, y: Any, *args: Any, **kwargs: Any) -> Power:
    x, y = call.raised(x), call.raised(y)
    if x.activation and y.activation:
        raise call.refuse("it multiplies two activations")
    return Power(x.values * y.values, x.exponent + y.exponent, x.activation or y.activation).renormalized()


def divide(call: Call, x: Any, y: Any, *args: Any, **kwargs: Any) -> Power:
    if isinstance(y, Power) or kwargs.get("rounding_mode") is not None:
        raise call.refuse("it divides by an activation or a parameter")
    return product(call, x, 1 / y)


def matmul(call: Call, x: Any, y: Any) -> Power:
    x, y = call.raised(x), call.raised(y)
    if x.activation and y.activation:
        raise call.refuse("it multiplies two activations")
    return Power(x.values @ y.values, x.exponent + y.exponent, x.activation or y.activation).renormalized()


def addmm(call: Call, x: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Power:
    return add(call, product(call, matmul(call, mat1, mat2), alpha), product(call, x, beta))


def weighted(call: Call, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Power:
    """Linear layers and convolutions; a bias is an edge from ground, which carries 1, and so is a constant input."""
    x = x if isinstance(x, Power) else replace(call.raised(x), activation=True)
    weight = call.raised(weight)
    if not x.activation or weight.activation:
        raise call.refuse("its weight is an activation")
    exponent = x.exponent + weight.exponent
    if bias is None:
        return Power(call.run(x.values, weight.values, None, *args, **kwargs), exponent).renormalized()
    bias = call.raised(bias)
    common = torch.maximum(exponent, bias.exponent)
    values = torch.ldexp(x.values, exponent - common)
    return Power(call.run(values, weight.values, bias.at(common), *args, **kwargs), common).renormalized()


def _along_channels(t: Tensor, x: Power) -> Tensor:
    return t.reshape([1, x.values.shape[1]] + [1] * (x.values.dim() - 2))


def batch_norm(
    call: Call,
    x: Power,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *args: Any,
    **kwargs: Any,
) -> Power:
    """(x + |mean|^p)·|γ|^p/σ^p + |β|^p, σ² = running variance + ε."""
    if training or mean is None or var is None:
        raise call.refuse("it has no running statistics, so its scale depends on the batch")

    def per_channel(t: Any) -> Power:
        t = call.raised(t)
        return replace(t, values=_along_channels(t.values, x))

    result = add(call, x, per_channel(mean))
    result = product(call, result, per_channel((var.double() + eps).rsqrt().to(x.values.dtype)))
    result = result if weight is None else product(call, result, per_channel(weight))
    return result if bias is None else add(call, result, per_channel(bias))


def functional_batch_norm(
    call: Call,
    x: Power,
    mean: Any,
    var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Power:
    return batch_norm(call, x, weight, bias, mean, var, training, momentum, eps)


def windows(call: Call, x: Power, *args: Any, **kwargs: Any) -> Any:
    """Pooling and interpolation: Σ_s |a(o, s)|^p·x(s) for the coefficients a of the operation, which is asked for them.

    a factors over the dimensions: a(o, s) = L(1)(o) · Π_i L(δ(s_i))(o)/L(1)(o), with δ(s_i) the indicator of coordinate
    s_i and L the operation. For a maximum both are indicators of the window, and the sum is over the window.
    """

    pair = False  # with the indices of the maxima

    def run(t: Tensor) -> Tensor:
        nonlocal pair
        y = call.run(t, *args, **kwargs)
        pair = not isinstance(y, Tensor)
        return y[0] if pair else y

    values = x.values
    dims = next((int(c) for c in call.name if c.isdigit()), values.dim() - 2)
    space = values.shape[-dims:]
    with torch.no_grad():
        total = run(values.new_ones(1, 1, *space))
        factors = []
        for i, n in enumerate(space):
            one_hot = torch.eye(n, dtype=values.dtype, device=values.device)
            one_hot = one_hot.reshape([n, 1] + [n if j == i else 1 for j in range(dims)])
            share = run(one_hot.expand(n, 1, *space).contiguous()) / total
            line: list[Any] = [slice(None), 0] + [slice(None) if j == i else 0 for j in range(dims)]
            factors.append(share[tuple(line)].abs().pow(call.p))
    for i, factor in enumerate(factors):
        values = torch.tensordot(values, factor, dims=([i - dims], [0])).movedim(-1, i - dims)
    result = replace(x, values=values * total.abs().pow(call.p)).renormalized()
    return (result, CHOSEN) if pair else result


def mean(call: Call, x: Power, *args: Any, **kwargs: Any) -> Power:
    """Every entry of n counts with (1/n)^p."""
    values = call.run(x.values, *args, **kwargs)
    n = x.values.numel() / values.numel()
    return replace(x, values=values * n ** (1 - call.p)).renormalized()


def expand_as(call: Call, x: Any, other: Any) -> Power:
    """To the sizes of another value, which has no other part in it."""
    x = x if isinstance(x, Power) else call.raised(x)
    return replace(x, values=x.values.expand_as(other.values if isinstance(other, Power) else other))


def total(call: Call, x: Power, *args: Any, **kwargs: Any) -> Power:
    return moved(call, x, *args, **kwargs).renormalized()


def largest(call: Call, x: Power, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """amax, max …: one path from every entry; of two tensors, from both."""
    if isinstance(dim, (Power, Tensor)) or "other" in kwargs:
        return add(call, x, kwargs.get("other", dim))
    dim = kwargs.get("axis", dim)
    values = x.values.sum() if dim is None else x.values.sum(dim, keepdim)
    result = replace(x, values=values).renormalized()
    return Extremum(result, CHOSEN) if call.name in ("max", "min") and dim is not None else result


def leaky(call: Call, x: Power, slope: Any = 0.01, *args: Any, **kwargs: Any) -> Power:
    """leaky_relu, prelu: the larger of the two slopes, per channel or one for all."""
    slope = call.raised(kwargs.get("negative_slope", slope))
    size = slope.at(torch.zeros_like(slope.exponent)).clamp(min=1)
    if size.numel() > 1:
        size = _along_channels(size, x)
    return replace(x, values=x.values * size)


def rrelu(call: Call, x: Power, lower: float = 1 / 8, upper: float = 1 / 3, *args: Any, **kwargs: Any) -> Power:
    """In evaluation mode its slope is the mean of the two."""
    return leaky(call, x, (lower + upper) / 2)


def embedding(call: Call, a: Any, b: Any, *args: Any, max_norm: Any = None, **kwargs: Any) -> Power:
    """Σ over the vocabulary: an all-ones one-hot vector."""
    tokens, weight = (a, b) if isinstance(a, Power) and a.activation else (b, a)
    if max_norm is not None or (isinstance(weight, Power) and weight.activation):
        raise call.refuse("its rows are renormalized, or are not a parameter")
    weight = call.raised(weight)
    rows = weight.values.sum(0)
    return Power(tokens.values.unsqueeze(-1) * rows, tokens.exponent + weight.exponent).renormalized()


def threshold(call: Call, x: Power, threshold: Any, value: Any, *args: Any) -> Power:
    if threshold != 0 or value != 0:
        raise call.refuse(NOT_HOMOGENEOUS)
    return same(call, x)


def clamp(call: Call, x: Power, min: Any = None, max: Any = None) -> Power:
    if any(bound is not None and not (isinstance(bound, (int, float)) and bound == 0) for bound in (min, max)):
        raise call.refuse(NOT_HOMOGENEOUS)
    return same(call, x)


def compare(call: Call, *args: Any, **kwargs: Any) -> Power:
    raise call.refuse("which entries are chosen depends on the input")


def masked(call: Call, *args: Any, **kwargs: Any) -> Power:
    """masked_fill, where: the paths through the other entries are left out."""
    values = [*args, *kwargs.values()]
    if sum(isinstance(x, Power) for x in values) != 1:
        raise call.refuse("which entries are chosen depends on the input")
    if not any(isinstance(x, (int, float)) and x == 0 for x in values):
        raise call.refuse("entries are replaced by something other than 0")
    return moved(call, *args, **kwargs)


def pad(call: Call, x: Power, *args: Any, **kwargs: Any) -> Power:
    value = kwargs.get(
        "value", args[2] if len(args) > 2 else args[1] if call.name == "constant_pad_nd" and len(args) > 1 else None
    )
    if value not in (None, 0):
        raise call.refuse("it pads with a constant other than 0")
    return moved(call, x, *args, **kwargs)


_JOINS = ("cat", "concat", "concatenate", "stack")
_MOVES = (
    "pixel_shuffle pixel_unshuffle flatten unflatten view reshape _unsafe_view permute movedim unsqueeze transpose t "
    "swapaxes squeeze expand broadcast_to split split_with_sizes chunk tensor_split unbind select narrow slice getitem "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d flip roll channel_shuffle repeat index_select"
)

RULES: dict[str, Rule] = {
    # native_dropout returns a pair, and is in no graph of evaluation mode.
    **dict.fromkeys([name for name in POINTWISE.split() if name != "native_dropout"], same),
    **dict.fromkeys([*COPIES.split(), *CASTS.split()], copied),
    **dict.fromkeys([*LIKE.split(), "size", "sym_size", "dim"], read),
    **dict.fromkeys([*_MOVES.split(), *_JOINS], moved),
    **dict.fromkeys("add sub maximum minimum".split(), add),
    **dict.fromkeys("mul multiply".split(), product),
    **dict.fromkeys("div truediv divide".split(), divide),
    **dict.fromkeys("amax amin max min".split(), largest),
    **dict.fromkeys("clamp clip clamp_min".split(), clamp),
    **dict.fromkeys("leaky_relu prelu".split(), leaky),
    **dict.fromkeys("pad constant_pad_nd".split(), pad),
    **dict.fromkeys(["linear", *(f"conv{t}{d}d" for d in (1, 2, 3) for t in ("", "_transpose"))], weighted),
    **{f"{a}{kind}_pool{d}d": windows for d in (1, 2, 3) for kind in ("max", "avg") for a in ("", "adaptive_")},
    **{f"max_pool{d}d_with_indices": windows for d in (1, 2, 3)},
    "interpolate": windows,
    "mean": mean,
    "sum": total,
    "expand_as": expand_as,
    **dict.fromkeys("matmul mm bmm".split(), matmul),
    "addmm": addmm,
    **dict.fromkeys("gt lt ge le eq ne".split(), compare),
    **dict.fromkeys("masked_fill where".split(), masked),
    "embedding": embedding,
    "batch_norm": batch_norm,
    "functional_batch_norm": functional_batch_norm,
    "threshold": threshold,
    "rrelu": rrelu,
    "getattr": attribute,
    "_assert_tensor_metadata": lambda call, *args, **kwargs: None,
}
