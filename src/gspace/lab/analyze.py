"""`gspace analyze SPEC`: the rescaling symmetry of a model, and with --verify a check that it is exact.

The check rescales a float64 copy by factors e^N(0,1) and compares its outputs.

A SPEC names a model: `package.module:callable(arguments)` or `path/to/model.py:callable(arguments)`. The arguments are
Python literals and are read as such, never evaluated: `"model.py:build(width=32, depth=(2, 2))"`.
`hf:LlamaConfig(hidden_size=64)` is the model of a Hugging Face config with random weights, and so is a folder that
holds a config.json; nothing is downloaded. It is the config's first architecture, else the language model, for an
encoder and decoder with both.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import gspace
from gspace.analysis.examples import guesses, redrawn
from gspace.analysis.forward import Inputs, arguments, tensors_in, untouched
from gspace.lab.cli import argument
from gspace.lab.display import steps
from gspace.lab.errors import RequestError, reason

FORM = (
    "package.module:callable or path/to/model.py:callable, with literal arguments, as in model.py:build(width=32), "
    "or hf:LlamaConfig(hidden_size=64), or a folder with a config.json"
)

# The shortest source that leaves a name behind the colon: 'C:\\nets\\model.py:build("a:b")' splits before 'build'.
_SPEC = re.compile(r"(?P<source>.+?):(?P<name>[^\W\d][\w.]*)(?P<call>\(.*\))?", re.DOTALL)

# Rounding of float64 (1e-16) grows with depth and with the spread of the factors; a wrong unit moves the output by
# more than 1e-3. In between, at 1e-9, lies the line.
TOLERANCE = 1e-9
MODES = ("eval", "train")  # in this order: a pass in training mode moves the running statistics


class Shape(NamedTuple):
    """What an input is like."""

    sizes: tuple[int, ...]  # batch first
    below: int = 0  # integers from 0 to this one, exclusive, as an embedding takes them; 0: normal numbers


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    told = "rescale a float64 copy by random factors e^N(0,1) and report how far the output moves"
    parser.add_argument("--verify", action="store_true", help=told)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model and what of it is pinned."""
    parser.add_argument("spec", metavar="SPEC", help=f"{FORM}; it is imported and executed")
    told = "shape of an input, batch first, once per input (default: guessed); 2,16:1000 are integers below 1000"
    parser.add_argument("--input-shape", metavar="N,C,H,W", type=_shape, action="append", default=[], help=told)
    ties = "what an addition does to its operands: tie their scales, or pin them (the paper's choice) (default: tie)"
    parser.add_argument("--residual", choices=("pin", "tie"), default="tie", help=ties)
    parser.add_argument("--pin", metavar="NAME", action="append", default=[], help="a module whose units to pin")
    parser.add_argument("--seed", type=seed, default=0, help="of the model, the inputs and the factors (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if the verification failed, else 0."""
    changes: dict[str, float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints
        model, analysis, inputs, generator = analyzed(args)
        if args.verify:
            with steps(1) as begin:
                begin("compare it with its rescaled copy")
                changes = largest_changes(model, analysis, redrawn(inputs or guess(model), generator), generator)
    exact = all(change <= TOLERANCE for change in changes.values())
    if args.json:
        verified = {"verify": {**changes, "tolerance": TOLERANCE, "exact": exact}} if args.verify else {}
        print(json.dumps({"spec": args.spec, **analysis.to_dict(), **verified}, indent=2))
        return 0 if exact else 1
    print(analysis)
    if args.verify:
        verdict = "verified" if exact else f"NOT a symmetry (tolerance {TOLERANCE:.0e}), please report this model"
        found = ", ".join(f"{change:.1e} ({mode})" for mode, change in changes.items())
        largest = f"largest relative change of the output in float64: {found}"
        print(f"{verdict}: {analysis.H} units scaled by e^N(0,1); {largest}")
    return 0 if exact else 1


def analyzed(args: argparse.Namespace) -> tuple[nn.Module, gspace.Analysis, tuple[Tensor, ...], torch.Generator]:
    """The model of the command line, its analysis, its inputs if shapes were given, and the seed's generator."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    spec, needed = parse_spec(args.spec), bool(getattr(args, "verify", None) or getattr(args, "check", None))

    def found(values: bool) -> tuple[nn.Module, gspace.Analysis, tuple[Tensor, ...], torch.Generator]:
        begin(f"build {args.spec}")
        model = load_model(spec, values=values)
        inputs = random_inputs(model, args.input_shape, generator)
        begin(f"analyze {type(model).__name__}")
        try:
            analysis = gspace.analyze(model, inputs or None, residual=args.residual, pin=tuple(args.pin))
        except gspace.TraceError as error:
            if "example_input" not in str(error):
                raise
            more = f"On the command line, --input-shape gives one, once per input of {type(model).__name__}.forward"
            more += ", in order; inputs by name need Python: example_input={name: tensor}"
            raise gspace.TraceError(f"{str(error).rstrip('.')}. {more}") from error
        return model, analysis, inputs, generator

    with steps(2) as begin:
        if spec.is_config and not needed:
            with contextlib.suppress(gspace.TraceError):  # the model may read values
                return found(values=False)
        return found(values=True)


def largest_changes(
    model: nn.Module, analysis: gspace.Analysis, inputs: Inputs, generator: torch.Generator
) -> dict[str, float]:
    """max |f(x; g_c(w)) − f(x; w)| / max |f(x; w)| over all outputs, in evaluation and in training mode.

    Both runs of a mode start from the same random state, so dropout draws the same mask. The model is left untouched.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RequestError(
            "a model on the meta device has no values to verify: build it on the CPU or leave --verify out"
        )
    original = deepcopy(model).double()
    scales = gspace.random_scales(original, generator, analysis=analysis)
    rescaled = gspace.rescale_(deepcopy(original), scales, analysis=analysis)
    inputs = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
    changes = {}
    for mode in MODES:
        before = _outputs(original, inputs, mode)
        changes[mode] = _relative_change(before, _outputs(rescaled, inputs, mode), mode)
    return changes


def guess(model: nn.Module) -> Inputs:
    """The first guess of an input that the model accepts."""
    with untouched(model):
        for example in guesses(model):
            args, kwargs = arguments(example)
            with contextlib.suppress(Exception):  # the forward pass is the user's and may raise anything
                model(*args, **kwargs)
                return example
    raise RequestError("cannot guess an input of the model: give --input-shape, for example 2,3,32,32")


def random_inputs(model: nn.Module, shapes: Sequence[Shape], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Inputs of the given shapes on the device of the model, integers where asked for, else in its dtype.

    The one input of a model that begins with an embedding is integers, whether asked for or not.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if len(shapes) == 1 and isinstance(first, nn.Embedding):
        shapes = [shapes[0]._replace(below=shapes[0].below or first.num_embeddings)]
    return tuple(
        torch.randint(below, sizes, generator=generator).to(like.device)
        if below
        else torch.randn(sizes, generator=generator).to(like)
        for sizes, below in shapes
    )


def _outputs(model: nn.Module, inputs: Inputs, mode: str) -> list[Tensor]:
    model.train(mode == "train")
    args, kwargs = arguments(inputs)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        try:
            return [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point() and t.numel()]
        except Exception as error:  # the forward pass is the user's and may raise anything
            shapes = " ".join(",".join(map(str, x.shape)) for x in tree_leaves(inputs) if isinstance(x, Tensor))
            raise RequestError(
                f"the model does not accept an input of shape {shapes} in {mode} mode, give a fitting --input-shape: "
                f"{reason(error, named=True)}"
            ) from error


def _relative_change(before: list[Tensor], after: list[Tensor], mode: str) -> float:
    wrong = {
        "output of the model holds no floating-point number": not before,
        "shape of the output depends on the values": [y.shape for y in before] != [y.shape for y in after],
        "output of the model is not finite": not all(bool(y.isfinite().all()) for y in before),
    }
    for what, so in wrong.items():
        if so:
            raise RequestError(f"the {what} in {mode} mode: nothing to compare")
    return max(map(_relative, before, after))


def _relative(before: Tensor, after: Tensor) -> float:
    size, change = float(before.abs().max()), float((after - before).abs().max())
    if not math.isfinite(change):
        return math.inf
    return change / size if size else (math.inf if change else 0.0)


def _read_shape(text: str) -> Shape:
    sizes, colon, below = text.partition(":")
    return Shape(tuple(map(int, sizes.split(","))), int(below) or -1 if colon else 0)


_shape = argument(
    _read_shape,
    lambda shape: min(shape.sizes) >= 1 and shape.below >= 0,
    "shape: write positive sizes as in 2,3,32,32, or 2,16:1000 for integers below 1000",
)
seed = argument(int, lambda value: 0 <= value < 2**63, "seed: write an integer from 0 to 2^63 - 1")


# From a SPEC to a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """Where a model comes from."""

    source: str  # a module's dotted name, or the path of a Python file
    name: str  # the attribute to call, dotted if nested; a ready `nn.Module` is taken as it is
    args: tuple[Any, ...] | None = None  # None if the SPEC has no parentheses
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_config(self) -> bool:
        return self.source == "hf" or self.name == "config.json"


def parse_spec(text: str) -> Spec:
    """The parts of a SPEC.

    >>> parse_spec("nets/model.py:build(3, width=32)")
    Spec(source='nets/model.py', name='build', args=(3,), kwargs={'width': 32})
    """
    if os.path.isfile(os.path.join(os.path.expanduser(text.strip()), "config.json")):  # False for what is no path
        return Spec(text.strip(), "config.json")
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"SPEC {text!r} is not of the form {FORM}")
    return Spec(match["source"], match["name"], *(_literals(match["call"]) if match["call"] else ()))


def load_model(spec: Spec, *, values: bool = True) -> nn.Module:
    """Imports `spec.source` and builds the model; that of a config on the meta device if its values are not needed.

    What the imported code prints goes to stderr, so that the standard output holds the report alone.
    """
    where = f"{spec.source}:{spec.name}"
    with contextlib.redirect_stdout(sys.stderr):
        if spec.is_config:
            with contextlib.nullcontext() if values else torch.device("meta"):
                return _from_config(spec)
        factory: Any = _import(spec.source)
        for part in spec.name.split("."):
            if not hasattr(factory, part):
                near = difflib.get_close_matches(part, dir(factory), 1)
                hint = f": did you mean {near[0]!r}?" if near else ""
                raise RequestError(f"{spec.source!r} has no {spec.name!r}{hint}")
            factory = getattr(factory, part)
        if isinstance(factory, nn.Module) and spec.args is None:
            return factory
        if isinstance(factory, nn.Module) or not callable(factory):
            raise RequestError(f"{where} builds no model: it is of type {type(factory).__name__}")
        try:
            model = factory(*(spec.args or ()), **spec.kwargs)
        except (Exception, SystemExit) as error:  # the factory is the user's and may raise anything
            raise RequestError(f"{where} failed: {reason(error, named=True)}") from error
    if not isinstance(model, nn.Module):
        raise RequestError(f"{where} gives no torch.nn.Module, but an object of type {type(model).__name__}")
    return model


def _from_config(spec: Spec) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise RequestError("Hugging Face models need the package transformers: pip install transformers") from error
    try:
        if spec.name == "config.json":
            config = transformers.AutoConfig.from_pretrained(str(Path(spec.source).expanduser()), local_files_only=True)
        else:
            config = getattr(transformers, spec.name)(*(spec.args or ()), **spec.kwargs)
        known = [getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)]
        if known:
            return known[0](config)
        kinds = ("Seq2SeqLM", "SpeechSeq2Seq") if getattr(config, "is_encoder_decoder", False) else ("CausalLM",)
        autos = [getattr(transformers, f"AutoModelFor{kind}") for kind in kinds]
        auto = next((auto for auto in autos if type(config) in auto._model_mapping), transformers.AutoModel)
        return auto.from_config(config)
    except Exception as error:  # what transformers makes of a config may raise anything
        first: BaseException = error
        while first.__cause__ is not None:  # transformers wraps what an import of it needs
            first = first.__cause__
        raise RequestError(f"{spec.source}:{spec.name} failed: {reason(first, named=True)}") from error


def _literals(call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        node = ast.parse(f"_{call}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise SyntaxError("more than one pair of parentheses")
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(kwargs) < len(node.keywords):
            raise SyntaxError("** is not a literal")
        return tuple(map(ast.literal_eval, node.args)), kwargs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        only = "only literals are allowed (numbers, strings, ...)"
        why = error.msg if isinstance(error, SyntaxError) else only
        raise RequestError(f"cannot read the arguments {' '.join(call.split())}: {why}") from error


def _import(source: str) -> ModuleType:
    """The module `source` names. A file's folder, or the current one, can be imported from, as in `python FILE`."""
    is_file = source.endswith(".py") or "/" in source or "\\" in source
    path = Path(source).expanduser()
    if is_file and not (path.is_file() and path.suffix == ".py"):
        raise RequestError(f"cannot import {source!r}: no such Python file")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _execute(path) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # the code is the user's and may raise anything
        why = str(error) if isinstance(error, ModuleNotFoundError) else reason(error, named=True)
        raise RequestError(f"cannot import {source!r}: {why}") from error


def _execute(path: Path) -> ModuleType:
    # Under a name of its own: a user's `json.py` must not replace the standard library's in sys.modules.
    found = importlib.util.spec_from_file_location(f"gspace_spec_{path.stem}", path)
    assert found is not None and found.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
