"""The command `gspace`, outside of the package: to import that takes seconds, in which Ctrl-C must just end it."""

import signal


def main() -> int:
    """Imports the package while SIGINT has its default action, which shows no traceback; then runs the command."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is ignored, as under nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gspace.lab.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
