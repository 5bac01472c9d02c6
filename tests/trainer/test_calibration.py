"""Data-dependent initialization: the first batch of a fresh start sets parameters and everything derived from them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.configs import load
from plimsoll.extras.flows.model import Flow
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.step import training_context

FILE = Path(__file__).parents[1] / "support/tiny_images.py"


def config() -> Config:
    made = load(f"{FILE}:flow")
    made.learner.ema = 0.9
    return made


def first_batch(program: Program, tmp_path: Path) -> dict[str, jax.Array]:
    program.experiment.data.setup(tmp_path)
    return program.put(program.experiment.data.train_batch(0, program.rows))


@pytest.mark.pairs
@pytest.mark.parametrize("rules", [[], [config_for(Rule, pattern="level0", freeze=True)]], ids=["all", "frozen"])
def test_state_holds_what_the_model_derives_from_the_batch(tmp_path: Path, rules: list[Config]):
    made = config()
    made.learner.rules = rules
    made.learner.optimizer = config_for(optax.contrib.schedule_free_adamw, learning_rate=1e-3)  # copies parameters
    program = Program(made.instantiate(), jax.devices()[:1])
    batch, state = first_batch(program, tmp_path), program.init()
    before = {path: np.asarray(x) for path, x in flatten(program.weights(state)).items()}
    ctx = training_context(batch, state.counter, program.experiment.model, program.layout, "none")
    expected = jax.jit(program.experiment.model.calibrate)(program.weights(state), ctx, {})
    expected = {path: np.asarray(x) for path, x in flatten(expected).items()}
    found = program.backend.calibrate_state(state, batch)
    program.layout.check(found)
    weights = {path: np.asarray(x) for path, x in flatten(program.weights(found)).items()}
    for path, value in weights.items():
        np.testing.assert_allclose(value, expected[path], rtol=2e-5, atol=2e-5, err_msg=path)
    changed = {path for path in weights if (weights[path] != before[path]).any()}
    assert {path.split("/")[1] for path in changed} == {"block0"}, "only ActNorms are calibrated"
    assert len(changed) == 4
    trained = flatten(found["parameter"])
    assert all((np.asarray(x) == weights[path]).all() for path, x in flatten(found["ema"]).items())
    copies = {p.partition("/z/")[2]: x for p, x in flatten(found["optimizer"]["level1"]).items() if "/z/" in p}
    assert {f"level1/{path}" for path in copies} == {path for path in trained if path.startswith("level1/")}
    assert all((np.asarray(x) == weights[f"level1/{path}"]).all() for path, x in copies.items())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves([state.optimizer, state.ema]))
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves([found[g] for g in ("parameter", "ema", "optimizer")])]
    assert len(places) == len({*places}), "a step would donate a buffer twice"


@pytest.mark.pairs
def test_host_leaves_stay_on_the_host(tmp_path: Path):
    made = config()
    made.memory.update, made.memory.optimizer_state = "streamed", "pinned_host"
    made.model.stacks[0].pattern[2].net.hidden = 512
    program = Program(made.instantiate(), jax.devices()[:1])
    state = program.backend.calibrate_state(program.init(), first_batch(program, tmp_path))
    assert program.layout.bytes_per_device(memory_kind="pinned_host")
    program.layout.check(state)


@pytest.mark.pairs  # tests/launch/test_sample.py checks the first loss of a run
def test_first_loss_uses_the_calibrated_parameters(tmp_path: Path):
    program = Program(config().instantiate(), jax.devices()[:1])
    batch, losses = first_batch(program, tmp_path), []
    for calibrate in (False, True):
        state = program.init()
        state = program.backend.calibrate_state(state, batch) if calibrate else state
        losses.append(program.step(state, batch)[1]["loss"].item())
    assert losses[1] < losses[0] - 0.1


class HalfFlow(Flow):
    """A flow with bfloat16 parameters, as a user's own model may have."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.param_dtype = jnp.dtype("bfloat16")


@pytest.mark.pairs
def test_half_precision_parameters_are_refused():
    made = config()
    made.model = config_for(HalfFlow, **{name: made.model[name] for name in ("image_shape", "levels", "stacks")})
    with pytest.raises(
        ValueError, match=r"is bfloat16; parameters calibrated on the first batch must be float32 \(model\.param_dtype"
    ):
        Program(made.instantiate(), jax.devices()[:1])
