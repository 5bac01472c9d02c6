"""The training step apart from the gradients: accumulation, skipped steps, frozen leaves, buffers, donation, leaks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.layers import Centering

SGD = config_for(optax.sgd, learning_rate=0.3, momentum=0.9)


def eventful(accumulate: int = 1, mesh=None, dropout: float = 0.0):
    """An experiment with everything in its state: frozen leaves, buffers, EMA, a schedule, two optimizers."""
    model = small.gpt2(stack__num_layers=4, embed__dropout=dropout, head__z_loss=1e-3)
    block = small.block(model).copy()
    block.dropout = dropout
    model.stack.pattern = [block, config_for(Centering)]
    rules = [
        config_for(Rule, pattern="embed/position|mlp/up", freeze=True),
        config_for(Rule, pattern="norm", optimizer=SGD),
    ]
    schedule = config_for(optax.linear_schedule, init_value=0.01, end_value=0.03, transition_steps=4)
    optimizer = config_for(optax.adamw, learning_rate=schedule, weight_decay=0.1)
    return small.experiment(model, mesh=mesh, accumulate=accumulate, optimizer=optimizer, rules=rules, ema=0.9)


@pytest.fixture(scope="module")
def program() -> Program:
    return small.program(eventful())


@pytest.fixture(scope="module")
def three_steps(program):
    """(initial state, state after three finite steps, their metrics), as numpy arrays."""
    first = jax.device_get(program.init())
    state, metrics = small.run(program, 3, put(program, first))
    return first, jax.device_get(state), metrics


def put(program: Program, state):
    return jax.device_put(state, program.layout.shardings())


# --- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "model": 2, "seq": 2}], ids=["one device", "eight devices"])
def test_microbatches_add_up_to_their_batch_with_dropout_on(mesh):
    """Masks are keyed by the row in the global batch, and losses are divided by the global number of targets."""

    def config(accumulate, mesh):
        return small.experiment(documents=True, accumulate=accumulate, mesh=mesh)

    whole = small.program(config(1, None))
    state = jax.device_get(whole.init())
    expected_loss, expected = small.loss_and_grads(whole, state)
    loss, grads = small.loss_and_grads(small.program(config(4, mesh)), state)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    small.assert_close(grads, expected, 1e-5)
    other, _ = small.loss_and_grads(whole, replace(state, counter={**state.counter, "step": jnp.int32(1)}))
    assert abs(other - expected_loss) > 1e-3, "dropout should matter, and differ by step"


# --- metrics and counters --------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_step_metrics(program, three_steps):
    _, _, metrics = three_steps
    assert set(metrics[0]) == {
        "loss", "head/nll", "stack/block1/penalty", "grad_norm", "skipped", "learning_rate", "learning_rate/rule1"
    }  # fmt: skip
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [0.01, 0.015, 0.02], rtol=1e-6)
    assert [m["skipped"] for m in metrics] == [0.0, 0.0, 0.0]
    # The z-loss and the layers' auxiliary losses are part of the loss, but not of the likelihood.
    units = 2
    for values in metrics:
        assert values["loss"] > values["head/nll"] + units * values["stack/block1/penalty"]
        assert values["stack/block1/penalty"] > 0.0


@pytest.mark.pairs
def test_the_model_learns_a_batch(program):
    state, losses = program.init(), []
    batch = program.put(small.host_batch(program))
    for _ in range(25):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["head/nll"]))
    assert losses[-1] < 0.5 * losses[0]


# --- nonfinite steps -------------------------------------------------------------------------------------------------


def test_nonfinite_step_changes_only_two_counters(program, three_steps):
    first, _, _ = three_steps
    state, _ = small.run(program, 1, put(program, first))
    before = jax.device_get(state)
    batch = small.host_batch(program, 9)
    batch["weights"][0, 3] = np.inf
    state, metrics = program.step(state, program.put(batch))
    after = jax.device_get(state)
    assert float(metrics["skipped"]) == 1.0
    assert not np.isfinite(float(metrics["loss"]))
    for group in ("parameter", "frozen", "buffer", "optimizer", "ema"):
        small.assert_same_bits(after[group], before[group])
    assert (int(after["counter"]["step"]), int(after["counter"]["skipped"])) == (2, 1)
    small.assert_same_bits(after["counter"]["rng"], before["counter"]["rng"])

    # There is no dropout, whose masks would depend on the step. So the next steps equal those of a run without the bad
    # batch.
    for step in (1, 2):
        state, metrics = program.step(state, program.put(small.host_batch(program, step)))
    _, expected, expected_metrics = three_steps
    assert {name: float(value) for name, value in metrics.items()} == expected_metrics[2]
    for group in ("parameter", "frozen", "buffer", "optimizer", "ema"):
        small.assert_same_bits(jax.device_get(state)[group], expected[group])
    assert (int(state.counter["step"]), int(state.counter["skipped"])) == (4, 1)


# --- frozen leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_frozen_leaves_cost_only_their_bytes_and_never_change(program, three_steps):
    first, last, _ = three_steps
    frozen = {"embed/position", "stack/block0/mlp/up/weight", "stack/block0/mlp/up/bias"}
    assert set(flatten(last["frozen"])) == frozen
    small.assert_same_bits(last["frozen"], first["frozen"])
    for group in ("parameter", "optimizer", "ema"):
        assert not any("position" in path or "mlp/up" in path for path in flatten(last[group])), group
    gradients = jax.eval_shape(lambda s, b: program_gradients(program, s, b), program.layout.abstract(), batch(program))
    assert set(flatten(gradients)) == set(flatten(last["parameter"]))
    moved = small.arrays(last["parameter"])
    assert all(np.any(moved[path] != value) for path, value in small.arrays(first["parameter"]).items())


def batch(program: Program):
    return program.layout.abstract(program.batch_specs)


def program_gradients(program: Program, state, batch):
    ctx = small.training_context(batch, state.counter, program.experiment.model, program.layout, "none")
    return small.accumulate_gradients(program.experiment.model, program.experiment.learner, state, ctx)[1]


# --- buffers ---------------------------------------------------------------------------------------------------------


def by_hand(program: Program, state, batch, buffers):
    """Run one forward pass stage by stage and layer by layer in Python, and return the new buffers."""
    model = program.experiment.model
    params = program.weights(state)
    ctx = Context(batch=batch, num_targets=jnp.sum(batch["weights"]), training=False)
    x, _ = model.embed.apply(model.embed.prepare(params["embed"], ctx), None, ctx, {})
    units = []
    for index in range(model.stack.num_repeats):
        weights, buffer = (jax.tree.map(lambda a, i=index: a[i], tree) for tree in (params["stack"], buffers["stack"]))
        x, out = model.stack.pattern.apply(weights, x, ctx, buffer)
        units.append(out.layer_state)
    return {"stack": jax.tree.map(lambda *leaves: jnp.stack(leaves), *units)}


def test_buffers_thread_through_the_loop_layer_by_layer(program, three_steps):
    first, last, _ = three_steps
    assert last["buffer"]["stack"]["block1"]["count"].tolist() == [3, 3]
    state, _ = small.run(program, 1, put(program, first))
    expected = jax.jit(lambda s, b: by_hand(program, s, b, s["buffer"]))(
        put(program, first), program.put(small.host_batch(program, 0))
    )
    small.assert_close(small.arrays(state.buffer), small.arrays(expected), 1e-5)
    means = np.asarray(state.buffer["stack"]["block1"]["mean"])
    assert np.abs(means[0] - means[1]).max() > 1e-3


@pytest.mark.pairs
def test_buffers_thread_through_microbatches(program, three_steps):
    """Each microbatch sees the buffers of the previous one; rows are dealt to microbatches round-robin."""
    first, _, _ = three_steps
    accumulating = small.program(eventful(accumulate=2))
    state, _ = small.run(accumulating, 1, put(accumulating, first))
    assert state.buffer["stack"]["block1"]["count"].tolist() == [2, 2]
    full = small.host_batch(program, 0)
    buffers = first["buffer"]
    for part in range(2):
        micro = {name: array[part::2] for name, array in full.items()}
        buffers = jax.jit(lambda s, b, f: by_hand(program, s, b, f))(first, micro, buffers)
    small.assert_close(small.arrays(state.buffer), small.arrays(buffers), 1e-5)


# --- the compiled step -----------------------------------------------------------------------------------------------


def test_every_state_byte_is_updated_in_place(program):
    aliased = program.jit_step.compiled_step.memory_analysis().alias_size_in_bytes
    assert aliased == program.layout.bytes_per_device()
    assert program.layout.bytes_per_device("frozen") > 0


@pytest.mark.pairs
def test_every_byte_is_updated_in_place_on_a_mesh():
    program = small.program(eventful(accumulate=2, mesh={"data": 2, "fsdp": 2, "model": 2}, dropout=0.1))
    assert program.jit_step.compiled_step.memory_analysis().alias_size_in_bytes == program.layout.bytes_per_device()


def test_old_state_is_deleted_after_a_step(program, three_steps):
    state = put(program, three_steps[0])
    program.step(state, program.put(small.host_batch(program)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.pairs
@pytest.mark.parametrize("unroll", [0, 1])
def test_no_tracer_leaks(unroll):
    config = eventful(accumulate=2, dropout=0.1)
    config.model.stack.unroll = unroll
    config.memory.remat = "dots"
    program = small.program(config)
    with jax.checking_leaks():
        program.jit_step.step_jit.trace(program.layout.abstract(), program.layout.abstract(program.batch_specs))
        program.jit_step.evaluation_jit("parameter").trace(
            *(program.layout.abstract()[group] for group in ("parameter", "frozen", "buffer")), batch(program)
        )


@pytest.mark.pairs
def test_evaluation_sums_over_microbatches():
    whole, parts = small.program(small.experiment()), small.program(small.experiment(accumulate=4))
    batch = small.host_batch(whole)
    state = whole.init()
    expected, found = (p.evaluate(state, p.put(batch)) for p in (whole, parts))
    assert float(found["tokens"]) == float(expected["tokens"])
    np.testing.assert_allclose(float(found["nll"]), float(expected["nll"]), rtol=1e-6)
    jaxpr = str(parts.jit_step.evaluation_jit("parameter").trace(*_evaluation_arguments(parts)).jaxpr)
    assert "[2,16,32]" in jaxpr  # two sequences at a time
    assert "[8,16,32]" not in jaxpr


def _evaluation_arguments(program):
    layout, specs = program.layout, program.layout.specs
    return layout.abstract((specs["parameter"], specs["frozen"], specs["buffer"], program.batch_specs))
