"""What a step costs several processes: collectives and bytes, counted, and throughput beside one process.

    python benchmarks/ranks.py --out results/ranks.json       # some minutes: processes with gloo on this machine
    python benchmarks/ranks.py --gpu results/ranks-gpu.json   # seconds, on a machine with one
    python benchmarks/ranks.py --table docs/scale.md          # writes the tables from those records

Counts are of MLPs that FSDP2 shards, in their first step, which chooses the skeleton, and in a later one. Times are of
whole iterations, the optimizers in turn, `ROUNDS` times; what is compared ran in the same processes. On a GPU a later
step is counted, in one process, sharded (with NCCL) and not.
"""

import argparse
import json
import os
import platform
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gspace

SIZES = (1, 2, 4)  # processes
WIDTHS = {"narrow": (16, 256, 256, 10), "more weights": (1024, 256, 256, 1024), "more units": (16, 512, 512, 10)}
TIMED, BATCH, STEPS, ROUNDS = (784, 512, 512, 10), 128, 10, 7
Make = Callable[[nn.Module, gspace.Analysis], Optimizer]
COUNTED: dict[str, Make] = {
    "GSGD": lambda m, a: gspace.GSGD(m, 0.01, 0.9, analysis=a),
    "GSGD, clipped": lambda m, a: gspace.GSGD(m, 0.01, 0.9, max_path_grad_norm=1.0, analysis=a),
    "InGSpace(AdamW)": lambda m, a: gspace.InGSpace(m, torch.optim.AdamW, lr=1e-3, analysis=a),
}
PAIRS: dict[str, tuple[Make, Make]] = {
    "GSGD": (lambda m, a: torch.optim.SGD(m.parameters(), 0.01, 0.9), COUNTED["GSGD"]),
    "InGSpace(AdamW)": (lambda m, a: torch.optim.AdamW(m.parameters(), 1e-3), COUNTED["InGSpace(AdamW)"]),
}


class Collectives(TorchDispatchMode):
    """The collectives of a block: their names, and the bytes that this process gives or takes, whichever is more."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and ("gather" in name or "reduce" in name):
            self.names.append(name.strip("_"))
            self.bytes += max(_bytes(part) for part in (*args, out))
        return out


def _bytes(part: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(part) if isinstance(t, Tensor))


def mlp(widths: tuple[int, ...]) -> tuple[nn.Module, gspace.Analysis]:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1])
    return model, gspace.analyze(model)


def shard(model: nn.Module) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def counted(network: str, optimizer: str) -> dict[str, Any]:
    """Collectives and bytes of a first step, of a later one, and of FSDP2's own work in an iteration."""
    model, analysis = mlp(WIDTHS[network])
    made = COUNTED[optimizer](shard(model), analysis)
    found = []
    for _ in range(2):
        with Collectives() as passes:
            model(torch.randn(8, WIDTHS[network][0])).square().mean().backward()
        with Collectives() as step:
            made.step()
        found.append((step, passes))
    (first, _), (later, passes) = found
    row = {"network": network, "optimizer": optimizer, "m": analysis.m, "H": analysis.H}
    for key, seen in (("first", first), ("step", later), ("passes", passes)):
        row |= {key: dict(sorted(Counter(seen.names).items())), f"{key}_bytes": seen.bytes}
    return row


def timed(way: str) -> list[dict[str, Any]]:
    """Seconds of an iteration with the optimizer, and with the one beside it, by the clock and of this CPU."""
    rows = []
    for name, pair in PAIRS.items():
        runs = []
        for make in pair:
            model, analysis = mlp(TIMED)
            inner = shard(model) if way == "FSDP2" else model
            parallel = DistributedDataParallel(model) if way == "DDP" and dist.get_world_size() > 1 else inner
            runs.append((parallel, make(model, analysis)))
        x, y = torch.randn(BATCH, TIMED[0]), torch.randint(TIMED[-1], (BATCH,))
        clock: list[list[float]] = [[], []]
        work: list[list[float]] = [[], []]
        for turn in range(ROUNDS + 1):
            for k, (model, optimizer) in enumerate(runs):
                dist.barrier()
                start = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                if turn:  # the first chooses skeletons and compiles
                    clock[k].append((time.perf_counter() - start[0]) / STEPS)
                    work[k].append((time.process_time() - start[1]) / STEPS)
        rows.append(
            {
                "way": way,
                "optimizer": name,
                "plain_s": clock[0],
                "s": clock[1],
                "plain_cpu_s": work[0],
                "cpu_s": work[1],
            }
        )
    return rows


def _rank(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    counts = [{"ranks": size, **counted(network, name)} for network in WIDTHS for name in COUNTED]
    times = [{"ranks": size, **row} for way in ("DDP", "FSDP2") for row in timed(way)]
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps({"counts": counts, "times": times}), encoding="utf-8")
    dist.destroy_process_group()


def record() -> dict[str, Any]:
    found: dict[str, list[Any]] = {"counts": [], "times": []}
    with TemporaryDirectory() as folder:
        for size in SIZES:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(_rank, (size, port, folder), nprocs=size)
            for key, rows in json.loads(Path(folder, f"{size}.json").read_text(encoding="utf-8")).items():
                found[key] += rows
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    settings = {"widths": TIMED, "batch": BATCH, "steps": STEPS, "rounds": ROUNDS, "dtype": "float32"}
    return {"command": "python benchmarks/ranks.py", **machine, **settings, **found}


# One GPU --------------------------------------------------------------------------------------------------------------

STEPPED: dict[str, Make] = {"SGD": PAIRS["GSGD"][0], "AdamW": PAIRS["InGSpace(AdamW)"][0], **COUNTED}


