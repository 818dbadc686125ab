"""What an optimizer is given: refused before anything is changed, or warned of."""

import warnings
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import Optimizer

from gspace.analysis import Analysis, Edges, Inputs, require_module
from gspace.sharding import local, refuse_flat
from gspace.sharding import require as require_all


def require_model(model: Any) -> None:
    """A module whose parameters are here, with their values, and can be trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument is the model, not its parameters; got {type(model).__name__}")
    require_values(model)
    for name, p in model.named_parameters():
        if not isinstance(p, UninitializedParameter) and p.is_inference():
            raise ValueError(f"parameter {name!r} was made under torch.inference_mode and cannot be trained")


def require_values(model: Any) -> None:
    require_module(model)
    refuse_flat(model)
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values: materialize the model first")


def require_one_device(edges: Sequence[Edges], model: nn.Module, mine: Collection[str], owner: str) -> None:
    """Those of these parameters that are `mine` lie on one device: a step adds up over all of them."""
    parameters = dict(model.named_parameters())
    found = {parameters[e.name].device: e.name for e in edges if e.name in mine}
    if len(found) > 1:
        (a, one), (b, other) = list(found.items())[:2]
        raise ValueError(
            f"{owner} needs its weights on one device, and {one!r} is on {a}, {other!r} on {b}: "
            "move them, or divide the model by FSDP2 (`fully_shard`)"
        )


def require_finite(model: nn.Module, names: Container[str] | None = None) -> None:
    """All parameters, or those of these names."""
    require_values(model)
    parameters = {name: p for name, p in model.named_parameters() if names is None or name in names}
    bad = next((name for name, p in parameters.items() if not _finite(local(p))), None)
    require_all(parameters, f"{bad} is not finite: paths and scales of such a network have no values" if bad else "")


def _finite(t: Tensor) -> bool:
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())  # a sum may overflow, and needs no memory


def require_dense(model: nn.Module, parameters: Iterable[Tensor], reason: str) -> None:
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            name = next(name for name, other in model.named_parameters() if other is p)
            raise RuntimeError(f"{name} has a sparse gradient: {reason}; use dense ones")


def require_copies(model: nn.Module) -> None:
    """torch copies no tensor that was computed from parameters, as old hooks keep them in modules."""
    for path, m in model.named_modules():
        for name, t in vars(m).items():
            if isinstance(t, Tensor) and not t.is_leaf:
                raise ValueError(
                    f"{f'{path}.{name}'.strip('.')!r} is computed from parameters and kept, so torch cannot copy the "
                    "model: make it permanent (prune.remove, remove_weight_norm) or use torch.nn.utils.parametrizations"
                )


def require_seen(analysis: Analysis) -> None:
    """Every weight was used in the runs of `analyze`: of one that was not, nobody knows how it must be scaled."""
    if analysis.unseen:
        name, n = next(iter(analysis.unseen.items()))
        more = f" and {len(analysis.unseen) - 1} more parameters" if len(analysis.unseen) > 1 else ""
        raise ValueError(
            f"the example did not use {n:,} weights of {name!r}{more}, so their scales are not known: analyze with "
            "several or longer examples (example_input=[a, b]), or name them in pin= if they are never used"
        )


def require_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")


def guards(max_ratio: Any, max_drift: Any, allocation: str) -> tuple[float, float]:
    """The bounds as numbers."""
    bounds = []
    for name, bound in (("max_ratio", max_ratio), ("max_drift", max_drift)):
        bounds.append(number(bound))
        if not bounds[-1] >= 1:
            raise ValueError(f"{name} must be at least 1 (1: held, inf: no bound), got {bound!r}")
    if allocation == "spread" and bounds[0] == float("inf"):
        raise ValueError("allocation='spread' takes roots of path ratios and needs a finite max_ratio")
    return bounds[0], bounds[1]


def number(value: Any) -> float:
    """A number of any library as a float; NaN for what is none."""
    try:
        return float("nan") if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


def require_own_group(optimizer: Optimizer, model: nn.Module) -> None:
    """The last group holds parameters of the model alone, or is taken away again."""
    mine = {id(p) for p in model.parameters()}
    for p in optimizer.param_groups[-1]["params"]:
        if id(p) not in mine:
            optimizer.param_groups.pop()
            raise ValueError(f"params holds a tensor of shape {tuple(p.shape)} that is no parameter of the model")


def require_numbers(defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if isinstance(value, float | Tensor) and value != value:
            raise ValueError(f"{name} is not a number: {value}")


def given(example_input: Inputs | None) -> dict[str, Any]:
    """What is to be told to `analyze`."""
    return {} if example_input is None else {"example_input": example_input}


def warn_of_no_units(analysis: Analysis, owner: str, stacklevel: int) -> None:
    if not (analysis.H or analysis.H_paper):  # those that it cannot use are told when the skeleton is chosen
        warnings.warn(
            f"no unit of this model can be rescaled, so {owner} does to it what its optimizer does without G-space: "
            "gspace.analyze says what pins them; an example_input may tell more.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def warn_of_thawed(names: Sequence[str], owner: str) -> None:
    """Parameters of units that came too late for the skeleton."""
    warnings.warn(
        f"{', '.join(names)}: trained only since {owner} has chosen its skeleton, so in plain coordinates. rechoose() "
        "takes such layers in, and starts momentum and other state again.",
        UserWarning,
        stacklevel=2,
    )
