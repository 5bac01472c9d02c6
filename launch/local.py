"""Run a training in several processes on this machine, and start all of them again when one dies.

    python -m launch.local --config=gpt2-124m --workdir=runs/a --gpus=all
    python -m launch.local --config=stdlib-tiny --workdir=runs/b --processes=4 --devices_per_process=2

When a process dies, the others get --grace seconds to end by themselves; then all start again from the last checkpoint:
at once if there is a new one, else after a growing wait, --max_restarts times in a row. Exit codes are launch.train's.
0, 2, 3, 4, 130 and 143 are final; else it is that of the process which failed first, 128 + n if signal n killed it.
SIGTERM and SIGINT are passed on, the second one kills. SIGTERM to a single process stops all of them, after saving.
"""

import contextlib
import ctypes
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from framework.checkpoint_directory import scan
from launch import cli, commands

AS_IT_SHOULD = (0, *commands.STOPPED)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@cli.main
def main(argv: list[str]) -> int:
    """Checks everything, then supervises until the run is over."""
    parser = commands.Parser("local", __doc__)
    add = parser.add_argument
    add("--processes", type=int, metavar="N", help="how many; default: one for each GPU of --gpus, else 1")
    add("--devices_per_process", type=int, metavar="K", help="run on CPU, with so many devices in each process")
    add("--gpus", metavar="all|0,1,...", help="run on these GPUs, divided among the processes")
    add("--grace", type=float, default=10.0, metavar="S", help="when one dies, the others have so many seconds to end")
    add("--backoff", type=float, default=1.0, metavar="S", help="wait before a second restart, doubled up to 60 s")
    add("--max_restarts", type=int, default=5, metavar="K", help="without a new checkpoint in between; then give up")
    args, words = parser.parse_job(argv)
    environments = _environments(args.processes, args.devices_per_process, args.gpus)
    if args.dry_run:
        for index, environment in enumerate(environments):
            line = _line(words, "127.0.0.1:PORT", len(environments), index)
            print(*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(line))
        return 0
    checkpoints = Path(args.workdir or f"runs/{args.run_name}", "checkpoints").expanduser()
    supervisor = Supervisor(words, environments, lambda: max(scan(checkpoints)[0], default=-1))
    return supervisor.run(args.grace, args.backoff, args.max_restarts)


def _environments(processes: int | None, devices: int | None, gpus: str | None) -> list[dict[str, str]]:
    """What each process's environment has besides the launcher's own."""
    if any(value is not None and value < 1 for value in (processes, devices)):
        raise cli.UsageError("--processes and --devices_per_process: expected 1 or more")
    if gpus is None:
        if (processes or 1) == 1 and devices is None:
            return [{}]  # one process, on whatever JAX finds
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices or 1}"
        return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}] * (processes or 1)
    if devices is not None:
        raise cli.UsageError("--devices_per_process is for CPU; --gpus are divided evenly among --processes")
    names = gpus.split(",")
    if gpus == "all" and not (names := list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))):
        listed = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], stdout=PIPE, text=True)
        names = listed.stdout.split() if listed.returncode == 0 else []
    share, rest = divmod(len(names), processes or len(names) or 1)
    if not all(names) or len(set(names)) < len(names) or rest or not share:
        raise cli.UsageError(f"--gpus={gpus}: {names} are not distinct, or not divisible by --processes={processes}")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i : i + share])} for i in range(0, len(names), share)]


def _line(words: list[str], coordinator: str, count: int, index: int) -> list[str]:
    place = [f"--coordinator={coordinator}", f"--num_processes={count}", f"--process_id={index}"]
    return [sys.executable, "-m", "launch.train", *words, *(place if count > 1 else [])]


