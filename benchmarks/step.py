"""How long a step and an iteration take: GSGD beside torch's SGD, in one process, interleaved, medians.

    gspace bench step [--out FOLDER] [--only SECTION ...] [--network NAME ...] [--mode MODE ...] [--threads T]
    gspace bench step --out results --table docs/speed.md     # writes the page from what is recorded there

| section | what is timed |
|---|---|
| iteration | forward, backward and step: every network, optimizer, mode (eager, compiled, CUDA graph) and precision |
| step | the step alone, as users call it and, on a GPU, as a CUDA graph beside a plain copy |
| width, depth | how the step grows from 10³ to 10⁸ weights and from 10 to 500 layers |
| kernels, tiles | time of each kernel on a GPU, and of the step with other tiles |

Every time is the median over interleaved repeats, with the 10th and 90th percentile; a ratio is that of two medians
taken in the same turns, and "again" is the baseline a second time: how far its ratio is from 1 is noise. FOLDER gets
`step-cpu.csv` or `step-gpu.csv`, where rows that other commands measured are kept, and a figure like Fig. 6.
"""

import argparse
import csv
import importlib.util
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
from gspace import fast
from gspace.baselines import PathSGD
from gspace.lab.models import build_model, mlp
from gspace.lab.record import commit
from gspace.tables import Tile

CUDA = torch.cuda.is_available()


# Networks -------------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 beside a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.norm2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.norm3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), nn.BatchNorm2d(4 * planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    """ResNet-50 for 1000 classes, 25.6 million weights in 161 parameters."""
    blocks, inputs = [], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            blocks.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not i else 1))
            inputs = 256 * 2**stage
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def square(width: int, layers: int) -> nn.Sequential:
    """An MLP whose every weight is width × width."""
    return mlp((1, 1, width), width, (width,) * (layers - 1))


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        shape: Of one input.
        batch: Inputs per iteration.
        gpu_only: Too slow to iterate on a CPU.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    gpu_only: bool = False


CIFAR, IMAGE = (3, 32, 32), (3, 224, 224)
NETWORKS: Mapping[str, Network] = {
    "mlp-784-5x64-10": Network(partial(mlp, (1, 28, 28), 10, (64,) * 5), (1, 28, 28), 64),
    "mlp-49-2x1024-10": Network(partial(mlp, (1, 7, 7), 10, (1024, 1024)), (1, 7, 7), 64),
    "plain-34": Network(partial(build_model, "plain-34", CIFAR, 10), CIFAR, 128, gpu_only=True),
    "resnet-34": Network(partial(build_model, "resnet-34", CIFAR, 10), CIFAR, 128, gpu_only=True),
    "resnet-50": Network(resnet50, IMAGE, 32, gpu_only=True),
    "mlp-100M": Network(partial(square, 4096, 6), (1, 1, 4096), 128, gpu_only=True),
}

Rate = float | Tensor
Maker = Callable[[nn.Module, Rate, float, Tensor], Any]  # model, rate, momentum, a batch


OPTIMIZERS: Mapping[str, Maker] = {
    "SGD fused": lambda model, lr, mu, _: torch.optim.SGD(model.parameters(), lr, momentum=mu, fused=True),
    "SGD foreach": lambda model, lr, mu, _: torch.optim.SGD(model.parameters(), lr, momentum=mu, foreach=True),
    "GSGD fused": lambda model, lr, mu, _: gspace.GSGD(model, lr, momentum=mu, fused=True),
    "GSGD foreach": lambda model, lr, mu, _: gspace.GSGD(model, lr, momentum=mu, foreach=True),
    "GSGD definition": lambda model, lr, mu, _: gspace.GSGD(model, lr, momentum=mu, foreach=False),
    "InGSpace(SGD)": lambda model, lr, mu, _: gspace.InGSpace(model, torch.optim.SGD, lr=lr, momentum=mu),
    "PathSGD": lambda model, lr, mu, x: PathSGD(model, lr, momentum=mu, example_input=x),
}
FUSED, FOREACH, OURS = "SGD fused", "SGD foreach", "GSGD fused"


