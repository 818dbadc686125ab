"""Launches the kernels of `kernels.py`: what they need to know of a network, written down once, in a few tables.

Everything here is bookkeeping on the host. A step uploads the addresses of gradients and the hyper-parameters where
they changed, and launches five kernels, or a few more for deep networks. The host never waits for the device. Captured
in a CUDA graph, the step keeps the addresses and hyper-parameters it saw; a learning rate in a tensor is read at each
replay.
"""

import functools
import operator
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gspace.optim.built import Built
from gspace.optim.eager import Rules
from gspace.optim.fast import kernels
from gspace.optim.fast.network import Bound, Given, Kind, Outcome, addresses, depths, hyper_parameters
from gspace.optim.fast.tables import LAYOUT, Tile

DEPTH, ROOTS, AT_ONCE, UNITS = 64, 16, 32, 256  # items of one program of the small passes, and sums it reads at a time
WALK = 16  # steps that one pass takes
SPARE = 4  # captured steps between two others that find memory made for them
KEPT: list[object] = []  # headers that CUDA graphs read at each replay: never freed
Calls = list[tuple[Callable[..., None], tuple[Any, ...]]]
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def _compiled() -> bool:
    """Whether kernels are compiled, not interpreted."""
    return isinstance(kernels.flow_pass, triton.JITFunction)


def _dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front of it has ended, and wait for it inside."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class FusedStep(Bound):
    """A step by the kernels.

    Path ratios, bounded and not, are left in `built.last`; how many steps were not taken, in `flags[2]`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        weight = self.parameters[0]
        self.device = weight.device
        self.flags = torch.zeros(3, dtype=torch.int32, device=weight.device)
        self.header = Header(self.parameters, weight.device)
        self.walks = [walk.to(weight.device) for walk in _walks(self.tables.skeleton[:, -1].cpu())]
        self.products = torch.ones(2, 2 * len(self.root), dtype=torch.float64, device=weight.device).unbind()
        self.compiled: dict[tuple[Any, ...], tuple[Callable[..., None], list[Any]]] = {}
        self.kept: dict[Kind, tuple[Sent, Calls]] = {}  # the calls of a step, and what they were made for
        self.calls: Calls = []
        self.complete = False  # whether these calls are the whole step
        self.early = _dependent_launches(weight.device)
        self.begun = False  # whether a pass of this step was launched
        types = {"DTYPE": weight.dtype, "ACC": self.dtype}
        self.kinds = {name: getattr(triton.language, DTYPES[dtype]) for name, dtype in types.items()}

    @classmethod
    def refusal(cls, built: Built, rules: Rules, tile: Tile | None = None) -> str | None:
        dtype, kind = built.weights[0].dtype, built.weights[0].device.type
        if dtype not in DTYPES or (kind != "cuda" and _compiled()):
            return f"no kernel for {dtype} on {kind}"
        return super().refusal(built, rules, tile)

    def skipped(self) -> int:
        """Waits for the device."""
        return int(self.flags[2])

    def _take(self, kind: Kind, given: Given) -> Outcome:
        """Nobody waits to hear whether a step was taken: it is not if a gradient is not finite."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            sent = self.header.upload(given)
            kept = self.kept.pop(kind, None)
            if kept is not None and kept[0] is sent:
                for call, arguments in kept[1]:
                    call(*arguments)
                self.kept[kind] = kept
            else:
                self.calls, self.complete, self.begun = [], True, False
                self._passes(kind, given, sent)
                if self.complete:
                    self.kept[kind] = sent, self.calls
        return Outcome.TAKEN

    def _passes(self, kind: Kind, given: Given, sent: "Sent") -> None:
        params, chunks, folds, units, free, roots, lists, skeleton, reference = self.tables
        tile, n, coordinates = self.tile, len(self.root), self.products[(len(self.walks) - 1) % 2]
        momentum = any(group["momentum"] != 0 for group in given.groups)
        decay = any(isinstance(g["weight_decay"], Tensor) or g["weight_decay"] != 0 for g in given.groups)
        shape = {"WIDE": sent.aligned, "ROWS": tile.rows, "WIDTH": tile.width, "num_warps": tile.warps}
        limited = self.dtype == torch.float32 and _compiled()
        if kind != "give":
            for k, walk in enumerate(self.walks):
                before, after = self.products[(k - 1) % 2], self.products[k % 2]
                self._launch(
                    "walk_pass", triton.cdiv(2 * n, UNITS),
                    (walk, skeleton, reference, before, after, self.factors, 2 * n),
                    GATHER=k == 0, STRIDES=len(walk), LAST=k == len(self.walks) - 1, UNITS=UNITS, **self.kinds,
                )  # fmt: skip
            self._launch(
                "flow_pass", len(chunks),
                (chunks, params, sent.grads, self.partial, self.flags),
                **self.kinds, **shape, **({"maxnreg": tile.registers} if limited else {}),
            )  # fmt: skip
            self._launch(
                "fold_pass", len(folds),
                (folds, sent.grads, sent.hyper, sent.rates, self.partial, self.norms, free, self.sums, self.flags,
                 len(given.groups)),
                DEPTH=DEPTH, ITEMS=tile.fold, **self.kinds,
            )  # fmt: skip
        self._launch(
            "roots_pass", triton.cdiv(len(roots), ROOTS),
            (roots, lists, params, sent.grads, sent.buffers, sent.hyper, self.sums, self.norms, self.flags,
             coordinates, self.root_grad, self.ratio, self.raw, self.factors, len(roots), n),
            GATHER=kind != "give", MOVE=kind != "show", NORMS=self.normalized, SPREAD=self.spread,
            HAS_MOMENTUM=momentum, MAX_RATIO=self.max_ratio, MAX_DRIFT=self.max_drift,
            ROOTS=ROOTS, AT_ONCE=AT_ONCE, **self.kinds,
        )  # fmt: skip
        if limited:
            shape["maxnreg"] = tile.registers if kind == "step" and not momentum else 4 * tile.registers // 3
        if kind == "give" and _compiled():
            shape["enable_fp_fusion"] = False  # what the optimizer left alone comes back to the bit
        self._launch(
            "update_pass", len(chunks),
            (chunks, params, sent.grads, sent.buffers, sent.slopes, sent.hyper, units,
             self.factors, self.norms, self.flags, self.root_grad, n),
            SHOW=kind == "show", GIVE=kind == "give", NORMS=self.normalized, TAPS=self.taps, HAS_MOMENTUM=momentum,
            HAS_DECAY=decay, **self.kinds, **shape,
        )  # fmt: skip

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
            arguments = (*(x.data_ptr() if isinstance(x, Tensor) else x for x in tensors), *constants)
            launch(*arguments)
            self.calls.append((launch, arguments))
            return
        kernel = getattr(kernels, name)
        found = kernel[(programs,)](*tensors, **options)
        if found is not None:  # None from the interpreter
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


