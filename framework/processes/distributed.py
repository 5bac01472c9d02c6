"""Processes of a run: detecting and connecting them, barriers, agreement, and the primary process that writes files."""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import socket
import time
import zlib
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

from plimsoll.framework.processes.rendezvous import bind_host, wait_for_all
from plimsoll.framework.terminal.native_output import drop_gloo_greetings
from plimsoll.framework.terminal.phases import SHORT, phase

PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_OMPI_URI = "OMPI_MCA_orte_hnp_uri"
# If the scheduler does not specify the coordinator's port, it is one of the last 2**12, as in JAX.
_NUM_PORTS = 2**12
_FIRST_PORT = 65535 - _NUM_PORTS + 1


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and the position of this process among them.

    Attributes:
        source: source of the information: "flags", "environment", "SLURM" or "Open MPI".
        coordinator: host:port of process 0.
        num_processes: number of processes.
        process_id: number of this process, from 0.
        local_device_ids: devices of this machine that belong to this process; None for all.
    """

    source: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Task:
    """Task information of this process, from a scheduler."""

    source: str
    num_tasks: int
    rank: int
    local_rank: int  # among the tasks of this machine
    address: str | None  # host:port of process 0, if known
    is_alone: bool  # the only task on its machine


def detect(environment: Mapping[str, str], flags: Sequence[str | int | None] = (None, None, None)) -> Cluster | None:
    """Detect the processes of the run; None if this is the only one.

    The sources are, in this order: `flags`; JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID; SLURM (a
    task of srun); and Open MPI (mpirun). With SLURM and Open MPI, JAX_COORDINATOR_ADDRESS specifies the address of
    process 0 if the scheduler does not.

    Args:
        environment: environment variables.
        flags: (coordinator, number of processes, process id) from the command line.

    Raises:
        ValueError: some of the values that belong together are missing or invalid, or Open MPI does not provide the
            address of process 0.
    """
    if any(flag is not None for flag in flags):
        flag_names = ("--coordinator", "--num_processes", "--process_id")
        return _plain_cluster("flags", flag_names, flags)
    slurm_values = _get_values(environment, _SLURM)
    ranks = _get_values(environment, _OMPI)
    plain_values = [environment.get(name) for name in PLAIN]
    address, num_processes, process_id = plain_values
    has_scheduler = slurm_values is not None or ranks is not None
    is_plain = num_processes is not None or process_id is not None
    # With only an address, and no scheduler that counts the processes, `_plain_cluster` raises an error.
    if is_plain or (address and not has_scheduler):
        return _plain_cluster("environment", PLAIN, plain_values)
    if slurm_values:
        task = _slurm_task(environment, slurm_values, address)
    elif ranks:
        task = _open_mpi_task(environment, ranks, address)
    else:
        return None
    if task.num_tasks == 1:
        return None
    if task.address is None:
        advice = "set JAX_COORDINATOR_ADDRESS=HOST:PORT for all"
        raise ValueError(f"{task.source} does not provide the address of process 0; {advice}")
    # Tasks that share a machine use one GPU each, unless the scheduler already makes only that GPU visible.
    local_device_ids = None
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    if not task.is_alone and len(visible_devices) > 1:
        local_device_ids = (task.local_rank,)
    return Cluster(task.source, task.address, task.num_tasks, task.rank, local_device_ids)


def _get_values(environment: Mapping[str, str], names: Sequence[str]) -> list[str] | None:
    """Return the values of these variables; None if any of them is not set."""
    if all(name in environment for name in names):
        return [environment[name] for name in names]
    return None


def _slurm_task(environment: Mapping[str, str], values: list[str], address: str | None) -> _Task:
    """Return the task for the values of _SLURM."""
    num_tasks, rank, local_rank = map(int, values[2:])
    if not address:
        # As in JAX, use the first host of the step, and a port derived from the job id. A list of nodes looks like
        # "a[01-03,07],b", with commas inside brackets, too.
        first_nodes = re.split(r",(?![^[]*\])", values[1])[0]
        first_host = re.sub(r"\[(\w+)[^]]*\].*", r"\1", first_nodes)
        port = int(values[0]) % _NUM_PORTS + _FIRST_PORT
        address = f"{first_host}:{port}"
    # The format is "4(x2),3": four tasks on each of two machines, then three.
    step_tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks_per_node = environment.get("SLURM_NTASKS_PER_NODE", step_tasks)
    is_alone = tasks_per_node.partition("(")[0] == "1"
    return _Task("SLURM", num_tasks, rank, local_rank, address, is_alone)


def _open_mpi_task(environment: Mapping[str, str], ranks: list[str], address: str | None) -> _Task:
    """Return the task for the values of _OMPI."""
    num_tasks, rank, local_rank = map(int, ranks)
    is_alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
    # The address of mpirun itself, which only older versions pass on: "JOB.0;tcp://HOST,HOST:PORT".
    uri = environment.get(_OMPI_URI, "")
    match = re.search(r"tcp6?://\[?([^,:\]]+)", uri)
    if address is None and match is not None:
        job = int(uri.partition(".")[0])
        # As in JAX: Open MPI's job numbers are multiples of 2**12.
        port = job // 2**12 % _NUM_PORTS + _FIRST_PORT
        address = f"{match[1]}:{port}"
    return _Task("Open MPI", num_tasks, rank, local_rank, address, is_alone)


def _plain_cluster(source: str, names: Sequence[str], values: Sequence[str | int | None]) -> Cluster | None:
    """Return the cluster for the three values of PLAIN, or for the equivalent flags; None for a single process."""
    missing_names = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing_names:
        problem = f"missing: {', '.join(missing_names)}"
        raise ValueError(f"several processes need {', '.join(names)}; {problem}")
    address, size_value, rank_value = map(str, values)
    _, size_name, rank_name = names
    try:
        size = int(size_value)
        rank = int(rank_value)
    except ValueError:
        problem = f"expected numbers, given {size_value!r}, {rank_value!r}"
        raise ValueError(f"{size_name} and {rank_name}: {problem}") from None
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name} = {rank} is not in 0 .. {size - 1}")
    return Cluster(source, address, size, rank) if size > 1 else None


def is_on_tpu_pod(environment: Mapping[str, str]) -> bool:
    """Return whether this machine has TPU chips that may be part of a larger slice. JAX itself detects if they are."""
    if "JAX_PLATFORMS" in environment and "tpu" not in environment["JAX_PLATFORMS"]:
        return False
    # 0x1ae0 is Google's PCI vendor id.
    has_chips = find_spec("libtpu") is not None and any(
        Path(file).read_text().strip() == "0x1ae0" for file in glob.glob("/sys/bus/pci/devices/*/vendor")
    )
    # Without the metadata server of Google Cloud, only these variables indicate other machines.
    on_cloud = environment.get("TPU_SKIP_MDS_QUERY") is None
    has_several_hosts = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    is_multihost = has_several_hosts or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1
    return has_chips and (on_cloud or is_multihost)


def initialize(cluster: Cluster | None, *, connect_seconds: float, heartbeat_seconds: float) -> None:
    """Connect the processes of a run. Do nothing for a single process.

    Args:
        cluster: result of `detect`; None connects the processes of a TPU pod, if this machine is part of one.
        connect_seconds: time limit for all processes to connect.
        heartbeat_seconds: a process without a heartbeat for this long counts as dead, and all others exit.

    Raises:
        ProcessesMissingError: the processes did not find each other.
    """
    # framework.run.trainer handles signals itself, and makes all processes agree on the last step.
    jax.config.update("jax_enable_preemption_service", False)
    if cluster is None:
        if is_on_tpu_pod(os.environ):
            with phase("waiting for the other hosts of the TPU slice", patience=SHORT):
                jax.distributed.initialize(
                    initialization_timeout=int(connect_seconds), heartbeat_timeout_seconds=int(heartbeat_seconds)
                )
        return
    drop_gloo_greetings()
    with phase(f"waiting for {cluster.num_processes} processes at {cluster.coordinator}", patience=SHORT):
        wait_for_all(cluster.coordinator, cluster.num_processes, cluster.process_id, seconds=connect_seconds)
        host, _, port = cluster.coordinator.rpartition(":")
        # If the first attempt failed, JAX would wait a second before the next one.
        if cluster.process_id:
            _wait_for(host, int(port), connect_seconds)
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{bind_host(host) or '[::]'}:{port}",
            initialization_timeout=int(connect_seconds),
            heartbeat_timeout_seconds=int(heartbeat_seconds),
        )


def _wait_for(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens at an address. If the time runs out, JAX reports the error later."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.02)


def is_primary() -> bool:
    """Return whether this process writes the files that a run writes only once."""
    return jax.process_index() == 0


def barrier(name: str, *, minutes: int = 120) -> None:
    """Wait through the coordinator until every process gets here.

    A collective on the devices would time out after half a minute on CPU, but one process may have to tokenize a
    corpus, or to compile a program that others have in their cache.

    Args:
        name: name of the barrier, which must be the same in all processes.
        minutes: maximum time to wait.
    """
    if jax.process_count() > 1:
        # Use orbax to access the coordinator's barrier, because JAX keeps it private.
        from orbax.checkpoint import multihost

        with phase("waiting for the other processes", patience=SHORT):
            multihost.get_barrier_sync_fn()(key=name, timeout_ms=minutes * 60_000)


def is_true_on_all(condition: bool) -> bool:
    """Return whether the condition holds in every process. Collective."""
    from jax.experimental import multihost_utils

    conditions = multihost_utils.process_allgather(np.array(condition))
    return bool(np.all(conditions))


def reduce_max(number: int) -> int:
    """Return the maximum of the processes' numbers. Collective."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    numbers = multihost_utils.process_allgather(np.array(number))
    return int(np.max(numbers))


