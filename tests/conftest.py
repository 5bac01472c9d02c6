"""Test settings: eight forced CPU devices in every test process, set before JAX is imported, and cheap compiles.

Nearly all of the suite's time is XLA compiling toy programs. Without LLVM's optimizations and the fusion emitters that
takes a quarter of the time; what is computed stays the same, up to the rounding that any two compiles may differ by.
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
    # Two more that together take 30% off: LLVM's remaining costly passes, and a module cut up for parallel threads that
    # two test processes on two cores do not have.
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # a flag that XLA does not know ends the process
    wanted["--xla_cpu_use_fusion_emitters"] = "false"
flags += [f"{name}={value}" for name, value in wanted.items() if not any(flag.startswith(name) for flag in flags)]
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# glibc's own value: a run in the test's process would have all memory kept that is ever freed
# (framework/devices/allocator.py), for all tests that come after it in the same process.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(128 << 10))

# A shell without job control starts what it puts into the background with SIGINT ignored, and children inherit that: a
# run that a test interrupts would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def compilation_cache_of_one_test() -> Iterator[None]:
    """A run in the test's own process keeps compiled programs on disk; the next test's compiler is to be its own: what
    comes from there comes without its buffers."""
    yield
    if (jax := sys.modules.get("jax")) and (
        jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache
    ):
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
