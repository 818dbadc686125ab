"""Scales for quantizers, chosen and applied in place. The function of the model does not change, only its rounding.

`equalize_` makes what writes a channel as large as what reads it (cross-layer equalization, Nagel et al. 2019). By "l2"
its goal is that of `balance_`, which finds it for all units at once by Newton's method; here channels take turns, on
any subset of mappings. By "max-abs" large is the largest |w|, which sets the step of a rounding per tensor. `smooth_`
moves the largest activations into the weights (SmoothQuant, Xiao et al. 2022).
"""

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Inputs, TraceError, analyze, analyzed, unwrap
from gspace.analysis.forward import arguments, set_mode, tensors_in, untouched
from gspace.group.scaling import Scales, rescale_
from gspace.optim.arguments import require_one_of, require_values
from gspace.quantization.find import channel_dim, layer
from gspace.quantization.find import mappings as find
from gspace.quantization.mapping import Mapping, Side
from gspace.sharding import refuse_sharded

By = Literal["max-abs", "l2"]
SWEEPS = 500  # at most
AHEAD = 1.7  # a step goes this much farther: else scales creep along chains of layers (over-relaxation; below 2)
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
        tolerance: Channels take turns until no log-scale moves by more.

    A channel that is written or read by zeros alone keeps its scale.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data, net[2].weight.data = torch.tensor([[1.0, 4.0]]), torch.tensor([[9.0]])
    >>> scales = equalize_(net, "max-abs", example_input=torch.ones(1, 2))
    >>> [round(layer.weight.abs().max().item(), 4) for layer in (net[0], net[2])]
    [6.0, 6.0]
    """
    require_one_of("by", by, ("max-abs", "l2"))
    model = unwrap(model)
    require_values(model)
    refuse_sharded(dict(model.named_parameters()), "a mapping")
    found, chosen = _chosen(model, mappings, example_input, analysis)
    squares = _squares(dict(model.named_parameters()), chosen, by)
    log = torch.zeros(found.H, dtype=torch.float64, device="cpu")
    for _ in range(SWEEPS):
        moved = 0.0
        for m in chosen:
            step = AHEAD * _step(m, squares, by)
            for side in (*m.sources, *m.sinks):
                _multiply(squares[side.parameter], side, 2 * step)
            log[torch.tensor(list(m.units)) - 1] += step
            moved = max(moved, float(step.abs().max()))
        if moved <= tolerance:
            break
    scales = Scales(log.exp())
    rescale_(model, scales, analysis=found)
    return scales


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
    model = unwrap(model)
    require_values(model)
    refuse_sharded(dict(model.named_parameters()), "a mapping")
    listed = _batches(batches)
    found, chosen = _chosen(model, mappings, listed[:EXAMPLES], analysis)
    if mappings is None:
        chosen = [m for m in chosen if m.kind == "norm"]
        if not chosen:
            raise ValueError("no norm of the model has gains that linear layers read: name the mappings to use")
    for m in chosen:
        if m.hook is None:
            raise ValueError(f"no module sees the {m.size} channels of {m.smooth_layer!r}: leave this mapping out")
    parameters = dict(model.named_parameters())
    log = torch.zeros(found.H, dtype=torch.float64, device="cpu")
    for m, activation in zip(chosen, _activations(model, chosen, listed), strict=True):
        sinks = [s for s in m.sinks if parameters[s.parameter].dim() > 1]
        sizes = [(s, (parameters[s.parameter].detach() + s.offset).abs().double()) for s in sinks or m.sinks]
        weight = _reduced(m.size, [(s, _along(size, s, "max-abs")) for s, size in sizes], "max-abs")
        s = activation**alpha / weight ** (1 - alpha)
        s = torch.where((activation > 0) & (weight > 0), s.clamp(min=SMALLEST), 1)
        power = max(abs(side.exponent) for side in m.sinks)
        log[torch.tensor(list(m.units)) - 1] = -s.log() / power
    scales = Scales(log.exp())
    rescale_(model, scales, analysis=found)
    return scales


def _chosen(
    model: nn.Module, wanted: Iterable[Mapping] | None, example_input: Any, analysis: Analysis | None
) -> tuple[Analysis, list[Mapping]]:
    found = analyze(model, example_input) if analysis is None else analyzed(model, analysis, {})
    there = find(model, analysis=found)
    if not there:
        raise ValueError("the model has no mappings: no scale can move between its layers")
    if wanted is None:
        return found, list(there)
    known = {(m.smooth_layer, m.balance_layers, m.kind): m for m in there}
    chosen = []
    for m in wanted:
        if not isinstance(m, Mapping):
            raise TypeError(f"mappings is a list of what gspace.mappings returns, got {type(m).__name__}")
        mine = known.get((m.smooth_layer, m.balance_layers, m.kind))
        if mine is None or mine != m:
            raise ValueError(f"the mapping of {m.smooth_layer!r} is not one of this model with this example")
        chosen.append(mine)
    return found, chosen


# Weights --------------------------------------------------------------------------------------------------------------


def _squares(parameters: Table[str, Tensor], chosen: Sequence[Mapping], by: By) -> dict[str, Tensor]:
    """w² in float64, the sum or the largest over dimensions that no channel lies along."""
    used: dict[str, set[int]] = {}
    offsets = {}
    for side in (s for m in chosen for s in (*m.sources, *m.sinks)):
        cut = {d for d, s in enumerate(side.slice) if s != slice(None)}
        used.setdefault(side.parameter, set()).update(cut | {side.dim})
        offsets[side.parameter] = side.offset
    found = {}
    for name, dims in used.items():
        w = (parameters[name].detach().cpu().double() + offsets[name]).square()
        rest = [d for d in range(w.dim()) if d not in dims]
        found[name] = (w.amax(rest, True) if by == "max-abs" else w.sum(rest, True)) if rest else w.clone()
    return found


def _step(m: Mapping, squares: Table[str, Tensor], by: By) -> Tensor:
    """x with Σ p·a·exp(2px) over sources = Σ q·b·exp(−2qx) over sinks, where all p and all q are alike: else less."""
    sizes, powers = [], 0.0
    for sides in (m.sources, m.sinks):
        weights = [s for s in sides if squares[s.parameter].dim() > 1] if by == "max-abs" else []
        measured = [(s, _along(squares[s.parameter], s, by)) for s in weights or sides]
        powers += max(abs(s.exponent) for s, _ in measured)
        if by == "l2":
            measured = [(s, abs(s.exponent) * a) for s, a in measured]
        sizes.append(_reduced(m.size, measured, by))
    up, down = sizes
    return torch.where((up > 0) & (down > 0), (down / up).log() / (2 * powers), 0)


def _along(sizes: Tensor, side: Side, by: By) -> Tensor:
    """The sum or the largest at each position of the side."""
    rows = sizes[side.slice].movedim(side.dim, 0).flatten(1) if sizes.dim() > 1 else sizes[side.slice][:, None]
    return rows.amax(1) if by == "max-abs" else rows.sum(1)


def _reduced(size: int, measured: Iterable[tuple[Side, Tensor]], by: By) -> Tensor:
    """The sum or the largest of each channel."""
    total = torch.zeros(size, dtype=torch.float64, device="cpu")
    for side, values in measured:
        where = torch.tensor(list(side.channels), device="cpu")
        total.scatter_reduce_(0, where, values.cpu().double(), "amax" if by == "max-abs" else "sum")
    return total


def _multiply(t: Tensor, side: Side, log: Tensor) -> None:
    factor = (side.exponent * log[torch.tensor(list(side.channels))]).exp()
    t[side.slice] *= factor.reshape([-1 if d == side.dim else 1 for d in range(t.dim())])


# Activations ----------------------------------------------------------------------------------------------------------


def _batches(batches: Any) -> list[Inputs]:
    if isinstance(batches, (Tensor, Table)):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
        raise TypeError(f"batches is a list of inputs of the model, got {type(batches).__name__}")
    listed = list(batches)
    if not listed:
        raise ValueError("batches is empty: no activation to take a maximum of")
    for batch in listed:
        if not isinstance(batch, (Tensor, tuple, list, Table)):
            raise TypeError(f"a batch is a tensor, a tuple of arguments or a dict, got {type(batch).__name__}")
    return listed


def _activations(model: nn.Module, chosen: Sequence[Mapping], batches: Sequence[Inputs]) -> list[Tensor]:
    """The largest |x| of each channel of each mapping."""
    names = {name for name, _ in model.named_parameters()}
    largest = [torch.zeros(m.size, dtype=torch.float64, device="cpu") for m in chosen]

    def see(k: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        m = chosen[k]
        assert m.hook is not None
        taken = (args, kwargs) if m.hook.where == "input" else output
        x = tensors_in(taken)[0].detach()
        d = channel_dim(module)
        values = x.abs().double().movedim(d, 0).flatten(1).amax(1)
        sides = m.sinks if m.hook.where == "input" else m.sources
        mine = [s for s in sides if layer(s.parameter, names) == m.hook.module]
        seen = _reduced(m.size, [(s, values[s.slice[s.dim]]) for s in mine], "max-abs")
        torch.maximum(largest[k], seen, out=largest[k])

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
                said = next(iter(str(error).splitlines()), "")
                raise TraceError(
                    f"the model does not accept a batch of `batches`: {type(error).__name__}: {said}"
                ) from error
    return largest
