"""Is there a network with a wrong unit? Analyzes random programs on one batch and rescales them on another.

    python benchmarks/programs.py --count 5000 --out results/programs.json       # about 5 minutes

Programs are those of `tests/grammar.py`, one for each seed; `check` of `tests/test_random_networks.py` says what must
hold. The record has the counts, and the seed and the error of every program that failed.
"""

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from grammar import program
from test_random_networks import check


def measure(seeds: range) -> dict[str, Any]:
    """How many programs there are of each kind, and which have failed."""
    counts: Counter[str] = Counter()
    failed, units = [], 0
    start = time.process_time()
    for seed in seeds:
        drawn = program(Random(seed))
        counts.update([f"{len(drawn.shape)} dimensions", f"residual={drawn.residual}"])
        try:
            found, noisy = check(drawn)
        except Exception as error:  # noqa: BLE001 - it is recorded
            failed.append({"seed": seed, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        units += found.H
        counts["with units"] += found.H > 0
        counts["with absorbed units"] += found.H_absorbed > 0
        counts["with absorbed units that rounding at ε = 1e-30 hides: not compared"] += noisy
        counts["with coefficients other than one"] += bool(found.forms)
    return {
        "command": "python benchmarks/programs.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seeds": [seeds.start, seeds.stop],
        "n": len(seeds),
        "failed": failed,
        "units": units,
        "counts": dict(sorted(counts.items())),
        "seconds": round(time.process_time() - start, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="programs, one for each seed from 0")
    parser.add_argument("--out", type=Path, help="where the record goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    record = measure(range(args.count))
    text = json.dumps(record, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text)
    print(text, end="")
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
