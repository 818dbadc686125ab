"""Operations that move, repeat, join or leave out channels: units follow them, exactly, and path norms are summed."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
from gspace.pathsum import PathError

C = 8


class Move(NamedTuple):
    """An operation on `(N, 8, 4, 4)`, the channels it returns, the units that stay free."""

    of: Callable[[Tensor], Tensor]
    channels: int
    H: int = C


MOVES = {
    "pixel_shuffle": Move(lambda x: F.pixel_shuffle(x, 2), 2, 2),
    "pixel_unshuffle": Move(lambda x: F.pixel_unshuffle(x, downscale_factor=2), 4 * C),
    "PixelShuffle": Move(nn.PixelShuffle(upscale_factor=2), 2, 2),
    "PixelUnshuffle": Move(nn.PixelUnshuffle(2), 4 * C),
    "stack before the channels": Move(lambda x: torch.stack([x, 2 * x], 1).flatten(1, 2), 2 * C),
    "stack behind the channels": Move(lambda x: torch.stack([x, 2 * x], 2).flatten(1, 2), 2 * C),
    "expand": Move(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4), C),
    "expand in front": Move(lambda x: x.expand(3, -1, -1, -1, -1).sum(0), C),
    "expand_as": Move(lambda x: x.mean((2, 3), keepdim=True).expand_as(x), C),
    "padded channels": Move(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), C + 3, C + 3),
    "cropped channels": Move(lambda x: F.pad(x, (0, 0, 0, 0, 0, -2)), C - 2, 0),
    "new dimension": Move(lambda x: x[:, None].squeeze(1), C),
    "new dimension behind": Move(lambda x: x[..., None].squeeze(-1), C),
    "Unflatten": Move(nn.Sequential(nn.Unflatten(1, (2, -1)), nn.Flatten(1, 2)), C),
    "unflatten pixels": Move(lambda x: x.unflatten(-1, (2, 2)).amax(-1), C),
    "slice": Move(lambda x: x[:, 2:5], 3),
    "step": Move(lambda x: x[:, ::2], C // 2),
    "one channel": Move(lambda x: x[:, 3:4], 1),
    "select": Move(lambda x: x.select(1, 3).unsqueeze(1), 1),
    "select from the end": Move(lambda x: x.select(-3, -1).unsqueeze(-3), 1),
    "chunk, exchanged": Move(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), C),
    "split, unequal": Move(lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1), C),
    "tensor_split": Move(lambda x: torch.cat(x.tensor_split(3, 1), 1), C),
    "unbind": Move(lambda x: torch.stack(x.unbind(1)[::-1], 1), C),
    "unflatten and flatten": Move(lambda x: x.unflatten(1, (2, 4)).flatten(1, 2), C),
    "shuffle by hand": Move(lambda x: x.view(-1, 2, 4, 4, 4).transpose(1, 2).reshape(-1, C, 4, 4), C),
    "permute there and back": Move(lambda x: x.permute(0, 2, 3, 1).relu().movedim(-1, 1), C),
    "swapaxes": Move(lambda x: x.swapaxes(1, 2).swapaxes(2, 1), C),
    "flip of pixels": Move(lambda x: x.flip(3), C),
    "flip of channels": Move(lambda x: x.flip(1), C),
    "roll of channels": Move(lambda x: x.roll(1, 1), C),
    "repeat": Move(lambda x: x.repeat(1, 2, 1, 1), 2 * C),
    "index_select": Move(lambda x: x.index_select(1, torch.tensor([0, 0, 5])), 3, 0),
    "list of channels": Move(lambda x: x[:, [0, 5, 5]], 3, 0),
    "narrow": Move(lambda x: x.narrow(1, 1, 4), 4),
    "glu by hand": Move(lambda x: x[:, :4] * x[:, 4:], 4, 0),
    "threshold": Move(nn.Threshold(0.0, 0.0), C),
    "clamp": Move(lambda x: x.clamp(min=0), C),
    "rrelu": Move(lambda x: F.rrelu(x, training=False), C),
    "masked_fill": Move(lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), 0.0), C),
    "values of a maximum": Move(lambda x: x.unflatten(1, (4, 2)).max(2).values, 4, 4),
    "values of a minimum": Move(lambda x: torch.min(x.unflatten(1, (4, 2)), dim=2).values, 4, 4),
    "values of a maximum over pixels": Move(lambda x: x.max(3, keepdim=True)[0], C),
    "maxima gathered": Move(lambda x: x.gather(1, x.max(1, keepdim=True).indices), 1, 0),
    "maximum as an index": Move(lambda x: x[:, x.amax((0, 2, 3)).max(0).indices].unsqueeze(1), 1, 0),
    "places of maxima": Move(lambda x: x * (x.max(3, keepdim=True).indices == 0), C),
    "with the batch": Move(lambda x: x.flatten(0, 1).unflatten(0, (-1, C)), C, 0),
}
UNKNOWN = ("shuffle by hand",)  # sizes that only an example tells
REFUSED = {
    "glu by hand": "multiplies two activations",
    **dict.fromkeys(("maxima gathered", "maximum as an index", "places of maxima"), "chosen depends on the input"),
}


class Net(nn.Module):
    def __init__(self, move: Move) -> None:
        super().__init__()
        self.body, self.move = nn.Conv2d(2, C, 3, padding=1), move.of
        self.head = nn.Conv2d(move.channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.move(self.body(x).relu()))


@pytest.mark.parametrize("example", [False, True], ids=["alone", "with an example"])
@pytest.mark.parametrize("name", MOVES)
def test_units_follow(name: str, example: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(MOVES[name]).double(), torch.randn(5, 2, 4, 4, dtype=torch.float64)
    found = gspace.analyze(model, x) if example else gspace.analyze(model)
    before = model(x)
    scales = gspace.random_scales(model, torch.Generator().manual_seed(0), analysis=found)
    gspace.rescale_(model, scales, analysis=found)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-13)
    expected = 0 if name in UNKNOWN and not example else MOVES[name].H
    assert len(scales) == found.H == expected


@pytest.mark.parametrize("name", MOVES)
def test_path_norms_follow(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(MOVES[name]).double(), torch.randn(5, 2, 4, 4, dtype=torch.float64)
    if name in REFUSED:
        with pytest.raises(PathError, match=REFUSED[name]):
            gspace.path_norm(model, example_input=x)
        return
    twin = copy.deepcopy(model)
    found = gspace.analyze(model, x)
    scales = gspace.random_scales(twin, torch.Generator().manual_seed(0), analysis=found)
    gspace.rescale_(twin, scales, analysis=found)
    values = [float(gspace.path_norm(m, example_input=x)) for m in (model, twin)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert values[0] > 0


