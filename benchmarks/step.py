"""How long a step and an iteration take: GSGD beside torch's SGD, in one process, interleaved, medians.

    python benchmarks/step.py [--out FOLDER] [--only NAME ...] [--seconds S] [--repeats N] [--threads T]
    python benchmarks/step.py --gpu-check --out FOLDER

Sections (`--only`): "iteration" times forward, backward and step of every network with every optimizer, eager and, on
a GPU, as one CUDA graph; "step" the step alone; "width" and "depth" how it grows with weights and with layers.
`--gpu-check` is what a GPU must show, in a few minutes: kernels against the definition, the step on 10⁸ weights beside
fused SGD and a copy, ResNet-50 eager, Plain-34 and ResNet-34 as CUDA graphs, time per kernel, other tiles.

Every time is the median over interleaved repeats, with the 10th and 90th percentile; a ratio is that of two medians of
the same section. The written CSV holds one row per time, the JSON the environment too.
"""

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gspace
from gspace import fast
from gspace.baselines import PathSGD
from gspace.lab.models import build_model, mlp
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
Maker = Callable[[nn.Module, Rate, float], Any]


def _inner(model: nn.Module, lr: Rate, momentum: float) -> Any:
    return gspace.InGSpace(model, torch.optim.SGD, lr=lr, momentum=momentum)


OPTIMIZERS: Mapping[str, Maker] = {
    "SGD fused": lambda model, lr, mu: torch.optim.SGD(model.parameters(), lr, momentum=mu, fused=True),
    "SGD foreach": lambda model, lr, mu: torch.optim.SGD(model.parameters(), lr, momentum=mu, foreach=True),
    "GSGD fused": lambda model, lr, mu: gspace.GSGD(model, lr, momentum=mu, fused=True),
    "GSGD foreach": lambda model, lr, mu: gspace.GSGD(model, lr, momentum=mu, foreach=True),
    "GSGD definition": lambda model, lr, mu: gspace.GSGD(model, lr, momentum=mu, foreach=False),
    "InGSpace(SGD)": _inner,
    "PathSGD": lambda model, lr, mu: PathSGD(model, lr, momentum=mu),
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
    model = gspace.init_skeleton_(network.build()).to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 1e-3)
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
    deadline: float

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()


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
            optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum)
            once = iteration(model, optimizer, x, y, precision, compiled="compiled" in mode)
            if "graph" in mode:
                calls[label] = captured(once, partial(optimizer.zero_grad, set_to_none=True))
            else:
                calls[label] = once
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
    for label in [*optimizers, f"{baseline} again"]:
        model = with_gradients(built(network, setting.device))
        rate: Rate = torch.tensor(1e-6, device="cuda") if setting.device == "cuda" and "foreach" not in label else 1e-6
        optimizer = OPTIMIZERS[label.removesuffix(" again")](model, rate, momentum)
        calls[label] = captured(optimizer.step, lambda: None) if mode == "graph" else optimizer.step
    clock = by_device if setting.device == "cuda" and mode != "eager" else by_host
    times = interleave(calls, clock, setting.repeats)
    common = {"device": setting.device, "mode": mode, "precision": "float32", "momentum": momentum}
    return rows(times, baseline, section=section, network=name, **common)


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = statistics.median(interleave({"copy": lambda: target.copy_(source)}, by_device, setting.repeats)["copy"])
    return 2 * source.numel() * source.element_size() / seconds


def iterations(setting: Setting) -> Iterator[list[Time]]:
    on_gpu = setting.device == "cuda"
    for name, network in NETWORKS.items():
        if network.gpu_only and not on_gpu:
            continue
        others = ["InGSpace(SGD)"] + (["PathSGD"] if name not in ("resnet-50", "mlp-100M") else [])
        for momentum in (0.0, 0.9):
            yield time_iteration(setting, name, "eager", "float32", momentum, [FOREACH, FUSED, OURS], FOREACH)
            yield time_iteration(setting, name, "eager", "float32", momentum, [FOREACH, *others], FOREACH)
            if on_gpu:
                for precision in ("bf16", "tf32"):
                    yield time_iteration(setting, name, "graph", precision, momentum, [FUSED, OURS], FUSED)


def steps(setting: Setting) -> Iterator[list[Time]]:
    ours = [FOREACH, FUSED, OURS, "GSGD foreach", "GSGD definition"]
    for name, network in NETWORKS.items():
        if setting.device == "cuda" or not network.gpu_only:
            for momentum in (0.0, 0.9):
                yield time_step(setting, name, network, "eager", momentum, ours, FOREACH)


def widths(setting: Setting) -> Iterator[list[Time]]:
    """10³ to 10⁸ weights in three layers."""
    for width in (18, 58, 183, 577, 1826, 5774):
        network = Network(partial(square, width, 3), (1, 1, width), 1)
        yield time_step(setting, f"3x{width}x{width}", network, "eager", 0.0, [FOREACH, OURS], FOREACH, "width")


