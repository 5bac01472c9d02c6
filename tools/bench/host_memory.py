"""Compare predicted and measured host memory of whole runs on this machine: train, save, evaluate, resume.

    python -m tools.bench.host_memory [NAME ...] [--json=FILE]

Each row is a run in processes of its own. It trains some steps and saves, and resumes for some more. The prediction is
the one that the run makes before its first step; the measurement is the highest resident memory of the process (VmHWM),
as the run records it in WORKDIR/health. Then the run is started with a limit of 3% less than predicted
(--host_memory_gib), which must be refused before anything is compiled. At last it runs in a control group whose memory
limit is 3% more than predicted, where the kernel kills what needs more: it is killed within its second save (SIGKILL),
resumed, and exported. Only root may create control groups. For a prediction that is too low or more than 5% too high,
the phases of the run are printed to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.framework.terminal.tables import human_bytes
from tools.bench.workers import ROOT

GIB = 1 << 30
# Roots of the control groups that limit memory, and the files of the limit, for cgroup versions 1 and 2.
_CGROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
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
        has_export: whether transformers has the model's architecture.
    """

    flags: tuple[str, ...]
    devices: int = 1
    processes: int = 1
    has_export: bool = True


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
        ),
        has_export=False,
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
        confined: what happened in a control group with 3% more: "ran", "not run", or the command that failed.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int
    resumed_bytes: int
    is_refused: bool
    confined: str

    def line(self) -> str:
        """Return the row of the Markdown table."""
        highest = max(self.measured_bytes, self.resumed_bytes)
        cells = [
            self.name,
            *map(human_bytes, (self.predicted_bytes, self.measured_bytes, self.resumed_bytes)),
            f"{100 * (self.predicted_bytes / highest - 1):+.1f}%",
            "exit 4" if self.is_refused else "NOT REFUSED",
            self.confined,
        ]
        return f"| {' | '.join(cells)} |"


def start(shape: Shape, verb: str, *arguments: str, workdir: Path, group: Path | None = None) -> subprocess.Popen[str]:
    """Start a command in a session of its own; its output goes to WORKDIR.out.

    Args:
        shape: the kind of run.
        verb: `train` or `export`.
        arguments: arguments of the command, without --workdir.
        workdir: folder of the run.
        group: the control group that it runs in.
    """
    command = [verb, *arguments]
    if verb == "train":
        command = ["train", *shape.flags, *_SAVES, *arguments]
        if shape.processes > 1:
            command = ["local", f"--processes={shape.processes}", *command[1:]]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={shape.devices}",
        "PYTHONPATH": str(ROOT),
    }

    def enter() -> None:
        if group:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    with open(f"{workdir}.out", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "plimsoll", *command, f"--workdir={workdir}"],
            env=environment,
            cwd=workdir.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=enter,
        )


def run(shape: Shape, verb: str, *arguments: str, workdir: Path, group: Path | None = None) -> tuple[int, str]:
    """Run a command as `start` does, and return its exit code and its output."""
    code = start(shape, verb, *arguments, workdir=workdir, group=group).wait()
    return code, Path(f"{workdir}.out").read_text()


def create_group(limit_bytes: int) -> Path | None:
    """Create a control group with a memory limit; None where that is not allowed."""
    for root, limit_name in _CGROUPS:
        group = root / f"plimsoll-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_name).write_text(str(limit_bytes))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


@contextmanager
def limit_memory(limit_bytes: int) -> Iterator[Path | None]:
    """Create a control group with a memory limit, or None, and remove it at the end."""
    group = create_group(limit_bytes)
    try:
        yield group
    finally:
        if group:
            # Processes that were killed leave their group after a moment.
            time.sleep(1)
            group.rmdir()


def run_confined(shape: Shape, workdir: Path, limit_bytes: int) -> str:
    """Run a shape in a control group: kill it within its second save, resume it, and export.

    Returns:
        "ran", "not run", or the command that failed with its exit code.
    """
    train = (f"--config.trainer.compilation_cache={workdir}-programs", "--config.trainer.max_steps=6")
    with limit_memory(limit_bytes) as group:
        if group is None:
            return "not run"
        process = start(shape, "train", *train, workdir=workdir, group=group)
        # The save of step 2 is there to resume from.
        while not list((workdir / "checkpoints").glob("00000004*")):
            if process.poll() is not None:
                print(Path(f"{workdir}.out").read_text()[-2000:], file=sys.stderr)
                return f"train: exit {process.returncode} before the second save"
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        resume = ("train", *train)
        export = ("export", f"--to={workdir}-exported")
        for verb, *arguments in (resume, export) if shape.has_export else (resume,):
            code, text = run(shape, verb, *arguments, workdir=workdir, group=group)
            if code:
                print(text[-2000:], file=sys.stderr)
                return f"{verb}: exit {code}"
    return "ran"


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
            code, text = run(shape, "train", programs, f"--config.trainer.max_steps={steps}", workdir=workdir)
            if code:
                raise RuntimeError(f"{name}: exit code {code}\n{text[-2000:]}")
            peaks.append(read_peaks(workdir))
            if not is_close(*peaks[-1]):
                print(f"{name}, {steps} steps\n{find_phases(text)}", file=sys.stderr, flush=True)
        (predicted, measured), (_, resumed) = peaks
        limit_gib = 0.97 * shape.processes * predicted / GIB
        steps = "--config.trainer.max_steps=4"
        refused = workdir.with_name("refused")
        code, text = run(shape, "train", programs, steps, f"--host_memory_gib={limit_gib}", workdir=refused)
        is_refused = code == 4 and not re.search(r"^compiling", text, re.MULTILINE)
        confined = run_confined(shape, workdir.with_name("confined"), int(1.03 * shape.processes * predicted))
    return Row(name, predicted, measured, resumed, is_refused, confined)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the shapes and print a Markdown table; returns 1 if a prediction was too low or more than 5% too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes; default: all of " + ", ".join(SHAPES))
    parser.add_argument("--json", type=Path, help="file for the rows, one JSON object a line")
    args = parser.parse_args(arguments)
    print("| run | predicted | measured | resumed | predicted / measured | with 3% less | with 3% more |")
    print("|---|---|---|---|---|---|---|", flush=True)
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
        if not is_close(row.predicted_bytes, max(row.measured_bytes, row.resumed_bytes))
        or not row.is_refused
        or row.confined not in ("ran", "not run")
    ]
    return 1 if bad or len(rows) < len(args.names or SHAPES) else 0


if __name__ == "__main__":
    sys.exit(main())
