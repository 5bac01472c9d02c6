"""Valid target names, and suggestions for mistyped ones."""

import difflib
import math
import re

from plimsoll.framework.devices.accelerators import ACCELERATORS, AcceleratorSpec, find_spec, spec_for

TPUS = {alias: spec for spec in ACCELERATORS if spec.topologies for alias in (spec.name, *spec.aliases)}
GPUS = {alias: spec for spec in ACCELERATORS if spec.platform == "gpu" for alias in (spec.name, *spec.aliases)}


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
    longer_names = [choice for choice in choices if _is_longer_form(choice, typed_family)]
    alike_names = difflib.get_close_matches(name, choices, n=3)
    nearest_names = list(dict.fromkeys([*longer_names[:3], *alike_names]))[:4]
    return nearest_names or ["v5e-16", "v5p-8", "h200x8", "rtx4090", "cpu:8", "local"]


def _is_longer_form(choice: str, typed_family: str) -> bool:
    """Return whether a name extends the typed one: a100-40 extends a100, and rtx4060ti-8 extends 4060ti."""
    prefixes = (f"{typed_family}-", f"rtx{typed_family}-")
    return bool(typed_family) and choice.startswith(prefixes)


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
