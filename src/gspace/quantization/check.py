"""Is a table of mappings right for this model? Compared with what the analysis finds, and tried on a copy.

A table is what quantizers keep per architecture: a smooth layer, whose output channels are divided by a scale, and the
balance layers, whose input channels are multiplied by it. Names are those of modules, or regular expressions behind
`re:` as llm-compressor writes them; a balance layer belongs to the smooth layer it shares the longest path with.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gspace.analysis import Analysis, Inputs, TraceError
from gspace.analysis.examples import attempted, first_line
from gspace.analysis.forward import arguments, set_mode, tensors_in, untouched
from gspace.analysis.result import starred
from gspace.optim.arguments import require_finite
from gspace.quantization.find import along, examined, layer, touched
from gspace.quantization.find import mappings as find
from gspace.quantization.mapping import Mapping, Side, common, multiply_

TOLERANCE = 1e-5  # of the output, on a float64 copy: what a model computes in float32 moves by 1e-7

Pair = tuple[str, list[str]]


class Entry(NamedTuple):
    """One smooth layer of a table and its balance layers, in the model's names."""

    smooth: str
    balance: tuple[str, ...]


def check_mappings(
    model: nn.Module,
    table: Iterable[Any],
    example_input: Inputs | None = None,
    *,
    analysis: Analysis | None = None,
    seed: int = 0,
) -> list[str]:
    """One line per problem of `table`; empty if every entry is exact.

    Args:
        model: On the meta device, nothing is tried on a copy.
        table: Entries `(smooth_layer, balance_layers)`, `(balance_layers, smooth_layer)` as SmoothQuant has them, or
            dicts with those two keys. What `mappings` returns, or its `to_dict()`, is checked whole, all writers and
            entries of parameters.
        example_input: A batch the model accepts, or a list of several, as for `analyze`.
        analysis: What `analyze` has found, to save a run.
        seed: Of the scales that are tried, e^N(0, 1) per channel.

    Every entry is also applied to a float64 copy of the model. The line says how far the output moves, relative to its
    largest value. Problems that repeat from layer to layer are one line, with * for the layer's number.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> check_mappings(net, [("0", ["2"])])
    []
    >>> check_mappings(net, [("0", ["3"])])
    ["the model has no layer '3'"]
    """
    if not isinstance(table, Iterable):
        raise TypeError(f"a table is a list of entries (smooth_layer, [balance_layers]), got {type(table).__name__}")
    model, found = examined(model, example_input, analysis)
    lines, tried = _tried(model, table, example_input, found, seed)
    problems: list[tuple[str, float | None]] = [(line, None) for line in lines]
    for entry, texts, change in tried:
        if not texts and change is not None and not change <= TOLERANCE:
            texts = [f"{entry.smooth!r} → {_listed(entry.balance)} agrees with the analysis, please report this model"]
        problems += [(text, change) for text in texts]
    return _folded(problems)


def effects(
    model: nn.Module,
    table: Iterable[Any],
    example_input: Inputs | None = None,
    *,
    analysis: Analysis | None = None,
    seed: int = 0,
) -> list[tuple[Entry, float | None]]:
    """Every entry in the model's own names, and how far the output moves if it alone is applied; None: it cannot be.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    >>> [(entry, change)] = effects(net, [("0", ["2"])], torch.randn(5, 4).double())
    >>> change < 1e-12
    True
    """
    model, found = examined(model, example_input, analysis)
    return [(entry, change) for entry, _, change in _tried(model, table, example_input, found, seed)[1]]


