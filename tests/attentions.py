"""Attention as people write it, small: heads of a few channels, no bias unless it is named."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from layers import RMSNorm

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, token, head · channel) as (batch, head, token, channel)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding: channel i turns with channel i + half."""
    token, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.outer(torch.arange(token), 1 / 10 ** torch.arange(half)).to(x)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in products, a mask of −∞ and a softmax."""
    logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, float("-inf")).softmax(-1) @ v


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A kernel that the model insists on: torch writes it by other operations."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped queries with keys and values copied for every query head."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return by_hand(q, k, v)


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of numbers, as that of padded tokens."""
    mask = torch.zeros(q.shape[-2], k.shape[-2]).to(q).index_fill(1, torch.tensor([1]), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """|q|·|k|ᵀ in place of the softmax, divided by its sum."""
    q, k = q.abs(), k.abs()
    return torch.einsum("bhid,bhjd,bhje->bhie", q, k, v) / torch.einsum("bhid,bhjd->bhi", q, k)[..., None]


class Attention(nn.Module):
    """Queries, keys, values from one stream of 4, `core`, and an output layer."""

    def __init__(
        self, core: Core = F.scaled_dot_product_attention, heads: int = 2, kv: int = 2, bias: bool = False
    ) -> None:
        super().__init__()
        self.core, self.heads, self.kv = core, heads, kv
        self.q, self.k, self.v = (nn.Linear(4, n * 2, bias=bias) for n in (heads, kv, kv))
        self.o = nn.Linear(2 * heads, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv), split(self.v(x), self.kv)
        return self.o(join(self.core(q, k, v)))


class NormedAttention(Attention):
    """QK-norm: queries and keys of a head divided by their size, with one gain a channel."""

    def __init__(self, core: Core = F.scaled_dot_product_attention) -> None:
        super().__init__(core)
        self.q_norm, self.k_norm = RMSNorm(2), RMSNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(split(self.q(x), 2)), self.k_norm(split(self.k(x), 2))
        return self.o(join(self.core(q, k, split(self.v(x), 2))))


class FusedAttention(nn.Module):
    """One weight for queries, keys and values, cut by `split`, `chunk` or a reshape."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut, self.qkv, self.o = cut, nn.Linear(4, 12, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.cut == "reshape":  # one permutation for all three, as in most vision transformers
            q, k, v = y.unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (split(t, 2) for t in (y.split(4, -1) if self.cut == "split" else y.chunk(3, -1)))
        return self.o(join(F.scaled_dot_product_attention(q, k, v)))


class TorchAttention(nn.Module):
    """torch's own layer; returns what it returns: values, and weights unless they are not needed."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights, self.attend = weights, nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attend(x, x, x, need_weights=self.weights)


class CrossAttention(nn.Module):
    """Queries from the first input, keys and values from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n, 4, bias=False) for n in (4, 5, 5))
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.o(join(by_hand(split(self.q(x), 2), split(self.k(y), 2), split(self.v(y), 2))))


class BiasedAttention(Attention):
    """A learned bias on the logits for every head and pair of positions (relative positions, ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(layer(x), 2) for layer in (self.q, self.k, self.v))
        return self.o(join((q @ k.transpose(-2, -1) + self.table).softmax(-1) @ v))


class Cache:
    """Keys and values for the next token: an object, not an output."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v


class Cached(Attention):
    """Attention that returns its keys and values too, in an object or as tensors."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> dict[str, object]:
        q, k, v = (split(layer(x), 2) for layer in (self.q, self.k, self.v))
        y = self.o(join(by_hand(q, k, v)))
        return {"y": y, "cache": (k, v) if self.plain else Cache(k, v)}
