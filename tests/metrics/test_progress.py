"""Progress in a real pseudo-terminal and through a real pipe, and on values that nobody expects."""

import io
import math
import os
import pty
import re
import subprocess
import sys

import pytest

from framework.metrics.progress import Progress

RUN = """
import sys
from framework.metrics.progress import Progress
with Progress(200, log_every=20, log_path=sys.argv[1]) as progress:
    progress.status("compiling")
    for step in range(1, 201):
        loss = float("nan") if step == 60 else 3 - step / 100
        progress.update(step, {"train/loss": loss, "train/tokens_per_second": 12345.6, "train/mfu": 0.4123,
                               "memory/device_bytes": 1.5e9, "train/steps_per_second": 2.0})
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
        except OSError:  # how Linux says that the other end is closed
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
    assert "step 200/200  loss 1.0000  12.3k tok/s  MFU 41.2%  mem 1.40 GiB  left 0 s" in text
    assert "━━━" in text
    for message in ("saved [100]", "from elsewhere"):
        assert re.search(rf"(^|[\r\n]){re.escape(message)}\r\n", text)
    assert seen.rstrip().endswith("\x1b[?25h")  # the cursor is given back
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 11  # the plain lines and the message, and no bar
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
    assert out.stderr == ""
    lines = out.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split("/")[0].split()[1] for line in steps] == [str(step) for step in range(20, 201, 20)]
    assert len({len(line) for line in steps}) == 1
    assert {line.index("tok/s") for line in steps} == {steps[0].index("tok/s")}
    assert "loss      nan" in steps[2]
    assert lines.index("saved [100]") == 5
    assert (tmp_path / "log.txt").read_text().splitlines() == [line for line in lines if line != "from elsewhere"]
    assert max(map(len, lines)) <= 100


def test_time_left_from_its_own_clock():
    now, out = [0.0], io.StringIO()
    progress = Progress(100, start_step=50, stream=out, clock=lambda: now[0])
    for step in (51, 52, 53):
        now[0] += 1000.0 if step == 51 else 2.0  # the first step compiles
        progress.update(step, {"train/loss": 1.0})
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("left       -")
    assert lines[2].endswith("left  1m 34s")  # 47 steps of two seconds
    assert "MFU" not in lines[2]


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, -math.inf, "NaN", "?", 1e300, -1e-300, 10**400, object(), [], True]
)
def test_odd_values_never_stop_a_run(value):
    out = io.StringIO()
    names = ("train/loss", "train/tokens_per_second", "train/mfu", "memory/device_bytes", "train/steps_per_second")
    with Progress(10, stream=out) as progress:
        progress.update(1, dict.fromkeys(names, value))
        progress.update(2, {})
        progress.update(11, {"train/loss": 1.0})  # past the end
    assert len(out.getvalue().splitlines()) == 3


def test_stream_that_knows_only_ascii(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(10, stream=stream, log_path=tmp_path / "log.txt") as progress:
        progress.print("café")
    assert raw.getvalue() == b"caf?\n"
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "café\n"


def test_last_step_is_always_shown_and_nothing_twice():
    out = io.StringIO()
    with Progress(25, log_every=10, stream=out) as progress:
        for step in range(1, 26):
            progress.update(step, {"train/loss": 1.0})
        progress.update(25, {"train/loss": 1.0})
        progress.close()
    assert [line.split("/")[0].split()[1] for line in out.getvalue().splitlines()] == ["10", "20", "25"]


def test_interrupt_gives_the_terminal_back(tmp_path):
    code = RUN.replace('print("from elsewhere")', "raise KeyboardInterrupt")
    status, seen = in_terminal(code, str(tmp_path / "log.txt"))
    assert status != 0
    assert "\x1b[?25h" in seen
    assert "KeyboardInterrupt" in seen.split("\x1b[?25h")[-1]
