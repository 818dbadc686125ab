"""A model named on the command line: `package.module:callable(arguments)` or `path/to/model.py:callable(arguments)`.

The arguments are Python literals and are read as such, never evaluated: `"model.py:build(width=32, depth=(2, 2))"`.
`hf:LlamaConfig(hidden_size=64)` is the model of a Hugging Face config with random weights, and so is a folder that
holds a config.json; nothing is downloaded.
"""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gspace.lab.errors import RequestError, named

FORM = (
    "package.module:callable or path/to/model.py:callable, with literal arguments, as in model.py:build(width=32), "
    "or hf:LlamaConfig(hidden_size=64), or a folder with a config.json"
)

# The shortest source that leaves a name behind the colon: 'C:\\nets\\model.py:build("a:b")' splits before 'build'.
_SPEC = re.compile(r"(?P<source>.+?):(?P<name>[^\W\d][\w.]*)(?P<call>\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """Where a model comes from.

    Attributes:
        source: A module's dotted name, or the path of a Python file.
        name: The attribute to call, dotted if nested. A ready `nn.Module` is taken as it is.
        args: Positional arguments; None if the SPEC has no parentheses.
        kwargs: Keyword arguments.
    """

    source: str
    name: str
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


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


def load_model(spec: Spec) -> nn.Module:
    """Imports `spec.source` and builds the model.

    What the imported code prints goes to stderr, so that the standard output holds the report alone.
    """
    where = f"{spec.source}:{spec.name}"
    with contextlib.redirect_stdout(sys.stderr):
        if spec.source == "hf" or spec.name == "config.json":
            return _from_config(spec)
        factory: Any = _import(spec.source)
        for part in spec.name.split("."):
            if not hasattr(factory, part):
                raise RequestError(f"{spec.source!r} has no {spec.name!r}")
            factory = getattr(factory, part)
        if isinstance(factory, nn.Module) and spec.args is None:
            return factory
        if isinstance(factory, nn.Module) or not callable(factory):
            raise RequestError(f"{where} is a {type(factory).__name__} and builds no model")
        try:
            model = factory(*(spec.args or ()), **spec.kwargs)
        except (Exception, SystemExit) as error:  # the factory is the user's and may raise anything
            raise RequestError(f"{where} failed: {named(error)}") from error
    if not isinstance(model, nn.Module):
        raise RequestError(f"{where} gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_config(spec: Spec) -> nn.Module:
    """A Hugging Face model with random weights."""
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
        causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        return auto.from_config(config)
    except Exception as error:  # what transformers makes of a config may raise anything
        raise RequestError(f"{spec.source}:{spec.name} failed: {named(error)}") from error


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
        why = str(error) if isinstance(error, ModuleNotFoundError) else named(error)
        raise RequestError(f"cannot import {source!r}: {why}") from error


def _execute(path: Path) -> ModuleType:
    # Under a name of its own: a user's `json.py` must not replace the standard library's in sys.modules.
    found = importlib.util.spec_from_file_location(f"gspace_spec_{path.stem}", path)
    assert found is not None and found.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
