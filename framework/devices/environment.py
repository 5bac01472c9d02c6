"""What the environment tells JAX's backends, for whoever is about to start them."""

import os


def prepare_jax() -> None:
    """Checks the environment of JAX's backends, and sets it where it says nothing yet."""
    import jax  # noqa: F401

    from framework.devices.accelerators import (
        GIB,
        GPU_MEMORY_FRACTION,
        HOST_LIMIT,
        HOST_MEMORY_FRACTION,
        machine_memory_bytes,
    )
    from framework.devices.compiler import check_environment

    check_environment()

    # JAX takes three quarters of a GPU unless told otherwise; the largest model needs nearly all of
    # it. The variable has an old name too, and jaxlib refuses both at once.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    # Nor more host memory than 64 GiB. Only GPUs read either.
    host_gib = HOST_MEMORY_FRACTION * machine_memory_bytes() / GIB
    os.environ.setdefault(HOST_LIMIT, str(int(host_gib)))
    # On a machine without TPU chips, which jax tells when it is imported, libtpu would complain
    # about that in five lines on stderr, if it is installed for planning.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def start_devices() -> None:
    """Has JAX find its devices, after the processes of a run have met.

    Raises:
        ValueError: it finds none of those that JAX_PLATFORMS asks for.
    """
    import jax

    try:
        jax.devices()
    # JAX 0.10 asserts that there is a backend.
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())
        raise ValueError(
            f"JAX finds no device{f' of JAX_PLATFORMS={asked}' if asked else ''}{f': {reason}' if reason else ''}; "
            "expected a driver and JAX's plugin for it (pip install 'plimsoll-train[cuda]' or '[tpu]'), or "
            "JAX_PLATFORMS=cpu"
        ) from error
