"""Walks to ground against their definition, edge by edge; linear equations of layers against a dense solve."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor, nn

import gspace
from gspace.analysis import Edges
from gspace.group.solve import DENSE, Pattern
from gspace.optim.walks import OTHER, Side, best_places, first_edges, rows_of, walks


def random_edges(rng: Random, units: int, count: int) -> list[Edges]:
    """Parameters between any units, ground among them: circles, units that nobody writes, uses at one place."""
    edges = []
    for k in range(count):
        groups, out, into = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 3)
        head, tail = (
            torch.tensor([[rng.randint(0, units) for _ in range(n)] for _ in range(groups)]) for n in (out, into)
        )
        first = rng.randint(0, count)
        edges.append(Edges(f"p{k}", head, tail, False, False, first, first + rng.randint(0, 3)))
    return edges


def one_by_one(edges: Sequence[Edges], live: Tensor, side: Side) -> Tensor:
    """The definition: edges in the order of their places take the units that have none, if the other end is nearer."""
    place = [e.first if side == "head" else -e.last for e in edges]
    result = torch.full(live.shape, -1)
    for k in sorted(range(len(edges)), key=lambda k: place[k]):
        ends = {"head": edges[k].head.tolist(), "tail": edges[k].tail.tolist()}
        for here, there in zip(ends[side], ends[OTHER[side]], strict=True):
            own = {u: int(result[u]) for u in there}
            near = [u == 0 or (bool(live[u]) and own[u] >= 0 and place[own[u]] < place[k]) for u in there]
            for u in here if any(near) else ():
                if u > 0 and bool(live[u]) and result[u] < 0:
                    result[u] = k
    return result


@pytest.mark.parametrize("seed", range(60))
def test_first_edges_are_those_found_one_by_one(seed: int) -> None:
    rng = Random(seed)
    units = rng.randint(1, 12)
    edges = random_edges(rng, units, rng.randint(1, 14))
    rows, live = rows_of(edges), torch.tensor([True, *(rng.random() < 0.8 for _ in range(units))])
    for side in OTHER:
        assert torch.equal(first_edges(rows, live, side), one_by_one(edges, live, side))
    found = walks(rows, units + 1)
    assert torch.equal(found.live[1:], (found.chosen["head"][1:] >= 0) & (found.chosen["tail"][1:] >= 0))


def test_a_network_without_edges_has_no_walks() -> None:
    found = walks(rows_of([]), 1)
    assert found.live.tolist() == [True]
    assert found.chosen["head"].tolist() == [-1]


def test_the_first_of_several_largest_places_is_taken() -> None:
    ids, value = torch.tensor([2, 1, 2, 1, 2]), torch.tensor([1.0, 3.0, 5.0, 3.0, 5.0])
    assert best_places(ids, value, 4).tolist() == [1, 2]


@pytest.mark.parametrize("count", [DENSE, DENSE + 1])
def test_equations_of_many_layers_are_those_of_few(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    chain = torch.arange(1, count)
    far = torch.randint(count, (2, 20), generator=generator)
    k, l = torch.cat([chain, far[0], chain[:5]]), torch.cat([chain - 1, far[1], torch.zeros(5, dtype=torch.long)])
    upper, lower = -torch.rand(2, len(k), generator=generator, dtype=torch.float64)
    diagonal = torch.full((count,), 50.0, dtype=torch.float64)
    matrix = diagonal.diag().index_put((k, l), upper, accumulate=True).index_put((l, k), lower, accumulate=True)
    b = torch.randn(count - 1, generator=generator, dtype=torch.float64)
    expected = torch.linalg.solve(matrix[1:, 1:], b)
    pattern = Pattern(count, k, l)
    assert (pattern.elimination is None) == (count <= DENSE)
    torch.testing.assert_close(pattern.solver(diagonal, upper, lower)(b), expected, rtol=1e-12, atol=1e-14)


class Kernels(nn.Module):
    """A convolution of 1 × 1, one of 1 × 9, one of 3 × 3 and a linear layer, all 8 × 8 or 8 × 8 × 9."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.point, self.fc, self.head = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 1),
            nn.Linear(8, 8),
            nn.Linear(8, 2),
        )
        self.row, self.square = nn.Conv2d(8, 8, (1, 9), padding=(0, 4)), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.square(self.row(self.point(self.stem(x).relu()).relu()).relu()).relu()
        return self.head(self.fc(x.mean((2, 3))).relu())


def test_layers_of_one_size_may_have_other_kernels() -> None:
    torch.manual_seed(0)
    model = Kernels()
    optimizer = gspace.GSGD(model, lr=0.01, example_input=torch.randn(2, 3, 8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    assert optimizer.skeleton.H == 40
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
