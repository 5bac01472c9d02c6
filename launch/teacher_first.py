"""Trains the teacher first, when `plimsoll train` runs a student's config whose teacher is not trained yet.

    PATH/model         the teacher's run
    PATH/teacher.json  and the files next to it: the teacher's scores of the student's rows, by `plimsoll score`

PATH is batch_transform.path. Both steps are separate commands, each in its own process. JAX has not started in this
process, so the devices are free. After a kill, the same command continues with the step that was not finished.
"""

from __future__ import annotations

from pathlib import Path

from plimsoll import configs
from plimsoll.framework.batch_transforms.teacher import Teacher
from plimsoll.framework.processes.child_commands import run_verb
from plimsoll.framework.run.last_checkpoint import find_last_checkpoint
from plimsoll.framework.run.request import RunRequest
from plimsoll.framework.terminal.exit_codes import COMPLETED
from plimsoll.launch import cli

_MODEL = "model"


def prepare(request: RunRequest, command: cli.Command) -> int:
    """Train the teacher of a run's config and store its scores, if this is requested and not done yet.

    Returns:
        0, or the exit code of the command that failed.

    Raises:
        UsageError: batch_transform.train_first does not name a config.
    """
    teacher = request.experiment.batch_transform
    if request.dry_run or not isinstance(teacher, Teacher) or teacher.train_first is None:
        return 0
    # Accept only names of configs. A stored config is untrusted, so it must not run files of code.
    if teacher.train_first not in configs.names():
        raise cli.UsageError(
            f"batch_transform.train_first={teacher.train_first!r}: expected the name of a config (`plimsoll configs "
            "list`)"
        )
    folder = Path(teacher.path).expanduser()
    model = folder / _MODEL
    # Do not touch files of another teacher, or a folder that a run has already started from.
    if (_holds_files(folder) and not model.exists()) or find_last_checkpoint(request.folder) is not None:
        return 0
    print(f"teacher: {teacher.train_first} is trained first, in {model}; its scores are stored in {folder}")
    code = _execute("train", f"--config={teacher.train_first}", f"--workdir={model}")
    if code not in COMPLETED:
        return code
    overrides = [f"--config.{path}={text}" for path, text in command.overrides]
    return _execute(
        "score",
        f"--workdir={model}",
        f"--config={command.spec}",
        *overrides,
        *cli.get_data_flags(command.args),
        f"--top_k={teacher.top_k}",
        f"--out={folder}",
    )


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _execute(verb: str, *flags: str) -> int:
    """Run `plimsoll COMMAND` on this machine; returns its exit code, 128 + n if signal n killed it."""
    return run_verb(verb, *flags)
