"""Is a table of mappings right for this model? Compared with what the analysis finds, and tried on a copy.

A table is what quantizers keep per architecture: a smooth layer, whose output channels are divided by a scale, and the
balance layers, whose input channels are multiplied by it. Names are those of modules, or regular expressions behind
`re:` as llm-compressor writes them; a balance layer belongs to the smooth layer it shares the longest path with.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Table
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gspace.analysis import Analysis, Edges, Inputs, TraceError, analyze, analyzed, require_module, unwrap
from gspace.analysis.examples import batches, guesses
from gspace.analysis.forward import arguments, set_mode, tensors_in, untouched
from gspace.analysis.result import starred
from gspace.quantization.find import layer
from gspace.quantization.find import mappings as find
from gspace.quantization.mapping import Mapping, common
from gspace.sharding import refuse_sharded

TOLERANCE = 1e-5  # of the output, on a float64 copy: what a model computes in float32 moves by 1e-7

Pair = tuple[str, list[str]]


class Entry(NamedTuple):
    """One smooth layer of a table and its balance layers, in the model's names."""

    smooth: str
    balance: tuple[str, ...]


class Problem(NamedTuple):
    """What is wrong with an entry, and how far the output moves if it is applied (None: it cannot be)."""

    text: str
    change: float | None


def _analyzed(model: nn.Module, example_input: Inputs | None, analysis: Analysis | None) -> tuple[nn.Module, Analysis]:
    require_module(model)
    inner = unwrap(model)
    refuse_sharded(dict(inner.named_parameters()), "a mapping")
    return inner, analyze(inner, example_input) if analysis is None else analyzed(inner, analysis, {})


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
            dicts with those two keys.
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
    model, found = _analyzed(model, example_input, analysis)
    there = find(model, analysis=found)
    layers = _layers(model, found)
    pairs = [_pair(entry) for entry in table]
    problems = [Problem(text, None) for pair in pairs for text in _unknown(pair, layers)]
    for entry, mapping, change in _tried(model, pairs, example_input, found, there, seed):
        texts = _wrong(entry, mapping, found)
        if not texts and change is not None and not change <= TOLERANCE:
            texts = [f"{entry.smooth!r} → {_listed(entry.balance)} agrees with the analysis, please report this model"]
        problems += [Problem(text, change) for text in texts]
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
    model, found = _analyzed(model, example_input, analysis)
    tried = _tried(model, [_pair(entry) for entry in table], example_input, found, find(model, analysis=found), seed)
    return [(entry, change) for entry, _, change in tried]


def _tried(
    model: nn.Module, table: Sequence[Pair], example_input: Any, found: Analysis, there: Sequence[Mapping], seed: int
) -> Iterator[tuple[Entry, Mapping | None, float | None]]:
    """Entries with the mappings they come closest to, and how far the output moves."""
    layers = _layers(model, found)
    pairs = [pair for pair in table if not _unknown(pair, layers)]
    meta = any(p.is_meta for p in model.parameters())
    trial = None if meta or not pairs else _Trial(model, found, example_input, seed)
    for pair in pairs:
        for entry in _resolved(*pair, layers):
            mapping = _best(entry, there)
            yield entry, mapping, None if trial is None else trial.change(entry, mapping)


# The table ------------------------------------------------------------------------------------------------------------


def _pair(entry: Any) -> Pair:
    """A table's entry in one order."""
    smooth: Any
    balance: Any
    if isinstance(entry, Mapping):
        return entry.smooth_layer, list(entry.balance_layers)
    if isinstance(entry, Table):
        smooth, balance = (entry.get(k) or entry.get(f"{k}s") for k in ("smooth_layer", "balance_layer"))
    elif isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
        smooth, balance = entry if isinstance(entry[0], str) else reversed(entry)
    else:
        smooth, balance = None, None
    listed = [balance] if isinstance(balance, str) else list(balance) if isinstance(balance, Sequence) else []
    if not isinstance(smooth, str) or not listed or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"an entry of the table is (smooth_layer, [balance_layers]), got {entry!r}")
    return smooth, listed


def _layers(model: nn.Module, found: Analysis) -> list[str]:
    """Names a table may use: modules, and parameters that are no module's weight."""
    names = {name for name, _ in model.named_parameters()}
    modules = [name for name, _ in model.named_modules() if name]
    return list(dict.fromkeys([*modules, *(layer(e.name, names) for e in found.edges)]))


def _unknown(pair: Pair, layers: Sequence[str]) -> list[str]:
    """Lines for names that match nothing."""
    return [_nothing(name, layers) for name in dict.fromkeys((pair[0], *pair[1])) if not _matches(name, layers)]


def _resolved(smooth: str, balance: Sequence[str], layers: Sequence[str]) -> list[Entry]:
    """The layers that an entry means."""
    heads = _matches(smooth, layers)
    order = {name: k for k, name in enumerate(layers)}
    readers: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for pattern in balance for name in _matches(pattern, layers)):
        shared = {head: common([head.split("."), name.split(".")]) for head in heads}
        near = [head for head in heads if shared[head] == max(shared.values())]
        before = [head for head in near if order[head] < order[name]]
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


def _nothing(pattern: str, layers: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, layers, 1)
    return f"the model has no layer {pattern!r}" + (f"; did you mean {close[0]!r}?" if close else "")


# The analysis ---------------------------------------------------------------------------------------------------------


