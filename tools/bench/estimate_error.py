"""Error of `plimsoll plan --estimate` relative to the compiler: peaks of both, by config and target.

    python -m tools.bench.estimate_error --results build/estimate_error.json

Compiled results (minutes for each pair) are cached in the results file; estimates are recomputed every time. A target
whose compiler is not installed can be left out with --only, and added later by another environment's Python.
Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plimsoll import configs
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.estimate import estimate
from plimsoll.framework.terminal.tables import human_bytes

# The estimate was developed against other pairs, which docs/benchmarks/estimate_error.md lists.
PAIRS = """
gpt2-124m v5e-1 data.global_batch_size=8
gpt2-124m v5e-8 data.global_batch_size=128 memory.remat=full
gpt2-124m h200 data.global_batch_size=32
gpt2-124m cpu:4 data.global_batch_size=8 data.seq_len=512
gpt2-350m v6e-4 data.global_batch_size=32 memory.remat=dots
gpt2-350m h200x8 data.global_batch_size=64 memory.remat=dots
gpt2-350m v5e-4 data.global_batch_size=16 mesh.data=4 mesh.fsdp=1 memory.remat=full
gpt2-774m v5p-8 data.global_batch_size=16 memory.remat=dots
gpt2-774m h200x2 data.global_batch_size=16 memory.remat=full
gpt2-1.5b v5e-8 data.global_batch_size=32 memory.remat=full
gpt2-1.5b tpu7x-8 data.global_batch_size=16
gpt2-1.5b h200 data.global_batch_size=32 learner.accumulate=4 memory.remat=full
qwen2.5-0.5b v5e-8 data.global_batch_size=8 memory.remat=full
qwen2.5-0.5b h200 data.global_batch_size=4
qwen2.5-0.5b v6e-4 data.global_batch_size=8 memory.remat=save:query,key,value,attention
llama2-7b v5p-16 data.global_batch_size=16 memory.remat=dots
llama2-7b h200x8 data.global_batch_size=8
llama2-7b v5e-16 data.global_batch_size=16 memory.remat=full memory.optimizer_state=pinned_host
llama2-7b v6e-8 data.global_batch_size=16 mesh.fsdp=4 mesh.model=2 learner.accumulate=2 memory.remat=full
llama3-8b v5p-16 data.global_batch_size=8 memory.remat=full
llama3-8b h200x8 data.global_batch_size=8 memory.remat=full
qwen2.5-7b tpu7x-16 data.global_batch_size=16 memory.remat=dots_no_batch
stdlib-tiny cpu:1
stdlib-tiny v5e-1 data.global_batch_size=64
nanogpt-cpu cpu:4 data.global_batch_size=64 stack_unroll
""".strip().replace("stack_unroll", "model.stack.unroll=1").splitlines()  # fmt: skip


def compile_pair(pair: str) -> dict[str, Any]:
    """Return the compiler's report for a pair, "config target settings", as written by `plimsoll plan`."""
    name, target, *settings = pair.split()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        command = [sys.executable, "-m", "plimsoll", "plan", f"--config={name}", f"--target={target}", "--step_only"]
        command += [f"--json={file}", *(f"--config.{setting}" for setting in settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"{pair}: {done.stderr[-2000:]}")
        return json.loads(file.read_text())


def estimate_peak(pair: str) -> int:
    """Return the estimated peak, in bytes per device."""
    name, machine, *settings = pair.split()
    target = targets.resolve(machine)
    config = configs.load(name)
    for setting in settings:
        config.override(*setting.split("=", 1))
    experiment = config.instantiate()
    return estimate(experiment, experiment.mesh.resolve(target.num_devices), target.spec).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file with compiled results; new ones are added")
    parser.add_argument("--only", default="", help="compile only pairs that contain this text; '-' compiles none")
    args = parser.parse_args()
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    for pair in PAIRS:
        if pair not in known and args.only in pair and args.only != "-":
            start = time.perf_counter()
            report = compile_pair(pair)
            known[pair] = {key: report[key] for key in ("device_peak_bytes", "fits", "message", "versions")}
            args.results.parent.mkdir(parents=True, exist_ok=True)
            args.results.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{time.perf_counter() - start:.0f} s: {pair}", file=sys.stderr, flush=True)
    print("| config | target | settings | compiled | estimated | error |\n|---|---|---|---|---|---|")
    errors = []
    for pair in (pair for pair in PAIRS if pair in known):
        name, target, *settings = pair.split()
        peak, guess = known[pair]["device_peak_bytes"], estimate_peak(pair)
        errors.append(guess / peak - 1.0)
        sizes = f"{human_bytes(peak)} | {human_bytes(guess)} | {errors[-1]:+.1%}"
        print(f"| {name} | {target} | {' '.join(settings)} | {sizes} |")
    size = [abs(error) for error in errors]
    print(f"\n{len(size)} pairs: mean error {sum(size) / len(size):.1%}, largest {max(size):.1%}")


if __name__ == "__main__":
    main()
