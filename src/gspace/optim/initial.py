"""The paper's initialisation: a network on its skeleton."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, analyzed
from gspace.devices import on_cpu
from gspace.optim.arguments import require_finite, require_one_of
from gspace.optim.skeleton import by_edge
from gspace.optim.walks import pick, rows_of, walks
from gspace.sharding import cut, local, shared, weights_of


def init_skeleton_(
    model: nn.Module,
    sign: Literal["positive", "random"] = "positive",
    generator: torch.Generator | None = None,
    *,
    analysis: Analysis | None = None,
    **options: Any,
) -> nn.Module:
    """The paper's initialisation: every aligned skeleton weight becomes 1 (or ±1 at random), in place.

    This changes the function of the network; it is meant for training from scratch. Units whose aligned weight is 0
    receive their skeleton too.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    >>> init_skeleton_(model)[0].weight.diagonal().tolist()
    [1.0, 1.0]
    """
    require_one_of("sign", sign, ("positive", "random"))
    found = analyzed(model, analysis, options, "pin")
    require_finite(model)
    _set_skeleton_(model, found, sign, generator)
    return model


@on_cpu
def _set_skeleton_(model: nn.Module, found: Analysis, sign: str, generator: torch.Generator | None) -> None:
    parameters, weights = dict(model.named_parameters()), weights_of(model)
    edges, n = found.transparent, found.H_paper + 1
    rows = rows_of(edges)
    to_ground = walks(rows, n)
    shapes = {name: p.shape for name, p in parameters.items()}
    marks: dict[str, Tensor] = {}
    for side, chosen in to_ground.chosen.items():
        index, _ = pick(rows, to_ground, weights, shapes, side, None)
        for e, units in zip(edges, by_edge(chosen, len(edges)), strict=True):
            if len(units) and parameters[e.name].requires_grad:
                marks.setdefault(e.name, torch.zeros(parameters[e.name].numel(), dtype=torch.bool))[index[units]] = True
    with torch.no_grad():
        for name, mark in marks.items():
            w = parameters[name]
            ones = torch.ones(int(mark.sum()), dtype=w.dtype)
            if sign == "random":
                ones = shared(parameters, ones * (torch.randint(2, ones.shape, generator=generator) * 2 - 1))
            signs = torch.zeros(w.shape, dtype=w.dtype)
            signs.view(-1)[mark] = ones
            here = cut(signs, w).to(w.device)
            local(w).copy_(torch.where(here != 0, here, local(w)))
