"""Prepares the environment of JAX's backends, and starts them."""

import os


def prepare_jax() -> None:
    """Check the environment variables of JAX's backends, and set defaults for those that are missing."""
    import jax  # noqa: F401

    from plimsoll.framework.devices.accelerators import GIB, GPU_MEMORY_FRACTION, HOST_LIMIT, HOST_MEMORY_FRACTION
    from plimsoll.framework.devices.compiler import check_environment
    from plimsoll.framework.devices.host import get_machine_memory_bytes

    check_environment()

    # By default JAX reserves three quarters of a GPU's memory, but the largest model needs nearly all of it. The
    # variable also has an old name, and jaxlib refuses both at the same time.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    # By default JAX uses at most 64 GiB of host memory. Only the GPU backend reads either variable.
    host_gib = HOST_MEMORY_FRACTION * get_machine_memory_bytes() / GIB
    os.environ.setdefault(HOST_LIMIT, str(int(host_gib)))
    # On a machine without TPU chips, which importing jax detects, libtpu would print five lines of complaints to
    # stderr if it is installed for planning.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def start_devices() -> None:
    """Make JAX find its devices. Call it after the processes of a run have connected.

    Raises:
        ValueError: JAX finds no devices, or none of those that JAX_PLATFORMS asks for.
    """
    import jax

    try:
        jax.devices()
    # JAX 0.10 uses an assertion to check that there is a backend.
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())
        raise ValueError(
            f"JAX finds no device{f' of JAX_PLATFORMS={platforms}' if platforms else ''}"
            f"{f': {reason}' if reason else ''}; "
            "expected a driver and JAX's plugin for it (pip install 'plimsoll-train[cuda]' or '[tpu]'), or "
            "JAX_PLATFORMS=cpu"
        ) from error
