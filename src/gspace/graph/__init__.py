"""model → graph: every positive rescaling that leaves the function of a network unchanged (Sec. 3.1 of the paper).

`analyze` traces the model, walks the graph, and solves the collected equations: provisional ids that must share one
scale become one unit, and those that must keep their scale become ground, unit 0. Two views come out of one walk
(they differ only with BatchNorm, see docs/theory.md): *exact*, where a BatchNorm divides the scale of its rows out and
γ, β write the unit, and *transparent*, where BatchNorm is ignored, as in the paper.

Shapes: `head` is `(group, out)`, `tail` is `(group, in)`, a parameter is viewed as `(group, out, in, *taps)`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Residual
from gspace.devices import on_cpu
from gspace.graph.solve import assemble
from gspace.graph.spaces import PinnedAt, Walk
from gspace.graph.trace import trace
from gspace.graph.traced import Inputs, Traced, unwrap
from gspace.graph.walk import Walker


def analyze(
    model: nn.Module,
    example_input: Inputs | None = None,
    *,
    residual: Residual = "pin",
    pin: Iterable[str] = (),
) -> Analysis:
    """Finds every positive rescaling of `model` that leaves its function unchanged.

    Args:
        model: Any module; wrappers (`DataParallel`, `torch.compile`) are looked through.
        example_input: A batch the model accepts (tensor, tuple or dict). With one, sizes are known, and
            `torch.export` follows what symbolic tracing cannot. Without one, four things are taken for granted:
            images come in batches, what a linear layer hands to a BatchNorm1d is a matrix, what an Embedding reads is
            (batch, tokens), and inputs that have a default are left at it. Pass one if that is not so.
        residual: "pin" grounds both operands of an addition, the paper's choice; "tie" gives them one scale.
        pin: Names of modules whose output units are pinned.

    Control flow is followed once per mode: a branch on a draw from a generator of the model's own is not noticed.

    Raises:
        TraceError: The forward pass cannot be followed; the message names the line and the way out.

    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    >>> analysis = analyze(net)
    >>> analysis.H, analysis.m, analysis.dim
    (8, 56, 48)
    """
    if residual not in ("pin", "tie"):
        raise ValueError(f"residual must be 'pin' or 'tie', got {residual!r}")
    return _solved(trace(model, example_input), model, residual, pin)


def analyzed(model: nn.Module, analysis: Analysis | None, options: Mapping[str, Any]) -> Analysis:
    """What the caller has, or what `analyze(model, **options)` finds; both at once would contradict each other."""
    if analysis is None:
        return analyze(model, **options)
    if not isinstance(analysis, Analysis):
        raise TypeError(f"analysis is what gspace.analyze returns, got {type(analysis).__name__}")
    if options:
        raise ValueError(f"pass either analysis= or {', '.join(options)}=, not both")
    parameters = dict(model.named_parameters())
    for e in analysis.edges:
        if e.name not in parameters or not e.fits(parameters[e.name]):
            raise ValueError(
                f"the analysis is of another model: this one has no parameter {e.name!r} of that size "
                "(a wrapped model is another one: analyze what you pass here)"
            )
    return analysis


@on_cpu
def _solved(traced: Sequence[Traced], model: nn.Module, residual: Residual, pin: Iterable[str]) -> Analysis:
    """What follows from the graphs of `model`; its own code is not run again."""
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    walk = Walk(residual)
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    walker = Walker(walk, names, _hooked(modules), _known(pin, modules))
    for one in traced:
        walker.run(one)
    _unfollowed(walk, model)
    _aliased(walk, model)
    _complex(walk, model)
    return assemble(walk, model, residual)


def _known(pin: Iterable[str], modules: dict[str, nn.Module]) -> set[str]:
    listed = [pin] if isinstance(pin, str) else list(pin)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"pin takes names of modules, got {listed!r}")
    names = {name.removeprefix("module.").removeprefix("_orig_mod.") for name in listed}
    for name in names - modules.keys():
        close = difflib.get_close_matches(name, modules)
        raise ValueError(f"pin: the model has no module {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return names


def _hooked(modules: dict[str, nn.Module]) -> dict[str, str]:
    reason = "a forward hook on {!r} may change anything inside it"
    hooks = {name: reason.format(name or "the model") for name, m in modules.items() if _hooks(m)}
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        hooks[""] = "a forward hook on every module may change anything"
    return hooks


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _unfollowed(walk: Walk, model: nn.Module) -> None:
    """Pins, for the report, the channels of weights that only operations without a rule read, if nothing else does."""
    followed = {use.name for use in walk.uses}
    reported = {(pin.operation, pin.where) for pin in walk.pins}
    for name, p in model.named_parameters():
        why, sizes = walk.misused.get(name), [n for n in p.shape if n > 1]
        if why and name not in followed and len(sizes) > 1 and (why.operation, why.where) not in reported:
            walk.pins.append(replace(why, ids=walk.fresh(min(sizes[:2])), reason=f"{name}: {why.reason}"))


def _aliased(walk: Walk, model: nn.Module) -> None:
    """Different tensors that share memory: scaling one would scale the other unseen.

    They do if their ranges of bytes overlap, even where one lies in the gaps of the other. Tensors side by side in one
    buffer (`vector_to_parameters`) do not.
    """
    ranges = []
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if p.device.type != "meta" and p.layout == torch.strided and p.numel():
            if _overlaps(p):
                overlap = PinnedAt(torch.empty(0), "alias", name, "its entries may share memory")
                walk.misused.setdefault(name, overlap)
            first = p.untyped_storage().data_ptr() + int(p.storage_offset()) * p.element_size()
            last = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            ranges.append((str(p.device), first, first + (last + 1) * p.element_size(), name))
    together: list[list[str]] = []
    device, end = "", 0
    for place, first, stop, name in sorted(ranges):
        if place != device or first >= end:
            together.append([])
            device, end = place, 0
        together[-1].append(name)
        end = max(end, stop)
    for shared in together:
        for name in shared if len(shared) > 1 else ():
            others = ", ".join(other for other in shared if other != name)
            walk.misused.setdefault(name, PinnedAt(torch.empty(0), "alias", name, f"shares its memory with {others}"))


def _overlaps(p: Tensor) -> bool:
    """Whether a step along a dimension may land on entries of shorter steps, as in what `expand` returns."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(p.shape, p.stride(), strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _complex(walk: Walk, model: nn.Module) -> None:
    """A positive scale leaves the phase of a complex weight alone; paths and skeletons here are real."""
    for name, p in model.named_parameters():
        if p.is_complex():
            walk.misused.setdefault(name, PinnedAt(torch.empty(0), "complex", name, "its values are complex"))
