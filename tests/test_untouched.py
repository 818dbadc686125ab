"""A run leaves no trace: what a forward pass writes, draws, keeps or switches is put back."""

import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import gspace
from moved import moved
from parts import Net
from programs import normal
from zoo import mlp

X = normal(6, 5)


class Busy(nn.Module):
    """Writes and resizes buffers, draws from every generator, leaves activations behind, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.drop, self.o = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(), nn.Linear(7, 3)
        self.register_buffer("mean", torch.ones(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("grown", torch.ones(2))
        self.generator = torch.Generator().manual_seed(7)
        self.log: list[Any] = []
        self.kept: dict[str, Any] = {"all": [], "last": deque([1], maxlen=1), "names": {"x"}}
        self.state: Any = None
        self.held: list[Any] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0).to(self.mean))
        self.steps += 1
        self.grown.resize_(len(self.grown) + 1).fill_(2.0)
        noise = torch.rand((), generator=self.generator).to(x) + torch.rand(()).to(x) + random.random()
        noise = noise + np.random.rand() + sum(held.random() for held in self.held)  # noqa: NPY002 - users do
        h = self.drop(F.relu(self.n(self.a((x - self.mean) * noise))))
        self.log.append(h.mean())
        self.kept["all"].append(h)
        self.kept["last"].append(h)
        self.kept["names"].add("y")
        self.state = self.made = h.detach()
        self.n.momentum = 0.5
        self.a.weight.requires_grad_(False)
        if self.fails:
            raise RuntimeError("on demand")
        return self.o(h)


def memory(t: Tensor | None) -> Any:
    if t is None:
        return None
    return t.detach().reshape(-1).clone().view(torch.uint8).tolist(), t.dtype, t.requires_grad


def plain(value: Any) -> Any:
    """Attributes in a form that can be compared: tensors by object and content, containers by what they hold."""
    if isinstance(value, Tensor):
        return id(value), memory(value), memory(value.grad)
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value), [plain(v) for v in value]
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return str(value.get_state())
    if isinstance(value, (np.random.Generator, random.Random)):
        return value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
    return (type(value), sorted(map(str, value))) if isinstance(value, set) else id(value)


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything that a run might change."""
    stack = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    backends = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.get_default_dtype()
    hooks = [len(h) for h in (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)]
    legacy = np.random.get_state()  # noqa: NPY002
    return {
        "modules": {name: plain(vars(m)) for name, m in model.named_modules(remove_duplicate=False)},
        "generators": (torch.get_rng_state().tolist(), random.getstate(), [str(x) for x in legacy]),
        "flags": (stack, flags, backends, hooks, threading.active_count(), gc.get_threshold()),
    }


def busy() -> nn.Module:
    model = Busy().double().eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    model.n.train()
    model.held = [np.random.default_rng(3), np.random.RandomState(4), random.Random(5)]
    model.a.register_forward_hook(lambda m, args, out: None)
    model.o.register_full_backward_hook(lambda *_: None)
    return model


@contextmanager
def one_process() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "as it is": busy,
    "bfloat16": lambda: busy().bfloat16(),
    "compiled in place": lambda: (m := busy(), m.compile(backend="eager"))[0],
    "compiled": lambda: torch.compile(busy(), backend="eager"),
    "DataParallel": lambda: nn.DataParallel(busy()),
    "AveragedModel": lambda: AveragedModel(busy()),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_run_leaves_no_trace(name: str, context: str) -> None:
    model = MODELS[name]()
    x = X.to(next(model.parameters()))
    with CONTEXTS[context]():
        before = traces(model)
        found = gspace.analyze(model, x)
        after = traces(model)
    assert after == before
    assert found.H == 0  # what attributes hold is read by others


def test_a_run_leaves_no_cycles_for_the_collector() -> None:
    model = mlp(5, 7, 3).to(X)
    gspace.analyze(model, X)
    gc.collect()
    gspace.analyze(model, X)
    assert gc.collect() == 0


@pytest.mark.parametrize("example", [None, X], ids=["guessed", "given"])
def test_a_forward_that_raises_leaves_no_trace(example: Tensor | None) -> None:
    model = busy()
    model.fails = True
    before = traces(model)
    with pytest.raises(gspace.TraceError, match="RuntimeError: on demand"):
        gspace.analyze(model, example)
    assert traces(model) == before


def test_distributed_data_parallel() -> None:
    with one_process():
        model = nn.parallel.DistributedDataParallel(mlp(5, 7, 6, 3).double())
        before = traces(model)
        found = gspace.analyze(model, X)
        assert traces(model) == before
    assert found.H == 13
    assert {edges.name for edges in found.edges} == {name for name, _ in model.named_parameters()}


