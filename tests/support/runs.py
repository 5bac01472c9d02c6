"""Runs `plimsoll train` on a small text, in this process and in others."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.launch.train import main

CONFIG = str(Path(__file__).parent / "tiny.py")
LONG = ("--config.trainer.max_steps=120", "--config.trainer.save_every=20")
ROOT = Path(__file__).parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while other words pass by in no order"


def write_text(folder: Path) -> Path:
    """Write train.txt and valid.txt, and set $TINY_TEXT to their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = WORDS.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 160)]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "valid.txt").write_text("\n".join(lines[7::20]))
    os.environ["TINY_TEXT"] = str(folder)
    return folder


def train(workdir: Path | str, *flags: str, config: str = "tiny", file: str = CONFIG) -> int:
    """Run `plimsoll train` in this process and return the exit code."""
    return main([f"--config={file}:{config}", f"--workdir={workdir}", *flags])


TRAIN = ("-m", "plimsoll", "train")


def command(
    workdir: Path | str, *flags: str, config: str = "tiny", file: str = CONFIG, program: Sequence[str] = TRAIN
) -> list[str]:
    """Return the command line of a run in a separate process; `program` is the part between python and the flags."""
    return [sys.executable, *program, f"--config={file}:{config}", f"--workdir={workdir}", *flags]


def xla_flags(devices: int = 1) -> str:
    """Return XLA_FLAGS for a process with this many CPU devices that compiles as cheaply as the suite (conftest.py)."""
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])


def start(workdir: Path | str, *flags: str, devices: int = 1, out: Path | None = None, **kind: Any) -> subprocess.Popen:
    """Start a run in a separate process with `devices` CPU devices.

    Output goes to `out`, or to WORKDIR.out. `kind` is passed on to `command`.
    """
    environment = {**os.environ, "XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with open(out or f"{workdir}.out", "a") as stream:
        return subprocess.Popen(
            command(workdir, *flags, **kind), cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )


def start_several(
    workdir: Path | str,
    count: int,
    *flags: str,
    devices: int = 1,
    programs: Mapping[int, Sequence[str]] = {},
    **kind: Any,
) -> list[subprocess.Popen]:
    """Start the `count` processes of one run, with `devices` devices each.

    `programs` maps process ids to programs that run instead of `plimsoll train`.
    """
    where = (f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}")
    return [
        start(workdir, *where, f"--process_id={i}", *flags, devices=devices, program=programs.get(i, TRAIN), **kind)
        for i in range(count)
    ]


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pair(workdir: Path, *flags: str, **kind: str) -> list[subprocess.Popen]:
    """Start the two processes of one run, with two devices each; `kind` is passed on to `command`."""
    return start_several(workdir, 2, *flags, devices=2, **kind)


def output(workdir: Path) -> str:
    """Return the output of the processes of a run."""
    return Path(f"{workdir}.out").read_text(errors="replace")


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait until `what()` returns a true value, and return it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def rows(workdir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, without one that is still being written."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(workdir: Path) -> dict[int, float]:
    """Return the training loss by step."""
    return {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}
