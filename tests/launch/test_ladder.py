"""`plimsoll ladder` and `pl.Ladder`: sizes, refusals before anything starts, results, and how a ladder continues."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import plimsoll as pl
from plimsoll.api import ladder as ladder_module
from plimsoll.api.ladder_process import MemoryLimits, PlannedRungs, RungPlan, plan_rungs
from plimsoll.extras.scaling.ladder_record import LADDER_FILE, read_record
from plimsoll.extras.scaling.rungs import Rung
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import ladder
from tests.support import runs as support
from tools import kill_ladder

TINY = f"--config={support.CONFIG}:tiny"
FITS = RungPlan(fits=True, peak_bytes=1, verdict="fits", seconds=0.5)
SGD = '{"$class": "optax.sgd", "learning_rate": 0.1}'
# E, A and alpha of the losses that the trained rungs have here.
LAW = (1.5, 900.0, 0.3)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return support.write_text(tmp_path / "text")


@dataclass
class Trained:
    """The rungs that a ladder has started, and how they end.

    Attributes:
        names: their names, in order.
        codes: exit codes by name; 0 for any other.
        data_tokens: tokens of one epoch.
        plans: plans by name; FITS for any other.
    """

    names: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    data_tokens: int = 10**9
    plans: dict[str, RungPlan] = field(default_factory=dict)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Replace planning and training: a rung ends at once, with a loss that follows a law."""
    seen = Trained()

    def plan(requests: Sequence, options, target: str, limits, folder: Path | None = None, *, force: bool = False):
        rungs = ladder_module.build_rungs([request.config for request in requests], options)
        return PlannedRungs(rungs, [seen.plans.get(one.name, FITS) for one in rungs], [], seen.data_tokens)

    def train(spec: str, rung: Rung, workdir: Path, limits: MemoryLimits, *, force: bool) -> int:
        seen.names.append(rung.name)
        workdir.mkdir(parents=True, exist_ok=True)
        irreducible, scale, exponent = LAW
        loss = irreducible + scale * rung.flops**-exponent
        rows = [{"step": 1, "eval/held/loss": 9.0}, {"step": rung.steps, "train/loss": 8.0, "eval/held/loss": loss}]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return seen.codes.get(rung.name, 0)

    monkeypatch.setattr(ladder_module, "plan_rungs", plan)
    monkeypatch.setattr(ladder_module, "train_rung", train)
    return seen


def test_rungs_have_their_tokens(text: Path):
    made = pl.Ladder(f"{support.CONFIG}:tiny", heads=[4, 2], tokens_per_parameter=20)
    narrow, wide = made.rungs
    assert [rung.name for rung in made.rungs] == ["heads-2", "heads-4"]
    for rung in made.rungs:
        model = rung.config.model.instantiate()
        tables = 257 * rung.width + 32 * rung.width
        assert rung.parameters == sum(spec.size for spec in model.base_specs.values())
        assert rung.non_embedding_parameters == rung.parameters - tables
        # Whole batches of 8 sequences of 32 tokens.
        assert 0 <= rung.tokens - 20 * rung.parameters < 8 * 32
        assert rung.config.trainer.max_steps == rung.steps
        assert rung.flops == rung.tokens * model.flops_per_token(32)
    assert (narrow.width, wide.width) == (32, 64)
    # muP, relative to the base, which is the narrow one.
    assert wide.config.model.head.logit_divisor == 2
    assert narrow.config.model.head.logit_divisor is None
    usual = pl.Ladder(f"{support.CONFIG}:tiny", heads=[2, 4], steps=7, parametrization="usual")
    assert usual.rungs[1].config.model.head.logit_divisor is None
    assert [rung.steps for rung in usual.rungs] == [7, 7]


def test_configs_can_be_given(text: Path):
    base = pl.load_config(f"{support.CONFIG}:tiny")
    deeper = base.copy()
    deeper.model.stack.num_layers = 4
    made = pl.Ladder([deeper, base], steps=5)
    assert [(rung.name, rung.layers) for rung in made.rungs] == [("rung-1", 2), ("rung-0", 4)]