class Supervisor:
    """The processes of one run: `words` follow launch.train, `environments` are what each adds to the launcher's own,
    `committed()` is the step of the newest checkpoint."""

    def __init__(self, words: list[str], environments: list[dict[str, str]], committed: Callable[[], int]):
        self.words, self.environments, self.committed = words, environments, committed
        self.stopped = 0  # the signal that ends the run
        self.alive: dict[int, Popen[bytes]] = {}
        self._events = queue.SimpleQueue[tuple[int, int | None]]()  # (process, its code), or (signal, None)

    def run(self, grace: float, backoff: float, max_restarts: int) -> int:
        """Until the run is over; the exit code. Times in seconds."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._events.put((number, None)))
        fruitless, more = 0, list[str]()
        try:
            while not self.stopped:
                before = self.committed()
                self._start([*self.words, *more])
                code, told = self._watch(grace)
                fruitless = 1 if self.committed() > before else fruitless + 1
                if code in commands.FINAL or self.stopped or fruitless > max_restarts:
                    _say(told)
                    return code
                wait = min(60.0, backoff * 2 ** (fruitless - 2)) if fruitless > 1 else 0.0
                _say(f"{told}; restart {fruitless} of {max_restarts} in {wait:g} s")
                self._next(time.monotonic() + wait)
                more = ["--resume=auto"]  # also where the first start was to be --resume=never
            return 128 + self.stopped
        finally:
            self._send(signal.SIGKILL, os.killpg)

    def _start(self, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        launcher, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

        def begin() -> None:  # in the child
            os.setsid()  # a terminal's Ctrl-C comes to the launcher alone
            if prctl is not None:  # Linux; elsewhere a launcher that is killed leaves its processes behind
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)

        for i, more in enumerate(self.environments):
            line = _line(words, coordinator, len(self.environments), i)
            env = {**os.environ, "PYTHONUNBUFFERED": "1", **more}
            self.alive[i] = Popen(line, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, preexec_fn=begin)
            threading.Thread(target=self._follow, args=(i, self.alive[i]), daemon=True).start()
        _say(f"started, pids {' '.join(str(child.pid) for child in self.alive.values())}")

    def _follow(self, index: int, child: Popen[bytes]) -> None:
        """Passes on what a process prints, and tells of its end, when what it had started is gone too."""
        printing = threading.Thread(target=_pass_on, args=(child, index), daemon=True)
        printing.start()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped, its group's number stays its own
        os.killpg(child.pid, signal.SIGKILL)
        printing.join(timeout=10.0)
        self._events.put((index, child.wait()))

    def _next(self, deadline: float | None) -> tuple[int, int] | None:
        """The next process that ends, with its code; None at the deadline, or if a signal finds none to wait for."""
        with contextlib.suppress(queue.Empty):
            while True:
                one, code = self._events.get(timeout=deadline and max(0.0, deadline - time.monotonic()))
                if code is not None:
                    return one, code
                if self.stopped:
                    raise SystemExit(128 + one)
                self.stopped = one
                _say(f"{signal.Signals(one).name} passed on: the processes save and stop; a second one kills them")
                self._send(one)
                if not self.alive:
                    break
        return None

    def _watch(self, grace: float) -> tuple[int, str]:
        """Until all have ended: the exit code of the one that is to blame, and in words what happened."""
        ended: dict[int, int] = {}  # the code of each that ended by itself, as subprocess has it
        at = deadline = killed = None
        while self.alive:
            if (event := self._next(deadline)) is None:
                self._send(signal.SIGKILL, os.killpg)  # also ends what is stopped
                deadline, killed = None, True
                continue
            del self.alive[event[0]]
            if not killed:
                ended[event[0]] = event[1]
            if at is None and event[1] not in AS_IT_SHOULD:
                at, deadline = datetime.now(), time.monotonic() + grace
        # Who ends because another is gone (5) is not to blame, nor who ends as it should.
        index, code = min(ended.items(), key=lambda one: (one[1] == 0, one[1] in AS_IT_SHOULD, one[1] == 5))
        told = f"process {index} {commands.meaning(code)}"
        if at is not None:
            others = [str(ended.get(i, "killed")) for i in range(len(self.environments)) if i != index] or ["none"]
            seconds = (datetime.now() - at).total_seconds()
            told += f" at {at:%H:%M:%S.%f}; all gone {seconds:.1f} s later (others: {', '.join(others)})"
        return (code if code >= 0 else 128 - code), told

    def _send(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        for child in self.alive.values():
            with contextlib.suppress(ProcessLookupError):
                send(child.pid, number)


def _pass_on(child: Popen[bytes], index: int) -> None:
    for line in child.stdout or ():
        _say(line.decode(errors="replace").removesuffix("\n"), str(index), 31 + index % 6)


def _say(line: str, who: str = "local", colour: int = 1) -> None:
    """A whole line, at once; if nobody reads any more, to nowhere: the training goes on."""
    try:
        sys.stdout.write(f"\033[{colour}m[{who}]\033[0m {line}\n" if sys.stdout.isatty() else f"[{who}] {line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
