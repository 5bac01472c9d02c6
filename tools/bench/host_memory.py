"""Compare predicted and measured host memory of whole runs on this machine: train, save, evaluate, resume.

    python -m tools.bench.host_memory [NAME ...] [--json=FILE]

Each row is a run in processes of its own. It trains some steps and saves, and resumes for some more. The prediction is
the one that the run makes before its first step; the measurement is the highest resident memory of the process (VmHWM),
as the run records it in WORKDIR/health. Then the run is started with a limit of 3% less than predicted
(--host_memory_gib), which must be refused before anything is compiled. For a prediction that is too low or more than 5%
too high, the phases of the run are printed to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.framework.terminal.tables import human_bytes
from tools.bench.workers import ROOT

GIB = 1 << 30
# A transformer of 151M parameters, with 1.69 GiB of state.
_LARGE = (
    "--config=nanogpt-cpu",
    "--config.model.dim=1024",
    "--config.model.stack.num_layers=12",
    "--config.model.stack.pattern.0.mlp.hidden=4096",
    "--config.data.seq_len=16",
    "--config.data.global_batch_size=8",
)
# The width of the configs "*-tiny", for a state of about 1 GiB.
_WIDE = ("--config.model.dim=1536", "--config.data.seq_len=64", "--config.data.global_batch_size=8")
_SAVES = (
    "--config.trainer.save_every=2",
    "--config.trainer.eval_every=2",
    "--config.trainer.eval_batches=2",
    "--config.trainer.log_every=1",
    "--config.trainer.sample_tokens=4",
)
_NARROW = "--config.checkpoint.window_gib=0.0625"


@dataclass(frozen=True)
class Shape:
    """A kind of run.

    Attributes:
        flags: flags of `plimsoll train`.
        devices: number of CPU devices of each process.
        processes: number of processes.
    """

    flags: tuple[str, ...]
    devices: int = 1
    processes: int = 1


SHAPES = {
    "one device, window of 64 MiB": Shape((*_LARGE, _NARROW)),
    "one device, saves copy": Shape(_LARGE),
    "state offloaded, streamed": Shape(
        (*_LARGE, _NARROW, "--config.memory.optimizer_state=pinned_host", "--config.memory.update=streamed")
    ),
    "separate layers, all offloaded": Shape(
        (
            *_LARGE,
            _NARROW,
            "--config.memory.update=layer_programs",
            "--config.memory.remat=full",
            "--config.memory.optimizer_state=pinned_host",
            "--config.memory.parameters=pinned_host",
            "--config.memory.gradients=pinned_host",
        )
    ),
    "8 devices, fsdp": Shape((*_LARGE, _NARROW, "--config.mesh.fsdp=8"), devices=8),
    "two processes, fsdp": Shape((*_LARGE, _NARROW, "--config.mesh.fsdp=2"), processes=2),
    "LoRA, base offloaded": Shape(
        (
            "--config=lora-tiny",
            *_WIDE,
            "--config.model.stack.num_layers=24",
            "--config.memory.parameters=pinned_host",
            "--config.memory.update=streamed",
            _NARROW,
        )
    ),
    "DPO, reference offloaded": Shape(
        (
            "--config=dpo-tiny",
            *_WIDE,
            "--config.model.stack.num_layers=8",
            "--config.batch_transform.kind=offloaded",
            _NARROW,
        )
    ),
    "mixture of experts": Shape(
        ("--config=moe-tiny", "--config.model.dim=768", "--config.model.stack.num_layers=12", _NARROW)
    ),
    "flow": Shape(
        (
            "--config=digits-glow",
            "--config.model.stacks.0.pattern.2.net.hidden=2048",
            "--config.model.stacks.1.pattern.2.net.hidden=2048",
            "--config.data.global_batch_size=8",
            _NARROW,
        )
    ),
}


@dataclass(frozen=True)
class Row:
    """A measured run; bytes of the process that needs the most.

    Attributes:
        name: name of its shape.
        predicted_bytes: prediction at the start.
        measured_bytes: highest resident memory of training, and of resuming.
        resumed_bytes: the same of the resumed run.
        is_refused: whether a limit of 3% less was refused before anything was compiled.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int
    resumed_bytes: int
    is_refused: bool

    def line(self) -> str:
        """Return the row of the Markdown table."""
        highest = max(self.measured_bytes, self.resumed_bytes)
        cells = [
            self.name,
            *map(human_bytes, (self.predicted_bytes, self.measured_bytes, self.resumed_bytes)),
            f"{100 * (self.predicted_bytes / highest - 1):+.1f}%",
            "exit 4" if self.is_refused else "NOT REFUSED",
        ]
        return f"| {' | '.join(cells)} |"


