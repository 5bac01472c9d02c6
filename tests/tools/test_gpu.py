"""The GPU script, as far as a CPU can test it: its rows are valid, its dry run passes, and bad rows are reported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.run import offload_self_test
from plimsoll.framework.schedules.memory import Memory
from tests.support.small import ROOT
from tools.bench import gpu, gpu_rows


@pytest.fixture(autouse=True)
def canary_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the offload self-test's number of steps, which rows raise in the process that runs them."""
    monkeypatch.setattr(offload_self_test, "STEPS", offload_self_test.STEPS)


H100, H200 = 72 * 2**30, 128 * 2**30  # bytes that a program may use


def rows_on(limit_bytes: int) -> list[dict[str, Any]]:
    return [row for part in gpu.PARTS for row in gpu.build_rows(part, limit_bytes)]


@pytest.mark.parametrize("limit", [H100, H200])
def test_row_names_are_unique_and_baselines_exist(limit: int) -> None:
    rows = rows_on(limit)
    names = [row["name"] for row in rows if row["part"] != "memory"]
    assert len(set(names)) == len(names)
    assert {row["against"] for row in rows if "against" in row} <= set(names)
    assert {row["part"] for row in rows if row.get("dry")} == set(gpu.PARTS)


@pytest.mark.pairs
@pytest.mark.parametrize("limit", [H100, H200])
def test_rows_are_valid_and_cover_all_memory_settings(limit: int) -> None:
    """Every config builds; in both dtypes, all schedules run, and all placements run with layer_programs."""
    tried: dict[str, list[Memory]] = {"float32": [], "bfloat16": []}
    for row in rows_on(limit):
        if row["kind"] == "exact":
            config = gpu_rows.build_config(row, gpu_rows._MEDIUM)
            tried[config.model.compute_dtype].append(config.instantiate().memory)
        elif row["kind"] == "train":
            config = gpu_rows.build_config(row, {"seq": row["seq"], "batch": row["batch"]})
            config.instantiate()
            assert config.data.global_batch_size * config.data.seq_len == row["batch"] * row["seq"]
    for found in tried.values():
        assert {one.update for one in found} == {"after_backward", "streamed", "in_backward", "layer_programs"}
        layers = [one for one in found if one.update == "layer_programs"]
        for place in ("optimizer_state", "parameters", "activations", "gradients"):
            # Some rows offload only the first layers: pinned_host:2.
            kinds = {getattr(one, place).text.partition(":")[0] for one in layers}
            assert kinds == {"device", "pinned_host", *(["none"] if place == "gradients" else [])}


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Run all parts on a CPU. A refused or missing row would not pass, and there is none."""
    command = [sys.executable, "-P", "-m", "tools.bench.gpu", "--dry", f"--out={tmp_path / 'gpu.json'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["dry"]
    assert found["machine"]["device"] == "cpu"
    assert found["machine"]["versions"]["jax"]
    expected = [row["name"] for row in rows_on(found["machine"]["limit_bytes"]) if row.get("dry")]
    assert [row["name"] for row in found["rows"]] == expected
    table = [line for line in done.stdout.partition("are not measurements")[2].splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[1] for line in table] == expected
    for row in found["rows"]:
        if row["part"] == "exact":
            assert row["status"] == "agrees"
            assert 0.0 <= row["off_by"] < 1e-3
        elif row["part"] == "torch":
            assert row["status"] in ("ran", "not available")
        else:
            assert row["status"] == "ran"
    by_name = {row["name"]: row for row in found["rows"]}
    offloaded = [name for name in by_name if "state_hosted" in name or "weights_hosted" in name]
    assert len(offloaded) == 3
    assert all(by_name[name]["host_bytes"] > 0 for name in offloaded)


def row(sets: dict[str, str], **fields: Any) -> dict[str, Any]:
    types = {"model.param_dtype": "float32", "model.compute_dtype": "float32", "learner.master_dtype": "none"}
    return {"part": "exact", "kind": "exact", "name": "x", "config": "llama3-8b", "sets": {**types, **sets}, **fields}


@pytest.mark.parametrize(
    ("bad", "seconds", "status", "message"),
    [
        (row({"memory.update": "in_backward"}), 60.0, "refused", "learner.clip_mode = global_norm with memory.update"),
        (row({"memory.update": "forwards"}), 60.0, "refused", "forwards"),
        ({"part": "link", "kind": "link", "name": "x", "mib": 1}, 0.01, "over 0 s, ended", ""),
        ({"part": "link", "kind": "no such kind", "name": "x"}, 60.0, "FAILED", "KeyError: 'no such kind'"),
    ],
)
def test_invalid_row_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, seconds: float, status: str, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    found = gpu.run(bad, True, seconds, tmp_path / "log")
    assert found["status"] == status
    assert message in found.get("message", "")
    assert message in gpu.text(found)


@pytest.mark.pairs
def test_wrong_values_and_crashed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that computes different numbers, or NaN, is WRONG."""
    monkeypatch.setattr(
        gpu_rows.offload_self_test, "compare", lambda ours, plain: {"loss of step 0": 0.0, "parameter/x": 0.5}
    )
    found = gpu_rows.exact(row({}), True)
    assert (found["status"], found["off_by"], found["at"]) == ("WRONG", 0.5, "parameter/x")
    monkeypatch.setattr(gpu_rows.offload_self_test, "compare", lambda ours, plain: {"loss of step 0": float("nan")})
    assert gpu_rows.exact(row({}), True)["status"] == "WRONG"


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Wrong or failed rows are an error; refused rows and rows without time left are only reported.

    Ratios compare tokens per second.
    """
    answers = {"machine": "ran", "gpt2-1.5b 32x1024 full": "ran", "gpt2-1.5b 32x1024 streamed full": "refused"}

    def run(row: Any, dry: bool, seconds: float, log: Path) -> Any:
        rate = {"tokens_per_second": 50.0 if "layer_programs" in row["name"] else 100.0}
        return {**row, "status": answers.get(row["name"], "ran"), **rate}

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "gpu.json"
    assert gpu.main(["speed", f"--out={out}"]) == 0
    output = capsys.readouterr().out
    assert "| speed | gpt2-1.5b 32x1024 streamed full | refused |" in output
    assert "0.50 times 'gpt2-1.5b 32x1024 full'" in output
    answers["gpt2-124m 32x1024 none"] = "LOSS DOES NOT FALL"
    assert gpu.main(["speed", f"--out={out}"]) == 1
    assert gpu.main(["link", f"--out={out}", "--minutes=0.01"]) == 0
    assert {row["status"] for row in json.loads(out.read_text())["rows"]} == {"not run: no time left (--minutes)"}
