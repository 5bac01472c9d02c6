"""Targets: machines that a plan can compile for without having access to one, and their names.

v5e-16, v6e-8         TPUs, by chips         v4-8, v5p-1024, tpu7x-8   TPUs, by cores, as Cloud names them
2xv5e-256             two slices             tpu:v5e:2x4               any topology that libtpu knows
h200, rtx4090, h100x16 GPUs, in whole hosts  cpu:8, local              devices of this machine
"""

import difflib
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from typing import Any

from plimsoll.framework.config import Config
from plimsoll.framework.devices.accelerators import ACCELERATORS, AcceleratorSpec, accelerator_name, find_spec, spec_for
from plimsoll.framework.devices.host import get_free_memory_bytes, get_machine_memory_bytes, rss_bytes
from plimsoll.framework.devices.reserved_memory import (
    CARDS_PER_HOST,
    SLOP_FACTOR,
    choose_slop_factor,
    get_fraction_for_limit,
    get_island_size,
    get_limit_bytes,
    get_scheduler_limit_bytes,
    list_reserved_parts,
)
from plimsoll.framework.plan.gpu_description import (
    architecture_note,
    find_architecture,
    gpu_description,
    installed_cuda,
)
from plimsoll.framework.terminal.install_hints import install_extra
from plimsoll.framework.terminal.tables import TableSection, human_bytes

TPUS = {alias: spec for spec in ACCELERATORS if spec.topologies for alias in (spec.name, *spec.aliases)}
# Temporaries above this fraction of XLA's own limit may be the result of recomputation, which stops a little below it.
_NEAR_SCHEDULER_LIMIT = 0.95
GPUS = {alias: spec for spec in ACCELERATORS if spec.platform == "gpu" for alias in (spec.name, *spec.aliases)}


