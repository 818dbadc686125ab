"""Scales for quantizers, chosen and applied in place. The function of the model does not change, only its rounding.

`equalize_` makes what writes a channel as large as what reads it (cross-layer equalization, Nagel et al. 2019). By "l2"
its goal is that of `balance_`, on any subset of mappings. By "max-abs" large is the largest |w|, which sets the step of
a rounding per tensor: no sum has that gradient, and channels take turns. `smooth_` moves the largest activations into
the weights (SmoothQuant, Xiao et al. 2022).
"""

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Inputs, TraceError, unwrap
from gspace.analysis.examples import first_line
from gspace.analysis.forward import arguments, set_mode, tensors_in, untouched
from gspace.group.balance import balanced_log_scales
from gspace.group.scaling import Scales, rescale_
from gspace.optim.arguments import require_finite, require_one_of, require_values
from gspace.quantization.find import channel_dim, examined, layer, touched
from gspace.quantization.find import mappings as find
from gspace.quantization.mapping import Mapping, Side, multiply_

By = Literal["max-abs", "l2"]
SWEEPS = 500  # at most
AHEAD = 1.7  # a step goes this much farther: else scales creep along chains of layers (over-relaxation; below 2)
FARTHEST = 300.0  # a step in log that only scales without end take
SMALLEST = 1e-5  # a smoothing scale is never smaller, as in the code of others
EXAMPLES = 3  # batches that a model is analyzed with


def equalize_(
    model: nn.Module,
    by: By = "max-abs",
    mappings: Iterable[Mapping] | None = None,
    *,
    example_input: Inputs | None = None,
    analysis: Analysis | None = None,
    tolerance: float = 1e-6,
) -> Scales:
    """Makes what writes a channel as large as what reads it, in place; returns the scales of all units.

    Args:
        model: It keeps its function.
        by: "max-abs": the largest |w|, biases left out. "l2": ‖w‖ with biases, as `balance_` has it.
        mappings: Those to use; all of them if None.
        example_input: For `analyze`, if there is no `analysis`.
        analysis: What `analyze` has found.
        tolerance: By "max-abs", channels take turns until no log-scale moves by more.

    A channel that is written or read by zeros alone keeps its scale.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data, net[2].weight.data = torch.tensor([[1.0, 4.0]]), torch.tensor([[9.0]])
    >>> scales = equalize_(net, "max-abs", example_input=torch.ones(1, 2))
    >>> [round(layer.weight.abs().max().item(), 4) for layer in (net[0], net[2])]
    [6.0, 6.0]
    """
    require_one_of("by", by, ("max-abs", "l2"))
    model, found, chosen = _chosen(model, mappings, example_input, analysis)
    parameters = dict(model.named_parameters())
    if by == "max-abs":
        return _apply(model, found, _taking_turns(parameters, chosen, found.H, tolerance))
    fixed = torch.ones(1 + found.H + found.H_absorbed, dtype=torch.bool, device="cpu")
    for m in chosen:
        fixed[list(m.units)] = False
    return _apply(model, found, balanced_log_scales(found.edges, parameters, len(fixed), fixed, found.forms).cpu())


