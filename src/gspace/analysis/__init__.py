"""model → analysis: every positive rescaling that leaves the function of a network unchanged (Sec. 3.1 of the paper).

`analyze` runs the model on an example batch, in training and in evaluation mode. Behind every storage lies a shadow of
scale nodes (`memory`), and every operation adds linear equations between their log-scales (`follow`, by the `rules` of
the table in `operations`), which are solved as they come (`equations`). Parameters are edges between nodes (`weights`).
What is free at the end is a unit (`assemble`; the `result`).
"""

import difflib
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gspace import sharding
from gspace.analysis.assemble import assemble
from gspace.analysis.examples import attempted, redrawn
from gspace.analysis.follow import Follow
from gspace.analysis.forward import HELD, Inputs, TraceError, untouched, unwrap
from gspace.analysis.operations import RULES
from gspace.analysis.result import Analysis, Edges, Form, Pin, Residual, Statistic, UnitGroup, magnitude
from gspace.devices import on_cpu

__all__ = [
    "Analysis", "Edges", "Form", "Inputs", "Pin", "Residual", "Statistic", "TraceError", "UnitGroup", "analyze",
    "analyzed", "magnitude", "require_module", "unwrap",
]  # fmt: skip

MODES = {"train": True, "eval": False}


def analyze(
    model: nn.Module,
    example_input: Inputs | None = None,
    *,
    residual: Residual = "tie",
    pin: Iterable[str] = (),
    modes: Iterable[str] = ("train", "eval"),
) -> Analysis:
    """Finds every positive rescaling of `model` that leaves its function unchanged.

    Args:
        model: Any module; wrappers (`DataParallel`, `torch.compile`) are looked through.
        example_input: A batch the model accepts (tensor, tuple of arguments or dict of them), or a list of several.
            Two rows are enough. Without one, what the model offers is tried (`dummy_inputs`), then guesses from its
            first layers.
        residual: "tie" gives what is added one scale, every exact symmetry; "pin" grounds both, the paper's choice.
        pin: Names of modules whose output units are pinned, or of parameters that must stay as they are.
        modes: In which the model is run.

    One run sees one run: weights that it did not use are listed as `unseen`. The model is left as it was.

    Raises:
        TraceError: The model cannot be run; the message says what to do.

    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    >>> analysis = analyze(net)
    >>> analysis.H, analysis.m, analysis.dim
    (8, 56, 48)
    """
    if residual not in ("pin", "tie"):
        raise ValueError(f"residual must be 'pin' or 'tie', got {residual!r}")
    listed = [modes] if isinstance(modes, str) else list(modes)
    if not listed or not set(listed) <= MODES.keys():
        raise ValueError(f"modes are 'train', 'eval' or both, got {modes!r}")
    require_module(model)
    if sharding.any_sharded(model):
        model = sharding.whole_copy(model)
    inner = unwrap(model)
    refuse(inner)
    names = _known(pin, inner)
    modules = {name: m for name, m in inner.named_modules(remove_duplicate=False) if name in names}
    ways = [MODES[mode] for mode in listed]

    def run(examples: list[Inputs]) -> Follow:
        """On every batch, whole: what the model does may depend on the number of rows."""
        follow = Follow(RULES, inner, residual, set(modules.values()))
        on_cpu(follow.enter)(names)
        for example in examples:
            follow.run(example, ways)
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(3):  # experts that no token went to; the model may not take other values
            with suppress(TraceError):
                if follow.misses_experts():
                    follow.run(redrawn(examples[0], generator), ways)
        on_cpu(follow.end)()
        return follow

    with untouched(inner), _seldom_collected():
        found = on_cpu(assemble)(attempted(run, inner, example_input), model, residual)
    inside = tuple(f"{name}." for name in modules)
    unseen = {name: n for name, n in found.unseen.items() if not _bare(name).startswith(inside)}
    return replace(found, unseen=unseen, modules=modules_of(inner))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Puts full garbage collections off: what an analysis makes it keeps, and each of them would look at all of it."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def analyzed(
    model: nn.Module, analysis: Analysis | None, options: Mapping[str, Any], residual: Residual = "tie"
) -> Analysis:
    """What the caller has, or what `analyze(model, **options)` finds; both at once would contradict each other.

    `residual` is the caller's default: "pin" for what stands for the paper.
    """
    if analysis is None:
        return analyze(model, **{"residual": residual, **options})
    if not isinstance(analysis, Analysis):
        raise TypeError(f"analysis is what gspace.analyze returns, got {type(analysis).__name__}")
    if options:
        raise ValueError(f"pass either analysis= or {', '.join(options)}=, not both")
    require_module(model)
    parameters, whole = dict(model.named_parameters()), not sharding.any_sharded(model)
    for e in analysis.edges:
        if e.name not in parameters or not e.fits(parameters[e.name]):
            raise ValueError(
                f"the analysis is of another model: this one has no parameter {e.name!r} of that size "
                "(a wrapped model is another one: analyze what you pass here)"
            )
        if whole and e.lies_apart(parameters[e.name]):
            raise ValueError(f"the entries of {e.name!r} are not in order in memory: analyze the model again")
    now = modules_of(unwrap(model)) if analysis.modules else {}
    for name in {**analysis.modules, **now}:
        if analysis.modules.get(name) != now.get(name):
            where = f"its module {name!r}" if name else f"the {type(unwrap(model)).__name__} itself"
            raise ValueError(
                f"the analysis is of another model, or of this one before it was changed: {where} has another forward "
                "or other settings. Analyze it again"
            )
    return analysis


