"""Progress output in a real pseudo-terminal and through a real pipe."""

import io
import os
import pty
import re
import subprocess
import sys

from plimsoll.framework.terminal.progress import Progress

RUN = """
import sys
from plimsoll.framework.terminal.phase_views import create_view
from plimsoll.framework.terminal.phases import phase, show_phases
from plimsoll.framework.terminal.progress import Progress
with show_phases(create_view(sys.stderr)), Progress(200, log_every=20, log_path=sys.argv[1]) as progress:
    with phase("compiling"):
        pass
    for step in range(1, 201):
        loss = float("nan") if step == 60 else 3 - step / 100
        progress.update(step, {"train/loss": loss, "train/tokens_per_second": 12345.6, "train/mfu": 0.4123,
                               "memory/device_bytes": 1.5e9, "train/steps_per_second": 2.0,
                               "train/learning_rate": 3e-4, "train/grad_norm": 10 / step})
        if step == 100:
            progress.print("saved [100]")
            print("from elsewhere")
"""


def in_terminal(code, *args, columns="120"):
    reader, writer = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": columns, "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdout=writer, stderr=writer, stdin=writer, env=env)
    os.close(writer)
    seen = b""
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # Linux raises this when the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(reader)
    return process.wait(), seen.decode()


def test_terminal_shows_a_bar_and_messages_above_it(tmp_path):
    code, seen = in_terminal(RUN, str(tmp_path / "log.txt"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert code == 0, text
    assert "compiling" in text
    fields = ("step 200/200", "loss 1.0000", "lr 3.00e-04", "norm 0.05", "12.3k tok/s", "MFU 41.2%", "mem 1.40 GiB")
    assert "  ".join([*fields, "left 0:00:00"]) in text
    assert "━━━" in text
    for message in ("saved [100]", "from elsewhere"):
        assert re.search(rf"(^|[\r\n]){re.escape(message)}\r\n", text)
    assert seen.rstrip().endswith("\x1b[?25h")  # the cursor is visible again
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 11  # the plain lines and the message, but no bar
    assert "saved [100]" in log
    assert not any("━" in line or "\x1b" in line for line in log)


def test_narrow_terminal_is_one_line_per_frame(tmp_path):
    code, seen = in_terminal(RUN, str(tmp_path / "log.txt"), columns="40")
    assert code == 0
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "\n").splitlines()
    assert max(len(frame) for frame in frames) <= 40


def test_pipe_gets_one_aligned_line_per_interval(tmp_path):
    run = [sys.executable, "-c", RUN, str(tmp_path / "log.txt")]
    out = subprocess.run(run, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"compiling \.\.\. done in \S+ s\n", out.stderr)
    lines = out.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split("/")[0].split()[1] for line in steps] == [str(step) for step in range(20, 201, 20)]
    assert len({len(line) for line in steps}) == 1
    assert {line.index("tok/s") for line in steps} == {steps[0].index("tok/s")}
    assert "loss      nan" in steps[2]
    assert lines.index("saved [100]") == 5
    assert (tmp_path / "log.txt").read_text().splitlines() == [line for line in lines if line != "from elsewhere"]
    assert max(map(len, lines)) <= 125


def test_last_step_is_always_shown_and_values_may_be_missing():
    out = io.StringIO()
    with Progress(25, log_every=10, stream=out) as progress:
        for step in range(1, 25):
            progress.update(step, {"train/loss": 1.0, "train/steps_per_second": 0.5})
        progress.update(25, {})
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0].split()[1] for line in lines] == ["10", "20", "25"]
    assert lines[1].endswith("left  0:00:10")
    assert lines[2].endswith("left        -")


def test_interrupt_restores_the_terminal(tmp_path):
    code = RUN.replace('print("from elsewhere")', "raise KeyboardInterrupt")
    status, seen = in_terminal(code, str(tmp_path / "log.txt"))
    assert status != 0
    assert "\x1b[?25h" in seen
    assert "KeyboardInterrupt" in seen.split("\x1b[?25h")[-1]
