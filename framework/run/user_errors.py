"""Classifies exceptions: user errors print one line, errors of a user's file show its frames, bugs are re-raised."""

import errno
import os
import sys
import sysconfig
import traceback
from pathlib import Path

from plimsoll.framework.config import ConfigError
from plimsoll.framework.terminal.escaping import escape_control_chars
from plimsoll.framework.terminal.exit_codes import DoesNotFitError, ExitCode

_FILE_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
# What to do about each disk error.
_DISK_ADVICE = {
    errno.ENOSPC: "Free some space there, then run the same command {again}",
    errno.EDQUOT: "Free some of your quota there, then run the same command {again}",
    errno.EFBIG: "Raise the file size limit (ulimit -f), then run the same command {again}",
    errno.EROFS: "Choose a folder that can be written",
    errno.EIO: "The disk, or the connection to it, has failed",
}
# Errors of a path that the user gave.
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP)
_PACKAGE = Path(__file__).parents[2]
# In a checkout, these folders of the package are links.
_PLIMSOLL = tuple(f"{(_PACKAGE / name).resolve()}/" for name in ("api", "extras", "framework", "configs", "launch"))
# Folders of Python and of installed packages: no file in them belongs to the user.
_PYTHON_PATHS = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
_INSTALLED = tuple(f"{Path(path).resolve()}/" for path in _PYTHON_PATHS)

# Note on an exception of the training loop. It means that starting again may help.
DURING_TRAINING = "raised while the model was being trained"
# Note on an OSError of a run, which the same command resumes.
OF_RUN = "raised by a run"


def report_error(error: BaseException, *, is_command: bool) -> int | None:
    """Print a user error to stderr and return the exit code; None if it is a bug, which keeps its traceback.

    Args:
        error: exception that a verb raised.
        is_command: whether the process was started for this verb. A program that calls a verb receives the exceptions
            of its own code instead.
    """
    message = describe_disk_error(error)
    if not message:
        if is_user_error(error):
            message = describe_file_error(error) or str(error)
        elif is_command:
            message = format_user_error(error)
    if message is None:
        return None
    if os.environ.get("PLIMSOLL_TRACEBACK"):
        traceback.print_exception(error)
    print(f"error: {escape_control_chars(message)}", file=sys.stderr)
    return _code(error)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a user error without printing it, for use by a program. None if it is a bug."""
    if describe_disk_error(error) is None and not is_user_error(error):
        return None
    return _code(error)


def _code(error: BaseException) -> int:
    """Return the exit code of a user error, or of a disk that is full or read-only."""
    if isinstance(error, DoesNotFitError):
        return ExitCode.TOO_BIG
    # Disk space may be available at the next start, without a change to the command line. A read-only folder needs a
    # corrected command line.
    may_help = describe_disk_error(error) is not None and getattr(error, "errno", None) != errno.EROFS
    during_training = DURING_TRAINING in getattr(error, "__notes__", ())
    return ExitCode.FAILED if may_help or during_training else ExitCode.USAGE


def describe_disk_error(error: BaseException) -> str | None:
    """Return the message for a full or unwritable disk, which is neither a bug nor a config error; else None."""
    if not isinstance(error, OSError) or error.errno not in _DISK_ADVICE:
        return None
    where = f": {error.filename}" if error.filename else ""
    # Only a training run has progress from which it can resume.
    again = "to resume" if OF_RUN in getattr(error, "__notes__", ()) else "again"
    return f"{error.strerror}{where}. {_DISK_ADVICE[error.errno].format(again=again)}"


def describe_file_error(error: BaseException) -> str | None:
    """Return `PATH: no such file or directory` for an error that the system raised about a file; else None."""
    if not isinstance(error, OSError) or not error.strerror or error.filename is None:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{path}: {error.strerror[:1].lower()}{error.strerror[1:]}"


def is_user_error(error: BaseException) -> bool:
    """Return whether an error is a message for the user rather than a bug.

    User errors are a ConfigError, a missing or forbidden file, and a ValueError or ImportError that Plimsoll's own
    code raised. Errors from inside JAX or numpy are bugs.
    """
    if isinstance(error, (ConfigError, *_FILE_ERRORS)):
        return True
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS:
        return True
    # JAX removes its own frames from a traceback and adds a note about it. The origin of the error is then unknown.
    is_cut = any("JAX" in note for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    if is_cut or not frames or not isinstance(error, (ValueError, ImportError)):
        return False
    # Compare by file, because the module of the running verb is called __main__.
    return str(Path(frames[-1].filename).resolve()).startswith(_PLIMSOLL)


def format_user_error(error: BaseException) -> str | None:
    """Format an exception from a user's own file: `my.py:12: NameError: ...`, then the frames of such files.

    Returns None if there is no such frame: then it is a bug of Plimsoll or of a package.
    """
    chain = [error]
    cause = error.__cause__
    # A chain can be circular, if an error was raised from one that it had caused.
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    user_frames = []
    # The root cause comes first.
    for exception in reversed(chain):
        for frame in traceback.extract_tb(exception.__traceback__):
            # Code without a file is called <frozen importlib> or <string>.
            has_file = not frame.filename.startswith("<")
            path = str(Path(frame.filename).resolve())
            if has_file and not path.startswith((*_PLIMSOLL, *_INSTALLED)):
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
