"""Targets: machines that a plan can compile for without having access to one, and their names.

v5e-16, v6e-8         TPUs, by chips         v4-8, v5p-1024, tpu7x-8   TPUs, by cores, as Cloud names them
2xv5e-256             two slices             tpu:v5e:2x4               any topology that libtpu knows
h200, rtx4090, h100x16 GPUs, in whole hosts  cpu:8, local              devices of this machine
"""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from plimsoll.framework.devices.accelerators import AcceleratorSpec, accelerator_name, spec_for
from plimsoll.framework.plan import target_names
from plimsoll.framework.plan.gpu_description import architecture_note, gpu_description, installed_cuda

# Consumer cards are bought one by one, and no machine has room for more than this.
_CARDS_PER_HOST = 8


@dataclass(frozen=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: name of its devices as returned by `accelerators.accelerator_name`; rules by accelerator match it.
        spec: specification of one of its devices.
        num_devices: number of devices in all slices.
        num_processes: number of hosts (VMs on Cloud) in all slices.
        limit_bytes: device memory in bytes that a program may use on each device; None if unknown.
        topology: chips along each dimension of a TPU slice, such as "4x4".
        num_slices: number of TPU slices; for GPUs, the number of hosts, or of NVLink domains if those are larger.
        available_devices: the jax devices, if they belong to this machine.
    """

    name: str
    spec: AcceleratorSpec
    num_devices: int
    num_processes: int = 1
    limit_bytes: int | None = None
    topology: str = ""
    num_slices: int = 1
    available_devices: tuple[Any, ...] = ()

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.spec.platform

    @property
    def host_limit_bytes(self) -> int | None:
        """Memory of each process's host in bytes; None if unknown.

        VMs with fewer chips than the one in the accelerator table have the same memory per chip, within 3%.
        """
        if self.spec.host_memory_bytes is None or self.spec.chips_per_host is None:
            return None
        devices_of_host = self.spec.chips_per_host * self.spec.devices_per_chip
        return self.spec.host_memory_bytes * self.num_devices // (self.num_processes * devices_of_host)

    @property
    def rings(self) -> tuple[bool, bool, bool]:
        """True for each of x, y and z along which wrap-around links join the last chip of a TPU slice to the first."""
        assert self.spec.ring_chips is not None
        closed = [length % self.spec.ring_chips == 0 for length in _three_dims(self.topology)]
        # Slices made of cubes have rings in all dimensions or in none.
        is_of_cubes = self.spec.topologies[0].count("x") == 2
        if is_of_cubes:
            closed = [all(closed)] * 3
        x, y, z = closed
        return x, y, z

    @property
    def compiler_notes(self) -> list[str]:
        """Notes for a report if the program is compiled for another GPU architecture; else []."""
        if self.platform != "gpu" or self.available_devices:
            return []
        return list(filter(None, [architecture_note(self.spec, installed_cuda())]))

    def devices(self) -> list[Any]:
        """Return the jax devices: those of a topology, which only support compilation, or (CPU, local) real ones.

        Raises:
            ValueError: the compiler is not installed or refuses the topology, or JAX runs with fewer CPU devices.
        """
        import jax
        from jax.experimental import topologies

        if self.available_devices:
            return list(self.available_devices)
        if self.platform == "cpu":
            # A RuntimeError means that JAX has already started; it may still have enough devices.
            with suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", self.num_devices)
            if len(jax.devices("cpu")) < self.num_devices:
                raise ValueError(f"target {self.name}: JAX has started with only {len(jax.devices('cpu'))} CPU devices")
            return jax.devices("cpu")[: self.num_devices]
        on_gpu = self.platform == "gpu"
        if not installed_compiler(self.platform):
            compiler = "the CUDA plugin of JAX" if on_gpu else "libtpu"
            install = f"pip install -e '.[plan-{self.platform}]'"
            raise ValueError(
                f"planning for {self.name} needs {compiler}: {install}; plimsoll plan --estimate needs no compiler"
            )
        # The CUDA plugin takes the topology as an option.
        topology = "" if on_gpu else f"{self.spec.name}:{self.topology}"
        options = self._gpu_options() if on_gpu else self._tpu_options()
        try:
            description = topologies.get_topology_desc(topology, "cuda" if on_gpu else "tpu", **options)
            return list(description.devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"no compiler for the topology {topology or options['topology']}: {error}") from None

    def _gpu_options(self) -> dict[str, Any]:
        # Slices (NVLink domains, as JAX detects them in a real run) x hosts per slice x GPUs per host.
        hosts_per_slice = self.num_processes // self.num_slices
        shape = f"{self.num_slices}x{hosts_per_slice}x{self.num_devices // self.num_processes}"
        return {"target_config": gpu_description(self.spec, installed_cuda()), "topology": shape}

    def _tpu_options(self) -> dict[str, Any]:
        # Without rings, libtpu chooses other algorithms: on a cube of v5p each all-gather becomes an all-reduce.
        options: dict[str, Any] = {"num_slices": self.num_slices, "wrap": self.rings}
        # By default libtpu puts 2x2 chips on a host.
        if self.num_processes == self.num_slices:
            options["chips_per_host_bounds"] = _three_dims(self.topology)
        # Make one device of both cores of a chip, as on a TPU VM.
        if self.spec.name == "v4":
            options["chip_config_name"] = "megacore"
        return options


def set_environment(name: str) -> None:
    """Set the environment variables that JAX and the target's compiler read, unless they are already set.

    Call it before JAX starts a backend.
    """
    settings = {
        # Planning runs nothing on a device, so do not occupy the accelerators of this machine.
        "JAX_PLATFORMS": "cpu",
        # The check would query a GPU driver.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Without this, libtpu waits for Cloud's metadata server even if there is none.
        "TPU_SKIP_MDS_QUERY": "1",
        # The lock protects devices, and planning uses none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Without these two, libtpu complains on stderr that it is not on a TPU VM. Its compiler does not use them.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    }
    if name.strip().lower() == "local":
        return
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    # If jax is imported but not started, it has already read JAX_PLATFORMS, but not yet the others.
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def resolve(name: str) -> Target:
    """Return the target with a name; only `local` starts JAX.

    Raises:
        ValueError: there is no such target, or none of this size; the message suggests the nearest ones.
    """
    name = name.strip().lower()
    families = "|".join(target_names.TPUS)
    if name == "local":
        return _local()
    if match := re.fullmatch(r"cpu(?:[:-]([1-9]\d*))?", name):
        count = int(match[1] or 1)
        return Target(f"cpu-{count}", spec_for("cpu"), count, limit_bytes=_memory_per_device(count))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?tpu:({families}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name):
        return _slices(target_names.TPUS[match[2]].name, match[3], int(match[1] or 1))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?({families})-(\d+)", name):
        size = int(match[3])
        topology_by_size = target_names.topology_by_size(match[2])
        target_names.check_size(name, size, set(topology_by_size), name.removesuffix(match[3]))
        return _slices(target_names.TPUS[match[2]].name, topology_by_size[size], int(match[1] or 1))
    spec, count = target_names.parse_gpu(name)
    if spec is not None:
        return _gpus(name, spec, count)
    nearest = ", ".join(target_names.suggest_names(name))
    raise ValueError(f"unknown target {name!r}; nearest: {nearest}; all: plimsoll plan --targets")


def installed_compiler(platform: str) -> str:
    """Return the installed compiler for a platform: libtpu, CUDA 12 or 13, XLA (for CPU); empty if there is none."""
    if platform == "tpu":
        return "libtpu" if find_spec("libtpu") else ""
    if platform == "gpu":
        cuda = installed_cuda()
        return f"CUDA {cuda}" if cuda else ""
    return "XLA"


def _three_dims(topology: str) -> tuple[int, ...]:
    """Return the chips along x, y and z; a two-dimensional topology is one chip deep."""
    return (*map(int, topology.split("x")), 1)[:3]


def _gpus(name: str, spec: AcceleratorSpec, count: int) -> Target:
    """Return the target of `count` GPUs: any number within one host, or whole hosts, or whole NVLink domains."""
    host = spec.chips_per_host or _CARDS_PER_HOST
    island = spec.chips_per_nvlink or host
    unit = 1
    if count > island:
        unit = island
    elif count > host:
        unit = host
    smaller_count = count // unit * unit
    valid_counts = {smaller_count, smaller_count + unit} - {0}
    target_names.check_size(name, count, valid_counts, f"{spec.name}x")
    hosts = -(-count // host)
    return Target(f"{spec.name}x{count}", spec, count, hosts, spec.limit_bytes, num_slices=-(-count // island))


def _slices(family: str, topology: str, count: int) -> Target:
    """Return the target of `count` TPU slices."""
    spec = spec_for(family)
    chips = target_names.count_chips(topology)
    # On Cloud, up to eight chips of v5e and v6e form one VM; larger slices consist of VMs with four chips each.
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

    from plimsoll.framework.devices.environment import start_devices
    from plimsoll.framework.devices.mesh import island

    start_devices()
    devices = jax.devices()
    local_devices = jax.local_devices()
    spec = spec_for(devices)
    memory_stats = local_devices[0].memory_stats() or {}
    limit = memory_stats.get("bytes_limit", spec.limit_bytes)
    if spec.platform == "cpu":
        limit = _memory_per_device(len(local_devices))
    return Target(
        name=accelerator_name(devices),
        spec=spec,
        num_devices=len(devices),
        num_processes=jax.process_count(),
        limit_bytes=limit,
        num_slices=len(set(map(island, devices))),
        available_devices=tuple(devices),
    )


def _memory_per_device(count: int) -> int:
    """Return the bytes of this machine's memory per CPU device, for `count` devices."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
