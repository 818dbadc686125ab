"""The command `gspace`: a table of subcommands, and one line on stderr for whatever goes wrong.

Exit codes: 0 done; 1 the work was done and failed (a verification, say); 2 the request cannot be served; others as in
`errors.py`.
"""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

import gspace
from gspace.lab.errors import LabError, RequestError, reason

T = TypeVar("T")

# A command's line of help, and its module with `configure(parser)` and `run(args) -> exit code`. That is imported when
# the command is called, not before: `gspace analyze` needs torch alone, others may need the `lab` extra.
COMMANDS = {
    "demo": ("train small networks on bundled digits, in a minute", "gspace.lab.demo"),
    "analyze": ("find the rescaling symmetry of a model", "gspace.lab.analyze"),
    "mappings": ("find or check the mappings of a quantizer", "gspace.lab.mappings"),
    "train": ("train one recipe, or a list of them", "gspace.lab.sweep"),
    "reproduce": ("run a table or figure of the paper", "gspace.lab.reproduce"),
    "report": ("tables, figures and a page from recorded runs", "gspace.lab.report"),
    "bench": ("run a benchmark of the source tree", "gspace.lab.bench"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gspace: error: {message} (see {self.prog} --help)\n")


def argument(read: Callable[[str], T], fits: Callable[[T], bool], what: str) -> Callable[[str], T]:
    """The type of an option: its text as `read` reads it, refused if that raises or the value does not fit."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            value = read(text)
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: runs the command named in `argv` and returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # λ where the encoding has none
    try:
        args, unknown = build_parser(argv[0] if argv else None).parse_known_args(argv)
        if unknown:
            args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except KeyboardInterrupt:
        print("gspace: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # the last resort: a line instead of a traceback
        if "--debug" in argv:
            raise
        # These carry a message written for the user; anything else is a surprise and needs its type.
        written = isinstance(error, LabError | ValueError)
        message = reason(error) if written else f"{reason(error, named=True)} (--debug shows where)"
        print(f"gspace: error: {message}", file=sys.stderr)
        return error.exit_code if isinstance(error, LabError) else 2


def build_parser(chosen: str | None) -> Parser:
    """The parser of all commands, with the options of the chosen one."""
    parser = Parser(prog="gspace", description="Find, use and train modulo the rescaling symmetry of PyTorch models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {gspace.__version__}")
    parser.set_defaults(refuse=parser.error)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (text, place) in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == chosen:
            try:
                module = importlib.import_module(place)
            except ModuleNotFoundError as error:
                raise RequestError(f"'gspace {name}' needs {error.name}: pip install 'gspace[lab]'") from error
            module.configure(subparser)
            subparser.set_defaults(run=module.run, refuse=subparser.error)
    return parser
