"""SIGINT and SIGTERM sent to real processes, at moments identified by what a process has printed or done so far."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll.framework.terminal import interrupts
from tests.support.runs import CONFIG, ROOT, command, wait_for, write_text, xla_flags

SECONDS = 2.0


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """Undo an ignored SIGINT: a shell makes the processes of a test run in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(words: list[str], when: Callable[[str], object], number: signal.Signals, folder: Path) -> str:
    """Send a process the signal once `when(its output)` is true, check how it ends, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    environment["XLA_FLAGS"] = xla_flags()
    out = folder / "said"
    with open(out, "wb") as stream:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=stream, stderr=stream)
    try:
        wait_for(lambda: process.poll() is not None or when(out.read_text(errors="replace")))
        assert process.poll() is None, out.read_text()
        began = time.monotonic()
        process.send_signal(number)
        code = process.wait(timeout=60)
        took = time.monotonic() - began
    finally:
        process.kill()
    said = out.read_text(errors="replace")
    assert code == 128 + number, said
    assert took < SECONDS, f"{took:.1f} s: {said}"
    assert not re.search("Traceback|Fatal|Exception", said), said
    return said


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.pairs
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", ["train", "plan", "status", "local", "__main__"])
def test_interrupt_at_startup(tmp_path: Path, verb: str, number: signal.Signals) -> None:
    words = [sys.executable, "-X", "importtime", "-m", f"launch.{verb}", "--config=nanogpt-cpu", "--workdir=x"]
    said = interrupt(words, lambda text: "plimsoll.framework.config.names" in text, number, tmp_path)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert lines == [f"stopped by {number.name}"]


@pytest.mark.pairs
@pytest.mark.parametrize("number", SIGNALS)
def test_interrupt_while_the_step_compiles(tmp_path: Path, number: signal.Signals) -> None:
    write_text(tmp_path)
    flags = ("--config.model.stack.num_layers=48", "--config.model.stack.unroll=0")
    words = command(tmp_path / "run", *flags, "--config.trainer.compilation_cache=none")
    said = interrupt(words, lambda text: "orbax-checkpoint" in text, number, tmp_path)
    assert said.splitlines()[-1] == f"stopped by {number.name}"
    assert not (tmp_path / "run" / "lock.json").exists()
    assert not (tmp_path / "run" / "log.txt").exists()  # opened only once the start is accepted
    assert f'"exit": {128 + number}' in (tmp_path / "run" / "health" / "process-00000.json").read_text()


@pytest.mark.pairs
def test_interrupt_while_a_plan_compiles_removes_its_folder(tmp_path: Path) -> None:
    write_text(tmp_path)
    words = [sys.executable, "-m", "plimsoll", "plan", f"--config={CONFIG}:tiny", "--target=cpu:1", "--fresh"]
    words += ["--config.model.stack.num_layers=48", "--config.model.stack.unroll=0"]
    said = interrupt(words, lambda _: [*tmp_path.glob("plimsoll-plan-*")], signal.SIGINT, tmp_path)
    *phase_lines, last_line = said.splitlines()
    assert last_line == "stopped by SIGINT"
    assert phase_lines[-1].startswith("compiling the training step for ")
    assert not [*tmp_path.glob("plimsoll-plan-*")]


@pytest.mark.pairs
def test_interrupt_while_tokenizing_leaves_no_files(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "plimsoll", "prepare", "--config=stdlib-tiny", f"--out={tmp_path}/tokens"]
    said = interrupt(words, lambda _: [*tmp_path.glob(".tokens.partial")], signal.SIGTERM, tmp_path)
    assert said.splitlines()[-1] == "stopped by SIGTERM"
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


BUSY = "import hashlib, sys; from plimsoll.framework.terminal import interrupts; "
BLOCKED = "print('now', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # one call that takes minutes


def has_started(text: str) -> bool:
    return "now" in text


def test_a_main_thread_that_is_not_in_python_does_not_matter(tmp_path: Path) -> None:
    said = interrupt(python(f"{BUSY}interrupts.begin(); {BLOCKED}"), has_started, signal.SIGINT, tmp_path)
    assert said == "now\nstopped by SIGINT\n"


@pytest.mark.pairs
def test_slow_exit_callback_does_not_block_exit(tmp_path: Path) -> None:
    script = f"{BUSY}import time; interrupts.begin(); interrupts.register_cleanup(lambda *_: time.sleep(60)); {BLOCKED}"
    assert "stopped by SIGTERM" in interrupt(python(script), has_started, signal.SIGTERM, tmp_path)


def test_temporary_files_are_removed(tmp_path: Path) -> None:
    script = f"""
import pathlib
{BUSY}
interrupts.begin()
for name in ('stays', 'goes'):
    with interrupts.remove_on_signal(name):
        pathlib.Path(name).mkdir()
        if name == 'goes':
            {BLOCKED}
"""
    interrupt(python(script), has_started, signal.SIGINT, tmp_path)
    assert (tmp_path / "stays").exists()
    assert not (tmp_path / "goes").exists()


def test_first_signal_stops_the_loop_and_the_second_exits(tmp_path: Path) -> None:
    script = f"""
import os, signal, time
{BUSY}
with interrupts.stop_signals() as received:
    os.kill(os.getpid(), signal.SIGTERM)
    while not received:
        time.sleep(0.01)
    {BLOCKED}
"""
    said = interrupt(python(script), has_started, signal.SIGINT, tmp_path)
    assert said.startswith("now\nstopped by SIGINT, the second signal: ")


def test_loop_without_state_handles_no_signals(tmp_path: Path) -> None:
    script = f"{BUSY}\nwith interrupts.stop_signals(lambda: False): {BLOCKED}"
    assert interrupt(python(script), has_started, signal.SIGINT, tmp_path) == "now\nstopped by SIGINT\n"


def test_foreign_handlers_are_kept_outside_the_loop() -> None:
    script = """
import os, signal, time
from plimsoll.framework.terminal import interrupts
interrupts.begin()
signal.signal(signal.SIGTERM, lambda *_: print("theirs", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
with interrupts.stop_signals() as received:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
print(*received)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
"""
    found = subprocess.run(python(script), cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "theirs\n15\ntheirs\n"


def test_ignored_signals_stay_ignored() -> None:
    script = """
import os, signal
from plimsoll.framework.terminal import interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.begin()
os.kill(os.getpid(), signal.SIGINT)
print("goes on")
"""
    found = subprocess.run(python(script), cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "goes on\n"


def test_forked_process_does_not_handle_signals() -> None:
    script = """
import os, signal, time
from plimsoll.framework.terminal import interrupts
interrupts.begin()
interrupts.register_cleanup(lambda *_: print("the parent's affair", flush=True))
if (child := os.fork()) == 0:
    time.sleep(20)
    os._exit(9)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.2)
print("goes on")
"""
    words = [sys.executable, "-W", "ignore", "-c", script]  # Python 3.12 warns about forks of processes with threads
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "-15\ngoes on\n"), found.stderr


def test_a_program_that_calls_a_loop_gets_its_handlers_back() -> None:
    import threading

    before = [signal.getsignal(number) for number in interrupts.STOPS]
    with interrupts.stop_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: received, seconds=5)
    assert received == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in interrupts.STOPS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [thread.name for thread in threading.enumerate()]
