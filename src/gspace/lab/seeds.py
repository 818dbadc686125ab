"""One rule for every random number of a run: a generator named by what it is for.

The stream of a purpose is a pure function of (seed, purpose), so nothing has to be carried from one iteration to the
next: iteration i of a resumed run draws what iteration i of an uninterrupted run drew. Numbers are drawn on the CPU and
moved, so that a run sees the same initial weights and the same batches on every device.
"""

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, independent of every other purpose's.

    >>> derive(0, "order", 1) == derive(0, "order", 1), derive(0, "order", 1) == derive(0, "order", 2)
    (True, False)
    """
    text = "/".join(map(str, (seed, *purpose))).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *purpose))