def depths(setting: Setting) -> Iterator[list[Time]]:
    for layers in (10, 50, 100, 500):
        network = Network(partial(square, 64, layers), (1, 1, 64), 1)
        yield time_step(setting, f"{layers}x64x64", network, "eager", 0.0, [FOREACH, OURS], FOREACH, "depth")


# What a GPU must show -------------------------------------------------------------------------------------------------


def small_convolutional() -> nn.Sequential:
    """BatchNorm, groups, rows that are and are not multiples of 16 bytes, parameters outside every unit."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 3, groups=4), nn.ReLU()),
        *(nn.Conv2d(48, 40, 3, bias=False), nn.BatchNorm2d(40), nn.ReLU(), nn.ConvTranspose2d(40, 24, 2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 300), nn.ReLU(), nn.Linear(300, 77), nn.GELU()),
        nn.Linear(77, 5),
    )


CHECKED: Mapping[str, Callable[[], nn.Module]] = {
    "convolutional": small_convolutional,
    "mlp": partial(mlp, (1, 1, 50), 10, (300, 280, 77)),
    "plain-34 narrow": partial(build_model, "plain-34", CIFAR, 10, width=16),
}
# Against `step.py` in the same precision, relative to each tensor's norm. 16 bits: one unit in the last place, because
# the kernels round once and `step.py` may fall on the other side.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
CHECKED_OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "paper": {"batch_norm": "paper", "momentum": 0.9, "dampening": 0.1},
    "clip, spread": {"max_path_grad_norm": 0.1, "allocation": "spread"},
}


def check_kernels(setting: Setting) -> list[tuple[str, float, float]]:
    """Worst relative difference between the kernels and the definition after five steps."""
    found = []
    for (name, build), dtype, layout in (
        (item, dtype, layout)
        for item in CHECKED.items()
        for dtype in TOLERANCE
        for layout in (torch.contiguous_format, torch.channels_last)
    ):
        for label, options in CHECKED_OPTIONS.items():
            if dtype == torch.bfloat16 and label != "plain":
                continue
            optimizers = []
            for way in ({"foreach": False}, {"fused": True}):
                torch.manual_seed(0)
                model = build().to(setting.device, dtype)
                if layout is torch.channels_last and any(p.dim() == 4 for p in model.parameters()):
                    model = model.to(memory_format=layout)
                optimizers.append(gspace.GSGD(model, 0.05, **way, **options))
            kernels = type(getattr(fast.bind(optimizers[1]), "way", None)).__name__
            worst = 0.0 if kernels == "FusedStep" else float("nan")
            for seed in range(1 if dtype == torch.bfloat16 else 5):
                for o in optimizers:
                    generator = torch.Generator().manual_seed(seed)
                    for p in o.model.parameters():
                        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 0.1)
                    o.step()
            for p, q in zip(*(o.model.parameters() for o in optimizers), strict=True):
                a, b = p.detach().double(), q.detach().double()
                worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-30))) if worst == worst else worst
            shape = "channels last" if layout is torch.channels_last else "contiguous"
            found.append((f"{name}, {str(dtype).removeprefix('torch.')}, {shape}, {label}", worst, TOLERANCE[dtype]))
    return found


def kernel_times(setting: Setting, name: str) -> list[tuple[str, float]]:
    """Microseconds per kernel of one GSGD step, by torch's profiler."""
    model = with_gradients(built(NETWORKS[name], "cuda", channels_last=len(NETWORKS[name].shape) == 3))
    optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            optimizer.step()
        torch.cuda.synchronize()
    return [(e.key[:60], e.self_device_time_total / 20) for e in profile.key_averages() if e.self_device_time_total]


TILES = (
    Tile(),
    Tile(loops=2),
    Tile(loops=8),
    Tile(rows=16, warps=8),
    Tile(rows=8, width=512, warps=8),
    Tile(rows=4, width=512, warps=4, loops=8),
    Tile(registers=96),
    Tile(registers=168),
    Tile(rows=4, loops=8, warps=2),
)


def time_tiles(setting: Setting, name: str) -> list[Time]:
    """GSGD's step with other tiles, as CUDA graphs."""
    from gspace import launch

    calls: dict[str, Callable[[], object]] = {}
    for tile in TILES:
        model = with_gradients(built(NETWORKS[name], "cuda", channels_last=len(NETWORKS[name].shape) == 3))
        optimizer = gspace.GSGD(model, torch.tensor(1e-6, device="cuda"), fused=True)
        optimizer._fast = fast._tabulate(optimizer, launch.FusedStep, tile, launch.FOLD)
        calls["{}x{} loops {} warps {} registers {}".format(*tile)] = captured(optimizer.step, lambda: None)
    times = interleave(calls, by_device, setting.repeats)
    common = {"device": "cuda", "mode": "graph", "precision": "float32", "momentum": 0.0}
    return rows(times, next(iter(calls)), section="tiles", network=name, **common)


