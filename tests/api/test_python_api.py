"""`import plimsoll as pl`: configs, training, models and plans, called from Python as in a script or a notebook."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import plimsoll as pl
from plimsoll.api.configs import create_request
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.run.hooks import Hook
from plimsoll.launch import evaluate, generate
from tests.support.runs import CONFIG, ROOT, rows, write_text
from tests.trainer.test_last_checkpoint import files

SPEC = f"{CONFIG}:tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with text for the tiny config."""
    root = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(root / "text")
        yield root


@pytest.fixture(scope="module")
def run(folder: Path) -> pl.TrainedRun:
    """A run of four steps."""
    return pl.train(pl.load_config(SPEC, {"trainer.max_steps": 4, "trainer.save_every": 2}), folder / "run")


def test_importing_it_imports_nothing() -> None:
    code = "import sys, plimsoll; print([m for m in ('jax', 'numpy', 'plimsoll.framework.config') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    for name in pl.__all__:
        assert getattr(pl, name) is not None
    assert set(pl.__all__) <= set(dir(pl))
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        pl.tran  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.pairs
def test_users_configs_package_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    (tmp_path / "configs" / "tiny.py").write_text("name = 'theirs'")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import configs.tiny, plimsoll as pl\n"
        "print(pl.load_config('nanogpt-cpu').trainer.max_steps > 0, configs.tiny.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "True theirs\n"


@pytest.mark.pairs
def test_overrides_accept_text_and_values(run: pl.TrainedRun, folder: Path) -> None:
    config = pl.load_config(SPEC, {"trainer.max_steps": "7", "data.tokenizer": pl.config_for(ByteTokenizer)})
    assert config.trainer.max_steps == 7
    stored = pl.load_config(folder / "run" / "config.json", {"trainer.max_steps": 5})
    assert stored.model == pl.load_config(SPEC).model
    for overrides, message in [
        ({"trainer.max_stps": 5}, "did you mean 'max_steps'"),
        ({"trainer.max_steps": 0.5}, "trainer.max_steps: expected an integer"),
        ({"trainer.max_steps": "soon"}, "trainer.max_steps: expected an integer"),
    ]:
        with pytest.raises(pl.ConfigError, match=message):
            pl.load_config(SPEC, overrides)
    with pytest.raises(pl.ConfigError, match="did you mean 'nanogpt-cpu'"):
        pl.load_config("nanogpt-cp")
    text = folder / "own"
    text.mkdir()
    (text / "a.txt").write_text("one line of text\n" * 400)
    assert list(pl.load_config("nanogpt-cpu", data=text).data.validation) == ["held_out"]


def test_rule_changes_only_fields_not_set_by_the_program() -> None:
    rules = {"cpu-*": {"trainer.max_steps": 9, "trainer.seed": 9, "trainer.log_every": 9}}
    named = pl.load_config(SPEC)
    named.accelerator_rules = [
        pl.config_for(_rule(), pattern=pattern, set=settings) for pattern, settings in rules.items()
    ]
    config = pl.load_config(SPEC, {"trainer.max_steps": named.trainer.max_steps})
    config.accelerator_rules = named.accelerator_rules
    config.trainer.seed = 3
    resolved, lines = create_request(config.copy()).resolve("cpu-1")
    assert (resolved.trainer.max_steps, resolved.trainer.seed) == (named.trainer.max_steps, 3)
    assert resolved.trainer.log_every == 9
    assert len(lines) == 1
    assert create_request(config).resolve("v5e-4")[1] == []


def _rule() -> Any:
    from plimsoll.framework.program.experiment import AcceleratorRule

    return AcceleratorRule


def test_a_run_has_its_metrics_as_arrays_and_as_a_picture(run: pl.TrainedRun, folder: Path) -> None:
    wanted = [(row["step"], row["train/loss"]) for row in rows(folder / "run") if "train/loss" in row]
    steps, values = run.metrics["train/loss"]
    assert list(zip(steps.tolist(), values.tolist(), strict=True)) == wanted
    assert (steps.dtype, values.dtype) == (np.int64, np.float64)
    assert "4 steps, train/loss" in repr(run)
    assert run._repr_png_().startswith(b"\x89PNG")
    assert "data:image/png;base64," in run._repr_html_()


def test_second_run_is_a_no_op_or_resumes(run: pl.TrainedRun, folder: Path, capsys: pytest.CaptureFixture) -> None:
    before = files(folder / "run")
    config = pl.load_config(SPEC, {"trainer.max_steps": 4, "trainer.save_every": 2})
    assert pl.train(config, folder / "run").metrics.keys() == run.metrics.keys()
    assert "step 4 of 4: nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--resume=never, but"):
        pl.train(config, folder / "run", resume="never")
    assert files(folder / "run") == before


@pytest.mark.pairs
def test_invalid_settings_raise_and_leave_no_files(folder: Path) -> None:
    config = pl.load_config(SPEC)
    with pytest.raises(FileNotFoundError, match="--resume=must, but"):
        pl.train(config, folder / "new", resume="must")
    with pytest.raises(pl.ConfigError, match="resume='maybe': expected one of auto, never, must"):
        pl.train(config, folder / "new", resume="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a config or the name of one, given int"):
        pl.train(5, folder / "new")  # pyright: ignore[reportArgumentType]
    with pytest.raises(pl.RunError, match=r"the training step needs .* per device, but .* are available") as caught:
        pl.train(config, folder / "new", device_memory_gib=1e-4)
    assert caught.value.code == 4
    assert not (folder / "new").exists()


