"""Runs that end before their last step: `trainer.stop`, and `run.stop` of a hook; and the best checkpoint."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll.framework.config import ConfigError
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.stop_rules import StopRules, parse_duration
from plimsoll.framework.run import hooks
from plimsoll.framework.run.best_metric import BestMetric
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import evaluate, status
from tests.support.runs import CONFIG, output, pair, rows, train
from tests.support.tiny import tiny

EVALUATE = "--config.trainer.eval_every=2"
# The loss stays the same, so no evaluation improves on the first one.
STILL = "--config.learner.optimizer.learning_rate=0.0"
PATIENT = (EVALUATE, STILL, "--config.trainer.stop.patience=2")
FILE = """
from tests.support.tiny import tiny
from plimsoll.framework.config import config_for
from plimsoll.framework.run.hooks import Hook, NonFiniteError

class Ask(Hook):
    def __init__(self, *, stop_at: int = 0, save_at: int = 0, fail_at: int = 0, process: int = 0):
        self.stop_at, self.save_at, self.fail_at, self.process = stop_at, save_at, fail_at, process

    def after_step(self, run, step):
        import jax
        if step == self.fail_at:
            raise NonFiniteError("the process is killed here")
        run.log(step, {"mine/double": 2.0 * step})
        if jax.process_index() == self.process:
            if step == self.stop_at:
                run.stop("the answer is known")
            if step == self.save_at:
                run.request_save()

def build():
    config = tiny()
    config.trainer.hooks = [config_for(Ask)]
    return config
