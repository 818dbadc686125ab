"""Steps of every Triton kernel, to be watched by compute-sanitizer.

    python benchmarks/sanitize.py                                              # takes the steps, on a GPU
    python benchmarks/sanitize.py --tools memcheck racecheck --json results/sanitizer.json

The networks have sizes that fill no tile, several chunks in each direction, taps, groups, transposed weights, BatchNorm
and more layers than one walk covers. Options and dtypes take turns. Weights are compared with those of torch's
operations (GSGD) or of a CPU (InGSpace).

With `--tools` the steps are taken again under each tool, and once more with a planted kernel that writes behind its
tensor, which memcheck must see. Only kernels with `_pass` in their name are watched: all of ours, and the planted one,
none of torch's. Torch's cache of memory is off there: every tensor is an allocation of its own.
"""

import argparse
import copy
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gspace

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SUMMARY = re.compile(r"SUMMARY: (\d+) ")


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 9, 3, groups=9), nn.ReLU()),
        *(nn.Conv2d(9, 6, (1, 3), groups=3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(5 * 8, 7), nn.ReLU(), nn.Linear(7, 18), nn.GELU(), nn.Linear(18, 2)),
    )


def transposed() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "narrow": (lambda: mlp(5, 7, 3, 11, 2), (5,)),
    "odd": (lambda: mlp(31, 1037, 129, 3), (31,)),
    "wide": (lambda: mlp(2100, 67, 1031, 5), (2100,)),
    "deep": (lambda: mlp(3, *[5] * 40, 2), (3,)),
    "convolutional": (convolutional, (3, 8, 8)),
    "transposed": (transposed, (2, 6, 6)),
}
STEPS: dict[str, dict[str, Any]] = {  # of GSGD
    "plain": {},
    "momentum, decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "dampening, no guards": {"momentum": 0.8, "dampening": 0.1, "max_ratio": float("inf"), "max_drift": float("inf")},
    "spread, maximize": {"allocation": "spread", "momentum": 0.9, "maximize": True},
    "clipped": {"max_path_grad_norm": 0.3, "weight_decay": 0.1},
}
INNER: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [  # of InGSpace
    (torch.optim.AdamW, {"weight_decay": 0.01, "eps": 1e-3}),
    (torch.optim.SGD, {"momentum": 0.9}),
]
# Rounding: torch's operations round after each, the kernels less often. Weights of 16 bits may round to a neighbour.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def put(model: nn.Module, seed: int, missing: bool) -> None:
    """Gradients; the last parameter has none, or the first has one with other strides."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * 0.1)
    first, *_, last = model.parameters()
    if missing:
        last.grad = None
    else:
        first.grad = first.grad.mT.contiguous().mT if first.grad is not None else None


def apart(model: nn.Module, ours: torch.optim.Optimizer, other: nn.Module, theirs: torch.optim.Optimizer) -> float:
    """The largest difference of a tensor after three steps, beside its norm."""
    for seed in range(3):
        for m, optimizer in ((model, ours), (other, theirs)):
            put(m, seed, missing=seed == 1)
            optimizer.step()

    def difference(p: torch.Tensor, q: torch.Tensor) -> float:
        here, there = p.detach().cpu().double(), q.detach().cpu().double()
        return float((here - there).norm() / there.norm().clamp_min(1e-30))

    return max(map(difference, model.parameters(), other.parameters()))


def built(name: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, gspace.Analysis]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().to(device, dtype)
    analysis = gspace.analyze(model, torch.randn(2, *shape, device=device, dtype=dtype))
    layout = torch.channels_last if name == "convolutional" and dtype == torch.float32 else torch.contiguous_format
    return model.to(memory_format=layout), analysis


def exercise(device: str) -> list[dict[str, Any]]:
    """All networks in three dtypes each; the options take turns."""
    rows = []
    for k, name in enumerate(NETWORKS):
        for j, dtype in enumerate((torch.float64, torch.float32, (torch.bfloat16, torch.float16)[k % 2])):
            options = list(STEPS)[(3 * k + j) % len(STEPS)]
            model, analysis = built(name, device, dtype)
            other = copy.deepcopy(model)
            ours = gspace.GSGD(model, 0.05, analysis=analysis, **STEPS[options])
            theirs = gspace.GSGD(other, 0.05, analysis=analysis, foreach=False, **STEPS[options])
            rows.append(row(name, dtype, f"GSGD {options}", apart(model, ours, other, theirs)))
            if j < 2:
                kind, settings = INNER[(k + j) % len(INNER)]
                model, analysis = built(name, device, dtype)
                other = copy.deepcopy(model).cpu()
                inner = [gspace.InGSpace(m, kind, lr=0.01, analysis=analysis, **settings) for m in (model, other)]
                rows.append(row(name, dtype, f"InGSpace {kind.__name__}", apart(model, inner[0], other, inner[1])))
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return rows


def row(name: str, dtype: torch.dtype, optimizer: str, difference: float) -> dict[str, Any]:
    short = str(dtype).removeprefix("torch.")
    good = difference <= TOLERANCE[dtype]
    print(f"{name:14} {short:9} {optimizer:28} {difference:.1e}{'' if good else '  TOO LARGE'}", flush=True)
    return {"network": name, "dtype": short, "optimizer": optimizer, "difference": difference, "good": good}


def variants() -> dict[str, int]:
    """How many versions of each kernel were compiled, and so launched."""
    from gspace.optim.fast import kernels

    return {k: sum(len(cache[0]) for cache in getattr(kernels, k).device_caches.values()) for k in kernels.__all__}


def plant() -> None:
    """A kernel that writes behind its tensor."""
    import triton
    import triton.language as tl

    @triton.jit
    def beyond_pass(out):  # type: ignore[no-untyped-def]
        tl.store(out + tl.arange(0, 128), 1.0)

    beyond_pass[(1,)](torch.zeros(100, device="cuda"))
    torch.cuda.synchronize()


def watched(tool: str, limit: float, *arguments: str) -> dict[str, Any]:
    """These steps in a process of their own, under a tool that looks at our kernels alone."""
    ours = ("--kernel-name", "kernel_substring=_pass")
    command = ["compute-sanitizer", "--tool", tool, *ours, sys.executable, __file__, *arguments]
    begun = time.perf_counter()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
    except subprocess.TimeoutExpired:
        print(f"{tool} {' '.join(arguments)}: not done after {limit:.0f} s", flush=True)
        return {"tool": tool, "arguments": arguments, "timed_out": limit}
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=====")]
    summary = next((line for line in told if SUMMARY.search(line)), "no summary")
    found = SUMMARY.search(summary)
    print(f"{tool} {' '.join(arguments)}: {summary.strip('= ')}, exit {done.returncode}", flush=True)
    well = found and found[1] == "0" and done.returncode == 0
    more = [] if well else told[:40] + done.stdout.splitlines()[-20:] + done.stderr.splitlines()[-20:]
    print(*more, sep="\n", flush=True)
    return {
        "tool": tool,
        "arguments": arguments,
        "errors": int(found[1]) if found else None,
        "summary": summary.strip("= "),
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - begun, 1),
        "told": more,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=[])
    parser.add_argument("--limit", type=float, default=240, help="seconds for each tool")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--planted", action="store_true", help="only write behind a tensor, on purpose")
    options = parser.parse_args()
    if options.planted:
        plant()
        return 0
    if options.tools and shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    begun = time.perf_counter()
    rows = exercise(options.device)
    on_gpu = options.device.startswith("cuda")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else options.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gspace": gspace.__version__,
        "seconds": round(time.perf_counter() - begun, 1),
        "variants": variants() if on_gpu else {},
        "steps": rows,
    }
    print(f"{len(rows)} optimizers in {report['seconds']} s; versions of kernels: {report['variants']}", flush=True)
    good = all(r["good"] for r in rows) and all(report["variants"].values())
    if options.tools:
        report["tools"] = [watched(tool, options.limit) for tool in options.tools]
        report["planted"] = watched("memcheck", options.limit, "--planted")
        good &= all(r.get("errors") == 0 and r["exit"] == 0 for r in report["tools"])
        good &= bool(report["planted"].get("errors"))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
