"""What a user of the lab can put right: each error is one line, and names its exit code for the command line."""


class LabError(Exception):
    """Base of the lab's refusals; the message fits on one line."""

    exit_code = 1


class RequestError(LabError, ValueError):
    """What cannot be served: an unknown name, an impossible number, settings that contradict each other."""

    exit_code = 2


class DataError(LabError):
    """A data file that is absent, damaged, truncated or not what its name says; it is never trained on."""

    exit_code = 3


class RecordError(LabError):
    """A run folder that cannot be written or read."""

    exit_code = 4


class BusyError(RecordError):
    """Another process is at work on the same run folder."""


class DeviceError(LabError):
    """The device, the compiler or the package that was asked for is not here."""

    exit_code = 5


class Interrupted(LabError):
    """The run was stopped by a signal after writing its checkpoint; running it again continues it."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def reason(error: BaseException, *, named: bool = False) -> str:
    """The message of an exception on one line, with its type if asked for, or if there is no message."""
    message, kind = " ".join(str(error).split()), type(error).__name__
    return (f"{kind}: {message}" if named else message) if message else kind
