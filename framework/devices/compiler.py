"""Options of the XLA compiler: set by the config, and checked with the compiler itself."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.framework.config.components import component
from plimsoll.framework.config.names import did_you_mean

if TYPE_CHECKING:
    from jax.sharding import Mesh

_PATH = "config.compiler.options."
# Options that read or write files, run other programs (such as ptxas from xla_gpu_cuda_data_dir), or pass an entire
# command line on to LLVM or ptxas.
_FILES = re.compile(r"dump|_dir$|_dir_|_file|_path$|_from$|_to$|_cache_|extra_(flags|options)|_url|profile")

# XLA for GPU has two copies between host and device in flight by default, and each waits for the one before the last.
# With more, those of a layer program run together, in both directions, and at the same time as its computation.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_async_compute_limit": 64}

# Without these, XLA for TPU fetches a layer's state only when the transfers of the last layer have ended, and waits.
_TPU_PREFETCH_OPTIONS = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
}


@component
class Compiler:
    """Compiler options for all programs: evaluation needs the same ones as the train step, such as memory for a kernel.

    Args:
        options: compiler options by name, as in XLA_FLAGS and LIBTPU_INIT_ARGS without dashes:
            {"xla_tpu_scoped_vmem_limit_kib": 65536}. They take precedence over the defaults for the kind of device in
            framework/devices/accelerators.toml and for GPUs and TPUs here, and so do XLA_FLAGS and LIBTPU_INIT_ARGS.
        use_accelerator_options: whether to use those defaults at all.
    """

    def __init__(
        self,
        *,
        options: dict[str, bool | int | float | str] = {},  # noqa: B006
        use_accelerator_options: bool = True,
    ):
        self.options = _convert_options(options)
        self.use_accelerator_options = use_accelerator_options

    def options_for(self, mesh: Mesh, *, prefetches_state: bool = False) -> dict[str, bool | str]:
        """Return all options for programs on the devices of a mesh.

        Args:
            mesh: the devices.
            prefetches_state: whether a step has to hide transfers of optimizer state behind the backward pass, at the
                cost of some memory.
        """
        from plimsoll.framework.devices.accelerators import spec_for

        usual: dict[str, bool | int | str] = {}
        if self.use_accelerator_options:
            spec = spec_for(list(mesh.devices.flat))
            usual = dict(spec.compiler_options)
            if spec.platform == "gpu":
                usual |= _GPU_OPTIONS
            if spec.platform == "tpu" and prefetches_state:
                usual |= _TPU_PREFETCH_OPTIONS
        variables = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        environment = " ".join(os.environ.get(name, "") for name in variables)
        names_in_environment = set(re.findall(r"--(\w+)", environment))
        # Leave out options that the environment sets: an option of a single compilation would override the user's flag.
        # Keep the table's order, because the options are part of the keys of compile caches.
        usual_values = {name: value for name, value in usual.items() if name not in names_in_environment}
        return _convert_options(usual_values) | self.options

    def check(self, mesh: Mesh) -> None:
        """Check the options by compiling a tiny program for the devices of a mesh; without options, do nothing.

        It takes 0.1 s for 8 devices and 0.2 s for 1024.

        Raises:
            ValueError: the compiler does not know an option or rejects its value, or an option is for another platform.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        platform = mesh.devices.flat[0].platform
        replicated = NamedSharding(mesh, PartitionSpec())
        for name in self.options:
            # XLA accepts CPU and GPU options on all platforms, and silently ignores those for other platforms.
            match = re.match("xla_(cpu|gpu|tpu)_", name)
            if match and match[1] != platform:
                kinds = f"for {match[1].upper()}s, but these devices are {platform.upper()}s"
                raise ValueError(f"{_PATH}{name}: an option {kinds}; set it for one kind with accelerator_rules")
        if not self.options:
            return
        scalar = jax.ShapeDtypeStruct((), "float32", sharding=replicated)
        try:
            lowered = jax.jit(lambda x: x + 1).lower(scalar)
            lowered.compile(compiler_options=self.options)
        except jax.errors.JaxRuntimeError as error:
            # The first line has an error code before the text, and colons after it.
            message = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(": ")
            # The message does not name the option in a fixed format, so take the longest name that it contains.
            mentioned_names = [name for name in self.options if name in message]
            name = max(mentioned_names, key=len, default="")
            package = "libtpu" if platform == "tpu" else "jaxlib"
            hint = did_you_mean(name, _options(package)) if "No such" in message else ""
            raise ValueError(f"{_PATH}{name}: the compiler reports: {message}{hint}") from None


def _convert_options(options: Mapping[str, bool | int | float | str]) -> dict[str, bool | str]:
    """Convert options to the types that XLA accepts: bool for booleans, str for everything else."""
    booleans: dict[str, bool] = {"true": True, "false": False}
    converted: dict[str, bool | str] = {}
    for name, value in options.items():
        text = str(value)
        converted[name] = booleans.get(text.lower(), text)
    return converted


def names_files(option: str, value: object) -> bool:
    """Return whether an option makes the compiler read or write files, judging by its name or a path as its value."""
    if _FILES.search(option):
        return True
    return isinstance(value, str) and ("/" in value or "\\" in value)


def check_environment() -> None:
    """Raise ValueError for an unknown flag in XLA_FLAGS, which would abort the process later."""
    flags = os.environ.get("XLA_FLAGS", "")
    for name in re.findall(r"(?:^|\s)--(\w+)", flags):
        # XLA aborts at startup because of an unknown flag. The names of all known flags are in its binary.
        with _library("jaxlib") as library:
            is_known = library.find(name.encode()) >= 0
        if not is_known:
            hint = did_you_mean(name, _options("jaxlib"))
            raise ValueError(f"XLA_FLAGS: unknown flag --{name}{hint}")


def _options(package: str) -> list[str]:
    """Return the option names in the compiler's binary: TPU options are not listed anywhere else. Takes a second."""
    with _library(package) as library:
        names = re.findall(rb"xla_[a-z0-9_]{4,80}", library)
        return sorted({name.decode() for name in names})


@contextmanager
def _library(package: str) -> Iterator[mmap.mmap]:
    """Map a package's largest shared library, the compiler, into memory: it is too large (hundreds of MB) to read."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = Path(folders[0]).glob("*.so")
    path = max(libraries, key=lambda path: path.stat().st_size)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        yield library
