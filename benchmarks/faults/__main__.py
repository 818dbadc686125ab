"""What is lost, and what is said, when files fail, processes die and bytes change?

    gspace bench faults --out results/faults.json        # three quarters of an hour; see --loops

Three loops, through the command line: ENOSPC, EIO and SIGKILL before, inside and behind every file operation of a run;
random faults over one long run; damage to every kind of file that is read. The record has what was tried, and held.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "src")]
from benchmarks.faults.attempt import preloaded  # noqa: E402

LOOPS = ("operations", "long", "damage")


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    import torch

    import gspace
    from benchmarks.faults import loops
    from gspace.lab.cli import COMMANDS
    from gspace.lab.record import commit

    torch.set_num_threads(1)
    for name in ("mappings", "report", "train"):  # so that children need not
        importlib.import_module(COMMANDS[name][1])
    importlib.import_module("sklearn.datasets").load_digits()

    record: dict[str, Any] = {
        "command": "gspace bench faults",
        "gspace": gspace.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "loops": {},
    }
    run = {
        "operations": lambda: loops.every_operation(work, step=args.step),
        "long": lambda: loops.long_run(work, args.faults),
        "damage": lambda: loops.damage(list(loops.files(work)), args.damages),
    }
    for name in args.loops:
        start = time.monotonic()
        at = {"commit": commit()}
        record["loops"][name] = {**run[name]().record(), "seconds": round(time.monotonic() - start), **at}
    return record


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=lambda text: text.split(","), default=LOOPS, help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--step", type=int, default=1, help="a fault at every operation, or at each of so many")
    parser.add_argument("--faults", type=int, default=2000, help="in the long run")
    parser.add_argument("--damages", type=int, default=500, help="of files")
    parser.add_argument("--out", type=Path, help="where the record goes; loops that others have written stay in it")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gspace-faults-") as folder:
        work = Path(folder)
        environment = preloaded(work)
        if environment is not None:  # the library must be there before Python is
            command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
            return os.spawnve(os.P_WAIT, sys.executable, command, environment)
        record = measure(args, work)
    if args.out is not None and args.out.exists():  # as it is now: other loops may have run beside these
        record["loops"] = {**json.loads(args.out.read_text())["loops"], **record["loops"]}
    text = json.dumps(record, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text)
    print(text, end="")
    return 1 if any(loop["failed"] for loop in record["loops"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
