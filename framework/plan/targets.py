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
        spec: the figures of one of its devices.
        num_devices: of all slices together.
        num_processes: likewise hosts (on Cloud: VMs).
        limit_bytes: the memory that a program may use on each device; None where not known.
        topology: chips along each dimension of a TPU slice, "4x4".
        num_slices: of TPUs; of GPUs the number of hosts.
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
        closed = [length % self.spec.ring_chips == 0 for length in _three_dims(self.topology)]
        # Slices that are made of cubes have rings in all dimensions or in none.
        is_of_cubes = self.spec.topologies[0].count("x") == 2
        if is_of_cubes:
            closed = [all(closed)] * 3
        x, y, z = closed
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
            # A RuntimeError says that JAX has started: it may have enough devices all the same.
            with suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", self.num_devices)
            if len(jax.devices("cpu")) < self.num_devices:
                raise ValueError(f"target {self.name}: JAX has started with {len(jax.devices('cpu'))} CPU devices")
            return jax.devices("cpu")[: self.num_devices]
        on_gpu = self.platform == "gpu"
        compiler, modules = ("the CUDA plugin of JAX", _CUDA) if on_gpu else ("libtpu", ("libtpu",))
        if not any(map(find_spec, modules)):
            raise ValueError(f"planning for {self.name} needs {compiler}: pip install -e '.[plan-{self.platform}]'")
        # The CUDA plugin takes the topology as an option.
        topology = "" if on_gpu else f"{self.spec.name}:{self.topology}"
        options = self._gpu_options() if on_gpu else self._tpu_options()
        try:
            description = topologies.get_topology_desc(topology, "cuda" if on_gpu else "tpu", **options)
            return list(description.devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"no compiler for the topology {topology or options['topology']}: {error}") from None

    def _gpu_options(self) -> dict[str, Any]:
        # Slices (what NVLink joins, as JAX finds it in a real run), hosts of a slice, GPUs of a
        # host.
        shape = f"{self.num_slices}x1x{self.num_devices // self.num_slices}"
        return {"target_config": gpu_description(self.spec.name), "topology": shape}

    def _tpu_options(self) -> dict[str, Any]:
        # Without rings libtpu's algorithms are others: on a cube of v5p each all-gather becomes an
        # all-reduce.
        options: dict[str, Any] = {"num_slices": self.num_slices, "wrap": self.rings}
        # Where nothing is said, libtpu puts 2x2 chips on a host.
        if self.num_processes == self.num_slices:
            options["chips_per_host_bounds"] = _three_dims(self.topology)
        # One device is a chip with both of its cores, as on a TPU VM.
        if self.spec.name == "v4":
            options["chip_config_name"] = "megacore"
        return options


