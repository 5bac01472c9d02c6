"""Train in several processes on this machine, and restart all of them when one dies.

    plimsoll local --config=gpt2-124m --workdir=runs/a --gpus=all
    plimsoll local --config=nanogpt-cpu --workdir=runs/b --processes=2 --devices_per_process=2

The processes are forks of one that has imported everything, so they start, and above all restart, quickly. When one
dies, the others get --grace seconds to end. Then all start again from the last checkpoint: immediately if there is a
new one, else after an increasing wait. The exit code is that of the process that failed first, one of `plimsoll
train`'s (128 + n: signal n killed it). SIGTERM and SIGINT are forwarded, and a second one kills the processes.
SIGTERM to a single process stops all of them.
"""

import contextlib
import importlib
import multiprocessing
import os
import queue
import secrets
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

from plimsoll.framework.checkpoint.directory import folder, scan
from plimsoll.framework.processes import rendezvous
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.exit_codes import COMPLETED, FINAL, STOPPED, ExitCode
from plimsoll.launch import cli, commands


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, in addition to those of `plimsoll train`."""
    add = parser.add_argument
    add("--processes", type=int, metavar="N", help="number of processes; default: one for each GPU of --gpus, else 1")
    add("--devices_per_process", type=int, metavar="K", help="run on CPU, with K devices in each process")
    add("--gpus", metavar="all|0,1,...", help="run on these GPUs, divided among the processes")
    add("--grace", type=float, default=10.0, metavar="S", help="seconds until the others are killed when one dies")
    add("--backoff", type=float, default=1.0, metavar="S", help="seconds before a second restart; doubles up to 60")
    add("--max_restarts", type=int, default=5, metavar="K", help="restarts without a new checkpoint before giving up")


@cli.main
def main(argv: list[str]) -> int:
    """Check everything, then supervise until the run is over."""
    parser = commands.LauncherParser("local", __doc__)
    add_flags(parser)
    args, words = parser.parse_job(argv)
    environments = _build_environments(args.processes, args.devices_per_process, args.gpus)
    if args.dry_run:
        for index, environment in enumerate(environments):
            rendezvous_flags = _rendezvous_flags("127.0.0.1:PORT", len(environments), index)
            line = [sys.executable, "-m", "plimsoll", "train", *words, *rendezvous_flags]
            settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
            print(*settings, shlex.join(line))
        return ExitCode.DONE
    workdir = args.workdir or f"runs/{args.run_name}"
    newest = partial(_find_newest_step, os.path.expanduser(workdir))
    supervisor = Supervisor(words, environments, newest)
    return supervisor.run(args.grace, args.backoff, args.max_restarts)


def _find_newest_step(workdir: str) -> int:
    """Return the step of the newest checkpoint, -1 without one."""
    # If an object store does not respond, count it as no progress and do not end the run.
    with contextlib.suppress(OSError, ValueError):
        steps, _ = scan(folder(f"{workdir}/checkpoints"))
        return max(steps, default=-1)
    return -1


def _build_environments(processes: int | None, devices: int | None, gpus: str | None) -> list[dict[str, str]]:
    """Return the additional environment variables of each process."""
    too_few = any(value is not None and value < 1 for value in (processes, devices))
    if too_few or (gpus and devices):
        raise cli.UsageError("--processes and --devices_per_process: expected at least 1, the latter without --gpus")
    if gpus is None:
        if (processes or 1) == 1 and devices is None:
            # One process uses whatever devices JAX finds.
            return [{}]
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices or 1}"
        return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}] * (processes or 1)
    names = _list_gpus() if gpus == "all" else gpus.split(",")
    share, remainder = divmod(len(names), processes or len(names))
    repeated = len({*names}) < len(names)
    # CUDA accepts numbers, and also "GPU-" with a UUID.
    well_formed = all(name.replace("-", "").isalnum() for name in names)
    if remainder or not share or repeated or not well_formed:
        problem = f"{', '.join(names)!r} are not distinct GPUs, or not divisible by --processes"
        raise cli.UsageError(f"--gpus={gpus}: {problem}")
    environments = []
    for i in range(0, len(names), share):
        process_gpus = ",".join(names[i : i + share])
        environments.append({"CUDA_VISIBLE_DEVICES": process_gpus})
    return environments


def _list_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or those the driver finds. Raises UsageError if there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    advice = "use --devices_per_process=K to run on CPU"
    if shutil.which(words[0]) is None:
        raise cli.UsageError(f"--gpus=all: this machine has no GPUs ({words[0]} is not installed); {advice}")
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    indices = answer.stdout.split()
    if answer.returncode or not indices:
        output = answer.stdout + answer.stderr
        first_line = output.strip().partition("\n")[0]
        raise cli.UsageError(f"--gpus=all: no GPU was found ({words[0]} printed {first_line!r}); {advice}")
    return indices


def _rendezvous_flags(coordinator: str, count: int, index: int) -> list[str]:
    """Return the flags of `plimsoll train` that let a process find the others; none for a single process."""
    if count == 1:
        return []
    return [f"--coordinator={coordinator}", f"--num_processes={count}", f"--process_id={index}"]


def _run_process(verb: str, words: list[str], environment: dict[str, str], out: Connection) -> None:
    """Run one process of the run in a fork of the server, and exit with the exit code of the verb's module."""
    # Use a separate session, so that a terminal's Ctrl-C reaches only the launcher.
    os.setsid()
    interrupts.begin()
    # Not imported at the top, because the launcher itself must survive the end of its shell.
    from plimsoll.launch import exit_with_parent

    exit_with_parent.kill_with_parent()
    # A backend reads these variables when it starts, so they take effect although JAX is already imported.
    os.environ.update(environment)
    # Redirect the descriptors, because C and C++ libraries write to stdout and stderr too.
    for descriptor in (1, 2):
        os.dup2(out.fileno(), descriptor)
    out.close()
    sys.argv = [verb, *words]
    module = importlib.import_module(verb)
    sys.exit(module.main())