def gpu_check(setting: Setting, out: "Out") -> bool:
    """Runs the checks in order of importance until the time is up; whether kernels agree with the definition."""
    checked = check_kernels(setting)
    bad = [f"  {name}: {worst:.1e} > {limit:.0e}" for name, worst, limit in checked if not worst <= limit]
    out.say(f"kernels against the definition: {len(checked) - len(bad)} of {len(checked)} agree", *bad)
    out.note("kernels", [{"case": name, "worst": worst, "limit": limit} for name, worst, limit in checked])

    bandwidth = copy_bandwidth(setting)
    out.say(f"copy: {bandwidth / 1e12:.2f} TB/s")
    out.note("copy_bytes_per_second", bandwidth)
    sizes = {name: sum(p.numel() for p in NETWORKS[name].build().parameters()) for name in ("mlp-100M", "plain-34")}
    for name, momentum in (("mlp-100M", 0.0), ("mlp-100M", 0.9), ("plain-34", 0.0), ("plain-34", 0.9)):
        found = time_step(setting, name, NETWORKS[name], "graph", momentum, [FUSED, OURS], FUSED)
        traffic = sizes[name] * (28 if momentum else 20)
        ours = next(row for row in found if row.optimizer == OURS)
        share = traffic / (ours.median_us * 1e-6) / bandwidth
        out.add([replace(row, note=f"{share:.0%} of copy") if row is ours else row for row in found])
    for name in ("mlp-100M", "plain-34"):
        spent = kernel_times(setting, name)
        out.say(f"{name}, µs per kernel: " + ", ".join(f"{key} {us:.1f}" for key, us in spent))
        out.note(f"kernel_us {name}", spent)
    out.add(time_step(setting, "resnet-50", NETWORKS["resnet-50"], "eager", 0.0, [FOREACH, FUSED, OURS], FOREACH))
    out.add(time_step(setting, "resnet-50", NETWORKS["resnet-50"], "eager", 0.9, [FOREACH, FUSED, OURS], FOREACH))

    plans = [(n, "graph", p, m) for m in (0.0, 0.9) for n in ("plain-34", "resnet-34") for p in ("bf16", "tf32")]
    for name, mode, precision, momentum in plans:
        if setting.left > 15:
            out.add(time_iteration(setting, name, mode, precision, momentum, [FUSED, OURS], FUSED))
    for name in ("plain-34", "mlp-100M"):
        if setting.left > 60:
            out.add(time_tiles(setting, name))
    for precision in ("bf16", "tf32"):
        if setting.left > 120:
            out.add(time_iteration(setting, "plain-34", "compiled graph", precision, 0.0, [FUSED, OURS], FUSED))
    return not bad


# The program ----------------------------------------------------------------------------------------------------------


class Out:
    """Prints as it goes, and writes all at the end."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.times: list[Time] = []
        self.notes: dict[str, Any] = {}

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)

    def note(self, name: str, value: Any) -> None:
        self.notes[name] = value

    def add(self, some: list[Time]) -> None:
        self.times += some
        for t in some:
            where = f"{t.section} {t.network} {t.mode} {t.precision}{' momentum' if t.momentum else ''}"
            spread = f"[{t.p10_us:.1f}, {t.p90_us:.1f}]"
            self.say(f"{where:52} {t.optimizer:34} {t.median_us:10.1f} µs {spread:22} {t.ratio:.3f} {t.note}")
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "step.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(Time.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(t) for t in self.times)
        found = {"environment": environment(), "notes": self.notes, "times": [asdict(t) for t in self.times]}
        (self.folder / "step.json").write_text(json.dumps(found, indent=1, default=str))


def environment() -> dict[str, Any]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "torch": torch.__version__,
        "triton": version,
        "gspace": gspace.__version__,
        "commit": commit,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if CUDA else None,
    }


SECTIONS: Mapping[str, Callable[[Setting], Iterator[list[Time]]]] = {
    "iteration": iterations,
    "step": steps,
    "width": widths,
    "depth": depths,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for step.csv and step.json")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--repeats", type=int, default=0, help="turns (default: 100, on a GPU 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if CUDA else "cpu")
    parser.add_argument("--seconds", type=float, default=230.0, help="time for --gpu-check")
    parser.add_argument("--gpu-check", action="store_true", help="what a GPU must show, in a few minutes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    repeats = args.repeats or (20 if args.device == "cuda" else 100)
    setting = Setting(args.device, repeats, time.perf_counter() + args.seconds)
    out = Out(args.out)
    if args.gpu_check:
        if not CUDA:
            parser.error("--gpu-check needs a CUDA device")
        agree = gpu_check(setting, out)
        out.write()
        return 0 if agree else 1
    for name in args.only:
        for some in SECTIONS[name](setting):
            out.add(some)
    return 0


if __name__ == "__main__":
    sys.exit(main())
