"""Steps of the C kernels on random networks, in a process of its own under AddressSanitizer and UBSan.

`python sanitized.py FIRST LAST` takes programs of the grammar by their seed, with options in turn, and compares weights
with the eager step. `python sanitized.py planted` hands a kernel a buffer that is too short, which must end it.
"""

import copy
import json
import sys
import warnings
from array import array
from random import Random

import torch
from torch import nn

import gspace
from grammar import program
from gspace.optim import fast
from gspace.optim.fast import native
from gspace.optim.fast.tables import Tile
from zoo import mlp

SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TILES = [None, Tile(4, 60, 2, 1), Tile(4, 16, 2, 1), Tile(8, 32, 1, 1)]
OPTIONS = [
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.8, "dampening": 0.1, "max_ratio": float("inf"), "max_drift": float("inf")},
    {"allocation": "spread", "momentum": 0.9, "maximize": True},
    {"max_path_grad_norm": 0.3, "weight_decay": 0.1},
]


def put(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 0.3)


def compared(seed: int) -> float | None:
    """How far the weights are from those of the eager step after three, or None if kernels do not take this network."""
    rng = Random(seed)
    drawn = program(rng)
    model = drawn.model.to(rng.choice([torch.float32, torch.float64]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    options = OPTIONS[seed % len(OPTIONS)]
    example = drawn.inputs(0).to(next(model.parameters()).dtype)
    analysis = gspace.analyze(model, example, residual=drawn.residual)
    pair = [
        gspace.GSGD(m, 0.05, analysis=analysis, foreach=flag, **options)
        for m, flag in ((model, False), (copy.deepcopy(model), None))
    ]
    built = pair[1]._current()
    if not built.weights or native.NativeStep.refusal(built, pair[1]._rules()) is not None:
        return None
    pair[1].use(native.NativeStep, TILES[seed // 5 % len(TILES)])
    for step in range(3):
        for optimizer in pair:
            put(optimizer.model, step)
            optimizer.step()
    assert isinstance(pair[1]._way, fast.Bound)
    wide = 1 if next(model.parameters()).dtype == torch.float64 else 2e-16 / 1e-7  # in roundings of float64
    weights = zip(*(optimizer.model.parameters() for optimizer in pair), strict=True)
    return max(wide * float((p - q).detach().norm() / (p.detach().norm() + 1e-30)) for p, q in weights)


def planted() -> None:
    optimizer = gspace.GSGD(mlp(5, 6, 3), 0.1)
    put(optimizer.model, 0)
    optimizer.step()
    call = native.library("float").step
    assert isinstance(optimizer._way, native.NativeStep)
    header, hyper = array("q", [0]), array("d", [0.0] * 64)
    call(optimizer._way.address, header.buffer_info()[0], hyper.buffer_info()[0])


def main(arguments: list[str]) -> None:
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", UserWarning)  # units that are left out
    native.FLAGS[:] = [*[flag for flag in native.FLAGS if flag != "-O3"], *SANITIZE]
    native.library("float")  # or what the compiler said
    if arguments == ["planted"]:
        planted()
        return
    found = [gap for seed in range(*map(int, arguments)) if (gap := compared(seed)) is not None]
    print(json.dumps({"networks": len(found), "gap": max(found)}))


if __name__ == "__main__":
    main(sys.argv[1:])
