"""`plimsoll plan`, and the memory check of `plimsoll train`, through their command lines."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.plan import memory_budget, targets
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan
from tests.support import plan_pages, small
from tests.support.runs import CONFIG, ROOT, write_text
from tests.support.runs import train as run_train

TINY = f"--config={CONFIG}:tiny"
# For tests in which the analytical estimate tries all settings. Each one is traced, so the model is small, and one row
# rules out microbatches.
ONE_LAYER = "--config.model.stack.num_layers=1"
ONE_ROW = "--config.data.global_batch_size=1"


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    return tmp_path / "cache" / "plimsoll" / "plans"


def run_plan(tmp_path: Path, *flags: str) -> tuple[int, Any]:
    path = tmp_path / "plan.json"
    code = plan.main([TINY, f"--json={path}", *flags])
    return code, json.loads(path.read_text())


@pytest.mark.pairs
def test_plan_is_printed_written_and_cached(
    tmp_path: Path, isolated_cache: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    flags = ["--target=cpu:2", "--step_only", ONE_LAYER]
    monkeypatch.setattr(targets.Target, "compiler_notes", ["compiled for another architecture"])
    code, report = run_plan(tmp_path, *flags)
    assert code == 0
    assert report["fits"]
    text = capsys.readouterr().out
    assert "fits: " in text
    assert "optimizer state" in text
    assert "compiled for another architecture" in text
    assert len(list(isolated_cache.iterdir())) == 1
    monkeypatch.setattr(
        "plimsoll.framework.plan.build_report.compile_report", lambda *_, **__: pytest.fail("compiled again")
    )
    assert run_plan(tmp_path, *flags) == (0, report)


def test_all_targets_are_listed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    # Overrides the compiler of this machine, if it has one.
    monkeypatch.setattr(targets, "installed_cuda", lambda: 13)
    monkeypatch.setattr(targets, "installed_cuda", lambda: 13)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    assert plan.main(["--targets"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    row_by_name = {line[0]: line[1:] for line in lines}
    assert row_by_name["v5e"][:-1] == ["16.00", "GiB", "15.75", "GiB", "197", "819", "200", "16"]
    assert row_by_name["rtx4090"] == ["23.52", "GiB", "22.01", "GiB", "165.2", "1008", "-", "32", "CUDA", "13"]
    assert row_by_name["a40"][4:8] == ["149.7", "696", "pair", "56"]
    assert row_by_name["v100-16"][4:] == ["f16", "125", "898", "150", "16", "CUDA", "13,", "as", "7.5"]
    # A v4 core, which is a separate device only in ahead-of-time compilation, has no row.
    assert [line[0] for line in lines].count("v4") == 1
    monkeypatch.setattr(targets, "installed_cuda", lambda: None)
    plan.main(["--targets"])
    assert "1008          -     32     estimate\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--targets", "--config=toy"], "error: --targets takes no other flags: it lists the values of --target"),
        ([TINY], "error: --target=NAME is required; run plimsoll plan --targets to list all targets"),
        (
            [TINY, "--target=4060ti"],
            "error: unknown target '4060ti'; nearest: rtx4060ti-8, rtx4060ti-16; all: plimsoll",
        ),
        ([TINY, "--target=4090x12"], "error: target '4090x12': no such size; nearest: rtx4090x8, rtx4090x16"),
    ],
)
def test_invalid_target_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture):
    assert plan.main(argv) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_cache_key_includes_config_target_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def fake(name: str, config: Any, target: Any, limit: int, **_: Any) -> PlanReport:
        seen.append((config.model.head.tied, target.name, limit))
        return plan_pages.plan()

    monkeypatch.setattr("plimsoll.framework.plan.build_report.compile_report", fake)
    monkeypatch.setattr("plimsoll.framework.plan.report_tables.sections", lambda _: [])
    for flags in (
        ["--target=cpu:1"],
        ["--target=cpu:1"],
        ["--target=cpu:2"],
        ["--target=cpu:2", "--device_memory_gib=3"],
        ["--target=cpu:2", "--device_memory_gib=3", "--config.model.head.tied=False"],
        ["--target=cpu:2", "--device_memory_gib=3", "--config.model.head.tied=False", "--step_only"],
        ["--target=cpu:2", "--device_memory_gib=3", "--config.model.head.tied=False", "--fresh"],
    ):
        assert run_plan(tmp_path, *flags)[0] == 0
    assert len(seen) == 6
    assert seen[-1] == (False, "cpu-2", 3 << 30)


@pytest.mark.pairs
def test_too_big_is_exit_code_4_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture):
    flags = ["--target=cpu:1", "--estimate", "--device_memory_gib=0.0001", ONE_LAYER, ONE_ROW]
    code, report = run_plan(tmp_path, *flags)
    assert code == ExitCode.TOO_BIG == 4
    assert not report["fits"]
    assert report["device_limit_bytes"] == int(0.0001 * 2**30)
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.pairs
def test_verdict_only_mode_lists_no_fitting_settings(tmp_path: Path):
    flags = ["--target=cpu:1", "--estimate", ONE_LAYER]
    _, report = run_plan(tmp_path, *flags)
    flags.append(f"--device_memory_gib={0.9 * report['device_peak_bytes'] / 2**30}")
    with_settings = run_plan(tmp_path, *flags)
    alone = run_plan(tmp_path, *flags, "--verdict_only")
    assert with_settings[0] == alone[0] == ExitCode.TOO_BIG
    assert with_settings[1]["suggestions"]
    assert not alone[1]["suggestions"]
    assert with_settings[1] | {"suggestions": []} == alone[1]


@pytest.mark.pairs
def test_compare_plans_every_combination(tmp_path: Path, capsys: pytest.CaptureFixture):
    compare = ["--compare=memory.remat=none,full", "--compare=learner.accumulate=1;2"]
    page = tmp_path / "plan.html"
    code, reports = run_plan(tmp_path, "--target=v5e-4", "--estimate", f"--html={page}", *compare)
    assert code == 0
    assert [one["settings"] for one in reports] == [
        [f"memory.remat={remat}", f"learner.accumulate={count}"] for remat in ("none", "full") for count in (1, 2)
    ]
    peaks = [one["device_peak_bytes"] for one in reports]
    assert peaks[0] > peaks[1]
    table = capsys.readouterr().out
    assert table.count("memory.remat=") == 4
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "--compare=memory.remat=none,full" in text
    assert text.count("<figure>") == 4


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("row", "is_larger"), [({"text": "the fox"}, False), ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, True)]
)
def test_plan_with_user_data(row: dict[str, str], is_larger: bool, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 20)
    page = tmp_path / "plan.html"
    code, report = run_plan(
        tmp_path, "--target=cpu:1", "--estimate", "--step_only", f"--html={page}", f"--data={data}", ONE_LAYER
    )
    assert code == 0
    assert report["fits"]
    # Both commands on the page also use this data, without its folder: a page may be shared.
    assert page.read_text().count(f"--data={data.name}") >= 2
    assert str(tmp_path) not in page.read_text()
    # The batch of pairs also has the arrays of its objective and of the reference model.
    _, plain = run_plan(tmp_path, "--target=cpu:1", "--estimate", "--step_only", ONE_LAYER)
    assert (report["device_peak_bytes"] > plain["device_peak_bytes"]) == is_larger


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--target"),
        (["--target=cpu:8", "--data=no-such.jsonl"], "--data: "),
        (["--target=v5e-9"], "nearest: v5e-8, v5e-16"),
        (["--target=h20"], "nearest"),
        (["--target=cpu:8", "--compare=memory.remat"], "expected PATH=A,B"),
        (["--target=cpu:8", "--compare=memory.remta=none"], "did you mean 'remat'"),
        (["--target=cpu:8", "--compare=memory.remat=none,all"], "given 'all'"),
        (["--target=cpu:8", "--device_memory_gib=0"], "expected more than 0"),
        (
            ["--target=cpu:8", "--html=/no/such/folder/x.html"],
            "--html=/no/such/folder/x.html: the folder /no/such/folder does not exist",
        ),
        (["--target=cpu:8", "--config.mesh.fsdp=3"], "is not the number of devices, 8"),
        (["--target=cpu:8", "--estimate", "--config.data.global_batch_size=3"], "nearest global_batch_size"),
        (["--target=cpu:8", "--estmate"], "did you mean '--estimate'"),
    ],
)
def test_user_errors_come_before_compilation(
    flags: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("plimsoll.framework.plan.build_report.compile_step", lambda *_: pytest.fail("compiled"))
    assert plan.main([TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.pairs
def test_a_real_tpu_compiler_from_the_command_line(tmp_path: Path):
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    path = tmp_path / "plan.json"
    flags = ["--target=v5e-4", "--config.memory.optimizer_state=pinned_host", f"--json={path}", "--step_only"]
    command = [sys.executable, "-m", "plimsoll", "plan", TINY, "--config.model.vocab_size=40000", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()  # libtpu does not complain about the machine
    said = [line.partition(" ...")[0] for line in lines]
    # On a slow machine, stderr also shows that it is starting, and that it is analyzing the program.
    assert {"tracing the training step", "compiling the training step for v5e-4"} <= set(said)
    assert all(re.match("starting|tracing|compiling|analyzing the compiled program", line) for line in said)
    report = json.loads(path.read_text())
    assert report["devices"] == 4
    assert report["device_limit_bytes"] == int(15.75 * 2**30)
    assert report["breakdown"]["other"] <= 0.05 * report["device_peak_bytes"]
    # The table's two moments, f32[40000, 32], are offloaded. XLA's program moves each in and out once.
    assert report["host_argument_bytes"] == 2 * 40000 * 32 * 4 // 4
    assert report["host_transfer_bytes"] == 2 * report["host_argument_bytes"]
    refused = [*command, "--device_memory_gib=0.01"]
    done = subprocess.run(refused, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 4
    report = json.loads(path.read_text())
    assert not report["fits"]
    assert "RESOURCE_EXHAUSTED" in report["message"]
    assert report["device_peak_bytes"] > report["device_limit_bytes"]


# --- launch.train ----------------------------------------------------------------------------------------------------


def test_train_refuses_oversized_configs_before_writing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("plimsoll.framework.program.program.Program.init", lambda *_: pytest.fail("made arrays"))
    flags = ["--device_memory_gib=0.00005", ONE_LAYER, "--config.memory.remat=full"]
    assert run_train(tmp_path / "run", *flags) == ExitCode.TOO_BIG == 4
    text = capsys.readouterr().out
    assert "the training step needs " in text
    assert "per device, but 52.4" in text
    assert "largest groups: " in text
    assert "--force starts the run anyway" in text
    assert not list((tmp_path / "run").glob("metrics.jsonl"))


def test_force_does_not_override_a_compiler_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_budget, "suggestions", lambda *_: [])
    config = small.experiment(small.llama())
    need = memory_budget.MemoryNeed(peak=100, resident=50, groups={"parameter": 50}, message="RESOURCE_EXHAUSTED")
    text = memory_budget.explain_refusal(config, small.program(config), need, limit=200)
    assert text is not None
    assert "compiler error: RESOURCE_EXHAUSTED" in text
    assert text.endswith("nothing was started; `plimsoll plan` shows every buffer")


@pytest.mark.pairs
def test_force_trains_all_the_same_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture):
    flags = ["--device_memory_gib=0.0003", "--force", "--config.trainer.max_steps=3"]
    assert run_train(tmp_path / "run", *flags) == 0
    text = capsys.readouterr().out
    assert "memory per device: predicted peak " in text
    error = float(text.partition("between steps, predicted ")[2].partition("(")[2].partition("%")[0])
    assert abs(error) <= 5.0
