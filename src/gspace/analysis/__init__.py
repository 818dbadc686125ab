"""model → analysis: every positive rescaling that leaves the function of a network unchanged (Sec. 3.1 of the paper).

`analyze` runs the model on an example batch, in training and in evaluation mode. Behind every storage lies a shadow of
scale nodes (`memory`), and every operation adds linear equations between their log-scales (`follow`, by the `rules` of
the table in `operations`), which are solved as they come (`equations`). Parameters are edges between nodes (`weights`).
What is free at the end is a unit (`layout`, `assemble`; the `result`).
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from gspace.analysis.assemble import assemble, unread
from gspace.analysis.examples import batches, few_rows, guesses, redrawn, refusal
from gspace.analysis.follow import Escapes, Follow, Pinned
from gspace.analysis.forward import (
    Inputs,
    TraceError,
    arguments,
    attributes,
    kept,
    set_mode,
    tensors_in,
    untouched,
    unwrap,
)
from gspace.analysis.memory import key_of
from gspace.analysis.operations import RULES
from gspace.analysis.result import Analysis, Edges, Form, Pin, Residual, Statistic, UnitGroup, magnitude
from gspace.devices import on_cpu

__all__ = [
    "Analysis", "Edges", "Form", "Inputs", "Pin", "Residual", "Statistic", "TraceError", "UnitGroup", "analyze",
    "analyzed", "magnitude", "unwrap",
]  # fmt: skip

QUIET, MOST = 5, 24  # where chance decides a branch: runs in a row that must say nothing new, and runs at most
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
            Without one, what the model offers is tried (`dummy_inputs`), then guesses from its first layer.
        residual: "tie" gives what is added one scale, every exact symmetry; "pin" grounds both, the paper's choice.
        pin: Names of modules whose output units are pinned.
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
    inner = unwrap(model)
    refuse(inner)
    pinned = _known(pin, dict(inner.named_modules(remove_duplicate=False)))
    with untouched(inner):
        follow = _followed(inner, example_input, residual, pinned, [MODES[m] for m in listed])
        return on_cpu(assemble)(follow, model, residual)


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
    parameters = dict(model.named_parameters())
    for e in analysis.edges:
        if e.name not in parameters or not e.fits(parameters[e.name]):
            raise ValueError(
                f"the analysis is of another model: this one has no parameter {e.name!r} of that size "
                "(a wrapped model is another one: analyze what you pass here)"
            )
    return analysis


def refuse(model: nn.Module) -> None:
    """What cannot be run or followed at all."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise TraceError(f"parameter {name!r} has no shape yet (lazy module): run one batch through the model first")
        if p.layout != torch.strided or p.is_quantized:
            raise TraceError(f"parameter {name!r} is sparse or quantized: analyze the dense model it was made from")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("a TorchScript module cannot be followed: pass the module that it was made from")
    if getattr(type(model), "forward", None) is nn.Module.forward and "forward" not in vars(model):
        raise TraceError(f"{type(model).__name__} has no forward: pass the module that calls it")


