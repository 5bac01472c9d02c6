"""Test settings: eight forced CPU devices in every test process, set before JAX is imported, and cheap compiles.

The suite spends nearly all of its time in XLA, compiling toy programs. Without LLVM's optimizations and the fusion
emitters, compilation takes a quarter of the time. The results stay the same, up to the rounding by which any two
compiles may differ.
"""

import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.support.durations", "tests.support.memory", "tests.support.selection"]

flags = os.environ.get("XLA_FLAGS", "").split()
wanted = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    # These two flags together save another 30%. They turn off LLVM's remaining expensive passes, and the splitting of a
    # module for parallel threads, which two test processes on two cores do not have.
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA aborts the process on an unknown flag
    wanted["--xla_cpu_use_fusion_emitters"] = "false"
flags += [f"{name}={value}" for name, value in wanted.items() if not any(flag.startswith(name) for flag in flags)]
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# This is glibc's default. Without it, a run in the test's process would make the allocator hold on to all freed memory
# (framework/devices/allocator.py), for every later test in the same process.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(128 << 10))

# A shell without job control starts background processes with SIGINT ignored, and children inherit that. A run that a
# test interrupts would then continue.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def reset_compilation_cache() -> Iterator[None]:
    """Reset the compilation cache that a run in the test's own process turns on.

    The next test must compile its own programs: a program loaded from the cache on disk has no buffer information.
    """
    yield
    if (jax := sys.modules.get("jax")) and (
        jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache
    ):
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
