"""Random programs from a small grammar: what people write between the input and the output of a network.

`program(rng)` draws a network on vectors, tokens or images. A block reads `c` channels (the last dimension, of images
the second) and says how many it writes; widths follow from what stands before, so that a block never has to fit.
`rng` is a `random.Random`, hypothesis's among them: what fails is shrunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, TOKENS, SIDE, OUTPUTS = 3, 4, 5, 3
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "none": nn.Identity,
    "dropout": nn.Dropout,
    "relu6": nn.ReLU6,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
}
Kind = Literal["vector", "tokens", "image"]
Built = tuple[nn.Module, int]


class Step(nn.Module):
    """A forward pass as one function of its parts, with channels last."""

    def __init__(self, name: str, kind: Kind, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.name, self.kind, self.function = name, kind, forward
        for key, part in parts.items():
            setattr(self, key, part)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "image":
            return self.function(self, x)
        return self.function(self, x.movedim(1, -1)).movedim(-1, 1)

    def extra_repr(self) -> str:
        return self.name


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


# Layers and norms -----------------------------------------------------------------------------------------------------


def layer(rng: Random, c: int, kind: Kind, o: int | None = None) -> Built:
    """A linear layer or convolution, a norm perhaps, an activation."""
    o = o or rng.randint(1, 6)
    kernel, bias = rng.choice([1, 3]), rng.random() < 0.7
    main: nn.Module = nn.Linear(c, o, bias)
    if kind == "image":
        groups = math.gcd(rng.randint(1, 4), c, o)
        main = nn.Conv2d(c, o, kernel, padding=kernel // 2, groups=groups, bias=bias)
    active = ACTIVATIONS[rng.choice(["relu"] * 5 + list(ACTIVATIONS))]()
    return nn.Sequential(main, norm(rng, o, kind) if rng.random() < 0.4 and o > 1 else nn.Identity(), active), o


def norm(rng: Random, c: int, kind: Kind) -> nn.Module:
    groups = math.gcd(rng.randint(1, 3), c)
    if kind == "image":
        makers: list[Callable[[], nn.Module]] = [
            lambda: nn.BatchNorm2d(c),
            lambda: nn.GroupNorm(groups, c),
            lambda: nn.InstanceNorm2d(c, affine=True),
        ]
    elif kind == "vector":
        makers = [lambda: nn.BatchNorm1d(c), lambda: nn.GroupNorm(groups, c)]  # over one value: its bias alone
    else:
        makers = []
    affine = rng.random() < 0.8
    makers += [
        lambda: Step("layer norm", kind, lambda s, x: s.n(x), n=nn.LayerNorm(c, elementwise_affine=affine)),
        lambda: Step("rms norm", kind, lambda s, x: s.n(x), n=nn.RMSNorm(c, 1e-5, affine)),
        lambda: Step("rms norm by hand", kind, rms, g=parameter(c), eps=1e-5),
    ]
    return rng.choice(makers)()


def rms(s: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + s.eps) * (1 + s.g)


def pool(rng: Random, c: int, kind: Kind) -> Built:
    return (rng.choice([nn.MaxPool2d, nn.AvgPool2d])(3, 1, 1) if kind == "image" else nn.Identity()), c


# Attention ------------------------------------------------------------------------------------------------------------


def attention(rng: Random, c: int, kind: Kind) -> Built:
    """Fused or by hand, heads of keys and values for one or two of queries each, over the second last dimension."""
    shared, heads, d = rng.choice([1, 2]), rng.randint(1, 2), rng.randint(1, 3)
    by_hand, fused, causal = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
    bias, o = rng.random() < 0.5, rng.randint(1, 5)
    wide, narrow = shared * heads * d, heads * d

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).split([wide, narrow, narrow], -1) if fused else (s.q(x), s.k(x), s.v(x))
        q, k, v = (t.unflatten(-1, (-1, d)).movedim(-2, -3) for t in (q, k, v))
        k, v = (t.repeat_interleave(shared, -3) for t in (k, v))
        if by_hand:
            logits = q @ k.mT / math.sqrt(d)
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            y = (logits.masked_fill(mask, -math.inf) if causal else logits).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return s.o(y.movedim(-3, -2).flatten(-2))

    parts = {"qkv": wide + 2 * narrow} if fused else {"q": wide, "k": narrow, "v": narrow}
    layers = {name: nn.Linear(c, n, bias) for name, n in parts.items()}
    if kind == "vector":
        return layer(rng, c, kind)
    return Step(f"attention {shared=} {by_hand=} {fused=}", kind, forward, o=nn.Linear(wide, o), **layers), o


# Gates and products ---------------------------------------------------------------------------------------------------


def gate(rng: Random, c: int, kind: Kind) -> Built:
    o = rng.randint(1, 5)
    name, forward = rng.choice(
        [
            ("product", lambda s, x: s.u(x) * s.v(x)),
            ("product with a ReLU", lambda s, x: s.u(x).relu() * s.v(x)),
            ("sigmoid gate", lambda s, x: s.u(x) * s.v(x).sigmoid()),
            ("SwiGLU", lambda s, x: s.u(x) * F.silu(s.v(x))),
            ("GLU", lambda s, x: F.glu(torch.cat([s.u(x), s.v(x)], -1))),
            ("squared ReLU", lambda s, x: s.u(x).relu().square() + 0 * s.v(x).relu().square()),
            ("maximum", lambda s, x: torch.maximum(s.u(x), s.v(x))),
            ("choice", lambda s, x: torch.where(s.u(x) > 0, s.u(x), 0.5 * s.v(x))),
        ]
    )
    return Step(name, kind, forward, u=nn.Linear(c, o), v=nn.Linear(c, o)), o


def gain(rng: Random, c: int, kind: Kind) -> Built:
    n = rng.choice([1, c])
    name, forward = rng.choice(
        [
            ("gain", lambda s, x: x * s.g),
            ("1 + gain", lambda s, x: x * (1 + s.g)),
            ("branch", lambda s, x: x + s.g * s.u(x).relu()),
            ("bias", lambda s, x: (x + s.g).relu()),
        ]
    )
    parts = {"u": nn.Linear(c, c)} if name == "branch" else {}
    return Step(f"{name} {n=}", kind, forward, g=parameter(n), **parts), c


# Writes, views of parameters, movement --------------------------------------------------------------------------------


def write(rng: Random, c: int, kind: Kind) -> Built:
    o, k = rng.randint(2, 5), 1

    def sliced(s: Any, x: Tensor) -> Tensor:
        h = s.u(x).relu()
        h[..., :k] *= s.g
        return h

    def viewed(s: Any, x: Tensor) -> Tensor:
        h = s.u(x)
        h.transpose(-1, -2)[..., k:, :].add_(s.v(x).transpose(-1, -2)[..., k:, :]).relu_()
        return h + 0 * s.g

    def filled(s: Any, x: Tensor) -> Tensor:
        h = torch.zeros(*x.shape[:-1], o, dtype=x.dtype)
        h[..., :k] = s.u(x)[..., :k]
        h[..., k:].copy_(s.v(x)[..., k:])
        return h.mul_(s.g)

    forward = rng.choice([sliced, viewed, filled])
    parts = {"g": parameter(k)} if forward is sliced else {"g": parameter(o), "v": nn.Linear(c, o)}
    parts["u"] = nn.Linear(c, o)
    return Step(forward.__name__, kind, forward, **parts), o


def view(rng: Random, c: int, kind: Kind) -> Built:
    """One parameter used as several, or turned round."""
    o, i = rng.randint(1, 4), rng.randint(1, 4)
    choices: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
        "rows": (lambda s, x: F.linear(x, s.w[:o]).relu() + F.linear(x, s.w[o:]), (2 * o, c), o),
        "columns": (lambda s, x: F.linear(F.linear(x, s.w[:, :c]).relu(), s.w[:, c:].t()), (i, c + o), o),
        "transposed": (lambda s, x: (x @ s.w).relu(), (c, o), o),
        "there and back": (lambda s, x: F.linear(F.linear(x, s.w).relu(), s.w.t()), (o, c), c),
        "flat": (
            lambda s, x: F.linear(x, s.w[: o * c].view(o, c), s.w[o * c :]).relu(), (o * c + o,), o,
        ),
        "low rank": (lambda s, x: x @ (s.w[:c] @ s.w[c:].t()), (c + o, i), o),
        "einsum": (lambda s, x: torch.einsum("...i,iho->...ho", x, s.w).relu().flatten(-2), (c, i, o), i * o),
        "normalized": (lambda s, x: F.linear(x, F.normalize(s.w, dim=1)).relu(), (o, c), o),
    }  # fmt: skip
    name = rng.choice(sorted(choices))
    forward, shape, width = choices[name]
    return Step(name, kind, forward, w=parameter(*shape)), width


def move(rng: Random, c: int, kind: Kind) -> Built:
    order = [rng.randrange(c) for _ in range(rng.randint(1, 5))]
    k = rng.randint(0, c - 1)
    choices: dict[str, tuple[Callable[..., Tensor], int]] = {
        "index": (lambda s, x: x[..., order], len(order)),
        "flip": (lambda s, x: x.flip(-1), c),
        "roll": (lambda s, x: x.roll(k, -1), c),
        "exchange": (lambda s, x: torch.cat([x[..., k:], x[..., :k]], -1), c),
        "repeat": (lambda s, x: torch.stack([x, -x], -1).flatten(-2), 2 * c),
        "pad": (lambda s, x: F.pad(x, (1, 1)), c + 2),
        "mask": (lambda s, x: x.masked_fill(x.detach() < 0, 0.0), c),
        "sum": (lambda s, x: x[..., : c - k] + 2 * x[..., k:], c - k),
        "sort": (lambda s, x: x.sort(-1).values, c),
        "turn": (lambda s, x: x.flip(-2) if x.dim() > 2 else x, c),
    }
    name = rng.choice(sorted(choices))
    forward, width = choices[name]
    return Step(name, kind, forward), width


# Combinations ---------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """x + body(x), branches side by side, or a part that passes."""

    def __init__(self, join: str, axis: int, parts: list[nn.Module], sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.join, self.axis, self.parts, self.sizes = join, axis, nn.ModuleList(parts), list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        if self.join == "split":
            left, right = x.split(self.sizes, self.axis)
            return torch.cat([self.parts[0](right), left], self.axis)
        results = [part(x) for part in self.parts]
        return torch.cat(results, self.axis) if self.join == "concat" else F.relu(results[0] + results[1])

    def extra_repr(self) -> str:
        return f"{self.join} {self.sizes}"


class Repeated(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


def combination(rng: Random, c: int, kind: Kind, depth: int) -> Built:
    axis = 1 if kind == "image" else -1
    join = rng.choice(["residual", "concat", "split", "repeat"])
    if join == "repeat":
        return Repeated(layer(rng, c, kind, c)[0]), c
    if join == "concat":
        parts = [chain(rng, c, kind, 1, depth - 1) for _ in range(2)]
        return Branches(join, axis, [part for part, _ in parts]), sum(o for _, o in parts)
    if join == "split" and c > 1:
        body, o = chain(rng, c - c // 2, kind, 1, depth - 1)
        return Branches(join, axis, [body], (c // 2, c - c // 2)), o + c // 2
    body, o = chain(rng, c, kind, rng.randint(1, 2), depth - 1)
    return Branches("residual", axis, [body, nn.Identity() if o == c else layer(rng, c, kind, o)[0]]), o


BLOCKS = (layer, layer, layer, layer, pool, attention, attention, gate, gate, gain, write, view, view, move, move)


def chain(rng: Random, c: int, kind: Kind, length: int, depth: int) -> Built:
    modules = []
    for _ in range(length):
        block = rng.choice([*BLOCKS, *[None] * 4]) if depth else rng.choice(BLOCKS)
        module, c = block(rng, c, kind) if block is not None else combination(rng, c, kind, depth)
        modules.append(module)
    return nn.Sequential(*modules), c


@dataclass(frozen=True)
class Program:
    """A network, the shape of its input without the batch, and what becomes of sums."""

    model: nn.Module
    shape: tuple[int, ...]
    residual: Literal["pin", "tie"]

    def inputs(self, seed: int, batch: int = 6) -> Tensor:
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def program(rng: Random) -> Program:
    """A chain of blocks and a linear head, behind a mean over positions or all of them."""
    kind: Kind = rng.choice(["vector", "tokens", "image"])
    body, _ = chain(rng, CHANNELS, kind, rng.randint(2, 5), 2)
    shape = {"vector": (CHANNELS,), "tokens": (TOKENS, CHANNELS), "image": (CHANNELS, SIDE, SIDE)}[kind]
    mean: list[nn.Module] = []
    if kind == "image":
        mean = [nn.AdaptiveAvgPool2d(1)]
    elif kind == "tokens":
        mean = [Step("mean", kind, lambda s, x: x.mean(1))]
    flatten = kind != "vector" and rng.random() < 0.5
    with torch.no_grad():
        width = nn.Sequential(body, *([] if flatten else mean), nn.Flatten()).eval()(torch.zeros(2, *shape)).shape[1]
    head = [*([] if flatten else mean), nn.Flatten(), nn.Linear(width, OUTPUTS)]
    return Program(nn.Sequential(body, *head), shape, rng.choice(["pin", "tie", "tie"]))
