"""The work of a start before its first step: the modules it imports and the programs it compiles."""

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.framework.learner import group_optimizer
from plimsoll.framework.program.compile_thread import EVALUATION, CompileThread
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.program import Program

# Libraries that are slow to import and that no start needs before its first step.
LATE = ("torch", "matplotlib", "tensorboardX", "datasets", "pyarrow", "transformers", "rich", "google.cloud.storage")


def test_the_command_imports_no_library_that_only_later_steps_need() -> None:
    code = f"import sys, plimsoll.launch.train; print([name for name in {LATE} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def small() -> Program:
    config = configs.load("nanogpt-cpu")
    overrides = {"model.stack.num_layers": 1, "model.dim": 8, "model.stack.pattern.0.attention.num_heads": 2}
    for path, value in (overrides | {"data.seq_len": 8, "data.global_batch_size": 8, "learner.ema": 0.9}).items():
        config.set_path(path, value)
    return Program(config.instantiate())


@pytest.mark.pairs
def test_background_compilation_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_optimizer, "probe", lambda *_: pytest.fail("a trial of the optimizer compiles"))
    ahead, plain = small(), small()
    ahead.backend.begin_init()
    ahead.backend.begin_evaluation()
    expected = plain.init()
    state = ahead.init()
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    # The main thread calls the programs that the other thread compiled: nothing is compiled a second time.
    assert ahead.ahead.program((EVALUATION, "ema"))  # the last one that it compiles
    monkeypatch.setattr(JitStep, "evaluation_jit", lambda *_: pytest.fail("compiled again"))
    specs = ahead.batch_rows.evaluation_specs
    batch = {name: np.ones(spec.shape, spec.dtype) for name, spec in specs.items()}
    found = [ahead.evaluate(state, ahead.put(batch), averaged=averaged) for averaged in (False, True)]
    monkeypatch.undo()
    for averaged in (False, True):
        sums = plain.evaluate(expected, plain.put(batch), averaged=averaged)
        assert {name: float(x) for name, x in found[averaged].items()} == {name: float(x) for name, x in sums.items()}


def test_thread_error_is_raised_when_the_result_is_needed() -> None:
    def fails() -> Any:
        raise ValueError("no such program")

    ahead = CompileThread()
    ahead.begin(("init",), fails)
    ahead.begin(("init",), lambda: pytest.fail("asked for twice"))
    with pytest.raises(ValueError, match="no such program"):
        ahead.program(("init",))
    assert ahead.program(("evaluate",)) is None
    ahead.close()