def _known(pin: Iterable[str], modules: dict[str, nn.Module]) -> set[nn.Module]:
    listed = [pin] if isinstance(pin, str) else list(pin)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"pin takes names of modules, got {listed!r}")
    names = {name.removeprefix("module.").removeprefix("_orig_mod.") for name in listed}
    for name in names - modules.keys():
        close = difflib.get_close_matches(name, modules)
        raise ValueError(f"pin: the model has no module {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return {modules[name] for name in names}


def _followed(
    model: nn.Module, example_input: Any, residual: Residual, pinned: set[nn.Module], modes: Sequence[bool]
) -> Follow:
    """Runs the model on every batch; those that were guessed until one fits, shortened ones where they suffice."""
    if example_input is None:
        tried: list[tuple[Inputs, Exception]] = []
        for guess in guesses(model):
            try:
                return _run([guess], model, residual, pinned, modes)
            except TraceError as error:
                tried.append((guess, error))
        raise refusal(tried)
    given = batches(example_input)
    short = [few_rows(one) for one in given]
    if all(one is not None for one in short):
        try:
            follow = _run([one for one in short if one is not None], model, residual, pinned, modes)
        except TraceError:
            return _run(given, model, residual, pinned, modes)
        return follow if not unread(follow, model) else _run(given, model, residual, pinned, modes)
    return _run(given, model, residual, pinned, modes)


def _run(
    examples: Sequence[Inputs], model: nn.Module, residual: Residual, pinned: set[nn.Module], modes: Sequence[bool]
) -> Follow:
    follow = Follow(RULES, residual)
    on_cpu(_enter)(follow, model)
    for example in examples:
        for training in modes:
            set_mode(model, training)
            _repeat(follow, model, example, pinned)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # experts that no token went to
        if not unread(follow, model):
            break
        for training in modes:
            set_mode(model, training)
            try:
                _repeat(follow, model, redrawn(examples[0], generator), pinned)
            except TraceError:  # other values the model does not take
                return follow
    return follow


def _enter(follow: Follow, model: nn.Module) -> None:
    """Every parameter; those that share memory, or are complex, stay ground."""
    ranges = []
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.layout == torch.strided and t.numel():
            first = int(t.storage_offset())
            last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
            ranges.append((key_of(t), first * t.element_size(), (first + last + 1) * t.element_size(), name, t))
    ranges.sort(key=lambda r: r[:3])
    for k, (key, begin, end, name, t) in enumerate(ranges):
        if not isinstance(t, nn.Parameter) or not (t.is_floating_point() or t.is_complex()):
            continue
        others = [r[3] for r in ranges[max(0, k - 8) : k + 9] if r[0] == key and r[3] != name and begin < r[2] and r[1] < end]
        overlap = _overlaps(t)
        if others or overlap or t.is_complex():
            reason = (
                f"shares its memory with {', '.join(others)}"
                if others
                else "its entries may share memory"
                if overlap
                else "its values are complex"
            )
            follow.pins.append(Pinned("alias" if others or overlap else "complex", name, _channels(t), reason))
        else:
            follow.enter(t)


def _channels(t: Tensor) -> int:
    return min([n for n in t.shape if n > 1][:2], default=1)


def _overlaps(t: Tensor) -> bool:
    """Whether a step along a dimension may land on entries of shorter steps, as in what `expand` returns."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _repeat(follow: Follow, model: nn.Module, example: Inputs, pinned: set[nn.Module]) -> None:
    """One run; where chance decides a branch, runs until several in a row say nothing new."""
    quiet, free = 0, -1
    for _ in range(MOST):
        tossed = follow.branches
        _once(follow, model, example, pinned)
        if follow.branches == tossed:
            return
        before, free = free, int((follow.equations.find(torch.arange(follow.equations.count)) > 1).sum())
        quiet = quiet + 1 if free == before else 0
        if quiet == QUIET:
            return


def _once(follow: Follow, model: nn.Module, example: Inputs, pinned: set[nn.Module]) -> None:
    args, kwargs = arguments(example)
    follow.position = 0
    follow.given([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
    before = {id(t) for t in attributes(model)}
    try:
        with _named(follow, model, pinned), Escapes(follow), follow:
            out = model(*args, **kwargs)
    except TraceError:
        raise
    except Exception as error:
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise TraceError(
            f"the model does not accept this example_input: {type(error).__name__}: {message}"
        ) from error
    for t in tensors_in(out):
        if t in follow.memory:
            follow.pin(follow.ids(t), "an output of the model", "output")
    statistics = set(follow.statistics)
    for t in [*kept(model, before), *model.buffers()]:
        if t in follow.memory and follow.depends_on_data(t) and key_of(t) not in statistics:
            follow.pin(follow.ids(t), "kept in an attribute of the model", "attribute")


@contextmanager
def _named(follow: Follow, model: nn.Module, pinned: set[nn.Module]) -> Iterator[None]:
    """While it lasts, `follow` knows in which module it is; the outputs of `pinned` ones are set to ground."""
    names = {m: name for name, m in model.named_modules()}

    def before(module: nn.Module, args: Any) -> None:
        if module in names:
            follow.modules.append(names[module] or "the model")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and follow.modules:
            if module in pinned:
                for t in tensors_in(output):
                    if t in follow.memory:
                        follow.pin(follow.ids(t), "pinned on request", "pin")
                        follow.memory.write(t.detach(), torch.tensor(0))
            follow.modules.pop()

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        follow.modules.clear()
