"""Memory of this machine and of this process, in bytes. Imports only the standard library."""

import os
import resource
from contextlib import suppress
from pathlib import Path, PurePosixPath

# Where the memory limits of containers and of jobs are (SLURM, systemd), for cgroup versions 2 and 1.
_CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
# The limit, the usage, and the name of the page cache that can be dropped in memory.stat, of both cgroup versions.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Limits of a process that bound its resident memory: `ulimit -m`, `-v` and `-d`.
_PROCESS_LIMITS = (resource.RLIMIT_RSS, resource.RLIMIT_AS, resource.RLIMIT_DATA)


def get_machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or a lower limit of the container (cgroup) or of the process."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limits = [page_bytes * os.sysconf("SC_PHYS_PAGES"), *_process_limits()]
    for folder in _list_cgroup_folders():
        for limit_name, _, _ in _CGROUP_FILES:
            # The file contains "max" if there is no limit, and does not exist with the other cgroup version.
            with suppress(OSError, ValueError):
                limits.append(int((folder / limit_name).read_text()))
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
    for folder in _list_cgroup_folders():
        for limit_name, usage_name, cache_name in _CGROUP_FILES:
            # Without a limit, the file of the limit contains "max".
            with suppress(OSError, ValueError):
                limit = int((folder / limit_name).read_text())
                usage = int((folder / usage_name).read_text())
                statistics = (folder / "memory.stat").read_text().splitlines()
                cached = sum(int(line.split()[1]) for line in statistics if line.split()[0] == cache_name)
                free = min(free, limit - usage + cached)
    for limit in _process_limits():
        free = min(free, limit - rss_bytes())
    return max(0, free)


def _list_cgroup_folders() -> list[Path]:
    """Return the folders of the control groups that this process is in, and of all groups around them.

    In a container only the root of each hierarchy exists: it is the container's own group.
    """
    groups = [PurePosixPath("/")]
    # Lines are "id:controllers:path"; version 2 has no controllers.
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                groups += [PurePosixPath(path), *PurePosixPath(path).parents]
    relative = dict.fromkeys(str(group).lstrip("/") for group in groups)
    return [Path(root) / group for root in _CGROUP_ROOTS for group in relative]


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
