"""Runs of `plimsoll train` in this process and in others, on a little text."""

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

from launch.train import main

CONFIG = str(Path(__file__).parent / "tiny.py")
LONG = ("--config.trainer.max_steps=120", "--config.trainer.save_every=20")
ROOT = Path(__file__).parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while other words pass by in no order"


def write_text(folder: Path) -> Path:
    """train.txt and valid.txt, and $TINY_TEXT says where."""
    folder.mkdir(parents=True, exist_ok=True)
    words = WORDS.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 160)]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "valid.txt").write_text("\n".join(lines[7::20]))
    os.environ["TINY_TEXT"] = str(folder)
    return folder


def train(workdir: Path | str, *flags: str, config: str = "tiny", file: str = CONFIG) -> int:
    """`plimsoll train` in this process; the exit code."""
    return main([f"--config={file}:{config}", f"--workdir={workdir}", *flags])


TRAIN = ("-m", "launch.train")


def command(
    workdir: Path | str, *flags: str, config: str = "tiny", file: str = CONFIG, program: Sequence[str] = TRAIN
) -> list[str]:
    """The command line of a run in a process of its own; `program` is what python is given before the flags."""
    return [sys.executable, *program, f"--config={file}:{config}", f"--workdir={workdir}", *flags]


def xla_flags(devices: int = 1) -> str:
    """Return XLA_FLAGS for a process with this many CPU devices that compiles as cheaply as the suite (conftest.py)."""
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])


def start(workdir: Path | str, *flags: str, devices: int = 1, out: Path | None = None, **kind: Any) -> subprocess.Popen:
    """A run in a process of its own, on so many CPU devices; output goes to `out`, or WORKDIR.out. `kind` as for
    `command`."""
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    with open(out or f"{workdir}.out", "a") as stream:
        return subprocess.Popen(
            command(workdir, *flags, **kind), cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )


def several(
    workdir: Path | str,
    count: int,
    *flags: str,
    devices: int = 1,
    programs: Mapping[int, Sequence[str]] = {},
    **kind: Any,
) -> list[subprocess.Popen]:
    """The processes of one run, with so many devices each. `programs`: what some run instead of `plimsoll train`."""
    where = (f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}")
    return [
        start(workdir, *where, f"--process_id={i}", *flags, devices=devices, program=programs.get(i, TRAIN), **kind)
        for i in range(count)
    ]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pair(workdir: Path, *flags: str, **kind: str) -> list[subprocess.Popen]:
    """Two processes of one run, with two devices each; `kind` as for `command`."""
    return several(workdir, 2, *flags, devices=2, **kind)


def output(workdir: Path) -> str:
    """What its processes have printed."""
    return Path(f"{workdir}.out").read_text(errors="replace")


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """What `what()` gives as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def rows(workdir: Path) -> list[dict]:
    """The rows of metrics.jsonl, but for one that is being written."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(workdir: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}
