"""Memory that each schedule needs, by the target's compiler: the table of docs/benchmarks/memory_table.md.

    python -m tools.bench.memory_table                 # every row, as markdown; minutes each
    python -m tools.bench.memory_table ROW ROW         # some rows
    python -m tools.bench.memory_table --list          # their names and commands

Each row is one `plimsoll plan --step_only`, so it prints from the plan's cache while nothing has changed. Rows for GPUs
need the plan-gpu extra, others plan-tpu. Rows that cannot be planned here are left out, with the reason below the
table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.workers import ROOT

HOSTED = {"memory.optimizer_state": "pinned_host"}
STREAMED = {"memory.update": "streamed", **HOSTED}
GRADIENTS = {**STREAMED, "memory.gradients": "pinned_host"}
EVERYTHING = {**GRADIENTS, "memory.parameters": "pinned_host", "memory.activations": "pinned_host"}
IN_BACKWARD = {"memory.update": "in_backward", "learner.clip_mode": "update_rms"}
PRECISE = {"model.param_dtype": "float32", "learner.master_dtype": "None"}
ADAFACTOR = {
    "memory.update": "in_backward",
    "learner.optimizer": "optax.adafactor",  # clips by the RMS of the update on its own
    "learner.optimizer.learning_rate": "1e-3",
    "learner.rules": "[]",
    "learner.clip": "None",
    "learner.master_dtype": "None",
}
ROUNDED = {
    "memory.update": "in_backward",
    "learner.optimizer.learning_rate": "1e-3",
    "learner.clip": "None",
    "learner.master_dtype": "None",
    "learner.rounding": "stochastic",
}
LAYERS = {"memory.update": "layer_programs"}
AT_ONCE = {"memory.gradients": "none"}
EIGHT = {"memory.parameters": "pinned_host:8", "memory.activations": "pinned_host"}
LORA = {"model.lora": "plimsoll.LoRA", "model.lora.rank": "64", "model.lora.targets": ".*", **IN_BACKWARD}
Row = tuple[str, str, int, dict[str, str]]  # config, target, tokens per device, fields
ROWS: dict[str, Row] = {
    "whole": ("llama2-7b", "v5e-8", 4096, HOSTED),
    "streamed": ("llama2-7b", "v5e-8", 4096, STREAMED),
    "gradients": ("llama2-7b", "v5e-8", 4096, GRADIENTS),
    "gradients-4": ("llama2-7b", "v5e-4", 4096, GRADIENTS),
    "in-backward-4": ("llama2-7b", "v5e-4", 4096, {**IN_BACKWARD, **HOSTED}),
    "gradients-1": ("llama2-7b", "v5e-1", 2048, GRADIENTS),
    "hosted-7b": ("llama2-7b", "v5e-1", 2048, EVERYTHING),
    "hosted-13b": ("llama2-13b", "v5e-1", 2048, EVERYTHING),
    "float32": ("llama2-7b", "v5e-8", 4096, {**GRADIENTS, **PRECISE}),
    "float32-4": ("llama2-7b", "v5e-4", 2048, {**GRADIENTS, **PRECISE}),
    "adafactor": ("llama2-7b", "v5e-1", 2048, ADAFACTOR),
    "adafactor-33b": ("llama-33b", "v5e-8", 2048, ADAFACTOR),
    "adafactor-65b": ("llama-65b", "h200x1", 2048, ADAFACTOR),
    "apollo-mini": ("llama2-7b", "v5e-1", 128, {"learner.optimizer": "apollo_mini", **ROUNDED}),
    "adalomo": ("llama2-7b", "v5e-1", 128, {"learner.optimizer": "adalomo", **ROUNDED}),
    "lora": ("llama2-7b", "v5e-1", 128, LORA),
    "resident": ("llama2-7b", "v5e-8", 128, IN_BACKWARD),
    "resident-h200": ("llama2-7b", "h200x1", 128, IN_BACKWARD),
    "layers-8b": ("llama3-8b", "h200x1", 16384, {**LAYERS, **HOSTED}),
    "layers-8b-gradients": ("llama3-8b", "h200x1", 16384, {**LAYERS, **HOSTED, "memory.gradients": "pinned_host"}),
    "layers-8b-at-once": (
        "llama3-8b",
        "h200x1",
        16384,
        {**LAYERS, **HOSTED, **AT_ONCE, "learner.clip_mode": "update_rms"},
    ),
    "layers-70b": ("llama2-70b", "h200x1", 4096, {**ADAFACTOR, **LAYERS, **AT_ONCE, **EIGHT}),
}


def command(row: Row) -> list[str]:
    """Return the arguments of `plimsoll plan`."""
    config, target, tokens, fields = row
    devices = int(target.split("x")[-1] if "x" in target else target.split("-")[1])
    fields = {"memory.remat": "full", "data.seq_len": str(tokens), "data.global_batch_size": str(devices), **fields}
    return [
        f"--config={config}",
        f"--target={target}",
        "--step_only",
        *(f"--config.{p}={v}" for p, v in fields.items()),
    ]


def measure(row: Row) -> dict[str, Any] | str:
    """Return the report, or why there is none."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "report.json")
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll", "plan", *command(row), f"--json={file}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return json.loads(file.read_text()) if file.is_file() else done.stderr.strip().splitlines()[-1]


def line(name: str, row: Row, report: dict[str, Any]) -> str:
    """Return one line of the table. The state's bytes are those of the layout, which stay on a device all the time."""
    gib = 2**30
    peak, state = report["device_peak_bytes"], report["phases"]["restore"]["device_peak_bytes"]
    cells = (
        name,
        f"{row[0]}, {row[1]}, {row[2]}",
        f"{peak / gib:.2f}" + ("" if report["fits"] else " (does not fit)"),
        f"{report['device_allocated_bytes'] / gib:.2f}",
        f"{peak / state:.3f}" if state > 0.01 * peak else "",
        f"{report['host_peak_bytes'] / gib:.2f}",
        f"{report['host_argument_bytes'] / gib:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Print the requested rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to plan, as listed by --list; default: all")
    parser.add_argument("--list", action="store_true", help="print the names and commands of all rows")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"no row {', '.join(unknown)}; valid: {', '.join(ROWS)}")
    rows = {name: ROWS[name] for name in args.rows or ROWS}
    if args.list:
        print("\n".join(f"{name}: plimsoll plan {' '.join(command(row))}" for name, row in rows.items()))
        return 0
    print(
        "| row | config, target, tokens per device | peak | with gaps | peak / state | on the host | offloaded layout |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    missing = []
    for name, row in rows.items():
        report = measure(row)
        if isinstance(report, str):
            missing.append(f"{name}: {report}")
        else:
            print(line(name, row, report), flush=True)
    print("\n".join(missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
