"""More programs (see `programs`): entries that move, repeat, join or are left out; batches that change their size."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs import FRAMES, IMAGES, ONE, SQUARE, TOKENS, TWO, VIDEO, Program

C = 8  # channels of a movement's input


class Moved(nn.Module):
    """Convolution, ReLU, `move` on `(N, 8, 4, 4)`, convolution."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.move = nn.Conv2d(2, C, 3, padding=1), move
        self.head = nn.Conv2d(move(torch.zeros(3, C, 4, 4)).shape[1], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.move(self.body(x).relu()))


MOVES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # an operation, and how many of the 8 units stay apart; a channel that nothing reads has its scale too
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), 2),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, downscale_factor=2), C),
    "PixelShuffle": (nn.PixelShuffle(upscale_factor=2), 2),
    "PixelUnshuffle": (nn.PixelUnshuffle(2), C),
    "stack before the channels": (lambda x: torch.stack([x, 2 * x], 1).flatten(1, 2), C),
    "stack behind the channels": (lambda x: torch.stack([x, 2 * x], 2).flatten(1, 2), C),
    "expand": (lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4), C),
    "expand in front": (lambda x: x.expand(3, -1, -1, -1, -1).sum(0), C),
    "expand_as": (lambda x: x.mean((2, 3), keepdim=True).expand_as(x), C),
    "padded channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), C),
    "cropped channels": (lambda x: F.pad(x, (0, 0, 0, 0, 0, -2)), C),
    "new dimension": (lambda x: x[:, None].squeeze(1), C),
    "new dimension behind": (lambda x: x[..., None].squeeze(-1), C),
    "Unflatten": (nn.Sequential(nn.Unflatten(1, (2, -1)), nn.Flatten(1, 2)), C),
    "unflatten pixels": (lambda x: x.unflatten(-1, (2, 2)).amax(-1), C),
    "slice": (lambda x: x[:, 2:5], C),
    "step": (lambda x: x[:, ::2], C),
    "one channel": (lambda x: x[:, 3:4], C),
    "select": (lambda x: x.select(1, 3).unsqueeze(1), C),
    "select from the end": (lambda x: x.select(-3, -1).unsqueeze(-3), C),
    "chunk, exchanged": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), C),
    "split, unequal": (lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1), C),
    "tensor_split": (lambda x: torch.cat(x.tensor_split(3, 1), 1), C),
    "unbind": (lambda x: torch.stack(x.unbind(1)[::-1], 1), C),
    "unflatten and flatten": (lambda x: x.unflatten(1, (2, 4)).flatten(1, 2), C),
    "shuffle by hand": (lambda x: x.view(-1, 2, 4, 4, 4).transpose(1, 2).reshape(-1, C, 4, 4), C),
    "channel_shuffle": (lambda x: torch.channel_shuffle(x, 2), C),
    "permute there and back": (lambda x: x.permute(0, 2, 3, 1).relu().movedim(-1, 1), C),
    "swapaxes": (lambda x: x.swapaxes(1, 2).swapaxes(2, 1), C),
    "flip of pixels": (lambda x: x.flip(3), C),
    "flip of channels": (lambda x: x.flip(1), C),
    "flip of both": (lambda x: torch.flip(x, (1, 3)), C),
    "roll of channels": (lambda x: x.roll(1, 1), C),
    "roll of windows": (lambda x: torch.roll(x, (1, -2), (2, 3)), C),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), C),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), C),
    "index_select": (lambda x: x.index_select(1, torch.tensor([0, 0, 5])), C),
    "list of channels": (lambda x: x[:, [0, 5, 5]], C),
    "gather": (lambda x: x.gather(1, torch.tensor([0, 3, 3]).view(1, 3, 1, 1).expand(len(x), 3, 4, 4)), C),
    "narrow": (lambda x: x.narrow(1, 1, 4), C),
    "narrow from the end": (lambda x: x.narrow(1, -2, 2), C),
    "threshold": (nn.Threshold(0.0, 0.0), C),
    "clamp": (lambda x: x.clamp(min=0), C),
    "rrelu": (lambda x: F.rrelu(x, training=False), C),
    "masked_fill": (lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), 0.0), C),
    # the larger of two have one scale, and so have all that are compared
    "values of a maximum": (lambda x: x.unflatten(1, (4, 2)).max(2).values, 4),
    "values of a minimum": (lambda x: torch.min(x.unflatten(1, (4, 2)), dim=2).values, 4),
    "values of a maximum over pixels": (lambda x: x.max(3, keepdim=True)[0], C),
    "maxima gathered": (lambda x: x.gather(1, x.max(1, keepdim=True).indices), 1),
    "maximum as an index": (lambda x: x[:, x.amax((0, 2, 3)).max(0).indices].unsqueeze(1), 1),
    "maxima of pixels compared": (lambda x: x * (x.max(3, keepdim=True).indices == 0), C),
    "with the batch": (lambda x: x.flatten(0, 1).unflatten(0, (-1, C)), C),
    # padded with other values, channels would have to keep their size
    "padded with 1": (lambda x: F.pad(x, (1, 1, 1, 1), value=1.0), 0),
    "ConstantPad2d": (nn.ConstantPad2d(1, 0.5), 0),
    "constant_pad_nd with 1": (lambda x: torch.constant_pad_nd(x, (1, 1, 1, 1), 1.0), 0),
    "constant_pad_nd": (lambda x: torch.constant_pad_nd(x, (1, 1, 1, 1), 0.0), C),
    "padded": (lambda x: F.pad(x, (1, 1, 1, 1)), C),
    "reflected": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), C),
    "ReplicationPad2d": (nn.ReplicationPad2d(1), C),
    "ZeroPad2d": (nn.ZeroPad2d(1), C),
}


