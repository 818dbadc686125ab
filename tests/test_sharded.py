"""Parameters that are divided among processes: the step is that of one process, and what crosses them is small.

Two processes serve all tests of the default run; four are slow to start, and see what two cannot: copies of parts.
"""

import importlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import gspace
import sharded
from benchmarks.ranks import Collectives, page
from gspace.sharding import box, cut, edges_here, local
from ranks import RankError, Ranks, running

EXAMPLES = str(Path(__file__).parent.parent / "examples")
EVERY = [name for name in sharded.OPTIMIZERS if name.partition("-")[2] in ("", "momentum", "sgd")]


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    if "llama" in request.node.name:
        pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with running(2, EXAMPLES) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with running(4) as ranks:
        yield ranks


# Steps ----------------------------------------------------------------------------------------------------------------

STEPS = [
    (name, way, optimizer)
    for way, names in {"fsdp": ("mlp", "cnn", "llama"), "tensor": ("mlp", "llama")}.items()
    for name in names
    for optimizer in ("gsgd-momentum", "adamw")
]
OPTIONS = [("mlp", "fsdp", "gsgd-clipped"), ("cnn", "fsdp", "gsgd-paper"), ("cnn", "fsdp", "gsgd-exact")]
OPTIONS += [("mlp", "fsdp", "path-momentum"), ("mlp", "fsdp", "frozen-momentum"), ("mlp", "offload", "gsgd-momentum")]
OPTIONS += [("mlp", "tensor", "path"), ("mlp", "tensor", "frozen"), ("mlp", "tensor", "gsgd-clipped")]
COPIES = [("mlp", "hybrid", "gsgd-momentum"), ("llama", "hybrid", "adamw"), ("cnn", "hybrid", "gsgd-exact")]
COPIES += [
    ("mlp", "pairs", "gsgd-clipped"),
    ("mlp", "both", "gsgd-momentum"),
    ("llama", "both", "adamw"),
    ("mlp", "both", "path-momentum"),
]


def require_small(gaps: list[float], bound: float) -> None:
    assert max(gaps) < bound, gaps
    assert len(set(gaps)) == 1, "ranks have other weights"


LONG = [("llama", "fsdp", "gsgd-momentum"), ("llama", "tensor", "adamw")]
REST = [("llama", "fsdp", "adamw"), ("llama", "tensor", "gsgd-momentum")]


def _turns(cases: list[tuple[str, str, str]], slow: list[tuple[str, str, str]]) -> Any:
    """A Llama takes seconds: of its four cases two have their turn."""
    marked = [pytest.param(*case, marks=pytest.mark.slow if case in slow else ()) for case in cases]
    return pytest.mark.parametrize(("name", "way", "optimizer"), marked)


@_turns(STEPS + OPTIONS, LONG)
def test_two_ranks_train_like_one(two: Ranks, name: str, way: str, optimizer: str) -> None:
    require_small(two(sharded.gap, name, way, optimizer, torch.float64), 1e-9)


@_turns(STEPS, REST)
def test_two_ranks_train_like_one_in_float32(two: Ranks, name: str, way: str, optimizer: str) -> None:
    require_small(two(sharded.gap, name, way, optimizer, torch.float32), 1e-5)


def test_adamw_takes_a_bias_before_batchnorm_where_rounding_does() -> None:
    """Why `gap` leaves it out: the same in torch's own AdamW, in one process, of weights that are a rounding apart."""
    plain, moved = (sharded.make("cnn", torch.float32)[0] for _ in range(2))
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + 1e-7 * torch.rand_like(p).sub_(0.5).sign_())
    for net in (plain, moved):
        sharded.train(net, torch.optim.AdamW(net.parameters(), 3e-3), "cnn", 40)
    for (name, p), q in zip(plain.named_parameters(), moved.parameters(), strict=True):
        gap = sharded.apart([p.detach()], [q.detach()])
        assert gap > 1e-4 if name == "3.bias" else gap < 1e-5, name
    with torch.no_grad():
        x, _ = sharded.NETWORKS["cnn"].batch(torch.float32)
        assert sharded.apart([plain(x)], [moved(x)]) < 1e-5


def test_forward_passes_in_lower_precision_change_no_more_than_that(two: Ranks) -> None:
    """Weights are float64, gradients come from float32."""
    require_small(two(sharded.gap, "mlp", "mixed", "adamw", torch.float64), 1e-5)


@_turns(STEPS + COPIES, STEPS + COPIES)
def test_four_ranks_train_like_one(four: Ranks, name: str, way: str, optimizer: str) -> None:
    require_small(four(sharded.gap, name, way, optimizer, torch.float64), 1e-9)