def smooth_(
    model: nn.Module,
    batches: Iterable[Inputs] | Inputs,
    alpha: float = 0.5,
    mappings: Iterable[Mapping] | None = None,
    *,
    analysis: Analysis | None = None,
) -> Scales:
    """Divides activations by s = max|x|^alpha / max|w|^(1 − alpha), channel by channel, in place; returns the scales.

    Args:
        model: It keeps its function. It is run in evaluation mode.
        batches: What the maxima of activations are taken over; each is a tensor, a tuple of arguments or a dict.
        alpha: 0 leaves the weights even, 1 the activations.
        mappings: Those to use; if None, the norms', as in SmoothQuant.
        analysis: What `analyze` has found; if None, it is run on the first batches.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    >>> x = torch.randn(8, 4)
    >>> before = net(x)
    >>> scales = smooth_(net, [x])
    >>> torch.allclose(net(x), before, atol=1e-5)
    True
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    listed = _batches(batches)
    model, found, chosen = _chosen(model, mappings, listed[:EXAMPLES], analysis)
    if mappings is None:
        chosen = [m for m in chosen if m.kind == "norm"]
        if not chosen:
            raise ValueError("no norm of the model has gains that linear layers read: name the mappings to use")
    for m in chosen:
        if m.hook is None:
            raise ValueError(f"no module sees the {m.size} channels of {m.smooth_layer!r}: leave this mapping out")
    parameters = dict(model.named_parameters())
    log = torch.zeros(1 + found.H, dtype=torch.float64, device="cpu")
    for m, activation in zip(chosen, _activations(model, chosen, listed), strict=True):
        weight, power = _largest(m, m.sinks, _sizes(parameters, m.sinks))
        s = activation**alpha / weight ** (1 - alpha)
        s = torch.where((activation > 0) & (weight > 0), s.clamp(min=SMALLEST), 1)
        log[list(m.units)] = -s.log() / power
    return _apply(model, found, log)


def _chosen(
    model: nn.Module, wanted: Iterable[Mapping] | None, example_input: Any, analysis: Analysis | None
) -> tuple[nn.Module, Analysis, list[Mapping]]:
    """The model inside of wrappers, its analysis, and the mappings to use."""
    require_values(unwrap(model))
    model, found = examined(model, example_input, analysis)
    require_finite(model, touched(found))
    there = find(model, analysis=found)
    if not there:
        raise ValueError("the model has no mappings: no scale can move between its layers")
    chosen = there if wanted is None else list(wanted)
    for m in chosen:
        if not isinstance(m, Mapping):
            raise TypeError(f"mappings is a list of what gspace.mappings returns, got {type(m).__name__}")
        if m not in there:
            raise ValueError(f"the mapping of {m.smooth_layer!r} is not one of this model with this example")
    return model, found, chosen


def _apply(model: nn.Module, found: Analysis, log: Tensor) -> Scales:
    scales = Scales(log[1 : 1 + found.H].exp())
    rescale_(model, scales, analysis=found)
    return scales


# Weights --------------------------------------------------------------------------------------------------------------


def _taking_turns(
    parameters: Table[str, Tensor], chosen: Sequence[Mapping], H: int, tolerance: float, ahead: float = AHEAD
) -> Tensor:
    """Log-scales of ground and units, at which the largest weights on both sides of each channel are alike.

    A step is x with p·x + log a = log b − q·x, where a is written with the power p and b is read with q.
    """
    sizes = _sizes(parameters, [s for m in chosen for s in (*m.sources, *m.sinks)])
    log = torch.zeros(1 + H, dtype=torch.float64, device="cpu")
    for _ in range(SWEEPS):
        moved = 0.0
        for m in chosen:
            (up, p), (down, q) = (_largest(m, sides, sizes) for sides in (m.sources, m.sinks))
            step = ahead * torch.where((up > 0) & (down > 0), (down.log() - up.log()) / (p + q), 0)
            for side in (*m.sources, *m.sinks):
                multiply_(sizes[side.parameter], side._replace(offset=0.0), step)
            log[list(m.units)] += step
            moved = max(moved, float(step.abs().max()))
        if moved > FARTHEST:  # channels of one mapping that share weights step on each other
            return _taking_turns(parameters, chosen, H, tolerance, ahead / 2)
        if moved <= tolerance:
            break
    return log


def _sizes(parameters: Table[str, Tensor], sides: Iterable[Side]) -> dict[str, Tensor]:
    """|w| in float64, the largest over dimensions that no channel lies along."""
    used: dict[str, set[int]] = {}
    offsets = {}
    for side in sides:
        cut = {d for d, s in enumerate(side.slice) if s != slice(None)}
        used.setdefault(side.parameter, set()).update(cut | {side.dim})
        offsets[side.parameter] = side.offset
    found = {}
    for name, dims in used.items():
        w = (parameters[name].detach().cpu().double() + offsets[name]).abs()
        rest = [d for d in range(w.dim()) if d not in dims]
        found[name] = w.amax(rest, True) if rest else w
    return found


def _largest(m: Mapping, sides: Sequence[Side], sizes: Table[str, Tensor]) -> tuple[Tensor, float]:
    """The largest |w| of each channel, and its power; biases are left out where there are weights."""
    sides = [s for s in sides if sizes[s.parameter].dim() > 1] or sides
    values = [sizes[s.parameter][s.slice].movedim(s.dim, 0).reshape(len(s.channels), -1).amax(1) for s in sides]
    return _by_channel(m, sides, values), max(abs(s.exponent) for s in sides)


def _by_channel(m: Mapping, sides: Sequence[Side], values: Sequence[Tensor]) -> Tensor:
    """The largest of each channel, of values at the positions of sides."""
    total = torch.zeros(m.size, dtype=torch.float64, device="cpu")
    for side, value in zip(sides, values, strict=True):
        total.scatter_reduce_(0, torch.tensor(list(side.channels), device="cpu"), value.cpu().double(), "amax")
    return total


# Activations ----------------------------------------------------------------------------------------------------------


def _batches(batches: Any) -> list[Inputs]:
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is a list of inputs of the model, got {type(batches).__name__}")
    listed = [batches] if isinstance(batches, (Tensor, Table)) else list(batches)
    if not listed:
        raise ValueError("batches is empty: no activation to take a maximum of")
    for batch in listed:
        arguments(batch)  # refuses what is no batch
    return listed


def _activations(model: nn.Module, chosen: Sequence[Mapping], batches: Sequence[Inputs]) -> list[Tensor]:
    """The largest |x| of each channel of each mapping."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    unclear: list[str] = []
    largest = [torch.zeros(m.size, dtype=torch.float64, device="cpu") for m in chosen]

    def see(k: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        m = chosen[k]
        assert m.hook is not None
        reads = m.hook.where == "input"
        x = tensors_in((args, kwargs) if reads else output)[0].detach()
        mine = [s for s in (m.sinks if reads else m.sources) if layer(s.parameter, parameters) == m.hook.module]
        dim, width = channel_dim(module), parameters[mine[0].parameter].shape[mine[0].dim]
        fits = [d for d, n in enumerate(x.shape) if n == width] if dim is None else [dim]
        if len(fits) > 1:  # as where they are read
            readers = {channel_dim(modules[n]) for s in m.sinks if (n := layer(s.parameter, parameters)) in modules}
            fits = [d for d in fits if {d} == {e % x.dim() for e in readers if e is not None}] or fits
        if len(fits) != 1:
            where = (
                f"the {m.hook.where} of {m.hook.module!r}, {tuple(x.shape)}, has {len(fits)} dimensions of that size"
            )
            unclear.append(f"where are the {width} channels of {m.smooth_layer!r}? {where}: leave this mapping out")
            return
        values = x.abs().double().movedim(fits[0], 0).flatten(1).amax(1)
        parts = [values[s.slice[s.dim]] for s in mine]
        parts = [v if len(s.channels) > 1 else v.amax(0, True) for s, v in zip(mine, parts, strict=True)]
        largest[k] = largest[k].maximum(_by_channel(m, mine, parts))

    with untouched(model):
        set_mode(model, training=False)
        for k, m in enumerate(chosen):
            if m.hook is not None:
                model.get_submodule(m.hook.module).register_forward_hook(partial(see, k), with_kwargs=True)
        for batch in batches:
            args, kwargs = arguments(batch)
            try:
                model(*args, **kwargs)
            except Exception as error:  # the forward pass is the user's and may raise anything
                raise TraceError(f"the model does not accept a batch of `batches`: {first_line(error)}") from error
            if unclear:
                raise ValueError(unclear[0])
    return largest
