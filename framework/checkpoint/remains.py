"""Looks at what earlier runs left in a workdir, and decides whether a start may go on there. Nothing is changed here.

A run that lost its checkpoints, as in a copy that was interrupted, looks much like one that never had any. The two are
told apart by a file beside the checkpoints: SAVED, which names the newest checkpoint that was committed, or says that
none was.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from framework.checkpoint import directory as files
from framework.config.changes import config_changes
from framework.files.texts import parse_json
from framework.files.workdir import Workdir, write_json
from framework.metrics.jsonl import read_metrics

Resume = Literal["auto", "never", "must"]
# The file in a workdir that has the newest step whose checkpoint was committed.
SAVED = "saved.json"

_ADVICE = (
    "Nothing was changed. Copy the checkpoints again, all of each folder (a copy may have been interrupted), or choose "
    "another --workdir; to give up what that run did, remove its workdir"
)


def record_saved(workdir: Path, step: int | None) -> None:
    """Notes in the workdir that the checkpoint of `step` was committed; None: none was so far.

    Raises:
        OSError: the note cannot be written.
    """
    record = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(workdir / SAVED, record)


def record_start(workdir: Path) -> None:
    """Notes in the workdir that no checkpoint was committed so far, unless one was.

    Raises:
        OSError: the note cannot be written.
    """
    if not (workdir / SAVED).exists():
        record_saved(workdir, None)


def check(workdir: Workdir, resume: Resume, config: dict[str, Any]) -> list[str]:
    """Refuses a start that would lose something; returns a line for each thing in the workdir that it will replace.

    Args:
        workdir: the folder of the run.
        resume: what the user says about going on.
        config: the resolved config of the start, as a dict.

    Raises:
        FileNotFoundError: resume is "must" and there is no checkpoint; or there were some, and none is whole.
        ValueError: resume is "never" and the workdir was used before; no checkpoint can be read, or the newest is of
            another format.
    """
    root = files.folder(workdir.checkpoints)
    steps, problems = files.scan(root)
    steps_put_aside = files.put_aside(root)
    if resume == "never":
        _refuse_used(workdir, steps, problems)
    if steps:
        _refuse_unreadable(workdir, steps)
        return []
    # The first Checkpointer that may write puts these back.
    if steps_put_aside:
        return []
    if resume == "must":
        headline = f"--resume=must, but {workdir.checkpoints} holds no valid checkpoint"
        raise FileNotFoundError("\n  ".join([headline, *problems]))
    rows = _rows(workdir.metrics)
    _refuse_lost(workdir, problems, rows)
    notes = list(problems)
    if rows:
        last_step = max(row["step"] for row in rows)
        notes.append(
            f"the run that was here before ended at step {last_step}, before its first checkpoint: training starts "
            f"again, and its {len(rows)} rows of {workdir.metrics} are replaced"
        )
    for change in _changes(workdir.config, config):
        notes.append(f"config changed since the last start here: {change}")
    return notes


def _refuse_used(workdir: Workdir, steps: list[int], problems: list[str]) -> None:
    """Raises ValueError: a run was saved in the workdir, or has written to it."""
    advice = "choose another --workdir, or remove"
    if steps:
        raise ValueError(
            f"--resume=never, but {workdir.checkpoints} holds checkpoints up to step {max(steps)}; {advice} them"
        )
    if problems:
        headline = f"--resume=never, but there are remains of checkpoints; {advice} them:"
        raise ValueError("\n  ".join([headline, *problems]))
    for path in (workdir.path / SAVED, workdir.metrics, workdir.config):
        if path.exists() and path.stat().st_size:
            raise ValueError(f"--resume=never, but a run has written {path}; {advice} what it left")


def _refuse_unreadable(workdir: Workdir, steps: list[int]) -> None:
    """Raises CheckpointCorruptError: not one of the manifests can be read. Their arrays are not looked at."""
    root = files.folder(workdir.checkpoints)
    problems = []
    for step in reversed(steps):
        # CheckpointFormatError and PermissionError are not caught: the checkpoint may be whole, and
        # an older one in its place would take the run back.
        try:
            files.Manifest.read(files.step_directory(root, step))
            return
        except files.CheckpointCorruptError as error:
            problems.append(str(error))
    message = f"--workdir: no checkpoint in {workdir.checkpoints} can be read."
    raise files.CheckpointCorruptError("\n  ".join([message, *problems, _ADVICE]))


def _refuse_lost(
    workdir: Workdir,
    problems: list[str],
    rows: list[dict[str, Any]],
) -> None:
    """Raises FileNotFoundError: the run here had checkpoints, and they are gone or damaged."""
    proof = _proof(workdir, rows)
    # In an object store, one folder without a manifest is what a kill during the first save leaves. On a disk a
    # checkpoint gets its name when it is whole.
    num_interrupted = 1 if workdir.mirror else 0
    if proof is None and len(problems) <= num_interrupted:
        return
    location = workdir.path if workdir.mirror is None else workdir.mirror.url
    saved = f"--workdir: a run was saved in {location}"
    if proof:
        saved += f" ({proof})"
    last_step = max((row["step"] for row in rows), default=None)
    trained = "" if last_step is None else f"; its metrics go up to step {last_step}"
    message = f"{saved}, but {workdir.checkpoints} holds no checkpoint that is whole{trained}."
    raise FileNotFoundError("\n  ".join([message, *problems, _ADVICE]))


def _proof(workdir: Workdir, rows: list[dict[str, Any]]) -> str | None:
    """Names what shows that a run had a checkpoint here; None if nothing does."""
    saved = _json(workdir.path / SAVED)
    if isinstance(saved, dict) and "step" in saved:
        # Whatever else is there was left by a run whose saves all failed, as on a full disk.
        return None if saved["step"] is None else f"{SAVED}: step {saved['step']}"
    # Earlier versions did not write that file: what follows finds their runs.
    resumed_step = max((row.get("resumed_from", 0) for row in rows), default=0)
    if resumed_step:
        return f"metrics.jsonl: resumed from step {resumed_step}"
    if (workdir.path / "loss.png").exists():
        return "loss.png: it came to its end"
    config = _json(workdir.config) or {}
    trainer = config.get("trainer") or {}
    save_every = trainer.get("save_every")
    last_step = max((row["step"] for row in rows), default=0)
    # A save waits for the one before it, so after the second save the first is committed.
    if isinstance(save_every, int) and last_step > 2 * save_every:
        return f"metrics.jsonl: step {last_step}; config.json: a checkpoint every {save_every} steps"
    return None


def _rows(metrics: Path) -> list[dict[str, Any]]:
    """The rows of steps, and of resumes."""
    return read_metrics(metrics) if metrics.exists() else []


def _changes(path: Path, config: dict[str, Any]) -> list[str]:
    """The fields in which the config of the last start, in the file `path`, differs from `config`."""
    last_config = _json(path)
    return [] if last_config is None else config_changes(last_config, config)


def _json(path: Path) -> Any:
    """What a JSON file holds; None if there is no such file, or it is damaged."""
    try:
        return parse_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
