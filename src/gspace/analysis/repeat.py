"""Runs a model under `Follow`: once per batch and mode, and as often as chance or unused weights ask for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gspace.analysis.assemble import unread
from gspace.analysis.examples import attempted, redrawn
from gspace.analysis.follow import Follow
from gspace.analysis.forward import Inputs, TraceError, arguments, attributes, kept, set_mode, tensors_in
from gspace.analysis.memory import geometry, key_of
from gspace.analysis.operations import RULES
from gspace.analysis.result import Pin, Residual
from gspace.analysis.run import called, written
from gspace.analysis.weights import overlap
from gspace.devices import on_cpu

QUIET, MOST = 5, 24  # where chance decides a branch: runs in a row that must say nothing new, and runs at most


class Task(NamedTuple):
    """What is to be followed.

    Attributes:
        model: The module.
        residual: "tie" or "pin".
        modules: Modules whose outputs are set to ground.
        parameters: Names of parameters that must stay as they are.
        modes: Values of `training` to run it with.
    """

    model: nn.Module
    residual: Residual
    modules: frozenset[nn.Module]
    parameters: frozenset[str]
    modes: tuple[bool, ...]


def followed(task: Task, example_input: Any) -> Follow:
    """Runs the model on every batch, whole: what it does may depend on the number of rows. Guesses until one fits."""
    return attempted(lambda examples: _run(task, examples), task.model, example_input)


def _run(task: Task, examples: Sequence[Inputs]) -> Follow:
    follow = Follow(RULES, task.residual)
    on_cpu(_enter)(follow, task)
    for example in examples:
        for training in task.modes:
            set_mode(task.model, training)
            _repeat(follow, task, example)
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(3):  # experts that no token went to
        if not unread(follow, task.model):
            break
        for training in task.modes:
            set_mode(task.model, training)
            try:
                _repeat(follow, task, redrawn(examples[0], generator))
            except TraceError:  # other values the model does not take
                return follow
    return follow


def _enter(follow: Follow, task: Task) -> None:
    """Every parameter; those that share memory, are complex or are to be left alone stay ground."""
    ranges = []
    for name, t in [*task.model.named_parameters(), *task.model.named_buffers()]:
        if t.layout == torch.strided and t.numel():
            first = int(t.storage_offset())
            last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
            ranges.append((key_of(t), first * t.element_size(), (first + last + 1) * t.element_size(), name, t))
    ranges.sort(key=lambda r: r[:3])
    for k, (key, begin, end, name, t) in enumerate(ranges):
        if isinstance(t, nn.Parameter):
            follow.parameters[key] = name
        if not isinstance(t, nn.Parameter) or not (t.is_floating_point() or t.is_complex()):
            continue
        near = ranges[max(0, k - 8) : k + 9]
        others = [r[3] for r in near if r[0] == key and r[3] != name and begin < r[2] and r[1] < end]
        reason = (
            ("alias", f"{name}: shares its memory with {', '.join(others)}") if others
            else ("alias", f"{name}: its entries may share memory") if overlap(geometry(t))
            else ("complex", f"{name}: its values are complex") if t.is_complex()
            else ("pin", f"{name}: pinned on request") if name in task.parameters
            else None
        )  # fmt: skip
        if reason is None:
            follow.enter(t)
        else:
            follow.pins.append(Pin(reason[0], name, _channels(t), reason[1]))


def _channels(t: Tensor) -> int:
    return min([n for n in t.shape if n > 1][:2], default=1)


def _repeat(follow: Follow, task: Task, example: Inputs) -> None:
    """One run; where chance decides a branch, runs until several in a row say nothing new."""
    quiet, free = 0, -1
    for _ in range(MOST):
        tossed = follow.branches
        _once(follow, task, example)
        if follow.branches == tossed:
            return
        before, free = free, follow.weights.free()
        quiet = quiet + 1 if free == before else 0
        if quiet == QUIET:
            return


def _once(follow: Follow, task: Task, example: Inputs) -> None:
    model = task.model
    follow.position = 0
    follow.given([t for t in tree_leaves(arguments(example)) if isinstance(t, Tensor)])
    before = {id(t) for t in attributes(model)}

    def after(module: nn.Module, output: Any) -> None:
        for t in tensors_in(output) if module in task.modules else ():
            if t in follow.memory:
                follow.pin(follow.ids(t), "pinned on request", "pin")

    out = called(follow, model, example, after)
    for name, p in model.named_parameters():
        if key_of(p) not in follow.parameters and p.numel():
            raise written(name)
    with torch._C.DisableTorchFunction():
        for t in tensors_in(out):
            if t in follow.memory:
                follow.pin(follow.ids(t), "an output of the model", "output")
        statistics = set(follow.statistics)
        for t in [*kept(model, before), *model.buffers()]:
            if t in follow.memory and follow.depends_on_data(t) and key_of(t) not in statistics:
                follow.pin(follow.ids(t), "kept in an attribute of the model", "attribute")
