"""Compare the planned step times of TPUs with the time of the same FLOPs at the chips' peak rate.

    python -m tools.bench.tpu_cycles --results=build/tpu_cycles.json

Compiles each setting of `SETTINGS` once, as `plimsoll plan --step_only --json` does (a minute or two each), and caches
its report in the results file. Prints the markdown table of docs/benchmarks/tpu_cycles.md. No TPU is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plimsoll.framework.plan import targets

# Config, target, tokens per chip and step, and fields of the config.
SETTINGS = """
gpt2-124m v5e-1 8192 data.global_batch_size=8 memory.remat=none
gpt2-1.5b v5e-4 4096 data.global_batch_size=16 memory.remat=full
llama2-7b v5e-16 2048 data.global_batch_size=16 data.seq_len=2048 memory.remat=full
llama3-8b v6e-8 4096 data.global_batch_size=8 data.seq_len=4096 memory.remat=full
llama3-8b v5p-16 4096 data.global_batch_size=8 data.seq_len=4096 memory.remat=full
qwen2.5-7b v5p-8 4096 data.global_batch_size=4 data.seq_len=4096 memory.remat=full
""".strip().splitlines()


def run_plan(setting: str) -> dict[str, Any]:
    """Return the report of `plimsoll plan` for a setting.

    Raises:
        SystemExit: the plan failed; the message has the end of its output.
    """
    config, target, _, *fields = setting.split()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        command = [sys.executable, "-m", "plimsoll", "plan", f"--config={config}", f"--target={target}", "--step_only"]
        command += [f"--json={file}", *(f"--config.{field}" for field in fields)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"{setting}: {done.stderr[-2000:]}")
        return json.loads(file.read_text())


def row(setting: str, report: dict[str, Any]) -> str:
    """Return a setting's line of the table."""
    config, target, tokens, *fields = setting.split()
    machine = targets.resolve(target)
    peak_flops = machine.spec.peak_flops()
    assert peak_flops is not None
    seconds_at_peak = report["flops_per_step"] / (peak_flops * machine.num_devices)
    time = report["time"]
    utilization = time["model_flops_utilization"]
    remat = dict(field.split("=") for field in fields)["memory.remat"]
    cells = (
        config,
        target,
        f"{int(tokens):,}",
        remat,
        f"{seconds_at_peak * 1e3:.1f}",
        f"{time['seconds'] * 1e3:.1f}",
        f"{time['seconds'] / seconds_at_peak:.2f}",
        f"{utilization:.1%}",
        time["bound_by"],
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file with compiled results; new ones are added")
    args = parser.parse_args()
    reports = json.loads(args.results.read_text()) if args.results.exists() else {}
    for setting in SETTINGS:
        if setting in reports:
            continue
        report = run_plan(setting)
        reports[setting] = {key: report[key] for key in ("flops_per_step", "time", "versions", "compile_seconds")}
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(reports, indent=1) + "\n")
        print(f"{report['compile_seconds']:.0f} s: {setting}", file=sys.stderr, flush=True)
    print("| config | target | tokens a chip | remat | FLOPs at peak, ms | the plan, ms | ratio | MFU | bound by |")
    print("|---|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        print(row(setting, reports[setting]))


if __name__ == "__main__":
    main()
