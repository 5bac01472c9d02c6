"""Compile time of a training step by depth, for one program and for per-layer programs, or by field of `memory`.

    python -m tools.bench.compile_time                      # for this machine's CPU, 8 and 80 layers
    python -m tools.bench.compile_time --target=v5e-1       # for another target, see `plimsoll plan`
    python -m tools.bench.compile_time --memory --config=stdlib-tiny

Every round compiles each row from scratch, without a cache. The rows take turns, and the fastest of `--rounds` rounds
counts. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from plimsoll.framework.plan import targets

_PREVIOUS_NORM = {"memory.update": "in_backward", "learner.clip_mode": "previous_norm"}
_HOSTED_STATE = {"memory.optimizer_state": "pinned_host"}
# Changes to `memory` and the learner relative to the plain step, which is the first entry.
MEMORY_FIELDS: tuple[dict[str, str], ...] = (
    {},
    {"memory.remat": "full"},
    {"memory.remat": "dots"},
    _HOSTED_STATE,
    {"memory.update": "streamed"},
    {"memory.update": "streamed", **_HOSTED_STATE},
    {"memory.update": "streamed", **_HOSTED_STATE, "memory.gradients": "pinned_host"},
    {"memory.update": "streamed", **_HOSTED_STATE, "memory.parameters": "pinned_host"},
    _PREVIOUS_NORM,
    {**_PREVIOUS_NORM, **_HOSTED_STATE, "memory.prefetch": "layer"},
    {"memory.update": "in_backward", "learner.clip_mode": "two_pass"},
    {"memory.update": "layer_programs"},
)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu-1")
    parser.add_argument("--depths", type=int, nargs=2, default=(8, 80), metavar="LAYERS")
    parser.add_argument("--memory", action="store_true", help="compare the fields of `memory` instead of depths")
    parser.add_argument("--config", default="nanogpt-cpu", help="config for --memory")
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each row; the fastest counts")
    args = parser.parse_args()
    targets.set_environment(args.target)

    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    if args.memory:
        _print_by_memory(args.config, targets.resolve(args.target), args.rounds)
    else:
        _print_by_depth(args.depths, targets.resolve(args.target), args.rounds)
    return 0


def _measure_compile(name: str, fields: dict[str, str], target: targets.Target) -> tuple[float, float, int]:
    """Return (seconds of compiling, seconds including tracing and setup, number of programs) of a config's step."""
    import jax

    from plimsoll import configs
    from plimsoll.framework.plan.dry_run import compile_step
    from plimsoll.framework.program.program import Program

    config = configs.load(name)
    for path, value in fields.items():
        config.override(path, value)
    jax.clear_caches()
    start = time.perf_counter()
    program = Program(config.instantiate(), target.devices()[:1])
    step: Any = compile_step(program, target, None)
    # A program that is called several times is compiled only once.
    num_programs = len({id(call) for call in step.tracker.calls})
    return step.seconds, time.perf_counter() - start, num_programs


def _print_by_depth(depths: tuple[int, int], target: targets.Target, rounds: int) -> None:
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    programs = {}
    schedules = ("after_backward", "layer_programs")
    for _ in range(rounds):
        for name in schedules:
            for depth in depths:
                fields = {"model.stack.num_layers": str(depth), "model.stack.unroll": "1", "memory.update": name}
                compiling, total, programs[name] = _measure_compile("nanogpt-cpu", fields, target)
                seconds.setdefault((name, depth), []).append((compiling, total))
    few, many = depths
    print(f"| schedule | programs | {few} layers: compiling, total | {many} layers | compiling, {many} to {few} |")
    print("|---|---|---|---|---|")
    for name in schedules:
        best = [tuple(map(min, zip(*seconds[name, depth], strict=True))) for depth in depths]
        cells = [f"{compiling:.2f} s, {total:.2f} s" for compiling, total in best]
        print(f"| {name} | {programs[name]} | {' | '.join(cells)} | {best[1][0] / best[0][0]:.2f} |", flush=True)


def _print_by_memory(name: str, target: targets.Target, rounds: int) -> None:
    totals: list[list[float]] = [[] for _ in MEMORY_FIELDS]
    for _ in range(rounds):
        for row, fields in zip(totals, MEMORY_FIELDS, strict=True):
            row.append(_measure_compile(name, fields, target)[1])
    plain = min(totals[0])
    print(f"| {name} | tracing and compiling, s | over the plain step's |")
    print("|---|---|---|")
    for row, fields in zip(totals, MEMORY_FIELDS, strict=True):
        label = " ".join(f"`{path}={value}`" for path, value in fields.items()) or "plain"
        print(f"| {label} | {min(row):.2f} | {min(row) / plain:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
