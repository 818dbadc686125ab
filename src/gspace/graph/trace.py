"""Model → graph of operations: `torch.fx` where it can follow the forward pass, `torch.export` where it cannot.

Both front ends end in an `fx.Graph` whose nodes are calls of torch functions, tensor methods or leaf modules; the
rules of `operations.py` read either. A model is traced in training and in evaluation mode, because a branch on
`self.training` may hide a layer that shares a unit with the rest.
"""

import builtins
import inspect
import operator
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gspace.graph.draws import Draws, alone, others_draw
from gspace.graph.footprints import Footprints, tensors_in, unwritten

_ONE_AT_A_TIME = threading.RLock()  # while it lasts, tracing changes torch and builtins for all threads

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


def trace(model: nn.Module, example_input: Inputs | None = None) -> list[Traced]:
    """The graphs of `model` in training and evaluation mode; one if they are the same."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    refuse_lazy(model)
    model = unwrap(model)
    traced: list[Traced] = []
    seen: set[tuple[str, ...]] = set()
    for training in (True, False):
        with _ONE_AT_A_TIME, unwritten(model), _mode(model, training):
            one = _trace_undrawn(model, example_input)
        signature = one.signature()
        if signature not in seen:
            seen.add(signature)
            traced.append(one)
    return traced


def _trace_undrawn(model: nn.Module, example_input: Inputs | None) -> Traced:
    """Refuses a forward pass that draws; where another thread may have done that, one that is not always the same."""
    first, found = Draws(), []
    for _ in range(9):
        draws = Draws()
        try:
            found.append(_trace_once(model, example_input, draws))
        except TraceError:
            draws.forget()
            raise
        if not draws.seen:  # a model that draws does so each time
            return found[-1]
        if alone():
            break
    if not others_draw(draws):
        first.undo()
    elif len({one.signature() for one in found}) == 1:
        return found[0]
    raise TraceError(
        "the forward pass draws random numbers outside the graph, so other draws may take other branches; "
        "draw them from an activation (torch.rand_like) or switch the randomness off"
    )


def _trace_once(model: nn.Module, example_input: Inputs | None, draws: Draws) -> Traced:
    args, kwargs = _arguments(example_input)
    if example_input is not None:
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise TraceError(
                f"forward does not take this example_input: {error}. A tuple holds its arguments, a dict those with "
                "names; one argument that is itself a tuple or dict goes into a tuple."
            ) from error
    for m in model.modules():
        vars(m).pop("_compiled_call_impl", None)  # `model.compile()`; `unwritten` puts it back
    try:
        traced = _symbolic(model, example_input)
    except TraceError:
        raise
    except Exception as error:
        if example_input is None:
            raise TraceError(
                f"cannot follow {_where(error)}: {_first_line(error)}\n"
                "Symbolic tracing sees no values. Pass example_input= (a batch the model accepts) to use real shapes."
            ) from error
        draws.forget()  # as if only the graph that is taken had been followed
        return _exported(model, args, kwargs)
    if example_input is None:
        return traced
    try:
        _propagate_shapes(traced, args, kwargs)
    except Exception:  # noqa: BLE001 - sizes that depend on values, several devices, or the example does not fit
        _refuse_misfit(model, args, kwargs)
        try:
            return _exported(model, args, kwargs)
        except TraceError:
            pass  # what was followed without shapes is right, only less is known of it
    return traced


def _refuse_misfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        try:
            model(*args, **kwargs)
        except Exception as error:
            raise TraceError(f"the model does not accept this example_input: {_first_line(error)}") from error


def _arguments(example_input: Inputs | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match example_input:
        case None:
            return (), {}
        case Tensor():
            return (example_input,), {}
        case Mapping():
            return (), dict(example_input)
        case tuple() | list():
            return tuple(example_input), {}
    raise TypeError(f"example_input must be a Tensor, a tuple or a dict of inputs, got {type(example_input).__name__}")


class _Shell(nn.Module):
    """Calls `model` as the example does: its tensors are inputs of the graph, all else in it stays what it is."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...] | dict[str, Any]) -> None:
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


def _refuse_written(name: str | None) -> None:
    if name is not None:
        raise TraceError(f"the forward pass writes into parameter {name!r}: do that outside of forward")


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


def _symbolic(model: nn.Module, example_input: Inputs | None) -> Traced:
    args, kwargs = _arguments(example_input)
    shell = _Shell(model, _required(model) if example_input is None else kwargs or args)
    footprints = Footprints(model)
    try:
        with _differentiable(model), footprints, _passing_for_tensors():
            graph = _Tracer().trace(shell)
            kept = dict.fromkeys(x.node for x in tensors_in(model, fx.Proxy))
            if example_input is None:
                _refuse_any_number(model)
    finally:
        _refuse_written(footprints.written())
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


def _propagate_shapes(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
        torch.func.functional_call(body, state, (meta(kwargs or args),), tie_weights=True)


class _Kept(nn.Module):
    """A model that also returns the activations it leaves in attributes, for others to read: as good as an output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.before = {id(x) for x in tensors_in(model, Tensor)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        return result, [x for x in tensors_in(self.model, Tensor) if id(x) not in self.before]


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")  # an output of `_Kept`
            program = torch.export.export(_Kept(model), args, kwargs, strict=False)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"cannot follow {_where(error)}: {_first_line(error)}\n"
            "Neither symbolic tracing nor torch.export can: where forward branches on values or checks them, take that "
            "out of it, or analyze the parts of the model one by one."
        ) from error
    state: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    signature = program.graph_signature
    written = getattr(signature, "parameters_to_mutate", {})
    _refuse_written(next((name.removeprefix("model.") for name in written.values()), None))
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found = {node: state.get(name.removeprefix("model.")) for node, name in lifted.items()}
    tensors = {node: tensor for node, tensor in found.items() if tensor is not None}
    return Traced(program.graph, program.graph_module, tensors, prefix="model")


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {m: m.training for m in model.modules()}
    try:
        # Set flags directly: `train()` may be overridden to do work.
        for m in before:
            m.training = training
        yield
    finally:
        for m, flag in before.items():
            m.training = flag


def _where(error: BaseException) -> str:
    """The innermost line of user code in the traceback of `error`."""
    ours = (torch.__path__[0], __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    if not frames:
        return "the forward pass"
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`"


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