class Supervisor:
    """Runs `plimsoll train *words` once per environment; `committed()` returns the step of the newest checkpoint."""

    verb = "plimsoll.launch.train"
    warm_imports = "plimsoll.launch.warm_imports"

    def __init__(self, words: list[str], environments: list[dict[str, str]], committed: Callable[[], int]):
        self.words = words
        self.environments = environments
        self.committed = committed
        # The signal that ends the run, 0 before one arrives.
        self.stopped = 0
        # The running processes, by index.
        self.alive = dict[int, ForkServerProcess]()
        # Whether all processes have been started once.
        self._started = False
        # Entries are (process, its exit code) or (signal, None). Signal handlers may put to a SimpleQueue.
        self._events = queue.SimpleQueue[tuple[int, int | None]]()

    def run(self, grace: float, backoff: float, max_restarts: int) -> int:
        """Supervise until the run is over; returns the exit code. Times are in seconds."""
        item_sets = [set(environment.items()) for environment in self.environments]
        shared = dict(set.intersection(*item_sets))
        # Variables that JAX reads on import must be set in the server, which imports it for all processes.
        os.environ.update(shared, PYTHONUNBUFFERED="1")
        # With this key, process 0 ignores messages from other users of this machine.
        os.environ.setdefault(rendezvous.KEY, secrets.token_hex(16))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["plimsoll.launch.exit_with_parent", self.warm_imports])
        with interrupts.listen_for_signals(self._handle_signal):
            return self._run(grace, backoff, max_restarts)

    def _handle_signal(self, number: int) -> str | None:
        """Handle a signal: forward it to the processes if all of them have started."""
        if not self._started:
            self._send(signal.SIGKILL, os.killpg)
            return interrupts.format_stop_message(number)
        self._events.put((number, None))
        return None

    def _run(self, grace: float, backoff: float, max_restarts: int) -> int:
        """Start all processes until the run is over, is stopped, or fails too often; returns the exit code."""
        # Restarts since the last new checkpoint, including the next one.
        num_fruitless = 0
        restart_flags = list[str]()
        try:
            while not self.stopped:
                step_before = self.committed()
                self._start([*self.words, *restart_flags])
                code, message = self._watch(grace)
                if self.committed() > step_before:
                    num_fruitless = 1
                else:
                    num_fruitless += 1
                if code in FINAL or self.stopped or num_fruitless > max_restarts:
                    _print_line(message)
                    return code
                # The first restart after progress is immediate, because the cause may already be resolved.
                wait = 0.0
                if num_fruitless > 1:
                    wait = min(60.0, backoff * 2 ** (num_fruitless - 2))
                _print_line(f"{message}; restart {num_fruitless} of {max_restarts} in {wait:g} s")
                # No process is running, so only a signal can arrive, and it ends the wait.
                self._next(time.monotonic() + wait)
                # Restarts resume even if the first start had --resume=never.
                restart_flags = ["--resume=auto"]
            return 128 + self.stopped
        finally:
            self._send(signal.SIGKILL, os.killpg)

    def _start(self, words: list[str]) -> None:
        """Start all processes, with `words` as the command line of `plimsoll train`, on a free port."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            coordinator = f"127.0.0.1:{port}"
        count = len(self.environments)
        for i, environment in enumerate(self.environments):
            line = [*words, *_rendezvous_flags(coordinator, count, i)]
            output, out = self._context.Pipe(duplex=False)
            arguments = (self.verb, line, environment, out)
            child = self._context.Process(target=_run_process, args=arguments, daemon=True)
            # Register the child before it starts, so that a signal that arrives in between reaches it.
            self.alive[i] = child
            child.start()
            # Close the launcher's copy of the writing end. Otherwise reading never ends.
            out.close()
            threading.Thread(target=self._follow, args=(i, child, output), daemon=True).start()
        self._started = True
        pids = " ".join(str(child.pid) for child in self.alive.values())
        _print_line(f"started, pids {pids}")

    def _follow(self, index: int, child: ForkServerProcess, output: Connection) -> None:
        """Forward a process's output, kill the processes that it has started once it ends, and report its end."""
        printing = threading.Thread(target=_forward_output, args=(output, index), daemon=True)
        printing.start()
        child.join()
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # The process's last output comes before the line about its end.
        printing.join(timeout=10.0)
        self._events.put((index, child.exitcode))

    def _next(self, deadline: float | None) -> tuple[int, int] | None:
        """Return the next process that ends, with its code; None at the deadline or if a signal leaves none running."""
        with contextlib.suppress(queue.Empty):
            while self.alive or not self.stopped:
                timeout = None
                if deadline is not None:
                    timeout = max(0.0, deadline - time.monotonic())
                number, code = self._events.get(timeout=timeout)
                if code is not None:
                    return number, code
                # Without a code, the number is a signal.
                if self.stopped:
                    raise SystemExit(128 + number)
                self.stopped = number
                name = signal.Signals(number).name
                _print_line(f"Forwarded {name}: the processes save and exit; a second signal kills them")
                self._send(number)
        return None

    def _watch(self, grace: float) -> tuple[int, str]:
        """Wait until all processes have ended.

        Returns the exit code of the process to blame, and a message about it.
        """
        # Exit codes of the processes that ended by themselves, as in subprocess: negative for a signal.
        code_by_index: dict[int, int] = {}
        failed_at = None
        deadline = None
        killed = False
        while self.alive:
            event = self._next(deadline)
            if event is None:
                # SIGKILL also ends processes that are suspended (SIGSTOP).
                self._send(signal.SIGKILL, os.killpg)
                deadline = None
                killed = True
                continue
            index, code = event
            del self.alive[index]
            if not killed:
                code_by_index[index] = code
            if failed_at is None and code not in (*COMPLETED, *STOPPED):
                failed_at = time.time()
                deadline = time.monotonic() + grace
        index = _find_culprit(code_by_index)
        code = code_by_index[index]
        message = f"process {index} {commands.describe_process_end(code)}"
        if failed_at is not None:
            other_codes = []
            for i in range(len(self.environments)):
                if i != index:
                    other_codes.append(str(code_by_index.get(i, "killed")))
            seconds = time.time() - failed_at
            message += f" at {datetime.fromtimestamp(failed_at):%H:%M:%S.%f}; all ended {seconds:.1f} s later"
            message += f" (others: {', '.join(other_codes or ['none'])})"
        exit_code = code if code >= 0 else 128 - code
        return exit_code, message

    def _send(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Send a signal to all processes; with os.killpg also to the processes that they started."""
        for child in self.alive.values():
            # A new fork has no process group yet, so it also gets the signal itself.
            pid = child.pid
            for call in dict.fromkeys((send, os.kill)):
                with contextlib.suppress(ProcessLookupError):
                    if pid is not None:
                        call(pid, number)


def _find_culprit(code_by_index: dict[int, int]) -> int:
    """Return the index of the process whose failure ended the run, given the exit codes.

    The process's own failure has the highest priority, then a stop by a signal, then the loss of another process (5),
    and then success. Among equal reasons, the process that ended first is to blame.
    """
    peer_codes: list[int] = [ExitCode.PEER]
    # JAX aborts a process that waits for others that a signal has stopped.
    if {*STOPPED} & {*code_by_index.values()}:
        peer_codes.append(-signal.SIGABRT)

    def rank_blame(index: int) -> tuple[bool, bool, bool]:
        code = code_by_index[index]
        return code in COMPLETED, code in peer_codes, code in STOPPED

    return min(code_by_index, key=rank_blame)


def _forward_output(output: Connection, index: int) -> None:
    """Print each line of a process with its number, in one of the six terminal colors from 31 on."""
    with open(output.fileno(), "rb", closefd=False) as lines:
        for line in lines:
            text = line.decode(errors="replace").removesuffix("\n")
            _print_line(text, str(index), 31 + index % 6)


def _print_line(line: str, who: str = "local", color: int = 1) -> None:
    """Print a whole line immediately. If no reader is left, discard output; the training continues."""
    try:
        text = f"[{who}] {line}\n"
        if sys.stdout.isatty():
            text = f"\033[{color}m[{who}]\033[0m {line}\n"
        # Use a single write, because several threads print at the same time.
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
