"""`plimsoll plan --check`: the runs of a file against a baseline, the comment, and the GitHub Action that posts it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan
from plimsoll.launch.plan_check import make_marker
from tests.support.runs import CONFIG, ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_plans(*runs: str) -> None:
    Path("plans.toml").write_text("\n".join(f"[[run]]\n{run}\n" for run in runs))


def build_run(rows: int, **fields: str) -> str:
    lines = [f'config = "{CONFIG}:tiny"', 'target = "4090"', f'set = {{ "data.global_batch_size" = {rows} }}']
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in fields.items())])


def check(*flags: str) -> int:
    return plan.main(["--check=plans.toml", *flags])


def read_table() -> dict[str, list[str]]:
    """Return {name of a run: its other cells} of the comment."""
    lines = [line for line in Path("comment.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {name: rest for name, *rest in cells}


def test_a_run_that_stops_fitting_fails_the_check(capsys: pytest.CaptureFixture) -> None:
    # A device with room for 8 rows but not for 64.
    small = {"device_memory_gib": "0.01"}
    write_plans(
        build_run(8, name='"grows"', **small),
        build_run(8, name='"stays"'),
        build_run(64, name='"known"', must_fit="false", **small),
    )
    assert check("--json=base.json", "--markdown=comment.md") == ExitCode.DONE
    assert "all 3 pass" in Path("comment.md").read_text()
    assert read_table()["known"][-1].endswith("does not fit (allowed)")

    write_plans(
        build_run(64, name='"grows"', must_fit="false", **small),
        build_run(8, name='"stays"'),
        build_run(8, name='"added"'),
    )
    capsys.readouterr()
    assert check("--baseline=base.json", "--json=head.json", "--markdown=comment.md") == ExitCode.TOO_BIG
    assert "NO LONGER FITS" in capsys.readouterr().out
    comment = Path("comment.md").read_text()
    assert comment.startswith("<!-- plimsoll plan --check=plans.toml -->\n### Memory plans: 1 of 3 fail\n")
    table = read_table()
    assert table["run"] == ["batch", "base", "now", "change", "limit", "step time", "verdict"]
    batch, base, now, change, limit, seconds, verdict = table["grows"]
    assert (verdict, limit) == ("❌ NO LONGER FITS", "10.24 MiB")
    assert batch.startswith("8 rows of ")
    assert "→ 64 rows of " in batch
    assert " → " in seconds
    before, after = (json.loads(Path(f"{name}.json").read_text())["checks"][0]["report"] for name in ("base", "head"))
    assert f"{before['device_peak_bytes'] / 2**20:.2f} MiB" == base
    assert f"{after['device_peak_bytes'] / 2**20:.2f} MiB" == now
    assert change.startswith(f"+{(after['device_peak_bytes'] - before['device_peak_bytes']) / 2**20:.2f} MiB (+")
    assert table["stays"][3] == "none"
    assert table["stays"][-1] == "✅ fits"
    assert table["added"][1] == "-"
    assert table["added"][-1] == "✅ fits, new"
    # The command looks for settings that fit.
    assert f"plimsoll plan --config={CONFIG}:tiny --target=4090 --config.data.global_batch_size=64" in comment

    # The other way round, nothing fails.
    write_plans(build_run(8, name='"grows"', **small))
    assert check("--baseline=head.json", "--markdown=comment.md") == ExitCode.DONE
    assert read_table()["grows"][-1] == "✅ fits again"


def test_a_run_that_cannot_be_planned_does_not_hide_the_others(capsys: pytest.CaptureFixture) -> None:
    bad = f'name = "bad | <b>@all"\nconfig = "{CONFIG}:tiny"\ntarget = "4090"\nset = {{ "memory.remt" = "full" }}'
    write_plans(bad, build_run(8, name='"good"'))
    assert check("--markdown=comment.md", "--json=head.json") == ExitCode.USAGE
    assert "error: bad | <b>@all: --config.memory.remt=full: no such field" in capsys.readouterr().err
    table = read_table()
    assert table["good"][-1] == "✅ fits"
    assert table[r"bad \| &lt;b>&#64;all"][-1].startswith("❌ cannot be planned: --config.memory.remt=full")
    assert json.loads(Path("head.json").read_text())["checks"][0]["report"] is None


MISTAKES = [
    ("[[runs]]\n", "unknown table 'runs'; did you mean 'run'?"),
    ("", "expected at least one [[run]]"),
    ("run = [1]\n", "expected at least one [[run]]"),
    ("[[run]]\nconfig = 'x'\n", "run 1: target is required"),
    ("[[run]]\nconfig = 'x'\ntarget = 'a,b'\n", "run 1: target: expected one target, given 'a,b'"),
    ("[[run]]\nconfig = 'x'\ntagret = 'a'\n", "run 1: unknown field 'tagret'; did you mean 'target'?"),
    ("[[run]]\nconfig = 'x'\ntarget = 'a'\nmust_fit = 'no'\n", "run 1: must_fit: expected true or false, given 'no'"),
    ("[[run]]\nconfig = 'x'\ntarget = 'a'\nset = ['a']\n", "run 1: set: expected a table, given ['a']"),
    ("[[run]]\nconfig = 'x'\ntarget = 'a'\n" * 2, "two runs are named 'x on a'"),
    ("[[run]\n", "plans.toml: "),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_in_the_file_are_one_line(text: str, message: str, capsys: pytest.CaptureFixture) -> None:
    Path("plans.toml").write_text(text)
    assert check() == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_flags_that_do_not_belong_together_are_refused(capsys: pytest.CaptureFixture) -> None:
    write_plans(build_run(8))
    assert check("--target=h100") == ExitCode.USAGE
    assert "--check cannot be combined with --target" in capsys.readouterr().err
    assert plan.main(["--config=gpt2-124m", "--target=h100", "--markdown=x.md"]) == ExitCode.USAGE
    assert "--markdown requires --check" in capsys.readouterr().err
    Path("base.json").write_text("[]")
    assert check("--baseline=base.json") == ExitCode.USAGE
    assert "--baseline=base.json: expected what `plimsoll plan --check" in capsys.readouterr().err


# --- the GitHub Action ------------------------------------------------------------------------------------------------

# Records its arguments, and lists the ids of COMMENTS.
FAKE_GH = """#!/bin/bash
echo "$@${MARKER:+ of $MARKER}" >> "$RUNNER_TEMP/calls"
if [ "$2" = "--paginate" ]; then printf '%s' "$COMMENTS"; exit "${DENIED:-0}"; fi
if [[ "$2" == */tarball/* ]]; then tar --create --gzip --directory="$RUNNER_TEMP" repository; fi
"""
# Writes the comment and ends with CODE.
FAKE_PLAN = """#!/bin/bash
echo "$@" "${GH_TOKEN:+with the token}" >> "$RUNNER_TEMP/plans.calls"
echo table > "$FOLDER/comment.md"
exit "$CODE"
"""


def run_step(name: str, temporary: Path, **environment: str) -> int:
    """Run the script of a step of the action as GitHub does, with fakes of gh and of plimsoll."""
    (script,) = (step["run"] for step in ACTION["runs"]["steps"] if step.get("name") == name)
    programs = {"bin/gh": FAKE_GH, "plimsoll/bin/plimsoll": FAKE_PLAN}
    programs |= dict.fromkeys(("bin/python", "plimsoll/bin/python"), "#!/bin/bash\n")
    for path, text in programs.items():
        program = temporary / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    variables = {
        "PATH": f"{temporary / 'bin'}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(temporary),
        "FOLDER": str(temporary / "plans"),
        "GITHUB_REPOSITORY": "org/name",
        "GITHUB_OUTPUT": str(temporary / "output"),
        "GITHUB_STEP_SUMMARY": str(temporary / "summary"),
        **environment,
    }
    return subprocess.run(["bash", "-eo", "pipefail", "-c", script], env=variables, timeout=20).returncode


@pytest.mark.parametrize(
    ("comments", "code", "call"),
    [
        ("", "4", "--method POST repos/org/name/issues/7/comments"),
        ("11\n12", "4", "--method PATCH repos/org/name/issues/comments/11"),
        # A comment of an earlier commit is corrected, and nothing else is said while all fit.
        ("11", "0", "--method PATCH repos/org/name/issues/comments/11"),
        ("", "0", None),
    ],
)
def test_the_action_has_one_comment(tmp_path: Path, comments: str, code: str, call: str | None) -> None:
    (tmp_path / "plans").mkdir()
    marker = make_marker(Path("a/plans.toml"))
    (tmp_path / "plans" / "comment.md").write_text(f"{marker}\ntable")
    assert run_step("Comment", tmp_path, COMMENTS=comments, CODE=code, NUMBER="7") == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("api --paginate repos/org/name/issues/7/comments")
    # Another use in the same job has its own comment.
    assert "startswith(env.MARKER)" in calls[0]
    assert calls[0].endswith(" of <!-- plimsoll plan --check=a/plans.toml -->")
    assert len(calls) == (1 if call is None else 2)
    if call is not None:
        assert calls[1] == f"api --silent {call} --field body=@{tmp_path}/plans/comment.md of {marker}"


def test_the_action_plans_the_head_and_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "base.json").write_text("{}")
    assert run_step("Plan the head", tmp_path, PLANS="my plans.toml", CODE="4") == 0
    folder = tmp_path / "plans"
    written = (tmp_path / "plans.calls").read_text()
    flags = f"--json={folder}/head.json --markdown={folder}/comment.md --baseline={folder}/base.json"
    assert written == f"plan --check=my plans.toml {flags} \n"
    assert (tmp_path / "output").read_text() == f"code=4\njson={folder}/head.json\n"
    assert (tmp_path / "summary").read_text() == "table\n"
    assert run_step("Verdict", tmp_path, CODE="4") == 4


def test_the_action_plans_the_base_without_the_token(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "plans.toml").write_text("")
    (tmp_path / "plans").mkdir()
    assert run_step("Plan the base", tmp_path, PLANS="plans.toml", CODE="4", BASE="abc", GH_TOKEN="secret") == 0
    assert (tmp_path / "calls").read_text() == "api repos/org/name/tarball/abc\n"
    assert (tmp_path / "plans.calls").read_text() == f"plan --check=plans.toml --json={tmp_path}/plans/base.json \n"
    # A base without the file is not planned.
    shutil.rmtree(tmp_path / "plans" / "base")
    (tmp_path / "repository" / "plans.toml").unlink()
    assert run_step("Plan the base", tmp_path, PLANS="plans.toml", CODE="4", BASE="abc", GH_TOKEN="secret") == 0
    assert len((tmp_path / "plans.calls").read_text().splitlines()) == 1


def test_each_use_of_the_action_has_a_folder(tmp_path: Path) -> None:
    """The JSON of the first use is still there after the second one."""
    for _ in range(2):
        assert run_step("Install", tmp_path) == 0
    folders = [line.removeprefix("folder=") for line in (tmp_path / "output").read_text().splitlines()]
    assert len(set(folders)) == 2
    assert all(Path(folder).is_dir() for folder in folders)


def test_a_token_that_may_not_read_comments_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "comment.md").write_text("table")
    assert run_step("Comment", tmp_path, COMMENTS="", CODE="4", NUMBER="7", DENIED="1") == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_inputs_reach_the_scripts_only_as_variables() -> None:
    """An expression inside of a script would run text from a pull request."""
    steps: list[dict[str, Any]] = ACTION["runs"]["steps"]
    assert not [step["name"] for step in steps if "${{" in step.get("run", "")]