class Movement(Program):
    """`forward` is what stands between the convolutions."""

    def build(self) -> nn.Module:
        return Moved(self.forward).double()


MOVEMENTS = {
    f"moved: {name}": Movement(move, H, (3, 2, 4, 4), derivatives="as an index" not in name)
    for name, (move, H) in MOVES.items()
}

# Places ---------------------------------------------------------------------------------------------------------------


def two_batches(s: Any, x: Tensor) -> Tensor:
    f, h = F.relu(s.k(x[:, 0])), F.relu(s.k(x.flatten(0, 1)))
    return s.three(h.view(f.size(0), -1)) + s.o(f.flatten(1))


def clips(s: Any, x: Tensor) -> Tensor:
    f = F.relu(s.k(x.flatten(0, 1)))  # frames are folded into the batch
    clip = f.mean((2, 3)).view(x.size(0), x.size(1), 4).sum(1)
    return s.three(F.relu(s.j(f)).view(clip.size(0), -1)) + clip.sum()


def unequal(s: Any, x: Tensor) -> Tensor:
    first, second = F.relu(s.k(x)).split([4, 2], 0)
    return s.two(first.reshape(second.size(0), -1))


def shifted(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.k(x))
    n, c, high, wide = h.shape
    return s.o(torch.cat([h.new_zeros(n, 1, high, wide), h], 1)[:, :c].flatten(1))


def queries(s: Any, x: Tensor) -> Tensor:
    f = F.relu(s.k(x)).mean((2, 3))
    return s.turned(s.head(f)) + s.c(F.relu(s.a(f.new_ones(f.shape[0], 7, 5)))[:, 0])[:, :2]


def gated(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.k(x))
    h = F.pad(h * torch.sigmoid(F.relu(s.j(h)).mean((2, 3), keepdim=True)), (0, 0))
    return s.o(torch.cat([h[:, :2], h.chunk(2, 1)[1]], 1).view(len(x), -1))