def run(shape: Shape, workdir: Path, *flags: str) -> tuple[int, str]:
    """Run `plimsoll train` and return its exit code and its output."""
    arguments = ["train", *shape.flags, *_SAVES, f"--workdir={workdir}", *flags]
    if shape.processes > 1:
        arguments = ["local", f"--processes={shape.processes}", *arguments[1:]]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={shape.devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "plimsoll", *arguments]
    done = subprocess.run(command, env=environment, cwd=workdir.parent, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def read_peaks(workdir: Path) -> tuple[int, int]:
    """Return the predicted and the measured peak of the process that needs the most."""
    facts = [json.loads(path.read_text()) for path in sorted((workdir / "health").glob("process-*.json"))]
    most = max(facts, key=lambda process: process["rss_peak_bytes"])
    return most["rss_predicted_bytes"], most["rss_peak_bytes"]


def is_close(predicted_bytes: int, measured_bytes: int) -> bool:
    """Return whether the prediction is at least what was measured, and at most 5% more."""
    return 1 <= predicted_bytes / measured_bytes <= 1.05


def find_phases(text: str) -> str:
    """Return the tables of predicted and measured memory by phase from the output of a run."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if re.search(r"(host|device), \w+ .*iB", line))


def measure(name: str) -> Row:
    """Measure one shape.

    Raises:
        RuntimeError: a run failed; the message has the end of its output.
    """
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        # The first run compiles everything, whatever has been compiled on this machine.
        programs = f"--config.trainer.compilation_cache={folder}/programs"
        peaks = []
        for steps in (4, 6):
            code, text = run(shape, workdir, programs, f"--config.trainer.max_steps={steps}")
            if code:
                raise RuntimeError(f"{name}: exit code {code}\n{text[-2000:]}")
            peaks.append(read_peaks(workdir))
            if not is_close(*peaks[-1]):
                print(f"{name}, {steps} steps\n{find_phases(text)}", file=sys.stderr, flush=True)
        (predicted, measured), (_, resumed) = peaks
        limit_gib = 0.97 * shape.processes * predicted / GIB
        steps = "--config.trainer.max_steps=4"
        code, text = run(shape, workdir.with_name("refused"), programs, steps, f"--host_memory_gib={limit_gib}")
        is_refused = code == 4 and not re.search(r"^compiling", text, re.MULTILINE)
    return Row(name, predicted, measured, resumed, is_refused)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the shapes and print a Markdown table; returns 1 if a prediction was too low or more than 5% too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes; default: all of " + ", ".join(SHAPES))
    parser.add_argument("--json", type=Path, help="file for the rows, one JSON object a line")
    args = parser.parse_args(arguments)
    print("| run | predicted | measured | resumed | predicted / measured | with 3% less |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in args.names or SHAPES:
        try:
            row = measure(name)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            continue
        rows.append(row)
        print(row.line(), flush=True)
        if args.json:
            args.json.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    bad = [
        row
        for row in rows
        if not is_close(row.predicted_bytes, max(row.measured_bytes, row.resumed_bytes)) or not row.is_refused
    ]
    return 1 if bad or len(rows) < len(args.names or SHAPES) else 0


if __name__ == "__main__":
    sys.exit(main())
