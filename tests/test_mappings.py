"""Mappings for quantizers on small networks: found, checked, equalized, exported; bad input in one line."""

import importlib
import json
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import gspace
from gspace.lab import cli
from gspace.quantization import awq, smoothquant


class Residual(nn.Module):
    """x + b(relu(a(x))), whose stream has one scale per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, 7, 3, padding=1), nn.Conv2d(7, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.b(torch.relu(self.a(x))))


class SquaredReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Gain(nn.Module):
    """x · w with a parameter w of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class LayerScale(nn.Module):
    """head(x + fc2(relu(fc1(x))) · γ), whose γ reads the scale of fc2."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.gamma, self.head = nn.Linear(6, 8), nn.Linear(8, 6), Gain(*shape), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gamma(self.fc2(self.fc1(x).relu())))


class Experts(nn.Module):
    """Two experts as modules of their own, and the router that weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(6), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 5), "down": nn.Linear(5, 6)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights = self.gate(x).softmax(-1)
        outputs = [expert["down"](torch.relu(expert["up"](x))) for expert in self.experts]
        return sum(weights[..., k, None] * y for k, y in enumerate(outputs))


def batch_normed(*layers: nn.Module) -> nn.Module:
    """BatchNorms with statistics and gains of their own."""
    net = nn.Sequential(*layers)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.weight, m.running_var):
                nn.init.uniform_(t, 0.5, 2)
            for t in (m.bias, m.running_mean):
                nn.init.normal_(t)
    return net


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)]


NETWORKS = {
    "folded": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), *head(6)
    ),
    "not folded": lambda: batch_normed(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), *head(6)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), *head(6)
    ),
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 100, 5)
    ),
    "residual": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), Residual(6), Residual(6), *head(6)),
}
IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
every_network = pytest.mark.parametrize("name", NETWORKS)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double().eval()


