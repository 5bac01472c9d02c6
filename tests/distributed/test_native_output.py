"""Standard output of a multi-process run: Gloo's greetings are dropped, and nothing else."""

import subprocess
import sys

GREETING = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"

# `os.write(1, ...)` writes as C++ code does; `os._exit` flushes nothing.
CODE = f"""
import os, time
from plimsoll.framework.terminal.native_output import drop_gloo_greetings
print("before")
drop_gloo_greetings()
os.write(1, b"{GREETING}\\n")
os.write(1, b"a library's own line\\n")
os.write(1, b"{GREETING}\\n")
time.sleep(0.5)
print("Python's")
os._exit(0)
"""


def test_greetings_are_left_out_and_nothing_else() -> None:
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.splitlines() == ["before", "a library's own line", "Python's"]
    assert process.stderr == ""


def test_a_reader_that_leaves_blocks_nobody() -> None:
    code = CODE.replace("time.sleep(0.5)", "[os.write(1, b'x' * 79 + b'\\n') for _ in range(5_000)]").replace(
        'print("Python\'s")', ""
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "before\n"
        process.stdout.close()
        process.wait(timeout=60)  # it ends, or gets a broken pipe, but does not hang
