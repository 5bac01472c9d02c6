"""Run a training in several processes on this machine, and start all of them again when one dies.

    python -m launch.local --config=gpt2-124m --workdir=runs/a --gpus=all
    python -m launch.local --config=stdlib-tiny --workdir=runs/b --processes=4 --devices_per_process=2

The processes are forks of one that has imported everything, which makes starts, and above all restarts, quick. When
one dies, the others get --grace seconds to end; then all start again from the last checkpoint: at once if there is a
new one, else after a growing wait. The exit code is launch.train's, of the process that failed first (128 + n: signal n
killed it). SIGTERM and SIGINT are passed on, the second one kills; SIGTERM to a single process stops all of them.
"""

import contextlib
import importlib
import multiprocessing
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from framework.checkpoint.directory import folder, scan
from framework.terminal import interrupts
from launch import cli, commands


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
            line = [*words, *_place("127.0.0.1:PORT", len(environments), index)]
            line = [sys.executable, "-m", "launch.train", *line]
            print(*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(line))
        return 0
    newest = partial(_newest, os.path.expanduser(args.workdir or f"runs/{args.run_name}"))
    return Supervisor(words, environments, newest).run(args.grace, args.backoff, args.max_restarts)


def _newest(workdir: str) -> int:
    with contextlib.suppress(OSError, ValueError):  # a store may not answer
        return max(scan(folder(f"{workdir}/checkpoints"))[0], default=-1)
    return -1


def _environments(processes: int | None, devices: int | None, gpus: str | None) -> list[dict[str, str]]:
    """What each process's environment has besides the launcher's own."""
    if any(value is not None and value < 1 for value in (processes, devices)) or (gpus and devices):
        raise cli.UsageError("--processes, --devices_per_process: expected 1 or more; the latter is not for --gpus")
    if gpus is None:
        if (processes or 1) == 1 and devices is None:
            return [{}]  # one process, on whatever JAX finds
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices or 1}"
        return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}] * (processes or 1)
    names = _gpus() if gpus == "all" else gpus.split(",")
    share, rest = divmod(len(names), processes or len(names))
    if rest or not share or len({*names}) < len(names) or not all(name.replace("-", "").isalnum() for name in names):
        what = f"{', '.join(names)!r} are not distinct GPUs, or not divisible by --processes"
        raise cli.UsageError(f"--gpus={gpus}: {what}")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i : i + share])} for i in range(0, len(names), share)]


def _gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or that the driver finds. Raises UsageError: there are none."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    advice = "--devices_per_process=K runs on CPU"
    if shutil.which(words[0]) is None:
        raise cli.UsageError(f"--gpus=all: this machine has no GPUs (there is no {words[0]}); {advice}")
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    if asked.returncode or not asked.stdout.split():
        said = (asked.stdout + asked.stderr).strip().partition("\n")[0]
        raise cli.UsageError(f"--gpus=all: no GPU was found; {words[0]} says {said!r}; {advice}")
    return asked.stdout.split()


def _place(coordinator: str, count: int, index: int) -> list[str]:
    place = [f"--coordinator={coordinator}", f"--num_processes={count}", f"--process_id={index}"]
    return place if count > 1 else []


def _begin(verb: str, words: list[str], environment: dict[str, str], out: Connection) -> None:
    """One process of the run, in a fork of the server. Ends with the exit code of the verb, a module."""
    os.setsid()  # a terminal's Ctrl-C comes to the launcher alone
    interrupts.begin()
    from launch import leash  # not above: the launcher itself goes on when its shell ends

    leash.tie()
    os.environ.update(environment)  # what is read when a backend starts; that JAX is imported does no harm
    for descriptor in (1, 2):
        os.dup2(out.fileno(), descriptor)
    out.close()
    sys.argv = [verb, *words]
    sys.exit(importlib.import_module(verb).main())