class Interrupts(Hook):
    """Hook that sends this process SIGINT after the second step."""

    def after_step(self, run: Any, step: int) -> None:
        """Send the signal."""
        if step == 2:
            signal.raise_signal(signal.SIGINT)


class Spoils(Hook):
    """Hook that makes the loss non-finite."""

    def before_step(self, run: Any, step: int) -> None:
        """Set all weights to NaN."""
        weights = jax.tree.map(lambda leaf: leaf * np.nan, run.state.parameter)
        run.state = replace(run.state, parameter=weights)


@pytest.mark.pairs
def test_interrupt_saves_and_raises(folder: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    config = pl.load_config(SPEC, {"trainer.max_steps": 50, "trainer.hooks": [pl.config_for(Interrupts)]})
    with pytest.raises(KeyboardInterrupt, match="saved"):
        pl.train(config, folder / "stopped")
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in (folder / "stopped" / "checkpoints").glob("0*")] != []
    assert not (folder / "stopped" / "lock.json").exists()


@pytest.mark.pairs
def test_a_run_that_fails_has_its_exit_code_and_its_cause(folder: Path) -> None:
    config = pl.load_config(SPEC, {"trainer.hooks": [pl.config_for(Spoils)], "learner.nonfinite": "stop"})
    errors: list[pl.RunError] = []

    def train() -> None:
        with pytest.raises(pl.RunError) as caught:
            pl.train(config, folder / "spoiled")
        errors.append(caught.value)

    # Some notebooks run their cells outside the main thread.
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert errors[0].code == 3
    assert type(errors[0].__cause__).__name__ == "NonFiniteError"


@pytest.mark.pairs
def test_model_output_matches_the_cli(run: pl.TrainedRun, folder: Path, capsys: pytest.CaptureFixture) -> None:
    model = pl.load(folder / "run")
    text = model.generate("the quick", max_new_tokens=6, temperature=0.7, seed=2)
    flags = [f"--workdir={folder / 'run'}"]
    capsys.readouterr()
    sampling = ["--prompt=the quick", "--max_new_tokens=6", "--temperature=0.7", "--seed=2"]
    assert generate.main([*flags, *sampling]) == 0
    assert capsys.readouterr().out == f"the quick{text}\n"
    file = str(folder / "text" / "valid.txt")
    (score,) = model.evaluate(file).values()
    assert evaluate.main([*flags, "--files", file]) == 0
    assert f"{score.tokens} tokens, loss {score.loss:.4f}" in capsys.readouterr().out
    assert model.score(Path(file).read_text()) == score
    for mistake in (lambda: model.score(""), lambda: model.generate("a", temperature=-1.0)):
        with pytest.raises(ValueError, match=r"empty|temperature"):
            mistake()
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate("a", max_new_tokens=0)
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        pl.load(folder / "nope")


@pytest.mark.pairs
@pytest.mark.parametrize("step", [None, 2])
def test_edits_to_config_json_are_ignored(
    run: pl.TrainedRun, folder: Path, step: int | None, capsys: pytest.CaptureFixture
) -> None:
    """The checkpoint stores the config with a digest, so an edited config.json is detected and ignored."""
    expected = pl.load(folder / "run", step=step).score("the quick brown fox")
    file = folder / "run" / "config.json"
    text = file.read_text()
    changed = json.loads(text)
    changed["model"]["head"]["norm"]["eps"] = 10.0
    try:
        file.write_text(json.dumps(changed))
        capsys.readouterr()
        assert pl.load(folder / "run", step=step).score("the quick brown fox") == expected
    finally:
        file.write_text(text)
    printed = capsys.readouterr()
    assert "which is used: config.model.head.norm.eps: " in printed.out + printed.err


@pytest.mark.pairs
def test_a_plan_for_more_cpu_devices_than_there_are_is_made_in_another_process(folder: Path) -> None:
    count = 2 * jax.device_count()
    config = pl.load_config(SPEC, {"mesh.data": count, "data.global_batch_size": count})
    plan = pl.plan(config, f"cpu:{count}", phases=False)
    assert (plan.report["devices"], plan.fits) == (count, True)
    assert f"mesh.data={count}" in plan.report["settings"]
    config.mesh.data = 3
    with pytest.raises(pl.ConfigError, match=f"product 3 does not divide the number of devices, {count}"):
        pl.plan(config, f"cpu:{count}", phases=False)
    config.model.head.norm = pl.config_for(_Norm)
    with pytest.raises(pl.ConfigError, match=r"needs another process, .* '.*_Norm' .*JAX_NUM_CPU_DEVICES"):
        pl.plan(config, f"cpu:{count}", phases=False)


class _Norm(RMSNorm):
    """A class defined in the test, which another process cannot import."""


def test_plan_has_text_and_html_representations() -> None:
    small = {"data.seq_len": 32, "model.stack.num_layers": 1}
    plan = pl.plan(pl.load_config("nanogpt-cpu", small), target="h200", estimate=True)
    assert plan.fits
    assert plan.peak_bytes == plan.report["device_allocated_bytes"]
    assert "h200: 1 devices" in str(plan)
    assert plan._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "data.seq_len=32" in str(plan)
    with pytest.raises(ValueError, match="unknown target 'v5'"):
        pl.plan("nanogpt-cpu", target="v5")
