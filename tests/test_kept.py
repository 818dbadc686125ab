"""Nothing is lost: every network keeps the units that tracing its graph gave, or gains some for a named reason.

`old_counts.json` holds (H, H_absorbed, H_paper) of the engine before this one, for both residuals: `analyze` on every
network of `cases`, the dead ends of `zoo`, and every classifier of torchvision 0.15.2, with two rows as example.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gspace
import zoo
from cases import CASES
from invariance import draw_inputs

OLD = json.loads(Path(__file__).with_name("old_counts.json").read_text())
DEAD = {
    "dead-ends": (zoo.DeadEnds, 5),
    "dead-stream": (zoo.DeadStream, 4),
    "dead-stream-no-head": (partial(zoo.DeadStream, head=False), 4),
}
# Units gained, exact and absorbed.
GAINED = {
    # Two norms' gains, V → O, Q → K, of 8 channels each.
    **{("transformer", residual): (32, 0) for residual in ("pin", "tie")},
    # V → O and Q → K of 8; its norms stand behind the sums: the first one's gains share one scale if sums are tied.
    ("transformer-torch", "pin"): (16, 0),
    ("transformer-torch", "tie"): (16, 1),
    # Value and gate: 7 each.
    **{("gated", residual): (14, 0) for residual in ("pin", "tie")},
    # The shared layer may grow by t if its readers shrink by t and t².
    **{("tied-weights", residual): (1, 0) for residual in ("pin", "tie")},
}
# Families of torchvision that gain; all others stay as they are.
GAINING = {
    "convnext": "gains of the norms, scales that norms absorb",
    "efficientnet": "streams behind stochastic depth, which the graph held for one operation",
    "maxvit": "gains of the norms, V → O, Q → K",
    "swin": "gains of the norms, V → O, Q → K (Swin v1; in v2 cosines absorb the rows of q and k)",
    "vit": "gains of the norms, V → O, Q → K",
}


def network(name: str) -> tuple[Callable[[], nn.Module], tuple[Tensor, ...]]:
    """A factory and an example of two rows."""
    if name in DEAD:
        factory, width = DEAD[name]
        return factory, (torch.randn(2, width, generator=torch.Generator().manual_seed(0)),)
    case = next(case for case in CASES if case.name == name)
    return case.build, draw_inputs(case, 0, torch.float32, batch=2)


@pytest.mark.parametrize("residual", ["pin", "tie"])
@pytest.mark.parametrize("name", OLD["zoo"])
def test_networks_of_the_zoo_keep_their_units(name: str, residual: gspace.analysis.Residual) -> None:
    factory, example = network(name)
    H, H_absorbed, H_paper = OLD["zoo"][name][residual]
    more, more_absorbed = GAINED.get((name, residual), (0, 0))
    found = gspace.analyze(factory(), example, residual=residual)
    assert (found.H, found.H_absorbed) == (H + more, H_absorbed + more_absorbed)
    assert found.H_paper >= H_paper if more else found.H_paper == H_paper


def test_every_old_count_is_compared() -> None:
    assert set(OLD["zoo"]) <= {case.name for case in CASES} | set(DEAD)


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["pin", "tie"])
@pytest.mark.parametrize("name", OLD["torchvision"])
def test_classifiers_of_torchvision_keep_their_units(name: str, residual: gspace.analysis.Residual) -> None:
    """On the meta device: the largest has 645 million weights."""
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    old = OLD["torchvision"][name]
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with nullcontext() if name.startswith("regnet") else torch.device("meta"):  # a RegNet reads values as it is built
        model = models.get_model(name, weights=None, **options).to("meta")
    found = gspace.analyze(model, torch.empty(2, 3, old["size"], old["size"], device="meta"), residual=residual)
    H, H_absorbed, _ = old[residual]
    if name.startswith(tuple(GAINING)):
        assert found.H >= H
        assert found.H_absorbed >= H_absorbed
    else:
        assert (found.H, found.H_absorbed) == (H, H_absorbed)
