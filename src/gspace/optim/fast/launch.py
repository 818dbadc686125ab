"""Launches the kernels of `kernels.py`: what they need to know of a network, written down once, in a few tables.

Everything here is bookkeeping on the host. A step uploads the addresses of gradients and the hyper-parameters where
they changed, and launches six kernels, or a few more for deep networks. The host never waits for the device. Captured
in a CUDA graph, the step keeps the addresses and hyper-parameters it saw; a learning rate in a tensor is read at each
replay.
"""

import functools
import operator
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from gspace.optim.fast import kernels, network
from gspace.optim.fast.network import Given, Network, Outcome, Task, addresses, depths, hyper_parameters
from gspace.optim.fast.tables import Tile

FOLD, DEPTH, ROOTS, UNITS = 32, 64, 16, 256  # items of one program of the small passes, and sums it reads at a time
WALK = 16  # steps that one pass takes
SPARE = 4  # captured steps between two others that find memory made for them
KEPT: list[object] = []  # headers that CUDA graphs read at each replay: never freed
DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)  # how compiled kernels are called varied before
Kind = Literal["step", "show", "give"]
Calls = list[tuple[Callable[..., None], tuple[Any, ...]]]
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def refusal(task: Task, tile: Tile = Tile()) -> str | None:
    """Why the kernels cannot run on these parameters, None if they can."""
    if not task.weights:
        return "no parameter touches a unit"
    dtype, kind = task.weights[0].dtype, task.weights[0].device.type
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    if kind != "cuda" and isinstance(kernels.flow_pass, triton.JITFunction):
        return f"no kernel for {kind}"
    return network.refusal(task, tile)


