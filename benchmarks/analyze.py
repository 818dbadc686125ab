"""How long `gspace.analyze` takes on networks up to the size of ResNet-152, on one thread.

    python benchmarks/analyze.py [--json FILE] [--repeats N]

Every network is built at its full width; the time is that of the fastest repeat, and of the slowest.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import gspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import zoo  # the architectures of the test zoo

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain-34": partial(zoo.plain, 64),
    "resnet-18": partial(zoo.ResNet, zoo.BasicBlock, (2, 2, 2, 2), 64),
    "resnet-50": partial(zoo.ResNet, zoo.Bottleneck, (3, 4, 6, 3), 64),
    "resnet-152": partial(zoo.ResNet, zoo.Bottleneck, (3, 8, 36, 3), 64),
}


@dataclass(frozen=True)
class Timing:
    """One network under one choice of `residual`."""

    network: str
    residual: str
    m: int
    H: int
    H_absorbed: int
    fastest_s: float
    slowest_s: float
    n: int


def measure(name: str, residual: str, repeats: int) -> Timing:
    model = NETWORKS[name]()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = gspace.analyze(model, residual=residual)
        times.append(time.perf_counter() - start)
    return Timing(name, residual, found.m, found.H, found.H_absorbed, min(times), max(times), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures and the environment to this file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'network':12}{'residual':10}{'m':>12}{'H':>8}{'absorbed':>10}{'fastest':>10}{'slowest':>10}")
    timings = []
    for name in NETWORKS:
        for residual in ("pin", "tie"):
            t = measure(name, residual, options.repeats)
            timings.append(t)
            counts = f"{t.m:>12,}{t.H:>8,}{t.H_absorbed:>10,}"
            print(f"{name:12}{residual:10}{counts}{t.fastest_s:>8.2f} s{t.slowest_s:>8.2f} s", flush=True)
    if options.json:
        environment = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        environment |= {"machine": platform.machine(), "gspace": gspace.__version__}
        report = {"environment": environment, "timings": [asdict(t) for t in timings]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
