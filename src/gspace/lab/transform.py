"""From stored pixels to the inputs of a network, on the device and vectorised; and which pixels, in which order.

Every random number of an epoch is drawn before it begins and laid out as rows `(step, batch, 1 + draws)`: the index of
an image and its draws (crop offsets, flip). A training step then is a pure function of its rows, which may be a static
tensor of a CUDA graph. An epoch is one permutation of the training images without its last, incomplete batch.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gspace.lab.data import SETS, DataSet
from gspace.lab.seeds import generator

EVALUATION_BATCH = 2_000
Inputs = Callable[[Tensor, Tensor, Tensor], Tensor]  # pixels in [0, 1], mean, std -> what the network reads


def standard(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 per channel."""
    return (pixels - mean[:, None, None]) / std[:, None, None]


def grey(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """One channel in [0, 1]: luminance 0.299 R + 0.587 G + 0.114 B (ITU-R 601) of a colour image."""
    if pixels.shape[-3] == 1:
        return pixels
    red, green, blue = pixels.unbind(-3)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(-3)


INPUTS: Mapping[str, Inputs] = {
    "standard": standard,
    "unit": lambda pixels, mean, std: pixels,
    "grey": grey,
    "pooled": lambda pixels, mean, std: F.avg_pool2d(standard(pixels, mean, std), 4),  # 28 × 28 becomes 7 × 7
}


@functools.cache
def input_shape(data: str, inputs: str) -> tuple[int, int, int]:
    """Of one input, `(channel, height, width)`, before the data set is read.

    >>> input_shape("cifar10", "grey"), input_shape("mnist", "pooled")
    ((1, 32, 32), (1, 7, 7))
    """
    height, width, *colours = SETS[data].shape
    pixels = torch.empty(1, *(colours or [1]), height, width, device="meta")
    moments = pixels.new_empty(pixels.shape[1])
    _, channels, height, width = INPUTS[inputs](pixels, moments, moments).shape
    return channels, height, width


@dataclass(frozen=True)
class Augment:
    """A random change of the training images."""

    margin: int  # zeros added on each side of the stored images
    draw: Callable[[int, torch.Generator], Tensor]  # n rows of random numbers, `(n, draws)`
    still: tuple[int, ...]  # the row of draws that changes nothing
    take: Callable[
        [Tensor, Tensor], Tensor
    ]  # stored images, rows `(..., 1 + draws)` -> `(..., channel, height, width)`


MARGIN = 4


def _draw_crop_flip(n: int, generator: torch.Generator) -> Tensor:
    offsets = torch.randint(2 * MARGIN + 1, (n, 2), generator=generator)
    flips = torch.randint(2, (n, 1), generator=generator)
    return torch.cat([offsets, flips], 1)


def _take_crop_flip(images: Tensor, rows: Tensor) -> Tensor:
    """Row y, column x of the output is row y + dy, column x + dx of the padded image; x runs backwards if flipped."""
    index, dy, dx, flip = (column[..., None, None, None] for column in rows.unbind(-1))
    channels, height, width = images.shape[1], images.shape[2] - 2 * MARGIN, images.shape[3] - 2 * MARGIN
    c = torch.arange(channels, device=images.device)[:, None, None]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    x = torch.where(flip == 1, width - 1 - x, x)
    return images[index, c, y + dy, x + dx]


AUGMENTS: Mapping[str, Augment] = {
    "none": Augment(
        0, lambda n, generator: torch.empty(n, 0, dtype=torch.int64), (), lambda images, rows: images[rows[..., 0]]
    ),
    "crop-flip": Augment(MARGIN, _draw_crop_flip, (MARGIN, MARGIN, 0), _take_crop_flip),
}


@dataclass(frozen=True)
class Feed:
    """Everything a training run reads, on its device."""

    images: Tensor  # finished inputs, or padded pixels if there is an augmentation
    labels: Tensor
    x_test: Tensor  # finished
    y_test: Tensor
    augment: Augment
    finish: Callable[[Tensor], Tensor]  # pixels that `augment.take` returned -> inputs

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels for rows `(..., 1 + draws)`."""
        return self.finish(self.augment.take(self.images, rows)), self.labels[rows[..., 0]]

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x_test.split(EVALUATION_BATCH), self.y_test.split(EVALUATION_BATCH), strict=True)

    def still_rows(self) -> Tensor:
        """Rows that give every training image as it is, in order."""
        rows = torch.tensor([[0, *self.augment.still]]).repeat(len(self.labels), 1)
        rows[:, 0] = torch.arange(len(rows))
        return rows.to(self.labels.device)


def feed(data: DataSet, inputs: str, augment: str, dtype: torch.dtype = torch.float32) -> Feed:
    """The data set made ready for training: transformed once if nothing random happens to it, else padded."""

    def finish(pixels: Tensor) -> Tensor:
        return INPUTS[inputs](pixels.to(dtype) / data.white, data.mean, data.std)

    change = AUGMENTS[augment]
    fixed = change.margin == 0
    x_test = _in_pieces(finish, data.x_test)
    images = _in_pieces(finish, data.x_train) if fixed else F.pad(data.x_train, (change.margin,) * 4)
    ready = (lambda inputs: inputs) if fixed else finish
    return Feed(images, data.y_train, x_test, data.y_test, change, ready)


def _in_pieces(function: Callable[[Tensor], Tensor], x: Tensor, size: int = 10_000) -> Tensor:
    """`function(x)` without its temporaries for all of x at once."""
    return torch.cat([function(piece) for piece in x.split(size)])


def epoch_rows(seed: int, epoch: int, images: int, batch: int, augment: Augment) -> Tensor:
    """The rows of one epoch, `(images // batch, batch, 1 + draws)`, on the CPU."""
    steps = images // batch
    random = generator(seed, "epoch", epoch)
    order = torch.randperm(images, generator=random)[: steps * batch]
    return torch.cat([order[:, None], augment.draw(len(order), random)], 1).view(steps, batch, -1)