# Timing ---------------------------------------------------------------------------------------------------------------


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
    """Seconds per call on the host, from an idle device to an idle device, over a few milliseconds: a call on a CPU
    should find the caches as the same call left them, not another optimizer's."""
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
    yield
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


# Sections -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    device: str
    repeats: int
    networks: Sequence[str] = tuple(NETWORKS)
    modes: Sequence[str] = ("eager",)
    optimizers: Sequence[str] = tuple(OPTIMIZERS)


def time_iteration(
    setting: Setting, name: str, mode: str, precision: str, momentum: float, optimizers: list[str], baseline: str
) -> list[Time]:
    network = NETWORKS[name]
    device = setting.device
    image = device == "cuda" and len(network.shape) == 3 and network.shape[0] == 3
    x = torch.randn(network.batch, *network.shape, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if image else x
    calls: dict[str, Callable[[], object]] = {}
    with arithmetic(precision):
        for label in [*optimizers, f"{baseline} again"]:
            model = built(network, device, channels_last=image)
            classes = [p for p in model.parameters() if p.dim() == 2][-1].shape[0]
            y = torch.randint(classes, (network.batch,), generator=torch.Generator().manual_seed(0)).to(device)
            rate: Rate = torch.tensor(1e-5, device=device) if device == "cuda" and "foreach" not in label else 1e-5
            optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum, x)
            once = iteration(model, optimizer, x, y, precision, compiled="compiled" in mode)
            try:
                once()
                graph = "graph" in mode
                calls[label] = captured(once, partial(optimizer.zero_grad, set_to_none=True)) if graph else once
            except RuntimeError as error:
                print(f"{label} refuses {name} {mode} {precision}: {str(error).splitlines()[0]}", flush=True)
        clock = partial(by_device, calls=5) if "graph" in mode else by_host
        times = interleave(calls, clock, setting.repeats)
    common = {"network": name, "device": device, "mode": mode, "precision": precision, "momentum": momentum}
    return rows(times, baseline, section="iteration", **common)


def time_step(
    setting: Setting, name: str, network: Network, mode: str, momentum: float, optimizers: list[str], baseline: str,
    section: str = "step",
) -> list[Time]:  # fmt: skip
    """The step alone, on gradients that stay."""
    calls: dict[str, Callable[[], object]] = {}
    x = torch.zeros(1, *network.shape, device=setting.device)
    for label in [*optimizers, f"{baseline} again"]:
        model = with_gradients(built(network, setting.device))
        rate: Rate = torch.tensor(1e-6, device="cuda") if setting.device == "cuda" and "foreach" not in label else 1e-6
        optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum, x)
        calls[label] = captured(optimizer.step, lambda: None) if mode == "graph" else optimizer.step
    clock = by_device if setting.device == "cuda" and mode != "eager" else by_host
    times = interleave(calls, clock, setting.repeats)
    common = {"device": setting.device, "mode": mode, "precision": "float32", "momentum": momentum}
    return rows(times, baseline, section=section, network=name, **common)