def _tried(
    model: nn.Module, table: Iterable[Any], example_input: Any, found: Analysis, seed: int
) -> tuple[list[str], list[tuple[Entry, list[str], float | None]]]:
    """Lines for names that match nothing; entries, what the analysis says against them, and the output's change."""
    names = {name for name, _ in model.named_parameters()}
    modules = [name for name, _ in model.named_modules() if name]
    layers = list(dict.fromkeys([*modules, *(layer(e.name, names) for e in found.edges)]))
    there, trial, lines, tried = find(model, analysis=found), None, [], []
    for given in table:
        smooth, balance = _pair(given)
        unknown = [name for name in dict.fromkeys((smooth, *balance)) if not _matches(name, layers)]
        for name in unknown:
            close = difflib.get_close_matches(name, layers, 1)
            lines.append(f"the model has no layer {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if unknown:
            continue
        whole = _whole(given)
        exact = next((m for m in there if m.smooth_layer == smooth and m.to_dict() == whole), None)
        for entry in [Entry(smooth, tuple(balance))] if whole else _resolved(smooth, balance, layers):
            if trial is None and not any(p.is_meta for p in model.parameters()):
                trial = _Trial(model, found, example_input, seed)
            near = exact or _best(entry, there, whole.get("kind"))
            texts = _wrong(entry, near, found, whole.get("writers", [entry.smooth]))
            if whole and not exact:
                texts = texts or [f"{smooth!r} → {_listed(balance)} scales other entries of its parameters here"]
            sides = [*exact.sources, *exact.sinks] if exact else trial.sides(entry, near) if trial and not whole else []
            tried.append((entry, texts, trial.change(sides) if trial else None))
    return lines, tried


# The table ------------------------------------------------------------------------------------------------------------


def _pair(entry: Any) -> Pair:
    """A table's entry in one order."""
    smooth: Any = None
    balance: Any = None
    match _whole(entry) or entry:
        case Table() as named:
            smooth, balance = (named.get(k) or named.get(f"{k}s") for k in ("smooth_layer", "balance_layer"))
        case [str(smooth), balance] | [balance, str(smooth)]:
            pass
    listed = [balance] if isinstance(balance, str) else list(balance) if isinstance(balance, Sequence) else []
    if not isinstance(smooth, str) or not listed or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"an entry of the table is (smooth_layer, [balance_layers]), got {entry!r}")
    return smooth, listed


def _whole(entry: Any) -> dict[str, Any]:
    """What `mappings` has found, or its `to_dict()`; empty for an entry that only names layers."""
    plain = entry.to_dict() if isinstance(entry, Mapping) else entry
    return plain if isinstance(plain, dict) and isinstance(plain.get("writers"), list) else {}


def _resolved(smooth: str, balance: Sequence[str], layers: Sequence[str]) -> list[Entry]:
    """The layers that an entry means."""
    heads = _matches(smooth, layers)
    readers: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for pattern in balance for name in _matches(pattern, layers)):
        shared = {head: common([head.split("."), name.split(".")]) for head in heads}
        near = [head for head in heads if shared[head] == max(shared.values())]
        before = [head for head in near if layers.index(head) < layers.index(name)]
        readers.setdefault((before or near)[-1], []).append(name)
    return [Entry(head, tuple(listed)) for head, listed in readers.items()]


def _matches(pattern: str, layers: Sequence[str]) -> list[str]:
    if not pattern.startswith("re:"):
        return [pattern] if pattern in layers else []
    try:
        expression = re.compile(pattern[3:])
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    found = [name for name in layers if expression.match(name)]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


# The analysis ---------------------------------------------------------------------------------------------------------


def _best(entry: Entry, there: Sequence[Mapping], kind: str | None) -> Mapping | None:
    """The mapping of this smooth layer that shares most layers with the entry; no table means queries and keys."""
    mine = [m for m in there if entry.smooth in m.writers and (m.kind == "query-key") == (kind == "query-key")]
    wanted = set(entry.balance)
    return max(mine, key=lambda m: -len(wanted ^ set(m.balance_layers)), default=None)


def _wrong(entry: Entry, mapping: Mapping | None, found: Analysis, writers: Sequence[str]) -> list[str]:
    if mapping is None:
        return [f"{entry.smooth!r} carries no scale that can move into {_listed(entry.balance)}{_why(entry, found)}"]
    wanted, there = entry.balance, mapping.balance_layers
    texts = [f"{name!r} reads the scale of {entry.smooth!r} too and is missing" for name in there if name not in wanted]
    texts += [f"{name!r} does not read the scale of {entry.smooth!r}" for name in wanted if name not in there]
    others = [name for name in mapping.writers if name not in writers]
    return texts + [f"{name!r} writes the scale of {entry.smooth!r} too" for name in others]


