"""What reaches the analysis from outside of its operations: objects, chance, numbers, memory that others write.

Each has two networks of 5 units that meet in a sum, or one; counts are derived in the comments.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

import gspace
from moved import moved
from parts import Net, normal


@torch.library.custom_op("gspace_tests::tanh_into", mutates_args={"out"})
def tanh_into(h: Tensor, out: Tensor) -> None:
    """Writes into its argument and returns nothing, as extensions do."""
    out.copy_(h.tanh())


def filled(fill: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Zeros that are filled in a way that no operation shows, added to the other units."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        out = torch.zeros_like(h)
        fill(h, out)
        return s.o(F.relu(s.b(x)) + out)

    return forward


def from_numpy(h: Tensor, out: Tensor) -> None:
    out.numpy()[:] = h.detach().numpy() + 1


def plus(value: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Something that is made of the first units, or of zeros like them, added to the others."""
    return lambda s, x: s.o(F.relu(s.b(x)) + value(F.relu(s.a(x))))


def of(value: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda s, x: s.o(value(F.relu(s.a(x))))


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    # what is drawn depends on the 5 that say how; the others are added to it
    "normal": (plus(lambda h: torch.normal(h, 1.0)), 0),
    "bernoulli": (plus(lambda h: torch.bernoulli(torch.sigmoid(h))), 0),
    "bernoulli of small units": (plus(lambda h: torch.bernoulli((h * 1e-3).clamp(max=1.0))), 0),
    "bernoulli in place": (plus(lambda h: torch.zeros_like(h).bernoulli_((h * 1e-3).clamp(max=1.0))), 0),
    # filled with what has no scale
    "a custom operation that writes": (filled(tanh_into), 0),
    "numpy that writes": (filled(from_numpy), 0),
    "foreach": (filled(lambda h, out: torch._foreach_add_([out], [h.tanh()])), 0),
    # 0 + ε is no literal 0: it has no scale, and grounds the 5 beside it; the first 5 are not read
    "zeros plus a small number": (plus(lambda h: torch.zeros_like(h) + 0.009), 5),
    "zeros clamped at a small number": (plus(lambda h: torch.zeros_like(h).clamp(min=0.009)), 5),
    # 5, each with the exact power
    "a power of 2.01": (of(lambda h: h**2.01), 5),
    "a power of 0.01": (of(lambda h: h**0.01), 5),
    "a cube root of cubes": (of(lambda h: (h**3) ** (1 / 3)), 5),
    # a permutation by chance: one for all
    "a permutation by chance": (of(lambda h: h[:, torch.randperm(5)]), 1),
    # which are multiplied depends on the index; 5 entries of one row are alike
    "products that are scattered": (
        of(lambda h: torch.ones_like(h).scatter_reduce(1, torch.zeros_like(h, dtype=torch.long), h, "prod")),
        0,
    ),
    # how many are not 0 has no scale: the 5 stay free
    "a norm of order 0": (of(lambda h: h * torch.linalg.vector_norm(h, 0, dim=1, keepdim=True)), 5),
    # an empty slice changes nothing
    "an empty slice": (of(lambda h: torch.cat([h, h[:, 5:]], 1)), 5),
    # a factor of 0 keeps the scale: it may grow
    "a factor of 0": (plus(lambda h: 0.0 * h), 5),
}


def parts() -> dict[str, nn.Linear]:
    return {name: nn.Linear(*sizes) for name, sizes in {"a": (4, 5), "b": (4, 5), "o": (5, 3)}.items()}


def built(forward: Any) -> Net:
    torch.manual_seed(0)
    return Net(forward, **parts()).double()


