"""How the time to compile a step depends on depth, with one program and with programs of layers.

    python -m tools.bench.compile_time                      # for the CPU at hand, 8 and 80 layers
    python -m tools.bench.compile_time --target=v5e-1       # for another target, see launch.plan

Each row is compiled anew, with no cache, in turns; the best of `--rounds` counts. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time

from framework.plan import targets


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu-1")
    parser.add_argument("--depths", type=int, nargs=2, default=(8, 80), metavar="LAYERS")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    targets.environment(args.target)

    import jax

    import configs
    from framework.plan.suggest import compile_step
    from framework.program import Program

    jax.config.update("jax_enable_compilation_cache", False)
    target = targets.resolve(args.target)
    schedules = {name: {"memory.update": name} for name in ("after_backward", "layer_programs")}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    programs = {}
    for _ in range(args.rounds):
        for name, fields in schedules.items():
            for depth in args.depths:
                config = configs.load("nanogpt-cpu")
                for path, value in {"model.stack.num_layers": str(depth), "model.stack.unroll": "1", **fields}.items():
                    config.override(path, value)
                jax.clear_caches()
                start = time.perf_counter()
                program = Program(config.instantiate(), target.devices()[:1])
                found = compile_step(program, target, None)
                seconds.setdefault((name, depth), []).append((found.seconds, time.perf_counter() - start))
                programs[name] = len(program.layers.programs) if program.in_parts else 1
    few, many = args.depths
    print(f"| schedule | programs | {few} layers: compiling, in all | {many} layers | compiling, {many} to {few} |")
    print("|---|---|---|---|---|")
    for name in schedules:
        best = [tuple(map(min, zip(*seconds[name, depth], strict=True))) for depth in args.depths]
        cells = [f"{compiling:.2f} s, {total:.2f} s" for compiling, total in best]
        print(f"| {name} | {programs[name]} | {' | '.join(cells)} | {best[1][0] / best[0][0]:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
