"""State that an optimizer saves beside torch's own, in the same dict, where hooks of others see it too.

What is loaded is looked at before it is believed: a step in C would read and write wherever a damaged state sends it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gspace.devices import on_cpu
from gspace.skeleton import Skeleton

State = dict[str, Any]

_CHOICE = ("in_edge", "in_index", "out_edge", "out_index", "parent", "child", "root")


def save(optimizer: Optimizer, torchs: Callable[[], State], more: State) -> State:
    """What torch's `state_dict` gives, and `more`; hooks that run after it are handed both."""
    with _for_one_call(optimizer.register_state_dict_post_hook(lambda _, state: {**state, **more}, prepend=True)):
        return torchs()


def load(
    optimizer: Optimizer,
    torchs: Callable[[State], None],
    state: State,
    take: Callable[[State], State],
    keep: Callable[[], None],
) -> None:
    """Loads a state, all of it or nothing.

    Once hooks of others have unwrapped it, `take` looks at it and leaves what is for torch's `load_state_dict`; `keep`
    does the rest.
    """

    def taken(_: Optimizer, state: State) -> State:
        with damage_told():
            require_torchs(state)
            return take(state)

    with all_or_nothing(optimizer):
        with _for_one_call(optimizer.register_load_state_dict_pre_hook(taken)):
            torchs(state)
        with damage_told():
            for group in optimizer.param_groups:
                for key, value in optimizer.defaults.items():
                    group.setdefault(key, value)
            for p, key in product(optimizer.state, ("momentum_buffer", "kappa")):
                value = optimizer.state[p].get(key) if isinstance(p, Tensor) else None
                fits = value is None or (isinstance(value, Tensor) and value.shape == p.shape)
                require(fits, f"{key} of a parameter is no tensor of its shape")
            keep()


@contextmanager
def all_or_nothing(optimizer: Optimizer) -> Iterator[None]:
    """The attributes of an optimizer are what they were if something in the middle is refused."""
    before = vars(optimizer).copy()
    try:
        yield
    except Exception:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise


def portable(optimizer: Optimizer, *alone: str) -> State:
    """What a copy takes along: all but hooks, the `step` that a scheduler wraps, and what else is its `alone`."""
    skipped = ("step", "_zero_grad_profile_name", *alone)
    return {k: v for k, v in vars(optimizer).items() if k not in skipped and not k.startswith("_optimizer_")}


@contextmanager
def _for_one_call(hook: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


# What is damaged ------------------------------------------------------------------------------------------------------


def require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"this state is damaged: {what}")


@contextmanager
def damage_told() -> Iterator[None]:
    """An object of another kind than a state holds there ends in words of Python or torch: say what it means."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"this state is damaged ({type(error).__name__}: {error})") from error


def require_torchs(state: Any) -> None:
    """What torch's `load_state_dict` takes for granted."""
    require(isinstance(state, Mapping), f"it is an object of {type(state).__name__}")
    entries, groups = state.get("state"), state.get("param_groups")
    require(
        isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values()),
        "'state' is no dict of dicts",
    )
    require(
        isinstance(groups, list | tuple)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups),
        "'param_groups' is no list of groups",
    )


def require_units(n: int, what: str, *vectors: Any) -> None:
    """One number for each unit and for ground."""
    require(all(isinstance(x, Tensor) and x.shape == (n,) for x in vectors), f"{what} is not one number per unit")


# The skeleton ---------------------------------------------------------------------------------------------------------


def of_skeleton(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> State:
    """What a skeleton chose, and what tells whether a network is the one it was chosen for."""
    return {
        "skeleton": {name: getattr(skeleton, name) for name in _CHOICE},
        "units": [(e.head, e.tail) for e in skeleton.edges],
        "shapes": [tuple(weights[e.name].shape) for e in skeleton.edges],
    }


@on_cpu
def skeleton_of(
    state: Mapping[str, Any], skeleton: Skeleton, weights: Mapping[str, Tensor], parameters: Iterable[Tensor]
) -> Skeleton:
    """The skeleton that was saved, for a network that has `skeleton` now and an optimizer of these parameters."""
    here = of_skeleton(skeleton, weights)
    sizes, saved = ([(head.shape, tail.shape) for head, tail in found["units"]] for found in (here, state))
    if saved != sizes or state.get("shapes", here["shapes"]) != here["shapes"]:
        raise ValueError("this state belongs to another network: its layers have other sizes")
    pairs = zip(skeleton.edges, state["units"], strict=True)
    edges = tuple(replace(e, head=head.cpu(), tail=tail.cpu()) for e, (head, tail) in pairs)
    choice = {name: state["skeleton"][name].cpu() for name in _CHOICE}
    found = replace(skeleton, edges=edges, H=len(choice["root"]) - 1, **choice)
    _require_sound(found, weights)
    mine = {id(p): p.requires_grad for p in parameters}
    for name in (e.name for e in edges if bool(e.head.any() | e.tail.any())):
        if id(weights[name]) not in mine:
            raise ValueError(f"this state trains {name} in G-space, which is no parameter of this optimizer")
        if not mine[id(weights[name])]:
            raise ValueError(f"this state trains {name} in G-space, which is frozen: load it first, then freeze")
    return found


def _require_sound(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> None:
    """Every number of a skeleton points to something, and every walk along it ends at ground."""
    n, unit = skeleton.H + 1, torch.arange(skeleton.H + 1)
    require_units(n, "its skeleton", *(getattr(skeleton, name) for name in _CHOICE))
    ids = [skeleton.parent, skeleton.child, skeleton.root, *(x for e in skeleton.edges for x in (e.head, e.tail))]
    require(all(bool(((x >= 0) & (x < n)).all()) for x in ids), "its skeleton names units that are not there")
    sizes = torch.tensor([weights[e.name].numel() for e in skeleton.edges])
    for edge, index in ((skeleton.in_edge[1:], skeleton.in_index[1:]), (skeleton.out_edge[1:], skeleton.out_index[1:])):
        inside = (edge >= 0) & (edge < len(sizes)) & (index >= 0)
        require(bool((inside & (index < sizes[edge * inside])).all()), "its skeleton names weights that are not there")
    for following in (skeleton.parent, skeleton.child):
        at = following
        for _ in range(n.bit_length()):
            at = at[at]
        require(not bool(at.any()), "its skeleton goes round in a circle")
    climbed = torch.equal(skeleton.root[skeleton.root], skeleton.root)
    require(climbed and bool(((skeleton.root > 0) == (unit > 0)).all()), "its skeleton has roots that are none")