def _dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front of it has ended, and wait for it inside."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class FusedStep:
    """One step on all parameters of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        weight = network.parameters[0]
        self.device = weight.device
        self.shrink = torch.ones(1, dtype=network.dtype, device=weight.device)
        self.flags = torch.zeros(3, dtype=torch.int32, device=weight.device)
        self.header = Header(network.parameters, weight.device)
        # Which momentum buffers are new, and which have been since a step that was not taken.
        self.new, self.waiting = torch.zeros(2, len(network.parameters), dtype=torch.int32, device=weight.device)
        self.walks = [walk.to(weight.device) for walk in _walks(network.tables.skeleton[:, -1].cpu())]
        self.products = torch.ones(2, 2 * len(network.root), dtype=torch.float64, device=weight.device).unbind()
        self.compiled: dict[tuple[Any, ...], tuple[Callable[..., None], list[Any]]] = {}
        self.kept: dict[Kind, tuple[Sent, Calls]] = {}  # the calls of a step, and what they were made for
        self.calls: Calls = []
        self.complete = False  # whether these calls are the whole step
        self.early = DIRECT and _dependent_launches(weight.device)
        self.begun = False  # whether a pass of this step was launched
        types = {"DTYPE": weight.dtype, "ACC": network.dtype}
        self.kinds = {name: getattr(triton.language, DTYPES[dtype]) for name, dtype in types.items()}

    def step(self, given: Given) -> Outcome:
        """Moves every parameter and buffer by one step, in place, unless a gradient is not finite.

        Path ratios, bounded and not, are left in the network; how many steps were not taken, in `flags[2]`.
        """
        self._play("step", given)
        torch.autograd.graph.increment_version(self.network.parameters)
        return Outcome.TAKEN

    def show(self, given: Given) -> Outcome:
        """Writes v and ∂ℓ/∂v, whatever the gradients are."""
        self._play("show", given)
        return Outcome.TAKEN

    def give(self, given: Given) -> None:
        """Moves parameters to what became of v."""
        self._play("give", given)
        torch.autograd.graph.increment_version(self.network.parameters)

    def _play(self, kind: "Kind", given: Given) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            sent = self.header.upload(given)
            kept = self.kept.pop(kind, None)
            if kept is not None and kept[0] is sent:
                for call, arguments in kept[1]:
                    call(*arguments)
                self.kept[kind] = kept
                return
            self.calls, self.complete, self.begun = [], True, False
            self._passes(kind, given, sent)
            if self.complete:
                self.kept[kind] = sent, self.calls

    def _passes(self, kind: "Kind", given: Given, sent: "Sent") -> None:
        net, groups = self.network, given.groups
        has_momentum = any(group["momentum"] != 0 for group in groups)
        params, chunks, folds, units, free, roots, lists, skeleton, reference = net.tables
        coordinates = self.products[(len(self.walks) - 1) % 2]
        has_decay = any(isinstance(g["weight_decay"], Tensor) or g["weight_decay"] != 0 for g in groups)
        tile = net.tile
        shape = {"WIDE": sent.aligned, "ROWS": tile.rows, "WIDTH": tile.width, "num_warps": tile.warps}
        if net.dtype == torch.float32 and isinstance(kernels.flow_pass, triton.JITFunction):
            shape["maxnreg"] = tile.registers

        def walk(k: int) -> None:
            before, after = self.products[(k - 1) % 2], self.products[k % 2]
            tensors = (self.walks[k], skeleton, reference, before, after, len(after))
            options = {"GATHER": k == 0, "STRIDES": len(self.walks[k])}
            programs = triton.cdiv(len(after), UNITS)
            self._launch("walk_pass", programs, tensors, **options, DTYPE=self.kinds["DTYPE"], UNITS=UNITS)

        def flow(sums: bool, norms: bool) -> None:
            tensors = (chunks, params, sent.grads, units, net.norms, net.partial, self.flags)
            self._launch("flow_pass", len(chunks), tensors, SUMS=sums, NORMS=norms, **self.kinds, **shape)

        def fold(some: Tensor, last: bool) -> None:
            tensors = (
                some, sent.grads, sent.hyper, sent.rates, net.partial, net.norms, free, net.sums, self.flags,
                sent.fresh, self.waiting, self.new, len(groups), len(self.new),
            )  # fmt: skip
            options = {"WEIGHTED": net.weighted, "DEPTH": DEPTH, "ITEMS": net.fold_items}
            self._launch("fold_pass", len(some), tensors, LAST=last, **options, **self.kinds)

        def at_roots(gather: bool, move: bool) -> None:
            tensors = (
                roots, lists, params, sent.grads, sent.buffers, self.new, sent.hyper, net.sums, net.norms, self.flags,
                coordinates, net.root_grad, self.shrink, net.ratio, net.raw, len(roots), len(net.root),
            )  # fmt: skip
            guards = {"MAX_RATIO": net.max_ratio, "MAX_DRIFT": net.max_drift}
            options = {"WEIGHTED": net.weighted, "NORMS": net.normalized, "HAS_MOMENTUM": has_momentum, "AT_ONCE": 32}
            programs = triton.cdiv(len(roots), ROOTS)
            self._launch(
                "roots_pass",
                programs,
                tensors,
                GATHER=gather,
                MOVE=move,
                GIVE=kind == "give",
                ROOTS=ROOTS,
                **options,
                **guards,
                **self.kinds,
            )

        def at_units() -> None:
            tensors = (net.root, net.ratio, coordinates, net.factors, len(net.root))
            programs = triton.cdiv(len(net.root), UNITS)
            self._launch("units_pass", programs, tensors, SPREAD=net.spread, ACC=self.kinds["ACC"], UNITS=UNITS)

        def update(apply: bool) -> None:
            fresh = sent.fresh if kind == "show" else self.new
            tensors = (
                chunks, params, sent.grads, sent.buffers, fresh, sent.hyper, units, net.factors, net.norms,
                self.flags, self.shrink, net.root_grad, net.squares, len(net.root),
            )  # fmt: skip
            options = {"NORMS": net.normalized, "TAPS": net.taps, "HAS_MOMENTUM": has_momentum, "HAS_DECAY": has_decay}
            clip = apply and net.max_norm is not None
            more: dict[str, Any] = {}
            if "maxnreg" in shape and (has_momentum or kind != "step"):
                more["maxnreg"] = 4 * tile.registers // 3
            if kind == "give" and isinstance(kernels.flow_pass, triton.JITFunction):
                more["enable_fp_fusion"] = False  # what the optimizer left alone comes back to the bit
            modes = {"APPLY": apply, "SHOW": kind == "show", "GIVE": kind == "give", "CLIP": clip}
            self._launch("update_pass", len(chunks), tensors, **modes, **options, **self.kinds, **(shape | more))

        if kind == "give":
            at_roots(gather=False, move=True)
            at_units()
            update(apply=True)
            return
        for k in range(len(self.walks)):
            walk(k)
        if net.weighted:
            flow(sums=False, norms=True)
            fold(folds[: net.sizes.norm_folds], last=False)
            flow(sums=True, norms=False)
            fold(folds[net.sizes.norm_folds :], last=True)
        else:
            flow(sums=True, norms=True)
            fold(folds, last=True)
        if kind == "show":
            at_roots(gather=True, move=False)
            at_units()
            update(apply=False)
            return
        if net.max_norm is None:
            at_roots(gather=True, move=True)
        else:
            at_roots(gather=True, move=False)
            self._run(_reciprocals, coordinates, net.factors)
            update(apply=False)
            self._run(_shrink, net.squares, net.root_grad, net.max_norm, self.shrink)
            at_roots(gather=False, move=True)
        at_units()
        update(apply=True)

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        call(*arguments)
        self.begun = call not in (_reciprocals, _shrink)  # torch's kernels do not announce themselves
        self.calls.append((call, arguments))

    def _launch(self, name: str, programs: int, tensors: tuple[Any, ...], **options: Any) -> None:
        """`kernels.name[(programs,)](*tensors, **options)`, kept among the calls of a step.

        Triton looks at every argument at every call, and asks the driver about every tensor, for longer than torch's
        whole step takes. What it looks for, dtypes and addresses that are multiples of 16 bytes, here is the same at
        every step: after the first time the compiled kernel gets the addresses.
        """
        options["EARLY"] = self.early
        if self.early and self.begun:
            options["launch_pdl"] = True
        self.begun = True
        key = (name, programs, *options.values())
        if key in self.compiled:
            launch, constants = self.compiled[key]
            self._run(launch, *(x.data_ptr() if isinstance(x, Tensor) else x for x in tensors), *constants)
            return
        kernel = getattr(kernels, name)
        found = kernel[(programs,)](*tensors, **options)
        if found is not None and DIRECT:  # None from the interpreter
            self.compiled[key] = found[programs, 1, 1], [options[arg] for arg in kernel.arg_names[len(tensors) :]]
        self.complete = False


def _walks(following: Tensor) -> list[Tensor]:
    """For each pass, whom a walk along `following` meets on it, WALK at most, `(steps, n)`; all end at ground."""
    length, stride, tables = int(depths(following).max()), 1, []
    while True:
        met, at = [], torch.arange(len(following), device=following.device)
        for _ in range(min(WALK, -(-max(length, 1) // stride))):
            met.append(at)
            at = following[at]
        tables.append(torch.stack(met).int())
        stride, following = stride * WALK, at
        if stride >= length:
            return tables


def _reciprocals(coordinates: Tensor, factors: Tensor) -> None:
    factors[: len(coordinates)].copy_(coordinates.reciprocal())


def _shrink(squares: Tensor, root_grad: Tensor, max_norm: float, shrink: Tensor) -> None:
    total = squares.sum() + root_grad.square().sum()
    shrink.copy_((max_norm / (total.sqrt() + 1e-6)).clamp(max=1))


class Sent(NamedTuple):
    """What changes from step to step, on the device.

    Attributes:
        grads, buffers: Where they are, per parameter.
        fresh: Whether the buffer is new, per parameter.
        hyper: Hyper-parameters of each group, float64.
        rates: For the learning rate and decay of each group, see `_rate`.
        aligned: Every address is a multiple of 16 bytes.
    """

    grads: Tensor
    buffers: Tensor
    fresh: Tensor
    hyper: Tensor
    rates: Tensor
    aligned: bool


def _rate(value: float | Tensor, device: torch.device) -> int:
    """0 for what the host knows; where it lies, if the kernels can read it there; -1 if it has to be copied."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return 0
    return value.data_ptr() if value.dtype == torch.float32 and value.device == device else -1