def _why(entry: Entry, found: Analysis) -> str:
    """What keeps a layer's channels from having scales of their own, as far as the analysis tells."""
    written = [e for e in found.edges if e.name.rpartition(".")[0] == entry.smooth or e.name == entry.smooth]
    if not written:
        return ": it has no weight that is one factor per channel"
    heads = torch.cat([e.head.reshape(-1) for e in written]).unique()
    shared = [e.name for e in found.edges if e not in written and bool(torch.isin(e.head, heads[heads > 0]).any())]
    if bool((heads > 0).all()) and shared:
        return (
            f": its channels are added to those of {starred([shared[-1].rpartition('.')[0]])[0]!r}, one scale for all"
        )
    parent = entry.smooth.rpartition(".")[0]
    near = [p for p in found.pinned if parent and p.where.startswith(parent) and "output" not in p.operation]
    return f": {near[0].operation} at {near[0].where!r}, {near[0].reason}" if near else ": its output has no free scale"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _folded(problems: Sequence[tuple[str, float | None]]) -> list[str]:
    found: dict[str, list[tuple[str, float | None]]] = {}
    for text, change in problems:
        found.setdefault(starred([text])[0], []).append((text, change))
    lines = []
    for text, same in found.items():
        changes = [change for _, change in same if change is not None]
        moved = f"; applied, the output moves by {max(changes):.2g}" if changes else ""
        lines.append(f"{text} (in {len(same)} places){moved}" if len(same) > 1 else same[0][0] + moved)
    return lines


# The trial ------------------------------------------------------------------------------------------------------------


class _Trial:
    """The model on float64 copies of its parameters and buffers, its output, and what an entry does to it."""

    def __init__(self, model: nn.Module, found: Analysis, example_input: Any, seed: int) -> None:
        require_finite(model, touched(found))
        self.model = model
        self.parameters = {name: _wide(p.detach()) for name, p in model.named_parameters()}
        self.edges = [(e, layer(e.name, self.parameters)) for e in found.edges]
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.before = attempted(self._start, model, example_input)

    def _start(self, listed: list[Inputs]) -> list[Tensor]:
        self.inputs = tree_map_only(Tensor, _wide, listed[0])
        try:
            return self._outputs(self.parameters)
        except Exception as error:  # the forward pass is the user's and may raise anything
            raise TraceError(f"a float64 copy of the model does not accept the example: {first_line(error)}") from error

    def _outputs(self, parameters: Table[str, Tensor]) -> list[Tensor]:
        with untouched(self.model):
            set_mode(self.model, training=False)
            torch.manual_seed(0)
            state = {name: _wide(b) for name, b in self.model.named_buffers()}
            for name, p in self.model.named_parameters():
                if p.is_inference():
                    state[name] = parameters[name]
                else:  # itself, as lists may hold it too, as those of an RNN do
                    p.data = parameters[name]
            outputs = torch.func.functional_call(self.model, state, *arguments(self.inputs))
            return [t for t in tensors_in(outputs) if t.is_floating_point() and t.numel()]

    def change(self, sides: Sequence[Side]) -> float | None:
        """max |after − before| / max |before| with random scales on these entries; None if there are none."""
        if not sides:
            return None
        size = 1 + max(max(side.channels) for side in sides)
        log = torch.randn(size, generator=self.generator, dtype=torch.float64, device="cpu")
        scaled = self.parameters | {side.parameter: self.parameters[side.parameter].clone() for side in sides}
        for side in sides:
            multiply_(scaled[side.parameter], side, log)
        return max(_relative(b, a) for b, a in zip(self.before, self._outputs(scaled), strict=True))

    def sides(self, entry: Entry, mapping: Mapping | None) -> list[Side]:
        """What the entry scales: where the analysis knows it as it says, else as a quantizer would; nothing: unfit."""
        found, whole = list[Side](), list[Side]()
        for e, of in self.edges:
            for wanted, writes in ((of == entry.smooth, True), (of in entry.balance, False)):
                known = () if mapping is None else mapping.sources if writes else mapping.sinks
                mine = [s for s in known if wanted and s.parameter == e.name]
                found += mine
                if wanted and not mine and (writes or e.name in (of, f"{of}.weight")):  # not the bias of a reader
                    shape = self.parameters[e.name].shape
                    d, at = along(e, shape, writes), (slice(None),) * len(shape)
                    whole.append(Side(e.name, d, at, 1 if writes else -1, e.shift, range((*shape, 1)[d])))
        size = mapping.size if mapping else next((len(s.channels) for s in whole if s.exponent < 0), 0)
        for side in whole:
            first = len(side.channels) - size  # of a fused projection the last rows, as quantizers do
            if not size or first < 0 or (first and side.exponent < 0):
                return []
            at = tuple(slice(first, None) if d == side.dim else s for d, s in enumerate(side.slice))
            found.append(side._replace(slice=at, channels=range(size)))
        return found


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True)


def _relative(before: Tensor, after: Tensor) -> float:
    size, change = float(before.abs().max()), float((after - before).abs().max())
    return change / size if size else float(change > 0)
