"""Calls a step as torch.optim does, at less cost: its name goes to a profiler only while there is one.

torch wraps the `step` of every class of optimizers: hooks of the optimizer, hooks of all optimizers, a name.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

P = ParamSpec("P")
R = TypeVar("R")
_WRAPPER = Optimizer.profile_hook_step(len).__code__  # what tells torch's wrapper from one that others put around it


def hooked(func: Callable[P, R]) -> Callable[P, R]:
    """A step with hooks and a name for the profiler; without either it is called as it is.

    torch names every step, which takes some 40 µs: beside a small network a twentieth of an iteration.
    """
    named = Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        optimizer: Any = args[0]
        plain = len(args) == 1 and not (  # a closure may register hooks
            kwargs
            or watched()
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        return (func if plain else named)(*args, **kwargs)

    return call


def watched() -> bool:
    """Whether a profiler, in any thread, or `torch.compile` looks at what is called."""
    return torch.compiler.is_compiling() or _profiler_enabled() or profiler._is_profiler_enabled


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_within(optimizer: Optimizer) -> None:
    """A step inside of another optimizer's: hooks of all optimizers run around that one, and not again here."""
    function: Any = getattr(optimizer.step, "__func__", None)
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if getattr(function, "__code__", None) is _WRAPPER and not own:  # hooks of its own need the wrapper
        function.__wrapped__(optimizer)
    else:
        optimizer.step()


def capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing may be read from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
