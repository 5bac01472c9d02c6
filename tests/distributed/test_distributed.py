"""framework.processes.distributed: how a process finds its index and the process count, and how processes agree."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.processes.distributed import Ballot, Cluster, broadcast_from_primary, detect, is_on_tpu_pod

PLAIN = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[013-016],gpu7",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def test_single_process() -> None:
    assert detect({}) is None
    assert detect({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}) is None, "in a batch script, outside of srun"


def test_flags_and_plain_environment() -> None:
    assert detect({}, ("h:1", 4, 0)) == Cluster("flags", "h:1", 4, 0)
    assert detect(PLAIN) == Cluster("environment", "h:1", 4, 2)
    assert detect({**SLURM, **PLAIN}, ("g:2", 2, 1)) == Cluster("flags", "g:2", 2, 1)
    assert detect({**SLURM, **PLAIN}) == Cluster("environment", "h:1", 4, 2)
    assert detect({}, ("h:1", 1, 0)) is None, "one of one"


def test_slurm() -> None:
    # JAX derives the port from the job; two tasks share a node, so each has one of its devices.
    assert detect(SLURM) == Cluster("SLURM", "node013:61517", 8, 5, (1,))
    assert detect({**SLURM, "SLURM_STEP_NODELIST": "gpu7,node[1-2]"}).coordinator == "gpu7:61517"
    assert detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}).local_device_ids is None
    assert detect({**SLURM, "CUDA_VISIBLE_DEVICES": "1"}).local_device_ids is None, "each sees only its own"
    assert detect({**SLURM, "JAX_COORDINATOR_ADDRESS": "me:9"}).coordinator == "me:9"
    assert detect({**SLURM, "SLURM_NTASKS": "1"}) is None


def test_open_mpi() -> None:
    found = detect({**OMPI, **URI})
    assert found == Cluster("Open MPI", "10.96.0.1:62624", 4, 3, (1,))
    assert detect({**OMPI, "JAX_COORDINATOR_ADDRESS": "me:9"}) == Cluster("Open MPI", "me:9", 4, 3)
    message = "Open MPI does not provide the address of process 0; set JAX_COORDINATOR_ADDRESS"
    with pytest.raises(ValueError, match=message):
        detect(OMPI)


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({}, ("h:1", None, 0), r"need --coordinator, --num_processes, --process_id; missing: --num_processes"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, (None,) * 3, r"missing: JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        ({"JAX_PROCESS_ID": "1"}, (None,) * 3, r"missing: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        ({**PLAIN, "JAX_PROCESS_ID": "4"}, (None,) * 3, r"JAX_PROCESS_ID = 4 is not in 0 \.\. 3"),
        ({**PLAIN, "JAX_NUM_PROCESSES": "four"}, (None,) * 3, r"expected numbers, given 'four', '2'"),
        ({}, ("h:1", 2, -1), r"--process_id = -1 is not in 0 \.\. 1"),
    ],
)
def test_contradictory_settings_are_refused(environment: dict, flags: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect(environment, flags)


def test_no_tpu_here() -> None:
    assert not is_on_tpu_pod({"JAX_PLATFORMS": "cpu"})


def test_ballot_returns_the_maximum_per_key() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    ballot = Ballot(mesh)
    loss = jax.device_put(np.float32(1.0), NamedSharding(mesh, PartitionSpec()))
    assert {k: int(v) for k, v in ballot.cast({"stop": 15, "save": 0}, loss).items()} == {"stop": 15, "save": 0}
    # The votes of other processes are rows on other devices.
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    votes = jax.device_put(np.array([[0, 1], [15, 0], [2, 0], [0, 0]], np.int32), sharding)
    assert [int(x) for x in ballot._greatest(votes, loss)] == [15, 1]


def test_one_process_needs_no_broadcast() -> None:
    value = {"a": [1, None]}
    assert broadcast_from_primary(value) is value
