"""An example batch for a model: what the user gives, what the model itself offers, or a guess from its first layer."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gspace.analysis.forward import Inputs, TraceError

T = TypeVar("T")
ROWS = 2  # of a guessed batch: BatchNorm needs more than one
SIDES = (32, 28, 64, 16, 8, 29, 224, 96, 48, 4, 5, 6, 7, 9, 10, 12, 14, 20, 24, 299)
TOKENS = (16, 7)
SHOWN = 4  # of the guesses, in an error
LAYERS = 3  # that a guess is made from: a parameter of the model itself may come first, or a slope


def batches(example_input: Any) -> list[Inputs]:
    """One batch or several: a list whose entries are batches (tuples, dicts or tensors) holds several."""
    several = isinstance(example_input, list) and example_input
    return (
        example_input if several and all(isinstance(x, (Tensor, tuple, Mapping)) for x in several) else [example_input]
    )


def few_rows(example: Inputs, rows: int = ROWS) -> Inputs | None:
    """The first rows of a batch, if all its tensors have the same number of rows and that is more."""
    sizes = {t.shape[0] if t.dim() else -1 for t in tree_leaves(_plain(example)) if isinstance(t, Tensor)}
    if len(sizes) != 1 or min(sizes) <= rows:
        return None
    return tree_map_only(Tensor, lambda t: t[:rows], _plain(example))


def _plain(example: Inputs) -> Any:
    return dict(example) if isinstance(example, Mapping) else example


def attempted(run: Callable[[list[Inputs]], T], model: nn.Module, example_input: Any) -> T:
    """What `run` makes of the batches that are given, else of the first guess that the model accepts."""
    if example_input is not None:
        return run(batches(example_input))
    tried: list[tuple[Inputs, Exception]] = []
    for guess in guesses(model):
        try:
            return run([guess])
        except TraceError as error:
            tried.append((guess, error))
    raise refusal(tried)


def redrawn(example: Inputs, generator: torch.Generator) -> Inputs:
    """Other values of the same kind and sizes: integers out of the same range, normal numbers."""

    def draw(t: Tensor) -> Tensor:
        if t.is_meta or not t.numel():
            return t
        if t.is_floating_point():
            return torch.randn(t.shape, generator=generator, device="cpu").to(t)
        if t.dtype == torch.bool or int(t.max()) <= 1:
            return t
        return torch.randint(int(t.min()), int(t.max()) + 1, t.shape, generator=generator, device="cpu").to(t)

    return tree_map_only(Tensor, draw, _plain(example))


def guesses(model: nn.Module) -> Iterator[Inputs]:
    """Inputs that a model may accept, likely ones first."""
    like = next(iter(sorted(model.parameters(), key=lambda p: not p.is_floating_point())), torch.empty(0, device="cpu"))
    drawn: Any = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)

    def fitted(t: Tensor) -> Tensor:
        return t.to(like.device, like.dtype if t.is_floating_point() else t.dtype)

    offered = getattr(model, "dummy_inputs", None)
    if isinstance(offered, Mapping) and offered:
        yield tree_map_only(Tensor, fitted, dict(offered))
    config = getattr(model, "pretrained_cfg", None)
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    shapes = [((ROWS, *config["input_size"]), 0)] if isinstance(config, Mapping) and "input_size" in config else []
    shapes += [shape for layer in layers[:LAYERS] for shape in _shapes(layer)]
    for shape, below in dict.fromkeys(shapes or [((ROWS, 1), 0), ((ROWS, TOKENS[-1], 1), 0)]):
        draw = partial(torch.randint, below) if below else torch.randn
        yield tuple(fitted(draw(shape, **drawn)) for _ in range(max(count, 1)))


def _shapes(layer: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """Sizes of an input of a layer; and below which number its integers lie, or 0."""
    if isinstance(layer, nn.Embedding):
        yield from (((ROWS, n), layer.num_embeddings) for n in TOKENS)
        return
    rank = next((d for d in (1, 2, 3) if type(layer).__name__.endswith(f"{d}d")), 0)
    channels = getattr(layer, "in_channels", getattr(layer, "num_features", None))
    if rank and isinstance(channels, int):
        yield from (((ROWS, channels, *[side] * rank), 0) for side in SIDES)
    widths = [n for p in layer.parameters(recurse=False) for n in reversed(p.shape) if n]
    for width in dict.fromkeys([getattr(layer, "in_features", 1), *widths]):
        yield (ROWS, width), 0
        yield (ROWS, TOKENS[-1], width), 0


def refusal(tried: list[tuple[Inputs, Exception]]) -> TraceError:
    """What to say when no guess fits: the likeliest ones, and what became of the first."""
    shapes = ["×".join(map(str, t.shape)) for x, _ in tried for t in tree_leaves(_plain(x)) if isinstance(t, Tensor)]
    some = list(dict.fromkeys(shapes))
    listed = ", ".join(some[:SHOWN]) + (" …" if len(some) > SHOWN else "")
    told = f" (tried {listed}: {first_line(tried[0][1].__cause__ or tried[0][1])})" if tried else ""
    return TraceError(f"no input of the model could be guessed{told}: pass example_input=, a batch the model accepts")


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
