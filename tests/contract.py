"""What every optimizer of ours and torch's own must do alike: the optimizers as data, one network, one training loop.

A new optimizer joins the contract suite (`test_optimizer_*.py`) with one row in `KINDS`; what all of them refuse is in
`error_inputs.py`.

Run as a program, `python contract.py FOLDER` goes on from the checkpoints in FOLDER, in a process of its own.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import Optimizer

import gspace
from gspace.optim.baselines import FrozenSkeletonSGD, PathSGD

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kind:
    """One optimizer under contract.

    Attributes:
        build: Takes a model, `params=` (torch's parameter groups or None) and the options.
        options: Those it is tested with; the learning rate suits `Net`.
        twin: The torch optimizer that updates parameters outside every unit.
        gspace: Whether it moves in G-space.
    """

    name: str
    build: Callable[..., Optimizer]
    options: dict[str, Any]
    twin: type[Optimizer] = torch.optim.SGD
    gspace: bool = True

    def make(self, model: nn.Module, params: Iterable[Any] | None = None, **changes: Any) -> Any:
        return self.build(model, params=params, **{**self.options, **changes})


def _torch(cls: type[Optimizer], model: nn.Module, params: Iterable[Any] | None, **options: Any) -> Optimizer:
    return cls(model.parameters() if params is None else params, **options)


def _inner(cls: type[Optimizer], model: nn.Module, params: Iterable[Any] | None, **options: Any) -> gspace.InGSpace:
    return gspace.InGSpace(model, cls, params=params, **options)


ALL_OPTIONS = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
KINDS = (
    Kind("SGD", partial(_torch, torch.optim.SGD), {"lr": 0.05, "momentum": 0.9}, gspace=False),
    Kind("GSGD", gspace.GSGD, {"lr": 0.2}),
    Kind("GSGD-momentum", gspace.GSGD, ALL_OPTIONS),
    Kind("InGSpace-SGD", partial(_inner, torch.optim.SGD), {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    Kind("InGSpace-AdamW", partial(_inner, torch.optim.AdamW), {"lr": 0.01}, twin=torch.optim.AdamW),
    Kind("InGSpace-RMSprop", partial(_inner, torch.optim.RMSprop), {"lr": 0.001}, twin=torch.optim.RMSprop),
    Kind("PathSGD", partial(PathSGD, example_input=torch.zeros(2, 1, 6, 6)), ALL_OPTIONS, gspace=False),
    Kind("FrozenSkeletonSGD", FrozenSkeletonSGD, ALL_OPTIONS, gspace=False),
)
GSPACE = tuple(kind for kind in KINDS if kind.gspace)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
gspace_kinds = pytest.mark.parametrize("kind", GSPACE, ids=lambda kind: kind.name)


class Net(nn.Module):
    """Units before a BatchNorm, behind a flatten and between linear layers; γ, β outside every unit; a layer unused."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(1, 4, 3, bias=False)
            self.norm = nn.BatchNorm2d(4)
            self.second = nn.Conv2d(4, 5, 3)
            self.hidden = nn.Linear(20, 8)
            self.head = nn.Linear(8, 3)
            self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.second(x)).flatten(1)
        return self.head(torch.relu(self.hidden(x)))


def chain(seed: int = 0) -> nn.Sequential:
    """The same without BatchNorm: rescaling is an exact symmetry."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)),
        )


def without_units(seed: int = 0) -> nn.Sequential:
    """Not positively homogeneous anywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batches:
    """Images of 6 x 6 and their class, which the brightest third decides."""
    g = torch.Generator().manual_seed(seed)
    images = [torch.randn(8, 1, 6, 6, generator=g) for _ in range(n)]
    return [(x.to(dtype), x.reshape(8, 3, 12).sum(2).argmax(1)) for x in images]


def backward(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, data: Batches, scheduler: Any = None) -> list[float]:
    losses = []
    for batch in data:
        losses.append(float(backward(model, optimizer, batch)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Names of the parameters with another bit than before."""
    return {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])}


def assert_captured_alike(by_call: Any, by_graph: Any) -> None:
    """Two optimizers of equal models, whose gradients stay: steps of one, and a CUDA graph of the other's."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_graph.step()
    for _ in range(3):
        by_call.step()
        graph.replay()
    for p, q in zip(by_call.model.parameters(), by_graph.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit."""
    assert moved(a, values(b)) == set()


# Checkpoints ----------------------------------------------------------------------------------------------------------


def flatten(tree: Any, path: str = "") -> tuple[dict[str, Tensor], Any]:
    """The tensors of nested dicts, lists and tuples by path, and the rest with None in their places."""
    if isinstance(tree, Tensor):
        return {path: tree.contiguous().clone()}, None
    if isinstance(tree, dict | list | tuple):
        items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        parts = [(key, *flatten(value, f"{path}/{key}")) for key, value in items]
        tensors = {name: tensor for _, found, _ in parts for name, tensor in found.items()}
        rest = [(key, value) for key, _, value in parts]
        return tensors, dict(rest) if isinstance(tree, dict) else type(tree)(value for _, value in rest)
    return {}, tree


def restore(rest: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    if path in tensors:
        return tensors[path]
    if isinstance(rest, dict):
        return {key: restore(value, tensors, f"{path}/{key}") for key, value in rest.items()}
    if isinstance(rest, list | tuple):
        return type(rest)(restore(value, tensors, f"{path}/{i}") for i, value in enumerate(rest))
    return rest


def save(folder: Path, kind: Kind, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, folder / f"{kind.name}.pt")
    tensors, rest = flatten(state)
    save_file(tensors, folder / f"{kind.name}.safetensors")
    torch.save(rest, folder / f"{kind.name}.rest.pt")


def go_on(folder: Path, kind: Kind, source: str) -> nn.Module:
    """Twenty steps from a checkpoint, with a network that was initialised otherwise."""
    if source == "torch":
        state = torch.load(folder / f"{kind.name}.pt", weights_only=True)
    else:
        rest = torch.load(folder / f"{kind.name}.rest.pt", weights_only=True)
        state = restore(rest, load_file(folder / f"{kind.name}.safetensors"))
    model = Net(seed=99)
    optimizer = kind.make(model)
    scheduler = StepLR(optimizer, 3, 0.7)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    train(model, optimizer, batches(20, seed=1), scheduler)
    return model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        for source in ("torch", "safetensors"):
            torch.save(go_on(folder, kind, source).state_dict(), folder / f"{kind.name}.{source}.after.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
