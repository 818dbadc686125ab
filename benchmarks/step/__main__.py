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
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.step.kernels import kernels, tiles
from benchmarks.step.networks import NETWORKS, OPTIMIZERS
from benchmarks.step.pages import draw, page, read, show, write
from benchmarks.step.sections import Setting, depths, iterations, steps, widths
from benchmarks.step.timing import CUDA, Time

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
