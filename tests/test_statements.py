"""Eq. (1) and the theorems of the paper, on networks written out in full, with examples where a statement fails."""

import pytest
import torch
from torch import Tensor, nn

import gspace
import statements as S
import zoo
from dense import BY_NAME, SMALL, Explicit, Small, explicit, scaled
from gspace import paths as P

networks = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
mlps = pytest.mark.parametrize("name", ["mlp", "mlp-wide", "mlp-bias"])


def loaded(net: Explicit, weights: Tensor) -> nn.Module:
    """The model with these weights."""
    net.model.load_state_dict(net.basis.wiring.split(weights), strict=False)
    return net.model


@mlps
def test_output_is_a_sum_over_paths(name: str) -> None:
    net = explicit(BY_NAME[name])
    paths = P.enumerate_paths(net.wiring)
    by_paths = S.output_by_paths(net.model, net.wiring, paths, net.x)
    torch.testing.assert_close(by_paths, net.model(net.x), rtol=1e-12, atol=1e-13)
    status = P.activation_status(net.wiring, paths, S.active_units(net.model, net.wiring, net.x))
    assert 0 < status.double().mean() < 1


def test_output_by_paths_refuses_what_is_no_mlp() -> None:
    net = explicit(BY_NAME["grouped"])
    with pytest.raises(ValueError, match="Conv1d"):
        S.output_by_paths(net.model, net.wiring, P.enumerate_paths(net.wiring), net.x)
    model = zoo.mlp(3, 4, 3, 2)
    wiring = P.wire(gspace.analyze(model, pin=["1"]).edges, dict(model.named_parameters()))
    with pytest.raises(ValueError, match="layer '0' are pinned"):
        S.output_by_paths(model, wiring, P.enumerate_paths(wiring), torch.ones(1, 3))


@mlps
@pytest.mark.parametrize("seed", range(5))
def test_theorem_3_3(name: str, seed: int) -> None:
    """Both directions: a rescaled network, one with another weight, one whose path values agree but not its status."""
    net = explicit(BY_NAME[name], seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, net.x.shape[1], generator=generator, dtype=torch.float64)
    paths, w = P.enumerate_paths(net.wiring), net.wiring.flatten(dict(net.model.named_parameters()))
    flipped = torch.ones(net.wiring.H + 1, dtype=torch.float64)
    flipped[1] = -1
    others = {
        "rescaled": (scaled(net.wiring, w, generator), (True, True, True)),
        "one weight": (torch.cat([w[:1] * 1.01, w[1:]]), (False, False, None)),
        "unit flipped": (w * flipped[net.wiring.head] * flipped[net.wiring.tail], (False, True, False)),
    }
    first = (w, S.active_units(net.model, net.wiring, x))
    for other, expected in others.values():
        second = (other, S.active_units(loaded(net, other), net.wiring, x))
        statement = S.theorem_3_3(net.wiring, paths, first, second)
        assert statement
        for value, want in zip(statement.evidence.values(), expected, strict=True):
            assert want is None or value == want


@networks
def test_theorem_3_6(case: Small, generator: torch.Generator) -> None:
    net = explicit(case)
    w, wiring = net.weights, net.basis.wiring
    same = S.theorem_3_6(net.basis, w, scaled(wiring, w, generator))
    assert same
    assert same.evidence["equivalent"]
    other = w.clone()
    other[net.basis.kept[0]] *= 1.01
    different = S.theorem_3_6(net.basis, w, other)
    assert different
    assert not different.evidence["equivalent"]


def test_theorem_3_6_needs_equal_signs_of_the_free_weights() -> None:
    net = explicit(BY_NAME["mlp"])
    flipped = torch.ones(14, dtype=torch.float64)
    flipped[3] = -1
    wiring = net.basis.wiring
    other = net.weights * flipped[wiring.head] * flipped[wiring.tail]
    torch.testing.assert_close(P.odot(other, net.basis.A), P.odot(net.weights, net.basis.A), rtol=0, atol=0)
    with pytest.raises(ValueError, match="differ in sign"):
        S.theorem_3_6(net.basis, net.weights, other)


@networks
def test_corollary_3_8(case: Small, generator: torch.Generator) -> None:
    net = explicit(case)
    x = torch.randn(100, *case.shape, generator=generator, dtype=torch.float64)
    statement = S.corollary_3_8(net.basis, net.weights, lambda w: net.network(w, x), generator)
    assert statement, statement
    wrong = S.corollary_3_8(net.basis, net.weights, lambda w: w[net.basis.free] * w.sum(), generator)
    assert not wrong


@networks
def test_theorem_4_1(case: Small, generator: torch.Generator) -> None:
    net = explicit(case)
    statement = S.theorem_4_1(net.basis, net.weights, net.loss, lr=1e-3, steps=20, generator=generator)
    assert statement, statement
    assert statement.evidence["gap in w"] > 0.1
    assert statement.evidence["moved in v"] > 1e-3
    uneven = S.theorem_4_1(net.basis, net.weights, lambda w: w.square().mean(), lr=1e-3, steps=20, generator=generator)
    assert not uneven  # a loss that sees the scales of units