def time_copy(setting: Setting) -> Time:
    """A copy of 1 GiB on the device: what memory gives."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, by_device, setting.repeats)
    common = {"network": "1 GiB", "device": "cuda", "mode": "eager", "precision": "float32", "momentum": 0.0}
    return rows(times, "copy", section="step", **common)[0]


def share_of_copy(row: Time, weights: int, copy: Time) -> Time:
    """What the step reads and writes (w, g, w, and twice the buffer; w and g again) over what a copy does."""
    moved = weights * (28 if row.momentum else 20) / row.median_us
    return replace(row, note=f"{moved / ((2 << 30) / copy.median_us):.0%} of copy")


def iterations(setting: Setting) -> Iterator[list[Time]]:
    on_gpu = setting.device == "cuda"
    for name, mode in itertools.product(setting.networks, setting.modes):
        if NETWORKS[name].gpu_only and not on_gpu:
            continue
        others = ["InGSpace(SGD)"] + (["PathSGD"] if name not in ("resnet-50", "mlp-100M") else [])
        others = [other for other in others if other in setting.optimizers]
        for precision, momentum in itertools.product(("bf16", "tf32") if on_gpu else ("float32",), (0.0, 0.9)):
            fair = [FUSED, FOREACH] if "graph" not in mode else [FUSED]  # torch's foreach needs a rate on the host
            common = (setting, name, mode, precision, momentum)
            yield time_iteration(*common, [*fair, OURS], fair[-1])
            if others:
                yield time_iteration(*common, [fair[-1], *others], fair[-1])


def steps(setting: Setting) -> Iterator[list[Time]]:
    others = [name for name in ("GSGD foreach", "GSGD definition") if name in setting.optimizers]
    copy = time_copy(setting) if setting.device == "cuda" else None
    if copy:
        yield [copy]
    for name, momentum in itertools.product(setting.networks, (0.0, 0.9)):
        network = NETWORKS[name]
        if "eager" in setting.modes and (copy or not network.gpu_only):
            yield time_step(setting, name, network, "eager", momentum, [FOREACH, FUSED, OURS, *others], FOREACH)
        if "graph" in setting.modes and copy:
            weights = sum(p.numel() for p in network.build().parameters())
            found = time_step(setting, name, network, "graph", momentum, [FUSED, OURS], FUSED)
            yield [share_of_copy(row, weights, copy) if row.optimizer == OURS else row for row in found]


def widths(setting: Setting) -> Iterator[list[Time]]:
    """10³ to 10⁸ weights in three layers; on a GPU as a CUDA graph, where the host has no part in it."""
    mode, baseline = ("graph", FUSED) if setting.device == "cuda" else ("eager", FOREACH)
    for width in (18, 58, 183, 577, 1826, 3333, 5774):
        network = Network(partial(square, width, 3), (1, 1, width), 1)
        yield time_step(setting, f"3x{width}x{width}", network, mode, 0.0, [baseline, OURS], baseline, "width")


def depths(setting: Setting) -> Iterator[list[Time]]:
    for layers in (10, 50, 100, 500):
        network = Network(partial(square, 64, layers), (1, 1, 64), 1)
        yield time_step(setting, f"{layers}x64x64", network, "eager", 0.0, [FOREACH, OURS], FOREACH, "depth")


# Kernels --------------------------------------------------------------------------------------------------------------


def kernels(setting: Setting) -> Iterator[list[Time]]:
    """Microseconds per kernel of one GSGD step, by torch's profiler."""
    for name in ("plain-34", "mlp-100M"):
        model = with_gradients(built(NETWORKS[name], "cuda", channels_last=name == "plain-34"))
        optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(setting.repeats):
                optimizer.step()
            torch.cuda.synchronize()
        found = [(e.key[:60], e.self_device_time_total / setting.repeats) for e in profile.key_averages()]
        common = {"device": "cuda", "mode": "eager", "precision": "float32", "momentum": 0.0}
        yield [
            Time("kernels", name, key, **common, median_us=us, p10_us=us, p90_us=us, n=setting.repeats)
            for key, us in found
            if us
        ]


TILES = (
    Tile(),
    Tile(loops=2),
    Tile(loops=8),
    Tile(registers=128),
    Tile(rows=8, loops=16, registers=80),
    Tile(rows=32, warps=8),
    Tile(rows=8, width=256, loops=8, registers=128),
    Tile(rows=4, width=256, loops=16, warps=2, registers=128),
)


def tiles(setting: Setting) -> Iterator[list[Time]]:
    """GSGD's step with other tiles, as CUDA graphs."""
    from gspace import launch

    for name in ("plain-34", "mlp-100M"):
        calls: dict[str, Callable[[], object]] = {}
        for tile in TILES:
            model = with_gradients(built(NETWORKS[name], "cuda", channels_last=name == "plain-34"))
            optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
            optimizer._fast = fast._tabulate(optimizer, launch.FusedStep, tile, launch.FOLD)
            calls["{}x{} loops {} warps {} registers {}".format(*tile)] = captured(optimizer.step, lambda: None)
        times = interleave(calls, by_device, setting.repeats)
        common = {"device": "cuda", "mode": "graph", "precision": "float32", "momentum": 0.0}
        yield rows(times, next(iter(calls)), section="tiles", network=name, **common)


# The program ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else None
    return {
        "machine": torch.cuda.get_device_name() if CUDA else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "gspace": gspace.__version__,
        "commit": commit(),
    }


