"""Runs of `launch.train` in this process and in others, on a little text."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

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


def train(workdir: Path | str, *flags: str, config: str = "tiny") -> int:
    """`launch.train` in this process; the exit code."""
    return main([f"--config={CONFIG}:{config}", f"--workdir={workdir}", *flags])


def command(workdir: Path | str, *flags: str, config: str = "tiny", file: str = CONFIG) -> list[str]:
    """The command line of a run in a process of its own."""
    return [sys.executable, "-m", "launch.train", f"--config={file}:{config}", f"--workdir={workdir}", *flags]


def start(
    workdir: Path | str,
    *flags: str,
    config: str = "tiny",
    devices: int = 1,
    file: str = CONFIG,
    out: Path | None = None,
) -> subprocess.Popen:
    """A run in a process of its own, on so many CPU devices; output goes to `out`, or WORKDIR.out."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    with open(out or f"{workdir}.out", "a") as stream:
        return subprocess.Popen(
            command(workdir, *flags, config=config, file=file),
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def pair(workdir: Path, *flags: str, **kind: str) -> list[subprocess.Popen]:
    """Two processes of one run, with two devices each; `kind` as for `start`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
    return [start(workdir, *where, f"--process_id={i}", *flags, devices=2, **kind) for i in range(2)]


def rows(workdir: Path) -> list[dict]:
    """The rows of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(workdir: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}