@dataclass(frozen=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: name of its devices as returned by `accelerators.accelerator_name`; rules by accelerator match it.
        spec: specification of one of its devices.
        num_devices: number of devices in all slices.
        num_processes: number of hosts (VMs on Cloud) in all slices.
        limit_bytes: device memory in bytes that a program may use on each device, if its mesh is not known yet; None if
            unknown.
        topology: chips along each dimension of a TPU slice, such as "4x4".
        num_slices: number of TPU slices; for GPUs, the number of hosts, or of NVLink domains if those are larger.
        available_devices: the jax devices, if they belong to this machine.
        host_bytes: memory of each host in bytes that a run may use, if it is not the one of the accelerator table.
    """

    name: str
    spec: AcceleratorSpec
    num_devices: int
    num_processes: int = 1
    limit_bytes: int | None = None
    topology: str = ""
    num_slices: int = 1
    available_devices: tuple[Any, ...] = ()
    host_bytes: int | None = None

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.spec.platform

    @property
    def host_limit_bytes(self) -> int | None:
        """Memory of each process's host in bytes; None if unknown.

        VMs with fewer chips than the one in the accelerator table have the same memory per chip, within 3%.
        """
        if self.host_bytes is not None:
            return self.host_bytes
        if self.spec.host_memory_bytes is None or self.spec.chips_per_host is None:
            return None
        devices_of_host = self.spec.chips_per_host * self.spec.devices_per_chip
        return self.spec.host_memory_bytes * self.num_devices // (self.num_processes * devices_of_host)

    def get_limit_bytes(self, mesh: Mapping[str, int]) -> int | None:
        """Return the device memory in bytes that a program may use on each device, with a mesh {axis: size}."""
        # Devices of this machine report what JAX has taken.
        if self.platform != "gpu" or self.available_devices:
            return self.limit_bytes
        return get_limit_bytes(self.spec, self.num_devices, mesh)

    def get_config_limit_bytes(self, config: Config) -> int | None:
        """Return the device memory in bytes that a program may use on each device, with the mesh of a config."""
        try:
            return self.get_limit_bytes(config.mesh.instantiate().resolve(self.num_devices))
        except ValueError:
            # A mesh that does not fit the devices is refused where the config is built.
            return self.limit_bytes

    def list_reserved_bytes(self, mesh: Mapping[str, int] | None) -> dict[str, int]:
        """Return {part: bytes} of each device's memory that programs cannot use; {} if unknown."""
        return {part.name: part.bytes for part in list_reserved_parts(self.spec, self.num_devices, mesh)}

    def get_memory_fraction(self, limit: int | None) -> float | None:
        """Return the XLA_CLIENT_MEM_FRACTION that gives programs `limit` bytes; None if it is not a GPU's to set."""
        return None if self.available_devices else get_fraction_for_limit(self.spec, limit)

    def note_recomputation(self, temporaries: int, io_bytes: int, limit: int | None) -> list[str]:
        """Return a note if XLA's GPU compiler may have recomputed parts of a program to save memory; else [].

        Args:
            temporaries: bytes of the program's temporaries.
            io_bytes: bytes of its arguments and results, aliased ones counted once.
            limit: bytes that programs may use on each device.
        """
        memory_bytes = self.spec.memory_bytes
        if self.platform != "gpu" or memory_bytes is None or limit is None:
            return []
        most = get_scheduler_limit_bytes(memory_bytes, io_bytes)
        factor = choose_slop_factor(memory_bytes, io_bytes, limit)
        has_more_room = most < limit - io_bytes
        if factor is None or not has_more_room or temporaries < _NEAR_SCHEDULER_LIMIT * most:
            return []
        return [
            f"XLA recomputes parts of a program to keep its temporaries below {human_bytes(most)}; "
            f"XLA_FLAGS=--{SLOP_FACTOR}={factor} lets them fill the device"
        ]

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
            install = install_extra(f"plan-{self.platform}")
            raise ValueError(
                f"planning for {self.name} needs {compiler}: {install}; plimsoll plan --estimate needs no compiler"
            )
        # The CUDA plugin takes the topology as an option, libtpu as a name.
        topology = ""
        options: dict[str, Any] = {}
        if on_gpu:
            # Slices (NVLink domains, as JAX detects them in a real run) x hosts per slice x GPUs per host.
            hosts_per_slice = self.num_processes // self.num_slices
            options["topology"] = f"{self.num_slices}x{hosts_per_slice}x{self.num_devices // self.num_processes}"
            options["target_config"] = gpu_description(self.spec, installed_cuda())
        else:
            topology = f"{self.spec.name}:{self.topology}"
            # Without rings, libtpu chooses other algorithms: on a cube of v5p each all-gather becomes an all-reduce.
            options |= {"num_slices": self.num_slices, "wrap": self.rings}
            # By default libtpu puts 2x2 chips on a host.
            if self.num_processes == self.num_slices:
                options["chips_per_host_bounds"] = _three_dims(self.topology)
            # Make one device of both cores of a chip, as on a TPU VM.
            if self.spec.name == "v4":
                options["chip_config_name"] = "megacore"
        try:
            description = topologies.get_topology_desc(topology, "cuda" if on_gpu else "tpu", **options)
            return list(description.devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"no compiler for the topology {topology or options['topology']}: {error}") from None


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
    families = "|".join(TPUS)
    if name == "local":
        return _local()
    if match := re.fullmatch(r"cpu(?:[:-]([1-9]\d*))?", name):
        count = int(match[1] or 1)
        memory_bytes = get_machine_memory_bytes()
        return Target(
            f"cpu-{count}", spec_for("cpu"), count, limit_bytes=memory_bytes // count, host_bytes=memory_bytes
        )
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?tpu:({families}):([1-9]\d*(?:x[1-9]\d*){{1,2}})", name):
        return _slices(TPUS[match[2]].name, match[3], int(match[1] or 1))
    if match := re.fullmatch(rf"(?:([1-9]\d*)x)?({families})-(\d+)", name):
        size = int(match[3])
        topologies = topology_by_size(match[2])
        check_size(name, size, set(topologies), name.removesuffix(match[3]))
        return _slices(TPUS[match[2]].name, topologies[size], int(match[1] or 1))
    spec, count = parse_gpu(name)
    if spec is not None:
        return _gpus(name, spec, count)
    nearest = ", ".join(suggest_names(name))
    raise ValueError(f"unknown target {name!r}; nearest: {nearest}; all: plimsoll plan --targets")


def parse_gpu(name: str) -> tuple[AcceleratorSpec | None, int]:
    """Return (GPU, number of GPUs) for a name; (None, 1) if the name is not a GPU."""
    spec = find_spec(name)
    count = 1
    family, separator, digits = name.rpartition("x")
    # Card names themselves may contain an x and digits, such as rtx4090.
    if spec is None and separator and digits.isdecimal():
        spec = find_spec(family)
        count = int(digits)
    if spec is None or spec.platform != "gpu":
        return None, 1
    return spec, count


def count_chips(topology: str) -> int:
    """Return the number of chips in a slice: 16 for "4x4"."""
    return math.prod(map(int, topology.split("x")))


def topology_by_size(family: str) -> dict[int, str]:
    """Return {number in the slice's name: topology} for Cloud's slices."""
    spec = spec_for(family)
    return {count_chips(topology) * spec.cores_per_chip: topology for topology in spec.topologies}


def suggest_names(name: str) -> list[str]:
    """Return up to four names that may have been meant: first longer forms of the name, then similar ones."""
    # The end of "rtx4091x8" is a count, that of "rtx4091" is not: before a count there is a digit of the card's name.
    match = re.fullmatch(r"(.*\d\D*?)(x\d{1,3})", name)
    typed_family, count = match.groups() if match else (name, "")
    slices = [f"{family}-{size}" for family in TPUS for size in topology_by_size(family)]
    topologies = [f"tpu:{family}:2x2" for family in TPUS]
    choices = ["local", "cpu:8", *(f"{gpu}{count}" for gpu in GPUS), *topologies, *slices]
    # A longer form extends the typed name: a100-40 extends a100, and rtx4060ti-8 extends 4060ti.
    prefixes = (f"{typed_family}-", f"rtx{typed_family}-")
    longer_names = [choice for choice in choices if typed_family and choice.startswith(prefixes)]
    alike_names = difflib.get_close_matches(name, choices, n=3)
    nearest_names = list(dict.fromkeys([*longer_names[:3], *alike_names]))[:4]
    return nearest_names or ["v5e-16", "v5p-8", "h200x8", "rtx4090", "cpu:8", "local"]


def check_size(name: str, size: int, sizes: set[int], prefix: str) -> None:
    """Check that a target has a valid number of devices.

    Args:
        name: name of the target, for the error message.
        size: number of devices.
        sizes: valid numbers of devices.
        prefix: text before the number in the suggested names.

    Raises:
        ValueError: `size` is not one of `sizes`; the message suggests the nearest ones.
    """
    if size not in sizes:
        smaller = sorted(valid_size for valid_size in sizes if valid_size < size)
        larger = sorted(valid_size for valid_size in sizes if valid_size > size)
        neighbors = [f"{prefix}{valid_size}" for valid_size in smaller[-1:] + larger[:1]]
        raise ValueError(f"target {name!r}: no such size; nearest: {', '.join(neighbors)}")


def installed_compiler(platform: str) -> str:
    """Return the installed compiler for a platform: libtpu, CUDA 12 or 13, XLA (for CPU); empty if there is none."""
    if platform == "tpu":
        return "libtpu" if util.find_spec("libtpu") else ""
    if platform == "gpu":
        cuda = installed_cuda()
        return f"CUDA {cuda}" if cuda else ""
    return "XLA"


def _three_dims(topology: str) -> tuple[int, ...]:
    """Return the chips along x, y and z; a two-dimensional topology is one chip deep."""
    return (*map(int, topology.split("x")), 1)[:3]


def _gpus(name: str, spec: AcceleratorSpec, count: int) -> Target:
    """Return the target of `count` GPUs: any number within one host, or whole hosts, or whole NVLink domains."""
    host = spec.chips_per_host or CARDS_PER_HOST
    island = get_island_size(spec)
    unit = 1
    if count > island:
        unit = island
    elif count > host:
        unit = host
    smaller_count = count // unit * unit
    valid_counts = {smaller_count, smaller_count + unit} - {0}
    check_size(name, count, valid_counts, f"{spec.name}x")
    hosts = -(-count // host)
    limit = get_limit_bytes(spec, count)
    return Target(f"{spec.name}x{count}", spec, count, hosts, limit, num_slices=-(-count // island))


def _slices(family: str, topology: str, count: int) -> Target:
    """Return the target of `count` TPU slices."""
    spec = spec_for(family)
    chips = count_chips(topology)
    # On Cloud, up to eight chips of v5e and v6e form one VM; larger slices consist of VMs with four chips each.
    largest_host = 8 if family in ("v5e", "v6e") else 4
    hosts = 1 if chips <= largest_host else chips // 4
    prefix = f"{count}x" if count > 1 else ""
    return Target(
        name=f"{prefix}{family}-{chips * spec.cores_per_chip}",
        spec=spec,
        num_devices=count * chips * spec.devices_per_chip,
        num_processes=count * hosts,
        limit_bytes=get_limit_bytes(spec),
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
    limit = memory_stats.get("bytes_limit", get_limit_bytes(spec, len(devices)))
    if spec.platform == "cpu":
        limit = get_machine_memory_bytes() // len(local_devices)
    return Target(
        name=accelerator_name(devices),
        spec=spec,
        num_devices=len(devices),
        num_processes=jax.process_count(),
        limit_bytes=limit,
        num_slices=len(set(map(island, devices))),
        available_devices=tuple(devices),
        host_bytes=get_free_memory_bytes() + rss_bytes(),
    )


_HEADER = ["", "memory", "usable", "TFLOP/s", "GB/s", "links", "host", "planned by"]
_LEGEND = [
    ["TFLOP/s", "dense bfloat16 products; f16: float16, if bfloat16 is unknown; f32: float32, if both are unknown"],
    ["GB/s", "to and from device memory"],
    ["links", "GB/s from other devices, one way; pair: over a bridge that joins two cards"],
    ["host", "GB/s to or from the host's memory, one way"],
    ["planned by", "the compiler installed here; estimate: none, only plimsoll plan --estimate works"],
    ["-", "not published"],
]


def build_tables() -> list[TableSection]:
    """Return the tables of TPUs, of GPUs, of this machine's devices, and of the columns' meanings."""
    rows_by_platform: dict[str, list[list[str]]] = {"tpu": [_HEADER], "gpu": [_HEADER]}
    listed_names: set[str] = set()
    for spec in ACCELERATORS:
        # v4 has one row per core and one per chip, both under the same name; list it once.
        if spec.platform not in rows_by_platform or spec.name in listed_names:
            continue
        listed_names.add(spec.name)
        peak = "-"
        peaks = (("", spec.peak_bf16_flops), ("f16 ", spec.peak_f16_flops), ("f32 ", spec.peak_f32_flops))
        for dtype, flops in reversed(peaks):
            if flops:
                peak = f"{dtype}{flops / 1e12:.4g}"
        links = _gigabytes(spec.ici_bytes_per_second)
        if spec.ici_bytes_per_second is None and spec.nvlink_pair_bytes_per_second is not None:
            links = f"pair {_gigabytes(spec.nvlink_pair_bytes_per_second)}"
        planner = installed_compiler(spec.platform) or "estimate"
        if spec.platform == "gpu" and planner != "estimate":
            architecture = find_architecture(spec, installed_cuda())
            if architecture.capability != spec.compute_capability:
                planner += f", as {architecture.capability}"
        row = [spec.name, human_bytes(spec.memory_bytes), human_bytes(get_limit_bytes(spec)), peak]
        row += [_gigabytes(spec.hbm_bytes_per_second), links, _gigabytes(spec.pcie_bytes_per_second), planner]
        rows_by_platform[spec.platform].append(row)
    this_machine = [
        ["cpu:8", "8 CPU devices, which share this machine's memory"],
        ["local", "the devices of this machine"],
    ]
    return [
        TableSection(
            "TPUs: v5e-16, 2xv5e-256, tpu:v5e:2x4; each row describes one JAX device", rows_by_platform["tpu"], True
        ),
        TableSection("GPUs: h200, h200x8", rows_by_platform["gpu"], True),
        TableSection("this machine", this_machine),
        TableSection("columns", _LEGEND),
    ]


def _gigabytes(bytes_per_second: float | None) -> str:
    """Format bytes per second in GB/s of 1e9 bytes, as in data sheets; "-" if unknown."""
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:.0f}"
