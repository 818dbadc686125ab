"""The command `gspace`, outside of the package: to import that takes seconds, in which Ctrl-C must just end it.

`python -m gspace` imports the package before any code of the command runs. The package therefore imports this first.
"""

import signal
import sys


def _quiet() -> bool:
    """SIGINT has its default action, which shows no traceback; not where it is ignored, as under nohup."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return ours


# While `python -m NAME` imports the package of NAME, and only then, this is the name of the program.
_as_module = getattr(sys, "argv", [""])[0] == "-m" and "gspace" in sys.orig_argv and _quiet()


def main() -> int:
    """Imports the package, then runs the command."""
    ours = _quiet() or _as_module
    from gspace.lab.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
