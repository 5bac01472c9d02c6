"""Checks the files that earlier runs left in a workdir, and decides whether a start may continue there.

`check` changes nothing. A run that lost its checkpoints, for example in an interrupted copy, looks much like one that
never had any. The file SAVED next to the checkpoints distinguishes the two: it names the newest committed checkpoint,
or records that there is none yet.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from plimsoll.framework.checkpoint import directory as files
from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import Workdir, write_json
from plimsoll.framework.metrics.jsonl import read_metrics

Resume = Literal["auto", "never", "must"]
# File in the workdir with the newest step whose checkpoint was committed.
SAVED = "saved.json"

_ADVICE = (
    "Nothing was changed. Copy the checkpoints again, with all of their files (a copy may have been interrupted), or "
    "choose another --workdir. To discard that run, remove its workdir"
)


def record_saved(workdir: Path, step: int | None) -> None:
    """Record in the workdir that the checkpoint of `step` was committed; None records that there is none yet.

    Raises:
        OSError: the record cannot be written.
    """
    record = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(workdir / SAVED, record)


def record_start(workdir: Path) -> None:
    """Record in the workdir that no checkpoint was committed yet, unless there is already a record.

    Raises:
        OSError: the record cannot be written.
    """
    if not (workdir / SAVED).exists():
        record_saved(workdir, None)


def check(workdir: Workdir, resume: Resume, config: dict[str, Any]) -> list[str]:
    """Refuse a start that would lose results of an earlier run.

    Args:
        workdir: folder of the run.
        resume: resume mode of the user: "auto", "never" or "must".
        config: resolved config of the start, as a dict.

    Returns:
        A line for each problem, for results in the workdir that will be replaced, and for each changed config field.

    Raises:
        FileNotFoundError: resume is "must" and there is no checkpoint; or there were some, and none is intact.
        ValueError: resume is "never" and the workdir was used before; or no checkpoint can be read, or the newest has
            another format.
    """
    root = files.folder(workdir.checkpoints)
    steps, problems = files.scan(root)
    moved_aside_steps = files.list_moved_aside(root)
    if resume == "never":
        _reject_used_workdir(workdir, steps, problems)
    if steps:
        _reject_unreadable(workdir, steps)
        return []
    # The first Checkpointer that is not read-only puts these back.
    if moved_aside_steps:
        return []
    if resume == "must":
        headline = f"--resume=must, but {workdir.checkpoints} holds no valid checkpoint"
        raise FileNotFoundError("\n  ".join([headline, *problems]))
    rows = read_metrics(workdir.metrics) if workdir.metrics.exists() else []
    _reject_lost(workdir, problems, rows)
    notes = list(problems)
    if rows:
        last_step = max(row["step"] for row in rows)
        notes.append(
            f"the previous run here ended at step {last_step}, before its first checkpoint: training starts over, and "
            f"its {len(rows)} rows of {workdir.metrics} are replaced"
        )
    last_config = _read_json(workdir.config)
    if last_config is not None:
        for change in config_changes(last_config, config):
            notes.append(f"config changed since the last start here: {change}")
    return notes


def _reject_used_workdir(workdir: Workdir, steps: list[int], problems: list[str]) -> None:
    """Raise ValueError if a run was saved in the workdir, or has written to it."""
    advice = "choose another --workdir, or remove"
    if steps:
        raise ValueError(
            f"--resume=never, but {workdir.checkpoints} holds checkpoints up to step {max(steps)}; {advice} them"
        )
    if problems:
        headline = f"--resume=never, but there are incomplete checkpoints; {advice} them:"
        raise ValueError("\n  ".join([headline, *problems]))
    for path in (workdir.path / SAVED, workdir.metrics, workdir.config):
        if path.exists() and path.stat().st_size:
            raise ValueError(f"--resume=never, but a run has written {path}; {advice} its files")


def _reject_unreadable(workdir: Workdir, steps: list[int]) -> None:
    """Raise CheckpointCorruptError if none of the manifests can be read. The arrays are not checked."""
    root = files.folder(workdir.checkpoints)
    problems = []
    for step in reversed(steps):
        # CheckpointFormatError and PermissionError are not caught: the checkpoint may be intact, and resuming from an
        # older one would lose steps.
        try:
            files.Manifest.read(files.step_directory(root, step))
            return
        except files.CheckpointCorruptError as error:
            problems.append(str(error))
    message = f"--workdir: no checkpoint in {workdir.checkpoints} can be read."
    raise files.CheckpointCorruptError("\n  ".join([message, *problems, _ADVICE]))


def _reject_lost(workdir: Workdir, problems: list[str], rows: list[dict[str, Any]]) -> None:
    """Raise FileNotFoundError if the run here had checkpoints that are now missing or damaged."""
    evidence = _find_evidence(workdir, rows)
    # In an object store, a kill during the first save leaves one folder without a manifest. On a disk, a checkpoint
    # gets its name only when it is complete.
    num_interrupted = 1 if workdir.mirror else 0
    if evidence is None and len(problems) <= num_interrupted:
        return
    location = workdir.path if workdir.mirror is None else workdir.mirror.url
    saved = f"--workdir: a run was saved in {location}"
    if evidence:
        saved += f" ({evidence})"
    last_step = max((row["step"] for row in rows), default=None)
    trained = "" if last_step is None else f"; its metrics go up to step {last_step}"
    message = f"{saved}, but {workdir.checkpoints} holds no complete checkpoint{trained}."
    raise FileNotFoundError("\n  ".join([message, *problems, _ADVICE]))


def _find_evidence(workdir: Workdir, rows: list[dict[str, Any]]) -> str | None:
    """Return the evidence that a run had a checkpoint here; None if there is none."""
    saved = _read_json(workdir.path / SAVED)
    if isinstance(saved, dict) and "step" in saved:
        # With step None, all saves of the run failed, for example on a full disk, so nothing can be lost.
        return None if saved["step"] is None else f"{SAVED}: step {saved['step']}"
    # Earlier versions did not write that file; the checks below detect their runs.
    resumed_step = max((row.get("resumed_from", 0) for row in rows), default=0)
    if resumed_step:
        return f"metrics.jsonl: resumed from step {resumed_step}"
    if (workdir.path / "loss.png").exists():
        return "loss.png: the run finished"
    config = _read_json(workdir.config) or {}
    trainer = config.get("trainer") or {}
    save_every = trainer.get("save_every")
    last_step = max((row["step"] for row in rows), default=0)
    # Each save waits for the previous one, so the first one is committed once the second has started.
    if isinstance(save_every, int) and last_step > 2 * save_every:
        return f"metrics.jsonl: step {last_step}; config.json: a checkpoint every {save_every} steps"
    return None


def _read_json(path: Path) -> Any:
    """Read a JSON file; None if it does not exist or is damaged."""
    try:
        return parse_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