def test_schedules_follow_the_length(text: Path):
    base = pl.load_config(f"{support.CONFIG}:tiny", {"trainer.max_steps": 100})
    import optax

    schedule = pl.config_for(optax.cosine_decay_schedule, init_value=0.1, decay_steps=100)
    base.learner.optimizer.learning_rate = schedule
    made = pl.Ladder([base, pl.widen(base, 4, mup=False)], steps=30)
    assert [rung.config.learner.optimizer.learning_rate.decay_steps for rung in made.rungs] == [30, 30]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads=2"], "--heads=2: expected at least two numbers of heads"),
        (["--heads=2,x"], "--heads=2,x: expected numbers of heads"),
        (["--heads=2,4,2"], "heads=2 is given twice"),
        (["--heads=0,2"], "heads=0: expected at least 1"),
        (["--heads=2,4", "--steps=3", "--tokens_per_parameter=20"], "expected one of the two"),
        (["--heads=2,4", "--tokens_per_parameter=-1"], "tokens_per_parameter=-1: expected more than 0"),
        (["--heads=2,4", "--metric=eval/other/loss"], "expected one of eval/held/loss, train/loss"),
        (["--heads=2,4", "--config.data.validation={}"], "the config has none (data.validation)"),
        (
            ["--heads=2,4", "--config.learner.optimizer=optax.sgd", "--config.learner.optimizer.learning_rate=0.1"],
            "sgd",
        ),
        (["--heads=2,4", "--data_at=5:global_batch_size=8"], "the data of this config changes at a step"),
        (["--heads=2,4", "--holdout"], "--holdout needs at least 3 rungs"),
        (["--heads=2,4", "--target=h100"], "--target requires --dry_run"),
        (["--heads=2,4", "--extrapolate_to=-1"], "--extrapolate_to=-1: expected FLOPs > 0"),
        (["--heads=2,4", "--extrapolate=gpt2-125m"], "no config is named 'gpt2-125m'; did you mean"),
        (["--heads=2,4", "--workdir=s3://a/b"], "expected a local folder"),
        (["--heads=2,4", "--device_memory_gib=0"], "--device_memory_gib=0: expected more than 0"),
    ],
)
def test_wrong_use_starts_nothing(
    flags: list[str], message: str, text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    workdir = [] if any("--workdir" in flag for flag in flags) else [f"--workdir={tmp_path / 'ladder'}"]
    assert ladder.main([TINY, *workdir, *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not trained.names
    assert not (tmp_path / "ladder").exists()


def test_a_workdir_that_holds_no_ladder_is_refused(text: Path, tmp_path: Path, trained: Trained, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for name, message in (("file", "a file; expected a folder"), ("run", "holds a run that is no ladder")):
        assert ladder.main([TINY, "--heads=2,4", f"--workdir={tmp_path / name}"]) == 2
        assert f"workdir={tmp_path / name}: {message}" in capsys.readouterr().err
    assert not trained.names
    assert not (tmp_path / "run" / "ladder.json").exists()


def test_a_workdir_is_required(text: Path, trained: Trained, capsys: pytest.CaptureFixture[str]):
    assert ladder.main([TINY, "--heads=2,4"]) == 2
    assert "--workdir=DIR is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.model.stack.pattern[0].attention.set_path("num_kv_heads", 1), None),
        (lambda config: config.set_path("pretrained", pl.config_for(pl.Pretrained, path="x")), "published weights"),
        (lambda config: config.set_path("model.lora", pl.config_for(pl.LoRA, rank=2)), "has adapters"),
    ],
    ids=["shared_heads", "pretrained", "lora"],
)
def test_bases_that_cannot_be_scaled(change: Callable[[pl.Config], object], message: str | None, text: Path):
    base = pl.load_config(f"{support.CONFIG}:tiny")
    change(base)
    if message is None:
        # One head of keys and values suits any number of heads.
        assert [rung.heads for rung in pl.Ladder(base, heads=[3, 2], steps=1).rungs] == [2, 3]
        return
    with pytest.raises(pl.ConfigError, match=message):
        pl.Ladder(base, heads=[2, 4])


def test_heads_that_groups_do_not_divide(text: Path):
    base = pl.load_config(f"{support.CONFIG}:tiny", {"model.stack.pattern.0.attention.num_heads": 4})
    base.model.stack.pattern[0].attention.num_kv_heads = 2
    with pytest.raises(pl.ConfigError, match="heads=3: the heads that share keys and values do not divide"):
        pl.Ladder(base, heads=[3, 4])


def test_configs_of_equal_size_are_refused(text: Path):
    base = pl.load_config(f"{support.CONFIG}:tiny")
    with pytest.raises(pl.ConfigError, match=r"rung-0 and rung-1 both have [\d,]+ parameters"):
        pl.Ladder([base, base.copy()], steps=1)
    with pytest.raises(pl.ConfigError, match="one config and the heads of its rungs, or a list"):
        pl.Ladder([base, base.copy()], heads=[2, 4])


def test_a_rung_that_does_not_fit_starts_nothing(
    text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    trained.plans["heads-4"] = replace(FITS, fits=False, verdict="DOES NOT FIT: 9 GiB of 8 GiB")
    flags = [TINY, f"--workdir={tmp_path / 'ladder'}", "--heads=2,4", "--steps=5"]
    assert ladder.main(flags) == ExitCode.TOO_BIG
    printed = capsys.readouterr()
    assert "heads-4: DOES NOT FIT: 9 GiB of 8 GiB" in printed.out
    assert "1 of 2 rungs do not fit; nothing was started" in printed.err
    assert not trained.names
    assert not (tmp_path / "ladder").exists()
    assert ladder.main([*flags, "--dry_run"]) == ExitCode.TOO_BIG
    assert ladder.main([*flags, "--force"]) == 0
    assert trained.names == ["heads-2", "heads-4"]


def test_too_little_data_is_refused(text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]):
    trained.data_tokens = 1000
    flags = [TINY, f"--workdir={tmp_path / 'ladder'}", "--heads=2,4", "--steps=5"]
    assert ladder.main(flags) == 2
    message = capsys.readouterr().err
    assert "heads-2 needs 1.3k tokens, but the data has 1.0k, which it would read 1.28 times" in message
    assert "max_epochs=2" in message
    assert not (tmp_path / "ladder").exists()
    assert ladder.main([*flags, "--max_epochs=2"]) == 0


def test_results_of_a_ladder(text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "ladder"
    flags = [TINY, f"--workdir={folder}", "--heads=1,2,4,6,8", "--holdout", "--extrapolate_to=1e14"]
    assert ladder.main([*flags, "--extrapolate=gpt2-124m"]) == 0
    assert trained.names == [f"heads-{heads}" for heads in (1, 2, 4, 6, 8)]
    record = read_record(folder / LADDER_FILE)
    assert record.metric == "eval/held/loss"
    assert record.fit is not None
    irreducible, scale, exponent = LAW
    assert record.fit.law.irreducible == pytest.approx(irreducible, rel=1e-4)
    assert record.fit.law.exponent == pytest.approx(exponent, rel=1e-3)
    assert record.holdout is not None
    assert record.holdout.name == "heads-8"
    assert abs(record.holdout.error) < 1e-4
    larger, flops = record.extrapolations
    gpt2 = pl.load_config("gpt2-124m")
    parameters = sum(spec.size for spec in gpt2.model.instantiate().base_specs.values())
    assert (larger.name, larger.parameters) == ("gpt2-124m", parameters)
    assert larger.tokens == pytest.approx(20 * parameters, rel=0.01)
    assert flops.prediction.loss == pytest.approx(irreducible + scale * 1e14**-exponent, rel=1e-4)
    assert (folder / "ladder.png").is_file()
    printed = capsys.readouterr().out
    assert "fit: loss(C) = E + A * C^-alpha" in printed
    assert "heads-8, held out" in printed
    assert re.search(r"gpt2-124m is .* times the compute of the largest rung", printed)
    # The file is read back as it was written.
    text_before = (folder / LADDER_FILE).read_text()
    record.write(folder)
    assert (folder / LADDER_FILE).read_text() == text_before


def test_a_ladder_continues_and_grows(text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "ladder"
    flags = [TINY, f"--workdir={folder}", "--steps=9"]
    trained.codes |= {"heads-2": ExitCode.FAILED, "heads-6": ExitCode.NONFINITE, "heads-8": ExitCode.TERMINATED}
    assert ladder.main([*flags, "--heads=1,2,4,6,8"]) == ExitCode.TERMINATED
    assert "stopped; run the same command to continue" in capsys.readouterr().out
    trained.names.clear()
    trained.codes.clear()
    # A failure may not happen again, and a loss that is not finite would.
    assert ladder.main([*flags, "--heads=1,2,4,6,8"]) == ExitCode.FAILED
    assert trained.names == ["heads-2", "heads-8"]
    printed = capsys.readouterr()
    assert "3 of 5 rungs have ended and are skipped" in printed.out
    assert "1 of 5 rungs have no loss: heads-6 (loss not finite)" in printed.err
    trained.names.clear()
    assert ladder.main([*flags, "--heads=1,2,4,6,8,12"]) == ExitCode.FAILED
    assert trained.names == ["heads-12"]
    for other, message in (
        ([*flags, "--heads=1,2"], "holds a ladder with the rung heads-4, which this one lacks"),
        ([*flags[:2], "--steps=8", "--heads=1,2,4,6,8,12"], "holds a ladder with steps=9, this one has steps=8"),
        ([*flags, "--heads=1,2,4,6,8,12", "--config.trainer.seed=3"], "rung heads-1 has another config"),
        ([*flags, "--heads=1,2,4,6,8,12", "--parametrization=usual"], "parametrization=mup"),
    ):
        assert ladder.main(other) == 2
        assert message in capsys.readouterr().err
    reader = pl.Ladder(f"{support.CONFIG}:tiny", heads=[1, 2, 4, 6, 8, 12], steps=9)
    with pytest.raises(ValueError, match="no losses yet"):
        reader.fit()
    # The command line's config has the same name and the same fields.
    reader.read(folder)
    assert reader.fit().num_rungs == 5
    assert math.isfinite(reader.extrapolate(1e12).prediction.loss)


@pytest.mark.parametrize("content", ["[", "{}", '{"format": 1, "rungs": [{}]}', '{"format": 2}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path):
    (tmp_path / LADDER_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"ladder\.json cannot be read"):
        read_record(tmp_path / LADDER_FILE)


def test_plans_of_rungs_are_those_of_plan(text: Path, monkeypatch: pytest.MonkeyPatch):
    # The other process has one device.
    monkeypatch.setenv("XLA_FLAGS", support.xla_flags(1))
    base = pl.load_config(f"{support.CONFIG}:tiny")
    rule = pl.config_for(pl.AcceleratorRule, pattern="cpu-1", set={"data.global_batch_size": 4, "trainer.seed": 5})
    base.accelerator_rules = [rule]
    base.trainer.seed = 7
    made = pl.Ladder(base, heads=[2, 4], tokens_per_parameter=2)
    plan = made.plan("cpu:1", device_memory_gib=0.003)
    assert [rung.tokens_per_step for rung in plan.rungs] == [128, 128]
    # A field that the caller has set is not changed by a rule.
    assert [rung.config.trainer.seed for rung in plan.rungs] == [7, 7]
    for rung, priced in zip(plan.rungs, plan.plans, strict=True):
        expected = pl.plan(rung.config, "cpu:1", estimate=True, device_memory_gib=0.003)
        assert priced.peak_bytes == expected.peak_bytes
        assert priced.fits == expected.fits
    assert [priced.fits for priced in plan.plans] == [True, False]
    assert "plan of the rungs on cpu:1" in str(plan)
    with pytest.raises(pl.ConfigError, match="unknown target 'cpux'"):
        made.plan("cpux")


def test_data_is_counted_in_the_same_process(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", support.xla_flags(1))
    made = pl.Ladder(f"{support.CONFIG}:tiny", heads=[2, 4], steps=3)
    planned = plan_rungs(made._requests, made._options, "local", MemoryLimits(), tmp_path / "data")
    size = (text / "train.txt").stat().st_size
    assert planned.data_tokens is not None
    # One token per byte, in whole rows.
    assert size - 64 < planned.data_tokens <= size + 1
    # With --force, rungs that do not fit are trained on that data, too.
    small = MemoryLimits(device_memory_gib=0.0001)
    forced = plan_rungs(made._requests, made._options, "local", small, tmp_path / "data", force=True)
    assert not any(plan.fits for plan in forced.plans)
    assert forced.data_tokens == planned.data_tokens
    (text / "train.txt").unlink()
    with pytest.raises(pl.ConfigError, match=r"^data\.source: no file matches "):
        plan_rungs(made._requests, made._options, "local", MemoryLimits(), tmp_path / "other")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nine starts of JAX, on a machine that may be busy
def test_a_killed_ladder_has_the_same_losses(text: Path, tmp_path: Path):
    """Four sizes, killed four times: every number of ladder.json is equal bit for bit."""
    environment = {**os.environ, "XLA_FLAGS": support.xla_flags(1), "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(support.ROOT)
    flags = [TINY, "--heads=1,2,3,4", "--steps=40", "--max_epochs=10", "--config.trainer.save_every=7"]
    seconds = kill_ladder.run_undisturbed(tmp_path / "whole", flags, environment)
    kills = kill_ladder.run_killed(tmp_path / "broken", flags, environment, kills=4, seconds=seconds, seed=0)
    assert len(kills) >= 2
    assert any(kill.step > 0 for kill in kills)
    whole, broken = ((tmp_path / name / LADDER_FILE).read_bytes() for name in ("whole", "broken"))
    assert whole == broken
    losses = [rung.loss for rung in read_record(tmp_path / "broken" / LADDER_FILE).rungs]
    assert len(set(losses)) == 4
    assert None not in losses