"""


def manifest(workdir: Path, step: int) -> dict:
    return json.loads((workdir / "checkpoints" / f"{step:08d}" / "manifest" / "data.json").read_text())["extra"]


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("0*"))


@pytest.fixture
def hook_flags(tmp_path: Path) -> dict[str, str]:
    """The keyword arguments of `train` for a config with a hook that stops, saves or fails at a step."""
    (tmp_path / "hooks.py").write_text(FILE)
    return {"file": str(tmp_path / "hooks.py"), "config": "build"}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_value_is_that_of_numpy(mode: str):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 6, 200).astype(float)
    tracked = BestMetric("eval/a/loss", mode)  # pyright: ignore[reportArgumentType]
    for count in range(1, len(values) + 1):
        tracked.count(10 * count, values[count - 1])
        # A resumed run continues from what the checkpoint stores.
        stored = json.loads(json.dumps(tracked.to_json()))
        tracked = BestMetric("eval/a/loss", mode)  # pyright: ignore[reportArgumentType]
        tracked.restore(stored)
        # numpy returns the first of equal values.
        best = int((np.argmin if mode == "min" else np.argmax)(values[:count]))
        assert (tracked.value, tracked.step) == (values[best], 10 * (best + 1))
        assert tracked.evaluations == count - 1 - best


def test_what_counts_as_an_improvement():
    tracked = BestMetric("eval/a/loss", min_improvement=0.1)
    assert [tracked.count(step, value) for step, value in enumerate([math.nan, 1.0, 0.95, 0.89, math.nan])] == [
        False,
        True,
        False,
        True,
        False,
    ]
    # The same evaluation, read again by a resumed run.
    assert not tracked.count(4, 0.0)
    tracked.restore({**tracked.to_json(), "metric": "eval/b/loss"})
    assert (tracked.value, tracked.evaluations, tracked.last_step) == (None, 0, None)


def test_durations():
    texts = {"90s": 90, "30m": 1800, "2h": 7200, "1h30m": 5400, "1d": 86400, "1.5 h": 5400}
    assert {text: parse_duration(text) for text in texts} == texts
    for text in ("", "2", "2 hours", "h", "0s", "-1h", "1h x"):
        with pytest.raises(ValueError, match="expected a duration such as"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop.patience": "2", "eval_every": "none"}, "stop.patience requires eval_every"),
        ({"keep_best": "loss", "eval_every": "none"}, "keep_best requires eval_every"),
        ({"stop.min_improvement": "0.1"}, "min_improvement = 0.1 requires patience"),
        ({"stop.target": "nan"}, "expected a finite number"),
        ({"stop.wall_clock": "2 hours"}, "expected a duration such as 90s"),
        ({"stop.target": "1", "stop.metric": "train/loss"}, "expected a metric of evaluations, eval/SET/NAME"),
        ({"stop.target": "1", "stop.metric": "eval/hold/loss"}, "no validation set 'hold'.*did you mean 'held'"),
        ({"keep_best": "eval_ema/held/loss"}, "learner.ema is not set"),
    ],
)
def test_bad_rules_are_refused_by_the_config(settings: dict[str, str], message: str):
    config = tiny()
    config.trainer.eval_every = 2
    for path, text in settings.items():
        config.override(f"trainer.{path}", text)
    with pytest.raises((ConfigError, ValueError), match=message):
        config.instantiate()


def test_a_name_needs_its_set_if_there_are_several():
    config = tiny()
    config.data.validation = {**config.data.validation, "other": config.data.validation["held"].copy()}
    config.trainer.stop.target = 1.0
    with pytest.raises(ConfigError, match=r"trainer.stop.metric: expected a .*: eval/held/loss, eval/other/loss"):
        config.instantiate()


@pytest.mark.parametrize("update", ["after_backward", "layer_programs"])
def test_a_metric_that_evaluations_lack_is_refused_before_compiling(update, text, tmp_path, capsys, monkeypatch):
    for backend in (JitStep, PerLayerStep):
        monkeypatch.setattr(backend, "compile", lambda self: pytest.fail("compiled"))
    flags = [f"--config.memory.update={update}", "--config.trainer.stop.target=1"]
    assert train(tmp_path / "run", *flags, "--config.trainer.stop.metric=lss") == 2
    assert "trainer.stop.metric: evaluations have no metric 'lss'; did you mean 'loss'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_layer_programs_have_the_sums_of_one_program():
    sums = {}
    for update in ("in_backward", "layer_programs"):
        config = tiny()
        config.memory.update = update
        config.memory.parameters = "pinned_host"
        config.learner.clip = None
        sums[update] = Program(config.instantiate(), jax.devices()[:1]).backend.evaluation_sums()
    assert sums["in_backward"] == sums["layer_programs"] != []


def test_patience_is_exact_across_a_kill(text, tmp_path, capsys, hook_flags):
    assert train(tmp_path / "whole", *PATIENT) == ExitCode.STOPPED_EARLY
    assert "step 6: stopped early: eval/held/loss has not improved for 2 evaluations" in capsys.readouterr().out
    killed = tmp_path / "killed"
    # The checkpoint of step 4 has counted one evaluation.
    assert train(killed, *PATIENT, "--config.trainer.hooks.0.fail_at=5", **hook_flags) == ExitCode.NONFINITE
    assert manifest(killed, 4)["stop"]["evaluations"] == 1
    assert train(killed, *PATIENT, **hook_flags) == ExitCode.STOPPED_EARLY
    assert saved_steps(killed) == saved_steps(tmp_path / "whole") == [4, 6]
    for name in ("stop", "stop_reason"):
        assert manifest(killed, 6)[name] == manifest(tmp_path / "whole", 6)[name]
    # The same command again changes nothing, more patience continues.
    capsys.readouterr()
    assert train(killed, *PATIENT, **hook_flags) == ExitCode.STOPPED_EARLY
    assert "nothing to do" in capsys.readouterr().out
    assert train(killed, *PATIENT, "--config.trainer.stop.patience=3", **hook_flags) == ExitCode.STOPPED_EARLY
    assert "step 8: stopped early: eval/held/loss has not improved for 3 evaluations" in capsys.readouterr().out
    facts = status.status(killed, 0.0)
    assert facts["health"] == "done"
    assert "trainer.stop.patience = 3" in facts["processes"][0]["reason"]


def test_the_clock_ends_a_run_and_counts_earlier_starts(text, tmp_path, capsys, monkeypatch):
    clock = ("--config.trainer.stop.wall_clock=1h",)
    elapsed = [0.0]

    def tick(goodput) -> float:
        elapsed[0] += 600.0
        return elapsed[0]

    monkeypatch.setattr("plimsoll.framework.metrics.goodput.Goodput.elapsed", tick)
    # The clock is read at the start and once before each step.
    assert train(tmp_path / "run", *clock) == ExitCode.STOPPED_EARLY
    assert "step 5: stopped early: the run has taken 1h (trainer.stop.wall_clock)" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == [4, 5]
    # A step that ends a run early is evaluated.
    assert [row["step"] for row in rows(tmp_path / "run") if "eval/held/loss" in row] == [5]


def test_the_best_checkpoint_is_kept_and_selected(text, tmp_path, capsys):
    best = ("--config.trainer.keep_best=loss", "--config.trainer.keep=1", EVALUATE)
    run = tmp_path / "run"
    # The loss falls, so its maximum is the first evaluation.
    assert train(run, *best, "--config.trainer.keep_best_mode=max") == 0
    assert saved_steps(run) == [2, 12]
    assert manifest(run, 12)["best"]["step"] == 2
    capsys.readouterr()
    assert evaluate.main([f"--workdir={run}", f"--config={CONFIG}:tiny", "--validation", "--step=best"]) == 0
    printed = capsys.readouterr()
    assert f"{run}, step 2" in printed.err
    (loss,) = (row["eval/held/loss"] for row in rows(run) if row["step"] == 2 and "eval/held/loss" in row)
    assert f"loss {loss:,.6g}" in printed.out
    # The step after an evaluation at the end is the best: its checkpoint, saved before, is saved again.
    assert train(tmp_path / "low", *best) == 0
    assert saved_steps(tmp_path / "low") == [12]
    assert manifest(tmp_path / "low", 12)["best"]["step"] == 12
    assert train(tmp_path / "none", "--config.trainer.max_steps=1") == 0
    none = [f"--workdir={tmp_path / 'none'}", f"--config={CONFIG}:tiny", "--validation"]
    assert evaluate.main([*none, "--step=best"]) == 2
    assert "the run keeps no best checkpoint (trainer.keep_best is not set)" in capsys.readouterr().err


def test_a_hook_stops_saves_and_logs(text, tmp_path, capsys, hook_flags):
    run = tmp_path / "run"
    flags = ("--config.trainer.hooks.0.stop_at=6", "--config.trainer.hooks.0.save_at=3", "--config.trainer.keep=9")
    assert train(run, *flags, **hook_flags) == ExitCode.STOPPED_EARLY
    assert "step 6: stopped early: the answer is known" in capsys.readouterr().out
    assert saved_steps(run) == [3, 4, 6]
    assert {row["step"]: row["mine/double"] for row in rows(run) if "mine/double" in row} == {
        step: 2.0 * step for step in range(1, 7)
    }
    # The row of the saved step precedes its checkpoint.
    assert manifest(run, 3)["data"]["next"] == 3
    # Only the hook knows whether the run should stop again.
    assert train(run, **hook_flags) == 0
    assert max(saved_steps(run)) == 12


def test_reasons_and_metrics_of_hooks_are_checked():
    class Run(hooks.Run):
        def __init__(self): ...

    with pytest.raises(ValueError, match="expected a reason in one line"):
        Run().stop("")
    with pytest.raises(ValueError, match="'train/loss' is a name of the run's own metrics"):
        Run().log(1, {"train/loss": 1.0})
    with pytest.raises(ValueError, match="expected a number as 'mine/x'"):
        Run().log(1, {"mine/x": np.zeros(2)})  # pyright: ignore[reportArgumentType]


@pytest.mark.pairs
@pytest.mark.parametrize("rule", ["hook", "clock"])
def test_two_processes_stop_at_the_same_step(rule: str, text: Path, tmp_path: Path, hook_flags: dict[str, str]):
    run = tmp_path / "run"
    flags = ["--config.trainer.max_steps=100000", "--config.trainer.save_every=100000"]
    if rule == "hook":
        # Only process 1 asks, and process 0 prints its reason.
        flags += ["--config.trainer.hooks.0.stop_at=3", "--config.trainer.hooks.0.process=1"]
    else:
        flags += ["--config.trainer.stop.wall_clock=45s"]
    processes = pair(run, *flags, **hook_flags)
    assert [process.wait(timeout=300) for process in processes] == [ExitCode.STOPPED_EARLY] * 2, output(run)
    (step,) = saved_steps(run)
    reason = "the answer is known" if rule == "hook" else "the run has taken 45s"
    assert f"step {step}: stopped early: {reason}" in output(run)
    if rule == "hook":
        assert 4 <= step <= 5


def test_rules_have_defaults_that_stop_nothing():
    rules = StopRules()
    assert not rules.reads_metric
    assert not rules.reaches_target(-math.inf)
