"""Medians over interleaved repeats; a step and an iteration as calls that can be timed."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
from benchmarks.step.networks import Network

CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Time:
    """One median, in microseconds, and its ratio to that of `baseline` in the same turn."""

    section: str
    network: str
    optimizer: str
    device: str
    mode: str
    precision: str
    momentum: float
    median_us: float
    p10_us: float
    p90_us: float
    n: int
    ratio: float | None = None
    baseline: str = ""
    note: str = ""


Clock = Callable[[Callable[[], object]], float]


def by_host(call: Callable[[], object], least: float = 0.005) -> float:
    """Seconds per call on the host, from an idle device to an idle device, over a few milliseconds.

    A call on a CPU should find the caches as the same call left them, not another optimizer's.
    """
    spent, calls = 0.0, 0
    while spent < least:
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        spent, calls = spent + time.perf_counter() - start, calls + 1
    return spent / calls


def by_device(call: Callable[[], object], calls: int = 10) -> float:
    """Seconds per call between two events of the device, over a few calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def interleave(
    calls: Mapping[str, Callable[[], object]], clock: Clock, repeats: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns, each turn beginning with another, sorted."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            times[name].append(clock(calls[name]))
    return {name: sorted(some) for name, some in times.items()}


def rows(times: Mapping[str, list[float]], baseline: str, **common: Any) -> list[Time]:
    """Times as rows; a repeat of the baseline says how much is noise."""
    base = statistics.median(times[baseline])
    return [
        Time(
            **common,
            optimizer=name,
            median_us=round(statistics.median(some) * 1e6, 2),
            p10_us=round(some[len(some) // 10] * 1e6, 2),
            p90_us=round(some[-1 - len(some) // 10] * 1e6, 2),
            n=len(some),
            ratio=round(statistics.median(some) / base, 4),
            baseline=baseline,
        )
        for name, some in times.items()
    ]


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    exact = precision == "float32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = not exact, True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def built(network: Network, device: str, *, channels_last: bool = False) -> nn.Module:
    """The network on the skeleton, the paper's start, always the same weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = network.build()
    gspace.init_skeleton_(model)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def with_gradients(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def iteration(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, precision: str, compiled: bool
) -> Callable[[], None]:
    def loss() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            return F.cross_entropy(model(x).float(), y)

    objective = torch.compile(loss, dynamic=False) if compiled else loss

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        objective().backward()
        optimizer.step()

    return once


def captured(once: Callable[[], None], clear: Callable[[], None]) -> Callable[[], None]:
    """`once` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
        clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replay(kept: object = once) -> None:  # the graph works in memory of the optimizer
        graph.replay()

    return replay
