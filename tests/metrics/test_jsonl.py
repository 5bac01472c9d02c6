"""metrics.jsonl: exact floats, torn lines, resume, full disks, and the file after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.metrics.jsonl import JsonlWriter, read_metrics


def lines(path):
    return path.read_text().splitlines()


def test_float32_bits_survive(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, size=3000, dtype=np.uint32)
    edges = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x00800000, 0x3F800001, 0x3DCCCCCD], dtype=np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    values = values[np.isfinite(values)]
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step, value in enumerate(values):
        writer.write(step, {"train/loss": float(value)})
    writer.close()
    back = np.array([row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")], dtype=np.float32)
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_numpy_and_jax_scalars_are_written_as_numbers(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    row = {"a": np.float32(0.1), "b": jnp.float32(0.1), "c": jnp.bfloat16(1.5), "d": np.int64(7), "e": jnp.array(True)}
    writer.write(3, {**row, "f": None, "g": "text é"})
    (back,) = read_metrics(tmp_path / "m.jsonl")
    assert np.float32(back["a"]).tobytes() == np.float32(0.1).tobytes() == np.float32(back["b"]).tobytes()
    assert back == {"step": 3, "a": back["a"], "b": back["b"], "c": 1.5, "d": 7, "e": True, "f": None, "g": "text é"}
    assert type(back["c"]) is float
    writer.close()


def test_not_finite_is_valid_json_and_comes_back(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": np.float32(-np.inf)})
    writer.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(lines(path)[0], parse_constant=refuse) == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    (row,) = read_metrics(path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("torn", "kept"),
    [
        (b'{"step": 3, "train/l', 2),
        (b"{", 2),
        (b"\0\0\0\0", 2),
        (b"12", 2),
        (b'{"step": 3}', 3),  # complete except for its newline
        (b"", 2),
        (b'{"x": "' + b"y" * 200_000, 2),  # longer than one read
    ],
)
def test_torn_last_line_is_repaired(tmp_path, torn, kept):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    writer = JsonlWriter(path)
    writer.write(9, {"train/loss": 1.0})
    writer.close()
    assert [json.loads(line)["step"] for line in lines(path)] == [1, 2, 3][:kept] + [9]


def test_resume_drops_later_rows_with_one_warning(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    for step in range(1, 8):
        writer.write(step, {"train/loss": step / 3})
    writer.close()
    before = lines(path)

    writer = JsonlWriter(path)
    writer.resume(4)
    writer.write(5, {"train/loss": 0.5})
    writer.close()
    after = lines(path)
    assert after[:4] == before[:4]  # the same bytes: not rewritten
    assert [json.loads(line) for line in after[4:]] == [{"step": 4, "resumed_from": 4}, {"step": 5, "train/loss": 0.5}]

    writer = JsonlWriter(path)  # a second resume, from an earlier step, also drops the first one's mark
    writer.resume(2)
    writer.close()
    assert [row.get("resumed_from") for row in read_metrics(path)] == [None, None, 2]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_garbled_middle_line_stops_resume_and_costs_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n#!garbage\n{"step": 3}\n')
    writer = JsonlWriter(path)
    with pytest.raises(ValueError, match="line 2"):
        writer.resume(1)
    writer.close()
    assert path.read_bytes() == b'{"step": 1}\n#!garbage\n{"step": 3}\n'


def test_reader_leaves_out_a_row_being_written(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tra')
    assert read_metrics(path) == [{"step": 1}]


WRITE_FOREVER = """
import sys
from plimsoll.framework.metrics.jsonl import JsonlWriter
writer = JsonlWriter(sys.argv[1])
for step in range(10**9):
    writer.write(step, {"train/loss": step / 7, "train/grad_norm": step / 3})
"""


def test_every_row_written_before_a_kill_is_there(tmp_path):
    path = tmp_path / "m.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)])
    while not path.exists() or path.stat().st_size < 50_000:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    writer = JsonlWriter(path)
    writer.resume(100)
    writer.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [*range(101), 100]
    assert all(row["train/loss"] == row["step"] / 7 for row in rows[:-1])


FILL_DISK = """
import resource, sys
from plimsoll.framework.metrics.jsonl import JsonlWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
writer, step = JsonlWriter(sys.argv[1]), 0
try:
    while True:
        writer.write(step, {"train/loss": step / 7})
        step += 1
except OSError:
    print(step)
"""


def test_full_disk_raises_and_costs_the_row_that_did_not_fit(tmp_path):
    run = [sys.executable, "-c", FILL_DISK, str(tmp_path / "m.jsonl")]
    written = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert written > 5
    JsonlWriter(tmp_path / "m.jsonl").close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == list(range(written))