class Header:
    """Addresses and hyper-parameters, uploaded when they change.

    A captured step reads what the step before it did, if that still holds (gradients stay where they are). Otherwise
    the copy from the host becomes part of the graph, which must find what it copies at every replay: such a step has
    memory of its own for it on both sides, that of the host made before, for SPARE of them: none may be pinned then.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.count, self.device = len(parameters), device
        self.together = functools.reduce(operator.or_, addresses(parameters), 0)
        self.last: tuple[bytes, Sent] | None = None
        self.captured: list[Tensor] = []
        self.spare: list[Tensor] = []

    def upload(self, given: Given) -> Sent:
        groups = given.groups
        places = addresses(given.grads) + addresses(given.buffers)
        values = array("q", [*places, *given.fresh])
        values.frombytes(hyper_parameters(groups, read=False).tobytes())
        rates = [_rate(group[key], self.device) for group in groups for key in ("lr", "weight_decay")]
        values.extend(rates)
        content = values.tobytes()
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.last is not None and self.last[0] == content:
            sent = self.last[1]
            if capturing:
                KEPT.append(sent)
        else:
            aligned = functools.reduce(operator.or_, places, self.together) % 16 == 0
            there, n = self._send(torch.frombuffer(values, dtype=torch.int64), capturing), self.count
            parts = there.split([n, n, n, len(there) - 3 * n - len(rates), len(rates)])
            sent = Sent(parts[0], parts[1], parts[2], parts[3].view(torch.float64), parts[4], aligned)
            self.last = None if capturing else (content, sent)
        width = len(sent.hyper) // len(groups)
        for k, rate in enumerate(rates):
            if rate == -1:
                value, at = (groups[k // 2]["lr"], 0) if k % 2 == 0 else (groups[k // 2]["weight_decay"], 4)
                sent.hyper[k // 2 * width + at].copy_(value.reshape(()))
        return sent

    def _send(self, values: Tensor, capturing: bool) -> Tensor:
        if self.device.type == "cpu":
            return values.clone()
        if not capturing:
            self.spare = [here for here in self.spare if len(here) == len(values)]
            while len(self.spare) < SPARE:
                self.spare.append(torch.empty_like(values, pin_memory=True))
            return values.pin_memory().to(self.device, non_blocking=True)
        fits = bool(self.spare) and len(self.spare[-1]) == len(values)
        here = self.spare.pop() if fits else torch.empty_like(values, pin_memory=True)
        here.copy_(values)
        there = torch.empty_like(values, device=self.device)
        there.copy_(here, non_blocking=True)
        KEPT.append(here)
        self.captured.append(there)
        return there
