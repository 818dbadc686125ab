"""Runs a model under `Follow`: once per batch and mode, and as often as chance or unused weights ask for."""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gspace.analysis.assemble import unread
from gspace.analysis.examples import attempted, redrawn
from gspace.analysis.follow import Follow
from gspace.analysis.forward import Inputs, TraceError, arguments, attributes, set_mode, tensors_in
from gspace.analysis.memory import geometry, key_of
from gspace.analysis.operations import RULES
from gspace.analysis.result import Pin, Residual
from gspace.analysis.run import called, written
from gspace.analysis.weights import overlap
from gspace.devices import on_cpu

QUIET, MOST = 5, 24  # where chance decides a branch: runs in a row that must say nothing new, and runs at most


def followed(
    model: nn.Module,
    example_input: Any,
    residual: Residual,
    modules: Container[nn.Module],
    parameters: Container[str],
    modes: Sequence[bool],
) -> Follow:
    """Runs the model on every batch, whole: what it does may depend on the number of rows. Guesses until one fits.

    Outputs of `modules` are set to ground, `parameters` must stay as they are, `modes` are values of `training`.
    """

    def run(examples: Sequence[Inputs]) -> Follow:
        follow = Follow(RULES, residual, modules)
        on_cpu(_enter)(follow, model, parameters)
        for example in examples:
            _in_modes(follow, model, example, modes)
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(3):  # experts that no token went to
            if not unread(follow, model):
                break
            try:
                _in_modes(follow, model, redrawn(examples[0], generator), modes)
            except TraceError:  # other values the model does not take
                break
        return follow

    return attempted(run, model, example_input)


def _enter(follow: Follow, model: nn.Module, left: Container[str]) -> None:
    """Every parameter; those that share memory, are complex or are to be left alone stay ground."""
    spans: dict[int, list[tuple[str, int, int]]] = {}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.layout == torch.strided and t.numel():
            spans.setdefault(key_of(t), []).append((name, *_span(t)))
    for name, p in model.named_parameters():
        if not p.numel():
            continue
        follow.parameters[key_of(p)] = name
        if not p.is_floating_point() and not p.is_complex():
            continue
        begin, end = _span(p)
        others = [other for other, b, e in spans[key_of(p)] if other != name and begin < e and b < end]
        reason = (
            ("alias", f"{name}: shares its memory with {', '.join(others)}") if others
            else ("alias", f"{name}: its entries may share memory") if overlap(geometry(p))
            else ("complex", f"{name}: its values are complex") if p.is_complex()
            else ("pin", f"{name}: pinned on request") if name in left
            else None
        )  # fmt: skip
        if reason is None:
            follow.enter(p)
        else:
            follow.pins.append(Pin(reason[0], name, min([n for n in p.shape if n > 1][:2], default=1), reason[1]))


def _span(t: Tensor) -> tuple[int, int]:
    """Its first byte, and the one behind its last."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset())
    return first * t.element_size(), (first + last + 1) * t.element_size()


def _in_modes(follow: Follow, model: nn.Module, example: Inputs, modes: Sequence[bool]) -> None:
    """One run in each mode; where chance decides a branch, runs until several in a row say nothing new."""
    for training in modes:
        set_mode(model, training)
        quiet, free = 0, -1
        for _ in range(MOST):
            tossed = follow.branches
            _once(follow, model, example)
            before, free = free, follow.weights.free() if follow.branches > tossed else -1
            quiet = quiet + 1 if free == before else 0
            if follow.branches == tossed or quiet == QUIET:
                break


def _once(follow: Follow, model: nn.Module, example: Inputs) -> None:
    follow.position = 0
    follow.given([t for t in tree_leaves(arguments(example)) if isinstance(t, Tensor)])
    before = {id(t) for t in attributes(model)}
    out = called(follow, model, example)
    for name, p in model.named_parameters():
        if key_of(p) not in follow.parameters and p.numel():
            raise written(name)
    with torch._C.DisableTorchFunction():
        for t in tensors_in(out):
            follow.pin(follow.ids(t), "an output of the model", "output")
        left = [t for t in attributes(model) if id(t) not in before]  # for others to read: as good as an output
        for t in [*left, *model.buffers()]:
            if follow.depends_on_data(t) and key_of(t) not in follow.statistics:
                follow.pin(follow.ids(t), "kept in an attribute of the model", "attribute")
