"""Random numbers drawn while a forward pass is traced: it would be followed along one draw only.

The generators of torch, Python and numpy are common to all threads. What another thread draws is none of our business:
with others about that draw too, that numbers were drawn proves nothing.
"""

import random
import sys
import threading
import time
from typing import Any

import torch


class Draws:
    """Notes whether numbers were drawn since, by whomever."""

    def __init__(self) -> None:
        self.before, self.made = _states(), time.perf_counter()

    @property
    def seen(self) -> bool:
        now = _states()
        return str(now) != str(self.before) or not torch.equal(now[0], self.before[0])

    def undo(self) -> None:
        """Puts the generators back."""
        torch.set_rng_state(self.before[0])
        random.setstate(self.before[1])
        if self.before[2]:
            sys.modules["numpy"].random.set_state(self.before[2])

    def forget(self) -> None:
        """What was drawn until now does not count: puts it back, if nobody else may have drawn it."""
        if alone():
            self.undo()
        else:
            self.before = _states()


def alone() -> bool:
    """Whether no other thread could have drawn them."""
    return threading.active_count() == 1


def others_draw(draws: Draws) -> bool:
    """Whether another thread draws while this one waits for as long as it has worked since `draws`."""
    if alone():
        return False
    waiting = Draws()
    time.sleep(max(waiting.made - draws.made, 0.02))
    return waiting.seen


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(legacy=False)
