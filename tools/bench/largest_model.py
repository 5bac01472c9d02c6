"""Find the largest Llama 3 that one device can train with its host's memory, by the compiler, for three optimizers.

    python -m tools.bench.largest_model [MACHINE ...] [--missing] [--estimate] [--jsonl=FILE] [--page=FILE]

Without names, runs all machines whose compiler is installed, or all with --estimate. Running a machine again replaces
its rows; with --missing, only rows that do not exist yet are added. AdamW trains as the config specifies: bfloat16
weights with a float32 master copy, float32 moments. The other two store the weights only in bfloat16, with stochastic
rounding. One row of 8192 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.configs import load
from plimsoll.extras.autotune.autotune import MEMORY, TuningRequest, TuningResult, autotune, explain_misfit
from plimsoll.extras.autotune.batch_curve import estimate_curve
from plimsoll.extras.autotune.settings import Machine, Setting, find_fixed_paths, flags
from plimsoll.extras.largest.frontier import FrontierSearch
from plimsoll.extras.largest.size_family import SizeFamily
from plimsoll.framework.config import Config
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.plan.throughput_curve import ThroughputCurve
from plimsoll.framework.terminal.tables import human_bytes, human_count, human_duration
from plimsoll.launch.cli import apply_overrides

GIB = 1 << 30
_CONFIG = "llama3-8b"
_BATCH = ("data.global_batch_size", "1")
_RATE = ("learner.optimizer.learning_rate", "3e-4")
_ROUNDED = (_RATE, ("learner.master_dtype", "None"), ("learner.rounding", "stochastic"))
OPTIMIZERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "AdamW": (),
    "8-bit AdamW": (("learner.optimizer", "adamw8bit"), *_ROUNDED),
    "AdaLomo": (("learner.optimizer", "adalomo"), *_ROUNDED),
}
# GiB of host memory to plan for; None uses the target's known host memory.
MACHINES: Mapping[str, tuple[int | None, ...]] = {
    "h200": (128, 1536),
    "h100": (64, 128, 256, 512, 1536),
    "4090": (64, 128, 256),
    "v5e-1": (None,),
}
# Billions of parameters that fit by bytes only: all device and host memory, and one layer's buffers.
ARITHMETIC = {
    ("h100", 128, "AdamW"): 13,
    ("h100", 128, "8-bit AdamW"): 47,
    ("h100", 128, "AdaLomo"): 95,
    ("h200", 128, "AdamW"): 18,
    ("h200", 128, "8-bit AdamW"): 62,
    ("h200", 128, "AdaLomo"): 125,
}
_HEAD = """# The largest model on one device