def show(times: Sequence[Time]) -> None:
    for t in times:
        where = f"{t.section} {t.network} {t.mode} {t.precision}{' momentum' if t.momentum else ''}"
        spread, ratio = f"[{t.p10_us:.1f}, {t.p90_us:.1f}]", "" if t.ratio is None else f"{t.ratio:.3f}"
        print(f"{where:56} {t.optimizer:34} {t.median_us:10.1f} µs {spread:22} {ratio} {t.note}", flush=True)


def write(times: Sequence[Time], earlier: Sequence[Mapping[str, str]], path: Path) -> None:
    """A row for each time, with what it was measured on; what other commands measured before is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = environment()
    new = [{key: str(value) for key, value in {**asdict(t), **here}.items()} for t in times]
    measured = set(map(_what, _turns(new)))
    kept = [row for group in _turns(earlier) if _what(group) not in measured for row in group]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*Time.__dataclass_fields__, *here])
        writer.writeheader()
        writer.writerows(kept + new)


def _turns(recorded: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """What was measured in the same turns: it ends with the baseline, again; a copy has turns of its own."""
    groups: list[list[Mapping[str, str]]] = [[]]
    for row in recorded:
        groups[-1].append(row)
        if row["optimizer"].endswith(" again") or row["optimizer"] == "copy":
            groups.append([])
    return [group for group in groups if group]


def _what(group: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    first = group[0]
    setting = (first[key] for key in ("section", "network", "mode", "precision", "momentum"))
    return (*setting, *(row["optimizer"] for row in group))


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(path: Path) -> None:
    """Iterations per second beside torch's SGD, per network: the paper's Fig. 6."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars: dict[tuple[str, ...], dict[str, float]] = {}
    for t in read(path):
        if t["section"] == "iteration" and float(t["momentum"]) == 0 and not t["optimizer"].endswith("again"):
            group = bars.setdefault((t["network"], t["mode"], t["precision"]), {})
            group[t["optimizer"]] = 100 / float(t["ratio"])
    if not bars:
        return
    names = [name for name in OPTIMIZERS if any(name in group for group in bars.values())]
    figure, axes = plt.subplots(figsize=(2 + 1.2 * len(bars), 4.5), layout="constrained")
    for i, name in enumerate(names):
        found = [(k, group[name]) for k, group in enumerate(bars.values()) if name in group]
        at = [k + (i - (len(names) - 1) / 2) * 0.8 / len(names) for k, _ in found]
        axes.bar(at, [value for _, value in found], 0.8 / len(names), label=name)
    axes.axhline(93, color="0.4", linestyle="--", linewidth=1, label="G-SGD in the paper: about 93")
    axes.set_xticks(range(len(bars)), ["\n".join(group) for group in bars], fontsize=8)
    axes.set_ylabel("iterations per second, % of torch's SGD")
    axes.legend(fontsize=8, loc="lower left")
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix))


def page(folder: Path, figures: str = "../results") -> str:
    """What is recorded in a folder, as Markdown: GSGD's medians beside those of torch's SGD.

    `figures` is where the page finds the figures of that folder.
    """
    lines = [
        "# Speed: a step and an iteration of G-SGD beside torch's SGD",
        "",
        "Medians over interleaved repeats in one process; the ratio is the median over that of the baseline, and "
        '"noise" the ratio of the baseline to itself, measured in the same turns. Times in µs, with the 10th and 90th '
        "percentile. The baseline on a CPU and in eager mode is SGD(foreach); SGD(fused), where it was timed, has rows "
        "of its own: with momentum it is the faster one. Iterations are forward, backward and step; networks are "
        "described in `benchmarks/step.py`. The "
        "figures are the paper's Fig. 6 with our bars: iterations per second in per cent of those with torch's SGD; "
        "the paper states about 7 % less for G-SGD.",
        "",
        "Generated by `gspace bench step --out results --table docs/speed.md` from `results/step-cpu.csv` and "
        "`results/step-gpu.csv`, which `gspace bench step --out results` writes.",
    ]
    for device, name in (("GPU", "step-gpu.csv"), ("CPU", "step-cpu.csv")):
        recorded = [row for row in read(folder / name) if row["section"] not in ("kernels", "tiles")]  # no baseline
        where = sorted({"{machine}, torch {torch}, threads of the CPU: {threads}".format(**row) for row in recorded})
        figure = f"![Iterations per second beside torch's SGD]({figures}/{Path(name).stem}.svg)"
        lines += ["", f"## {device}", "", f"{'; '.join(where)}.", "", figure, "", PAGE_HEADER] if recorded else []
        lines += [line for group in _turns(recorded) for line in _compared(group)]
    return "\n".join(lines) + "\n"


