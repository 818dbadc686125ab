"""Paths, structure matrix, basis paths and the dense step, on networks written out in full."""

import doctest
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gspace
import statements as S
import zoo
from dense import BY_NAME, SMALL, Explicit, OnPaths, Small, explicit, scaled, sgd
from gspace import paths as P
from gspace.optim.reference import products
from gspace.optim.skeleton import build_skeleton
from turns import turns

STEP = {"rtol": 1e-10, "atol": 1e-13}
networks = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


# Paths and the structure matrix


def test_the_papers_figure_1() -> None:
    assert doctest.testmod(P.explicit) == doctest.TestResults(failed=0, attempted=6)


@networks
def test_rank_is_m_minus_H(case: Small) -> None:
    net = explicit(case)
    paths = P.enumerate_paths(net.wiring)
    assert len(set(paths)) == len(paths)
    assert net.analysis.H_paper == net.wiring.H == case.H
    assert net.wiring.m - case.H == case.dim
    assert P.rank(P.structure_matrix(net.wiring, paths)) == case.dim
    assert S.theorem_3_4(net.wiring, paths)


@pytest.mark.parametrize("case", [case for case in SMALL if case.paths != "pieces"], ids=lambda case: case.name)
def test_paths_are_those_of_the_network(case: Small) -> None:
    """Soundness and completeness, by running the network: each path occurs, and together they are all there are."""
    net = explicit(case)
    paths = P.enumerate_paths(net.wiring)
    occurs, total = S.occurrences(net.model, net.wiring, paths, torch.ones(1, *case.shape, dtype=torch.float64))
    by_set = {frozenset(path): n for path, n in zip(paths, occurs.tolist(), strict=True)}
    assert sum(by_set.values()) == pytest.approx(total, rel=1e-12)
    assert bool((occurs > 1e-9).all()) == (case.paths == "exact")


def test_tied_streams_are_walked_in_order_of_use() -> None:
    """The units of a tied stream form circles; stem → up2 → down2 → up1 → down1 → head runs backwards: no path."""
    net = explicit(BY_NAME["residual-tie"])
    index = {e.name.removesuffix(".weight"): k for k, e in enumerate(net.wiring.edges)}
    order = ["stem", "up1", "down1", "up2", "down2", "head"]
    paths = P.enumerate_paths(net.wiring)
    visited = {tuple(k for k, _ in path) for path in paths}
    assert visited == {
        tuple(index[name] for name in order if name not in left_out)
        for left_out in ((), ("up1", "down1"), ("up2", "down2"), ("up1", "down1", "up2", "down2"))
    }
    backwards = tuple((index[name], 0) for name in ["stem", "up2", "down2", "up1", "down1", "head"])
    head, tail = (ids[net.wiring.positions([backwards])[0]] for ids in (net.wiring.head, net.wiring.tail))
    assert torch.equal(head[:-1], tail[1:])  # unit by unit it looks like a path
    occurs, _ = S.occurrences(net.model, net.wiring, [backwards], torch.ones(1, 2, dtype=torch.float64))
    forwards = tuple((index[name], 0) for name in order)
    assert set(backwards) == set(forwards)
    assert occurs.item() == 1  # once: the path forwards, which has the same weights
    assert forwards in paths
    assert backwards not in paths


def test_tied_streams_read_one_by_one_have_the_rank_of_their_own_paths() -> None:
    net = explicit(BY_NAME["streams"])
    paths = P.enumerate_paths(net.wiring)
    occurs, _ = S.occurrences(net.model, net.wiring, paths, torch.ones(1, 2, dtype=torch.float64))
    own = [path for path, n in zip(paths, occurs.tolist(), strict=True) if n > 0]
    assert len(own) == 32 < len(paths) == 48
    assert P.rank(P.structure_matrix(net.wiring, own)) == net.wiring.m - net.wiring.H


def test_a_layer_used_twice_without_a_stream_has_one_scale_that_is_no_units() -> None:
    """head·shared·shared·stem: the stem times t², the shared layer over t, is no scale of a unit."""
    net = explicit(BY_NAME["recurrent"])
    paths = P.enumerate_paths(net.wiring)
    own = [path for path in paths if len(path) == 4]
    assert P.rank(P.structure_matrix(net.wiring, own)) == net.wiring.m - net.wiring.H - 1
    assert not S.theorem_3_4(net.wiring, own)
    scale = {"stem.weight": 4.0, "shared.weight": 0.5, "head.weight": 1.0}
    other = torch.cat([w.reshape(-1) * scale[name] for name, w in net.wiring.split(net.weights).items()])
    torch.testing.assert_close(net.network(other, net.x), net.network(net.weights, net.x), rtol=1e-12, atol=0)
    assert S.scales_between(net.wiring, net.weights, other) is None


