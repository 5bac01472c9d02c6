"""What earlier runs left in a workdir, and whether a start may go on there. Nothing is changed here.

A run that lost its checkpoints, in a copy that was interrupted say, looks much like one that never had any. It is told
from that by what it wrote beside them: SAVED, which names the newest checkpoint that was committed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from framework.checkpoint import directory as files
from framework.config.changes import config_changes
from framework.files.workdir import Workdir, write_json
from framework.metrics.jsonl import read_metrics

Resume = Literal["auto", "never", "must"]
SAVED = "saved.json"  # in a workdir: the newest step whose checkpoint was committed

_ADVICE = (
    "Nothing was changed. Copy the checkpoints again, all of each folder (a copy may have been interrupted), or choose "
    "another --workdir; to give up what that run did, remove its workdir"
)


def record_saved(workdir: Path, step: int) -> None:
    """Says in the workdir that the checkpoint of `step` was committed. Raises OSError: it cannot be written."""
    write_json(workdir / SAVED, {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def check(workdir: Workdir, resume: Resume, config: dict[str, Any]) -> list[str]:
    """What a start with `config` has to say about what lies there: a line for each thing that it will replace.

    Raises:
        FileNotFoundError: resume is "must" and there is no checkpoint; or there were some, and none is whole.
        ValueError: resume is "never" and the workdir was used before; no checkpoint can be read, or the newest is of
            another format.
    """
    steps, problems = files.scan(files.folder(workdir.checkpoints))
    aside = files.put_aside(files.folder(workdir.checkpoints))
    if resume == "never":
        _refuse_used(workdir, steps, problems)
    if steps:
        _refuse_unreadable(workdir, steps)
        return []
    if aside:
        return []  # put back by the first Checkpointer that may write
    if resume == "must":
        raise FileNotFoundError(
            "\n  ".join([f"--resume=must, but {workdir.checkpoints} holds no valid checkpoint", *problems])
        )
    rows = _rows(workdir.metrics)
    _refuse_lost(workdir, problems, rows)
    notes = list(problems)
    if rows:
        last = max(row["step"] for row in rows)
        notes.append(
            f"the run that was here before ended at step {last}, before its first checkpoint: training starts again, "
            f"and its {len(rows)} rows of {workdir.metrics} are replaced"
        )
    notes += [f"config changed since the last start here: {change}" for change in _changes(workdir.config, config)]
    return notes


def _refuse_used(workdir: Workdir, steps: list[int], problems: list[str]) -> None:
    advice = "choose another --workdir, or remove"
    if steps:
        raise ValueError(
            f"--resume=never, but {workdir.checkpoints} holds checkpoints up to step {max(steps)}; {advice} them"
        )
    if problems:
        raise ValueError(
            "\n  ".join([f"--resume=never, but there are remains of checkpoints; {advice} them:", *problems])
        )
    for path in (workdir.path / SAVED, workdir.metrics, workdir.config):
        if path.exists() and path.stat().st_size:
            raise ValueError(f"--resume=never, but a run has written {path}; {advice} what it left")


def _refuse_unreadable(workdir: Workdir, steps: list[int]) -> None:
    """Raises CheckpointCorruptError: not one of the manifests can be read. Their arrays are not looked at."""
    root = files.folder(workdir.checkpoints)
    problems = []
    for step in reversed(steps):
        try:
            files.Manifest.read(files.step_directory(root, step))
            return
        except files.CheckpointCorruptError as error:
            problems.append(str(error))
    message = f"--workdir: no checkpoint in {workdir.checkpoints} can be read."
    raise files.CheckpointCorruptError("\n  ".join([message, *problems, _ADVICE]))


def _refuse_lost(workdir: Workdir, problems: list[str], rows: list[dict[str, Any]]) -> None:
    """Raises FileNotFoundError: the run here had checkpoints, and they are gone or damaged."""
    proof = _proof(workdir, rows)
    # In an object store, one folder without a manifest is what a kill during the first save leaves. On a disk a
    # checkpoint gets its name when it is whole.
    interrupted = 1 if workdir.mirror else 0
    if proof is None and len(problems) <= interrupted:
        return
    found = f"--workdir: a run was saved in {workdir.path if workdir.mirror is None else workdir.mirror.url}"
    found += f" ({proof})" if proof else ""
    last = max((row["step"] for row in rows), default=None)
    trained = f"; its metrics go up to step {last}" if last is not None else ""
    message = f"{found}, but {workdir.checkpoints} holds no checkpoint that is whole{trained}."
    raise FileNotFoundError("\n  ".join([message, *problems, _ADVICE]))


def _proof(workdir: Workdir, rows: list[dict[str, Any]]) -> str | None:
    """What shows that a run had a checkpoint here; None: nothing does."""
    saved = _json(workdir.path / SAVED)
    if isinstance(saved, dict) and "step" in saved:
        return f"{SAVED}: step {saved['step']}"
    # Earlier versions did not write that file.
    if resumed := max((row.get("resumed_from", 0) for row in rows), default=0):
        return f"metrics.jsonl: resumed from step {resumed}"
    if (workdir.path / "loss.png").exists():
        return "loss.png: it came to its end"
    save_every = ((_json(workdir.config) or {}).get("trainer") or {}).get("save_every")
    last = max((row["step"] for row in rows), default=0)
    if isinstance(save_every, int) and last > 2 * save_every:  # the second save waited for the first
        return f"metrics.jsonl: step {last}; config.json: a checkpoint every {save_every} steps"
    return None


def _rows(metrics: Path) -> list[dict[str, Any]]:
    """The rows of steps, and of resumes."""
    return read_metrics(metrics) if metrics.exists() else []


def _changes(path: Path, config: dict[str, Any]) -> list[str]:
    before = _json(path)
    return [] if before is None else config_changes(before, config)


def _json(path: Path) -> Any:
    """What a JSON file holds; None: there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
