"""Launches the kernels of `kernels.py`: what they need to know of a network, written down once, in a few tables.

Everything here is bookkeeping on the host. A step uploads the addresses of gradients and the hyper-parameters where
they changed, and launches five kernels, whatever the depth. The host never waits for the device. Captured in a CUDA
graph, the step keeps the addresses and hyper-parameters it saw; a learning rate in a tensor is read at each replay.
"""

from array import array
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from gspace import kernels, tables
from gspace.step import BatchNormRule, Layer
from gspace.tables import Groups, Network, Tile, hyper_parameters

FOLD, ROOTS, UNITS = 64, 16, 256  # items of one program of the small passes
REGISTERS = 128  # per thread: more would leave too few programs on a processor to hide the latency of memory
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def refusal(layers: Sequence[Layer], weights: Sequence[Tensor], rule: BatchNormRule, tile: Tile = Tile()) -> str | None:
    """Why the kernels cannot run on these parameters, None if they can."""
    if not layers:
        return "no parameter touches a unit"
    if weights[0].dtype not in DTYPES:
        return f"no kernel for {weights[0].dtype}"
    if weights[0].device.type != "cuda" and isinstance(kernels.flow_pass, triton.JITFunction):
        return f"no kernel for {weights[0].device.type}"
    return tables.refusal(layers, weights, rule, tile)