def environment(name: str) -> None:
    """Sets what JAX and the compiler of a target read from the environment, where it says nothing yet.

    To be called before JAX starts a backend.
    """
    settings = {
        # Nothing runs: the accelerators of this machine are left alone.
        "JAX_PLATFORMS": "cpu",
        # The check would ask a GPU driver.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Cloud's metadata server is waited for where there is none.
        "TPU_SKIP_MDS_QUERY": "1",
        # The lock protects devices, and there are none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Without these two libtpu complains on stderr that it is on no TPU VM. Its compiler does
        # not use them.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    }
    if name == "local":
        return
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    # If jax is imported, but not started, it has read JAX_PLATFORMS, and not yet the others.
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def resolve(name: str) -> Target:
    """The target of a name; JAX starts for `local` only.

    Raises:
        ValueError: there is no such target, or none of this size; the nearest ones are given.
    """
    # Cloud calls v5e by another name.
    name = name.replace("v5litepod-", "v5e-")
    families = "|".join(_TPUS)
    if name == "local":
        return _local()
    if match := re.fullmatch(r"cpu(?:[:-]([1-9]\d*))?", name):
        count = int(match[1] or 1)
        return Target(f"cpu-{count}", spec_for("cpu"), count, limit_bytes=_share_of_memory(count))
    if match := re.fullmatch(rf"({'|'.join(_GPUS)})(?:x(\d+))?", name):
        return _gpus(name, match[1], int(match[2] or 1))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?tpu:({families}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name):
        return _slices(match[2], match[3], int(match[1] or 1))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?({families})-(\d+)", name):
        size = int(match[3])
        topology_by_size = _sizes(match[2])
        _check_size(name, size, set(topology_by_size), name.removesuffix(match[3]))
        return _slices(match[2], topology_by_size[size], int(match[1] or 1))
    names = ["local", "cpu:8", *_GPUS, *(f"{gpu}x8" for gpu in _GPUS), *(f"tpu:{family}:2x2" for family in _TPUS)]
    names += [f"{family}-{size}" for family in _TPUS for size in _sizes(family)]
    nearest = difflib.get_close_matches(name, names, n=3) or ["v5e-16", "v5p-8", "h200x8", "cpu:8", "local"]
    raise ValueError(f"unknown target {name!r}; nearest: {', '.join(nearest)}")


def gpu_description(name: str) -> str:
    """A GPU as XLA's compiler wants it described: a `stream_executor.GpuTargetConfigProto` as text."""
    template = Path(__file__).with_name("gpu.textproto").read_text()
    spec = _GPUS[name]
    return template % (*spec.xla, spec.device_kinds[0])


def _three_dims(topology: str) -> tuple[int, ...]:
    """The chips along x, y and z; a topology of two dimensions is one chip deep."""
    return (*map(int, topology.split("x")), 1)[:3]


def _chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def _sizes(family: str) -> dict[int, str]:
    """{the number in the name: topology} of Cloud's slices."""
    spec = spec_for(family)
    return {_chips(topology) * spec.cores_per_chip: topology for topology in spec.topologies}


def _gpus(name: str, family: str, count: int) -> Target:
    spec = spec_for(family)
    # Any number fits on one host; on several hosts each of them has eight.
    gpus_of_full_hosts = count // 8 * 8
    _check_size(
        name,
        count,
        {*range(1, 9), gpus_of_full_hosts or 1, gpus_of_full_hosts + 8},
        f"{spec.name}x",
    )
    hosts = -(-count // 8)
    return Target(
        f"{spec.name}x{count}",
        spec,
        count,
        hosts,
        spec.limit_bytes,
        num_slices=hosts,
    )


def _slices(family: str, topology: str, count: int) -> Target:
    """The target of `count` TPU slices."""
    spec = spec_for(family)
    chips = _chips(topology)
    # On Cloud up to eight chips of v5e and v6e are one VM; what is larger is made of VMs with four
    # chips.
    largest_host = 8 if family in ("v5e", "v6e") else 4
    hosts = 1 if chips <= largest_host else chips // 4
    prefix = f"{count}x" if count > 1 else ""
    return Target(
        name=f"{prefix}{family}-{chips * spec.cores_per_chip}",
        spec=spec,
        num_devices=count * chips * spec.devices_per_chip,
        num_processes=count * hosts,
        limit_bytes=spec.limit_bytes,
        topology=topology,
        num_slices=count,
    )


def _local() -> Target:
    import jax

    from framework.devices.mesh import island

    devices = jax.devices()
    local_devices = jax.local_devices()
    spec = spec_for(devices)
    memory_stats = local_devices[0].memory_stats() or {}
    limit = memory_stats.get("bytes_limit", spec.limit_bytes)
    if spec.platform == "cpu":
        limit = _share_of_memory(len(local_devices))
    return Target(
        name=accelerator_name(devices),
        spec=spec,
        num_devices=len(devices),
        num_processes=jax.process_count(),
        limit_bytes=limit,
        num_slices=len(set(map(island, devices))),
        at_hand=tuple(devices),
    )


def _share_of_memory(count: int) -> int:
    """What each of `count` CPU devices has of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count


def _check_size(
    name: str,
    size: int,
    sizes: set[int],
    prefix: str,
) -> None:
    if size not in sizes:
        smaller = sorted(valid_size for valid_size in sizes if valid_size < size)
        larger = sorted(valid_size for valid_size in sizes if valid_size > size)
        nearest = [f"{prefix}{valid_size}" for valid_size in smaller[-1:] + larger[:1]]
        raise ValueError(f"target {name!r}: not a size; nearest: {', '.join(nearest)}")
