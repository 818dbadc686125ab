"""Signals, and a limit of time, as a request to stop that work reads where it can be stopped."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gspace.lab.errors import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)

Stop = Callable[[], int | None]
"""Number of the signal that asks to stop, or None."""


def interruption(signum: int, where: str, minutes: float | None) -> Interrupted:
    """What ends the work: a signal, or a limit of time, which comes as SIGALRM.

    >>> str(interruption(signal.SIGALRM, "at iteration 5 of 9", 90.0))
    'the 90 minutes are over at iteration 5 of 9; run again to continue'
    """
    why = f"stopped by {signal.Signals(signum).name}"
    if signum == signal.SIGALRM and minutes is not None:
        why = "the minute is over" if minutes == 1 else f"the {minutes:g} minutes are over"
    return Interrupted(f"{why} {where}; run again to continue", signum)


@contextmanager
def stop_requests(minutes: float | None = None) -> Iterator[Stop]:
    """Turns these signals into a request that the loop reads; a second one acts as it always did.

    With `minutes`, SIGALRM comes after that time. SIGHUP stays ignored where it is (`nohup`).
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {s: signal.getsignal(s) for s in STOPPING}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, before[signal.Signals(signum)])

    for signum in before:
        signal.signal(signum, receive)
    try:
        if minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
        yield lambda: received[0] if received else None
    finally:
        if minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
