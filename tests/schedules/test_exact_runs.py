"""Checkpoints of every schedule and placement restore under all others, and loss curves do not depend on either."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.program.program import Program
from tests.support import exact, runs, small
from tests.support.exact import ExactnessCase

# The offloaded cases use a mesh, so that some checkpoints change meshes too.
PLACES = {"one": "device", "eight": "all"}
SAVED = [
    ExactnessCase(
        memory=m,
        placement="state" if m == "after_backward" and mesh == "eight" else PLACES[mesh],
        mesh=mesh,
        precision="float32",
    )
    for m in exact.MEMORY | exact.LAYER_PROGRAMS
    for mesh in PLACES
    if m not in exact.LAYER_PROGRAMS or mesh == "eight"
]


def name(case: ExactnessCase) -> str:
    return exact.get_case_id(case)


# Each of these continues from the checkpoint of the previous one, the first from that of the last.
RING = [
    ExactnessCase(memory="after_backward", precision="float32"),
    ExactnessCase(memory="streamed", placement="all", mesh="eight", precision="float32"),
    ExactnessCase(memory="layers", placement="all", mesh="eight", precision="float32"),
    ExactnessCase(memory="in_backward", precision="float32"),
]


class Saved:
    """Checkpoints of the state after one step, each made when it is first needed.

    Args:
        checkpointer: stores each checkpoint under the index of its case in SAVED.
    """

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer

    @cache  # noqa: B019 (one object in a module)
    def program(self, case: ExactnessCase) -> Program:
        """Return the program of a case, without clipping, because not all schedules can clip."""
        return case.program(clip=None)

    @cache  # noqa: B019
    def second_state(self, case: ExactnessCase) -> dict[str, np.ndarray]:
        """Save the state after one step, and return the arrays of the state after two steps."""
        program = self.program(case)
        state, _ = program.step(exact.place_initial_state(case, program), exact.batch(program, 0))
        self._checkpointer.save(SAVED.index(case), program.backend.to_checkpoint(state), {})
        state, _ = program.step(state, exact.batch(program, 1))
        self._checkpointer.wait()
        return small.arrays(program.backend.to_checkpoint(state))

    def check(self, saved_case: ExactnessCase, next_case: ExactnessCase) -> None:
        """Assert that `next_case` makes the same second step from the checkpoint of `saved_case`."""
        with exact.enable_exact_numerics():
            expected = self.second_state(saved_case)
            program = self.program(next_case)
            checkpoint = self._checkpointer.restore(SAVED.index(saved_case), program.backend.abstract_checkpoint)
            state, _ = program.step(program.backend.from_checkpoint(checkpoint.state), exact.batch(program, 1))
        program.layout.check(state)
        for path, error in exact.differences(small.arrays(program.backend.to_checkpoint(state)), expected).items():
            assert error <= 1e-6, f"under {name(next_case)}: {path} is off by {error:.1e}"


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    with Checkpointer(directory=tmp_path_factory.mktemp("saved"), keep=len(SAVED)) as checkpointer:
        yield Saved(checkpointer)


@pytest.mark.pairs
@pytest.mark.parametrize("number", range(len(RING)), ids=map(name, RING))
def test_checkpoint_resumes_under_another_schedule(saved_runs: Saved, number: int):
    saved_runs.check(RING[number - 1], RING[number])


@pytest.mark.pairs
@pytest.mark.parametrize("saved_case", SAVED, ids=name)
def test_checkpoint_resumes_under_every_schedule(saved_runs: Saved, saved_case: ExactnessCase):
    for next_case in SAVED:
        saved_runs.check(saved_case, next_case)


@cache
def curve(case: ExactnessCase, clips: bool) -> list[float]:
    """Return the training losses of stdlib-tiny in float32, with MLPs so wide that their state is offloaded."""
    memory, learner = (exact.MEMORY | exact.LAYER_PROGRAMS)[case.memory]
    memory = {**memory, **dict.fromkeys(exact.PLACEMENTS[case.placement], "pinned_host"), "remat": case.remat}
    fields = {"trainer.max_steps": 30, "trainer.log_every": 1, "model.stack.pattern.0.mlp.hidden": 512}
    fields |= {f"memory.{field}": value for field, value in memory.items()}
    fields |= {f"learner.{field}": value for field, value in learner.items()} | (
        {} if clips else {"learner.clip": None}
    )
    with TemporaryDirectory() as folder:
        flags = [f"--workdir={folder}/run", *(f"--config.{path}={value}" for path, value in fields.items())]
        environment = {**os.environ, "XLA_FLAGS": runs.xla_flags()}
        command = [sys.executable, "-m", "plimsoll", "train", "--config=stdlib-tiny", *flags]
        done = subprocess.run(command, cwd=small.ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return list(runs.losses(Path(folder) / "run").values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", exact.list_cases(memory=exact.MEMORY, placement=exact.PLACEMENTS, remat=exact.REMATS), ids=name
)
def test_loss_curve_does_not_depend_on_memory_settings(case: ExactnessCase):
    clips = case.clip() is not None
    expected = curve(ExactnessCase(), clips)
    assert len(expected) == 30
    assert expected[-1] < 0.9 * expected[0]
    print(name(case), np.abs(np.array(curve(case, clips)) / expected - 1).max(), expected[0], expected[-1])
    np.testing.assert_allclose(curve(case, clips), expected, rtol=1e-4)
