"""What the XLA compiler is told beyond its own defaults, by config, and checked with that very compiler."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from framework.config.components import component
from framework.config.names import did_you_mean

_PATH = "config.compiler.options."
# Options that read or write files, run programs beside the compiler (ptxas, of xla_gpu_cuda_data_dir), or hand a whole
# command line on to LLVM or ptxas.
_FILES = re.compile(r"dump|_dir$|_dir_|_file|_path$|_from$|_to$|_cache_|extra_(flags|options)|_url|profile")


@component
class Compiler:
    """Options for all programs alike: what the step needs (fast memory for a kernel, say) evaluation needs too.

    Args:
        options: by name, as in XLA_FLAGS and LIBTPU_INIT_ARGS without dashes: {"xla_tpu_scoped_vmem_limit_kib": 65536}.
            They go before those that framework/devices/accelerators.toml has for the kind of device, and so do
            XLA_FLAGS and LIBTPU_INIT_ARGS.
        of_accelerator: whether the latter are used at all.
    """

    def __init__(self, *, options: dict[str, bool | int | float | str] = {}, of_accelerator: bool = True):  # noqa: B006
        self.options, self.of_accelerator = _options_of(options), of_accelerator

    def options_for(self, mesh: Any) -> dict[str, bool | str]:
        """All options for the programs of a mesh's devices."""
        from framework.devices.accelerators import spec_for

        usual = dict(spec_for(list(mesh.devices.flat)).compiler_options) if self.of_accelerator else {}
        environment = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
        in_environment = set(re.findall(r"--(\w+)", environment))
        return _options_of({name: usual[name] for name in usual.keys() - in_environment}) | self.options

    def check(self, mesh: Any) -> None:
        """Compiles next to nothing for the devices of a mesh: 0.1 s for 8, 0.2 s for 1024; nothing without options.

        Raises:
            ValueError: their compiler does not know an option or refuses its value, or it is one of other devices'.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        platform, everywhere = mesh.devices.flat[0].platform, NamedSharding(mesh, PartitionSpec())
        for name in self.options:
            # XLA takes the options of CPUs and GPUs everywhere, and leaves those of others aside without a word.
            if (other := re.match("xla_(cpu|gpu|tpu)_", name)) and other[1] != platform:
                kinds = f"for {other[1].upper()}s, and these devices are {platform.upper()}s"
                raise ValueError(f"{_PATH}{name}: an option {kinds}; accelerator_rules give each kind its own")
        scalar = jax.ShapeDtypeStruct((), "float32", sharding=everywhere)
        try:
            _ = self.options and jax.jit(lambda x: x + 1).lower(scalar).compile(compiler_options=self.options)
        except jax.errors.JaxRuntimeError as error:
            words = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(": ")
            name = max((name for name in self.options if name in words), key=len, default="")
            package = "libtpu" if platform == "tpu" else "jaxlib"
            near = did_you_mean(name, _options(package)) if "No such" in words else ""
            raise ValueError(f"{_PATH}{name}: the compiler says: {words}{near}") from None


def _options_of(options: Mapping[str, bool | int | float | str]) -> dict[str, bool | str]:
    words: dict[str, bool] = {"true": True, "false": False}  # XLA itself takes a bool, and no such text
    return {name: words.get(str(value).lower(), str(value)) for name, value in options.items()}


def names_files(option: str, value: Any) -> bool:
    """Whether an option makes the compiler read or write files, going by the name, or by a value that is a path."""
    return bool(_FILES.search(option)) or (isinstance(value, str) and ("/" in value or "\\" in value))


def check_environment() -> None:
    """Raises ValueError for a flag in XLA_FLAGS that XLA does not know: it would end the process."""
    for name in re.findall(r"(?:^|\s)--(\w+)", os.environ.get("XLA_FLAGS", "")):
        with _library("jaxlib") as library:
            known = library.find(name.encode()) >= 0
        if not known:
            raise ValueError(f"XLA_FLAGS: XLA knows no flag --{name}{did_you_mean(name, _options('jaxlib'))}")


def _options(package: str) -> list[str]:
    """The names of options as they stand in the compiler's binary: nothing else lists those of a TPU. A second."""
    with _library(package) as library:
        return sorted({name.decode() for name in re.findall(rb"xla_[a-z0-9_]{4,80}", library)})


@contextmanager
def _library(package: str) -> Iterator[mmap.mmap]:
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    path = max(Path(folders[0]).glob("*.so"), key=lambda path: path.stat().st_size)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        yield library
