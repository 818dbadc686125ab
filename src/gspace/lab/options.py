"""Command-line options that several commands share; those of a recipe are generated from its fields."""

import argparse
from pathlib import Path

from gspace.lab.engine import Engine


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How to compute."""
    group = parser.add_argument_group("how to compute")
    group.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)"
    )
    group.add_argument(
        "--minutes", type=_positive, help="stop after this time, with a checkpoint; run again to continue"
    )
    group.add_argument("--stack", type=int, default=16, help="most MLPs to train at once (default: 16)")
    group.add_argument(
        "--checkpoint-seconds", metavar="S", type=_positive, default=60.0, help="between checkpoints (default: 60)"
    )
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    group.add_argument("--graph", action=argparse.BooleanOptionalAction, help="CUDA graph (default: on a GPU)")
    group.add_argument("--deterministic", action="store_true", help="same bits each time on a GPU, at some cost")
    group.add_argument("--tensorboard", action="store_true", help="write the curves for TensorBoard too")


def add_data(parser: argparse.ArgumentParser) -> None:
    """Where data sets are."""
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of data sets (default: $GSPACE_DATA)")
    parser.add_argument("--download", action="store_true", help="download data sets that are absent")


def engine(args: argparse.Namespace) -> Engine:
    return Engine(
        device=args.device,
        compile=args.compile,
        graph=args.graph,
        deterministic=args.deterministic,
        checkpoint_seconds=args.checkpoint_seconds,
        tensorboard=args.tensorboard,
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
