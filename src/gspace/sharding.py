"""Models whose parameters are DTensors (FSDP2, tensor parallelism): what is here, what is whole, and how ranks meet.

A process holds a box of every such parameter: all of it along dimensions that are not sharded, a range of the others.
Where a mesh replicates, several processes hold the same box, and one of them counts. Passes over weights are over
boxes; what crosses processes are sums, through `Together`. Whole parameters are gathered one at a time, and never for a
step.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis.result import Edges

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
Box = tuple[tuple[int, int], ...]  # start and stop along each dimension
Reduce = Callable[[Tensor], Tensor]  # adds up what every process has summed over its weights
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_sharded(t: Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` put one of its own in front."""
    kind = type(module)
    return kind.__mro__[2] if kind.__module__.startswith("torch.distributed.fsdp._fully_shard") else kind


def any_sharded(model: nn.Module) -> bool:
    return any(map(is_sharded, model.parameters()))


def refuse_sharded(parameters: Mapping[str, Tensor], what: str) -> None:
    """For what is made for whole parameters."""
    name = next((name for name, p in parameters.items() if is_sharded(p)), None)
    if name is not None:
        raise ValueError(f"{what} needs whole parameters, and {name!r} is sharded: call it before the model is sharded")


def refuse_flat(model: nn.Module) -> None:
    """FSDP1 keeps parts of flattened parameters, which have no rows and columns."""
    for m in model.modules():
        if type(m).__module__ == FSDP1:
            raise ValueError("FSDP1 (FullyShardedDataParallel) flattens parameters: use FSDP2, `fully_shard`, instead")


def refuse_redundancy(owner: str) -> None:
    """`ZeroRedundancyOptimizer` makes its optimizers of some parameters of a model each, and calls them so."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == ZERO:
            raise ValueError(
                f"ZeroRedundancyOptimizer gives each rank whole parameters of some layers, and {owner} needs all "
                "layers of a unit: use FSDP2, `fully_shard`, instead"
            )
        frame = frame.f_back


def reshard(model: nn.Module) -> nn.Module:
    """Lets go of what FSDP2 has gathered for a forward pass: what is written there is lost."""
    if "torch.distributed.fsdp" in sys.modules:
        kind = getattr(sys.modules["torch.distributed.fsdp"], "FSDPModule", ())
        for m in model.modules():
            if isinstance(m, kind):
                m.reshard()
    return model


# What is here ---------------------------------------------------------------------------------------------------------


def local(t: Any) -> Any:
    """The part of a tensor that this process holds, in the same memory."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        here = t.to_local()
        return here.wait() if hasattr(here, "wait") else here


