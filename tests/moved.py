"""How far a rescaling moves what a model returns, whatever container it comes in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gspace

Batch = Tensor | tuple[Any, ...] | dict[str, Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """The model on one batch: a tensor, positional arguments or keywords."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in tuples, lists, dicts or a `ModelOutput`."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def run(model: nn.Module, batch: Batch, training: bool) -> list[Tensor]:
    """Outputs in the given mode; dropout is seeded, and buffers are what they were before."""
    before = [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(0)
    with torch.no_grad():
        result = [t.clone() for t in tensors(call(model.train(training), batch))]
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return result


def change(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest max |after − before| / max |before| of a tensor; infinite where a value turns into another kind."""
    worst = 0.0
    for b, a in zip(before, after, strict=True):
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            return float("inf")
        if finite.any():
            worst = max(worst, float((a - b)[finite].abs().max() / b[finite].abs().max()))
    return worst


def moved(
    model: nn.Module, batch: Batch, analysis: gspace.Analysis, absorbed: bool = False, seed: int = 2
) -> dict[str, float]:
    """Relative change of the outputs in training and evaluation mode under one draw of e^N(0, 1).

    Changes the model. Infinite if there are units and yet no weight has moved: that would be no rescaling.
    """
    before = {mode: run(model, batch, mode == "train") for mode in ("train", "eval")}
    weights = [parameter.clone() for parameter in model.parameters()]
    scales = gspace.random_scales(model, torch.Generator().manual_seed(seed), absorbed=absorbed, analysis=analysis)
    gspace.rescale_(model, scales, analysis=analysis)
    if analysis.H and all(map(torch.equal, weights, model.parameters())):
        return dict.fromkeys(before, float("inf"))
    return {mode: change(before[mode], run(model, batch, mode == "train")) for mode in before}
