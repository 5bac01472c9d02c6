"""The exit codes of all verbs: one table, which docs/operations.md has too, with what to do about each."""

import enum
from typing import Self


class ExitCode(enum.IntEnum):
    """How a process ended.

    Attributes:
        meaning: what happened, for people.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "the run came to its end"
    FAILED = 1, "failed"
    USAGE = 2, "command, config or data are wrong"
    NONFINITE = 3, "loss not finite"
    TOO_BIG = 4, "does not fit"
    PEER = 5, "another process is gone, or was not found"
    HANG = 6, "hung"
    REPLICAS = 7, "replicas disagree"
    # The shell's convention: 128 and the number of the signal.
    INTERRUPTED = 130, "stopped by SIGINT"
    ABORTED = 134, "aborted by JAX"
    TERMINATED = 143, "stopped by SIGTERM"


# A signal asked the process to end, and what it had trained is saved.
STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
# Nothing was begun, and the same command would end the same way.
REFUSED = (ExitCode.USAGE, ExitCode.TOO_BIG)
# Codes of a failure after which starting again would change nothing.
HOPELESS = (ExitCode.USAGE, ExitCode.NONFINITE, ExitCode.TOO_BIG)
# Codes after which starting again would change nothing, or is not wanted.
FINAL = (ExitCode.DONE, *HOPELESS, *STOPPED)


def meaning_of(code: int) -> str:
    """What an exit code means, for people; "unknown" for one that no verb ends with."""
    return ExitCode(code).meaning if code in set(ExitCode) else "unknown"
