"""The exit codes of all commands. docs/operations.md has the same table, with the remedy for each code."""

import enum
from typing import Self


class ExitCode(enum.IntEnum):
    """Exit code of a process.

    Attributes:
        meaning: human-readable description.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "finished"
    FAILED = 1, "failed"
    USAGE = 2, "invalid command, config or data"
    NONFINITE = 3, "loss not finite"
    TOO_BIG = 4, "does not fit"
    PEER = 5, "another process exited, or was not found"
    HANG = 6, "hung"
    REPLICAS = 7, "replicas disagree"
    STOPPED_EARLY = 8, "stopped early by trainer.stop or a hook"
    # By the shell's convention, a signal's exit code is 128 plus its number.
    INTERRUPTED = 130, "stopped by SIGINT"
    ABORTED = 134, "aborted by JAX"
    TERMINATED = 143, "stopped by SIGTERM"


# The run is over: it has taken its last step, or a rule or a hook has ended it before.
COMPLETED = (ExitCode.DONE, ExitCode.STOPPED_EARLY)
# A signal stopped the process, and the training progress is saved.
STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
# Nothing was started, and the same command would fail the same way.
REFUSED = (ExitCode.USAGE, ExitCode.TOO_BIG)
# Failures that a restart cannot fix.
HOPELESS = (ExitCode.USAGE, ExitCode.NONFINITE, ExitCode.TOO_BIG)
# Codes after which a restart cannot help or is not wanted.
FINAL = (*COMPLETED, *HOPELESS, *STOPPED)


class DoesNotFitError(ValueError):
    """The request needs more memory than is available: the command exits with ExitCode.TOO_BIG."""


def describe_exit_code(code: int) -> str:
    """Return the human-readable meaning of an exit code; "unknown" for codes that no command uses."""
    return ExitCode(code).meaning if code in set(ExitCode) else "unknown"
