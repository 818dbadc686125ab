"""Model → graph of operations: `torch.fx` where it can follow the forward pass, `torch.export` where it cannot.

Both front ends end in an `fx.Graph` whose nodes are calls of torch functions, tensor methods or leaf modules; the
rules of `operations.py` read either. A model is traced in training and in evaluation mode, because a branch on
`self.training` may hide a layer that shares a unit with the rest.
"""

import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gspace.graph.draws import Draws, alone, others_draw
from gspace.graph.footprints import tensors_in, unwritten
from gspace.graph.symbolic import propagate_shapes, symbolic
from gspace.graph.traced import Inputs, Traced, TraceError, refuse_lazy, refuse_written, unwrap

__all__ = ["Inputs", "TraceError", "trace", "unwrap"]

_ONE_AT_A_TIME = threading.RLock()  # while it lasts, tracing changes torch and builtins for all threads


def trace(model: nn.Module, example_input: Inputs | None = None) -> list[Traced]:
    """The graphs of `model` in training and evaluation mode; one if they are the same."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    refuse_lazy(model)
    model = unwrap(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("a TorchScript module cannot be followed: pass the module that it was made from")
    if getattr(type(model), "forward", None) is nn.Module.forward and "forward" not in vars(model):
        raise TraceError(f"{type(model).__name__} has no forward: pass the module that calls it")
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
        traced = symbolic(model, None if example_input is None else kwargs or args)
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
        propagate_shapes(traced, kwargs or args)
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
    refuse_written(next((name.removeprefix("model.") for name in written.values()), None))
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
    ours = (torch.__path__[0], os.path.dirname(__file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    if not frames:
        return "the forward pass"
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`"


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
