"""Drawings: every weight a line, free skeleton weights one per unit, and basis paths that are basis paths."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from gspace import analyze, init_skeleton_
from gspace.lab.examples import mlp, residual
from gspace.lab.wiring import Drawing, arrange, basis_path
from gspace.optim.skeleton import Skeleton, build_skeleton
from gspace.paths.explicit import basis_paths


def drawn(model: nn.Module, **options: str) -> tuple[Drawing, Skeleton]:
    analysis = analyze(model, **options)
    init_skeleton_(model, analysis=analysis)
    skeleton = build_skeleton(model, analysis)
    return arrange(model, skeleton), skeleton


@pytest.mark.parametrize("widths", [(3, 4, 4, 2), (3, 2, 5, 4, 2), (2, 2, 6, 3), (4, 4)])
def test_the_lines_of_a_perceptron_are_its_weights(widths: tuple[int, ...]) -> None:
    model = mlp(widths, bias=False)
    drawing, skeleton = drawn(model)
    m, H = sum(p.numel() for p in model.parameters()), sum(widths[1:-1])
    kinds = list(drawing.lines.values())
    assert (len(kinds), kinds.count("free"), skeleton.H) == (m, H, H)
    columns = sorted(x for x, _ in drawing.place.values())
    assert columns == [float(layer) for layer, width in enumerate(widths) for _ in range(width)]
    assert len(set(drawing.place.values())) == sum(widths)


@pytest.mark.parametrize("widths", [(3, 4, 4, 2), (3, 2, 5, 4, 2), (2, 2, 6, 3)])
def test_its_basis_paths_are_those_of_the_definition(widths: tuple[int, ...]) -> None:
    model = mlp(widths, bias=False)
    drawing, skeleton = drawn(model)
    paths = [basis_path(drawing, skeleton, line) for line, kind in drawing.lines.items() if kind != "free"]
    for path in paths:
        assert (path[0][0][0], path[-1][1][0]) == ("start", "end")
        assert all(before[1] == after[0] for before, after in pairwise(path))
        assert sum(drawing.lines[line] == "other" for line in path) <= 1
    basis = basis_paths(skeleton, dict(model.named_parameters()))
    assert len(paths) == len(basis.paths)
    # As sets of (layer, place among the layer's nodes): the same paths, not only as many.
    found = {
        tuple((drawing.names[line], drawing.place[line[0]][1], drawing.place[line[1]][1]) for line in p) for p in paths
    }
    literal = {tuple(_named(skeleton, step, widths) for step in path) for path in basis.paths}
    assert found == literal


def _named(skeleton: Skeleton, step: tuple[int, int], widths: tuple[int, ...]) -> tuple[str, float, float]:
    """A weight as (parameter, height of its tail, height of its head)."""
    edge, flat = step
    layer = edge
    out, into = divmod(flat, widths[layer])
    return skeleton.edges[edge].name, (widths[layer] - 1) / 2 - into, (widths[layer + 1] - 1) / 2 - out


@pytest.mark.parametrize("mode", ["pin", "tie"])
def test_residual_networks_are_drawn(mode: str) -> None:
    torch.manual_seed(0)
    drawing, skeleton = drawn(residual(width=4, blocks=2), residual=mode)
    assert list(drawing.lines.values()).count("free") == skeleton.H == (8 if mode == "pin" else 12)
    for line, kind in drawing.lines.items():
        if kind == "trained":
            path = basis_path(drawing, skeleton, line)
            assert (path[0][0][0], path[-1][1][0]) == ("start", "end")