def test_weight_sharing_gives_squares() -> None:
    assert explicit(BY_NAME["loop"], choice="aligned").basis.A.max() == 2
    net = explicit(BY_NAME["shared"])
    A = P.structure_matrix(net.wiring, P.enumerate_paths(net.wiring))
    assert A.max() == 2
    v = P.path_values(net.wiring, net.weights, P.enumerate_paths(net.wiring))
    torch.testing.assert_close(P.odot(net.weights, A), v, rtol=1e-13, atol=0)


def test_exact_view_of_batch_norm() -> None:
    """γ, β write the units; a path ends at the next BatchNorm."""
    model = zoo.mlp(3, 4, 3, 2, norm=True)
    analysis, parameters = gspace.analyze(model), dict(model.named_parameters())
    wiring = P.wire(analysis.edges, parameters, H=analysis.H)
    assert P.rank(P.structure_matrix(wiring, P.enumerate_paths(wiring))) == analysis.m - analysis.H
    transparent = P.wire(analysis.transparent, parameters)
    assert S.theorem_3_4(transparent, P.enumerate_paths(transparent)).evidence["H"] == analysis.H_paper == 7


def test_too_many_paths_are_refused_with_their_number() -> None:
    model = zoo.mlp(30, 30, 30, 30, bias=False)
    wiring = P.wire(gspace.analyze(model).edges, dict(model.named_parameters()))
    with pytest.raises(ValueError, match="810000 paths, more than limit=200000"):
        P.enumerate_paths(wiring)


@networks
def test_count_is_the_number_of_paths(case: Small) -> None:
    net = explicit(case)
    n = len(P.enumerate_paths(net.wiring))
    assert P.count_paths(net.wiring) >= n
    if all(e.first == e.last for e in net.wiring.edges):
        assert P.count_paths(net.wiring) == n


# ⊙


def printed_odot(W: Tensor, A: Tensor) -> Tensor:
    """As the appendix prints it: the sign of every factor, whatever its power."""
    return W.sign().prod(-1, keepdim=True) * (W.abs().unsqueeze(-1) ** A).prod(-2)


def test_odot_is_an_action_with_integer_powers_only() -> None:
    net = explicit(BY_NAME["mlp-bias"])
    A, inverse = net.basis.A_tilde, net.basis.inverse
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(5, net.basis.wiring.m, generator=generator, dtype=torch.float64)
    assert torch.equal(A @ inverse, torch.eye(len(A), dtype=torch.long))
    torch.testing.assert_close(P.odot(P.odot(W, A), inverse), W, rtol=1e-12, atol=0)
    torch.testing.assert_close(P.odot(P.odot(W, A), A), P.odot(W, A @ A), rtol=1e-12, atol=0)
    printed = printed_odot(printed_odot(W, A), inverse)
    torch.testing.assert_close(printed.abs(), W.abs(), rtol=1e-12, atol=0)
    assert bool((printed.sign() != W.sign()).any(1).all())
    torch.testing.assert_close(printed_odot(W.abs(), A), P.odot(W.abs(), A), rtol=1e-12, atol=0)


def test_odot_refuses_fractional_powers() -> None:
    with pytest.raises(TypeError, match="integer powers"):
        P.odot(torch.ones(2), torch.full((2, 2), 0.5))


# Basis paths


