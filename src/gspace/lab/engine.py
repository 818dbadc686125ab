"""How a run is computed, as opposed to what is computed: device, arithmetic, compiler, CUDA graph.

On a GPU the whole iteration (taking the batch, forward, backward, optimizer) is one CUDA graph. It reads a static
tensor of rows, and the learning rate from a tensor, so it is captured once per run.
"""

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from gspace.lab.errors import DeviceError
from gspace.lab.recipe import option

WARM_UP = 3  # iterations before capture: kernels are compiled and chosen, buffers of the optimizer exist


@dataclass(frozen=True)
class Engine:
    """How to compute: every field is an option of the command line."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)")
    compile: bool | None = option(None, "torch.compile (default: on a GPU with Triton)")
    graph: bool | None = option(None, "one CUDA graph per iteration (default: on a GPU)")
    deterministic: bool = option(False, "same bits each time on a GPU, at some cost (a CPU always gives them)")
    checkpoint_seconds: float = option(60.0, "between checkpoints (default: 60)")

    def resolve(self) -> "Engine":
        """The same with every choice made; an error if what is asked for is not here."""
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        try:
            device = torch.device(("cuda" if there else "cpu") if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise DeviceError(f"unknown device {self.device!r}: try cpu, cuda or auto") from error
        if device.type == "cuda" and (device.index or 0) >= there:
            raise DeviceError(f"device {device} was asked for, but {there} CUDA devices are here: try cpu")
        cuda = device.type == "cuda"
        if self.graph and not cuda:
            raise DeviceError(f"a CUDA graph was asked for, but the device is {device}")
        triton = importlib.util.find_spec("triton") is not None
        compile = cuda and triton if self.compile is None else self.compile
        return replace(self, device=str(device), compile=compile, graph=cuda if self.graph is None else self.graph)


class Cluster(NamedTuple):
    """Where the runs of a sweep are computed, if not here, and what each of them takes."""

    address: str | None = None  # "auto": the one of this machine; None starts one of this machine alone
    gpus: float = 0.0
    threads: int = 1


@contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Sets how float32 products are computed on a GPU, and how algorithms are chosen; puts it back at the end.

    "tf32" rounds the factors of products to 10 bits, "float32" does not, "bf16" casts them by autocast and leaves the
    rest at "tf32". A CPU has no tf32: there "tf32" means float32. "float64" holds everything in float64.
    """
    cudnn, exact = torch.backends.cudnn, precision in ("float32", "float64")
    flags = {"allow_tf32": not exact, "benchmark": not deterministic, "deterministic": deterministic}
    before = {name: getattr(cudnn, name) for name in flags}
    matmul, same = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself

    def choose(matmul: str, flags: Mapping[str, bool], same: bool) -> None:
        torch.set_float32_matmul_precision(matmul)
        for name, value in flags.items():
            setattr(cudnn, name, value)
        torch.use_deterministic_algorithms(same)

    choose("highest" if exact else "high", flags, deterministic)
    try:
        yield
    finally:
        choose(matmul, before, same)


def number_type(precision: str) -> torch.dtype:
    return torch.float64 if precision == "float64" else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """`x` for a softmax: 16-bit numbers are too coarse."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@functools.lru_cache(maxsize=1)
def compiled(function: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    """`torch.compile(function)`, kept while `key` (all that decides shapes and code) stays the same.

    Runs that differ only in seed or rate share one compilation; a run of another kind starts a fresh cache, because
    torch stops compiling a function, without an error, after a few versions of it.
    """
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


Tree = Any  # nested dicts, lists and tuples of tensors and plain values


def _tensors(tree: Tree) -> dict[str, Tensor]:
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, Tensor)}


def snapshot(tree: Tree) -> dict[str, Tensor]:
    """A copy of its tensors that shares no memory."""
    return {place: value.detach().clone() for place, value in _tensors(tree).items()}


@torch.no_grad()
def restore(tree: Tree, saved: Mapping[str, Tensor]) -> None:
    """Writes `saved` back into the tensors of `tree`, in place; a tensor that `saved` lacks did not exist: zero.

    A momentum buffer of zeros is what an optimizer without buffers has: m·0 + g = g.
    """
    for place, value in _tensors(tree).items():
        value.copy_(saved[place]) if place in saved else value.zero_()


def capture(
    step: Callable[[Tensor], None], rows: Tensor, live: Callable[[], Tree], clear: Callable[[], None]
) -> Callable[[Tensor], None]:
    """`step` as one CUDA graph: one iteration without synchronisation with the host and without shapes that vary.

    `rows` are those of some batch, for shape and for warming up. `live` gives every tensor that `step` changes, the
    same objects at each call; their values are left untouched here. `clear` drops the gradients, so that those of the
    graph are allocated inside it.
    """
    static = rows.clone()
    saved = snapshot(live())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step(static)
        clear()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # what remains of an autograd graph would tie the capture to the stream it was made on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static)
    restore(live(), saved)

    def replay(rows: Tensor) -> None:
        static.copy_(rows)
        graph.replay()

    return replay
