"""Norms, gates, products, experts, recurrences and ways to write them, as small as they come."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x/√(mean x² + ε) · (offset + w), written by hand as most language models do."""

    def __init__(self, n: int, offset: float = 0) -> None:
        super().__init__()
        self.weight, self.offset, self.eps = nn.Parameter(torch.ones(n)), offset, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (self.offset + self.weight if self.offset else self.weight)


class Normalize(nn.Module):
    """x/max(‖x‖, ε)."""

    eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)


class PreNorm(nn.Module):
    """A stream of 4 that only norms read: one block, final norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.up, self.down = nn.Linear(3, 4), RMSNorm(4), nn.Linear(4, 5), nn.Linear(5, 4)
        self.final, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.final(x + self.down(F.relu(self.up(self.norm(x))))))


class LayerScale(nn.Module):
    """A branch multiplied by one gain a channel (or one for all) before the sum."""

    def __init__(self, gains: int) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(gains))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(x + self.gain * F.relu(self.branch(x)))


class Gated(nn.Module):
    """down(act(gate x) · up x); without an activation the gate is bilinear."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SqueezeExcite(nn.Module):
    """Channels multiplied by a sigmoid of a small network of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze, self.excite = nn.Conv2d(2, 5, 1), nn.Linear(5, 3), nn.Linear(3, 5)
        self.head = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.head(x * gate[..., None, None])


class Recurrent(nn.Module):
    """A cell h' = relu(W x + U h) written by hand, over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.head = nn.Linear(3, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for token in x.unbind(1):
            h = F.relu(self.W(token) + self.U(h))
        return self.head(h)


class TorchRecurrent(nn.Module):
    """`nn.RNN`, `nn.LSTM` or `nn.GRU` with a head on every step."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.head = core, nn.Linear(core.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0])


class Experts(nn.Module):
    """Two of three experts for every token, chosen and weighted by a softmax; every expert takes its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == i)
            if not len(row):
                continue
            y.index_add_(0, row, expert(x[row]) * weight[row, rank, None])
        return y


class DenseExperts(nn.Module):
    """All experts in three einsums, mixed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up, self.down = nn.Parameter(torch.empty(3, 4, 5)), nn.Parameter(torch.empty(3, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("bi,eih->ebh", x, self.up))
        return torch.einsum("ebh,eho,be->bo", hidden, self.down, self.router(x).softmax(-1))


class LoRA(nn.Module):
    """A linear layer plus a product of rank 2."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.merged, self.base, self.head = merged, nn.Linear(4, 5), nn.Linear(5, 3)
        self.A, self.B = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.head(F.relu(F.linear(x, self.base.weight + self.B @ self.A, self.base.bias)))
        return self.head(F.relu(self.base(x) + 0.5 * (x @ self.A.t()) @ self.B.t()))


class StandardConv(nn.Conv2d):
    """A convolution whose filters are centred and divided by their deviation, times a gain."""

    def __init__(self, i: int, o: int, kernel: int) -> None:
        super().__init__(i, o, kernel)
        self.gain, self.eps = nn.Parameter(torch.ones(o, 1, 1, 1)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.pow(2).mean((1, 2, 3), keepdim=True) + self.eps).sqrt() * self.gain
        return F.conv2d(x, w, self.bias)


class LanguageModel(nn.Module):
    """Tokens, positions, one hidden layer, logits; `tied` uses the embedding twice, `norm` stands before the logits."""

    def __init__(self, tied: bool, norm: bool, padding: int | None = None) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(7, 4, padding_idx=padding), nn.Parameter(torch.empty(3, 4))
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(x + self.down(F.relu(self.up(x)))))


class Bags(nn.Module):
    """What all tokens of a text have in a table, put together."""

    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding)
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.table(tokens))))


class LayerDrop(nn.Module):
    """Residual blocks that training drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            if not self.training or torch.rand(()).item() > 0.3:
                x = x + block(x)
        return self.head(x)


class Inplace(nn.Module):
    """Two layers written into one buffer, sum and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 5)
        y[:, :3] = self.left(x)
        y[:, 3:].copy_(self.right(x)).mul_(2)
        y += 0.5 * y
        y.relu_()
        return self.head(y)


class Flat(nn.Module):
    """Two layers cut out of one vector of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(4 * 5 + 5 + 5 * 3))

    def forward(self, x: Tensor) -> Tensor:
        first, bias, second = self.vector.split((20, 5, 15))
        return F.relu(F.linear(x, first.view(5, 4), bias)) @ second.view(5, 3)


class Twice(nn.Module):
    """One square layer used twice between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(*n, bias=False) for n in ((4, 5), (5, 5), (5, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last(F.relu(self.shared(F.relu(self.shared(x)))))


class Hypernetwork(nn.Module):
    """The weights of a layer from a network of the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.maker, self.head = nn.Linear(2, 3), nn.Linear(3, 20), nn.Linear(5, 2)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        weights = self.maker(F.relu(self.hidden(z))).unflatten(-1, (5, 4))
        return self.head(F.relu(torch.bmm(weights, x[..., None]).squeeze(-1)))


class Reads(nn.Module):
    """A hidden layer divided by a number that Python read from it."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.read = read
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(F.relu(self.second(F.relu(x) / self.read(x))))
