"""What a verb says before it has imported anything that takes long, and which process of a job says it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from framework.terminal import phases
from framework.terminal.phase_views import view_of

# Where launchers and schedulers say which process of a job this is, from 0.
_RANKS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID")
_RANK_FLAG = "--process_id"


@contextmanager
def said(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Shows phases on standard error, the start of the command among them, in the first process of a job.

    Args:
        argv: the process's command line, its program among them.
        environment: environment variables.
    """
    if not is_first(argv, environment):
        yield
        return
    with phases.shown(view_of(sys.stderr), first_words(argv)):
        yield


def is_first(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this is the only process of a job, or the first, as far as flags and environment say."""
    ranks = [environment.get(name, "0") for name in _RANKS]
    rank_flag = _value_of(_RANK_FLAG, argv)
    if rank_flag:
        ranks = [rank_flag]
    # libtpu leaves a warning in the place of a number where it is on no TPU.
    return not any(rank.isdecimal() and int(rank) > 0 for rank in ranks)


def first_words(argv: Sequence[str]) -> str:
    """What is said of a command line, such as "starting train of stdlib-tiny"."""
    program, *words = argv
    # `python -m launch.train` has its file here, a process of launch.local the name of its module.
    verb = os.path.basename(program).removesuffix(".py").rpartition(".")[2]
    if verb in ("plimsoll", "__main__", "launch", "-m") and words:
        verb = words[0]
    what = _value_of("--config", words) or _value_of("--workdir", words) or _value_of("--hf", words)
    return f"starting {verb} of {what}" if what else f"starting {verb}"


def _value_of(flag: str, words: Sequence[str]) -> str:
    """The value of a flag, as `--flag=value` or `--flag value`; "" where it is not given."""
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name == flag:
            return value if separator else "".join(words[index + 1 : index + 2])
    return ""