The largest Llama 3 (width and depth grown together, [autotuning.md](../autotuning.md#the-largest-model)) that one
device trains, saves, evaluates and resumes with its host's memory, one row of 8192 tokens at a time. `python -m
tools.bench.largest_model` wrote this on {day}: two CPU cores, {versions}. The bytes are those of the target's compiler
for the whole step, or of the analytical estimate in rows with "estimate"; no step ran. "Host" is
[everything that the host has to hold](../plan.md#host-memory) in the phase that needs the most. "By bytes only": the
size that device and host memory allow by the sum of the bytes of weights, state and gradients. "Tokens/s" is estimated
for one row; "at larger batches" is the estimated rate of the same model at the batch from which on more tokens raise
it little (the [knee of the curve](../autotuning.md#larger-batches)), with the tokens of its step.

"""
_COLUMNS = (
    *("machine", "its host", "optimizer", "parameters", "by bytes only", "layers", "device", "host"),
    *("tokens/s", "at larger batches", "search", "settings"),
)


class LargestRow(NamedTuple):
    """The largest size for a machine and an optimizer.

    Attributes:
        machine: target name of the machine.
        host_gib: GiB of its host's memory; None for the target's own.
        optimizer: name in `OPTIMIZERS`.
        point: the largest size as JSON data, or None if nothing fits.
        curve: rates of the largest size at larger batches, or None if there are none.
        seconds: duration of the search.
    """

    machine: str
    host_gib: int | None
    optimizer: str
    point: dict[str, Any] | None
    curve: ThroughputCurve | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        return self._asdict() | {"curve": None if self.curve is None else self.curve.to_json()}


def find_largest(machine_name: str, host_gib: int | None, optimizer: str, *, estimate: bool) -> LargestRow:
    """Search for the largest size."""
    target = targets.resolve(machine_name)
    config = load(_CONFIG)
    overrides = [_BATCH, *OPTIMIZERS[optimizer]]
    apply_overrides(config, overrides)
    host_bytes = None if host_gib is None else host_gib * GIB
    machine = Machine.derive(target, target.limit_bytes, host_bytes)
    fixed = sorted(find_fixed_paths(config, [path for path, _ in overrides]))
    start = time.monotonic()

    def build_request(size_config: Config, estimate_only: bool) -> TuningRequest:
        return TuningRequest(size_config, machine, MEMORY, fixed, (), estimate_only)

    def ask(size_config: Config, estimate_only: bool) -> TuningResult:
        return autotune(build_request(size_config, estimate_only), target, host_bytes=host_bytes)

    def check(size_config: Config) -> str:
        return explain_misfit(build_request(size_config, True), target, host_bytes)

    family = SizeFamily.derive(config)
    search = FrontierSearch(family, ask, check, not estimate, lambda line: print(f"  {line}", flush=True))
    point = search.largest()
    seconds = time.monotonic() - start
    if point is None:
        return LargestRow(machine_name, host_gib, optimizer, None, None, seconds)
    request = build_request(family.scale_config(point.member.size), True)
    curve = estimate_curve(request, target, point.choice, host_bytes)
    return LargestRow(machine_name, host_gib, optimizer, point.to_json(family), curve, seconds)


def render_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page in Markdown."""
    used_versions = ", ".join(f"{name} {version}" for name, version in versions("jax", "jaxlib", "libtpu").items())
    head = _HEAD.format(day=date.today().isoformat(), versions=used_versions)
    columns = f"| {' | '.join(_COLUMNS)} |\n|{len(_COLUMNS) * '---|'}\n"
    return head + columns + "".join(map(_line, rows))


def _line(row: Mapping[str, Any]) -> str:
    target = targets.resolve(row["machine"])
    host_gib = row["host_gib"]
    arithmetic = ARITHMETIC.get((row["machine"], host_gib, row["optimizer"]))
    first = [
        row["machine"],
        f"{host_gib} GiB" if host_gib is not None else human_bytes(target.host_limit_bytes),
        row["optimizer"],
    ]
    point = row["point"]
    if point is None:
        return f"| {' | '.join([*first, 'none'])} |\n"
    choice = point["choice"]
    judge = "" if choice["compiled"] else " (estimate)"
    used = "" if target.limit_bytes is None else f", {100 * choice['peak'] / target.limit_bytes:.1f}%"
    rate = point["tokens_per_second"]
    cells = [
        *first,
        human_count(point["parameters"]),
        "" if arithmetic is None else f"{arithmetic}B",
        str(point["layers"]),
        f"{human_bytes(choice['peak'])}{used}{judge}",
        human_bytes(choice["host_need"]) if "host_need" in choice else f"{human_bytes(choice['host'])} of arrays",
        "-" if rate is None else human_count(rate),
        _render_knee(row.get("curve")),
        human_duration(row["seconds"]),
        f"`{flags(Setting(*pair) for pair in choice['settings'])}`",
    ]
    return f"| {' | '.join(cells)} |\n"


def _render_knee(curve: Mapping[str, Any] | None) -> str:
    if curve is None:
        return "-"
    knee = next(point for point in curve["points"] if point["tokens_per_step"] == curve["knee"])
    return f"{human_count(curve['knee'] / knee['time']['seconds'])} with {curve['knee']:,} a step"


def main() -> None:
    """Search for the largest sizes, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "machines",
        nargs="*",
        metavar="MACHINE",
        help="machines to run; default: all whose compiler is installed: " + ", ".join(MACHINES),
    )
    parser.add_argument("--missing", action="store_true", help="add only rows that do not exist yet")
    parser.add_argument("--estimate", action="store_true", help="search by the analytical estimate, without compiling")
    parser.add_argument("--jsonl", type=Path, default=Path("docs/benchmarks/largest.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/largest.md"))
    args = parser.parse_args()
    unknown = set(args.machines) - set(MACHINES)
    if unknown:
        parser.error(f"no machines {sorted(unknown)}; there are {', '.join(MACHINES)}")
    names = args.machines or [name for name in MACHINES if args.estimate or _compiles(targets.resolve(name))]
    targets.set_environment(",".join(names))
    # {(machine, GiB of its host, optimizer): row}
    rows: dict[tuple[str, int | None, str], Mapping[str, Any]] = {}
    if args.jsonl.exists():
        stored_rows = [json.loads(line) for line in args.jsonl.read_text().splitlines()]
        rows = {(row["machine"], row["host_gib"], row["optimizer"]): row for row in stored_rows}
    all_keys = [(machine, host, one) for one in OPTIMIZERS for machine, hosts in MACHINES.items() for host in hosts]
    for key in all_keys:
        machine, host_gib, optimizer = key
        if machine in names and not (args.missing and key in rows):
            print(f"{machine}, {host_gib} GiB, {optimizer}", flush=True)
            rows[key] = find_largest(machine, host_gib, optimizer, estimate=args.estimate).to_json()
            # Write after each row: a later one may take minutes, or fail.
            ordered_rows = [rows[key] for key in all_keys if key in rows]
            args.jsonl.write_text("".join(f"{json.dumps(row)}\n" for row in ordered_rows))
            args.page.write_text(render_page(ordered_rows))


def _compiles(target: Target) -> bool:
    return bool(targets.installed_compiler(target.platform))


if __name__ == "__main__":
    main()
