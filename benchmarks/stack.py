"""What does stacking save? Five seeds of the paper's MLPs on Fashion-MNIST, trained one by one and as one stack.

    python benchmarks/stack.py                              # measures, about 15 minutes; needs Fashion-MNIST
    python benchmarks/stack.py --table docs/stack.md        # writes the page from that record

One epoch of each network of Tab. 6, [49:h:h:10], by SGD and by G-SGD, with the lab's recipes and training loop.
The clock runs around the calls of `train` and of `train_many`: building, training, testing once, writing the run
folders; the data set is in memory before. Both are measured in one process, in turns, the first of each pair by turns.
The machine should have nothing else to do: by default OpenMP's idle threads spin, and one more process slows small
networks several times over. With OMP_WAIT_POLICY=passive they sleep: that helps then, and is threefold slower here.

A stack sums products in another order, and training magnifies rounding. So the losses are compared three times:
    float32: alone against stacked;
    threads: alone against alone on one thread, which only rounds differently;
    float64: alone against stacked, where rounding is too small to matter. This is the test of equality.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gspace.lab.cells import Method, seeds
from gspace.lab.experiments import FASHION, G_SGD, SGD
from gspace.lab.learners import largest_stack
from gspace.lab.recipe import Recipe
from gspace.lab.record import Json, environment
from gspace.lab.train import train, train_many

SEEDS = 5
WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
METHODS = (SGD, G_SGD)
EPOCH = FASHION.but(epochs=1.0, eval_every=60_000 // 64)  # tested after each epoch, as in a run of 100
TEST_IMAGES = 10_000

Train = Callable[[Sequence[Recipe], Path], list[Json]]


def alone(recipes: Sequence[Recipe], out: Path) -> list[Json]:
    return [train(recipe, out) for recipe in recipes]


def stacked(recipes: Sequence[Recipe], out: Path) -> list[Json]:
    return train_many(recipes, out)


def timed(way: Train, recipes: Sequence[Recipe]) -> tuple[float, list[Json]]:
    """Seconds of the call, and the summaries of the runs."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = way(recipes, Path(folder))
        return time.perf_counter() - start, found


def difference(a: Sequence[Json], b: Sequence[Json]) -> Json:
    """Largest over the seeds: relative, of the loss on all training images at the end; in images, of the test error."""
    loss = max(abs(x["fit_loss"] / y["fit_loss"] - 1) for x, y in zip(a, b, strict=True))
    epoch = max(abs(x["train_loss"] / y["train_loss"] - 1) for x, y in zip(a, b, strict=True))
    images = max(round(TEST_IMAGES * abs(x["test_error"] - y["test_error"])) for x, y in zip(a, b, strict=True))
    return {"seeds": len(a), "final_loss": loss, "mean_loss_of_epoch": epoch, "test_images": images}


def compare(h: int, method: Method, repeats: int, checked: int) -> Json:
    """One row: `repeats` pairs of timings on all seeds; the other checks on the first `checked` seeds."""
    recipes = seeds(method.on(EPOCH, hidden=(h, h)), SEEDS)
    for way in (alone, stacked):
        timed(way, [recipe.but(epochs=None, iterations=20, eval_every=20) for recipe in recipes])
    size = largest_stack(recipes[0], "cpu")
    seconds: dict[Train, list[float]] = {alone: [0.0] * repeats, stacked: [0.0] * repeats}
    found: dict[Train, list[Json]] = {}
    for repeat in range(repeats):
        found = {alone: [], stacked: []}
        for turn, first in enumerate(range(0, SEEDS, size), repeat):  # what makes one stack is measured in one go
            for way in (alone, stacked) if turn % 2 == 0 else (stacked, alone):
                spent, lines = timed(way, recipes[first : first + size])
                seconds[way][repeat] += spent
                found[way] += lines

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, one_thread = timed(alone, recipes[:checked])
    torch.set_num_threads(threads)
    double = [recipe.but(precision="float64") for recipe in recipes[:checked]]
    exact = [timed(way, double)[1] for way in (alone, stacked)]
    return {
        "h": h,
        "method": method.label,
        "repeats": repeats,
        "stack": found[stacked][0]["stacked"],
        "alone_s": seconds[alone],
        "stacked_s": seconds[stacked],
        "ratio": [a / b for a, b in zip(seconds[alone], seconds[stacked], strict=True)],
        "test_error": {way.__name__: [line["test_error"] for line in found[way]] for way in (alone, stacked)},
        "final_loss": {way.__name__: [line["fit_loss"] for line in found[way]] for way in (alone, stacked)},
        "difference": {
            "float32": difference(found[alone], found[stacked]),
            "threads": difference(found[alone][:checked], one_thread),
            "float64": difference(*exact),
        },
    }


