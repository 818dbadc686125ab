"""`gspace tour`: the symmetry of small built-in networks, each verified by a random rescaling."""

import argparse
import shlex

from gspace.lab import analyze

TOUR = (
    ("gspace.lab.examples:mlp",),
    ("gspace.lab.examples:lenet",),
    ("gspace.lab.examples:plain(width=16, depth=4)",),
    ("gspace.lab.examples:residual(width=16)",),
    ("gspace.lab.examples:residual(width=16)", "--residual", "tie"),
    ("gspace.lab.examples:gated",),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=analyze.seed, default=0, help="passed on to every `gspace analyze` (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Runs `gspace analyze --verify` on each network of the tour; 1 if any verification failed."""
    parser = argparse.ArgumentParser(prog="gspace analyze")
    analyze.configure(parser)
    parser.set_defaults(debug=args.debug)
    results = []
    for row in TOUR:
        line = [*row, "--verify", *(("--seed", str(args.seed)) if args.seed else ())]
        print(f"$ gspace analyze {shlex.join(line)}")
        results.append(analyze.run(parser.parse_args(line)))
        print()
    print(f"{results.count(0)} of {len(results)} networks keep their function under a random rescaling")
    return max(results)
