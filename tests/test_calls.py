"""What a call of the model leaves behind, in buffers, attributes and its input: the next one must not believe it."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from moved import moved
from parts import EXACT, Net, normal

X, OTHER = normal(6, 4), 2 * normal(6, 4)


class Keeps(nn.Module):
    """Writes a buffer in training, made of its first weight, and reads it in both modes."""

    def __init__(self, made: Callable[[Tensor], Tensor], used: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.o, self.made, self.used = nn.Linear(4, 5), nn.Linear(5, 3), made, used
        self.register_buffer("kept", made(self.a.weight.detach()).clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept.copy_(self.made(self.a.weight.detach()))
        return self.o(F.relu(F.linear(x, self.used(self.a.weight, self.kept), self.a.bias)))


KEPT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "a copy": (torch.clone, lambda w, kept: kept),
    "the range of each row": (lambda w: w.abs().amax(1, True), lambda w, kept: w / kept),
    "the norm of all": (torch.linalg.vector_norm, lambda w, kept: w / kept),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_training_keeps_of_a_weight_is_not_rescaled(name: str) -> None:
    """In evaluation it is what it was: no unit is free."""
    torch.manual_seed(0)
    model = Keeps(*KEPT[name]).double()
    found = gspace.analyze(model, X)
    assert found.H == 0
    assert max(moved(model, (OTHER,), found).values()) <= EXACT


def test_a_model_may_write_into_its_input() -> None:
    def doubled(s: Any, x: Tensor) -> Tensor:
        return s.o(F.relu(s.a(x.mul_(2))))

    model, x = Net(doubled, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X.clone()
    assert gspace.analyze(model, x).H == 5
    assert torch.equal(x, X)
    returned = Net(lambda s, x, y: (s.o(F.relu(s.a(x))), y.copy_(s.a(x)))[0], a=model.a, o=model.o)
    assert gspace.analyze(returned, (x, normal(6, 5))).H == 0  # the caller sees what it wrote


def test_state_in_a_plain_object_is_put_back() -> None:
    def recurrent(s: Any, x: Tensor) -> Tensor:
        s.state.h = torch.tanh(s.a(x) + s.state.h).detach()
        s.state.past[0].add_(1.0)
        return s.o(F.relu(s.a(x)))

    state = SimpleNamespace(h=torch.zeros(5).double(), past=[torch.zeros(5)])
    before = state.h
    model = Net(recurrent, a=nn.Linear(4, 5), o=nn.Linear(5, 3), state=state).double()
    gspace.analyze(model, X)
    assert state.h is before
    assert not state.past[0].any()


def test_what_a_plain_object_keeps_is_read_by_others() -> None:
    def watched(s: Any, x: Tensor) -> Tensor:
        s.log.loss = s.a(x).square().mean()
        return s.o(F.relu(s.a(x)))

    model = Net(watched, a=nn.Linear(4, 5), o=nn.Linear(5, 3), log=SimpleNamespace()).double()
    assert gspace.analyze(model, X).H == 0


class Slots:
    __slots__ = ("h",)


def in_attribute(s: Any, h: Tensor) -> Tensor:
    return s.state[0].copy_(h)


def in_object_of_list(s: Any, h: Tensor) -> None:
    s.objects[0].h = h


def in_slots(s: Any, h: Tensor) -> None:
    s.slots.h = h


@pytest.mark.parametrize("keep", [in_attribute, in_object_of_list, in_slots])
def test_what_is_kept_anywhere_is_not_rescaled(keep: Callable[[Any, Tensor], Any]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        keep(s, h)
        return s.o(h)

    parts = {"state": [torch.zeros(6, 5).double()], "objects": [SimpleNamespace()], "slots": Slots()}
    found = gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3), **parts).double(), X)
    assert found.H == 0
    assert "kept where others may read it" in str(found)


def test_a_graph_that_the_output_holds_is_not_kept_for_others() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return s.o(F.relu(s.a(x)))

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X).H == 5


def test_a_cycle_of_references_keeps_nothing() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        kept = [F.relu(s.a(x))]
        kept.append(kept)
        return s.o(kept[0])

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X).H == 5


def test_a_graph_that_the_input_holds_is_not_kept_for_others() -> None:
    """Force fields write energies and forces into the dictionary that they are given."""

    def forward(s: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.enable_grad():
            x = batch["x"].detach().requires_grad_()
            batch["energy"] = s.o(F.relu(s.a(x))).sum()
            (batch["forces"],) = torch.autograd.grad(batch["energy"], x, create_graph=True)
        return batch

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), ({"x": X},)).H == 5


def test_gradients_of_a_forward_pass_are_put_back() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = s.o(F.relu(s.a(x)))
            y.sum().backward()
        return y.detach()

    model = Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double()
    assert gspace.analyze(model, X).H == 5
    assert model.a.weight.grad is None


def test_what_shares_the_memory_of_an_output_is_kept() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        out, s.feature = torch.cat([s.o(F.relu(s.a(x))), F.relu(s.a(x))], 1).split([3, 5], 1)
        return out

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X).H == 0


def test_modules_of_the_model_may_be_inputs() -> None:
    model = Net(lambda s, x, head: head(F.relu(s.a(x))), a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double()
    for head in (model.o, model.o.forward):
        found = gspace.analyze(model, (X, head))
        assert (found.H, found.unseen) == (5, {})


def test_an_input_that_cannot_be_copied_leaves_the_others_copied() -> None:
    x, lock = X.clone(), SimpleNamespace(lock=threading.Lock())
    model = Net(lambda s, x, lock: s.o(F.relu(s.a(x.mul_(2)))), a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double()
    assert gspace.analyze(model, (x, lock)).H == 5
    assert torch.equal(x, X)


def test_a_parameter_of_the_model_may_be_an_input() -> None:
    model = Net(lambda s, x, w: s.o(F.relu(F.linear(x, w))), a=nn.Linear(4, 5, bias=False), o=nn.Linear(5, 3)).double()
    assert gspace.analyze(model, (X, model.a.weight)).H == 5


def test_objects_among_the_inputs_are_not_written() -> None:
    def forward(s: Any, x: Tensor, cache: Any) -> Tensor:
        cache.past.append(F.relu(s.a(x)))
        return s.o(cache.past[-1])

    cache = SimpleNamespace(past=[])
    gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), (X, cache))
    assert cache.past == []


THINGS = {
    "conjugate": lambda: torch.randn(3, dtype=torch.cfloat).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", THINGS)
def test_tensors_of_any_kind_may_lie_in_a_model(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    thing = model.thing = THINGS[name]()
    inside: list[Any] = [thing]
    inside.append(inside)  # a cycle
    model.more = SimpleNamespace(inside=inside)
    assert gspace.analyze(model, X).H == 5
    assert model.thing is thing


@pytest.mark.filterwarnings("ignore:.*(jit|deprecated)")
def test_scripted_parts_stay_as_they_are() -> None:
    inside = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU()))
    norm = torch.jit.script(nn.BatchNorm1d(3))
    model = nn.Sequential(inside, nn.Linear(5, 3), norm).double()
    found = gspace.analyze(model, X)
    assert [m.training for m in model.modules()] == [True] * 7
    assert (norm.running_mean.tolist(), int(norm.num_batches_tracked)) == ([0.0] * 3, 0)
    assert found.H == 5
    assert max(moved(copy.deepcopy(model), (OTHER,), found).values()) <= EXACT  # an analysis is that of copies, too


# What a batch does not show -------------------------------------------------------------------------------------------


def test_a_call_on_no_rows_says_nothing_of_its_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    found = gspace.analyze(model, X[:0])
    assert (found.H, sum(found.unseen.values())) == (0, found.m)
    assert gspace.analyze(model, [X[:0], X]).H == 5


def test_a_result_that_is_written_to_an_empty_tensor_is_followed() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return s.o(torch.sigmoid(F.relu(s.a(x)), out=x.new_empty(0)))

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X).H == 0


class Routed(nn.Module):
    """Each row goes to the expert that its first entries choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            (rows,) = (x[:, :3].argmax(1) == k).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_an_expert_that_gets_no_row_is_tried_with_other_batches() -> None:
    model = Routed().double()
    found = gspace.analyze(model, X[:1])
    assert (found.H, found.unseen) == (15, {})
    assert max(moved(model, (OTHER,), found).values()) <= EXACT


