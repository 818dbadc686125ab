"""Graph of operations → uses of parameters, ties and pins: one pass in topological order, one rule per node."""

import builtins
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from gspace.graph.arithmetic import flatten_arguments, opaque
from gspace.graph.footprints import Footprints
from gspace.graph.layers import linear
from gspace.graph.operations import FUNCTIONS, INPLACE, KEEPS_BATCH, MODULES
from gspace.graph.spaces import Activation, Buffer, Parts, Walk, Weight, grounded
from gspace.graph.traced import Traced

# F.threshold calls itself so; `y += z` is an addition that also writes.
_ALIASES = {"_threshold": "threshold", "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_NAMESPACES = (torch, F, operator, builtins, torch.special)


def canonical(target: Any) -> str:
    """Name of the operation behind a call: `F.relu`, `torch.relu`, `x.relu_()` and `aten.relu.default` are "relu"."""
    if target is F.batch_norm:  # its arguments come in another order than torch's own
        return "functional_batch_norm"
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
    elif isinstance(target, str):
        name = target
    else:
        name = getattr(target, "__name__", str(target))
        if not any(getattr(space, name, None) is target for space in _NAMESPACES):
            return f"{getattr(target, '__module__', '')}.{name}"
    name = _ALIASES.get(name, name)
    base = name.removesuffix("_")
    return base if base in INPLACE else name


class Walker:
    """Walks traced graphs and fills a `Walk`.

    Args:
        names: Names of parameters and buffers by `id` of the tensor.
        hooked: Modules whose forward hooks may read or change anything inside them, with the reason.
        pin: Modules whose output units are pinned.
    """

    def __init__(self, walk: Walk, names: Mapping[int, str], hooked: Mapping[str, str], pin: Collection[str]) -> None:
        self.walk, self.names, self.hooked, self.pin = walk, names, hooked, pin
        self.footprints: Footprints | None = None

    def run(self, traced: Traced) -> None:
        values: dict[fx.Node, Any] = {}
        self.footprints = traced.footprints
        for tensor in traced.footprints.numbers if traced.footprints else ():
            opaque(self.walk, self._tensor(tensor), reason="read as a number while the model was traced")
        self.walk.position = 0
        for node in traced.graph.nodes:
            stack = traced.within(node)
            result = self._settle(node, self._call(node, traced, values, stack))
            for name in stack:
                if name in self.pin and any(name not in traced.within(user) for user in node.users):
                    self.walk.at("pin", node, name)
                    self.walk.pin([v for v in flatten_arguments(result) if isinstance(v, Activation)], "named in pin=")
            values[node] = result

    def _tensor(self, tensor: Any) -> Any:
        """A tensor that a module holds, as an abstract value."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = self.names.get(id(tensor))
        if name is None:
            read = [*_behind(tensor), *(self.footprints.behind(tensor) if self.footprints else ())]
            for leaf in (self._tensor(t) for t in read if id(t) in self.names):
                opaque(self.walk, leaf, reason="read while the model was traced")
            return grounded(tensor.shape)
        return (Weight if isinstance(tensor, nn.Parameter) else Buffer)(name, tuple(tensor.shape))

    def _call(self, node: fx.Node, traced: Traced, values: dict[fx.Node, Any], stack: list[str]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "placeholder":
            return self._tensor(traced.tensors[node.name]) if node.name in traced.tensors else Activation()
        if node.op == "get_attr":
            return self._tensor(traced.attribute(node))
        if node.op == "output":
            self.walk.at("output", node, "output")
            return opaque(self.walk, *args, reason="the output of the model")
        hook = next((self.hooked[name] for name in stack if name in self.hooked), None)
        if node.op == "call_module":
            return self._module(node, traced.called(node), args, kwargs, stack, hook)
        name = canonical(node.target)
        self.walk.at(name, node, stack[-1] if stack else "")
        leaves = flatten_arguments([args, kwargs])
        if hook is not None:
            return opaque(self.walk, *args, reason=hook, **_renamed(kwargs))
        if kwargs.get("out") is not None:
            return opaque(self.walk, *args, reason="it writes into another tensor (out=)", **_renamed(kwargs))
        if not any(isinstance(leaf, (Activation, Weight, Buffer)) or not _plain(leaf) for leaf in leaves):
            return _evaluate(node, args, kwargs)
        result = self._apply(name, args, kwargs)
        return self._written(args[0], result) if args and in_place(node.target) else result

    def _written(self, old: Any, new: Any) -> Any:
        """The result of an operation in place. Other names of the tensor keep its old space: it must not change."""
        reason = "written in place, so that other names of it change too"
        if isinstance(old, (Weight, Buffer)):
            return opaque(self.walk, old, new, reason=reason)
        if not (isinstance(old, Activation) and isinstance(new, Activation)):
            return new
        # A rule that returns ground has pinned what it read.
        same = (
            old.ids is not None and new.ids is not None and torch.equal(old.ids, new.ids) and old.spread == new.spread
        )
        return new if same or new.grounded else opaque(self.walk, old, new, reason=reason)

    def _module(
        self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any, stack: list[str], hook: str | None
    ) -> Any:
        operation, arguments = MODULES.get(type(module), (type(module).__name__, None))
        self.walk.at(operation, node, stack[-1])
        if parametrize.is_parametrized(module):
            hook = "its parameters are computed from others (parametrized)"
        if "forward" in vars(module):
            hook = "its forward was replaced"
        if arguments is None or hook is not None:
            first = next(module.parameters(), None)
            if hook is not None and first is not None and first.dim():
                self.walk.note(first.shape[0], hook)
            return self._opaque_module(module, args, kwargs, hook)
        held = {name: self._tensor(value) for name, value in arguments(module).items()}
        return self._apply(operation, args, {**kwargs, **held})

    def _apply(self, name: str, args: Any, kwargs: Any) -> Any:
        rule = FUNCTIONS.get(name)
        if rule is None:
            return opaque(self.walk, *args, **_renamed(kwargs))
        try:
            result = rule(self.walk, *args, **{("x" if k == "input" else k): v for k, v in kwargs.items()})
        except (
            TypeError,
            AttributeError,
            IndexError,
            KeyError,
            ValueError,
            RuntimeError,
            ArithmeticError,
        ):  # a call the rule was not written for: never guess
            return opaque(self.walk, *args, reason="called in a way no rule is known for", **_renamed(kwargs))
        inputs = [v for v in flatten_arguments([args, kwargs]) if isinstance(v, Activation)]
        return self._inherit(result, any(v.loose for v in inputs), _batch_of(inputs) if name in KEEPS_BATCH else 0)

    def _inherit(self, result: Any, loose: bool, lead: int) -> Any:
        """A result has the doubt about the rank of its inputs; its batch is its rule's word, `lead`, or its own."""
        if isinstance(result, Activation):
            lead = result.lead or lead or self.walk.lead()
            return replace(result, loose=loose or result.loose, lead=lead) if result.ids is not None else result
        if isinstance(result, Parts):
            return Parts(replace(result.part, loose=loose or result.part.loose))  # they may differ in size
        if isinstance(result, (tuple, list)):
            return type(result)(self._inherit(r, loose, lead) for r in result)
        return result

    def _opaque_module(self, module: nn.Module, args: Any, kwargs: Any, hook: str | None) -> Activation:
        """A leaf without a rule: everything it holds is pinned, but for the hidden units of a ReLU feed-forward."""
        inside = [self._tensor(t) for t in (*module.parameters(), *module.buffers())]
        free: set[str] = set()
        for m in module.modules() if hook is None else ():
            if _has_plain_feed_forward(m):
                held: list[Any] = [m.linear1, m.linear2]
                (w1, b1), (w2, b2) = ((self._tensor(layer.weight), self._tensor(layer.bias)) for layer in held)
                hidden = linear(self.walk, Activation(), w1, b1)
                self.walk.pin(linear(self.walk, hidden, w2, b2), "inside a Transformer layer")
                free |= {w.name for w in (w1, b1, w2, b2) if isinstance(w, Weight)}
        rest = [t for t in inside if not (isinstance(t, Weight) and t.name in free)]
        return opaque(self.walk, *args, *rest, reason=hook or "no rule is known for it", **_renamed(kwargs))

    def _settle(self, node: fx.Node, result: Any) -> Any:
        """Fills in the sizes a trace with real inputs knows; a space that contradicts them is pinned."""
        val = node.meta.get("val")
        if isinstance(result, (tuple, list)) and isinstance(val, (tuple, list)) and len(val) == len(result):
            return type(result)(self._settle_one(r, v) for r, v in zip(result, val, strict=True))
        return self._settle_one(result, val)

    def _settle_one(self, result: Any, val: Any) -> Any:
        if not isinstance(result, Activation) or not isinstance(val, Tensor):
            return result
        shape = tuple(val.shape)
        ids = result.ids
        if ids is None:
            return grounded(shape)
        if result.spread and len(shape) == ids.dim() and shape[-1] % ids.shape[-1] == 0:
            ids = ids.repeat_interleave(shape[-1] // ids.shape[-1], -1)
        if len(shape) != ids.dim() or any(i not in (1, s) for i, s in zip(ids.shape, shape, strict=True)):
            self.walk.pin(result, f"its space was followed as {tuple(ids.shape)} but the activation is {shape}")
            return grounded(shape)
        return replace(result, ids=ids, shape=shape, spread=False, loose=False)


def _batch_of(inputs: Sequence[Activation]) -> int:
    """The batch they share; 0 if they may have several."""
    leads = {x.lead for x in inputs if x.shape != () or x.loose}
    return leads.pop() if len(leads) == 1 else 0


def in_place(target: Any) -> bool:
    """`x.add_(y)`, `x += y`. Not `x & y`, which is `operator.and_`."""
    raw = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(operator, raw, None) is target:
        return raw in ("iadd", "isub", "imul", "itruediv")
    if isinstance(target, torch._ops.OpOverload):
        raw = target._schema.name
    return raw.endswith("_") and not raw.endswith("__")


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the user's call must not collide with those of `opaque`."""
    return {f"_{name}": value for name, value in kwargs.items()}


def _plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device, type(Ellipsis)))


def _evaluate(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Arithmetic on plain numbers (sizes); anything else made of constants is ground."""
    if getattr(operator, getattr(node.target, "__name__", ""), None) is node.target:
        return node.target(*args, **kwargs)
    return Activation()


def _has_plain_feed_forward(m: Any) -> bool:
    """A Transformer layer of torch whose linear1 → ReLU → dropout → linear2 nobody has changed."""
    if type(m) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        return False
    parts = (m, m.linear1, m.dropout, m.linear2)
    types = [type(part) for part in parts[1:]] == [nn.Linear, nn.Dropout, nn.Linear]
    untouched = not any(p._forward_hooks or p._forward_pre_hooks or "forward" in vars(p) for p in parts)
    return types and untouched and (m.activation in (F.relu, torch.relu) or type(m.activation) is nn.ReLU)


def _behind(tensor: Tensor) -> list[Tensor]:
    """The leaves that a constant was computed from."""
    leaves, seen, todo = [], set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [parent for parent, _ in node.next_functions]
    return leaves
