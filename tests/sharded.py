"""Small networks, and the ways in which their parameters are divided among processes. Runs on every rank."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import gspace

Batch = tuple[dict[str, Tensor], Callable[[Any], Tensor]]  # inputs of the model, and the loss of its output


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        make: Builds it.
        batch: Draws inputs and targets, of 8 samples.
        blocks: Names of the modules that FSDP2 gathers one by one.
        plan: How tensor parallelism divides it.
        joint: Whether all ranks take the same batch: what BatchNorm does depends on it.
        idle: Parameters that BatchNorm takes out again. Their gradient is 0 but for rounding.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], tuple[Tensor, Tensor]]
    blocks: tuple[str, ...]
    plan: dict[str, str]
    joint: bool = False
    idle: tuple[str, ...] = ()


def mlp() -> nn.Module:
    """Fewer outputs than four ranks; eight units, because torch's tensor parallelism runs equal parts only."""
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    """Groups, and fewer filters than ranks in one place."""
    layers: list[nn.Module] = [nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    layers += [nn.Conv2d(6, 9, 3, groups=3), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 3, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, num_key_value_heads=4, **sizes, use_cache=False))


def _vectors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5, dtype=dtype), torch.randint(3, (8,))


def _images(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 2, 7, 7, dtype=dtype), torch.randint(3, (8,))


def _tokens(_: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (8, 6))
    return tokens, tokens


