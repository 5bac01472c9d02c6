"""Whose mistake an exception is, and how it is told: as one line, as the frames of a user's own file, or as it is."""

import errno
import os
import sys
import sysconfig
import traceback
from pathlib import Path

from framework.config import ConfigError
from framework.terminal.exit_codes import DoesNotFitError, ExitCode
from framework.terminal.visible import visible

_FILE_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
# What the disk says, and what to do about it.
_DISK = {
    errno.ENOSPC: "Free some space there; the same command then goes on",
    errno.EDQUOT: "Free some of your quota there; the same command then goes on",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f); the same command then goes on",
    errno.EROFS: "Choose a folder that can be written",
    errno.EIO: "The disk, or the connection to it, has failed",
}
_ROOT = Path(__file__).resolve().parents[2]
_PLIMSOLL = tuple(f"{_ROOT / name}/" for name in ("framework", "configs", "launch"))
# Where Python and installed packages are: no file there is a user's own.
_PYTHON_PATHS = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
_INSTALLED = tuple(f"{Path(path).resolve()}/" for path in _PYTHON_PATHS)

# The note on an exception of the training loop, after which starting again may help.
IN_THE_LOOP = "raised while the model was being trained"


def tell(error: BaseException, *, of_process: bool) -> int | None:
    """Prints a mistake of the user's to stderr, and returns the exit code. None: it is a bug, whose traceback is shown.

    Args:
        error: what a verb raised.
        of_process: the verb is what the process was started for: a program that calls one gets what its code raised.
    """
    message = disk_problem(error)
    if not message:
        if is_user_error(error):
            message = str(error)
        elif of_process:
            message = user_report(error)
    if message is None:
        return None
    if os.environ.get("PLIMSOLL_TRACEBACK"):
        traceback.print_exception(error)
    print(f"error: {visible(message)}", file=sys.stderr)
    return _code(error)


def exit_code(error: BaseException) -> int | None:
    """The exit code of a mistake of the user's, for a program, which is not told of it here. None: it is a bug."""
    if disk_problem(error) is None and not is_user_error(error):
        return None
    return _code(error)


def _code(error: BaseException) -> int:
    """The exit code of a mistake of the user's, or of a disk that is full or read-only."""
    if isinstance(error, DoesNotFitError):
        return ExitCode.TOO_BIG
    # Another start may find room, and there is nothing to correct on the command line; a folder is
    # to be corrected.
    may_help = disk_problem(error) is not None and getattr(error, "errno", None) != errno.EROFS
    in_the_loop = IN_THE_LOOP in getattr(error, "__notes__", ())
    return ExitCode.FAILED if may_help or in_the_loop else ExitCode.USAGE


def disk_problem(error: BaseException) -> str | None:
    """The message for a disk that is full, or that cannot be written, which is neither a bug nor a mistake in the
    config. None: the error is another one."""
    if not isinstance(error, OSError) or error.errno not in _DISK:
        return None
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}. {_DISK[error.errno]}"


def is_user_error(error: BaseException) -> bool:
    """Whether an error is a message for the user rather than a bug: a ConfigError, a missing or forbidden file, or a
    ValueError or ImportError that Plimsoll's own code raised (one from inside JAX or numpy is not for the user)."""
    if isinstance(error, (ConfigError, *_FILE_ERRORS)):
        return True
    # JAX cuts its own frames out of a traceback, and notes that it did: who raised the error cannot
    # be seen then.
    cut = any("JAX" in note for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    if cut or not frames or not isinstance(error, (ValueError, ImportError)):
        return False
    # By its file, as the module of the verb that runs is called __main__.
    return _is_ours(frames[-1].filename)


def user_report(error: BaseException) -> str | None:
    """The message for an exception that came out of a user's own file: `my.py:12: NameError: ...`, and the frames of
    such files. None: there is no such frame, so it is a bug of Plimsoll's or of a package."""
    user_frames = []
    for exception in _chain(error):
        for frame in traceback.extract_tb(exception.__traceback__):
            if _is_users(frame.filename):
                user_frames.append(frame)
    if not user_frames:
        return None
    last = user_frames[-1]
    first_line, *further_lines = str(error).splitlines() or [""]
    head = f"{Path(last.filename).name}:{last.lineno}: {type(error).__name__}"
    if first_line:
        head += f": {first_line}"
    formatted_frames = "".join(traceback.format_list(user_frames)).rstrip("\n")
    hint = "(PLIMSOLL_TRACEBACK=1 in the environment shows all frames)"
    return "\n".join([head, formatted_frames, *further_lines, hint])


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and its causes, the first cause first."""
    chain = [error]
    cause = error.__cause__
    # A chain may be a circle, if somebody raised an error from one that it had caused.
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return chain[::-1]


def _is_ours(filename: str) -> bool:
    return str(Path(filename).resolve()).startswith(_PLIMSOLL)


def _is_users(filename: str) -> bool:
    # Code without a file: <frozen importlib>, <string>.
    if filename.startswith("<"):
        return False
    path = str(Path(filename).resolve())
    return not path.startswith(_PLIMSOLL) and not path.startswith(_INSTALLED)
