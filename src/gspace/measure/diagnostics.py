"""Looking at a training through its symmetry: invariance of an optimizer, balance of units, distance, path ratios.

Everything here except the balance is the same for w and g_c(w). The balance ‖incoming‖² − ‖outgoing‖² of a unit is the
coordinate along the orbit itself: gradient flow conserves it, so its drift measures what finite steps (and momentum,
decay, noise) add.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gspace.analysis import Analysis, analyzed, require_module
from gspace.analysis.forward import arguments, tensors_in
from gspace.group.balance import forms_of
from gspace.group.scaling import Scales, random_scales, rescale_
from gspace.group.stacks import square
from gspace.optim.arguments import require_copies, require_values
from gspace.optim.coordinates import Coordinates, basis_values, coordinates
from gspace.sharding import refuse_sharded, weights_of

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[Any, Any], Tensor]


# Invariance of an optimizer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InvarianceGap:
    """w and g_c(w), trained side by side.

    Attributes:
        gaps: max |f(w) − f(g_c w)| / max |f(w)| on the first batch, before training and after every step; NaN once
            either network is not finite.
        moved: The same between f(w) at the end and at the start. Without it a gap of 0 would say little.
        losses: Training loss of w at every step.
    """

    gaps: tuple[float, ...]
    moved: float
    losses: tuple[float, ...]

    @property
    def final(self) -> float:
        return self.gaps[-1]

    def __str__(self) -> str:
        return f"gap {self.final:.2g} after {len(self.losses)} steps (start {self.gaps[0]:.2g}, moved {self.moved:.2g})"


@dataclass(frozen=True)
class InvarianceTable:
    """Invariance gaps of several optimizers on one network."""

    rows: Mapping[str, InvarianceGap]

    def __str__(self) -> str:
        """A Markdown table."""
        lines = [
            "| optimizer | gap after 1 step | after all steps | function moved | loss, first → last |",
            "|---" * 5 + "|",
        ]
        for name, g in self.rows.items():
            loss = f"{g.losses[0]:.3g} → {g.losses[-1]:.3g}"
            lines.append(f"| {name} | {g.gaps[1]:.1e} | {g.final:.1e} | {g.moved:.2g} | {loss} |")
        told = (
            "gap: max |f − f'| / max |f| of a network f and its rescaled copy f'; moved: of f before and after training"
        )
        lines += ["", told]
        return "\n".join(lines)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def _called(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def _first(output: Any) -> Tensor:
    """The output, or the first tensor of it."""
    return output if isinstance(output, Tensor) else tensors_in(output)[0]


def _evaluated(model: nn.Module, inputs: Any) -> Tensor:
    training = {m: m.training for m in model.modules()}
    try:
        with torch.no_grad():
            return _first(_called(model.eval(), inputs))
    finally:
        for m, mode in training.items():
            m.training = mode


def invariance_gap(
    make_optimizer: MakeOptimizer,
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    scales: Scales | Tensor | None = None,
    *,
    loss: Loss = F.cross_entropy,
    generator: torch.Generator | None = None,
    analysis: Analysis | None = None,
    **options: Any,
) -> InvarianceGap:
    """Trains a copy of `model` and a rescaled copy alike, on the same batches, and reports how far they part.

    The two are one function at the start. An optimizer that moves in G-space keeps them so, to rounding.

    Args:
        make_optimizer: Makes an optimizer for a model, for example `lambda model: gspace.GSGD(model, lr=0.1)`.
        model: It is left as it is.
        batches: Pairs (inputs, targets), one step each; inputs as `analyze` takes them: a tensor, a tuple or a dict.
        scales: The rescaling; by default e^N(0, 1) for every unit, drawn from `generator`.
        loss: Of (outputs, targets).
        analysis: The result of `analyze(model)`; otherwise `options` (`example_input`, `residual`, `pin`) are for it,
            and the inputs of the first batch are its example.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    >>> batch = torch.randn(16, 4).double(), torch.randint(3, (16,))
    >>> invariance_gap(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net, [batch] * 5).final > 1e-3
    True
    """
    data = list(batches)
    if not data:
        raise ValueError("invariance_gap needs at least one batch")
    probe = data[0][0]
    shown = {"example_input": probe} if analysis is None else {}
    found = analyzed(model, analysis, shown | options)
    refuse_sharded(dict(model.named_parameters()), "invariance_gap")
    require_copies(model)
    plain, scaled = copy.deepcopy(model), copy.deepcopy(model)
    rescale_(scaled, random_scales(model, generator, analysis=found) if scales is None else scales, analysis=found)
    pair = [(m, make_optimizer(m)) for m in (plain, scaled)]
    start = _evaluated(plain, probe)
    gaps, losses = [_gap(start, _evaluated(scaled, probe))], []
    seed = int(torch.randint(2**31, (), generator=generator, device="cpu"))
    with torch.random.fork_rng(sorted({p.get_device() for p in model.parameters() if p.is_cuda})):
        for step, (inputs, targets) in enumerate(data):
            for m, optimizer in pair:
                torch.manual_seed(seed + step)  # dropout must not tell the two apart
                optimizer.zero_grad()
                value = loss(_first(_called(m, inputs)), targets)
                value.backward()
                optimizer.step()
                if m is plain:
                    losses.append(float(value.detach()))
            gaps.append(_gap(_evaluated(plain, probe), _evaluated(scaled, probe)))
    return InvarianceGap(tuple(gaps), _gap(start, _evaluated(plain, probe)), tuple(losses))


def compare_invariance(
    optimizers: Mapping[str, MakeOptimizer],
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    scales: Scales | Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    analysis: Analysis | None = None,
    loss: Loss = F.cross_entropy,
    **options: Any,
) -> InvarianceTable:
    """`invariance_gap` of several optimizers, with the same scales and batches; prints as a table.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    >>> batch = torch.randn(16, 4).double(), torch.randint(3, (16,))
    >>> table = compare_invariance({"SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}, net, [batch])
    >>> print(str(table).splitlines()[0])
    | optimizer | gap after 1 step | after all steps | function moved | loss, first → last |
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(f"optimizers are functions that make one, by name, got {type(optimizers).__name__}")
    data = list(batches)
    shown = {"example_input": data[0][0]} if data and analysis is None else {}
    found = analyzed(model, analysis, shown | options)
    scales = random_scales(model, generator, analysis=found) if scales is None else scales
    same: dict[str, Any] = {"batches": data, "scales": scales, "loss": loss, "analysis": found}
    return InvarianceTable({name: invariance_gap(make, model, **same) for name, make in optimizers.items()})


# Balance -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """How a network's weights are shared between the two sides of its units.

    Attributes:
        incoming: ‖weights into u‖², `(H,)`: of all that grow with its scale, times the power they grow with.
        outgoing: ‖weights out of u‖², `(H,)`: of all that shrink.
    """

    incoming: Tensor
    outgoing: Tensor

    @property
    def difference(self) -> Tensor:
        """‖incoming‖² − ‖outgoing‖², `(H,)`: constant along gradient flow."""
        return self.incoming - self.outgoing

    def drift(self, earlier: "Balance") -> Tensor:
        """How far the difference has moved since `earlier`, as a share of what the unit weighed then, `(H,)`."""
        return (self.difference - earlier.difference).abs() / (earlier.incoming + earlier.outgoing)


def balancedness(model: nn.Module, *, analysis: Analysis | None = None, **options: Any) -> Balance:
    """‖incoming‖² and ‖outgoing‖² of every exact unit.

    Scale invariance, f(g_c w) = f(w), gives Σ_in w·g = Σ_out w·g at every unit for every loss, hence
    d/dt(‖incoming‖² − ‖outgoing‖²) = 0 under dw/dt = −g.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data, net[2].weight.data = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]])
    >>> balancedness(net).difference.tolist()  # 25 − 4
    [21.0]
    """
    found = analyzed(model, analysis, options, "pin")
    require_values(model)
    n = 1 + found.H + found.H_absorbed
    forms, _ = forms_of(found.forms, n, torch.device("cpu"))
    incoming, outgoing = sides = torch.zeros(2, forms.ids, dtype=torch.float64, device="cpu")
    weights = weights_of(model)
    for e in found.edges:
        a = square(e.view(weights[e.name]), e.shift).cpu()
        incoming.index_add_(0, e.head.reshape(-1), a.sum(2).reshape(-1))
        outgoing.index_add_(0, e.tail.reshape(-1), a.sum(1).reshape(-1))
    return Balance(*forms.pulls(sides, n)[:, 1 : 1 + found.H])


# Distance and ratios -------------------------------------------------------------------------------------------------


def distance(model_a: nn.Module, model_b: nn.Module, *, at: Coordinates | None = None, **options: Any) -> float:
    """‖v(a) − v(b)‖₂ over all basis paths: how far apart two networks are in G-space.

    Measured in the exact coordinates of `model_a` (skeleton pivoted in its balanced representative, path products in
    units of that representative), so that it does not change when either network is rescaled. It is 0 where they are
    equivalent, and where they differ in the signs of free skeleton weights alone, which path values do not tell. Along
    a training, pass the first network as `model_a`, or its coordinates. (Weights of a unit whose skeleton weights are
    all 0 in `model_a`, as behind a zero-initialised layer, have no path value; they count as they are, scale and all.)

    Args:
        at: Coordinates to measure in; otherwise `options` are for `coordinates`.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    >>> distance(net, rescale_(copy.deepcopy(net), [2.0, 4.0, 8.0])) < 1e-6
    True
    """
    for model in (model_a, model_b):
        require_values(model)
    sizes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in (model_a, model_b)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "distance is between networks of one architecture; these have parameters of other names or sizes"
        )
    at = at if at is not None else coordinates(model_a, **{"reference": "balanced", "view": "exact", **options})
    with torch.no_grad():
        a, b = (basis_values(at, dict(m.named_parameters())).vector().double() for m in (model_a, model_b))
    return float((a - b).norm())


@dataclass
class RatioStatistics:
    """Path ratios of a training by any optimizer: R(r) = v_r after / v_r before, for every trained skeleton path.

    Make it before training and call `update()` after each step. Both R and the values are the same for w and g_c(w).

    Attributes:
        model: The model that is trained.
        at: Its coordinates at the start.
        history: One row per update: smallest, median and largest R, smallest and largest |v_r|.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> ratios = RatioStatistics.of(model)  # before training; after each step: ratios.update()
    >>> ratios.update().shape
    torch.Size([8])
    >>> len(ratios.history)
    1
    """

    model: nn.Module
    at: Coordinates
    history: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, **options: Any) -> "RatioStatistics":
        """For a model in its exact coordinates; `options` are for `coordinates`."""
        return RatioStatistics(model, coordinates(model, **{"reference": "balanced", "view": "exact", **options}))

    def __post_init__(self) -> None:
        require_module(self.model)
        if not isinstance(self.at, Coordinates):
            raise TypeError(f"at is what coordinates returns (RatioStatistics.of), got {type(self.at).__name__}")
        self._before = self._values()
        if not len(self._before):
            raise ValueError("the model has no trained skeleton path: nothing in it can be rescaled")

    def _values(self) -> Tensor:
        with torch.no_grad():
            return basis_values(self.at, dict(self.model.named_parameters())).roots

    def update(self) -> Tensor:
        """Takes the ratios since the last call, `(roots,)`."""
        now = self._values()
        ratio, size = now / self._before, now.abs()
        self._before = now
        low, middle, high = float(ratio.min()), float(ratio.median()), float(ratio.max())
        self.history.append((low, middle, high, float(size.min()), float(size.max())))
        return ratio

    def __str__(self) -> str:
        lines = ["step  R min     R median  R max     |v| min   |v| max"]
        lines += [f"{k + 1:4d}  " + "  ".join(f"{x:<8.4g}" for x in row) for k, row in enumerate(self.history)]
        return "\n".join(lines)
