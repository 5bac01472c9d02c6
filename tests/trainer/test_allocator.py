"""Freed memory stays in the process for the next step, so fewer pages are requested from the kernel."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import sys
from plimsoll.framework.devices.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    print(keep_freed_memory())
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return bytearray(64 << 20)
step()
before = pages()
for _ in range(4):
    step()
print(pages() - before)
"""


def run(argument: str, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT, argument]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.pairs
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_allocator_keeps_freed_blocks():
    (fresh_pages,) = run("leave")
    keeps, kept_pages = run("keep")
    assert keeps == "True"
    assert int(fresh_pages) > 1000
    assert int(kept_pages) < 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_user_malloc_settings_are_respected():
    assert run("keep", MALLOC_MMAP_MAX_="65536")[0] == "False"


RETURN = """
from plimsoll.framework.devices.allocator import keep_freed_memory, release_freed_memory
from plimsoll.framework.metrics.memory import rss_bytes
assert keep_freed_memory()
bytearray(64 << 20)
kept = rss_bytes()
release_freed_memory()
print(kept - rss_bytes())
"""


@pytest.mark.pairs
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_kept_memory_can_be_returned():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", RETURN]
    output = subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout
    assert int(output) > 60 << 20


SMALL_BLOCKS = """
import sys
from plimsoll.framework.devices.allocator import return_freed_blocks
from plimsoll.framework.metrics.memory import rss_bytes
if sys.argv[1] == "return":
    print(return_freed_blocks())
# Freeing it raises glibc's limit for separate mappings to 24 MiB.
bytearray(24 << 20)
blocks = [bytearray(8 << 20) for _ in range(16)]
# The last block stays, so the end of the heap cannot be trimmed.
del blocks[:-1]
print(rss_bytes())
"""


@pytest.mark.pairs
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_blocks_are_returned():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    outputs = {}
    for argument in ("leave", "return"):
        command = [sys.executable, "-c", SMALL_BLOCKS, argument]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
        outputs[argument] = done.stdout.split()
    assert outputs["return"][0] == "True"
    assert int(outputs["leave"][0]) - int(outputs["return"][1]) > 100 << 20