def test_weights_that_only_multiply_zeros_are_pinned() -> None:
    """Those of a hidden state that begins at 0 do more from the second step on."""

    def recurrent(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            h = F.relu(s.a(step) + s.r(h))
        return s.o(h)

    model = Net(recurrent, a=nn.Linear(4, 5), r=nn.Linear(5, 5, bias=False), o=nn.Linear(5, 3)).double()
    short, long = X[:, None], X[:, None].repeat(1, 3, 1)
    found = gspace.analyze(model, short)
    assert (found.H, found.unseen) == (0, {})
    assert "r.weight: the example multiplies it by zeros alone" in str(found)
    assert max(moved(model, (2 * long,), found).values()) <= EXACT
    found = gspace.analyze(model, [short, long])
    assert (found.H, found.unseen) == (5, {})
    assert max(moved(model, (2 * long,), found).values()) <= EXACT


@pytest.mark.parametrize("conv", [False, True])
def test_a_recurrence_over_input_and_state_side_by_side(conv: bool) -> None:
    """One step shows zeros in place of the state: its columns are pinned, and with them the units of their rows."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5, *x.shape[3:])
        for step in x.unbind(1):
            h = F.relu(s.a(torch.cat([step, h], 1)))
        return s.o(h)

    parts = (
        {"a": nn.Conv2d(9, 5, 3, padding=1), "o": nn.Conv2d(5, 3, 1)}
        if conv
        else {"a": nn.Linear(9, 5), "o": nn.Linear(5, 3)}
    )
    model, long = Net(forward, **parts).double(), normal(2, 3, 4, 6, 6) if conv else normal(2, 3, 4)
    found = gspace.analyze(model, long[:, :1])
    assert (found.H, found.unseen) == (0, {})
    assert max(moved(copy.deepcopy(model), (2 * long,), found).values()) <= EXACT
    for example in (long, [long[:, :1], long]):
        found = gspace.analyze(model, example)
        assert (found.H, found.H_paper, found.unseen) == (5, 5, {})
        assert max(moved(copy.deepcopy(model), (2 * long,), found).values()) <= EXACT


def test_a_part_of_a_packed_projection_that_multiplies_zeros_is_pinned() -> None:
    """The first values of a decoder in the manner of DETR."""

    def forward(s: Any, x: Tensor) -> Tensor:
        t = x.new_zeros(len(x), 3, 8)
        t = t + s.own(t + s.q, t + s.q, t)[0]
        return s.o(t + s.cross(t + s.q, x, x)[0])

    own, cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
    model = Net(forward, own=own, cross=cross, o=nn.Linear(8, 3), q=nn.Parameter(normal(3, 8))).double()
    found = gspace.analyze(model, normal(2, 5, 8))
    assert (found.H, found.unseen) == (8 + 8 + 8 + 8, {})  # the queries' stream; queries and keys, twice; values
    assert max(moved(model, (2 * normal(3, 5, 8),), found).values()) <= EXACT


def test_rows_that_data_choose_and_that_are_not_there_say_nothing_of_the_rest() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h, chosen = F.relu(s.a(x)), x[:, 0] > 100
        out = torch.zeros_like(h)
        out[chosen] = h.flip(-1)[chosen]
        return s.o(h + out)

    assert gspace.analyze(Net(forward, a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double(), X).H == 0


def test_a_part_of_a_vector_can_be_read() -> None:
    model = Net(lambda s, x: s.o(F.relu(s.a(x) + s.p[:5])), a=nn.Linear(4, 5), o=nn.Linear(5, 3)).double()
    model.p = nn.Parameter(normal(7))
    found = gspace.analyze(model, X)
    assert (found.H, found.unseen) == (5, {"p": 2})
    found = gspace.analyze(model, X, pin=["p"])
    assert (found.H, found.unseen) == (0, {})


# Parts of one weight --------------------------------------------------------------------------------------------------


def slim(*widths: int) -> Net:
    """One weight, of which each of the widths is a network."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return sum(F.linear(F.relu(F.linear(x, s.a[:k])), s.o[:, :k]) for k in widths)

    return Net(forward, a=nn.Parameter(normal(6, 4)), o=nn.Parameter(normal(3, 6)))


@pytest.mark.parametrize("widths", [(6, 3), (3, 6), (2, 3, 6), (2, 6, 3)])
def test_parts_of_a_weight_are_units_in_any_order(widths: tuple[int, ...]) -> None:
    found = gspace.analyze(slim(*widths), X)
    assert (found.H, found.H_paper) == (6, 6)
    inside = partial(gspace.GSGD, lr=0.01, reference="balanced")
    batches = [(X, torch.arange(6) % 3)] * 5
    assert gspace.invariance_gap(inside, slim(*widths), batches).final <= 1e-10