def compared(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(s.k(x))
        mask = compare(h.mean((2, 3), keepdim=True), h)  # as large as h
        return s.head((F.relu(s.i(x)).mean((2, 3), keepdim=True) * mask).flatten(1)[:, :4])

    return forward


def first(size: Callable[[Any, Tensor], Any], H: int, shape: tuple[int, ...] = TWO) -> Program:
    """As many of 8 units are returned as another size says; nothing reads the others, which stay free."""
    return Program(lambda s, x: (h := F.relu(s.a(x)))[..., : size(s, h)], H, shape)


def taken(of: Callable[[Tensor], Tensor], H: int = 8) -> Program:
    return Program(lambda s, x: s.c(of(F.relu(s.a(x)))), H, (4, 3, 5))


PLACES = {
    "flipped channels": Program(lambda s, x: s.c(F.relu(s.a(x)).flip(-1) + F.relu(s.b(x))), 8),
    "flipped tokens": Program(lambda s, x: s.c(F.relu(s.a(x)).flip(1)), 8, TOKENS),
    "flipped channels of tokens": Program(lambda s, x: s.c(F.relu(s.a(x)).flip(2) + F.relu(s.b(x))), 8, TOKENS),
    "flipped, once flattened": Program(lambda s, x: s.o(F.relu(s.k(x)).flatten(1).flip(1)), 4, IMAGES),
    "rolled channels": Program(lambda s, x: s.c(F.relu(s.a(x)).roll(3, -1) + F.relu(s.b(x))), 8),
    "rolled as one vector": Program(lambda s, x: s.c(F.relu(s.a(x)).roll(3)), 8),
    "rolled, once flattened": Program(lambda s, x: s.o(F.relu(s.k(x)).flatten(1).roll(4, 1)), 4, IMAGES),
    "rows gathered": Program(lambda s, x: s.c(F.relu(s.a(x)).index_select(0, torch.tensor([1, 0, 3, 3, 2]))), 8),
    "channels gathered": Program(lambda s, x: s.c(F.relu(s.a(x)).index_select(-1, torch.arange(8))), 8),
    "tokens gathered": Program(lambda s, x: s.c(F.relu(s.a(x)).index_select(1, torch.tensor([4, 2]))), 8, TOKENS),
    "as many rows gathered as there are samples": Program(
        lambda s, x: s.l(F.relu(s.a(x)).index_select(0, torch.arange(4).repeat(8)).view(x.size(0), -1)),
        8,
        derivatives=False,
    ),
    "rows repeated": Program(lambda s, x: s.c(F.relu(s.a(x)).repeat(2, 1)), 8),
    "rows repeated into channels": Program(
        lambda s, x: s.l(F.relu(s.a(x)).repeat(8, 1).view(x.size(0), -1)), 8, derivatives=False
    ),
    "channels repeated": Program(lambda s, x: s.l(F.relu(s.a(x)).repeat(1, 8)), 8),
    "channels repeated in a new dimension": Program(lambda s, x: s.c(F.relu(s.a(x)).repeat(2, 1, 1)), 8),
    "tokens repeated": Program(lambda s, x: s.c(F.relu(s.a(x)).repeat(1, 3, 1)), 8, TOKENS),
    "shuffled tokens": Program(lambda s, x: s.c(torch.channel_shuffle(F.relu(s.a(x)), 2)), 8, TOKENS),
    # tokens are read instead of channels: one scale for all 8
    "tokens mixed": Program(lambda s, x: s.c(F.relu(s.a(x)).transpose(1, 2)), 1, SQUARE),
    # a bias along the tokens: one scale in front of `f`, one behind it
    "layers across tokens and across channels": Program(
        lambda s, x: s.c(F.relu(s.f(F.relu(s.a(x)).transpose(1, -1)).transpose(1, -1))), 2, SQUARE
    ),
    "a mean over channels": Program(lambda s, x: s.c(F.relu(s.a(x)).mean(2)), 1, SQUARE),
    "a maximum over channels": Program(lambda s, x: s.c(F.relu(s.a(x)).amax(2)), 1, SQUARE),
    "a convolution over tokens": Program(
        lambda s, x: s.d(F.relu(s.t(F.relu(s.a(x)).transpose(-1, -2))).mean(-1)), 16, SQUARE
    ),
    "flattened tokens": Program(lambda s, x: s.long(F.relu(s.a(x)).flatten(1, 2)), 8, TOKENS),
    "tokens joined": Program(lambda s, x: s.c(torch.cat([F.relu(s.a(x)), F.relu(s.b(x))], 1)), 8, TOKENS),
    "spatial positions first": Program(lambda s, x: s.o(F.relu(s.k(x)).permute(0, 2, 3, 1).flatten(1)), 4, IMAGES),
    "view with a constant": Program(lambda s, x: s.o(F.relu(s.k(x)).view(-1, 36)), 4, IMAGES),
    # the layer reads the width; channels pass, and are in the output
    "linear layer over the width": Program(lambda s, x: s.wide(F.relu(s.k(x))), 1, IMAGES),
    # a pool is taken to mix all places: 1, though windows apart would leave 4
    "pooling over channels": Program(
        lambda s, x: s.pair(F.max_pool1d(F.relu(s.a(x)).unsqueeze(1), 2).squeeze(1)), 1, derivatives=False
    ),
    "cumulative sum": Program(lambda s, x: s.c(s.a(x).cumsum(-1)), 1),
    "unsqueezed": Program(lambda s, x: s.c(F.relu(s.a(x)).unsqueeze(1)).squeeze(1), 8),
    # BatchNorm1d normalizes tokens, the linear layers act on channels
    "BatchNorm1d over tokens": Program(lambda s, x: s.c(F.relu(s.bn6(s.a(x)))), 1, TOKENS, H_absorbed=1),
    "all dimensions turned round": Program(
        lambda s, x: s.turned(F.relu(s.a(x)).permute(3, 2, 1, 0).split(2, -2)[0]), 1, FRAMES
    ),
    "halves of the frames": Program(lambda s, x: s.c(F.relu(s.a(x)).chunk(2, -3)[0]), 8, FRAMES),
    "parts of the frames": Program(lambda s, x: s.c(F.relu(s.a(x)).tensor_split(3, -3)[1]), 8, FRAMES),
    "halves of a sample": Program(lambda s, x: s.c(F.relu(s.a(x))[-1].chunk(2, -2)[0]), 8, TOKENS),
    "frames joined": Program(lambda s, x: s.c(torch.cat([F.relu(s.a(x)), F.relu(s.b(x))], -3)[..., :8]), 8, FRAMES),
    "padded beyond the rank": Program(lambda s, x: s.c(F.pad(F.relu(s.a(x)), (0, 0, 0, 0, 1, 1))), 8, TOKENS),
    "resized tokens": Program(
        lambda s, x: s.c(F.interpolate(F.relu(s.a(x)).unsqueeze(-1), scale_factor=2.0).mean(-1)[..., :8]), 8, TWO
    ),
    # rows and tokens are taken, channels stay
    "transpose(0, 1)[-1]": taken(lambda h: h.transpose(0, 1)[-1]),
    "transpose(0, 1)[1:]": taken(lambda h: h.transpose(0, 1)[1:]),
    "select": taken(lambda h: h.transpose(0, 1).select(0, -1)),
    "narrow": taken(lambda h: h.transpose(0, 1).narrow(0, 0, 2)),
    "split": taken(lambda h: h.transpose(0, 1).split(1, 0)[0][0]),
    "mT[0]": taken(lambda h: h.mT[0].mT),
    "unbind": taken(lambda h: h.unbind(1)[0]),
    "cat, then the first": taken(lambda h: torch.cat([h, -h], 1)[..., :8]),
    "flatten, then the second": taken(lambda h: h.flatten(1)[..., 8:16]),
    "h[0][-1]": taken(lambda h: h[0][-1]),
    "h[0, 0]": taken(lambda h: h[0, 0]),
    "mean(-2)[:2]": taken(lambda h: h.mean(-2)[:2]),
    "amax(-2)[0:1]": taken(lambda h: h.amax(-2)[0:1]),
    "max(1)[0]": taken(lambda h: h.max(1)[0]),
    "chunk": taken(lambda h: h.transpose(0, 1).chunk(2, 0)[0]),
    "transpose(1, -1) twice": taken(lambda h: (h.transpose(1, -1) @ torch.ones(3, 3).to(h)).transpose(1, -1)),
    "sort of the channels": taken(lambda h: h.sort(-1).values, 1),
}

# Batches --------------------------------------------------------------------------------------------------------------

BATCHES = {
    "the batch of another activation": Program(two_batches, 4, VIDEO),
    "frames folded into the batch": Program(clips, 4, VIDEO),
    "a buffer over a batch of one": Program(
        lambda s, x: s.five((h := F.relu(s.k(x))).mul(s.times).view(h.size(0), -1)), 4, ONE
    ),
    # every channel comes to stand in the first column
    "a batch behind another size": Program(
        lambda s, x: (h := F.relu(s.rgb(x)).mean((2, 3))).view(-1, h.size(0))[:, :1], 0, (2, 2, 3, 3)
    ),
    "a mean over the first": first(lambda s, h: h.mean(0, keepdim=True).size(-2), 4),
    "the first of a mean": first(lambda s, h: h.mean(-2, keepdim=True).size(0), 6),
    "the first, transposed": first(lambda s, h: torch.sigmoid(h).mT.size(0), 0),
    "a new second dimension": first(lambda s, h: h.unsqueeze(1).size(-2), 4),
    "a view with -1": first(lambda s, h: h.view(h.size(0), -1, 8).size(-2), 4),
    "the number of dimensions": first(lambda s, h: h.dim(), 5),
    "two sizes at once": first(lambda s, h: h.shape[:2][1], 4),
    "rows of a product": first(lambda s, h: (s.near @ h).size(0), 6),
    "flattened from further in front": Program(lambda s, x: F.relu(s.a(x)).flatten(-3, -1)[..., 4:8], 4, TWO),
    "compared with a larger one": Program(compared(torch.gt), 4, IMAGES, derivatives=False),
    "raised to a larger one": Program(compared(torch.pow), 4, IMAGES),
    "bounded by a larger one": Program(compared(torch.clamp), 4, IMAGES),
    "joined, with the batch of one": Program(
        lambda s, x: s.two(torch.cat([h := F.relu(s.k(x)), F.relu(s.k(-x))], 1).view(h.size(0), -1)), 4, IMAGES
    ),
    "expanded as another": Program(
        lambda s, x: s.o(F.relu(s.j(h := F.relu(s.k(x)))).mean((2, 3), keepdim=True).expand_as(h).reshape(len(x), -1)),
        8,
        IMAGES,
    ),
    "every second sample": Program(lambda s, x: s.two((h := F.relu(s.k(x))).reshape(h[::2].size(0), -1)), 4, IMAGES),
    "samples joined": Program(
        lambda s, x: s.two(torch.cat([h := F.relu(s.k(x)), F.relu(s.j(h))]).view(h.size(0), -1)), 4, IMAGES
    ),
    "parts of a batch": Program(unequal, 4, (6, 2, 3, 3)),
    "channels shifted by zeros": Program(shifted, 4, IMAGES),
    # 4 channels, 2 of `head`, 8 of `a`, and an output of `c` that nothing reads
    "new tokens": Program(queries, 15, IMAGES),
    "keepdims": Program(lambda s, x: s.head(F.relu(s.k(x)).mean(axis=0, keepdims=True)[0].mean((-1, -2))), 4, IMAGES),
    "gated, padded, cut and joined": Program(gated, 4, IMAGES),
    "a sum with an image": Program(
        lambda s, x: s.o((F.adaptive_avg_pool2d(h := F.relu(s.k(x)), 1) + h).permute(0, 2, 3, 1).flatten(1)), 4, IMAGES
    ),
    "an unbatched image": Program(lambda s, x: s.o(F.relu(s.k(x)).flatten()), 4, (2, 3, 3)),
    "a factor that adds dimensions": Program(
        lambda s, x, c: s.five((F.relu(s.k(x)) * c).transpose(0, 1).flatten(1)), 4, ((4, 2, 3, 3), (5, 1, 1, 1, 1))
    ),
}