_PARTS = {f"{part}_proj": "columns" for part in ("q", "k", "v", "gate", "up")} | {"o_proj": "rows", "down_proj": "rows"}
_LAYER = {("mlp." if part[0] in "gud" else "self_attn.") + part: how for part, how in _PARTS.items()}
NETWORKS = {
    "mlp": Network(mlp, _vectors, ("0", "2"), {"0": "columns", "2": "rows"}),
    "cnn": Network(cnn, _images, ("0", "3"), {}, joint=True, idle=("3.bias",)),
    "llama": Network(
        llama,
        _tokens,
        ("model.layers.0", "model.layers.1"),
        {f"model.layers.{k}.{part}": how for k in (0, 1) for part, how in _LAYER.items()},
    ),
}


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out if isinstance(out, Tensor) else out.logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = outputs(model, x)
    if out.dim() == 3:  # tokens: the next one
        out, y = out[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    return nn.functional.cross_entropy(out, y)


# How it is divided ----------------------------------------------------------------------------------------------------


def fsdp(model: nn.Module, network: Network, **options: Any) -> nn.Module:
    for name in network.blocks:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def hybrid(model: nn.Module, network: Network) -> nn.Module:
    """Two copies, each divided in half."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "parts"))
    return fsdp(model, network, mesh=mesh)


def mixed(model: nn.Module, network: Network) -> nn.Module:
    return fsdp(model, network, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True))


def offload(model: nn.Module, network: Network) -> nn.Module:
    return fsdp(model, network, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor(model: nn.Module, network: Network, mesh: Any = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",)) if mesh is None else mesh
    styles = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
    parallelize_module(model, mesh, {name: styles[how] for name, how in network.plan.items() if how in styles})
    return model


def both(model: nn.Module, network: Network) -> nn.Module:
    """FSDP2 of what tensor parallelism has divided."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp(tensor(model, network, mesh["tensor"]), network, mesh=mesh["data"])


def pairs(model: nn.Module, network: Network) -> nn.Module:
    """Tensor parallelism of two ranks, several times side by side: they meet in pairs, not all at once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    return tensor(model, network, mesh["tensor"])


WAYS: dict[str, Callable[[nn.Module, Network], nn.Module]] = {
    "fsdp": fsdp,
    "hybrid": hybrid,
    "mixed": mixed,
    "offload": offload,
    "tensor": tensor,
    "both": both,
    "pairs": pairs,
}


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, gspace.Analysis]:
    """A network, the same on every rank, and its analysis."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = network.make().to(dtype)
    return model, gspace.analyze(model, network.batch(dtype)[0], residual="pin")


def divide(model: nn.Module, name: str, way: str) -> nn.Module:
    return WAYS[way](model, NETWORKS[name])


def whole(model: nn.Module) -> list[Tensor]:
    """All parameters, gathered."""
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [v.detach().clone() for v in values]


OPTIMIZERS: dict[str, Callable[[nn.Module, gspace.Analysis], Optimizer]] = {
    "gsgd": lambda m, a: gspace.GSGD(m, 0.1, analysis=a),
    "gsgd-momentum": lambda m, a: gspace.GSGD(m, 0.05, 0.9, weight_decay=1e-2, analysis=a),
    "gsgd-clipped": lambda m, a: gspace.GSGD(m, 0.05, 0.9, max_path_grad_norm=0.1, analysis=a),
    "gsgd-paper": lambda m, a: gspace.GSGD(m, 0.05, 0.9, batch_norm="paper", allocation="spread", analysis=a),
    "gsgd-exact": lambda m, a: gspace.GSGD(m, 0.05, 0.9, batch_norm="exact", analysis=a),
    "adamw": lambda m, a: gspace.InGSpace(m, torch.optim.AdamW, lr=3e-3, analysis=a),
    "in-sgd": lambda m, a: gspace.InGSpace(m, torch.optim.SGD, lr=0.05, analysis=a),
    "path": lambda m, a: gspace.PathSGD(m, 0.01, analysis=a, example_input=torch.zeros(1, 5)),
    "path-momentum": lambda m, a: gspace.PathSGD(m, 0.01, 0.9, analysis=a, example_input=torch.zeros(1, 5)),
    "frozen": lambda m, a: gspace.FrozenSkeletonSGD(m, 0.05, analysis=a),
    "frozen-momentum": lambda m, a: gspace.FrozenSkeletonSGD(m, 0.05, momentum=0.9, analysis=a),
}


def share(name: str, way: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What of a joined batch this rank takes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if NETWORKS[name].joint or way in ("tensor", "pairs"):
        return x, y
    count, mine = (size // 2, rank // 2) if way == "both" else (size, rank)
    return x.chunk(count)[mine], y.chunk(count)[mine]


def train(model: nn.Module, optimizer: Optimizer, name: str, steps: int, way: str | None = None, seed: int = 1) -> None:
    """Steps on batches that a seed draws; divided, if there is a way, among ranks."""
    draw = torch.random.fork_rng([])
    with draw:
        torch.manual_seed(seed)
        dtype = next(model.parameters()).dtype
        for _ in range(steps):
            x, y = NETWORKS[name].batch(dtype)
            x, y = (x, y) if way is None else share(name, way, x, y)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def gap(name: str, way: str, optimizer: str, dtype: torch.dtype, steps: int = 40) -> float:
    """How far training on divided parameters is from training in one process on the joined batch, at most.

    AdamW in float32 makes steps as long as any other of a gradient that is rounding alone: a bias before BatchNorm goes
    where that takes it. It is left out there, and what the networks compute in training is compared instead.
    """
    model, analysis = make(name, dtype)
    one, start = deepcopy(model), whole(model)
    divide(model, name, way)
    train(model, OPTIMIZERS[optimizer](model, analysis), name, steps, way)
    train(one, OPTIMIZERS[optimizer](one, analysis), name, steps)
    assert apart(whole(one), start) > 1e-3, "nothing was trained"
    noise = NETWORKS[name].idle if (optimizer, dtype) == ("adamw", torch.float32) else ()
    kept = [key not in noise for key, _ in one.named_parameters()]
    found, wanted = ([p for p, keep in zip(whole(net), kept, strict=True) if keep] for net in (model, one))
    if noise:
        assert all(float(one.get_parameter(key).grad.abs().max()) < 1e-7 for key in noise)
        x, _ = NETWORKS[name].batch(dtype)
        found, wanted = [*found, outputs(model, x).detach()], [*wanted, outputs(one, x).detach()]
    return apart(found, wanted)


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
