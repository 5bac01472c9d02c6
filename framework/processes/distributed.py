"""Processes: how they find each other, which one speaks, and how they wait for each other and agree."""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.processes.rendezvous import bind_host, meet
from framework.terminal.native_output import leave_out_greetings

PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class Cluster:
    """Which process of how many this is.

    Attributes:
      source: who says so.
      coordinator: host:port of process 0.
      local_device_ids: the devices of this machine that are this process's; None: all.
    """

    source: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def detect(environment: Mapping[str, str], flags: Sequence[Any] = (None, None, None)) -> Cluster | None:
    """The processes that the command line speaks of, or a scheduler's environment; None: this is the only one.

    In this order: `flags` (coordinator, number of processes, process id), JAX_COORDINATOR_ADDRESS with
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, SLURM (a task of srun), Open MPI (mpirun). With the last two,
    JAX_COORDINATOR_ADDRESS says where process 0 listens if the scheduler does not.

    Raises:
        ValueError: only some of what belongs together is given, or it makes no sense; Open MPI does not say where
            process 0 is.
    """
    get, tasks = environment.get, _all(environment, _SLURM)
    ranks = _all(environment, _OMPI)
    if any(flag is not None for flag in flags):
        return _plain("flags", ("--coordinator", "--num_processes", "--process_id"), flags)
    if get(PLAIN[1]) is not None or get(PLAIN[2]) is not None or (get(PLAIN[0]) and not tasks and not ranks):
        return _plain("environment", PLAIN, [get(name) for name in PLAIN])
    address, local = get(PLAIN[0]), None
    if tasks:
        source, size, rank, local_rank = "SLURM", *map(int, tasks[2:])
        # As JAX does: the first host of the step, and a port that follows from the job.
        first = re.sub(r"\[(\w+)[^]]*\].*", r"\1", re.split(r",(?![^[]*\])", tasks[1])[0])
        address = address or f"{first}:{int(tasks[0]) % 2**12 + 65535 - 2**12 + 1}"
        alone = get("SLURM_NTASKS_PER_NODE", get("SLURM_STEP_TASKS_PER_NODE", "1")).partition("(")[0] == "1"
    elif ranks:
        source, size, rank, local_rank = "Open MPI", *map(int, ranks)
        alone = get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
        uri = re.search(r"tcp6?://\[?([^,:\]]+)", get("OMPI_MCA_orte_hnp_uri", ""))
        if address is None and uri is not None:
            address = f"{uri[1]}:{int(get('OMPI_MCA_orte_hnp_uri', '0').partition('.')[0]) // 2**12 % 2**12 + 61440}"
    else:
        return None
    if size == 1:
        return None
    if address is None:
        raise ValueError(f"{source} does not say where process 0 is; set JAX_COORDINATOR_ADDRESS=HOST:PORT for all")
    # Tasks that share a machine have one GPU each, unless the scheduler shows each of them only its own.
    if not alone and len(get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) > 1:
        local = (local_rank,)
    return Cluster(source, address, size, rank, local)


def _all(environment: Mapping[str, str], names: Sequence[str]) -> list[str] | None:
    return [environment[name] for name in names] if all(name in environment for name in names) else None


def _plain(source: str, names: Sequence[str], values: Sequence[Any]) -> Cluster | None:
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        raise ValueError(f"several processes need {', '.join(names)}; missing: {', '.join(missing)}")
    try:
        size, rank = int(values[1]), int(values[2])
    except ValueError:
        raise ValueError(f"{names[1]} and {names[2]}: expected numbers, given {values[1]!r}, {values[2]!r}") from None
    if not 0 <= rank < size:
        raise ValueError(f"{names[2]} = {rank} is not in 0 .. {size - 1}")
    return Cluster(source, values[0], size, rank) if size > 1 else None


def on_tpu_pod(environment: Mapping[str, str]) -> bool:
    """Whether this machine has TPU chips that may be part of a larger slice, which JAX then finds out by itself."""
    if "JAX_PLATFORMS" in environment and "tpu" not in environment["JAX_PLATFORMS"]:
        return False
    vendors = glob.glob("/sys/bus/pci/devices/*/vendor")
    has_chips = find_spec("libtpu") is not None and any(Path(v).read_text().strip() == "0x1ae0" for v in vendors)
    on_cloud = environment.get("TPU_SKIP_MDS_QUERY") is None
    several = (
        "," in environment.get("TPU_WORKER_HOSTNAMES", "") or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1
    )
    return has_chips and (on_cloud or several)


def initialize(cluster: Cluster | None, *, connect_seconds: float, heartbeat_seconds: float) -> None:
    """Joins the processes of one run; nothing to do for one.

    Args:
        cluster: see `detect`; None joins those of a TPU pod, if this is one of its machines.
        connect_seconds: all must be there within that time.
        heartbeat_seconds: a process that JAX has not heard of for so long is taken for dead, and ends all others.

    Raises:
        ProcessesMissingError: they did not find each other.
    """
    # Signals are this house's affair: framework.run.trainer's handlers, and one agreed last step.
    jax.config.update("jax_enable_preemption_service", False)
    times: dict[str, Any] = {
        "initialization_timeout": int(connect_seconds),
        "heartbeat_timeout_seconds": int(heartbeat_seconds),
    }
    if cluster is None:
        if on_tpu_pod(os.environ):
            jax.distributed.initialize(**times)
        return
    leave_out_greetings()
    meet(cluster.coordinator, cluster.num_processes, cluster.process_id, seconds=connect_seconds)
    host, _, port = cluster.coordinator.rpartition(":")
    if cluster.process_id:
        _wait_for(host, int(port), connect_seconds)  # JAX would try once, and then again after a second
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"{bind_host(host) or '[::]'}:{port}",
        **times,
    )


def _wait_for(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.02)


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


def greatest(number: int) -> int:
    """The greatest number of all processes'. Collective."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.array(number))))


def from_primary(value: Any) -> Any:
    """A JSON value of the primary process, for all. Collective."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    padded = np.resize(mine, int(broadcast_one_to_all(np.array(mine.size))))  # others' contents do not matter
    return json.loads(bytes(broadcast_one_to_all(padded)))


class Ballot:
    """How processes agree without waiting: each casts numbers after a step, and the greatest of each arrive with that
    step's metrics. So a decision is taken by all at the same step, one after the wish."""

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

        def greatest(votes: jax.Array, after: jax.Array) -> list[jax.Array]:
            votes, _ = lax.optimization_barrier((votes, after))  # collectives run in one order everywhere
            return list(votes.max(axis=0))

        self._greatest = jax.jit(greatest, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def cast(self, votes: Mapping[str, int], after: jax.Array) -> dict[str, jax.Array]:
        """The greatest vote of each name, int32 scalars that may still be on their way. `after`: a result, on all
        devices of the mesh, of the step that this follows. Collective."""
        own = np.tile(np.array([*votes.values()], np.int32), (len(self._sharding.addressable_devices), 1))
        counted = self._greatest(jax.make_array_from_process_local_data(self._sharding, own), after)
        return dict(zip(votes, counted, strict=True))
