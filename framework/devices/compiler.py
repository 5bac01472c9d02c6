"""Options of the XLA compiler beyond its own defaults: set by config, and checked with that very compiler."""

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

    def __init__(
        self,
        *,
        options: dict[str, bool | int | float | str] = {},  # noqa: B006
        of_accelerator: bool = True,
    ):
        self.options = _options_of(options)
        self.of_accelerator = of_accelerator

    def options_for(self, mesh: Any) -> dict[str, bool | str]:
        """All options for the programs of a mesh's devices."""
        from framework.devices.accelerators import spec_for

        usual: dict[str, bool | int | str] = {}
        if self.of_accelerator:
            spec = spec_for(list(mesh.devices.flat))
            usual = dict(spec.compiler_options)
        variables = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        environment = " ".join(os.environ.get(name, "") for name in variables)
        names_in_environment = set(re.findall(r"--(\w+)", environment))
        # An option that is handed to one compilation would win over the user's own flag.
        # They stay in the table's order: caches of compiled programs have the options in their keys.
        usual_values = {name: value for name, value in usual.items() if name not in names_in_environment}
        return _options_of(usual_values) | self.options

    def check(self, mesh: Any) -> None:
        """Compiles next to nothing for the devices of a mesh: 0.1 s for 8, 0.2 s for 1024; nothing without options.

        Raises:
            ValueError: their compiler does not know an option or refuses its value, or it is one of other devices'.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        platform = mesh.devices.flat[0].platform
        replicated = NamedSharding(mesh, PartitionSpec())
        for name in self.options:
            # XLA takes the options of CPUs and GPUs everywhere, and leaves those of others aside without a word.
            match = re.match("xla_(cpu|gpu|tpu)_", name)
            if match and match[1] != platform:
                kinds = f"for {match[1].upper()}s, and these devices are {platform.upper()}s"
                raise ValueError(f"{_PATH}{name}: an option {kinds}; accelerator_rules give each kind its own")
        if not self.options:
            return
        scalar = jax.ShapeDtypeStruct((), "float32", sharding=replicated)
        try:
            lowered = jax.jit(lambda x: x + 1).lower(scalar)
            lowered.compile(compiler_options=self.options)
        except jax.errors.JaxRuntimeError as error:
            message = _compiler_message(error)
            # The message does not say in one form which option it is about, so the longest name
            # that it contains is taken.
            mentioned_names = [name for name in self.options if name in message]
            name = max(mentioned_names, key=len, default="")
            package = "libtpu" if platform == "tpu" else "jaxlib"
            hint = did_you_mean(name, _options(package)) if "No such" in message else ""
            raise ValueError(f"{_PATH}{name}: the compiler says: {message}{hint}") from None


def _compiler_message(error: Exception) -> str:
    """The first line of the compiler's error, without the code before it and the colons after it."""
    first_line = str(error).splitlines()[0]
    return first_line.removeprefix("INVALID_ARGUMENT: ").rstrip(": ")


def _options_of(options: Mapping[str, bool | int | float | str]) -> dict[str, bool | str]:
    """Options in the types that XLA takes: text, but for booleans, which must be bool."""
    booleans: dict[str, bool] = {"true": True, "false": False}
    converted: dict[str, bool | str] = {}
    for name, value in options.items():
        text = str(value)
        converted[name] = booleans.get(text.lower(), text)
    return converted


def names_files(option: str, value: Any) -> bool:
    """Whether an option makes the compiler read or write files, going by the name, or by a value that is a path."""
    if _FILES.search(option):
        return True
    return isinstance(value, str) and ("/" in value or "\\" in value)


def check_environment() -> None:
    """Raises ValueError for a flag in XLA_FLAGS that XLA does not know: it would end the process."""
    flags = os.environ.get("XLA_FLAGS", "")
    for name in re.findall(r"(?:^|\s)--(\w+)", flags):
        # XLA reads its flags as it starts, and then aborts; but their names are in its binary.
        with _library("jaxlib") as library:
            is_known = library.find(name.encode()) >= 0
        if not is_known:
            hint = did_you_mean(name, _options("jaxlib"))
            raise ValueError(f"XLA_FLAGS: XLA knows no flag --{name}{hint}")


def _options(package: str) -> list[str]:
    """The names of options in the compiler's binary: nothing else lists those of a TPU. Takes a second."""
    with _library(package) as library:
        names = re.findall(rb"xla_[a-z0-9_]{4,80}", library)
        return sorted({name.decode() for name in names})


@contextmanager
def _library(package: str) -> Iterator[mmap.mmap]:
    """The bytes of a package's largest shared library, which is the compiler; mapped, as it has hundreds of MB."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = Path(folders[0]).glob("*.so")
    path = max(libraries, key=lambda path: path.stat().st_size)
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        yield library
