"""Processes: how they find each other, which one speaks, and how they wait for each other and agree.

May import: JAX.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np


def initialize(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of one run, the first of which listens at `coordinator` (host:port); nothing to do for one.
    Raises ValueError: only some of the three are given, or they contradict each other."""
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if num_processes is None or process_id is None or missing:
        raise ValueError(f"several processes need --coordinator, --num_processes and --process_id; missing: {missing}")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id = {process_id} is not in 0 .. {num_processes - 1}")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def is_primary() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def barrier(name: str, *, minutes: int = 120) -> None:
    """Waits until every process is here, through the coordinator. Not by a collective on the devices: that gives up
    after half a minute on CPU, and one may have a corpus to tokenize, or to compile what others have in their cache."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost  # its door to the coordinator's barrier, which JAX keeps private

        multihost.get_barrier_sync_fn()(key=name, timeout_ms=minutes * 60_000)


def everywhere(condition: bool) -> bool:
    """Whether the condition holds in every process. Collective."""
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(condition))))


def from_primary(value: Any) -> Any:
    """A JSON value of the primary process, for all. Collective."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.resize(mine, int(broadcast_one_to_all(np.array(mine.size))))  # others' contents do not matter
    return json.loads(bytes(broadcast_one_to_all(padded)))
