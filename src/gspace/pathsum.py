"""Sums over all paths of a network, by one forward pass: Σ_paths |v(path)|^p = Σ_outputs f_{|w|^p}(1).

The graph of the model (`graph/trace.py`) is run on one sample of ones, every operation by its rule in `pathrules.py`.
As its derivatives are sums over paths too, autograd through this pass gives gradients of path norms and Path-SGD's κ.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gspace.graph.arithmetic import NOT_HOMOGENEOUS, flatten_arguments, pinned
from gspace.graph.operations import FUNCTIONS, MODULES
from gspace.graph.trace import trace
from gspace.graph.traced import Inputs, Traced, refuse_lazy, unwrap
from gspace.graph.walk import canonical, in_place
from gspace.pathrules import (
    CHOSEN,
    RULES,
    Call,
    PathError,
    Power,
    common_exponent,
    copied,
    moved,
    pad,
    power,
    same,
    windows,
)

# What the sum over paths needs to know of a module beyond what the rescaling needs.
_ALSO = {"batch_norm": ("eps",), "leaky_relu": ("negative_slope",), "rrelu": ("lower", "upper")}


@dataclass(frozen=True)
class PathGraph:
    """A model ready for path sums. Parameters are read from it at every pass, so a graph serves a whole training.

    Attributes:
        model: The model.
        traced: Its graph in evaluation mode.
        shapes: Shapes of the inputs: one, or a tuple or dict of them.
        samples: How many samples these are.
    """

    model: nn.Module
    traced: Traced
    shapes: Any
    samples: int

    def sum(self, p: float = 2, powers: Mapping[int, Power] | None = None) -> Power:
        """Σ_paths |v|^p as a scalar `Power`; `powers` replaces |w|^p by the `id` of a parameter."""
        return _Pass(self, p, powers or {}).run()


def path_graph(model: nn.Module, example_input: Inputs | None = None) -> PathGraph:
    """Traces `model` for path sums.

    Args:
        model: Any module without forward hooks.
        example_input: A batch the model accepts; only shapes are read. Without one, the model must begin with a linear
            layer, whose width says what a sample is, and not tell a vector from a sequence of one.

    Raises:
        PathError: The shape of a sample is not known.
        TraceError: The forward pass cannot be followed.
    """
    refuse_lazy(model)
    for name, m in unwrap(model).named_modules():
        if m._forward_hooks or m._forward_pre_hooks:
            raise PathError(f"a forward hook on {name or 'the model'!r} may change anything inside it: remove it first")
    example_input = as_input_of(model, example_input)
    traced = trace(model, example_input)[-1]  # the last is that of evaluation mode
    if example_input is None:
        return _unambiguous(model, traced, _width(traced))
    if not isinstance(traced.module, fx.GraphModule):
        return PathGraph(model, traced, _shapes(example_input, 1), 1)
    batch = next((x.shape[0] for x in flatten_arguments(example_input) if isinstance(x, Tensor) and x.dim()), 1)
    return PathGraph(model, traced, _shapes(example_input, None), batch)  # torch.export has fixed the sizes


def as_input_of(model: nn.Module, inputs: Any) -> Any:
    """`inputs` with floating-point tensors in the dtype of the model: only their shapes matter."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, plain)


def _shapes(inputs: Any, batch: int | None) -> Any:
    """The shapes of the tensors in `inputs`, with another batch size."""

    def sample(x: Tensor) -> Tensor:
        shape = x.shape if batch is None or not x.dim() else (batch, *x.shape[1:])
        return torch.empty(shape, device="meta")

    return pytree.tree_map_only(Tensor, sample, inputs)