@functools.cache
def count_processes_here() -> int:
    """Return the number of the run's processes on this machine, or in this container. Collective at the first call."""
    if jax.process_count() == 1:
        return 1
    from jax.experimental import multihost_utils

    boot_id = ""
    # Other systems than Linux have no such file.
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    # 32 bits, because JAX makes 32-bit numbers of larger ones.
    machine = zlib.crc32(f"{socket.gethostname()} {boot_id}".encode())
    machines = multihost_utils.process_allgather(np.array(machine, np.uint32))
    return int(np.sum(machines == machine))


def broadcast_from_primary(value: object) -> Any:
    """Return the primary process's JSON value in every process. Collective."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    primary_size = int(broadcast_one_to_all(np.array(data.size)))
    # All processes must pass an array of the same shape; only the primary's content matters.
    padded_data = np.resize(data, primary_size)
    return json.loads(bytes(broadcast_one_to_all(padded_data)))


def broadcast_first(text: str | None) -> str | None:
    """Return in every process the text of the first process that has one; None if none has. Collective."""
    if jax.process_count() == 1:
        return text
    from jax.experimental.multihost_utils import broadcast_one_to_all

    count = jax.process_count()
    process = jax.process_index()
    # Rank 0 means no text; the first process with a text has the highest rank.
    first = count - reduce_max(0 if text is None else count - process)
    if first == count:
        return None
    data = np.frombuffer((text or "").encode(), np.uint8)
    is_source = process == first
    size = int(broadcast_one_to_all(np.array(data.size), is_source=is_source))
    return bytes(broadcast_one_to_all(np.resize(data, size), is_source=is_source)).decode()


class Ballot:
    """Lets processes agree without waiting for each other.

    Each process casts numbers after a step, and the maximum of each number arrives with that step's metrics. So all
    processes make a decision at the same step, one step after it was requested.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

        def greatest(votes: jax.Array, after: jax.Array) -> list[jax.Array]:
            # The barrier makes all processes run collectives in the same order.
            votes, _ = lax.optimization_barrier((votes, after))
            return list(votes.max(axis=0))

        self._greatest = jax.jit(greatest, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def cast(self, votes: Mapping[str, int], after: jax.Array) -> dict[str, jax.Array]:
        """Return the maximum of each vote, as int32 scalars that may not be computed yet. Collective.

        Args:
            votes: this process's numbers, by name. All processes use the same names.
            after: a result of the preceding step, on all devices of the mesh.
        """
        numbers = np.array([*votes.values()], np.int32)
        # Use one row per device, because the array is sharded over all devices of the mesh.
        num_local_devices = len(self._sharding.addressable_devices)
        local_rows = np.tile(numbers, (num_local_devices, 1))
        all_rows = jax.make_array_from_process_local_data(self._sharding, local_rows)
        greatest_votes = self._greatest(all_rows, after)
        return dict(zip(votes, greatest_votes, strict=True))
