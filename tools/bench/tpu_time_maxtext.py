"""Time of MaxText's training step on a TPU, by the same count as ours: see tools/bench/tpu_time.py.

    python -m tools.bench.tpu_time_maxtext v5e-16 --python=/opt/maxtext/bin/python --config=llama2-7b --length=2048 \\
        --save=build/maxtext [--against=build/ours] [max_target_length=... remat_policy=... any field of MaxText]

MaxText is installed in a separate environment, and --python is that environment's Python: `pip install maxtext`, in a
release that works with the jax and libtpu versions that Plimsoll uses here, because figures of different compiler
versions cannot be compared. MaxText's own train_compile compiles the step, with its defaults except for the given
fields; nothing runs. --config names the Plimsoll config of the same model, which provides the model's FLOPs for MFU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plimsoll import configs
from plimsoll.framework.plan import buffers, targets
from plimsoll.framework.plan.hlo import Module
from plimsoll.framework.plan.step_time import TpuRates
from plimsoll.framework.plan.step_time.tpu_time import StepProgram
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.tables import render
from plimsoll.launch import cli
from tools.bench import tpu_tables
from tools.bench.maxtext_function import ENVIRONMENT
from tools.bench.step_programs import CompiledStep, StepInfo, load, save
from tools.bench.tpu_time import count_step

_SCRIPT = Path(__file__).with_name("maxtext_step.py")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", help="machine, such as v5e-16; Plimsoll and MaxText use the same names")
    add("--python", type=Path, required=True, metavar="FILE", help="Python of the environment with MaxText")
    add("--config", required=True, metavar="NAME", help="Plimsoll config of the same model")
    add("--model", metavar="NAME", help="model_name in MaxText; default: the value of --config")
    add("--batch", type=int, default=1, help="sequences per device; default 1")
    add("--length", type=int, required=True, help="tokens per sequence")
    add("--save", type=Path, required=True, metavar="DIR", help="save the compiled text and its metadata in DIR")
    add("--against", type=Path, metavar="DIR", help="print the step saved in DIR next to this one")
    add("--top", type=int, default=25, metavar="N", help="number of largest operations to show; default 25")
    add("field", nargs="*", metavar="FIELD=VALUE", help="fields of MaxText's config")
    return parser


@cli.main
def main(argv: list[str]) -> int:
    """Compile MaxText's step, save it and print its count."""
    args = _parser().parse_intermixed_args(argv)
    target = targets.resolve(args.target)
    TpuRates.look_up(target.spec)  # raises for a target without known rates before minutes of compiling
    if not args.python.is_file():
        raise cli.UsageError(f"--python={args.python}: expected the Python of an environment with MaxText")
    if wrong := [field for field in args.field if "=" not in field]:
        raise cli.UsageError(f"{wrong[0]}: expected FIELD=VALUE, a field of MaxText's config")
    other = count_step(load(args.against)) if args.against else None
    step = _step(args, target)
    save(step, args.save)
    this = count_step(step)
    tables = tpu_tables.sections(this, args.top, None)
    if other is not None:
        tables.append(tpu_tables.comparison(this, other, "MaxText", str(args.against)))
    print(render(tables), end="")
    return 0


def _step(args: argparse.Namespace, target: Target) -> CompiledStep:
    tokens = args.batch * args.length
    flops_per_token = configs.load(args.config).instantiate().model.flops_per_token(args.length)
    fields = {
        "compile_topology": args.target,
        "compile_topology_num_slices": str(target.num_slices),
        "model_name": args.model or args.config,
        "per_device_batch_size": str(args.batch),
        "max_target_length": str(args.length),
    }
    settings = [*(f"{name}={value}" for name, value in fields.items()), *args.field]
    with tempfile.TemporaryDirectory(prefix="plimsoll-maxtext-") as name:
        folder = Path(name)
        run_fields = ["dataset_type=synthetic", f"base_output_directory={folder}", "run_name=count", "jax_cache_dir="]
        _run([str(args.python), str(_SCRIPT), str(folder), *run_fields, *settings])
        found = json.loads((folder / "step.json").read_text())
        peak_bytes = buffers.read_dump(folder / found["dump"]).live_bytes
        module = Module((folder / "hlo.txt").read_text())
    about = StepInfo(
        name=f"MaxText {found['versions']['maxtext']} {fields['model_name']}",
        target=target.name,
        accelerator=target.spec.name,
        settings=settings,
        tokens=tokens,
        model_flops=flops_per_token * tokens,
        peak_bytes=peak_bytes,
        compile_seconds=found["compile_seconds"],
        versions=found["versions"],
    )
    return CompiledStep(about, [StepProgram(module, 1)])


def _run(command: list[str]) -> None:
    """Run MaxText.

    Raises:
        UsageError: MaxText failed; the message has its last line of output.
    """
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("PYTHONPATH", None)  # Plimsoll's own packages may not work in that environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word of why"]
        raise cli.UsageError(f"MaxText's train_compile failed: {lines[-1]}")


if __name__ == "__main__":
    sys.exit(main())