@_turns(STEPS, STEPS)
def test_four_ranks_train_like_one_in_float32(four: Ranks, name: str, way: str, optimizer: str) -> None:
    require_small(four(sharded.gap, name, way, optimizer, torch.float32), 1e-5)


# What crosses ranks ---------------------------------------------------------------------------------------------------


def _counted(sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[int, list[str], int]:
    """H, the collectives of a step, and their bytes."""
    torch.manual_seed(0)
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    analysis = gspace.analyze(model)
    sharded.fsdp(model, sharded.NETWORKS["mlp"])
    optimizer = gspace.GSGD(model, 0.05, 0.9, analysis=analysis, **options)
    for _ in range(2):
        model(torch.randn(4, sizes[0])).square().mean().backward()
        with Collectives() as seen:
            optimizer.step()
    return analysis.H, seen.names, seen.bytes


def test_a_step_sends_two_sums_of_unit_vectors(two: Ranks) -> None:
    narrow, wide = ((5, 40, 30, 3), (500, 40, 30, 300))
    for sizes in (narrow, wide):
        for H, names, sent in two(_counted, sizes, {}):
            assert names == ["allreduce"] * 2
            assert sent <= 8 * H * 4
    (_, names, _), _ = two(_counted, narrow, {"max_path_grad_norm": 1.0})
    assert names == ["allreduce"] * 3
    assert two(_counted, narrow, {})[0][2] == two(_counted, wide, {})[0][2], "it depends on the number of weights"


# The group ------------------------------------------------------------------------------------------------------------


def _moved(name: str, way: str, action: str) -> tuple[float, float, float]:
    """How far the function went, how far this rank's weights did, and how far that is from one process."""
    model, analysis = sharded.make(name)
    one = deepcopy(model)
    sharded.divide(model, name, way)
    model.eval(), one.eval()
    x = sharded.NETWORKS[name].batch(torch.float64)[0]
    before = sharded.outputs(model, x).detach().clone()
    here = [local(p).clone() for p in _resharded(model)]
    sharded.outputs(model, x)  # gathers again, and the root stays so: what is written there would be lost
    torch.manual_seed(dist.get_rank() if action == "random" else 3)  # ranks that draw for themselves
    for net in (model, one) if action != "random" else (model,):
        if action == "balance":
            gspace.balance_(net, analysis=analysis)
        else:
            draw = torch.Generator().manual_seed(4) if action == "rescale" else None
            gspace.rescale_(net, gspace.random_scales(net, draw, analysis=analysis), analysis=analysis)
    gap = float((sharded.outputs(model, x).detach() - before).abs().max() / before.abs().max())
    apart = max(float((local(p) - q).abs().max()) for p, q in zip(_resharded(model), here, strict=True) if len(q))
    away = max(float((p - q).abs().max()) for p, q in zip(sharded.whole(model), one.parameters(), strict=True))
    return gap, apart, 0.0 if action == "random" else away


def _resharded(model: nn.Module) -> list[Tensor]:
    return list(gspace.sharding.reshard(model).parameters())


MOVES = [("mlp", "fsdp", "rescale"), ("mlp", "fsdp", "balance"), ("mlp", "fsdp", "random"), ("cnn", "fsdp", "balance")]
MOVES += [("cnn", "fsdp", "rescale"), ("llama", "fsdp", "rescale"), ("mlp", "tensor", "balance")]
MOVES += [("llama", "tensor", "rescale"), ("llama", "fsdp", "balance")]


@pytest.mark.parametrize(("name", "way", "action"), MOVES)
def test_rescaling_stays_and_changes_no_function(two: Ranks, name: str, way: str, action: str) -> None:
    for gap, moved, away in two(_moved, name, way, action):
        assert gap < 1e-12
        assert moved > 1e-3, "the shards did not change"
        assert away < 1e-12


def _others() -> tuple[float, float, bool, bool, float]:
    """`path_norm`, `are_equivalent` with a rescaled and with another network, `init_skeleton_`, on one and on many."""
    model, analysis = sharded.make("mlp")
    one, copied = deepcopy(model), deepcopy(model)
    for net in (model, copied):
        sharded.divide(net, "mlp", "fsdp")
    found = gspace.analyze(model, torch.zeros(2, 5, dtype=torch.float64), residual="pin")
    assert (found.H, [e.name for e in found.edges]) == (analysis.H, [e.name for e in analysis.edges])
    norms = float(gspace.path_norm(model)), float(gspace.path_norm(one))
    gspace.rescale_(copied, gspace.random_scales(copied, analysis=analysis), analysis=analysis)
    alike = bool(gspace.are_equivalent(model, copied, analysis=analysis))
    for p in list(copied.parameters())[:1]:
        local(p).mul_(1.1)
    other = bool(gspace.are_equivalent(model, copied, analysis=analysis))
    torch.manual_seed(5 + dist.get_rank())
    gspace.init_skeleton_(model, "random", analysis=analysis)
    gspace.init_skeleton_(one, analysis=analysis)
    pairs = list(zip(sharded.whole(model), sharded.whole(one), strict=True))
    assert not all(torch.equal(p, q) for p, q in pairs), "no sign is random"
    return *norms, alike, other, max(float((p.abs() - q.abs()).abs().max()) for p, q in pairs)


def test_norms_equivalence_and_initialisation(two: Ranks) -> None:
    with torch.no_grad():
        for norm, whole, alike, other, signs in two(_others):
            assert norm == pytest.approx(whole, rel=1e-14)
            assert (alike, other, signs) == (True, False, 0)


def test_the_part_of_the_edges_is_the_edges_of_the_part() -> None:
    """For every kind of weight, dimension and range: units at the entries of a part are those at its place."""
    convolutions = [nn.Conv2d(6, 9, 3, groups=3), nn.ReLU(), nn.ConvTranspose2d(9, 6, 2, groups=3), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(6 * 25, 4), nn.ReLU(), nn.Linear(4, 2))
    weights = dict(model.named_parameters())
    checked = 0
    for e in gspace.analyze(model, torch.zeros(2, 6, 6, 6)).edges:
        p = weights[e.name].detach()
        entries = torch.arange(p.numel()).reshape(p.shape)
        ends = torch.stack(_ends(e, entries)).reshape(2, *p.shape)
        for dim, size in enumerate(p.shape):
            for start, stop in ((0, size // 2), (size // 3, size), (1, 1)):
                part = e.part(p.shape, dim, start, stop)
                inside = entries.narrow(dim, start, stop - start)
                found = torch.stack(_ends(part, torch.arange(inside.numel()).reshape(inside.shape)))
                assert torch.equal(found, ends.narrow(dim + 1, start, stop - start).reshape(2, -1))
                checked += 1
    assert checked == 3 * sum(weights[e.name].dim() for e in gspace.analyze(model, torch.zeros(2, 6, 6, 6)).edges)


def _ends(e: gspace.Edges, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Units that the entries of a parameter write and read, in order."""
    view = e.view(entries)
    found = torch.zeros(2, entries.numel(), dtype=torch.long)
    spare = [1] * (view.dim() - 3)
    found[0, view.reshape(-1)] = e.head.reshape(*e.head.shape, 1, *spare).expand(view.shape).reshape(-1)
    found[1, view.reshape(-1)] = e.tail.reshape(len(e.tail), 1, e.tail.shape[1], *spare).expand(view.shape).reshape(-1)
    return found[0], found[1]


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _save(folder: str, optimizer: str, way: str) -> None:
    model, analysis = sharded.make("mlp")
    sharded.divide(model, "mlp", way)
    made = sharded.OPTIMIZERS[optimizer](model, analysis)
    sharded.train(model, made, "mlp", 5, way)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, made)}, checkpoint_id=folder
    )


def _go_on(folder: str, optimizer: str, way: str | None) -> list[Tensor]:
    """In a network with other weights, and an optimizer that has never stepped."""
    model, analysis = sharded.make("mlp")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    if way is not None:
        sharded.divide(model, "mlp", way)
    made = sharded.OPTIMIZERS[optimizer](model, analysis)
    state: Any = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, made)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, made, state["optimizer"])
    sharded.train(model, made, "mlp", 10, way, seed=2)
    return sharded.whole(model)


def _uninterrupted(optimizer: str) -> list[Tensor]:
    model, analysis = sharded.make("mlp")
    made = sharded.OPTIMIZERS[optimizer](model, analysis)
    sharded.train(model, made, "mlp", 5)
    sharded.train(model, made, "mlp", 10, seed=2)
    return sharded.whole(model)


def require_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("optimizer", EVERY)
def test_a_checkpoint_of_two_ranks_goes_on_in_one(two: Ranks, tmp_path: Path, optimizer: str) -> None:
    two(_save, str(tmp_path), optimizer, "fsdp")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        require_near(_go_on(str(tmp_path), optimizer, None), _uninterrupted(optimizer))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "tensor"])
@pytest.mark.parametrize("optimizer", EVERY)
def test_a_checkpoint_of_two_ranks_goes_on_in_four(
    two: Ranks, four: Ranks, tmp_path: Path, optimizer: str, way: str
) -> None:
    two(_save, str(tmp_path), optimizer, "fsdp")
    for found in four(_go_on, str(tmp_path), optimizer, way):
        require_near(found, _uninterrupted(optimizer))


# Ranks that disagree --------------------------------------------------------------------------------------------------


def _not_finite(optimizer: str, outside: bool, started: bool) -> bool:
    """A gradient of one rank is not a number: whether all weights are what they were."""
    model, analysis = sharded.make("mlp")
    sharded.divide(model, "mlp", "fsdp")
    made = sharded.OPTIMIZERS[optimizer](model, analysis)
    if started:
        sharded.train(model, made, "mlp", 2, "fsdp")
    before = [local(p).clone() for p in model.parameters()]
    sharded.loss_of(model, *sharded.NETWORKS["mlp"].batch(torch.float64)).backward()
    if dist.get_rank() == 1:
        local(list(model.parameters())[-1 if outside else 0].grad).view(-1)[0] = float("nan")
    with pytest.raises(RuntimeError, match=f"rank 1: the gradient of {'4.bias' if outside else '0.weight'} is not fin"):
        made.step()
    return all(torch.equal(local(p), q) for p, q in zip(model.parameters(), before, strict=True))


STOPPED = [("gsgd-momentum", False), ("gsgd-exact", True), ("adamw", True), ("path", False), ("frozen", True)]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("optimizer", "outside"), STOPPED)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(
    two: Ranks, optimizer: str, outside: bool, started: bool
) -> None:
    assert two(_not_finite, optimizer, outside, started) == [True, True]


def _not_finite_parallel() -> None:
    """A loss of one rank is not a number: `DistributedDataParallel` tells all."""
    model = nn.parallel.DistributedDataParallel(sharded.mlp())
    optimizer = gspace.GSGD(model.module, 0.1)
    (model(torch.ones(2, 5)).sum() * (float("nan") if dist.get_rank() else 1.0)).backward()
    optimizer.step()


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(two: Ranks) -> None:
    with pytest.raises(RankError) as raised:
        two(_not_finite_parallel)
    assert all("the gradient of 0.weight is not finite" in error for error in raised.value.errors)


def _apart(way: str, name: str) -> None:
    """One rank has another value in what should be a copy."""
    model, analysis = sharded.make("mlp")
    sharded.divide(model, "mlp", way)
    if dist.get_rank() == 1:
        local(dict(model.named_parameters())[name]).detach().view(-1)[0] += 1e-12
    sharded.train(model, gspace.GSGD(model, 0.1, analysis=analysis), "mlp", 1, way)


def test_copies_that_are_none_are_named(two: Ranks) -> None:
    with pytest.raises(RankError) as raised:
        two(_apart, "tensor", "4.weight")
    assert all("rank 1 has other values of '4.weight' than rank 0" in error for error in raised.value.errors)


def _other_scales() -> None:
    model, analysis = sharded.make("mlp")
    sharded.divide(model, "mlp", "fsdp")
    before = [local(p).clone() for p in model.parameters()]
    scales = torch.full((analysis.H,), 1.5 + dist.get_rank(), dtype=torch.float64)
    try:
        gspace.rescale_(model, scales, analysis=analysis)
    finally:
        assert all(torch.equal(local(p), q) for p, q in zip(model.parameters(), before, strict=True))


def _too_large() -> None:
    """Only the last rows overflow, and only one rank has those."""
    model, analysis = sharded.make("mlp")
    sharded.divide(model, "mlp", "fsdp")
    scales = torch.ones(analysis.H, dtype=torch.float64)
    scales[7] = 1e308
    local(model[0].weight).detach()[-1] = 1e3
    gspace.rescale_(model, scales, analysis=analysis)


def test_a_rescaling_that_one_rank_refuses_is_refused_by_all(two: Ranks) -> None:
    for function, said in ((_other_scales, "rank 1: these are other scales"), (_too_large, "out of the range")):
        with pytest.raises(RankError) as raised:
            two(function)
        assert all(error.startswith("ValueError") and said in error for error in raised.value.errors)


def _example(seed: int, name: str, *args: Any) -> list[Tensor]:
    """Of weights that each rank draws for itself."""
    torch.manual_seed(seed + dist.get_rank())
    model, loss = importlib.import_module(name).train(*args)
    assert loss < 1.6, "log 5 without training"
    return sharded.whole(model)


def test_ranks_that_start_apart_end_equal_and_go_on_from_a_checkpoint(two: Ranks, tmp_path: Path) -> None:
    """`DistributedDataParallel` broadcasts what the first rank has; FSDP2 takes each rank's part of what it has."""
    two(_example, 1, "fsdp", 0, 1, str(tmp_path))
    parallel, whole = two(_example, 1, "ddp"), two(_example, 1, "fsdp")
    resumed = two(_example, 7, "fsdp", 1, 2, "", str(tmp_path))
    for first, second in (parallel, whole, resumed, (whole[0], resumed[0])):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_page_is_that_of_its_record() -> None:
    root = Path(EXAMPLES).parent
    text = (root / "docs" / "scale.md").read_text(encoding="utf-8")
    assert page(text, root / "results") == text, "python benchmarks/ranks.py --table docs/scale.md"
    assert all(path.name in text for path in Path(EXAMPLES).glob("*.py"))


# What is refused ------------------------------------------------------------------------------------------------------


def _refusals() -> list[str]:
    model, analysis = sharded.make("mlp")
    flat = FullyShardedDataParallel(deepcopy(model), device_id=torch.device("cpu"), use_orig_params=True)
    calls: list[Callable[[], Any]] = [
        lambda: gspace.GSGD(flat, 0.1),
        lambda: gspace.PathSGD(flat, 0.1),
        lambda: gspace.analyze(flat),
        lambda: gspace.rescale_(flat, torch.ones(14)),
        lambda: gspace.path_norm(flat),
    ]
    for made in (
        gspace.factory(gspace.GSGD, model, analysis=analysis),
        gspace.factory(gspace.FrozenSkeletonSGD, model, analysis=analysis),
        lambda params, **options: gspace.InGSpace(model, torch.optim.Adam, params=params, analysis=analysis),
    ):
        calls.append(lambda made=made: ZeroRedundancyOptimizer(model.parameters(), made, lr=0.1))
    said = []
    for call in calls:
        with pytest.raises(ValueError, match="FSDP2") as raised:
            call()
        said.append(str(raised.value))
    return said


def test_fsdp1_and_zero_are_refused_in_a_line(two: Ranks) -> None:
    for said in two(_refusals):
        assert len(said) == 8
        assert not any("\n" in line for line in said)


def _whole_only() -> list[str]:
    model, analysis = sharded.make("mlp")
    values = gspace.balancedness(model, analysis=analysis)
    penalty, at = gspace.BasisPathPenalty(0.1), deepcopy(model)
    penalty(at)
    sharded.divide(model, "mlp", "fsdp")
    assert torch.allclose(gspace.balancedness(model, analysis=analysis).incoming, values.incoming)
    calls: list[Callable[[], Any]] = [
        lambda: gspace.basis_path_norm(model, analysis=analysis),
        lambda: penalty(model),
        lambda: gspace.distance(at, model),
        lambda: gspace.invariance_gap(lambda net: gspace.GSGD(net, 0.1), model, [(None, None)], analysis=analysis),
        lambda: gspace.mappings(model, analysis=analysis),
        lambda: gspace.equalize_(model, analysis=analysis),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError, match=r"needs whole parameters, and '0\.weight' is sharded") as raised:
            call()
        said.append(str(raised.value))
    return said


def test_what_needs_whole_parameters_says_so(two: Ranks) -> None:
    assert [len(said) for said in two(_whole_only)] == [6, 6]


# The parts ------------------------------------------------------------------------------------------------------------


def _covered(name: str, way: str) -> list[tuple[str, Any]]:
    """Boxes of every parameter, and that they hold what is here."""
    model, analysis = sharded.make(name)
    values = {key: p.detach().clone() for key, p in model.named_parameters()}
    sharded.divide(model, name, way)
    parameters = dict(model.named_parameters())
    for key, p in parameters.items():
        assert torch.equal(cut(values[key], p), local(p.detach()))
        assert isinstance(p, DTensor) or box(p) == tuple((0, n) for n in p.shape)
    again = gspace.analyze(model, sharded.NETWORKS[name].batch(torch.float64)[0], residual="pin")
    assert (again.H, again.H_paper, again.m) == (analysis.H, analysis.H_paper, analysis.m)
    for e in analysis.edges:
        assert edges_here(e, parameters[e.name]).fits(local(parameters[e.name]))
    return [(key, box(p)) for key, p in parameters.items()]


@pytest.mark.parametrize(("name", "way"), [("mlp", "fsdp"), ("cnn", "fsdp"), ("llama", "tensor")])
def test_boxes_hold_what_is_here(two: Ranks, name: str, way: str) -> None:
    first, second = two(_covered, name, way)
    assert first != second
