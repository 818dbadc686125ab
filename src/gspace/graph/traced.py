"""What tracing a model gives: a graph of operations, and how its nodes are resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from gspace.graph.footprints import Footprints

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


class TraceError(ValueError):
    """The forward pass of a model could not be followed; the message names the line and the way out."""


@dataclass(frozen=True)
class Traced:
    """One graph of a model's forward pass.

    Attributes:
        graph: The operations in topological order.
        module: Resolves the targets of `call_module` and `get_attr` nodes.
        tensors: Parameters and buffers that `torch.export` lifted to placeholders, by node name.
        prefix: What stands in front of the model's own module names.
        footprints: Which parameters and buffers the constants in the graph were computed from.
    """

    graph: fx.Graph
    module: nn.Module
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    prefix: str = ""
    footprints: Footprints | None = None

    def attribute(self, node: fx.Node) -> Any:
        """What a `get_attr` node reads."""
        owner, _, name = str(node.target).rpartition(".")
        return getattr(self.module.get_submodule(owner), name)

    def called(self, node: fx.Node) -> nn.Module:
        """What a `call_module` node calls."""
        return self.module.get_submodule(str(node.target))

    def within(self, node: fx.Node) -> list[str]:
        """Names of the modules a node lies in, outermost first."""
        paths = [str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values()]
        if node.op == "call_module" and str(node.target) not in paths:
            paths.append(str(node.target))
        return [path.removeprefix(self.prefix).removeprefix(".") for path in paths]

    def signature(self) -> tuple[str, ...]:
        """All operations with their arguments and constants, in words."""
        held = [n.target for n in self.graph.nodes if n.op == "get_attr" and "_tensor_constant" in str(n.target)]
        constants = [getattr(self.module, name, None) for name in held]
        return (*(f"{n.op} {n.target} {n.args} {n.kwargs}" for n in self.graph.nodes), *map(str, constants))


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel`."""
    wrappers = {
        "OptimizedModule": "_orig_mod",
        "DataParallel": "module",
        "DistributedDataParallel": "module",
        "AveragedModel": "module",
    }
    while type(model).__name__ in wrappers and type(model).__module__.startswith("torch."):
        model = getattr(model, wrappers[type(model).__name__])
    return model


def refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise TraceError(f"parameter {lazy[0]!r} has no shape yet (lazy module): run one batch through the model first")


def refuse_written(name: str | None) -> None:
    if name is not None:
        raise TraceError(f"the forward pass writes into parameter {name!r}: do that outside of forward")
