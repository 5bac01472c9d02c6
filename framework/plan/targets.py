"""Targets: the names of machines that a plan compiles for, without having one.

v5e-16, v6e-8         TPUs, chips counted    v4-8, v5p-1024, tpu7x-8   TPUs, cores counted, as Cloud names them
2xv5e-256             two slices             tpu:v5e:2x4               any topology that libtpu knows
h200, h200x8, h100x16 GPUs, eight to a host  cpu:8, local              devices of this machine
"""

import difflib
import math
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from framework.devices.accelerators import ACCELERATORS, AcceleratorSpec, accelerator_name, spec_for

_TPUS = {spec.name: spec for spec in ACCELERATORS if spec.topologies}
_GPUS = {spec.name: spec for spec in ACCELERATORS if spec.xla}
_CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclass(frozen=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: as `accelerators.accelerator_name` calls its devices; rules by accelerator match it.
        spec: what one of its devices has.
        num_devices, num_processes: jax devices, and hosts (on Cloud: VMs), of all slices together.
        limit_bytes: what a program may use on each device; None where not known.
        topology, num_slices: chips along each dimension of a TPU slice, "4x4", and how many slices (of GPUs: hosts).
        at_hand: the devices, if they are of this machine.
    """

    name: str
    spec: AcceleratorSpec
    num_devices: int
    num_processes: int = 1
    limit_bytes: int | None = None
    topology: str = ""
    num_slices: int = 1
    at_hand: tuple[Any, ...] = ()

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.spec.platform

    @property
    def host_limit_bytes(self) -> int | None:
        """Memory of each process's host; None where not known.

        VMs with fewer chips than the one in the table of accelerators have as much for each chip, within 3%.
        """
        if self.spec.host_memory_bytes is None or self.spec.chips_per_host is None:
            return None
        devices_of_host = self.spec.chips_per_host * self.spec.devices_per_chip
        return self.spec.host_memory_bytes * self.num_devices // (self.num_processes * devices_of_host)

    @property
    def rings(self) -> tuple[bool, bool, bool]:
        """Whether links join the last chip of a TPU slice's dimension to the first, for x, y and z."""
        assert self.spec.ring_chips is not None
        lengths = (*map(int, self.topology.split("x")), 1)[:3]
        closed = [length % self.spec.ring_chips == 0 for length in lengths]
        is_of_cubes = self.spec.topologies[0].count("x") == 2
        x, y, z = [all(closed)] * 3 if is_of_cubes else closed
        return x, y, z

    def devices(self) -> list[Any]:
        """The jax devices: of a topology, which can be compiled for but not run on, or (CPU, local) real ones.

        Raises:
            ValueError: the compiler is not installed or refuses the topology, or JAX runs with fewer CPU devices.
        """
        import jax
        from jax.experimental import topologies

        if self.at_hand:
            return list(self.at_hand)
        if self.platform == "cpu":
            with suppress(RuntimeError):  # JAX has started: it may have enough
                jax.config.update("jax_num_cpu_devices", self.num_devices)
            if len(jax.devices("cpu")) < self.num_devices:
                raise ValueError(f"target {self.name}: JAX has started with {len(jax.devices('cpu'))} CPU devices")
            return jax.devices("cpu")[: self.num_devices]
        on_gpu, options = self.platform == "gpu", dict[str, Any]()
        what, modules = ("the CUDA plugin of JAX", _CUDA) if on_gpu else ("libtpu", ("libtpu",))
        if not any(map(find_spec, modules)):
            raise ValueError(f"planning for {self.name} needs {what}: pip install -e '.[plan-{self.platform}]'")
        if on_gpu:
            # Slices (what NVLink joins, as JAX finds it in a real run), hosts of a slice, GPUs of a host.
            shape = f"{self.num_slices}x1x{self.num_devices // self.num_slices}"
            topology, options = "", {"target_config": gpu_description(self.spec.name), "topology": shape}
        else:
            topology = f"{self.spec.name}:{self.topology}"
            options["num_slices"] = self.num_slices
            # Without rings libtpu's algorithms are others: on a cube of v5p each all-gather becomes an all-reduce.
            options["wrap"] = self.rings
            if self.num_processes == self.num_slices:  # otherwise libtpu puts 2x2 chips on a host
                options["chips_per_host_bounds"] = (*map(int, self.topology.split("x")), 1)[:3]
            if self.spec.name == "v4":
                options["chip_config_name"] = "megacore"  # one device a chip, as on a TPU VM
        try:
            return list(topologies.get_topology_desc(topology, "cuda" if on_gpu else "tpu", **options).devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"no compiler for the topology {topology or options['topology']}: {error}") from None


def environment(name: str) -> None:
    """Sets what JAX and the compiler of a target read from the environment, where it says nothing yet.

    To be called before JAX starts a backend.
    """
    settings = {
        "JAX_PLATFORMS": "cpu",  # nothing runs: leave the accelerators of this machine alone
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it would ask a GPU driver
        "TPU_SKIP_MDS_QUERY": "1",  # Cloud's metadata server is waited for where there is none
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a lock that protects devices; there are none
        # Without these two libtpu complains on stderr that it is on no TPU VM. Its compiler does not use them.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    }
    if name == "local":
        return
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    if "jax" in sys.modules:  # imported, but not started: it has read JAX_PLATFORMS, and not yet the others
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def resolve(name: str) -> Target:
    """The target of a name; JAX starts for `local` only.

    Raises:
        ValueError: there is no such target, or none of this size; the nearest ones are given.
    """
    name, families = name.replace("v5litepod-", "v5e-"), "|".join(_TPUS)  # Cloud's name for it
    if name == "local":
        return _local()
    if match := re.fullmatch(r"cpu(?:[:-]([1-9]\d*))?", name):
        count = int(match[1] or 1)
        return Target(f"cpu-{count}", spec_for("cpu"), count, limit_bytes=_share_of_memory(count))
    if match := re.fullmatch(rf"({'|'.join(_GPUS)})(?:x(\d+))?", name):
        spec, count = spec_for(match[1]), int(match[2] or 1)
        _check_size(name, count, {*range(1, 9), count // 8 * 8 or 1, count // 8 * 8 + 8}, f"{spec.name}x")
        hosts = -(-count // 8)
        return Target(f"{spec.name}x{count}", spec, count, hosts, spec.limit_bytes, num_slices=hosts)
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?tpu:({families}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name):
        return _slices(match[2], match[3], int(match[1] or 1))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?({families})-(\d+)", name):
        sizes = _sizes(match[2])
        _check_size(name, int(match[3]), set(sizes), name.removesuffix(match[3]))
        return _slices(match[2], sizes[int(match[3])], int(match[1] or 1))
    names = ["local", "cpu:8", *_GPUS, *(f"{gpu}x8" for gpu in _GPUS), *(f"tpu:{family}:2x2" for family in _TPUS)]
    names += [f"{family}-{size}" for family in _TPUS for size in _sizes(family)]
    near = difflib.get_close_matches(name, names, n=3) or ["v5e-16", "v5p-8", "h200x8", "cpu:8", "local"]
    raise ValueError(f"unknown target {name!r}; nearest: {', '.join(near)}")


def gpu_description(name: str) -> str:
    """A GPU as XLA's compiler wants it described: a `stream_executor.GpuTargetConfigProto` as text."""
    return Path(__file__).with_name("gpu.textproto").read_text() % (*_GPUS[name].xla, _GPUS[name].device_kinds[0])


def _chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def _sizes(family: str) -> dict[int, str]:
    """{the number in the name: topology} of Cloud's slices."""
    return {_chips(topology) * spec_for(family).cores_per_chip: topology for topology in spec_for(family).topologies}


def _slices(family: str, topology: str, count: int) -> Target:
    spec, chips = spec_for(family), _chips(topology)
    # On Cloud up to eight chips of v5e and v6e are one VM; what is larger is made of VMs with four chips.
    hosts = 1 if chips <= (8 if family in ("v5e", "v6e") else 4) else chips // 4
    name = f"{count}x" * (count > 1) + f"{family}-{chips * spec.cores_per_chip}"
    return Target(name, spec, count * chips * spec.devices_per_chip, count * hosts, spec.limit_bytes, topology, count)


def _local() -> Target:
    import jax

    from framework.devices.mesh import island

    devices, own = jax.devices(), jax.local_devices()
    spec = spec_for(devices)
    limit = (own[0].memory_stats() or {}).get("bytes_limit", spec.limit_bytes)
    if spec.platform == "cpu":
        limit = _share_of_memory(len(own))
    name, slices = accelerator_name(devices), len(set(map(island, devices)))
    return Target(name, spec, len(devices), jax.process_count(), limit, "", slices, tuple(devices))


def _share_of_memory(count: int) -> int:
    """What each of `count` CPU devices has of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count


def _check_size(name: str, size: int, sizes: set[int], prefix: str) -> None:
    if size not in sizes:
        below, above = sorted(n for n in sizes if n < size), sorted(n for n in sizes if n > size)
        raise ValueError(
            f"target {name!r}: not a size; nearest: {', '.join(f'{prefix}{other}' for other in below[-1:] + above[:1])}"
        )
