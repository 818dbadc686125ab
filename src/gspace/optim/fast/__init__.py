"""Steps compiled: in Triton for a GPU, in C for a CPU that has a compiler.

`step.py` is the definition and `eager.py` takes its steps; the passes here do the same for all parameters at once: a
whole step of SGD, or the two halves around another optimizer's. What fits no table is left to torch's operations:
parameters that differ in dtype or device, weights with gaps in memory, and other rules for a BatchNorm than "released".
"""

import importlib.util
from collections.abc import Sequence

from torch import Tensor

from gspace.optim.built import Built
from gspace.optim.eager import Rules
from gspace.optim.fast import native
from gspace.optim.fast.network import Bound, fits

__all__ = ["Bound", "choose", "fits"]


def choose(built: Built, rules: Rules, whole: Sequence[tuple[Tensor, int]] | None) -> Bound | str:
    """What takes the steps, or why torch's operations do; see `Bound` for `whole`."""
    way: type[Bound] = native.NativeStep
    if not built.weights:
        return "no parameter touches a unit"
    if built.weights[0].device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        from gspace.optim.fast.launch import FusedStep as way
    return way.refusal(built, rules) or way(built, rules, whole)