# Wrappers


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        AveragedModel,
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
        lambda m: nn.Sequential(nn.DataParallel(m)),
        lambda m: nn.Sequential(torch.compile(m, backend="eager")),
        torch.fx.symbolic_trace,
    ],
    ids=[
        "DataParallel",
        "AveragedModel",
        "compile",
        "compile of DataParallel",
        "DataParallel inside",
        "compile inside",
        "fx",
    ],
)
@pytest.mark.parametrize("example", [None, X], ids=["guessed", "given"])
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module], example: Tensor | None) -> None:
    model = wrap(mlp(5, 7, 6, 3)).double()
    found = gspace.analyze(model, example)
    assert found.H == 13
    assert {edges.name for edges in found.edges} == {name for name, _ in model.named_parameters()}
    assert max(moved(model, normal(6, 5, seed=1), found).values()) <= 1e-12


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_analysis_is_the_same_whatever_surrounds_it(context: str, dtype: torch.dtype) -> None:
    model = mlp(5, 7, 6, 3, norm=True).to(dtype)
    with CONTEXTS[context]():
        found = gspace.analyze(model, X.to(dtype))
    assert (found.H, found.H_absorbed, found.unseen) == (13, 13, {})


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = mlp(5, 7, 6, 3, norm=True).double()
        inside = gspace.analyze(model, X)
    assert inside.H == gspace.analyze(model, X).H == 13


# What is kept


@pytest.mark.parametrize(
    ("keep", "H"),
    [
        (lambda h: h, 0),
        (lambda h: (h,), 0),
        (lambda h: {"l": [h]}, 0),
        (lambda h: deque([h]), 0),
        (lambda h: h.argmax(-1), 1),
        (lambda h: "a word", 8),
    ],
    ids=["it", "in a tuple", "in a list in a dict", "in a deque", "its place", "something else"],
)
def test_an_activation_left_in_an_attribute_is_an_output(keep: Callable[[Any], Any], H: int) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        s.kept = keep(h)
        return s.o(h)

    net = Net(forward, a=nn.Linear(5, 8), o=nn.Linear(8, 3), kept=None).double()
    assert gspace.analyze(net, X).H == H
    assert net.kept is None


BUFFERS: dict[str, Callable[[], Tensor | None]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "NaN": lambda: torch.tensor([torch.nan, 1.0]),
    "empty": lambda: torch.empty(0),
    "meta": lambda: torch.empty(3, device="meta"),
    "none": lambda: None,
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "compressed": lambda: torch.eye(4).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", [*BUFFERS, "inference"])
def test_buffers_of_every_kind_are_no_obstacle(kind: str) -> None:
    model = mlp(5, 6, 3).double()
    with torch.inference_mode(kind == "inference"):
        model.register_buffer("held", BUFFERS.get(kind, lambda: torch.ones(3))())
    held = model.held
    assert gspace.analyze(model, X).H == 6
    assert model.held is held


@pytest.mark.parametrize(
    "average",
    [
        lambda k, q: setattr(k, "data", k.data * 0.9 + q.data * 0.1),
        lambda k, q: k.data.mul_(0.9).add_(q.data),
        lambda k, q: k.detach().copy_(q),
        lambda k, q: k.mul_(0.9).add_(q),
        lambda k, q: nn.init.zeros_(k),
    ],
    ids=["assigned", "in place", "copied", "without gradient", "initialized"],
)
def test_a_forward_pass_that_writes_parameters_is_refused(average: Callable[..., object]) -> None:
    """As a momentum encoder does, which moves behind another."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if s.training:
            with torch.no_grad():
                average(s.k.weight, s.q.weight)
        return (s.q(x) * s.k(x)).sum(-1)

    model = Net(forward, q=nn.Linear(5, 8), k=nn.Linear(5, 8).requires_grad_(False)).double()
    before = traces(model)
    with pytest.raises(gspace.TraceError, match=r"writes into parameter 'k\.weight'"):
        gspace.analyze(model, X)
    assert traces(model) == before


def test_a_forward_pass_that_runs_backward_adds_to_no_gradient() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            s.o(F.relu(s.a(x))).sum().backward()
        return s.o(F.relu(s.a(x)))

    model = Net(forward, a=nn.Linear(5, 7), o=nn.Linear(7, 3)).double()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = traces(model)
    gspace.analyze(model, X)
    assert traces(model) == before


def test_a_branch_on_a_draw_is_followed_both_ways() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.c(h) if torch.rand(()) < 0.5 else s.d(h.tanh())

    model = Net(forward, a=nn.Linear(5, 7), c=nn.Linear(7, 3), d=nn.Linear(7, 3)).double()
    for seed in range(5):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found = gspace.analyze(model, X)
        assert (found.H, found.unseen) == (0, {})
        assert torch.equal(torch.get_rng_state(), state)
