"""Checkpoints of every schedule and placement restore under every other, and the loss curve of a run shows neither."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from framework.checkpoint.checkpointer import Checkpointer
from tests.support import exact, runs, small
from tests.support.exact import Case

# The hosted ones on a mesh, so that some checkpoints change meshes, too.
PLACES = {"one": "device", "eight": "all"}
SAVED = [
    Case(
        memory=m,
        placement="state" if m == "after_backward" and mesh == "eight" else PLACES[mesh],
        mesh=mesh,
        precision="float32",
    )
    for m in exact.MEMORY | exact.LAYERED
    for mesh in PLACES
    if m not in exact.LAYERED or mesh == "eight"
]


def name(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A checkpointer with each case's state after a step, under the case's number; [(program, the state after two)]."""
    results = []
    with Checkpointer(directory=tmp_path_factory.mktemp("saved"), keep=len(SAVED)) as checkpointer:
        with exact.conditions():
            for number, case in enumerate(SAVED):
                program = case.program(clip=None)  # which not all schedules have
                state, _ = program.step(exact.placed(case, program), exact.batch(program, 0))
                checkpointer.save(number, program.stored(state), {})
                state, _ = program.step(state, exact.batch(program, 1))
                results.append((program, small.arrays(program.stored(state))))
        checkpointer.wait()
        yield checkpointer, results


@pytest.mark.parametrize("number", range(len(SAVED)), ids=map(name, SAVED))
def test_a_checkpoint_goes_on_under_every_schedule(saved, number: int):
    checkpointer, results = saved
    for case, (program, _) in zip(SAVED, results, strict=True):
        with exact.conditions():
            restored = program.restored(checkpointer.restore(number, program.abstract_stored).state)
            state, _ = program.step(restored, exact.batch(program, 1))
        program.layout.check(state)
        for path, error in exact.differences(small.arrays(program.stored(state)), results[number][1]).items():
            assert error <= 1e-6, f"under {name(case)}: {path} is off by {error:.1e}"


@cache
def curve(case: Case, clips: bool) -> list[float]:
    """The training losses of stdlib-tiny, with MLPs so wide that their state goes to the host, in float32."""
    memory, learner = (exact.MEMORY | exact.LAYERED)[case.memory]
    memory = {**memory, **dict.fromkeys(exact.PLACEMENTS[case.placement], "pinned_host"), "remat": case.remat}
    fields = {"trainer.max_steps": 30, "trainer.log_every": 1, "model.stack.pattern.0.mlp.hidden": 512}
    fields |= {f"memory.{field}": value for field, value in memory.items()}
    fields |= {f"learner.{field}": value for field, value in learner.items()} | (
        {} if clips else {"learner.clip": None}
    )
    with TemporaryDirectory() as folder:
        flags = [f"--workdir={folder}/run", *(f"--config.{path}={value}" for path, value in fields.items())]
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        command = [sys.executable, "-m", "launch.train", "--config=stdlib-tiny", *flags]
        done = subprocess.run(command, cwd=small.ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return list(runs.losses(Path(folder) / "run").values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", exact.every(memory=exact.MEMORY, placement=exact.PLACEMENTS, remat=exact.REMATS), ids=name
)
def test_the_loss_curve_of_a_run_does_not_show_its_settings(case: Case):
    clips = case.clip() is not None
    expected = curve(Case(), clips)
    assert len(expected) == 30
    assert expected[-1] < 0.9 * expected[0]
    print(name(case), np.abs(np.array(curve(case, clips)) / expected - 1).max(), expected[0], expected[-1])
    np.testing.assert_allclose(curve(case, clips), expected, rtol=1e-4)
