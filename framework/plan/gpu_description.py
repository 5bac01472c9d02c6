"""How a GPU that is not here is described to XLA's compiler."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from framework.devices import accelerators
from framework.devices.accelerators import AcceleratorSpec

# The plugins of JAX with the compiler of GPUs, by the CUDA toolkit that they bring; JAX takes the first that is here.
PLUGINS = {12: "jax_cuda12_plugin", 13: "jax_cuda13_plugin"}
_KIB = 2**10


@dataclass(frozen=True)
class Architecture:
    """What one multiprocessor (SM) of a GPU has; sources are in framework/devices/gpu_architectures.toml.

    Attributes:
        capability: the compute capability, "8.9".
        fp32_units: float32 multiply-adds in a cycle.
        threads: resident at once.
        shared_memory_kib, shared_memory_per_block_kib: of the SM, and the part of it that one block may have.
        last_cuda: the last CUDA toolkit that compiles for it, where that is past.
    """

    capability: str
    fp32_units: int
    threads: int
    shared_memory_kib: int
    shared_memory_per_block_kib: int
    last_cuda: int | None = None


@cache
def architectures() -> list[Architecture]:
    """All architectures, the oldest first."""
    path = Path(accelerators.__file__).with_name("gpu_architectures.toml")
    tables = tomllib.loads(path.read_text())
    return [Architecture(capability, **table) for capability, table in tables.items()]


def cuda_here() -> int | None:
    """The CUDA toolkit of JAX's plugin on this machine, 12 or 13; None where there is no plugin."""
    for cuda, module in PLUGINS.items():
        if find_spec(module):
            return cuda
    return None


def compiled_architecture(spec: AcceleratorSpec, cuda: int | None) -> Architecture:
    """The GPU's own architecture, or the next newer one where a CUDA toolkit no longer compiles for it.

    Raises:
        ValueError: the table of accelerators does not have the GPU's compute capability, or a newer one than is known.
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
    raise ValueError(f"{spec.name}: CUDA {cuda} compiles for no architecture of {', '.join(capabilities)}")


def note(spec: AcceleratorSpec, cuda: int | None) -> str:
    """What a report has to say of the architecture that was compiled for; empty where it is the GPU's own."""
    architecture = compiled_architecture(spec, cuda)
    if architecture.capability == spec.compute_capability:
        return ""
    return (
        f"compiled for compute capability {architecture.capability}, the nearest that CUDA {cuda} compiles for: "
        f"{spec.name} has {spec.compute_capability}"
    )


def gpu_description(spec: AcceleratorSpec, cuda: int | None = None) -> str:
    """A GPU as XLA's compiler wants it described: a `stream_executor.GpuTargetConfigProto` as text.

    Args:
        spec: of the GPU.
        cuda: the CUDA toolkit that compiles; None: any.

    Raises:
        ValueError: a figure is missing from the table of accelerators.
    """
    names = ("multiprocessors", "clock_ghz", "l2_bytes", "memory_bytes", "hbm_bytes_per_second")
    figures = {name: getattr(spec, name) for name in names}
    missing_names = [name for name, figure in figures.items() if figure is None]
    if missing_names:
        raise ValueError(
            f"{spec.name}: no compiler description, as {', '.join(missing_names)} is not known; "
            "plimsoll plan --estimate needs none"
        )
    architecture = compiled_architecture(spec, cuda)
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
