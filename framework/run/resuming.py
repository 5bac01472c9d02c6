"""Checks whether a run can resume from a checkpoint, and where its data continues.

The config may change as long as the stored arrays still fit. The data must be the same, but the batch size may
change: the data then continues at the next sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import optax

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.directory import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.config.nested import get_value_at
from plimsoll.framework.data.batches import Pipeline
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.program.program import Program

# Type of `extra`, the JSON part of a checkpoint.
Extra = Mapping[str, Any]
# Config sections and data fields that affect neither the arrays nor the order of the data.
_UNRELATED_SECTIONS = ("trainer", "checkpoint", "health", "compiler", "mesh", "memory", "accelerator_rules")
_ORDER_INDEPENDENT = ("global_batch_size", "validation", "prefetch", "cache_dir")
# Number of changed fields that an error names.
_MAX_FIELDS = 3


def check(checkpointer: Checkpointer, program: Program, config: Config, *, force: bool) -> BatchOrder:
    """Refuse a run that cannot resume from the newest checkpoint. Reads only the manifest and compiles nothing.

    Args:
        checkpointer: checkpointer of the run's workdir.
        program: program of the run; its data is set up.
        config: config that the program was built from.
        force: whether to accept different data.

    Returns:
        The batch order of the run; the order of a new run if no checkpoint can be read.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model; the message names fields, then leaves.
        ValueError: the data differs, and `force` is not set.
    """
    data = program.experiment.data
    newest_step = max(checkpointer.steps(), default=None)
    if newest_step is None:
        return BatchOrder()
    # If it is corrupt, an older one may work; that is found out when it is restored.
    with suppress(CheckpointCorruptError):
        extra = checkpointer.manifest(newest_step).extra
        try:
            checkpointer.compare(newest_step, program.backend.abstract_checkpoint)
        except CheckpointMismatchError as error:
            raise _name_changed_fields(error, checkpointer, extra, config) from None
        describe_data_change(extra, data, config, force=force)
        return order_after(extra, newest_step, data)
    return BatchOrder()


def _name_changed_fields(
    error: CheckpointMismatchError, checkpointer: Checkpointer, extra: Extra, config: Config
) -> CheckpointMismatchError:
    """Return an error that starts with the config fields that changed and may have caused it."""
    changes = [
        change
        for change in config_changes(extra["config"], config.to_dict())
        if not _is_under(change, _UNRELATED_SECTIONS)
    ]
    if not changes:
        return error
    sections = {change.removeprefix("config.").partition(".")[0] for change in changes}
    part = "model" if "model" in sections or "learner" not in sections else "optimizer"
    message = (
        f"{checkpointer.directory.parent} belongs to another {part}: {_list_changes(changes)}; choose another "
        "--workdir, or use the config of the run there"
    )
    return CheckpointMismatchError(f"{message}\n{error}")


def _list_changes(changes: list[str]) -> str:
    """Return the first changes, and the number of the others, as one line."""
    shown = "; ".join(changes[:_MAX_FIELDS])
    count = len(changes) - _MAX_FIELDS
    return shown if count <= 0 else f"{shown}; and {count} more {'field' if count == 1 else 'fields'}"


def check_tokenizer(checkpointer: Checkpointer, config: Config) -> None:
    """Refuse other data whose tokenizer cannot be that of the workdir, before the data is set up.

    The tokenizer in the workdir has the vocabulary of the run's data. The error of `BPETokenizer` recommends its
    vocabulary size, which does not help, because that run cannot continue on other data.

    Raises:
        ValueError: the workdir belongs to a run on other data.
    """
    newest_step = max(checkpointer.steps(), default=None)
    if newest_step is None:
        return
    old_config = None
    with suppress(CheckpointError):
        old_config = checkpointer.manifest(newest_step).extra["config"]
    if old_config is None:
        return
    new_config = config.to_dict()
    tokenizer = "data.tokenizer"
    # A tokenizer with a path does not depend on the data.
    if get_value_at(new_config, f"{tokenizer}.path") is not None:
        return
    vocab_sizes = [get_value_at(part, f"{tokenizer}.vocab_size") for part in (old_config, new_config)]
    if None in vocab_sizes or vocab_sizes[0] == vocab_sizes[1]:
        return
    old_source, new_source = (get_value_at(part, "data.source") for part in (old_config, new_config))
    changes = config_changes(old_source, new_source, path="config.data.source")
    if changes:
        raise ValueError(
            f"the run in {checkpointer.directory.parent} trained on other data: {_list_changes(changes)}; choose "
            f"another --workdir (its tokenizer has {vocab_sizes[0]} ids, and this data needs {vocab_sizes[1]})"
        )


def keep_counters(checkpointer: Checkpointer, config: Config) -> list[str]:
    """Replace constant learning rates by constant schedules, in place, where the newest checkpoint has a schedule.

    A schedule counts its steps in the optimizer state, and a plain number would have no leaf for that count.

    Returns:
        Lines to show to the user.
    """
    newest_step = max(checkpointer.steps(), default=None)
    if newest_step is None:
        return []
    lines: list[str] = []
    with suppress(CheckpointError):
        old_config = checkpointer.manifest(newest_step).extra["config"]
        # A list, because the loop changes the config.
        for path, value in list(config.leaves()):
            is_rate = path.startswith("learner.") and path.endswith(".learning_rate")
            if not is_rate or not isinstance(value, int | float):
                continue
            was_schedule = isinstance(get_value_at(old_config, path), dict)
            if was_schedule:
                config.set_path(path, config_for(optax.constant_schedule, value=float(value)))
                lines.append(f"config.{path}: {value} from now on, as a constant schedule")
    return lines


def _is_under(change: str, names: tuple[str, ...]) -> bool:
    """Return whether a line of `config_changes` is about one of these sections."""
    path = change.partition(":")[0]
    return path.removeprefix("config.").partition(".")[0] in names


def get_old_batch_size(extra: Extra, data: Pipeline) -> int:
    """Return the batch size at the checkpoint. Earlier versions stored it only in the config."""
    old_config = extra.get("config") or {}
    from_config = (old_config.get("data") or {}).get("global_batch_size", data.global_batch_size)
    return int(extra["data"].get("batch_size", from_config))


def order_after(extra: Extra, step: int, data: Pipeline) -> BatchOrder:
    """Return the batch order of a run that resumes from a checkpoint.

    Raises:
        ValueError: the batch size differs, and batches of a later stage were trained on or are left out.
    """
    stored = BatchOrder.from_json(extra["data"])
    old_size = get_old_batch_size(extra, data)
    order = stored.with_batch_size(step, old_size, data.global_batch_size)
    later_starts = [stage.start for stage in data.stages if stage.start]
    if old_size == data.global_batch_size or not later_starts:
        return order
    next_batch = stored.batch_after(step)
    change = f"data.global_batch_size: {old_size} -> {data.global_batch_size}"
    if later_starts[0] < next_batch:
        raise ValueError(
            f"{change}, but the run is in a later stage of the data, whose position depends on it; expected "
            f"{old_size}, or another global_batch_size in data.stages"
        )
    # `with_batch_size` counts sequences of the first stage. In a later one they move, so no batch number there stands
    # for those that are left out.
    pending = [batch for batch in stored.left_out if batch >= next_batch]
    if max([*pending, *order.left_out], default=0) >= later_starts[0]:
        raise ValueError(
            f"{change}, but a rollback left out batch {max(pending):,}, and with another size the stage from step "
            f"{later_starts[0]:,} on would read its sequences; expected {old_size} until that batch has passed"
        )
    return order


def position(order: BatchOrder, step: int, data: Pipeline) -> dict[str, Any]:
    """Return the data position stored in a checkpoint of that step, as JSON; `order_after` and `check` read it."""
    next_batch = order.batch_after(step)
    return {
        # Without stages that have not started, which a resumed run may change.
        "fingerprint": data.fingerprint_before(next_batch),
        "next": next_batch,
        "batch_size": data.global_batch_size,
        "sequences": order.sequences_after(step, data.global_batch_size),
        "rows": data.num_rows,
        **order.to_json(),
    }


def batch_lines(extra: Extra, step: int, data: Pipeline) -> list[str]:
    """Return the lines to show if a run resumes with a different batch size."""
    old_size = get_old_batch_size(extra, data)
    new_size = data.global_batch_size
    if old_size == new_size:
        return []
    sequence = BatchOrder.from_json(extra["data"]).sequences_after(step, old_size)
    return [
        f"global batch {old_size} -> {new_size}: the data order continues at sequence {sequence:,}, not at step {step}"
    ]


def describe_data_change(extra: Extra, data: Pipeline, config: Config, *, force: bool) -> str | None:
    """Describe how the data differs from the checkpoint's, ignoring the batch size; None if it does not differ.

    Raises:
        ValueError: the data differs, and `force` is not set.
    """
    old_fingerprint = extra["data"]["fingerprint"]
    # The batch size is part of the fingerprint, but it may change: compare at the old one.
    fingerprint = data.fingerprint_at(get_old_batch_size(extra, data), extra["data"].get("next"))
    if old_fingerprint == fingerprint:
        return None
    old_config = extra["config"].get("data") or {}
    changes = []
    for change in config_changes(old_config, config.to_dict()["data"]):
        if not _is_under(change, _ORDER_INDEPENDENT):
            # The compared dicts are those of the data section.
            changes.append(change.replace("config.", "config.data.", 1))
    if not changes:
        changes.append("config.data.source: same name, different content")
    old_rows = extra["data"].get("rows")
    if old_rows not in (None, data.num_rows):
        changes.append(f"an epoch: {old_rows:,} -> {data.num_rows:,} sequences")
    fingerprints = f"fingerprint {fingerprint[:12]}, was {old_fingerprint[:12]}"
    message = f"the data differs from the checkpoint's ({fingerprints}): {'; '.join(changes)}"
    if force:
        return message
    raise ValueError(
        f"{message}. Batches would not continue where they stopped, because the order of an epoch depends on all of "
        "its sequences. Choose another --workdir for a new run; --force continues anyway in the new order, which "
        "repeats some sequences in this epoch and omits others"
    )
