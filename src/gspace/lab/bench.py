"""`gspace bench [NAME ...]`: the benchmarks of the source tree, listed, or one of them run with its own options."""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

import gspace
from gspace.lab.errors import RequestError
from gspace.lab.recipe import check_name

FOLDER = Path(gspace.__file__).resolve().parents[2] / "benchmarks"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a benchmark; without it, they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="passed on to the benchmark, for example --help")


def run(args: argparse.Namespace) -> int:
    there = benchmarks(FOLDER)
    if not there:
        raise RequestError(f"no benchmarks in {FOLDER}: they come with the source, not with the installed package")
    if args.name is None:
        print("\n".join(f"{name:16}{what}" for name, what in there.items()))
        return 0
    name = check_name("benchmark", args.name, there)
    places = (str(FOLDER.parent), str(Path(gspace.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", f"{FOLDER.name}.{name}", *args.options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def benchmarks(folder: Path) -> dict[str, str]:
    """Name and first line of what each says of itself: a file, or a folder with a `__main__.py`."""
    found = {}
    for path in (*folder.glob("*.py"), *folder.glob("*/__main__.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if said:
            found[path.parent.name if path.stem == "__main__" else path.stem] = said.splitlines()[0]
    return dict(sorted(found.items()))
