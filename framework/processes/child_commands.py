"""Runs other commands of Plimsoll as child processes that end with this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from plimsoll.framework.processes.health import read
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.exit_codes import COMPLETED, STOPPED, describe_exit_code
from plimsoll.framework.terminal.kill_with_parent import kill_with_parent
from plimsoll.framework.terminal.phases import SHORT, phase

# Seconds between two calls of `while_running`.
_INTERVAL = 1.0


def run_verb(verb: str, *flags: str) -> int:
    """Run `plimsoll VERB` on this machine; returns its exit code, 128 + n if signal n killed it."""
    return run_command(["-m", "plimsoll", verb, *flags])


def run_training(
    words: Sequence[str], workdir: Path, label: str, *, environment: Mapping[str, str] | None = None
) -> int:
    """Train in a process of its own, with its output in WORKDIR.log, and show its progress.

    Args:
        words: words after `python`.
        workdir: workdir of the run.
        label: name of the run in messages.
        environment: environment variables of the process; None for those of this one.

    Returns:
        Its exit code.
    """
    log = workdir.with_name(f"{workdir.name}.log")
    with open(log, "ab") as output, phase(f"training {label}", patience=SHORT) as training:

        def show_progress() -> None:
            facts = read(workdir / "health" / "process-00000.json") or {}
            step, max_steps = facts.get("step"), facts.get("max_steps")
            if isinstance(step, int) and isinstance(max_steps, int):
                training.progress(step, max_steps)

        code = run_command(words, output=output, while_running=show_progress, environment=environment)
    if code in (*COMPLETED, *STOPPED):
        print(f"  {describe_exit_code(code)}", flush=True)
    else:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        reason = errors[-1] if errors else lines[-1] if lines else "no output"
        print(f"  exit code {code} ({describe_exit_code(code)}): {reason}; see {log}", flush=True)
    return code


def run_command(
    words: Sequence[str],
    *,
    output: IO[bytes] | None = None,
    while_running: Callable[[], object] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run Python on this machine.

    Args:
        words: words after `python`.
        output: file for its stdout and stderr; None for those of this process.
        while_running: called about once per second until it ends.
        environment: environment variables of the process; None for those of this one.

    Returns:
        Its exit code, 128 + n if signal n killed it.
    """
    # Flush first, so that this process's output precedes the command's, even if it goes to a file.
    sys.stdout.flush()
    # In its own session it receives Ctrl-C once, from here, and saves first. It is killed with this process, so that
    # a repeated command finds its workdir free.
    stderr = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(
        [sys.executable, *words],
        start_new_session=True,
        preexec_fn=kill_with_parent,
        stdout=output,
        stderr=stderr,
        env=environment,
    )

    def pass_on(number: int) -> None:
        process.send_signal(number)

    with interrupts.listen_for_signals(pass_on):
        while True:
            try:
                code = process.wait(timeout=_INTERVAL)
                break
            except subprocess.TimeoutExpired:
                while_running()
    return code if code >= 0 else 128 - code
