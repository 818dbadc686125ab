"""State that an optimizer saves beside torch's own, in the same dict, where hooks of others see it too."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gspace.skeleton import Skeleton

State = dict[str, Any]

_CHOICE = ("in_edge", "in_index", "out_edge", "out_index", "parent", "child", "root")


def save(optimizer: Optimizer, torchs: Callable[[], State], more: State) -> State:
    """What torch's `state_dict` gives, and `more`; hooks that run after it are handed both."""
    with _for_one_call(optimizer.register_state_dict_post_hook(lambda _, state: {**state, **more}, prepend=True)):
        return torchs()


def load(optimizer: Optimizer, torchs: Callable[[State], None], state: State, take: Callable[[State], State]) -> None:
    """Loads, by torch's `load_state_dict`, what `take` leaves of the state, once hooks of others have unwrapped it."""
    with _for_one_call(optimizer.register_load_state_dict_pre_hook(lambda _, state: take(state))):
        torchs(state)


@contextmanager
def _for_one_call(hook: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def of_skeleton(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> State:
    """What a skeleton chose, and what tells whether a network is the one it was chosen for."""
    return {
        "skeleton": {name: getattr(skeleton, name) for name in _CHOICE},
        "units": [(e.head, e.tail) for e in skeleton.edges],
        "shapes": [tuple(weights[e.name].shape) for e in skeleton.edges],
    }


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
    mine = {id(p): p.requires_grad for p in parameters}
    for name in (e.name for e in edges if bool(e.head.any() | e.tail.any())):
        if id(weights[name]) not in mine:
            raise ValueError(f"this state trains {name} in G-space, which is no parameter of this optimizer")
        if not mine[id(weights[name])]:
            raise ValueError(f"this state trains {name} in G-space, which is frozen: load it first, then freeze")
    choice = {name: state["skeleton"][name].cpu() for name in _CHOICE}
    return replace(skeleton, edges=edges, H=len(choice["root"]) - 1, **choice)