def launched(network: str, way: str, optimizer: str, device: str) -> dict[str, Any]:
    """What a step launches and sends, the bytes of the tensors it is about, and what it needs besides."""
    model, analysis = mlp(WIDTHS[network])
    model = shard(model.to(device)) if way == "FSDP2" else model.to(device)
    made = STEPPED[optimizer](model, analysis)
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(8, WIDTHS[network][0], device=device)).square().mean().backward()
        made.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with Collectives() as sent:
        made.step()
    spare = torch.cuda.max_memory_allocated() - held
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made.step()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    tensors = {
        "weights_bytes": list(model.parameters()),
        "gradients_bytes": [p.grad for p in model.parameters()],
        "state_bytes": [t for t in tree_leaves(list(made.state.values())) if isinstance(t, Tensor)],
    }
    row = {"network": network, "way": way, "optimizer": optimizer, "m": analysis.m, "H": analysis.H}
    row |= {"kernels": len(names) - copies, "copies": copies, "spare_bytes": spare}
    row |= {"sent": dict(sorted(Counter(sent.names).items())), "sent_bytes": sent.bytes}
    return row | {key: _bytes(value) for key, value in tensors.items()}


def gpu_record(device: str = "cuda") -> dict[str, Any]:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = [(network, name) for network in WIDTHS for name in STEPPED if network == "narrow" or name == "GSGD"]
    rows = [launched(network, way, name, device) for network, name in cases for way in ("one process", "FSDP2")]
    dist.destroy_process_group()
    return {
        "command": "python benchmarks/ranks.py --gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "counts": rows,
    }


# The page -------------------------------------------------------------------------------------------------------------


def _said(names: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items())


def counts_table(found: dict[str, Any]) -> list[str]:
    lines = ["| network | m | H | ranks | optimizer | a step | bytes | / 4H | FSDP2's passes, bytes | the first step |"]
    lines.append("|---|---:|---:|---:|---|---|---:|---:|---:|---|")
    for row in found["counts"]:
        if row["network"] == "narrow" or row["optimizer"] == "GSGD":
            cells = [row["network"], f"{row['m']:,}", row["H"], row["ranks"], row["optimizer"], _said(row["step"])]
            cells += [f"{row['step_bytes']:,}", f"{row['step_bytes'] / 4 / row['H']:.2f}", f"{row['passes_bytes']:,}"]
            cells.append(f"{_said(row['first'])}, {row['first_bytes']:,} bytes")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def times_table(found: dict[str, Any]) -> list[str]:
    lines = ["| ranks | way | optimizer | CPU time, over the plain one | by the clock | samples/s of one process |"]
    lines.append("|---:|---|---|---:|---:|---:|")
    alone = {row["optimizer"]: median(row["s"]) for row in found["times"] if (row["ranks"], row["way"]) == (1, "DDP")}
    for row in found["times"]:
        cells = ["one process" if (row["ranks"], row["way"]) == (1, "DDP") else row["way"], row["optimizer"]]
        cells += [_over(row["cpu_s"], row["plain_cpu_s"]), _over(row["s"], row["plain_s"])]
        cells.append(f"{row['ranks'] * alone[row['optimizer']] / median(row['s']):.2f}")
        lines.append(f"| {row['ranks']} | " + " | ".join(cells) + " |")
    return lines


def _over(seconds: list[float], plain: list[float]) -> str:
    """The median of the ratios of rounds, with the least and the largest."""
    ratios = sorted(a / b for a, b in zip(seconds, plain, strict=True))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def gpu_table(found: dict[str, Any]) -> list[str]:
    """Nothing where no GPU was counted."""
    if not found:
        return []
    where = f"On one {found['device']} (torch {found['torch']})"
    lines = [
        f"{where}, a later step with whole parameters and with FSDP2 and NCCL in one process. Copies are those by the"
    ]
    lines += ['driver (memcpy, memset), "more" is the memory that a step takes besides its tensors and gives back.', ""]
    lines.append(
        "| network | m | H | way | optimizer | kernels | copies | sent, bytes | weights, gradients, state | more |"
    )
    lines.append("|---|---:|---:|---|---|---:|---:|---|---|---:|")
    for row in found["counts"]:
        cells = [row["network"], f"{row['m']:,}", *(row[key] for key in "H way optimizer kernels copies".split())]
        cells.append(f"{_said(row['sent'])}, {row['sent_bytes']:,}" if row["sent"] else "nothing")
        cells.append(", ".join(f"{row[f'{key}_bytes']:,}" for key in ("weights", "gradients", "state")))
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['spare_bytes']:,}"])) + " |")
    return lines


def page(text: str, results: Path) -> str:
    """The page with its tables written anew."""
    found, gpu = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for file in (results / "ranks.json", results / "ranks-gpu.json")
    )
    for name, lines in (("counts", counts_table(found)), ("times", times_table(found)), ("gpu", gpu_table(gpu))):
        block = "\n".join([f"<!-- ranks: {name} -->", *lines, "<!-- end -->"])
        text = re.sub(rf"<!-- ranks: {name} -->\n.*?<!-- end -->", lambda _, b=block: b, text, flags=re.DOTALL)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and write the record there")
    parser.add_argument("--gpu", type=Path, help="count on a GPU, and write the record there")
    parser.add_argument("--table", type=Path, help="write the tables of this page from the records in results")
    args = parser.parse_args()
    if args.out:
        args.out.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    if args.gpu:
        args.gpu.write_text(json.dumps(gpu_record(), indent=1) + "\n", encoding="utf-8")
    if args.table:
        results = Path(__file__).parents[1] / "results"
        args.table.write_text(page(args.table.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