@pytest.mark.parametrize("name", CASES)
def test_no_unit_is_wrong(name: str) -> None:
    forward, H = CASES[name]
    model = built(forward)
    found = gspace.analyze(model, normal(6, 4))
    assert found.H == H
    unread = {p for p in found.unseen if p.startswith("b")}  # of networks that have one layer only
    found = gspace.analyze(model, normal(6, 4), pin=sorted(unread))
    for mode, change in moved(model, (2 * normal(6, 4),), found).items():
        assert change <= 1e-12, mode


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "an object": lambda y: SimpleNamespace(deep=SimpleNamespace(logits=y)),
    "a distribution": lambda y: torch.distributions.Normal(y, 1.0),
    "the values of a dict": lambda y: {"y": y}.values(),
    "a set": lambda y: {y},
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_found_in_every_object(name: str) -> None:
    """The 5 hidden units; none of the 3 outputs."""
    model = Net(lambda s, x: OUTPUTS[name](s.o(F.relu(s.a(x)))), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    assert gspace.analyze(model, torch.randn(6, 4)).H == 5


def test_an_output_that_can_be_read_once_is_refused() -> None:
    model = Net(lambda s, x: (s.o(part) for part in s.a(x)), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    with pytest.raises(gspace.TraceError, match="returns an iterator, which can be read once: return a list or tuple"):
        gspace.analyze(model, torch.randn(6, 4))


@dataclass
class Rows:
    x: Tensor
    index: Tensor


def test_indices_in_an_object_are_data() -> None:
    """Another batch may choose others of the 5: one scale for all."""
    model = Net(lambda s, b: s.o(F.relu(s.a(b.x)).gather(1, b.index)), a=nn.Linear(4, 5), o=nn.Linear(2, 3)).double()
    one, other = (Rows(normal(6, 4), torch.full((6, 2), k)) for k in (1, 4))
    found = gspace.analyze(model, (one,))
    assert found.H == 1
    assert max(moved(model, (other,), found).values()) <= 1e-12


def test_an_index_that_numpy_has_made_of_data_is_data() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.o(F.relu(s.a(x)).gather(1, torch.from_numpy(x.numpy().argmax(1))[:, None]))

    model = Net(forward, a=nn.Linear(4, 5), o=nn.Linear(1, 3)).double()
    found = gspace.analyze(model, normal(6, 4))
    assert found.H == 1
    assert max(moved(model, (-normal(6, 4),), found).values()) <= 1e-12


def test_a_gain_with_a_multiple_of_a_number_added_scales_as_a_whole() -> None:
    """0.3 + w is what scales: 5 units before it and 5 behind it."""
    model = Net(lambda s, x: s.o(F.relu(s.a(x)) * torch.add(s.w, 1.0, alpha=0.3)), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    model.w = nn.Parameter(torch.rand(5))
    found = gspace.analyze(model.double(), normal(6, 4))
    assert found.H == 10
    assert max(moved(model, (normal(6, 4),), found).values()) <= 1e-12


def test_a_diagonal_matrix_is_a_gain() -> None:
    """5 units before it and 5 behind it."""
    model = Net(lambda s, x: s.o(F.relu(s.a(x)) @ torch.diag(s.w)), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    model.w = nn.Parameter(torch.rand(5))
    found = gspace.analyze(model.double(), normal(6, 4))
    assert found.H == 10
    assert max(moved(model, (normal(6, 4),), found).values()) <= 1e-12


def test_a_parameter_of_0_that_is_pinned_may_change() -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x)) + s.k * F.relu(s.b(x)) + s.k), **parts())
    model.k = nn.Parameter(torch.tensor(0.0))
    found = gspace.analyze(model.double(), normal(6, 4), pin=["k"])
    assert found.H == 0
    with torch.no_grad():
        model.k.fill_(0.5)
    assert max(moved(model, (normal(6, 4),), found).values()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_recurrent_network_has_its_units_in_every_dtype(dtype: torch.dtype) -> None:
    """The 6 units in front of an LSTM: torch has one operation for all of it in some dtypes."""
    layers = {"a": nn.Linear(4, 6), "r": nn.LSTM(6, 5, batch_first=True), "o": nn.Linear(5, 3)}
    model = Net(lambda s, x: s.o(s.r(F.relu(s.a(x)))[0]), **layers).to(dtype)
    assert gspace.analyze(model, torch.randn(2, 3, 4, dtype=dtype)).H == 6


def conditional(s: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (s.a(x),))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (conditional, r"cond \(torch\.cond, flex_attention …\) cannot be followed"),
        (lambda s, x: s.a(torch.nested.nested_tensor([x, x])), "nested tensors cannot be followed: pad them"),
    ],
    ids=["cond", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_followed_is_refused(forward: Any, said: str) -> None:
    with pytest.raises(gspace.TraceError, match=said):
        gspace.analyze(Net(forward, a=nn.Linear(4, 5)), torch.randn(6, 4))


def test_equalize_takes_its_own_mappings_where_one_layer_writes_two_groups() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.o(torch.cat([h[:, :3] + F.relu(s.b(x)), h[:, 3:]], 1))

    model = Net(forward, a=nn.Linear(4, 5), b=nn.Linear(4, 3), o=nn.Linear(5, 3)).double()
    x = normal(6, 4)
    before = model(x)
    assert len(gspace.equalize_(model, "max-abs", example_input=x).values) == 5
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_equalize_settles_where_channels_share_weights() -> None:
    """Two units both scale `d` and the columns of `o`: their steps add up."""

    def forward(s: Any, x: Tensor) -> Tensor:
        b, c = s.p(x).split(3, -1)
        return s.o(x * ((b * c).sum(-1, keepdim=True) + s.d))

    torch.manual_seed(0)
    model = Net(forward, p=nn.Linear(8, 6, bias=False), o=nn.Linear(8, 3))
    model.d = nn.Parameter(torch.rand(8))
    x = normal(6, 8)
    before = model.double()(x)
    scales = gspace.equalize_(model, "max-abs", example_input=x).values
    assert bool(((scales > 0.1) & (scales < 10)).all())
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


class Mapped(nn.Module):
    """A position map that is added to images, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d, self.h = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3), nn.Linear(4, 2)
        self.pos = nn.Parameter(torch.randn(1, 6, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.c(x).permute(0, 2, 3, 1) + self.pos).relu().permute(0, 3, 1, 2)
        return self.h(self.d(y).relu().mean((2, 3)))


def test_entries_that_are_not_in_order_in_memory_stay() -> None:
    """12 units; where the map cannot be seen as one row, its 8 are pinned. An analysis of before is refused."""
    torch.manual_seed(0)
    model, x = Mapped().double(), normal(2, 3, 6, 6)
    found = gspace.analyze(model, x)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="entries of 'pos' are not in order in memory: analyze the model again"):
        gspace.rescale_(model, gspace.random_scales(model, analysis=found), analysis=found)
    again = gspace.analyze(model, x)
    assert (found.H, again.H) == (12, 4)
    assert max(moved(model, (x,), again).values()) <= 1e-12


class Held:
    __slots__ = "hidden"

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Numbered:
    """Holds what can be read once, beside its tensor."""

    def __init__(self, hidden: Tensor) -> None:
        self.counter, self.hidden = itertools.count(), hidden


@pytest.mark.parametrize("kind", [Held, Numbered])
def test_attributes_of_an_output_do_no_harm(kind: Any) -> None:
    model = Net(lambda s, x: kind(s.o(F.relu(s.a(x)))), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    assert gspace.analyze(model, torch.randn(6, 4)).H == 5


def test_containers_that_cannot_change_are_left_alone() -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x))), a=nn.Linear(4, 5), o=nn.Linear(5, 3))
    model.frozen, model.table = immutable_list(), immutable_dict(a=1)
    assert gspace.analyze(model, torch.randn(6, 4)).H == 5


@pytest.mark.parametrize("rule", ["released", "paper", "exact"])
@pytest.mark.parametrize("swap", [False, True])
def test_experts_before_a_batch_norm_train_like_one_matrix(rule: Any, swap: bool) -> None:
    """3 experts of 5 rows that read the data, (expert, out, in) or (expert, in, out), beside a layer of 15 rows."""
    torch.manual_seed(0)
    flat, x, y = torch.randn(15, 4), normal(16, 4), normal(16, 3)
    rest = nn.Sequential(nn.BatchNorm1d(15), nn.ReLU(), nn.Linear(15, 3)).double()
    spec = "bi,eio->beo" if swap else "bi,eoi->beo"
    ends = []
    for w in (flat, flat.reshape(3, 5, 4).mT.contiguous() if swap else flat.reshape(3, 5, 4)):
        product = (lambda s, x: x @ s.w.T) if w.dim() == 2 else (lambda s, x: torch.einsum(spec, x, s.w).flatten(1))
        model = Net(lambda s, x, product=product: s.rest(product(s, x)), rest=copy.deepcopy(rest))
        model.w = nn.Parameter(w.double())
        optimizer = gspace.GSGD(model, 0.05, batch_norm=rule, example_input=x)
        for _ in range(10):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        ends.append(model(x).detach())
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-10)
