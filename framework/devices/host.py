"""Memory of this machine and of this process, in bytes. Imports only the standard library."""

import os
import resource
from contextlib import suppress
from pathlib import Path

# Files with a container's memory limit, for cgroup versions 2 and 1.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The limit, the usage, and the name of the page cache that can be dropped in memory.stat, of both cgroup versions.
_CGROUP_USAGE = (
    (_CGROUP_LIMITS[0], "/sys/fs/cgroup/memory.current", "inactive_file"),
    (_CGROUP_LIMITS[1], "/sys/fs/cgroup/memory/memory.usage_in_bytes", "total_inactive_file"),
)
# Limits of a process that bound its resident memory: `ulimit -m`, `-v` and `-d`.
_PROCESS_LIMITS = (resource.RLIMIT_RSS, resource.RLIMIT_AS, resource.RLIMIT_DATA)


def get_machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or a lower limit of the container (cgroup) or of the process."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limits = [page_bytes * os.sysconf("SC_PHYS_PAGES"), *_process_limits()]
    for path in _CGROUP_LIMITS:
        # The file contains "max" if there is no limit, and does not exist with the other cgroup version.
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)


def get_free_memory_bytes() -> int:
    """Return the memory in bytes that new allocations can use, on this machine and within its and the process's limits.

    Page cache counts as free.
    """
    free = get_machine_memory_bytes()
    # Other systems than Linux have no such file.
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                free = min(free, 1024 * int(value.split()[0]))
    for limit_path, usage_path, cache_name in _CGROUP_USAGE:
        # Without a limit, the file of the limit contains "max".
        with suppress(OSError, ValueError):
            limit = int(Path(limit_path).read_text())
            usage = int(Path(usage_path).read_text())
            statistics = Path(usage_path).with_name("memory.stat").read_text().splitlines()
            cached = sum(int(line.split()[1]) for line in statistics if line.split()[0] == cache_name)
            free = min(free, limit - usage + cached)
    for limit in _process_limits():
        free = min(free, limit - rss_bytes())
    return max(0, free)


def _process_limits() -> list[int]:
    limits = [resource.getrlimit(kind)[0] for kind in _PROCESS_LIMITS]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; without /proc (macOS), its highest value so far."""
    try:
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[1])
            return num_pages * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process so far, in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