def _best(entry: Entry, there: Sequence[Mapping]) -> Mapping | None:
    """The mapping of this smooth layer that shares most layers with the entry."""
    mine = [m for m in there if entry.smooth in m.writers and m.kind != "query-key"]
    wanted = set(entry.balance)
    return max(mine, key=lambda m: -len(wanted ^ set(m.balance_layers)), default=None)


def _wrong(entry: Entry, mapping: Mapping | None, found: Analysis) -> list[str]:
    if mapping is None:
        return [f"{entry.smooth!r} carries no scale that can move into {_listed(entry.balance)}{_why(entry, found)}"]
    texts = [
        f"{name!r} reads the scale of {entry.smooth!r} too and is missing"
        for name in mapping.balance_layers
        if name not in entry.balance
    ]
    texts += [
        f"{name!r} does not read the scale of {entry.smooth!r}"
        for name in entry.balance
        if name not in mapping.balance_layers
    ]
    texts += [f"{name!r} writes the scale of {entry.smooth!r} too" for name in mapping.writers if name != entry.smooth]
    return texts


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


def _folded(problems: Sequence[Problem]) -> list[str]:
    found: dict[str, list[Problem]] = {}
    for p in problems:
        found.setdefault(starred([p.text])[0], []).append(p)
    lines = []
    for text, same in found.items():
        changes = [p.change for p in same if p.change is not None]
        moved = f"; applied, the output moves by {max(changes):.2g}" if changes else ""
        times = f" (in {len(same)} places)" if len(same) > 1 else ""
        lines.append(f"{same[0].text if len(same) == 1 else text}{times}{moved}")
    return lines


# The trial ------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What an entry multiplies: p[slice] + offset along `dim`."""

    parameter: str
    dim: int
    slice: tuple[slice, ...]
    offset: float
    factor: Tensor


class _Trial:
    """A float64 copy of the model, its output, and what an entry does to it."""

    def __init__(self, model: nn.Module, found: Analysis, example_input: Any, seed: int) -> None:
        self.model = deepcopy(model).double()
        self.edges = found.edges
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.inputs = self._inputs(example_input)
        self.before = self._outputs()

    def _inputs(self, example_input: Any) -> Inputs:
        def double(t: Tensor) -> Tensor:
            return t.double() if t.is_floating_point() else t

        if example_input is not None:
            return tree_map_only(Tensor, double, batches(example_input)[0])
        for guess in guesses(self.model):
            self.inputs = guess
            with contextlib.suppress(Exception):  # the forward pass is the user's and may raise anything
                self._outputs()
                return guess
        raise TraceError("no input of the model could be guessed: pass example_input=, a batch the model accepts")

    def _outputs(self) -> list[Tensor]:
        args, kwargs = arguments(self.inputs)
        with untouched(self.model):
            set_mode(self.model, training=False)
            torch.manual_seed(0)
            return [t for t in tensors_in(self.model(*args, **kwargs)) if t.is_floating_point() and t.numel()]

    def change(self, entry: Entry, mapping: Mapping | None) -> float | None:
        """max |after − before| / max |before| with random scales on this entry; None if sizes do not fit."""
        parts = self._parts(entry, mapping)
        if parts is None:
            return None
        parameters = dict(self.model.named_parameters())
        kept = {part.parameter: parameters[part.parameter].detach().clone() for part in parts}
        with torch.no_grad():
            for part in parts:
                p = parameters[part.parameter][part.slice]
                factor = part.factor.to(p.device).reshape([-1 if k == part.dim else 1 for k in range(p.dim())])
                p.copy_((p + part.offset) * factor - part.offset)
            after = self._outputs()
            for name, value in kept.items():
                parameters[name].copy_(value)
        return max(_relative(b, a) for b, a in zip(self.before, after, strict=True))

    def _parts(self, entry: Entry, mapping: Mapping | None) -> list[_Part] | None:
        """What the entry scales: where the analysis knows it as it says, else as a quantizer would."""
        names = {name for name, _ in self.model.named_parameters()}
        edges = [(e, layer(e.name, names)) for e in self.edges]
        readers = [self._shape(e)[0 if e.swap else 1] for e, of in edges if of in entry.balance and self._rank(e) > 1]
        size = mapping.size if mapping else next(iter(readers), 0)
        scale = torch.randn(size, generator=self.generator, dtype=torch.float64).exp()
        both = (mapping.sinks, mapping.sources) if mapping else ((), ())
        parts: list[_Part] = []
        for e, of in edges:
            for wanted, grows in ((of == entry.smooth, True), (of in entry.balance and self._rank(e) > 1, False)):
                if not wanted:
                    continue
                sides = [s for s in both[grows] if s.parameter == e.name]
                parts += [_Part(*s[:3], s.offset, scale[list(s.channels)] ** s.exponent) for s in sides]
                if not sides:
                    shape = self._shape(e)
                    d = 0 if len(shape) == 1 or grows != e.swap else 1
                    first = shape[d] - size  # of a fused projection the last rows, as quantizers do
                    if first < 0 or (first and not grows):
                        return None
                    at = tuple(slice(first, None) if k == d else slice(None) for k in range(len(shape)))
                    parts.append(_Part(e.name, d, at, e.shift, scale if grows else 1 / scale))
        return parts or None

    def _shape(self, e: Edges) -> torch.Size:
        return self.model.get_parameter(e.name).shape

    def _rank(self, e: Edges) -> int:
        return len(self._shape(e))


def _relative(before: Tensor, after: Tensor) -> float:
    size, change = float(before.abs().max()), float((after - before).abs().max())
    return change / size if size else float(change > 0)