class FusedStep:
    """One step on all parameters of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        weight = network.parameters[0]
        self.shrink = torch.ones(1, dtype=network.dtype, device=weight.device)
        self.flags = torch.zeros(3, dtype=torch.int32, device=weight.device)
        self.header = Header(network.parameters, weight.device)
        types = {"DTYPE": weight.dtype, "ACC": network.dtype}
        self.kinds = {name: getattr(triton.language, DTYPES[dtype]) for name, dtype in types.items()}

    def step(
        self,
        groups: Groups,
        grads: Sequence[Tensor | None],
        buffers: Sequence[Tensor | None],
        fresh: Sequence[bool],
        incoming: Tensor,
        outgoing: Tensor,
        root_buffer: Tensor | None,
        root_fresh: bool,
    ) -> bool:
        """Moves every parameter, buffer and coordinate by one step, in place, unless a gradient is not finite.

        Gradients and buffers lie in memory like their parameters; None is a missing one. Path ratios, bounded and not,
        are left in the network; how many steps were not taken, in `flags[2]`.
        """
        header, root_new, hyper = self.header.upload(groups, grads, buffers, fresh, root_fresh)
        net = self.network
        params, chunks, jobs, blocks, units, free, roots, lists = net.tables
        has_momentum = root_buffer is not None
        has_decay = any(isinstance(g["weight_decay"], Tensor) or g["weight_decay"] != 0 for g in groups)
        tile = net.tile
        shape = {"WIDE": self.header.aligned, "ROWS": tile.rows, "WIDTH": tile.width, "num_warps": tile.warps}
        if net.dtype == torch.float32 and isinstance(kernels.flow_pass, triton.JITFunction):
            shape["maxnreg"] = REGISTERS

        def flow(sums: bool, norms: bool) -> None:
            kernels.flow_pass[(len(chunks),)](
                chunks, params, header, units, net.norms, net.partial, self.flags,
                SUMS=sums, NORMS=norms, **self.kinds, **shape,
            )  # fmt: skip

        def fold(some: Tensor, last: bool) -> None:
            kernels.fold_pass[(len(some),)](
                some, jobs, params, header, hyper, net.partial, net.norms, free, net.sums, self.flags,
                LAST=last, WEIGHTED=net.weighted, **self.kinds, DEPTH=16, ITEMS=FOLD,
            )  # fmt: skip

        def at_roots(gather: bool, move: bool) -> None:
            kernels.roots_pass[(triton.cdiv(len(roots), ROOTS),)](
                roots, lists, params, header, hyper, net.sums, net.norms, self.flags, incoming, outgoing, net.root_grad,
                self.shrink, root_buffer if has_momentum else self.shrink, root_new, net.ratio, net.raw, len(roots),
                GATHER=gather, MOVE=move, WEIGHTED=net.weighted, NORMS=net.normalized, HAS_MOMENTUM=has_momentum,
                MAX_RATIO=net.max_ratio, MAX_DRIFT=net.max_drift,
                **self.kinds, ROOTS=ROOTS, LENGTH=32,
            )  # fmt: skip

        def update(apply: bool) -> None:
            kernels.update_pass[(len(chunks),)](
                chunks, params, header, hyper, units, net.factors, net.norms, self.flags, self.shrink, net.squares,
                len(net.root), APPLY=apply, CLIP=apply and net.max_norm is not None, NORMS=net.normalized,
                HAS_MOMENTUM=has_momentum, HAS_DECAY=has_decay, **self.kinds, **shape,
            )  # fmt: skip

        if net.weighted:
            flow(sums=False, norms=True)
            fold(blocks[: net.sizes.norm_blocks], last=False)
            flow(sums=True, norms=False)
            fold(blocks[net.sizes.norm_blocks :], last=True)
        else:
            flow(sums=True, norms=True)
            fold(blocks, last=True)
        if net.max_norm is None:
            at_roots(gather=True, move=True)
        else:
            at_roots(gather=True, move=False)
            H = len(net.root)
            torch.reciprocal(incoming, out=net.factors[:H])
            torch.reciprocal(outgoing, out=net.factors[H : 2 * H])
            update(apply=False)
            total = net.squares.sum() + net.root_grad.square().sum()
            self.shrink.copy_((net.max_norm / (total.sqrt() + 1e-6)).clamp(max=1))
            at_roots(gather=False, move=True)
        kernels.units_pass[(triton.cdiv(len(net.root), UNITS),)](
            net.root, net.ratio, incoming, outgoing, net.factors, self.flags, len(net.root),
            SPREAD=net.spread, ACC=self.kinds["ACC"], UNITS=UNITS,
        )  # fmt: skip
        update(apply=True)
        torch.autograd.graph.increment_version(net.parameters)
        return True


class Header:
    """Addresses and hyper-parameters, uploaded when they change.

    Under capture the copy from the host becomes part of the graph, which must find what it copies at every replay: each
    graph gets a header of its own, on both sides, made before (nothing may be allocated on the host during capture).
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.weights, self.device = [p.data_ptr() for p in parameters], device
        self.last: array[int] | None = None
        self.aligned = False  # every address is a multiple of 16 bytes
        self.here = self.there = torch.empty(0, dtype=torch.int64)
        self.captured: list[tuple[Tensor, Tensor]] = []
        self.spare: Tensor | None = None

    def upload(
        self,
        groups: Groups,
        grads: Sequence[Tensor | None],
        buffers: Sequence[Tensor | None],
        fresh: Sequence[bool],
        root_fresh: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Header, whether the buffer of the roots is new, and hyper-parameters, on the device. Sets `aligned`."""
        values = array("q")
        together = 0
        for w, g, b, new in zip(self.weights, grads, buffers, fresh, strict=True):
            at_g = g.data_ptr() if g is not None else 0
            at_b = b.data_ptr() if b is not None else 0
            values.extend((at_g, at_b, new))
            together |= w | at_g | at_b
        self.aligned = together % 16 == 0
        values.append(root_fresh)
        values.frombytes(hyper_parameters(groups).tobytes())
        self._send(values)
        cut = len(self.weights) * 3
        hyper = self.there[cut + 1 :].view(torch.float64)
        for i, group in enumerate(groups):
            for at, key in ((0, "lr"), (4, "weight_decay")):
                if isinstance(group[key], Tensor) and group[key].device.type != "cpu":
                    hyper[i * 6 + at].copy_(group[key].reshape(()))
        return self.there[:cut], self.there[cut : cut + 1], hyper

    def _send(self, values: "array[int]") -> None:
        fresh = torch.frombuffer(values, dtype=torch.int64)
        if self.device.type == "cpu":
            self.there = fresh.clone()
        elif torch.cuda.is_current_stream_capturing():
            here = self.spare if self.spare is not None else torch.empty_like(fresh, pin_memory=True)
            here.copy_(fresh)
            self.there, self.spare, self.last = torch.empty_like(fresh, device=self.device), None, None
            self.there.copy_(here, non_blocking=True)
            self.captured.append((here, self.there))
        elif values != self.last:
            if self.spare is None or len(self.spare) != len(fresh):
                self.spare = torch.empty_like(fresh, pin_memory=True)
            self.there = fresh.pin_memory().to(self.device, non_blocking=True)
            self.last = values
