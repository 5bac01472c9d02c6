"""Check that the plan of MaxText's own step reports the same bytes as MaxText's `memory_analysis()`.

    python -m tools.bench.maxtext_bytes compile_topology=v5e-16 model_name=llama2-7b per_device_batch_size=1 \\
        max_target_length=2048

The arguments are fields of MaxText's config; compile_topology is the target. The step is compiled twice: by MaxText's
own train_compile in a separate process that imports nothing of Plimsoll (tools/bench/maxtext_step.py), and through
`pl.plan_function` (tools/bench/maxtext_function.py). Exits with 1 if a figure differs by more than 0.1%. Needs
an environment in which both MaxText and Plimsoll are installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import plimsoll as pl
from plimsoll.launch import cli
from tools.bench import maxtext_function

_SCRIPT = Path(__file__).with_name("maxtext_step.py")
_TOLERANCE = 0.001
# Figures of `memory_analysis()`, and their names in the report of a plan.
_FIGURES = {
    "argument": "device_argument_bytes",
    "output": "device_output_bytes",
    "alias": "device_alias_bytes",
    "temp": "device_temp_bytes",
    "peak": "device_peak_bytes",
    "host": "host_peak_bytes",
}


@cli.main
def main(argv: list[str]) -> int:
    """Compile the step twice and print both accounts."""
    topologies = [field.partition("=")[2] for field in argv if field.startswith("compile_topology=")]
    if not topologies:
        raise cli.UsageError("compile_topology=NAME is required, such as v5e-16")
    os.environ.update(maxtext_function.ENVIRONMENT, MAXTEXT=" ".join(argv))
    compiled = _compile_with_maxtext()
    function, arguments, options = maxtext_function.step()
    report = pl.plan_function(function, arguments, topologies[-1], **options).report
    rows = []
    differences = []
    for figure, key in _FIGURES.items():
        maxtext_bytes = compiled["memory"][figure]
        plan_bytes = report[key]
        difference = (plan_bytes - maxtext_bytes) / max(maxtext_bytes, 1)
        differences.append(abs(difference))
        rows.append((figure, f"{maxtext_bytes:,}", f"{plan_bytes:,}", f"{difference:+.4%}"))
    print(" ".join(argv))
    print(", ".join(f"{name} {version}" for name, version in compiled["versions"].items()))
    for row in [("bytes of each device", "MaxText", "the plan", "difference"), *rows]:
        print("{:<22}{:>16}{:>16}{:>12}".format(*row))
    return int(max(differences) > _TOLERANCE)


def _compile_with_maxtext() -> dict:
    """Return the step.json that tools/bench/maxtext_step.py writes. Raises UsageError if MaxText fails."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-maxtext-") as name:
        command = [sys.executable, str(_SCRIPT), name, *maxtext_function.command()[2:]]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no word of why"]
            raise cli.UsageError(f"MaxText's train_compile failed: {lines[-1]}")
        return json.loads((Path(name) / "step.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
