"""Memory that comes back: what a run allocates is freed when it ends, and repeated events keep nothing."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import plimsoll as pl
from plimsoll.framework.metrics.memory import live_array_bytes
from plimsoll.framework.run import hooks
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import Trainer
from tests.support import runs, tiny
from tests.support.small import ROOT


def count_live_bytes() -> int:
    return sum(live_array_bytes().values())


def count_executables() -> int:
    return len(jax.local_devices()[0].client.live_executables())


def train(workdir: Path, max_steps: int, window_gib: float | None = None, save_every: int = 1) -> None:
    """Train the tiny model in this process up to `max_steps`, with saves, and an evaluation after each step."""
    config = tiny.tiny()
    config.trainer.max_steps = max_steps
    config.trainer.save_every = save_every
    config.trainer.eval_every = 1
    config.checkpoint.window_gib = window_gib
    pl.train(config, workdir)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that fills caches: it imports packages, of which some keep the frames of their importers."""
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        runs.write_text(root / "text")
        train(root / "run", 2)
    return root / "run"


@pytest.fixture
def no_collection(first_run: Path, text: Path) -> Iterator[None]:
    """Disable garbage collection, so that only what nothing refers to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_runs_free_everything_at_once(no_collection: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with 12 evaluations and 12 saves, and three resumes, which save through a window."""
    alive: list[weakref.ref] = []
    original = Trainer.train

    def record(self: Trainer, step: int) -> int | None:
        run = self.run
        objects = (self, run, run.program, run.experiment, run.checkpointer, run.workdir, run.progress)
        alive.extend(weakref.ref(x) for x in objects)
        return original(self, step)

    monkeypatch.setattr(Trainer, "train", record)
    num_bytes = count_live_bytes()
    num_executables = count_executables()
    for max_steps in (12, 13, 14, 15):
        train(tmp_path / "run", max_steps, window_gib=None if max_steps == 12 else 1e-6)
        assert not [type(reference()).__name__ for reference in alive if reference() is not None]
        assert count_live_bytes() == num_bytes
        assert count_executables() == num_executables
    assert len(alive) == 4 * 7


def test_a_failed_run_frees_its_state_while_its_traceback_is_kept(
    no_collection: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, which keeps the last error for its debugger."""

    def fail(self: hooks.Hook, run: Run, step: int) -> None:
        assert step < 3, "the hook failed"

    before = count_live_bytes()
    monkeypatch.setattr(hooks.Profile, "after_step", fail)
    with pytest.raises(AssertionError, match="the hook failed") as error:
        train(tmp_path / "run", 4)
    assert error.value.__traceback__ is not None
    # The metrics of one step, which frames of the training loop refer to.
    assert count_live_bytes() - before < 1 << 10


@pytest.mark.pairs
def test_a_rollback_keeps_nothing(no_collection: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes of live arrays after each of six rollbacks."""
    live: list[int] = []

    def roll_back(self: hooks.Hook, run: Run, step: int, metrics: hooks.Row) -> None:
        if len(live) < 6 and step == 3:
            raise hooks.RollBack(step)

    def measure(self: hooks.Hook, run: Run, step: int) -> None:
        live.append(count_live_bytes())

    monkeypatch.setattr(hooks.Guard, "on_metrics", roll_back)
    monkeypatch.setattr(hooks.Guard, "on_roll_back", measure)
    train(tmp_path / "run", 4, save_every=2)
    assert len(live) == 6
    assert len(set(live)) == 1, live


@pytest.mark.slow
def test_resident_memory_is_flat(tmp_path: Path) -> None:
    """The soak of docs/benchmarks/endurance.md, with half of its events and 5 MiB of state."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.memory_soak", f"--folder={tmp_path}/soak"]
    # Malloc's own settings, which tests change, decide what is kept.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "XLA_FLAGS"))}
    job = subprocess.run(
        [*command, "--share=0.5", "--dim=96"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert job.returncode == 0, job.stdout + job.stderr[-3000:]
