"""`plimsoll train --dry_run --target=...`: the start of a run for devices that this machine does not have."""

import json
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.plan import startup
from plimsoll.framework.plan.build_report import compile_report
from plimsoll.framework.plan.targets import resolve, set_environment
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.runs import CONFIG, ROOT, train, write_text

assert len(jax.devices()) == 8  # before a smaller target limits the number for good


@pytest.fixture
def tpu():
    """The TPU compiler, on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    set_environment("v5e-16")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINY_TEXT", "")
    return write_text(tmp_path / "text")


def start(tmp_path: Path, target: str, *flags: str) -> int:
    return train(tmp_path / "run", "--dry_run", f"--target={target}", *flags)


def program(name: str, batch: int, **mesh: Any) -> Program:
    return Program(small.experiment(batch=batch, mesh=mesh).instantiate(), resolve(name).devices())


def lines(text: str) -> dict[str, str]:
    """Return {first word of a row: rest of the row}."""
    return dict(re.findall(r"^  (\S+) +(.*)$", text, re.MULTILINE))


# --- whole pods ------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("target", "mesh", "across", "processes"),
    [("v5p-2048", {"data": 32}, "data 32  fsdp 8", 256), ("2xv5e-256", {"data": 16}, "data 16 (over 2 slices)", 128)],
)
def test_a_pod_is_started_without_it(tpu, text, tmp_path, capsys, target, mesh, across, processes):
    """Check mesh, batch, checkpoint and the real compiler for 1024 and 512 chips."""
    flags = (f"--config.mesh.data={mesh['data']}", "--config.mesh.fsdp=8", "--config.mesh.seq=4")
    assert start(tmp_path, target, *flags, "--config.data.global_batch_size=256") == 0
    out = capsys.readouterr().out
    rows = lines(out)
    assert rows["accelerator"] == target
    assert rows["mesh"].startswith(across)
    assert rows["processes"] == f"{processes}, with 4 devices each"
    assert rows["train"].startswith("TextFiles: 8,2")  # the data exists here, so it was read
    assert rows["batch"].startswith(f"{512 // processes} of 256 rows per process")
    assert re.search(
        rf"dry run: the step compiles for {target} in \d+ s, and its peak is .* of [\d.]+ GiB per device", out
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.pairs
def test_the_peak_is_the_plans(text, tmp_path, capsys):
    flags = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.model.stack.num_layers=1")
    assert start(tmp_path, "cpu:4", *flags) == 0
    peak = re.search(r"its peak is ([\d.]+ \w+) of", capsys.readouterr().out)
    assert peak is not None
    from plimsoll.framework.terminal.tables import human_bytes
    from plimsoll.launch import cli

    config, _ = cli.Parser("plan").parse([f"--config={CONFIG}:tiny", *flags]).resolve("cpu-4")
    report = compile_report("tiny", config, resolve("cpu:4"), None, phases=False)
    assert peak[1] == human_bytes(report.device_peak_bytes)


# --- errors, and missing data -----------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("target", "flags", "message"),
    [
        ("cpu:8", ["--config.data.global_batch_size=12"], r"mesh\.data \* mesh\.fsdp = 8 does not divide the 12 seq"),
        ("cpu:8", ["--config.mesh.fsdp=3"], r"mesh {'fsdp': 3}: product 3 is not the number of devices, 8; nearest"),
        ("cpu:8", ["--config.mesh.across.data=2"], r"mesh\.across = {'data': 2}: product 2 is not the number of"),
        ("cpu:8", ["--config.compiler.options.xla_nope=1"], r"config\.compiler\.options\.xla_nope: the compiler"),
        (
            "cpu:8",
            ["--config.data.seq_len=2048", "--config.model.embed.max_positions=2048"],
            r"data\.source: has 4 rows",
        ),
        ("v5e-24", [], r"target 'v5e-24': no such size; nearest: v5e-16, v5e-32"),
    ],
)
def test_user_errors_are_one_line_before_compilation(text, tmp_path, capsys, monkeypatch, target, flags, message):
    monkeypatch.setattr("plimsoll.framework.plan.memory_budget.measure_need", lambda _: pytest.fail("compiled"))
    assert start(tmp_path, target, *flags) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: {message}", error), error
    assert error.count("\n") == 1


def test_a_batch_larger_than_the_data_shrinks(text, tmp_path, capsys):
    assert start(tmp_path, "cpu:8", "--config.data.global_batch_size=2048") == 0
    out = capsys.readouterr().out
    assert "data.global_batch_size 2,048 -> 256: the training data has 257 rows of data.seq_len = 32" in out
    assert lines(out)["tokens"].startswith("per step   8,192")


def test_the_host_is_part_of_the_verdict(text, tmp_path, capsys):
    assert start(tmp_path, "cpu-8", "--host_memory_gib=2") == 0
    assert lines(capsys.readouterr().out)["host"].startswith("memory       fits: ")
    assert start(tmp_path, "cpu-8", "--host_memory_gib=0.25") == 4
    output = capsys.readouterr().out
    assert lines(output)["host"].startswith("memory       DOES NOT FIT: ")
    assert "of host memory (train needs the most), but 256.00 MiB are available" in output
    assert not (tmp_path / "run").exists()


def test_a_target_is_for_dry_runs(text, tmp_path, capsys):
    assert train(tmp_path / "run", "--target=v5e-16") == 2
    assert "error: --target requires --dry_run: training is only possible on the devices of this machine" in (
        capsys.readouterr().err
    )


@pytest.mark.pairs
def test_missing_remote_corpus_is_reported_without_error(text, tmp_path, capsys):
    (text / "valid.txt").unlink()
    assert start(tmp_path, "cpu:2") == 0
    out = capsys.readouterr().out
    assert re.search(r"^  not checked +not on this machine: data\.validation\.held: .*valid\.txt", out, re.MULTILINE), (
        out
    )


def test_damaged_data_is_an_error(text, tmp_path, capsys):
    (text / "train.txt").write_text("short")
    assert start(tmp_path, "cpu:2") == 2
    assert re.match(r"error: data\.source: \d+ tokens are too few", capsys.readouterr().err)


@pytest.mark.pairs
def test_oversized_config_exits_with_4_and_suggests_settings(text, tmp_path, capsys):
    assert start(tmp_path, "cpu:2", "--device_memory_gib=0.001") == 4
    out = capsys.readouterr().out
    assert re.search(r"the training step needs [\d.]+ MiB per device, but 1.02 MiB are available", out)
    assert "nothing was started" in out


def test_target_rules_apply(text, tmp_path, capsys):
    name = "plimsoll.AcceleratorRule"
    rules = f'[{{"$class": "{name}", "pattern": "cpu-2", "set": {{"memory.remat": "full"}}}}]'
    assert start(tmp_path, "cpu:2", f"--config.accelerator_rules={rules}") == 0
    assert "rule cpu-2: memory.remat none -> full" in capsys.readouterr().out.replace("'none'", "none")


# --- which process reads which rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batch", "mesh", "own", "sets", "readers"),
    [  # own: rows per process; sets: distinct sets of rows; readers: processes that read each row
        ("v5e-16", 32, {"fsdp": 16}, 8, 4, 1),
        ("2xv5e-16", 64, {"data": 2, "fsdp": 16}, 8, 8, 1),
        ("v5p-2048", 2048, {"data": 64, "fsdp": 16}, 8, 256, 1),
        ("2xv5e-256", 64, {"data": 2, "fsdp": 32, "seq": 8}, None, None, None),
        ("v5e-64", 16, {"data": 4, "seq": 16}, None, None, None),
    ],
)
def test_each_process_reads_the_rows_on_its_devices(tpu, name, batch, mesh, own, sets, readers):
    found = program(name, batch, **mesh)
    rows = startup.assign_rows(found)
    assert set(rows) == {device.process_index for device in found.mesh.devices.flat}
    assert set().union(*(set(one.tolist()) for one in rows.values())) == set(range(batch))
    # The arrays' own sharding, device by device.
    holders: dict[int, set[int]] = {}
    for device, index in found.batch_rows.sharding["tokens"].devices_indices_map((batch, 16)).items():
        for row in range(batch)[index[0]]:
            holders.setdefault(row, set()).add(device.process_index)
    for row, processes in holders.items():
        assert processes == {process for process, one in rows.items() if row in one}
    if own is not None:
        assert {len(one) for one in rows.values()} == {own}
        assert len({one.tobytes() for one in rows.values()}) == sets
        assert {len(processes) for processes in holders.values()} == {readers}
    else:  # a sequence is split, so several processes read its row
        assert min(map(len, holders.values())) > 1


def test_misrouted_rows_are_detected(tpu):
    found = program("v5e-16", 32, fsdp=16)
    rows = found.batch_rows.rows_by_process
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(AssertionError, match="reads rows that its devices do not hold"):
        startup.assign_rows(found)


@pytest.mark.pairs
def test_this_processes_rows_are_among_the_global_rows():
    found = small.program(small.experiment(mesh={"fsdp": 8}))
    np.testing.assert_array_equal(found.rows, np.arange(8))
    assert list(found.batch_rows.rows_by_process) == [0]


# --- which process writes which arrays --------------------------------------------------------------------------------


def test_checkpoint_parts_add_up(tpu):
    found = program("2xv5e-16", 64, data=2, fsdp=16)
    written, _ = startup.count_written_bytes(found)
    assert sum(written.values()) == sum(leaf.spec.num_bytes for leaf in found.layout)
    assert len(written) == 8
    assert max(written.values()) < 1.2 * min(written.values())  # process 0 also writes what cannot be split


# Two processes with two devices each, with replicas in different processes. The hidden width of 520 cannot be split
# among replicas in host memory, so process 0 writes more.
JOB = """
import json, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.plan import startup
from plimsoll.framework.program.program import Program
from tests.support import small
memory = {"optimizer_state": "pinned_host"}
model = small.llama(dim=256, stack__pattern__0__mlp__hidden=520)
found = Program(small.experiment(model, mesh={"data": 2, "fsdp": 2}, memory=memory).instantiate())
def ones(spec):
    value = np.ones(spec.shape, spec.dtype)  # zeros would not be stored
    return jax.make_array_from_callback(spec.shape, found.layout.sharding(spec), lambda index: value[index])
state = jax.tree.map(ones, found.layout.specs)
with Checkpointer(directory=sys.argv[1]) as checkpointer:
    checkpointer.save(1, state, {})
print(json.dumps(startup.count_written_bytes(found)[0]))
"""


@pytest.mark.pairs
def test_predicted_process_writes_match_the_files(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path), port, str(i)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    last = [job.communicate(timeout=200)[0].splitlines()[-1] for job in jobs]  # Gloo prints lines too
    told = [{int(process): size for process, size in json.loads(line).items()} for line in last]
    assert told[0] == told[1]
    written = Counter[int]()
    for path in tmp_path.rglob("ocdbt.process_*/d/*"):
        written[int(path.parts[-3].rpartition("_")[2])] += path.stat().st_size
    for process, size in told[0].items():
        assert written[process] == pytest.approx(size, rel=0.01, abs=4096), (told, written)  # plus the index
    assert told[0][0] > 1.2 * told[0][1]
