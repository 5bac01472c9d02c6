"""The startup message of a verb before its slow imports, and the check for which process of a job shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from plimsoll.framework.terminal import phases
from plimsoll.framework.terminal.phase_views import create_view

# Variables in which launchers and schedulers store the index of this process in its job, from 0.
_RANKS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID")
_RANK_FLAG = "--process_id"


@contextmanager
def show_startup(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Show phases on standard error in the first process of a job, beginning with the start of the command.

    Args:
        argv: the process's command line, including its program.
        environment: environment variables.
    """
    if not is_first(argv, environment):
        yield
        return
    with phases.show_phases(create_view(sys.stderr), startup_message(argv)):
        yield


def is_first(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether this is the only or first process of a job, according to flags and environment."""
    ranks = [environment.get(name, "0") for name in _RANKS]
    rank_flag = _get_flag_value(_RANK_FLAG, argv)
    if rank_flag:
        ranks = [rank_flag]
    # Without a TPU, libtpu stores a warning instead of a number.
    return not any(rank.isdecimal() and int(rank) > 0 for rank in ranks)


def startup_message(argv: Sequence[str]) -> str:
    """Return the startup message of a command line, such as "starting train of stdlib-tiny"."""
    program, *arguments = argv
    # For `python -m plimsoll` this is the path of its file; for a process of `plimsoll local` it is the module name.
    verb = os.path.basename(program).removesuffix(".py").rpartition(".")[2]
    if verb in ("plimsoll", "__main__", "launch", "-m") and arguments:
        verb = arguments[0]
    what = (
        _get_flag_value("--config", arguments)
        or _get_flag_value("--workdir", arguments)
        or _get_flag_value("--hf", arguments)
    )
    return f"starting {verb} of {what}" if what else f"starting {verb}"


def _get_flag_value(flag: str, arguments: Sequence[str]) -> str:
    """Return the value of a flag, as `--flag=value` or `--flag value`; "" if it is not given."""
    for index, word in enumerate(arguments):
        name, separator, value = word.partition("=")
        if name == flag:
            return value if separator else "".join(arguments[index + 1 : index + 2])
    return ""