HEADER = (
    "| h | method | alone, s | stacked, s | times faster (range) | pairs | in a stack | float64 | float32 | threads |\n"
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def row(line: Json) -> str:
    ratio, differences = line["ratio"], line["difference"]
    faster = f"{median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})"
    losses = [f"{differences[name]['final_loss']:.0e}" for name in ("float64", "float32", "threads")]
    times = [f"{median(line[name]):.2f}" for name in ("alone_s", "stacked_s")]
    cells = [line["h"], line["method"], *times, faster, line["repeats"], line["stack"], *losses]
    return f"| {' | '.join(map(str, cells))} |"


def page(record: dict[str, Any]) -> str:
    where = record["environment"]
    images = max(line["difference"]["float32"]["test_images"] for line in record["rows"])
    exact = max(line["difference"]["float64"]["test_images"] for line in record["rows"])
    lines = [
        "# Stacks: several MLPs trained as one",
        "",
        f"[49:h:h:10] on Fashion-MNIST, one epoch, n = {record['n']} seeds: one by one, and by `train_many`, which "
        f"stacks as many networks as the cache holds. Times are medians over the pairs (torch {where['torch']}, "
        f"{where['platform']}, {where['threads']} threads of a CPU). The last three columns compare the loss on all "
        "training images at the end: alone with stacked in float64 and in float32, and alone on two threads with alone "
        "on one. They have the largest relative difference over the seeds. "
        f"Test errors differ by {exact} images of 10,000 in float64, by at most {images} in float32.",
        "",
        "Alone and stacked are the same computation. In float64 they agree to rounding, mostly. In float32 they part "
        "by rounding that training magnifies, as two runs alone do on different numbers of threads. The wider the "
        "network, the more G-SGD without its guard does so.",
        "",
        "From h = 512 on, float64 and threads are compared on 1024/h seeds. At 1024 both sides train alone by the same "
        "code. Times there only say how far a ratio may be off.",
        "",
        "Generated by `python benchmarks/stack.py --table docs/stack.md` from `results/stack.json`.",
        "",
        HEADER,
        *map(row, record["rows"]),
    ]
    return "\n".join(lines) + "\n"


def measure(widths: Sequence[int], out: Path) -> None:
    """Measures these widths; rows of others that `out` has are kept."""
    rows = {(line["h"], line["method"]): line for line in json.loads(out.read_text())["rows"]} if out.exists() else {}
    here = environment(
        wait_policy=os.environ.get("OMP_WAIT_POLICY")
    )  # now: the record itself is a file of the checkout
    print(HEADER, flush=True)
    for h in widths:
        for method in METHODS:
            small = h <= 256
            repeats = 3 if small else 2
            rows[h, method.label] = compare(h, method, repeats, SEEDS if small else 1024 // h)
            ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], key[1] != SGD.label))]
            record = {
                "command": "python benchmarks/stack.py",
                "environment": here,
                "n": SEEDS,
                "rows": ordered,
            }
            out.write_text(json.dumps(record, indent=1) + "\n")
            print(row(rows[h, method.label]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/stack.json"), help="the record")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="measure these alone, keep the others")
    parser.add_argument("--table", type=Path, help="write this page from the record, train nothing")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(page(json.loads(options.out.read_text())))
    else:
        measure(options.widths, options.out)


if __name__ == "__main__":
    main()
