"""State that an optimizer saves beside torch's own, in the same dict, where hooks of others see it too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

State = dict[str, Any]


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
