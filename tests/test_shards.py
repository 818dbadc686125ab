"""A step of several who hold a part of every parameter: their sums meet in `Plan.reduce` and nowhere else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

import gspace
import zoo
from gspace.optim import choice, eager, exact, step
from gspace.optim import plan as plans
from gspace.optim.eager import Rules
from gspace.optim.plan import Plan

RANKS, LR = 3, 0.05


def stored_both_ways() -> nn.Sequential:
    """Groups, and weights stored (in, out); one layer has fewer outputs than there are ranks."""
    layers = [nn.Conv2d(2, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, groups=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 25, 2))


# The network, an input, and the dimension of a matrix that is divided.
CASES = {
    "mlp": (lambda: zoo.mlp(5, 8, 7, 3), (5,), 0),
    "mlp by columns": (lambda: zoo.mlp(5, 8, 7, 3), (5,), 1),
    "groups": (stored_both_ways, (2, 6, 6), 0),
    "groups by columns": (stored_both_ways, (2, 6, 6), 1),
    "resnet": (lambda: zoo.ResNet(zoo.BasicBlock, (1, 1), 4), (3, 8, 8), 0),
}


class Meeting:
    """Adds up what the ranks bring, and counts how often they meet."""

    def __init__(self) -> None:
        self.barrier, self.count = Barrier(RANKS), 0
        self.brought: dict[int, Tensor] = {}

    def reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add(sums: Tensor) -> Tensor:
            self.brought[rank] = sums
            self.barrier.wait(60)
            total = torch.stack([self.brought[r] for r in range(RANKS)]).sum(0)
            self.barrier.wait(60)
            self.count += rank == 0
            return total

        return add


def take(plan: Plan, rule: step.BatchNormRule, weights: list[Tensor], grads: list[Tensor]) -> None:
    """A step of SGD on path values."""
    shown, path_grads = ([torch.empty_like(w) for w in weights] for _ in range(2))
    rules = Rules(rule, "fixed", 1.5, 1.1)
    at, root_grad = eager.observed(plan, rule, weights, grads, torch.float64)
    ends = eager.show(plan, rule, at, root_grad, weights, grads, shown, path_grads)
    for v, g in zip(shown, path_grads, strict=True):
        v -= LR * g
    eager.allocate(plan, rules, at, ends, weights, shown)


@pytest.mark.parametrize("rule", ["released", "paper", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_parts_take_the_step_of_the_whole(name: str, rule: step.BatchNormRule) -> None:
    make, shape, wanted = CASES[name]
    model = make().double()
    model(torch.randn(4, *shape, dtype=torch.float64)).square().mean().backward()
    found = gspace.analyze(model, example_input=torch.randn(2, *shape, dtype=torch.float64))
    named, masks = dict(model.named_parameters()), {}
    if rule == "exact":
        chosen = exact.choose(model, found, model.parameters(), final=True)
        masks, _ = exact.absorbed_rows(found)
    else:
        chosen = choice.choose(model, found, "balanced", model.parameters())
    layers = plans.layers_of(chosen.skeleton, {k: p.detach() for k, p in named.items()}, masks)
    parameters = [named[layer.edges.name] for layer in layers]
    whole = [p.detach().clone() for p in parameters]
    take(plans.plan(chosen.skeleton, layers, chosen.references), rule, whole, [p.grad for p in parameters])
    assert any(not torch.equal(w, p) for w, p in zip(whole, parameters, strict=True))
    cuts = [min(wanted, p.dim() - 1) for p in parameters]
    after = [[torch.empty(0)] * RANKS for _ in parameters]
    meeting = Meeting()

    def rank(r: int) -> None:
        places = [(d, *(p.shape[d] * i // RANKS for i in (r, r + 1))) for d, p in zip(cuts, parameters, strict=True)]
        mine = [plans.part(x, p.shape, *at) for x, p, at in zip(layers, parameters, places, strict=True)]
        plan = plans.plan(chosen.skeleton, mine, chosen.references, meeting.reduce(r))
        narrow = [(d, a, b - a) for d, a, b in places]
        weights = [p.detach().narrow(*at).clone() for p, at in zip(parameters, narrow, strict=True)]
        take(plan, rule, weights, [p.grad.narrow(*at).clone() for p, at in zip(parameters, narrow, strict=True)])
        for k, w in enumerate(weights):
            after[k][r] = w

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(rank, range(RANKS)))
    assert meeting.count == (1 if rule == "exact" else 2)
    for pieces, d, w in zip(after, cuts, whole, strict=True):
        torch.testing.assert_close(torch.cat(pieces, d), w, rtol=1e-12, atol=1e-14)


def test_a_layer_that_all_hold_is_counted_once() -> None:
    model = zoo.mlp(5, 8, 3).double()
    chosen = choice.choose(model, gspace.analyze(model), "balanced", model.parameters())
    named = {name: p.detach() for name, p in model.named_parameters()}
    layers = plans.layers_of(chosen.skeleton, named)
    weights = [named[layer.edges.name] for layer in layers]

    def observed(counts: bool) -> tuple[step.Coordinates, step.Flow]:
        mine = [replace(layer, counts=counts) for layer in layers]
        return step.observe(
            plans.plan(chosen.skeleton, mine, chosen.references), weights, weights, torch.float64, "released"
        )

    at, sums = observed(True)
    assert bool((at.incoming != 0).all())
    assert bool(sums.out.any())
    at, sums = observed(False)
    assert not bool(at.incoming[1:].any())
    assert not bool(torch.stack(sums[:3]).any())


def test_rows_before_a_norm_cannot_be_divided() -> None:
    model = zoo.mlp(5, 8, 3, norm=True)
    chosen = choice.choose(model, gspace.analyze(model), "balanced", model.parameters())
    layer = plans.layers_of(chosen.skeleton, dict(model.named_parameters()))[0]
    with pytest.raises(ValueError, match="rows before a norm"):
        plans.part(layer, (8, 5), 1, 0, 2)