def _unambiguous(model: nn.Module, traced: Traced, width: int) -> PathGraph:
    """The graph along one vector, unless the model also reads a sequence of one vector and has another sum there.

    Both sums are polynomials in the weights. They are compared at random ones, where different polynomials differ.
    Where they are the same, the sum is that of a sequence too, and has its invariance.
    """
    vector, sequence = (
        PathGraph(model, traced, (torch.empty(1, *more, width, device="meta"),), 1) for more in ((), (1,))
    )
    generator = torch.Generator().manual_seed(0)
    weights = {id(p): torch.rand(p.shape, generator=generator, device="cpu").to(p.device) for p in model.parameters()}
    powers = {key: Power(0.5 + w, w.new_zeros(()), activation=False) for key, w in weights.items()}
    with torch.no_grad():
        one = vector.sum(1, powers)
        try:
            other = sequence.sum(1, powers)
        except (ValueError, ArithmeticError):  # such an input the model does not accept
            return vector
        exponent = common_exponent(one, other)
        # 250 layers of float32 roundings are some 1e-6.
        if torch.allclose(one.at(exponent), other.at(exponent), rtol=1e-4, atol=0):
            return vector
    raise PathError(
        "the sum over paths depends on whether a sample is a vector or a sequence of them: "
        "pass example_input= (a batch the model accepts)"
    )


def _width(traced: Traced) -> int:
    """Width of the linear layer the model begins with."""
    inputs = [n for n in traced.graph.nodes if n.target is operator.getitem and n.args[0].op == "placeholder"]
    for node in traced.graph.nodes if len(inputs) < 2 else ():
        if node.op == "call_module":
            module = traced.called(node)
            if isinstance(module, nn.Linear):
                return module.in_features
            if any(True for _ in module.parameters()):
                break
    raise PathError(
        "the sum over paths depends on the size of a sample: pass example_input= (a batch the model accepts)"
    )