PAGE_HEADER = (
    "| | network | mode | precision | | optimizer | baseline | baseline, µs | optimizer, µs | ratio | noise | n | |\n"
    "|---|---|---|---|---|---|---|---:|---:|---:|---:|---:|---|"
)


def _compared(turns: Sequence[Mapping[str, str]]) -> list[str]:
    base = next(row for row in turns if row["optimizer"] == row["baseline"])
    lines = []
    for row in turns[:-1]:
        if row is not base:
            times = [
                f"{float(r['median_us']):.1f} ({float(r['p10_us']):.1f} to {float(r['p90_us']):.1f})"
                for r in (base, row)
            ]
            what = [row[key] for key in ("section", "network", "mode", "precision")]
            what += ["momentum" if float(row["momentum"]) else "", row["optimizer"], row["baseline"]]
            ratios = [f"{float(r['ratio']):.3f}" for r in (row, turns[-1])]
            lines.append(f"| {' | '.join([*what, *times, *ratios, row['n'], row['note']])} |")
    return lines


SECTIONS: Mapping[str, Callable[[Setting], Iterator[list[Time]]]] = {
    "iteration": iterations,
    "step": steps,
    "width": widths,
    "depth": depths,
    "kernels": kernels,
    "tiles": tiles,
}
MODES = {"cpu": ("eager", "compiled"), "cuda": ("eager", "compiled", "graph", "compiled graph")}


OTHERS = "what to time beside torch's SGD and GSGD, which always are (default: all)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the CSV and the figure go")
    usual = [name for name in SECTIONS if name not in ("kernels", "tiles")]
    parser.add_argument("--table", type=Path, metavar="FILE", help="write this page from what --out has, time nothing")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=usual, help=f"default: {' '.join(usual)}")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--mode", nargs="+", choices=MODES["cuda"], help="default: all that the device has")
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help=OTHERS)
    parser.add_argument("--repeats", type=int, default=0, help="turns (default: 100, on a GPU 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU (default: 1)")
    parser.add_argument("--device", choices=MODES, default="cuda" if CUDA else "cpu")
    args = parser.parse_args()
    if args.table:
        if not args.out:
            parser.error("--table needs --out, the folder with the CSV files")
        if not list(args.out.glob("step-?pu.csv")):
            parser.error(f"{args.out} has no step-cpu.csv and no step-gpu.csv")
        figures = os.path.relpath(args.out, args.table.parent)
        args.table.write_text(page(args.out, Path(figures).as_posix()), encoding="utf-8")
        return 0
    if args.repeats < 0:
        parser.error(f"--repeats takes a number of turns, got {args.repeats}")
    if args.device == "cuda" and not CUDA:
        parser.error("no CUDA device is here")
    if args.device == "cpu" and {"kernels", "tiles"} & set(args.only):
        parser.error("kernels and tiles are those of a GPU")
    absent = set(args.mode or ()) - set(MODES[args.device])
    if absent:
        parser.error(f"a {args.device.upper()} has no mode {min(absent)!r}, only {', '.join(MODES[args.device])}")
    torch.set_num_threads(args.threads)
    repeats = args.repeats or (20 if args.device == "cuda" else 100)
    setting = Setting(args.device, repeats, args.network, args.mode or MODES[args.device], args.optimizer)
    times: list[Time] = []
    path = args.out / f"step-{'gpu' if args.device == 'cuda' else 'cpu'}.csv" if args.out else None
    earlier = read(path) if path else []
    for found in itertools.chain.from_iterable(SECTIONS[name](setting) for name in args.only):
        show(found)
        times += found
        if path:
            write(times, earlier, path)
    if path:
        draw(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