@networks
@pytest.mark.parametrize("choice", ["aligned", "pivoted"])
def test_basis_paths_are_paths_and_a_basis(case: Small, choice: str) -> None:
    net = explicit(case, choice=choice)
    basis, wiring = net.basis, net.basis.wiring
    paths = P.enumerate_paths(wiring)
    assert set(basis.paths) <= set(paths)
    assert basis.A.shape == (wiring.m, case.dim)
    assert P.rank(basis.A) == case.dim
    assert torch.linalg.det(basis.A_tilde.double()).abs().item() == pytest.approx(1, rel=1e-9)
    assert torch.equal(basis.A_tilde @ basis.inverse, torch.eye(wiring.m, dtype=torch.long))
    for path in paths[:: len(paths) // 200 + 1]:
        assert torch.equal(basis.A @ P.combine(path, basis), P.structure_matrix(wiring, [path])[:, 0])


@networks
@pytest.mark.parametrize("choice", ["aligned", "pivoted"])
def test_products_along_the_skeleton(case: Small, choice: str) -> None:
    net = explicit(case, choice=choice)
    skeleton = build_skeleton(net.model, net.analysis, choice=choice)
    found = products(skeleton, dict(net.model.named_parameters()))
    for explicitly, value in zip(P.skeleton_products(net.basis, net.weights), found, strict=True):
        torch.testing.assert_close(explicitly, value, rtol=1e-12, atol=0)


class Drawn(nn.Module):
    """A chain of layers: ("plain", n) goes to width n, ("residual", n) adds a block of n, ("concat", n) appends n."""

    def __init__(self, width: int, layers: list[tuple[str, int]], bias: bool) -> None:
        super().__init__()
        self.kinds = [kind for kind, _ in layers]
        self.first, self.second = nn.ModuleList(), nn.ModuleList()
        for kind, n in layers:
            self.first.append(nn.Linear(width, n, bias=bias))
            self.second.append(nn.Linear(n, width, bias=bias) if kind == "residual" else nn.Identity())
            width = {"plain": n, "residual": width, "concat": width + n}[kind]
        self.head = nn.Linear(width, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for kind, first, second in zip(self.kinds, self.first, self.second, strict=True):
            y = second(first(x).relu())
            x = {"plain": lambda x, y: y, "residual": torch.add, "concat": lambda x, y: torch.cat([x, y], 1)}[kind](
                x, y
            )
        return self.head(x)


LAYER = st.tuples(st.sampled_from(["plain", "residual", "concat"]), st.integers(1, 3))


@given(
    st.integers(1, 3), st.integers(1, 3), st.lists(LAYER, max_size=3), st.booleans(), st.sampled_from(["pin", "tie"])
)
def test_random_networks(width: int, stem: int, layers: list[tuple[str, int]], bias: bool, residual: str) -> None:
    """rank(A) = m − H, the basis is real and unimodular, two ways to step agree: whatever the structure."""
    case = Small("drawn", partial(Drawn, width, [("plain", stem), *layers], bias), (width,), 0, 0, residual)
    net = explicit(case)
    paths = P.enumerate_paths(net.wiring)
    assert S.theorem_3_4(net.wiring, paths)
    assert set(net.basis.paths) <= set(P.enumerate_paths(net.basis.wiring))
    identity = torch.eye(net.basis.wiring.m, dtype=torch.long)
    assert torch.equal(net.basis.A_tilde @ net.basis.inverse, identity)
    grad = torch.func.grad(net.loss)(net.weights)
    dense = P.dense_step(net.basis, net.weights, grad, sgd(1e-3))
    torch.testing.assert_close(dense, P.autograd_step(net.basis, net.weights, net.loss, sgd(1e-3)), **STEP)


def test_a_basis_path_holds_at_most_one_weight_off_the_skeleton() -> None:
    """The paper's definition of a basis path, on its own ground: an MLP of equal widths, aligned."""
    net = explicit(Small("equal", partial(zoo.mlp, 3, 3, 3, 3, bias=False), (3,), H=6, dim=21), choice="aligned")
    diagonal = {(k, 4 * i) for k in range(3) for i in range(3)}
    paths = P.enumerate_paths(net.wiring)
    assert set(net.basis.paths) == {path for path in paths if sum(step not in diagonal for step in path) <= 1}


def test_combine_refuses_what_is_no_path() -> None:
    net = explicit(BY_NAME["mlp"])
    with pytest.raises(ValueError, match="does not run from ground to ground"):
        P.combine(((0, 0), (2, 0)), net.basis)


def test_a_skeleton_that_is_none_is_refused() -> None:
    net = explicit(BY_NAME["residual-tie"])
    skeleton = build_skeleton(net.model, net.analysis, choice="aligned")
    parameters = dict(net.model.named_parameters())
    with pytest.raises(ValueError, match=r"out\(u\) must read unit u"):
        P.basis_paths(replace(skeleton, out_index=skeleton.out_index[[0, 2, 1, 3, 4, 5, 6]]), parameters)
    index = {e.name: k for k, e in enumerate(skeleton.edges)}
    stream = skeleton.edges[index["head.weight"]].tail.reshape(-1)
    backwards = skeleton.out_edge.clone()
    backwards[stream] = index["up1.weight"]  # the first weight that reads the stream, not the last
    with pytest.raises(ValueError, match="in a circle"):
        P.basis_paths(replace(skeleton, out_edge=backwards), parameters)


# ICR, WA, one step


@networks
def test_inverse_chain_rule_solves_the_papers_equations(case: Small) -> None:
    net = explicit(case)
    grad = torch.func.grad(net.loss)(net.weights)
    G = P.jacobian(net.basis, net.weights)
    by_autograd = torch.func.jacrev(lambda w: P.odot(w, net.basis.A))(net.weights)
    torch.testing.assert_close(G, by_autograd, rtol=1e-12, atol=1e-14)
    path_grad, left_over = P.inverse_chain_rule(net.basis, net.weights, grad)
    torch.testing.assert_close(G.T @ path_grad, grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(left_over, torch.zeros(case.H, dtype=torch.float64), rtol=0, atol=1e-13)
    literal = torch.linalg.lstsq(G.T, grad[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(path_grad, literal, rtol=1e-8, atol=1e-11)


def references(net: Explicit) -> dict[str, Tensor | None]:
    """None is `reference="one"`; the other measures in the paths of another point with the same signs."""
    other = net.weights * torch.rand(net.weights.shape, generator=torch.Generator().manual_seed(7)).double().add(0.5)
    return {"one": None, "given": P.reference_values(net.basis, *P.skeleton_products(net.basis, other))}


OPTIMIZERS = {
    "sgd": {"optimizer": torch.optim.SGD},
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.1},
    "nesterov": {"optimizer": torch.optim.SGD, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "adam": {"optimizer": torch.optim.Adam},
}


@turns("case, rule, reference", SMALL, OPTIMIZERS, ["one", "given"])
def test_dense_and_autograd_steps_agree(case: Small, rule: str, reference: str) -> None:
    net, options = explicit(case), OPTIMIZERS[rule]
    k = references(net)[reference]
    dense = by_autograd = net.weights
    updates = [OnPaths(net.basis, lr=1e-3, **options) for _ in range(2)]
    for _ in range(20):
        grad = torch.func.grad(net.loss)(dense)
        dense = P.dense_step(net.basis, dense, grad, updates[0], k)
        by_autograd = P.autograd_step(net.basis, by_autograd, net.loss, updates[1], k)
        torch.testing.assert_close(dense, by_autograd, **STEP)
    assert torch.equal(dense[net.basis.free], net.weights[net.basis.free])
    assert (dense - net.weights).abs().max() > 1e-4


@networks
def test_paths_are_measured_in_the_reference(case: Small) -> None:
    """w·Ĩ(tail)·Õ(head) off the skeleton, Ĩ(r)·Õ(r) for a trained skeleton path."""
    net = explicit(case)
    wiring, kept, on_skeleton = net.basis.wiring, net.basis.kept, net.basis.on_skeleton
    other = net.weights * torch.rand(net.weights.shape, generator=torch.Generator().manual_seed(7)).double().add(0.5)
    (I, O), (I_ref, O_ref) = (P.skeleton_products(net.basis, w) for w in (net.weights, other))
    I, O = I / I_ref, O / O_ref
    v = P.odot(net.weights, net.basis.A) / P.reference_values(net.basis, I_ref, O_ref)
    head, tail, w = wiring.head[kept], wiring.tail[kept], net.weights[kept]
    assert 0 < on_skeleton.sum() < len(kept)
    torch.testing.assert_close(v[~on_skeleton], (w * I[tail] * O[head])[~on_skeleton], **STEP)
    torch.testing.assert_close(v[on_skeleton], (I[head] * O[head])[on_skeleton], **STEP)


@networks
def test_a_step_moves_v_as_sgd_does(case: Small) -> None:
    net = explicit(case)
    grad = torch.func.grad(net.loss)(net.weights)
    new = P.dense_step(net.basis, net.weights, grad, sgd(1e-3))
    path_grad, _ = P.inverse_chain_rule(net.basis, net.weights, grad)
    v = P.odot(net.weights, net.basis.A)
    torch.testing.assert_close(P.odot(new, net.basis.A), v - 1e-3 * path_grad, **STEP)


@networks
def test_a_step_commutes_with_rescaling(case: Small, generator: torch.Generator) -> None:
    net = explicit(case)
    after = []
    for weights in (net.weights, scaled(net.basis.wiring, net.weights, generator)):
        grad = torch.func.grad(net.loss)(weights)
        after.append(P.dense_step(net.basis, weights, grad, sgd(1e-3)))
    assert S.scales_between(net.basis.wiring, *after) is not None


def test_zeros_are_refused_by_ratios_and_moved_by_autograd() -> None:
    net = explicit(BY_NAME["mlp-bias"])
    weights = net.weights.clone()
    zero = int(net.basis.kept[~net.basis.on_skeleton][-1])
    weights[zero] = 0
    with pytest.raises(ValueError, match=r"other than 0, there are some in 4\.bias;"):
        P.dense_step(net.basis, weights, torch.ones_like(weights), sgd(0.1))
    assert P.autograd_step(net.basis, weights, net.loss, sgd(0.1))[zero] != 0
