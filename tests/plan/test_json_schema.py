"""The JSON Schema of `plimsoll plan --json` describes what each mode writes."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plimsoll.framework.plan.plan_report import SCHEMA_FILE, SCHEMA_VERSION
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan
from tests.support.runs import CONFIG, write_text
from tools import plan_schema

SCHEMA = json.loads(SCHEMA_FILE.read_text())
TINY = [f"--config={CONFIG}:tiny", "--config.model.stack.num_layers=1"]
ESTIMATE = [*TINY, "--estimate"]

FUNCTION = """
import jax
import jax.numpy as jnp


def step():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return (lambda x: x @ x), (square,)
"""
JOB = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 1
seq_len = 64
"""
# {mode: (flags, exit code)}
MODES: dict[str, tuple[list[str], int]] = {
    "estimate": ([*ESTIMATE, "--target=4090"], ExitCode.DONE),
    "compiled": ([*TINY, "--target=cpu:1", "--step_only"], ExitCode.DONE),
    "does not fit": ([*ESTIMATE, "--target=4090", "--device_memory_gib=0.0001"], ExitCode.TOO_BIG),
    "smaller batch": ([*ESTIMATE, "--target=h100", "--device_memory_gib=0.0005"], ExitCode.TOO_BIG),
    "would fit": ([*ESTIMATE, "--target=h100", "--device_memory_gib=0.001"], ExitCode.TOO_BIG),
    "several targets": ([*ESTIMATE, "--target=4090,v5e-8"], ExitCode.DONE),
    "smallest": ([*ESTIMATE, "--smallest", "--target=4090,h100"], ExitCode.DONE),
    "compare": ([*ESTIMATE, "--target=4090", "--compare=memory.remat=none,full"], ExitCode.DONE),
    "auto": ([*ESTIMATE, "--target=4090", "--auto", "--config.data.global_batch_size=1"], ExitCode.DONE),
    "function": (["--function=step.py:step", "--target=cpu:1"], ExitCode.DONE),
    "from": (["--from", "job.toml", "--target=4090"], ExitCode.DONE),
    "functions": (["--function=step.py:step", "--target=cpu:1,cpu:2"], ExitCode.DONE),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    Path("step.py").write_text(FUNCTION)
    Path("job.toml").write_text(JOB)


# Keys that only these modes fill; the frontiers of test_largest.py are checked there.
FILLED = {"smaller batch": "smaller_batch", "would fit": "suggestions", "auto": "auto", "from": "from"}


def check(content: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(content)


def test_the_stored_schema_is_valid_current_and_printed(capsys: pytest.CaptureFixture) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert plan_schema.build_schema() == SCHEMA
    assert plan.main(["--json-schema"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_each_field_has_a_description() -> None:
    for name, definition in SCHEMA["$defs"].items():
        missing = [key for key, value in definition["properties"].items() if not {"description", "$ref"} & set(value)]
        assert name == "Checks" or not missing


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_valid(mode: str) -> None:
    flags, code = MODES[mode]
    assert plan.main([*flags, "--json=plan.json"]) == code
    content = json.loads(Path("plan.json").read_text())
    check(content)
    reports = content if isinstance(content, list) else [content]
    for report in reports:
        assert report["schema_version"] == SCHEMA_VERSION
        assert mode not in FILLED or report[FILLED[mode]]
        # A field that the schema does not have, one of another type, and one that is missing.
        for change in ({"other": 1}, {"fits": "yes"}):
            with pytest.raises(jsonschema.ValidationError):
                check(report | change)
        with pytest.raises(jsonschema.ValidationError):
            check({key: value for key, value in report.items() if key != "device_peak_bytes"})


def test_checks_are_valid() -> None:
    Path("plans.toml").write_text(f'[[run]]\nconfig = "{CONFIG}:tiny"\ntarget = "4090"\n')
    assert plan.main(["--check=plans.toml", "--json=plan.json"]) == ExitCode.DONE
    content = json.loads(Path("plan.json").read_text())
    check(content)
    assert content["checks"][0]["report"]["schema_version"] == SCHEMA_VERSION


def test_a_step_that_the_compiler_refuses_is_valid() -> None:
    assert plan.main([*ESTIMATE, "--target=4090", "--json=plan.json"]) == ExitCode.DONE
    report = json.loads(Path("plan.json").read_text())
    check(report | {"fits": False, "message": "out of memory"})