def local_gradient(p: Tensor) -> Tensor | None:
    """The gradient of a parameter, of the part that is here; summed over ranks if nobody has done so."""
    g: Any = p.grad
    if g is not None and is_sharded(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return None if g is None else local(g)


def like(p: Any, here: Tensor) -> Tensor:
    """A tensor sharded like p with this part of it here."""
    if not is_sharded(p):
        return here
    tensor: Any = sys.modules["torch.distributed.tensor"]
    return tensor.DTensor.from_local(
        here, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def box(p: Any) -> Box:
    """Which part of a parameter is here."""
    if not is_sharded(p):
        return tuple((0, n) for n in p.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple((a, a + n) for a, n in zip(start, shape, strict=True))


def cut(whole: Tensor, p: Tensor) -> Tensor:
    """The part of a tensor shaped like p that is here; a view."""
    return whole[tuple(slice(*ends) for ends in box(p))]


# What is whole --------------------------------------------------------------------------------------------------------


def whole(t: Any) -> Tensor:
    """All of a tensor. Every process must ask."""
    return t.full_tensor() if is_sharded(t) else t


class Gathered(Mapping[str, Tensor]):
    """The parameters of a model by name. One that is sharded is gathered when asked for, and kept until the next is."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(reshard(model).named_parameters())
        self.last: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        p = self.parameters[name]
        if is_sharded(p) and name not in self.last:
            self.last = {}  # before the next is gathered
            self.last = {name: whole(p.detach())}
        return self.last[name] if is_sharded(p) else p

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def weights_of(model: nn.Module) -> Mapping[str, Tensor]:
    """The whole parameters of a model by name."""
    return Gathered(model) if any_sharded(model) else dict(model.named_parameters())


def alone(sums: Tensor) -> Tensor:
    """The sum over processes, where one holds all weights."""
    return sums


def edges_here(e: Edges, p: Tensor) -> Edges:
    """The edges of the part of p that is here."""
    shape = list(p.shape)
    for dim, (start, stop) in enumerate(box(p)):
        if (start, stop) != (0, shape[dim]):
            e = e.part(shape, dim, start, stop)
            shape[dim] = stop - start
    return e


def edges_on(e: Edges, device: torch.device) -> Edges:
    """The same edges, with their units on this device."""
    return e if e.head.device == device else replace(e, head=e.head.to(device), tail=e.tail.to(device))


def pieces(edges: Sequence[Edges], weights: Mapping[str, Tensor]) -> tuple[list[Edges], list[Tensor], Reduce]:
    """What of these parameters is here and counts, as edges and as values; and the sum over processes."""
    if not isinstance(weights, Gathered):
        return list(edges), [weights[e.name] for e in edges], alone
    found, parts, widest = [], [], widest_mesh(weights.parameters)
    for e in edges:
        p = weights.parameters[e.name]
        mine, here = edges_here(e, p), local(p.detach())
        if not counts(widest, p):
            mine, here = mine.part(here.shape, 0, 0, 0), here[:0]
        found.append(mine)
        parts.append(here)
    return found, parts, Together(widest, torch.float64)


def whole_copy(model: nn.Module) -> nn.Module:
    """The same modules with whole parameters, and without the hooks that gather and divide; to be run, not trained."""
    weights = Gathered(model)
    made: dict[int, Any] = {}

    def parameter(p: nn.Parameter, name: str) -> nn.Parameter:
        if id(p) not in made:
            made[id(p)] = nn.Parameter(weights[name], p.requires_grad) if is_sharded(p) else p
        return made[id(p)]

    def module(m: nn.Module, prefix: str) -> nn.Module:
        if id(m) in made:
            return made[id(m)]
        kind: Any = class_of(m)
        twin = made[id(m)] = kind.__new__(kind)
        old, new = vars(m), vars(twin)
        new.update(old)
        new["_parameters"] = {k: None if p is None else parameter(p, prefix + k) for k, p in m._parameters.items()}
        new["_buffers"] = {k: None if b is None else local(b).clone() for k, b in m._buffers.items()}
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            new[hooks] = type(old[hooks])({k: h for k, h in old[hooks].items() if not _is_torchs(h)})
        new["_modules"] = {k: None if n is None else module(n, f"{prefix}{k}.") for k, n in m._modules.items()}
        return twin

    return module(model, "")


def _is_torchs(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    name = getattr(hook, "__module__", None) if owner is None else type(owner).__module__
    return (name or "").startswith("torch.distributed.")


# How ranks meet -------------------------------------------------------------------------------------------------------


def widest_mesh(parameters: Mapping[str, Tensor]) -> Any:
    """The mesh of all processes that share these parameters, some of which are sharded; others are parts of it.

    Raises:
        ValueError: Parameters are on meshes that are not parts of one, or are not placed by shards and copies.
    """
    found: list[Any] = []
    for name, p in parameters.items():
        if is_sharded(p):
            tensor: Any = p
            if any(s.is_partial() for s in tensor.placements):
                raise ValueError(f"parameter {name!r} is a sum over processes ({tensor.placements}), not a value")
            found += [tensor.device_mesh] if tensor.device_mesh not in found else []
    widest = max(found, key=lambda mesh: mesh.size())
    for mesh in found:
        if mesh != widest and not (mesh.mesh_dim_names and {*mesh.mesh_dim_names} <= {*(widest.mesh_dim_names or ())}):
            raise ValueError(f"parameters are on two meshes, {widest} and {mesh}: one must be a part of the other")
    return widest


def counts(widest: Any, p: Any) -> bool:
    """Whether this process, of all that hold the same part of p, is the one that counts."""
    at: Sequence[int] = widest.get_coordinate()
    if not is_sharded(p):
        return not any(at)
    mesh, placements = p.device_mesh, p.placements
    if mesh == widest:
        return not any(k and s.is_replicate() for k, s in zip(at, placements, strict=True))
    sharded = {name for name, s in zip(mesh.mesh_dim_names, placements, strict=True) if not s.is_replicate()}
    return not any(k and name not in sharded for k, name in zip(at, widest.mesh_dim_names, strict=True))


def _groups(mesh: Any) -> list[Any]:
    """Groups in which all processes of a mesh meet, one after the other; None is everybody."""
    import torch.distributed as dist

    return [None] if mesh.size() == dist.get_world_size() else [mesh.get_group(k) for k in range(mesh.ndim)]


class Together:
    """Adds up tensors of all processes of a mesh.

    `doubt` is what this process has to say against going on: it is sent with the next sum, and then everybody raises.
    """

    def __init__(self, mesh: Any, dtype: torch.dtype) -> None:
        import torch.distributed as dist

        self.dist, self.dtype, self.doubt = dist, dtype, ""
        self.error: type[Exception] = RuntimeError
        self.groups = _groups(mesh)
        self.device = torch.device(mesh.device_type)  # not that of weights, if these are offloaded

    def __call__(self, sums: Tensor, asked: bool = False) -> Tensor:
        doubt = torch.full((1,), float(bool(self.doubt)), dtype=self.dtype, device=sums.device)
        sent = torch.cat([sums.reshape(-1).to(self.dtype), doubt]).to(self.device)
        for group in self.groups:
            self.dist.all_reduce(sent, group=group)
        if (asked or sums.device.type == "cpu") and float(sent[-1]) > 0:  # else nobody waits for the device
            self._refuse()
        return sent[:-1].to(sums).reshape(sums.shape)

    def agree(self, doubt: str = "") -> None:
        """Raises if anybody has a doubt."""
        self.doubt = doubt
        self(torch.zeros(0, dtype=self.dtype, device=self.device), asked=True)

    def _refuse(self) -> None:
        doubts: list[Any] = [f"rank {self.dist.get_rank()}: {self.doubt}" if self.doubt else ""]
        for group in self.groups:
            every: list[Any] = [None] * self.dist.get_world_size(group)
            self.dist.all_gather_object(every, doubts, group=group)
            doubts = [doubt for some in every for doubt in some]
        self.doubt = ""
        raise self.error(next(doubt for doubt in doubts if doubt))


def shared(parameters: Mapping[str, Tensor], value: Tensor) -> Tensor:
    """What the first of the processes that share parameters has: what each draws for itself differs."""
    if not any(map(is_sharded, parameters.values())):
        return value
    mesh = widest_mesh(parameters)
    return Together(mesh, torch.float64)(torch.zeros_like(value) if any(mesh.get_coordinate()) else value)


def require(parameters: Mapping[str, Tensor], doubt: str) -> None:
    """Raises a ValueError on all processes that share parameters, if one of them has a doubt."""
    if any(map(is_sharded, parameters.values())):
        together = Together(widest_mesh(parameters), torch.float64)
        together.error = ValueError
        together.agree(doubt)
    elif doubt:
        raise ValueError(doubt)


def _mark(t: Tensor) -> int:
    """A number that tensors share only if their bits do, but for chance."""
    bits = (torch.view_as_real(t) if t.is_complex() else t).contiguous().reshape(-1)
    bits, mark = bits.view(_BITS[bits.element_size()]), 0
    for part in bits.split(1 << 20):
        odd = 2 * torch.arange(len(part), device=part.device) + 1
        mark = (31 * mark + int((part.long() * odd).sum())) % (1 << 62)
    return mark


@torch.no_grad()
def require_copies(parameters: Mapping[str, Tensor], mesh: Any) -> None:
    """Processes that hold the same part of a parameter hold the same values of it.

    Raises:
        ValueError: With the rank and the parameter.
    """
    import torch.distributed as dist

    names = list(parameters)
    mine = torch.tensor([(hash(box(p)), _mark(local(p))) for p in parameters.values()]).to(mesh.device_type)
    for group in _groups(mesh):
        size = dist.get_world_size(group)
        every = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(every, mine, group=group)
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        for rank in range(size):
            for k, (place, mark) in enumerate(every[rank].tolist()):
                first, value = seen.setdefault((k, place), (rank, mark))
                if value != mark:
                    ranks = [dist.get_global_rank(group, r) if group is not None else r for r in (rank, first)]
                    raise ValueError(
                        f"rank {ranks[0]} has other values of {names[k]!r} than rank {ranks[1]}, which holds the same "
                        "part of it: broadcast them before the first step"
                    )
