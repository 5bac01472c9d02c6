"""What the names of targets may be, and which ones a mistyped name may have meant."""

import difflib
import math
import re

from framework.devices.accelerators import ACCELERATORS, AcceleratorSpec, named, spec_for

TPUS = {alias: spec for spec in ACCELERATORS if spec.topologies for alias in (spec.name, *spec.aliases)}
GPUS = {alias: spec for spec in ACCELERATORS if spec.platform == "gpu" for alias in (spec.name, *spec.aliases)}


def card(name: str) -> tuple[AcceleratorSpec | None, int]:
    """The GPU that a name means, and how many; (None, 1) if it means none."""
    spec = named(name)
    count = 1
    family, separator, digits = name.rpartition("x")
    # Names of cards may have an x and digits themselves: rtx4090.
    if spec is None and separator and digits.isdecimal():
        spec = named(family)
        count = int(digits)
    if spec is None or spec.platform != "gpu":
        return None, 1
    return spec, count


def chips(topology: str) -> int:
    """The chips of a slice, "4x4": 16."""
    return math.prod(map(int, topology.split("x")))


def topology_by_size(family: str) -> dict[int, str]:
    """{the number in the name: topology} of Cloud's slices."""
    spec = spec_for(family)
    return {chips(topology) * spec.cores_per_chip: topology for topology in spec.topologies}


def nearest(name: str) -> list[str]:
    """Up to four names that may have been meant: those that only say more, then those that look alike."""
    # Of "rtx4091x8" the end is a count, of "rtx4091" it is not: a card's name has a digit before it.
    match = re.fullmatch(r"(.*\d\D*?)(x\d{1,3})", name)
    typed_family, count = match.groups() if match else (name, "")
    slices = [f"{family}-{size}" for family in TPUS for size in topology_by_size(family)]
    topologies = [f"tpu:{family}:2x2" for family in TPUS]
    choices = ["local", "cpu:8", *(f"{gpu}{count}" for gpu in GPUS), *topologies, *slices]
    longer_names = [choice for choice in choices if _says_more(choice, typed_family)]
    alike_names = difflib.get_close_matches(name, choices, n=3)
    nearest_names = list(dict.fromkeys([*longer_names[:3], *alike_names]))[:4]
    return nearest_names or ["v5e-16", "v5p-8", "h200x8", "rtx4090", "cpu:8", "local"]


def _says_more(choice: str, typed_family: str) -> bool:
    """Whether a name is the typed one with an addition: a100-40 of a100, and rtx4060ti-8 of 4060ti."""
    prefixes = (f"{typed_family}-", f"rtx{typed_family}-")
    return bool(typed_family) and choice.startswith(prefixes)


def check_size(
    name: str,
    size: int,
    sizes: set[int],
    prefix: str,
) -> None:
    """Raises ValueError: a number of devices that is not one of `sizes`; the nearest are given, after `prefix`."""
    if size not in sizes:
        smaller = sorted(valid_size for valid_size in sizes if valid_size < size)
        larger = sorted(valid_size for valid_size in sizes if valid_size > size)
        neighbors = [f"{prefix}{valid_size}" for valid_size in smaller[-1:] + larger[:1]]
        raise ValueError(f"target {name!r}: not a size; nearest: {', '.join(neighbors)}")