def outputs(net: nn.Module, x: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return net(x)


def moved(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


def rounded(net: nn.Module, bits: int = 8) -> nn.Module:
    """Weights on a grid of 2^bits steps per tensor, biases as they are."""
    net = deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() > 1:
                step = p.abs().max() / (2 ** (bits - 1) - 1)
                p.copy_((p / step).round() * step)
    return net


@every_network
@pytest.mark.parametrize("by", ["max-abs", "l2"])
def test_equalizing_is_exact(name: str, by: Any) -> None:
    net = network(name)
    before, first = outputs(net), net[0].weight.clone()
    scales = gspace.equalize_(net, by, example_input=IMAGES)
    assert float(scales.log().abs().max()) > 0.01
    assert name == "not folded" or not torch.equal(first, net[0].weight)
    assert moved(before, outputs(net)) < 1e-12


@every_network
def test_equalizing_by_l2_is_balancing(name: str) -> None:
    net = network(name)
    other = deepcopy(net)
    gspace.equalize_(net, "l2", example_input=IMAGES, tolerance=1e-12)
    gspace.balance_(other, example_input=IMAGES)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def test_equalizing_by_the_largest_weight_makes_rows_and_columns_alike() -> None:
    net = network("folded")
    gspace.equalize_(net, example_input=IMAGES, tolerance=1e-9)
    for above, below in ((net[0], net[2]), (net[2], net[4])):
        rows, columns = above.weight.abs().amax((1, 2, 3)), below.weight.abs().amax((0, 2, 3))
        torch.testing.assert_close(rows, columns, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by", ["max-abs", "l2"])
def test_a_long_chain_of_layers_is_equal_in_the_end(by: Any) -> None:
    """Scales travel layer by layer: one sweep after another would need thousands without over-relaxation."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(30) for m in (nn.Linear(4, 4, bias=False), nn.ReLU()))).double()
    net[30].weight.data *= 1e6
    gspace.equalize_(net, by, example_input=torch.ones(1, 4, dtype=torch.float64))
    layers = [m.weight.detach() for m in net if isinstance(m, nn.Linear)]
    for above, below in pairwise(layers):
        sizes = (w.norm(dim=d) if by == "l2" else w.abs().amax(d) for w, d in ((above, 1), (below, 0)))
        torch.testing.assert_close(*sizes, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["folded", "depthwise", "grouped", "residual"])
def test_rounding_an_unbalanced_network_is_as_good_again_as_rounding_the_balanced_one(name: str) -> None:
    balanced = network(name)
    gspace.equalize_(balanced, example_input=IMAGES, tolerance=1e-9)
    exact = outputs(balanced)
    unbalanced = deepcopy(balanced)
    analysis = gspace.analyze(unbalanced, IMAGES)
    scales = gspace.random_scales(unbalanced, torch.Generator().manual_seed(1), std=2.0, analysis=analysis)
    gspace.rescale_(unbalanced, scales, analysis=analysis)
    good, bad = (moved(exact, outputs(rounded(net))) for net in (balanced, unbalanced))
    gspace.equalize_(unbalanced, analysis=analysis, tolerance=1e-9)
    assert bad > 10 * good
    assert moved(exact, outputs(rounded(unbalanced))) == pytest.approx(good, rel=1e-3)


def test_a_subset_leaves_the_other_layers_alone() -> None:
    net = network("folded")
    found = gspace.mappings(net, IMAGES)
    last = net[6 + 2].weight.clone()
    gspace.equalize_(net, mappings=found[:1], example_input=IMAGES)
    assert torch.equal(last, net[8].weight)
    assert not torch.equal(network("folded")[2].weight, net[2].weight)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_divides_activations_by_the_formula(alpha: float) -> None:
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)).double()
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    nn.init.uniform_(net[0].weight, 0.1, 9)
    before, activation, weight = outputs(net, x), outputs(net[0], x), net[1].weight.detach().clone()
    gspace.smooth_(net, [x[:20], x[20:]], alpha)
    s = activation.abs().amax(0) ** alpha / weight.abs().amax(0) ** (1 - alpha)
    torch.testing.assert_close(outputs(net[0], x), activation / s)
    torch.testing.assert_close(net[1].weight.detach(), weight * s)
    assert moved(before, outputs(net, x)) < 1e-12


def test_smoothing_behind_a_squared_relu() -> None:
    net = SquaredReLU().double()
    x = torch.randn(20, 4, dtype=torch.float64)
    before = outputs(net, x)
    (m,) = gspace.mappings(net, x)
    assert sorted(s.exponent for s in (*m.sources, *m.sinks)) == [-2, 1, 1]
    gspace.smooth_(net, x, 1.0, [m])
    assert moved(before, outputs(net, x)) < 1e-12
    torch.testing.assert_close(torch.relu(net.up(x)).square().amax(0), torch.ones(6, dtype=torch.float64))


def test_experts_need_their_router() -> None:
    net = Experts()
    x = torch.randn(7, 6)
    readers = ["gate", "experts.0.up", "experts.1.up"]
    assert gspace.check_mappings(net, [("norm", readers), ("re:.*up", ["re:.*down"])], x) == []
    (line,) = gspace.check_mappings(net, [("norm", readers[1:])], x)
    assert line.startswith("'gate' reads the scale of 'norm' too and is missing; applied, the output moves by")
    (line,) = gspace.check_mappings(net, [("norm", readers[:2])], x)
    assert line.startswith("'experts.1.up' reads")


SHAPES = [(6,), (1,), (), (1, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_whose_reader_is_a_vector_or_a_number_is_exact(shape: tuple[int, ...]) -> None:
    net, x = LayerScale(*shape), torch.randn(5, 6)
    found = gspace.mappings(net, x)
    assert [(m.kind, m.balance_layers) for m in found] == [("relu", ("fc2",)), ("linear", ("gamma.w",))]
    assert gspace.check_mappings(net, found, x) == []
    (line,) = gspace.check_mappings(net, [("fc1", ["gamma.w"])], x)[1:]
    assert line.startswith("'gamma.w' does not read the scale of 'fc1'")


@pytest.mark.parametrize("by", ["max-abs", "l2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gain_of_any_shape_is_equalized(shape: tuple[int, ...], by: Any) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    for net in (LayerScale(*shape), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Gain(*shape), nn.Linear(6, 9))):
        before = outputs(net.double(), x)
        assert gspace.check_mappings(net, gspace.mappings(net, x), x) == []
        scales = gspace.equalize_(net, by, example_input=x)
        assert float(scales.log().abs().max()) > 0.01
        assert moved(before, outputs(net, x)) < 1e-12


def test_a_gain_that_reads_no_channel_alone_is_tried_as_a_reader() -> None:
    """With sizes from the reader: the output does not move by 0."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Gain(8), nn.Linear(8, 3))
    (line,) = gspace.check_mappings(net, [("0", ["2.w"])], torch.randn(5, 4))
    assert float(line.rpartition("by ")[2]) > 1e-3


@pytest.mark.parametrize("gain", [False, True])
def test_smoothing_a_single_channel(gain: bool) -> None:
    """The weights behind it are read column by column, and each column has that channel."""
    x = torch.randn(5, 6, dtype=torch.float64)
    hidden = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Gain()) if gain else nn.Linear(6, 1)
    net = nn.Sequential(hidden, nn.ReLU(), nn.LazyLinear(20)).double()
    before = outputs(net, x)
    gspace.smooth_(net, x, 1.0, [m for m in gspace.mappings(net, x) if m.size == 1])
    assert moved(before, outputs(net, x)) < 1e-12
    assert float(outputs(net[:2], x).abs().max()) == pytest.approx(1)


@pytest.mark.parametrize("norm", [prune.identity, nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_copied_is_checked_and_left_alone(norm: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    norm(net[2], "weight")
    x = torch.randn(5, 4)
    net(x)  # in training: the weight is now the end of a graph
    before, held = {name: (id(t), t.clone()) for name, t in net.state_dict(keep_vars=True).items()}, net[2].weight
    lines = gspace.check_mappings(net, gspace.mappings(net, x), x)
    assert not any("report" in line for line in lines)
    after = net.state_dict(keep_vars=True)
    assert all(id(after[name]) == i and torch.equal(after[name], t) for name, (i, t) in before.items())
    assert net[2].weight is held


def test_a_layer_that_is_not_homogeneous() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    (line,) = gspace.check_mappings(net, [("0", ["2"])])
    assert "'0' carries no scale that can move into '2'" in line
    assert float(line.rpartition("by ")[2]) > 1e-3


def test_several_layers_that_write_one_scale() -> None:
    net = network("residual")
    found = gspace.mappings(net, IMAGES)
    (stream,) = (m for m in found if len(m.writers) > 1)
    assert (stream.smooth_layer, stream.writers) == ("0", ("0", "2.b", "3.b"))
    lines = gspace.check_mappings(net, [("0", stream.balance_layers)], IMAGES)
    assert [line.partition(";")[0] for line in lines] == ["'*.b' writes the scale of '*' too (in 2 places)"]


class Fused(nn.Module):
    """Attention with queries, keys and values in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


@pytest.mark.parametrize("name", [*NETWORKS, "fused", "gated", "squared", "experts"])
def test_what_is_found_is_exact_with_all_that_writes_a_scale_and_with_queries_and_keys(name: str) -> None:
    others = {"fused": (Fused, (2, 5, 8)), "gated": (Gated, (5, 4)), "squared": (SquaredReLU, (5, 4))}
    make, shape = (NETWORKS[name], IMAGES.shape) if name in NETWORKS else others.get(name, (Experts, (7, 6)))
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    found = gspace.mappings(net, x)
    written = json.loads(json.dumps([m.to_dict() for m in found]))
    for table in (found, written):
        assert gspace.check_mappings(net, table, x) == []
    for entry in written:
        entry["sources"][0]["exponent"] *= 2
        (line,) = gspace.check_mappings(net, [entry], x)
        assert "scales other entries" in line
        last = entry["writers"].pop()
        (line,) = gspace.check_mappings(net, [entry], x)
        assert line == f"{last!r} writes the scale of {entry['smooth_layer']!r} too"


def test_a_printed_table_folds_layers_that_repeat() -> None:
    layers = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(3)]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for m in self.layers:
                x = torch.tanh(m["down"](torch.relu(m["up"](x))))
            return x

    assert str(gspace.mappings(Stack())).splitlines()[1:] == ["8 × 3     relu  layers.*.up  layers.*.down"]


def test_names_are_those_inside_of_a_wrapper() -> None:
    net = network("folded")
    before, wrapped = outputs(net), nn.DataParallel(net)
    assert gspace.mappings(wrapped, IMAGES) == gspace.mappings(net, IMAGES)
    assert gspace.check_mappings(wrapped, [("0", ["2"])], IMAGES) == []
    gspace.equalize_(wrapped, example_input=IMAGES)
    assert not torch.equal(network("folded")[0].weight, net[0].weight)
    assert moved(before, outputs(net)) < 1e-12


def test_export() -> None:
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    found = gspace.mappings(net)
    entries = [{"smooth_layer": a, "balance_layers": [b]} for a, b in (("0", "1"), ("1", "3"))]
    assert awq(net, found) == entries
    assert smoothquant(net, found) == [[["1"], "0"]]
    assert gspace.check_mappings(net, entries) == []
    assert gspace.check_mappings(net, smoothquant(net, found)) == []


MISFITS: dict[str, tuple[Any, Any]] = {
    "a layer that reads the channels is no nn.Linear": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        torch.ones(1, 3, 2, 2),
    ),
    "a layer scales by a power of the factor": (SquaredReLU, None),
    "several rows or columns share a channel": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        torch.ones(1, 2, 4),
    ),
    "the channels are not the rows, or not the columns, of a whole layer": (
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.ReLU(), nn.Linear(3, 2)),
        torch.arange(5),
    ),
}


@pytest.mark.parametrize("why", MISFITS)
def test_an_export_says_why_a_mapping_is_left_out(why: str) -> None:
    make, example = MISFITS[why]
    net = make()
    found = gspace.mappings(net, example)
    table = awq(net, found)
    assert (table, table.left_out, len(found)) == ([], {why: found}, 1)
    assert smoothquant(net, found).left_out == {"no norm writes the channels": found}


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no mappings": (lambda: gspace.equalize_(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), ValueError, "no mappings"),
    "another goal": (lambda: gspace.equalize_(network("folded"), "l1"), ValueError, "'max-abs', 'l2'"),
    "no batches": (lambda: gspace.smooth_(network("folded"), []), ValueError, "empty"),
    "a number": (lambda: gspace.smooth_(network("folded"), 3), TypeError, "list of inputs"),
    "text": (lambda: gspace.smooth_(network("folded"), ["a b"]), TypeError, "got str"),
    "another shape": (
        lambda: gspace.smooth_(network("folded"), [torch.zeros(2, 5, dtype=torch.float64)]),
        gspace.TraceError,
        "does not accept",
    ),
    "alpha": (lambda: gspace.smooth_(network("folded"), IMAGES, 2.0), ValueError, "from 0 to 1"),
    "no norm": (lambda: gspace.smooth_(network("folded"), IMAGES), ValueError, "name the mappings"),
    "another model": (
        lambda: gspace.equalize_(network("folded"), mappings=gspace.mappings(network("depthwise"), IMAGES)),
        ValueError,
        "not one of this model",
    ),
    "no entry": (lambda: gspace.check_mappings(network("folded"), ["0"], IMAGES), ValueError, "an entry of the table"),
    "no expression": (
        lambda: gspace.check_mappings(network("folded"), [("re:*", ["2"])], IMAGES),
        ValueError,
        "not a regular expression",
    ),
    "meta": (lambda: gspace.equalize_(network("folded").to("meta")), ValueError, "meta device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused_before_anything_changes(value: float) -> None:
    net, x = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 6)
    net[1].weight.data[0, 0] = value
    before = deepcopy(net.state_dict())
    for call in (
        lambda: gspace.equalize_(net, "max-abs", example_input=x),
        lambda: gspace.equalize_(net, "l2", example_input=x),
        lambda: gspace.smooth_(net, x),
        lambda: gspace.check_mappings(net, [("1", ["3"])], x),
    ):
        with pytest.raises(ValueError, match=r"^1\.weight is not finite"):
            call()
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0, equal_nan=True)


class Masked(nn.Module):
    """Attention whose mask is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = nn.Linear(4, 4), nn.Linear(4, 3)
        self.mask = nn.Parameter(torch.full((4, 4), float("-inf")).triu(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.mask + x @ x.mT).softmax(-1) @ self.v(x))


def test_parameters_that_have_no_scale_need_not_be_finite() -> None:
    torch.manual_seed(0)
    net, x = Masked(), torch.randn(2, 4, 4)
    assert gspace.check_mappings(net, [("v", ["o"])], x) == []
    before = net(x)
    gspace.equalize_(net, example_input=x)
    torch.testing.assert_close(net(x), before)


class Listed(nn.Module):
    """Reads its first weight from a list, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 5), nn.Linear(5, 3)
        self.weights = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.relu(F.linear(x, self.weights[0], self.a.bias)))


def test_a_table_is_tried_on_a_parameter_that_a_list_holds_too() -> None:
    net, x = Listed(), torch.randn(6, 4)
    assert gspace.check_mappings(net, [("a", ["o"])], x) == []
    assert net.a.weight.dtype == torch.float32
    assert net.weights[0] is net.a.weight


def test_a_table_is_tried_on_a_model_of_inference_mode() -> None:
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    assert gspace.check_mappings(net, [("0", ["2"])], torch.randn(4, 3)) == []


def test_maxima_before_an_instance_norm_are_those_of_channels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 3))
    x = torch.randn(2, 4, 6, 6)
    gspace.smooth_(net, x, alpha=1.0)
    torch.testing.assert_close(net[0](x).abs().amax((0, 2, 3)), torch.ones(4))


class ChannelsFirst(nn.LayerNorm):
    """A norm over channels that lie in dimension 1, as timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Turned(nn.Linear):
    """Reads its channels in dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


LAYOUTS: dict[str, tuple[Any, tuple[int, ...], int]] = {  # two layers and what reads them, an input, where channels lie
    "a norm of its own": (lambda: (nn.Conv2d(3, 8, 1), ChannelsFirst(8), nn.Conv2d(8, 4, 3)), (2, 3, 6, 5), 1),
    "as wide as channels": (lambda: (nn.Conv2d(3, 8, 1), ChannelsFirst(8), nn.Conv2d(8, 4, 3)), (2, 3, 8, 8), 1),
    "a linear layer": (lambda: (Turned(3, 8), nn.ReLU(), Turned(8, 4)), (20, 3, 7), 1),
    "no batch": (lambda: (nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3)), (3, 8, 8), 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_maxima_are_those_of_channels_wherever_a_module_puts_them(name: str) -> None:
    make, shape, dim = LAYOUTS[name]
    torch.manual_seed(0)
    net, x = nn.Sequential(*make()).double(), torch.randn(shape, dtype=torch.float64)
    for p in net.parameters():
        nn.init.normal_(p)
    before = outputs(net, x)
    gspace.smooth_(net, [x], 1.0, gspace.mappings(net, x))
    torch.testing.assert_close(outputs(net[:2], x).abs().movedim(dim, 0).flatten(1).amax(1), torch.ones(8).double())
    assert moved(before, outputs(net, x)) < 1e-12


def test_the_maximum_of_a_single_scale_is_taken_over_all_channels_of_a_depthwise_convolution() -> None:
    net, x = nn.Sequential(Gain(1), nn.ReLU(), nn.Conv2d(3, 3, 1, groups=3)), torch.arange(24.0).view(2, 3, 2, 2)
    gspace.smooth_(net, [x], 1.0, gspace.mappings(net, x))
    assert float(outputs(net[:2], x).max()) == pytest.approx(1)


def test_maxima_behind_a_gate_whose_two_sides_are_smoothed_at_once() -> None:
    net, x = Gated(), torch.randn(50, 4)
    before, found = outputs(net, x), gspace.mappings(net, x)
    assert [m.balance_layers for m in found] == [("down",), ("down",)]
    gspace.smooth_(net, [x], mappings=found)
    assert moved(before, outputs(net, x)) < 1e-5


class RMS(nn.Module):
    """A norm written by hand, over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_as_many_tokens_as_channels_behind_a_norm_written_by_hand() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(RMS(8), nn.Linear(8, 4)).double(), torch.randn(2, 8, 8).double()
    assert gspace.mappings(net, x)[0].hook == ("0", "output")
    gspace.smooth_(net, [x], 1.0)
    torch.testing.assert_close(outputs(net[0], x).abs().amax((0, 1)), torch.ones(8).double())


def test_channels_that_may_lie_in_several_dimensions_are_refused_by_name() -> None:
    net, x = nn.Sequential(Turned(3, 8), nn.ReLU(), Turned(8, 4)), torch.randn(2, 3, 8)
    before = deepcopy(net.state_dict())
    said = r"^where are the 8 channels of '0'\? the input of '2', \(2, 8, 8\), has 2 dimensions of that size"
    with pytest.raises(ValueError, match=said):
        gspace.smooth_(net, [x], mappings=gspace.mappings(net, x))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_weights_of_the_ends_of_float64_are_equalized() -> None:
    """The ratio of two weights may overflow, their scale does not."""
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    net[0].weight.data.fill_(1e-200)
    net[2].weight.data.fill_(1e200)
    gspace.equalize_(net, example_input=torch.ones(1, 2, dtype=torch.float64), tolerance=1e-9)
    torch.testing.assert_close(*(net[k].weight.detach().amax() for k in (0, 2)), rtol=1e-8, atol=0)


def test_scales_and_tables_do_not_follow_the_default_device() -> None:
    x, found = torch.randn(5, 4, dtype=torch.float64), []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        with torch.device(device):
            found.append([gspace.equalize_(net, by, example_input=x).values for by in ("max-abs", "l2")])
            found[-1].append(gspace.smooth_(net, [x]).values)
            assert gspace.check_mappings(net, [("1", ["3"])], x) == []
    assert all(map(torch.equal, *found))


def test_unknown_modules_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    lines = gspace.check_mappings(net, [("encoder", ["2"]), ("re:.*proj", ["2"])])
    assert lines == ["the model has no layer 'encoder'", "the model has no layer 're:.*proj'"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    spec = f"{model}:build()"
    assert cli.main(["mappings", spec]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["4         norm  0       1", "8         relu  1       3"]
    for form in ("json", "awq", "smoothquant"):
        assert cli.main(["mappings", spec, "--format", form]) == 0
        written, told = capsys.readouterr()
        assert ("1: no norm writes the channels" in told) == (form == "smoothquant")
        table = tmp_path / f"{form}.json"
        table.write_text(written)
        assert len(json.loads(written)) == (1 if form == "smoothquant" else 2)
        assert cli.main(["mappings", spec, "--check", str(table)]) == 0
        assert capsys.readouterr().out.startswith("exact")
    table.write_text('[["0", ["3"]]]')
    assert cli.main(["mappings", spec, "--check", str(table)]) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("'1' reads the scale of '0' too and is missing")
    table.write_text("{}")
    assert cli.main(["mappings", spec, "--check", str(table)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root)
    page = importlib.import_module("benchmarks.mappings").page
    record = json.loads((root / "results" / "mappings.json").read_text(encoding="utf-8"))
    text = (root / "docs" / "quantization.md").read_text(encoding="utf-8")
    assert page(text, record) == text, "python benchmarks/mappings.py --table docs/quantization.md"
    record["entries"][-1]["change"][0] *= 50
    assert page(text, record) != text


@pytest.mark.parametrize("export", [awq, smoothquant])
def test_an_export_of_something_else_is_refused(export: Any) -> None:
    with pytest.raises(TypeError, match=r"takes what gspace\.mappings returns"):
        export(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [("0", ["1"])])
