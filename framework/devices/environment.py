"""Prepares the environment of JAX's backends, and starts them."""

import os
from collections.abc import Callable, Mapping

from plimsoll.framework.terminal.install_hints import install_extra

# What a process with a GPU holds in host memory besides the arrays of JAX: Python, libraries and compiled programs.
# Assumed, as in plan/host_memory.py.
_NOT_PINNED_BYTES = 5 << 29


def prepare_jax() -> None:
    """Check the environment variables of JAX's backends, and set defaults for those that are missing."""
    import jax  # noqa: F401

    from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT
    from plimsoll.framework.devices.compiler import check_environment
    from plimsoll.framework.devices.host import get_free_memory_bytes

    check_environment()

    # By default JAX pins at most 64 GiB of host memory. The pool may grow beyond what is in it, so without a limit it
    # could take what the rest of the process needs. Only the GPU backend reads the variable.
    free_bytes = get_free_memory_bytes()
    pinned_bytes = max(free_bytes - _NOT_PINNED_BYTES, free_bytes // 2)
    os.environ.setdefault(HOST_LIMIT, str(pinned_bytes // GIB))
    # On a machine without TPU chips, which importing jax detects, libtpu would print five lines of complaints to
    # stderr if it is installed for planning.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def set_memory_fraction(
    num_processes: int = 1,
    local_devices: int | None = None,
    choose_mesh: Callable[[str, int], Mapping[str, int] | None] = lambda accelerator, num_devices: None,
) -> None:
    """Set the share of a GPU's memory that JAX takes when it starts, unless it is set already.

    Args:
        num_processes: number of processes of the run.
        local_devices: number of GPUs of this process; None for all that it sees.
        choose_mesh: returns {mesh axis: size} for (accelerator name, number of devices); None if the mesh is not known
            yet, and then NCCL's part is an upper bound, see reserved_memory.py.
    """
    from plimsoll.framework.devices.gpu_driver import find_installed_spec, list_gpus
    from plimsoll.framework.devices.reserved_memory import (
        UNKNOWN_GPU_FRACTION,
        get_memory_fraction,
        is_fraction_set,
        store_fraction,
    )

    if is_fraction_set():
        return
    gpus = list_gpus()
    spec = find_installed_spec(gpus)
    fraction = UNKNOWN_GPU_FRACTION
    if spec is not None:
        num_devices = num_processes * (local_devices or len(gpus))
        fraction = get_memory_fraction(spec, num_devices, choose_mesh(f"{spec.name}x{num_devices}", num_devices))
    # Only the GPU backend reads it.
    store_fraction(fraction)


def start_devices() -> None:
    """Make JAX find its devices. Call it after the processes of a run have connected.

    Raises:
        ValueError: JAX finds no devices, or none of those that JAX_PLATFORMS asks for.
    """
    import jax

    set_memory_fraction()
    try:
        jax.devices()
    # JAX 0.10 uses an assertion to check that there is a backend.
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())
        raise ValueError(
            f"JAX finds no device{f' of JAX_PLATFORMS={platforms}' if platforms else ''}"
            f"{f': {reason}' if reason else ''}; "
            f"expected a driver and JAX's plugin for it ({install_extra('cuda')}, or [tpu]), or "
            "JAX_PLATFORMS=cpu"
        ) from error