class Supervisor:
    """Runs `launch.train *words` once for each of the environments; `committed()`: the newest checkpoint's step."""

    verb, preload = "launch.train", "launch.preload"

    def __init__(self, words: list[str], environments: list[dict[str, str]], committed: Callable[[], int]):
        self.words, self.environments, self.committed = words, environments, committed
        self.stopped, self.alive = (
            0,
            dict[int, ForkServerProcess](),
        )  # the signal that ends the run; processes by number
        self._started = False  # whether all processes were started once
        self._events = queue.SimpleQueue[tuple[int, int | None]]()  # (process, its code), or (signal, None)

    def run(self, grace: float, backoff: float, max_restarts: int) -> int:
        """Until the run is over; the exit code. Times in seconds."""
        shared = dict(set.intersection(*(set(environment.items()) for environment in self.environments)))
        os.environ.update(shared, PYTHONUNBUFFERED="1")  # what JAX reads when it is imported, in the server
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["launch.leash", self.preload])
        with interrupts.heard_by(self._hear):
            return self._run(grace, backoff, max_restarts)

    def _hear(self, number: int) -> str | None:
        """A signal: for the processes, if all of them are there."""
        if not self._started:
            self._send(signal.SIGKILL, os.killpg)
            return interrupts.stopped_by(number)
        self._events.put((number, None))
        return None

    def _run(self, grace: float, backoff: float, max_restarts: int) -> int:
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
        with socket.create_server(("127.0.0.1", 0)) as probe:
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        for i, environment in enumerate(self.environments):
            line = [*words, *_place(coordinator, len(self.environments), i)]
            output, out = self._context.Pipe(duplex=False)
            self.alive[i] = self._context.Process(target=_begin, args=(self.verb, line, environment, out), daemon=True)
            self.alive[i].start()
            out.close()
            threading.Thread(target=self._follow, args=(i, self.alive[i], output), daemon=True).start()
        self._started = True
        _say(f"started, pids {' '.join(str(child.pid) for child in self.alive.values())}")

    def _follow(self, index: int, child: ForkServerProcess, output: Connection) -> None:
        """Passes on what a process prints, and tells of its end, when what it had started is gone too."""
        printing = threading.Thread(target=_pass_on, args=(output, index), daemon=True)
        printing.start()
        child.join()
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        printing.join(timeout=10.0)
        self._events.put((index, child.exitcode))

    def _next(self, deadline: float | None) -> tuple[int, int] | None:
        """The next process that ends, with its code; None at the deadline, or if a signal finds none to wait for."""
        with contextlib.suppress(queue.Empty):
            while self.alive or not self.stopped:
                one, code = self._events.get(timeout=deadline and max(0.0, deadline - time.monotonic()))
                if code is not None:
                    return one, code
                if self.stopped:
                    raise SystemExit(128 + one)
                self.stopped = one
                _say(f"{signal.Signals(one).name} passed on: the processes save and stop; a second one kills them")
                self._send(one)
        return None

    def _watch(self, grace: float) -> tuple[int, str]:
        """Until all have ended: the exit code of the one to blame (not who ends as another is gone: 5); in words."""
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
            if at is None and event[1] not in (0, *commands.STOPPED):
                at, deadline = time.time(), time.monotonic() + grace
        gone = 5, *((-signal.SIGABRT,) if {*commands.STOPPED} & {*ended.values()} else ())  # as another one is
        index, code = min(ended.items(), key=lambda one: (one[1] == 0, one[1] in gone, one[1] in commands.STOPPED))
        told = f"process {index} {commands.meaning(code)}"
        if at is not None:
            others = [str(ended.get(i, "killed")) for i in range(len(self.environments)) if i != index] or ["none"]
            told += f" at {datetime.fromtimestamp(at):%H:%M:%S.%f}; all gone {time.time() - at:.1f} s later"
            told += f" (others: {', '.join(others)})"
        return (code if code >= 0 else 128 - code), told

    def _send(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        for child in self.alive.values():
            # A fork that has just begun has no group of its own yet: it gets the signal itself.
            pid = child.pid
            for call in dict.fromkeys((send, os.kill)):
                with contextlib.suppress(ProcessLookupError):
                    if pid is not None:
                        call(pid, number)


def _pass_on(output: Connection, index: int) -> None:
    with open(output.fileno(), "rb", closefd=False) as lines:
        for line in lines:
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
