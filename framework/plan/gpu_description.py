"""Describes GPUs that are not installed on this machine to XLA's compiler."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from plimsoll.framework.devices import accelerators
from plimsoll.framework.devices.accelerators import AcceleratorSpec

# JAX plugins that include the GPU compiler, by CUDA toolkit version; JAX uses the first one that is installed.
PLUGINS = {12: "jax_cuda12_plugin", 13: "jax_cuda13_plugin"}
_KIB = 2**10


@dataclass(frozen=True)
class Architecture:
    """Resources of one streaming multiprocessor (SM); sources are in framework/devices/gpu_architectures.toml.

    Attributes:
        capability: compute capability, such as "8.9".
        fp32_units: float32 multiply-adds per cycle.
        threads: maximum number of resident threads.
        shared_memory_kib, shared_memory_per_block_kib: shared memory in KiB of the SM, and the most that one block may
            use.
        last_cuda: last CUDA toolkit version that compiles for it; None if the latest one still does.
    """

    capability: str
    fp32_units: int
    threads: int
    shared_memory_kib: int
    shared_memory_per_block_kib: int
    last_cuda: int | None = None


@cache
def architectures() -> list[Architecture]:
    """Return all known architectures, oldest first."""
    path = Path(accelerators.__file__).with_name("gpu_architectures.toml")
    tables = tomllib.loads(path.read_text())
    return [Architecture(capability, **table) for capability, table in tables.items()]


def installed_cuda() -> int | None:
    """Return the CUDA toolkit version of the installed JAX plugin, 12 or 13; None if no plugin is installed."""
    for cuda, module in PLUGINS.items():
        if find_spec(module):
            return cuda
    return None


def find_architecture(spec: AcceleratorSpec, cuda: int | None) -> Architecture:
    """Return the GPU's own architecture, or the next newer one if the CUDA toolkit no longer compiles for it.

    Args:
        spec: the GPU.
        cuda: CUDA toolkit version; None means any.

    Raises:
        ValueError: the GPU's compute capability is unknown, or the toolkit compiles for no known architecture that is
            new enough.
    """
    known = architectures()
    capabilities = [architecture.capability for architecture in known]
    if spec.compute_capability not in capabilities:
        raise ValueError(
            f"{spec.name}: no compiler description for compute capability {spec.compute_capability or 'unknown'}; "
            f"known: {', '.join(capabilities)}; plimsoll plan --estimate needs none"
        )
    for architecture in known[capabilities.index(spec.compute_capability) :]:
        if cuda is None or architecture.last_cuda is None or cuda <= architecture.last_cuda:
            return architecture
    raise ValueError(f"{spec.name}: CUDA {cuda} does not compile for any of {', '.join(capabilities)}")


def architecture_note(spec: AcceleratorSpec, cuda: int | None) -> str:
    """Return the report's note on a substituted architecture; empty if the program was compiled for the GPU's own.

    Args:
        spec: the GPU.
        cuda: CUDA toolkit version that compiles; None means any.
    """
    architecture = find_architecture(spec, cuda)
    if architecture.capability == spec.compute_capability:
        return ""
    return (
        f"compiled for compute capability {architecture.capability}, the nearest that CUDA {cuda} compiles for: "
        f"{spec.name} has {spec.compute_capability}"
    )


def gpu_description(spec: AcceleratorSpec, cuda: int | None = None) -> str:
    """Return the description of a GPU for XLA's compiler: a `stream_executor.GpuTargetConfigProto` as text.

    Args:
        spec: the GPU.
        cuda: CUDA toolkit version that compiles; None means any.

    Raises:
        ValueError: a figure is missing from the table of accelerators.
    """
    names = ("multiprocessors", "clock_ghz", "l2_bytes", "memory_bytes", "hbm_bytes_per_second")
    figures = {name: getattr(spec, name) for name in names}
    missing_names = [name for name, figure in figures.items() if figure is None]
    if missing_names:
        raise ValueError(
            f"{spec.name}: no compiler description, because {', '.join(missing_names)} is unknown; "
            "plimsoll plan --estimate needs none"
        )
    architecture = find_architecture(spec, cuda)
    major, minor = architecture.capability.split(".")
    template = Path(__file__).with_name("gpu.textproto").read_text()
    return template % {
        **figures,
        "major": major,
        "minor": minor,
        "fp32_units": architecture.fp32_units,
        "threads": architecture.threads,
        "shared_memory_bytes": architecture.shared_memory_kib * _KIB,
        "shared_memory_per_block_bytes": architecture.shared_memory_per_block_kib * _KIB,
        "device_kind": spec.device_kinds[0],
    }
