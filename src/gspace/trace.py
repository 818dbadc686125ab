"""Model → graph of operations: `torch.fx` where it can follow the forward pass, `torch.export` where it cannot.

Both front ends end in an `fx.Graph` whose nodes are calls of torch functions, tensor methods or leaf modules; the
rules of `operations.py` read either. A model is traced in training and in evaluation mode, because a branch on
`self.training` may hide a layer that shares a unit with the rest.
"""

import inspect
import operator
import random
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

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
    """

    graph: fx.Graph
    module: nn.Module
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    prefix: str = ""


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
        with _untouched(model), _mode(model, training):
            one = _trace_once(model, example_input)
        signature = tuple(f"{n.op} {n.target} {n.args} {n.kwargs}" for n in one.graph.nodes)
        if signature not in seen:
            seen.add(signature)
            traced.append(one)
    return traced


def _trace_once(model: nn.Module, example_input: Inputs | None) -> Traced:
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
        vars(m).pop("_compiled_call_impl", None)  # `model.compile()`; `_untouched` puts it back
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
        return _exported(model, args, kwargs)
    if example_input is not None:
        _propagate_shapes(traced, args, kwargs)
    return traced


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
    """Calls `model` with as many inputs as it requires: defaults, *args and root modules need no special case."""

    def __init__(self, model: nn.Module, keys: list[Any], by_name: bool) -> None:
        super().__init__()
        self.model = model
        self.keys = keys
        self.by_name = by_name

    def forward(self, inputs: Any) -> Any:
        if self.by_name:
            return self.model(**{key: inputs[key] for key in self.keys})
        return self.model(*[inputs[key] for key in self.keys])


def _symbolic(model: nn.Module, example_input: Inputs | None) -> Traced:
    args, kwargs = _arguments(example_input)
    if example_input is None:
        required = [
            p
            for p in inspect.signature(model.forward).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        keys: list[Any] = list(range(max(len(required), 1)))
    else:
        keys = list(kwargs) or list(range(len(args)))
    shell = _Shell(model, keys, by_name=bool(kwargs))
    with _no_draws(), _differentiable(model):
        graph = _Tracer().trace(shell)
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = ((output.args[0], *_kept(model)),)
    return Traced(graph, shell, prefix="model")


def _kept(model: nn.Module) -> list[fx.Node]:
    """Activations that the forward pass left in attributes, for others to read: as good as an output."""
    values = [value for m in model.modules() for value in vars(m).values()]
    inside = [x for v in values if isinstance(v, (list, dict, set)) for x in (v.values() if isinstance(v, dict) else v)]
    return list(dict.fromkeys(x.node for x in (*values, *inside) if isinstance(x, fx.Proxy)))


Own = dict[str, tuple[Any, Any]]  # attributes of a module, and a copy of those that are containers


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Takes back what a forward pass writes while it is traced: into buffers, attributes and containers in them."""
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    owners: list[tuple[dict[str, Any], Own]] = []
    for m in model.modules():
        own = vars(m)
        owners.append((own, {k: (v, v.copy() if isinstance(v, (list, dict, set)) else v) for k, v in own.items()}))
    try:
        yield
    finally:
        for own, before in owners:
            for name in own.keys() - before.keys():
                del own[name]
            for name, (value, content) in before.items():
                own[name] = value
                if isinstance(value, list):
                    value[:] = content
                elif isinstance(value, (dict, set)) and not _same_content(value, content):
                    value.clear()
                    value.update(content)
        with torch.no_grad():
            for b, version, content in buffers:
                if b._version != version:
                    b.copy_(content)


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return bool(a == b)
    return list(a) == list(b) and all(x is y for x, y in zip(a.values(), b.values(), strict=True))


@contextmanager
def _no_draws() -> Iterator[None]:
    """Refuses a forward pass that draws numbers while it is traced: it would be followed along one draw only."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(legacy=False)
    try:
        yield
        after = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(legacy=False)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
    if str(after) != str(states) or not torch.equal(after[0], states[0]):
        raise TraceError(
            "the forward pass draws random numbers outside the graph, so other draws may take other branches; "
            "draw them from an activation (torch.rand_like) or switch the randomness off"
        )


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


class _Tracer(fx.Tracer):
    """Stops at torch's own layers, looks through containers, wrappers and user modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        return type(m).__module__.startswith(("torch.nn", "torch.ao")) and not isinstance(m, containers)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = unwrap(m)
        return super().call_module(inner, forward if inner is m else inner.__call__, args, kwargs)


def _propagate_shapes(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes `node.meta["val"]` by running the graph on the meta device: no memory, no arithmetic, no side effect."""

    def meta(x: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), x)

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
    inputs: Any = {k: meta(x) for k, x in kwargs.items()} if kwargs else tuple(meta(x) for x in args)
    try:
        with torch.no_grad():
            torch.func.functional_call(body, state, (inputs,), tie_weights=True)
    except Exception as error:
        raise TraceError(f"the model does not accept this example_input: {_first_line(error)}") from error


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    try:
        with _no_draws():
            program = torch.export.export(model, args, kwargs, strict=False)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"cannot follow {_where(error)}: {_first_line(error)}\n"
            "Neither symbolic tracing nor torch.export can: take the data-dependent branch out of forward, "
            "or analyze the parts of the model one by one."
        ) from error
    state: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    signature = program.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return Traced(
        program.graph, program.graph_module, {node: state[name] for node, name in lifted.items() if name in state}
    )


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
