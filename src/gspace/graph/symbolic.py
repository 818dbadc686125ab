"""The `torch.fx` front end: the forward pass is run on proxies, which record every operation."""

import builtins
import inspect
import operator
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gspace.graph.footprints import Footprints, tensors_in
from gspace.graph.traced import Traced, TraceError, refuse_written, unwrap

Example = tuple[Any, ...] | dict[str, Any]


class _Shell(nn.Module):
    """Calls `model` as the example does: its tensors are inputs of the graph, all else in it stays what it is."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model = model
        self.example = example

    def forward(self, inputs: Any) -> Any:
        def at(path: tuple[Any, ...], leaf: Any) -> Any:
            value = inputs
            for key in path if isinstance(leaf, Tensor) else ():
                match key:
                    case pytree.SequenceKey():
                        value = value[key.idx]
                    case pytree.MappingKey():
                        value = value[key.key]
                    case _:
                        value = getattr(value, key.name)
            return value if isinstance(leaf, Tensor) else leaf

        given = pytree.tree_map_with_path(at, self.example)
        return self.model(**given) if isinstance(given, dict) else self.model(*given)


def _required(model: nn.Module) -> tuple[Any, ...]:
    """As many tensors as `forward` must be given, one at least."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (torch.empty(0, device="meta"),) * max(1, sum(p.default is p.empty for p in positional))


def _refuse_any_number(model: nn.Module) -> None:
    """A `forward(*inputs)` that can be called with one input and with two: with how many is not known."""
    if all(p.kind is not p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()):
        return
    try:
        _Tracer().trace(_Shell(model, (*_required(model), torch.empty(0, device="meta"))))
    except Exception:  # noqa: BLE001 - whatever stops it
        return
    raise TraceError("forward takes any number of inputs (*): pass example_input=, a tuple of those it is called with")


def symbolic(model: nn.Module, example: Example | None) -> Traced:
    """The graph of `model`, called with the arguments of `example`, or else with as many tensors as it requires."""
    shell = _Shell(model, _required(model) if example is None else example)
    footprints = Footprints(model)
    try:
        with _differentiable(model), footprints, _passing_for_tensors():
            graph = _Tracer().trace(shell)
            kept = dict.fromkeys(x.node for x in tensors_in(model, fx.Proxy))
            if example is None:
                _refuse_any_number(model)
    finally:
        refuse_written(footprints.written())
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = ((output.args[0], *kept),)
    return Traced(graph, shell, prefix="model", footprints=footprints)


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Records where constants come from: a value computed from parameters while tracing has a gradient."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    try:
        with torch.enable_grad():
            for p in frozen:
                p.requires_grad_(True)
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


class _Proxy(fx.Proxy):
    """Keeps `y *= z` apart from `y = y * z`: other names of y change too."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


_NUMBERS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "item", "tolist", "element_size"})


@contextmanager
def _passing_for_tensors() -> Iterator[None]:
    """`isinstance(x, Tensor)` of a proxy is True in user code; torch, fx and all that is not Python see the proxy."""
    original = builtins.isinstance
    tensor = torch.empty(0)

    def answer(x: Any, kinds: Any, /) -> bool:
        if type(x) is not _Proxy or (x.node.op == "call_method" and x.node.target in _NUMBERS):
            return original(x, kinds)
        asking = sys._getframe(1)
        inside = asking.f_globals.get("__name__", "").split(".")[0] in ("torch", "gspace")
        return original(x, kinds) or ((not inside or asking.f_code.co_name == "is_tensor") and original(tensor, kinds))

    builtins.isinstance = answer
    try:
        yield
    finally:
        builtins.isinstance = original


class _Tracer(fx.Tracer):
    """Stops at torch's own layers, looks through containers, wrappers and user modules."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        return type(m).__module__.startswith(("torch.nn", "torch.ao")) and not isinstance(m, containers)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:  # another thread may run this very model
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:  # every module of the process comes by here
            return forward(*args, **kwargs)
        inner = unwrap(m)
        return super().call_module(inner, forward if inner is m else inner.__call__, args, kwargs)


def propagate_shapes(traced: Traced, example: Example) -> None:
    """Writes `node.meta["val"]` by running the graph on the meta device: no memory, no arithmetic, no side effect."""

    def meta(x: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), x)

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            n.meta["val"] = result
            return result

    class Body(nn.Module):
        def __init__(self, body: fx.GraphModule) -> None:
            super().__init__()
            self.body = body

        def forward(self, inputs: Any) -> Any:
            return Run(self.body).run(inputs)

    body = Body(fx.GraphModule(traced.module, traced.graph))
    state = {name: meta(x) for name, x in [*body.named_parameters(), *body.named_buffers()]}
    with torch.no_grad():
        torch.func.functional_call(body, state, (meta(example),), tie_weights=True)