class _Pass:
    def __init__(self, graph: PathGraph, p: float, powers: Mapping[int, Power]) -> None:
        self.graph, self.p = graph, p
        floats = [t for t in graph.model.parameters() if t.is_floating_point()]
        self.device = floats[0].device if floats else torch.device("cpu")
        self.dtype = torch.float64 if any(t.dtype == torch.float64 for t in floats) else torch.float32
        self.powers = {
            key: replace(x, values=x.values.to(self.dtype), exponent=x.exponent.to(self.dtype))
            for key, x in powers.items()
        }

    def run(self) -> Power:
        nodes: dict[fx.Node, Any] = {}
        traced, supplied = self.graph.traced, iter(self._inputs())
        with torch.autocast(self.device.type, enabled=False):
            for node in traced.graph.nodes:
                nodes[node] = self._node(node, nodes, supplied)
                if node.op in ("call_method", "call_function") and node.all_input_nodes and in_place(node.target):
                    _refuse_stale_views(traced, node)
                    nodes[node.all_input_nodes[0]] = nodes[node]
        outputs = [x for x in flatten_arguments(nodes[node]) if isinstance(x, Power)]
        if not outputs:
            raise PathError("no output of the model depends on its input")
        exponent = common_exponent(*outputs)
        total = torch.stack([x.at(exponent).sum() for x in outputs]).sum()
        return Power(total / self.graph.samples, exponent).renormalized()

    def _inputs(self) -> list[Any]:
        """What the placeholders receive: all inputs in one (symbolic trace), or one each (`torch.export`)."""

        def ones(x: Tensor) -> Power:
            one = torch.ones(x.shape, dtype=self.dtype, device=self.device)
            return Power(one, one.new_zeros(()))

        shapes, traced = self.graph.shapes, self.graph.traced
        inputs = pytree.tree_map_only(Tensor, ones, (shapes,) if isinstance(shapes, Tensor) else shapes)
        supplied = flatten_arguments(inputs) if isinstance(traced.module, fx.GraphModule) else [inputs]
        if len(supplied) != sum(n.op == "placeholder" and n.name not in traced.tensors for n in traced.graph.nodes):
            raise PathError("the model makes tensors of its own in forward: register them as buffers")
        return supplied

    def raised(self, t: Any) -> Power:
        """A constant as |t|^p; one `Power` per parameter, so that all its uses add up in its gradient."""
        if isinstance(t, Power):
            return t
        if not isinstance(t, Tensor):
            t = torch.full((), t, dtype=self.dtype, device=self.device)
        known = self.powers.get(id(t)) if isinstance(t, nn.Parameter) else None
        if known is None:
            known = power((t.abs() if t.is_complex() else t).to(self.dtype), self.p)
            if isinstance(t, nn.Parameter):
                self.powers[id(t)] = known
        return known

    def _constant(self, t: Any) -> Any:
        return self.raised(t) if isinstance(t, nn.Parameter) else t

    def _node(self, node: fx.Node, nodes: dict[fx.Node, Any], supplied: Any) -> Any:
        traced = self.graph.traced
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: nodes[n])
        if node.op == "placeholder":
            return self._constant(traced.tensors[node.name]) if node.name in traced.tensors else next(supplied)
        if node.op == "get_attr":
            return self._constant(traced.attribute(node))
        if node.op == "output":
            return args
        if node.op == "call_module":
            return self._module(node, traced.called(node), args, kwargs)
        run = node.target if node.op == "call_function" else lambda x, *a, **k: getattr(x, str(node.target))(*a, **k)
        known = not any(isinstance(x, Power) or x is CHOSEN for x in flatten_arguments([args, kwargs]))
        if known or _picks(node, args):
            try:
                return run(*args, **kwargs)  # type: ignore[operator]
            except (TypeError, AttributeError, IndexError, KeyError, RuntimeError, ValueError, AssertionError) as error:
                raise PathError(
                    f"no sum over paths: {_where(traced, node)} fails on inputs of these sizes ({error}). "
                    "Pass example_input=, a batch the model accepts."
                ) from error
        if "input" in kwargs:
            args = (kwargs["input"], *args)
        call = Call(self.p, canonical(node.target), _where(traced, node), run, self.raised)  # type: ignore[arg-type]
        return self._apply(call, args, {key: value for key, value in kwargs.items() if key != "input"})

    def _module(self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name, arguments = MODULES.get(type(module), (type(module).__name__, None))

        def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **held: Any) -> Any:
            given = {key: t for key, t in (("weight", weight), ("bias", bias)) if t is not None}
            return torch.func.functional_call(module, given, (x, *args[1:]), kwargs)

        call = Call(self.p, name, _where(self.graph.traced, node), run, self.raised)
        if arguments is None:
            raise call.refuse("no rule is known for it")
        held = {**arguments(module), **{key: getattr(module, key) for key in _ALSO.get(name, ())}}
        if RULES.get(name) in (moved, windows, pad):  # the module itself knows its arguments
            held = {key: value for key, value in held.items() if key == "value"}
        return self._apply(call, args[:1], held)

    def _apply(self, call: Call, args: Any, kwargs: Any) -> Any:
        rule = RULES.get(call.name)
        if any(x is CHOSEN for x in flatten_arguments([args, kwargs])):
            raise call.refuse("which entries are chosen depends on the input")
        if rule is None:
            raise call.refuse(NOT_HOMOGENEOUS if FUNCTIONS.get(call.name) is pinned else "no rule is known for it")
        try:
            return rule(call, *args, **kwargs)
        except (TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
            raise call.refuse(f"called in a way no rule is known for ({error})") from error


def _where(traced: Traced, node: fx.Node) -> str:
    """The innermost module a node lies in, or the node."""
    return repr(next(reversed(traced.within(node)), "") or node.name)


def _refuse_stale_views(traced: Traced, node: fx.Node) -> None:
    """What is written changes every other name of the memory, too: refused if one of them is read again."""
    if RULES.get(canonical(node.target)) is same:
        return
    later, onward = set(), node.next
    while onward.op != "root":
        later.add(onward)
        onward = onward.next
    written = base = node.all_input_nodes[0]
    while _is_view(base):
        base = base.all_input_nodes[0]
    names = [base]
    for name in names:  # grows
        names += [user for user in name.users if _is_view(user) and user not in later]
    for name in names:
        if name is not written and not later.isdisjoint(name.users):
            raise PathError(
                f"{_where(traced, node)} writes through a view of {name.name!r}, which is read later: write a copy"
            )


def _is_view(node: fx.Node) -> bool:
    """Whether a node may share the memory of its first input."""
    name = canonical(node.target) if node.op.startswith("call") and node.op != "call_module" else ""
    return name != "clone" and RULES.get(name) in (moved, copied) and bool(node.all_input_nodes)


def _picks(node: fx.Node, args: Any) -> bool:
    """Reads an entry or field of several activations, rather than of one."""
    return node.target in (operator.getitem, getattr) and not (isinstance(args[0], Power) or args[0] is CHOSEN)
