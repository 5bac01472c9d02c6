"""Compare predicted and measured memory of training steps on this machine, for shapes of 10% to 130% of its memory.

    python -m tools.bench.plan_vs_measured            # the table, as markdown; JSON lines with --json=FILE
    python -m tools.bench.plan_vs_measured --gib 139  # shapes for a device of that size, instead of this device's size

Each shape runs in its own process. The prediction is `plimsoll plan --target=local --step_only`; the measurement is two
steps. GPU and TPU: `memory_stats()["peak_bytes_in_use"]`. CPU: the bytes of live arrays, plus the growth of the
process's resident memory during the steps (its high-water mark, reset before them), which includes allocator overhead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.workers import ROOT

SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3)
CPU_GIB = 3.0  # far above noise, yet small enough to share a machine
WIDTH, LENGTH = 1024, 1024


def shape(gib: float, on_cpu: bool) -> list[str]:
    """Return overrides of gpt2-124m for a step of about that size: half state, the rest sequences without remat."""
    length = 256 if on_cpu else LENGTH
    width = 256 if on_cpu else WIDTH
    state = 16 if on_cpu else 14  # bytes per parameter
    table = state * 50257 * width
    layers = max(2, int((gib * 2**30 / 2 - table) / (state * 12 * width**2)))
    layers = min(layers, 8) if on_cpu else layers
    saved_bytes = layers * length * width * (100 if on_cpu else 60)
    batch = max(1, int((gib * 2**30 / 2) / saved_bytes))
    fields = {
        "model.dim": width,
        "model.stack.num_layers": layers,
        "model.stack.pattern.0.attention.num_heads": width // 64,
        "model.stack.pattern.0.mlp.hidden": 4 * width,
        "data.seq_len": length,
        "data.global_batch_size": batch,
        "model.embed.max_positions": length,
        **({"model.compute_dtype": "float32", "model.param_dtype": "float32"} if on_cpu else {}),
    }
    return [f"{path}={value}" for path, value in fields.items()]


def measure(fields: list[str]) -> dict[str, Any]:
    """Measure one shape in this process."""
    import jax
    import numpy as np

    from plimsoll import configs
    from plimsoll.framework.devices.host import rss_bytes
    from plimsoll.framework.metrics.memory import memory_in_use
    from plimsoll.framework.plan.build_report import compile_report
    from plimsoll.framework.plan.targets import resolve
    from plimsoll.framework.program.program import Program

    config = configs.load("gpt2-124m")
    for field in fields:
        config.override(*field.split("=", 1))
    target = resolve("local")
    report = compile_report("gpt2-124m", config, target, None, phases=False)
    found = {"predicted": report.device_allocated_bytes, "limit": target.limit_bytes}
    found["estimate"] = report.estimate.device_peak_bytes if report.estimate else None
    program = Program(config.instantiate())
    shape = program.batch_specs["tokens"].shape
    batch = {"tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32), "weights": np.ones(shape, "f4")}
    try:
        program.jit_step.compiled_step  # noqa: B018
        state, arrays = program.init(), program.put(batch)
        jax.block_until_ready((state, arrays))
        before = rss_bytes()
        if program.mesh.devices.flat[0].platform == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            state, metrics = program.step(state, arrays)
            jax.block_until_ready(metrics)
    except jax.errors.JaxRuntimeError as error:
        return found | {"measured": None, "message": str(error).splitlines()[0]}
    use = memory_in_use(program.mesh.local_devices)
    peak = use.device_peak_bytes or use.device_bytes + _high_water() - before
    return found | {"measured": peak, "message": ""}


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Run every shape and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--gib", type=float, help="device memory in GiB that the shapes are made for; default: this device's"
    )
    parser.add_argument("--json", type=Path, help="append a JSON line for each shape to this file")
    parser.add_argument("--fields", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fields:
        print(json.dumps(measure(args.fields)))
        return
    probe = "import jax; d = jax.devices()[0]; print(d.platform, (d.memory_stats() or {}).get('bytes_limit', 0))"
    platform, limit = subprocess.check_output([sys.executable, "-c", probe], text=True, cwd=ROOT).split()[-2:]
    gib = args.gib or (int(limit) / 2**30 if int(limit) else CPU_GIB)
    print("| share | layers, batch | predicted GiB | measured GiB | error | estimate |\n|---|---|---|---|---|---|")
    for share in SHARES:
        fields = shape(share * gib, platform == "cpu")
        command = [sys.executable, "-m", "tools.bench.plan_vs_measured", "--fields", *fields]
        # On a GPU, resolving the target sets the memory fraction of a run.
        done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stderr)
        row = json.loads(done.stdout.splitlines()[-1]) | {"share": share, "fields": fields}
        if args.json:
            with args.json.open("a") as out:
                out.write(json.dumps(row) + "\n")
        sizes = [field.split("=")[1] for field in fields if "num_layers" in field or "global_batch" in field]
        measured = row["measured"]
        shown = f"{measured / 2**30:.3f}" if measured else "out of memory"
        error = f"{100 * (row['predicted'] / measured - 1):+.1f}%" if measured else "-"
        estimate = f"{100 * (row['estimate'] / row['predicted'] - 1):+.1f}%"
        cells = [f"{share:.2f}", ", ".join(sizes), f"{row['predicted'] / 2**30:.3f}", shown, error, estimate]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
