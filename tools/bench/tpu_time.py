"""Time of a training step on a TPU, by the compiler's cost estimates of the final program. Needs no TPU.

    python -m tools.bench.tpu_time v5e-16 --config=llama2-7b --config.data.seq_len=2048 --config.memory.remat=full
    python -m tools.bench.tpu_time v5e-16 --config=... --save build/before     # keeps the compiled text
    python -m tools.bench.tpu_time --program build/before --top 40 --category matmul
    python -m tools.bench.tpu_time v5e-16 --config=... --against build/before  # two steps side by side

Nothing runs: the TPU compiler annotates each fusion of the final program with an estimate of its cycles. This tool adds
them up, together with all data movement: between memory and the cores, between chips, and to and from the host.
Assumptions for parts that the compiler does not estimate are printed above the figures. Compiling for a target takes
minutes; a saved program is counted in a second. For MaxText's step by the same count, see
tools/bench/tpu_time_maxtext.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.plan.step_time import TpuRates, count
from plimsoll.framework.plan.step_time.work_categories import WorkCategory
from plimsoll.framework.terminal.tables import render
from plimsoll.launch import cli
from tools.bench import tpu_tables
from tools.bench.step_programs import CompiledStep, add_arguments, load, load_or_compile_step
from tools.bench.tpu_figures import CountedStep, as_json


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "v5e-16, v5p-128, v6e-8")
    add = parser.add_argument
    add("--top", type=int, default=25, metavar="N", help="number of largest operations to show; default 25")
    add(
        "--category",
        choices=get_args(WorkCategory),
        metavar="NAME",
        help=f"show only operations of this category: {', '.join(get_args(WorkCategory))}",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


@cli.main
def main(argv: list[str]) -> int:
    """Compile or read a step, print its count, and write the files."""
    spec, overrides, rest = cli.split(argv)
    args = _parser().parse_args(rest)
    if args.json and not args.json.absolute().parent.is_dir():
        raise cli.UsageError(f"--json={args.json}: the folder {args.json.absolute().parent} does not exist")
    other = count_step(load(args.against)) if args.against else None
    step = load_or_compile_step(args, spec, overrides, check=TpuRates.look_up)
    this = count_step(step)
    tables = tpu_tables.sections(this, args.top, args.category)
    if other is not None:
        tables.append(tpu_tables.comparison(this, other, str(args.program or args.target), str(args.against)))
    print(render(tables), end="")
    if args.json:
        with writing(args.json):
            args.json.write_text(json.dumps(as_json(this), indent=1) + "\n")
    return 0


def count_step(step: CompiledStep) -> CountedStep:
    """Count a step with the rates of the accelerator that it was compiled for."""
    return CountedStep(step.about, count(step.parts, TpuRates.look_up(spec_for(step.about.accelerator))))


if __name__ == "__main__":
    sys.exit(main())