def modules_of(model: nn.Module) -> dict[str, str]:
    """Each module by its name, in order, as a text that a copy shares: equal parameters may be wired otherwise.

    It has the class, and the strings and functions among the attributes, which say how parts are used. Numbers and
    flags are left out (an ε, a dropout rate, a counter, gradient checkpointing may change).
    """
    found = {}
    for name, m in model.named_modules(remove_duplicate=False):
        own = {} if isinstance(m, torch.jit.ScriptModule) else vars(m)  # that of a copy has others
        told = {key: _said(v) for key, v in own.items() if key not in HELD and "checkpoint" not in key}
        known = {key: v for key, v in told.items() if v}
        found[name] = f"{sharding.class_of(m).__module__}.{sharding.class_of(m).__qualname__} {known}"
    return found


def _said(value: Any) -> Any:
    """A string, strings or the name of a function; None for everything else."""
    if isinstance(value, tuple | list):
        return value if all(isinstance(part, str) for part in value) else None
    if isinstance(value, str):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else None


def require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def refuse(model: nn.Module) -> None:
    """What cannot be run or followed at all."""
    require_module(model)
    sharding.refuse_flat(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise TraceError(
                f"parameter {name!r} has no shape yet (lazy module): run one batch through the model first"
            )
        if p.layout != torch.strided or p.is_quantized:
            raise TraceError(f"parameter {name!r} is sparse or quantized: analyze the dense model it was made from")
    for name, m in model.named_modules():
        if type(m).__module__.startswith("torch.") and ".quantized." in type(m).__module__:
            raise TraceError(f"module {name!r} is quantized: analyze the dense model it was made from")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("a TorchScript module cannot be followed: pass the module that it was made from")
    if getattr(type(model), "forward", None) is nn.Module.forward and "forward" not in vars(model):
        raise TraceError(f"{type(model).__name__} has no forward: pass the module that calls it")


def _known(pin: Iterable[str], model: nn.Module) -> set[str]:
    listed = list(pin) if isinstance(pin, Iterable) and not isinstance(pin, str) else [pin]
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"pin takes names of modules, got {listed!r}")
    names = {_bare(name) for name in listed}
    there = [name for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters())]
    for name in names.difference(there):
        close = difflib.get_close_matches(name, there)
        raise ValueError(f"pin: the model has no module {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return names


def _bare(name: str) -> str:
    """A name without what `DataParallel` and `torch.compile` put in front of it."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")
