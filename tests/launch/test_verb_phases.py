"""The phases that each verb reports, in a pipe and on a terminal. The tests check the phases, not their times."""

import os
import re
from pathlib import Path

import pytest

from tests.support.runs import CONFIG, write_text
from tests.support.timed_output import TimedOutput, run_module_timed

pytestmark = pytest.mark.pairs

SHORT = ("--config.trainer.max_steps=4", "--config.trainer.eval_batches=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some text, and with the run that the `training_run` fixture adds."""
    folder = tmp_path_factory.mktemp("phases")
    write_text(folder)
    return folder


def train(folder: Path, run: str, *, terminal: bool = False) -> TimedOutput:
    words = ["plimsoll.launch.train", f"--config={CONFIG}:tiny", f"--workdir={folder}/{run}", *SHORT]
    cache = f"--config.trainer.compilation_cache={folder}/programs"
    environment = {"TINY_TEXT": str(folder), "XLA_FLAGS": "", "XDG_CACHE_HOME": f"{folder}/cache"}
    heard = run_module_timed([*words, cache], terminal=terminal, environment=environment)
    assert heard.code == 0, heard.text
    return heard


@pytest.fixture(scope="module")
def training_run(folder: Path) -> TimedOutput:
    return train(folder, "run")


def test_train_prints_each_phase_on_its_own_line(training_run: TimedOutput, folder: Path):
    for phase in ("tokenizing train", "tracing the training step", "compiling the training step", "evaluating "):
        assert re.search(rf"^{phase}.* \.\.\..* done in \S+ s$", training_run.text, re.MULTILINE), phase
    assert "the last time" not in training_run.text
    assert "\r" not in training_run.text
    # Other output starts on its own lines.
    assert re.search(r"^step 4/4 ", training_run.text, re.MULTILINE)
    assert re.search(r"^step 4: eval/.* \(\S+: 1 of \d+ batches\)$", training_run.text, re.MULTILINE)


def test_a_terminal_has_the_phases_in_its_bar(training_run: TimedOutput, folder: Path):
    seen = train(folder, "again", terminal=True).text
    for phase in ("compiling the training step", "evaluating "):
        assert re.search(rf"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏|/\\-] {phase}", seen), phase
    assert "done in" not in seen
    assert re.search(r"compiling the training step \(\S+ s the last time\)", seen)


def test_evaluate_lists_all_validation_sets(training_run: TimedOutput, folder: Path):
    words = ["plimsoll.launch.evaluate", f"--config={CONFIG}:tiny", f"--workdir={folder}/run", "--validation"]
    heard = run_module_timed(words, environment=make_environment(folder))
    assert heard.code == 0, heard.text
    assert re.search(r"^evaluating \S+ \.\.\..* done in \S+ s$", heard.text, re.MULTILINE)
    assert re.search(r"^\S+: loss [0-9.]+, .*tokens [0-9,]+", heard.text, re.MULTILINE)


def test_plan_prints_compilations_and_their_previous_times(folder: Path):
    words = ["plimsoll.launch.plan", f"--config={CONFIG}:tiny", "--target=cpu:1", "--fresh", "--step_only"]
    words.append("--config.model.stack.num_layers=8")
    first = run_module_timed(words, environment=make_environment(folder))
    assert re.search(r"^compiling the training step for cpu-1 \.\.\.", first.text, re.MULTILINE), first.text
    # Only compile times of half a second or more are stored.
    (time,) = (folder / "cache" / "plimsoll" / "compile-times").iterdir()
    time.write_text("7.5\n")
    second = run_module_timed(words, environment=make_environment(folder))
    assert "compiling the training step for cpu-1 (7.5 s the last time) ..." in second.text


def test_only_process_0_prints_phases(folder: Path):
    heard = run_module_timed(
        ["plimsoll.launch.plan", f"--config={CONFIG}:tiny", "--target=cpu:1", "--step_only"],
        environment={**make_environment(folder), "SLURM_PROCID": "1"},
    )
    assert "compiling" not in heard.text
    assert "verdict" in heard.text


def make_environment(folder: Path) -> dict[str, str]:
    return {"TINY_TEXT": str(folder), "XLA_FLAGS": os.environ["XLA_FLAGS"], "XDG_CACHE_HOME": f"{folder}/cache"}