class Sent(NamedTuple):
    """What changes from step to step, on the device.

    Attributes:
        grads, buffers, slopes: Where they are, per parameter.
        hyper: Hyper-parameters of each group, float64.
        rates: For the learning rate and decay of each group, see `_rate`.
        aligned: Every address is a multiple of 16 bytes.
    """

    grads: Tensor
    buffers: Tensor
    slopes: Tensor
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
        self.now: tuple[Given, Sent] | None = None  # this step's
        self.captured: list[Tensor] = []
        self.spare: list[Tensor] = []

    def upload(self, given: Given) -> Sent:
        if self.now is not None and self.now[0] is given:  # what was shown is given back
            return self.now[1]
        groups = given.groups
        values = array("q", given.places)
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
            aligned = functools.reduce(operator.or_, given.places, self.together) % 16 == 0
            there, n = self._send(torch.frombuffer(values, dtype=torch.int64), capturing), self.count
            parts = there.split([n, n, n, len(there) - 3 * n - len(rates), len(rates)])
            sent = Sent(parts[0], parts[1], parts[2], parts[3].view(torch.float64), parts[4], aligned)
            self.last = None if capturing else (content, sent)
        width = len(sent.hyper) // len(groups)
        for k, rate in enumerate(rates):
            if rate == -1:
                value, at = (groups[k // 2]["lr"], "lr") if k % 2 == 0 else (groups[k // 2]["weight_decay"], "decay")
                sent.hyper[k // 2 * width + LAYOUT["HYPER"].index(at)].copy_(value.reshape(()))
        self.now = given, sent
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
