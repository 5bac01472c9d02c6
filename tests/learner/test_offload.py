"""offload_optimizer: state offloaded by regex, without and with a learner, with chains, sizes, and restores."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import ParameterSpec, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.optimizers.offload import offload_optimizer, partitioned_chain
from tests.support import small, updates

ADAMW = config_for(optax.adamw, learning_rate=1e-2, weight_decay=0.1)
SHAPES = {"large": (512, 1024), "vector": (1 << 19,), "small": (8, 8)}
SPECS = {path: ParameterSpec(shape, "float32", roles=("axis",) * len(shape)) for path, shape in SHAPES.items()}


def find_offloaded(tree: Any) -> set[str]:
    kinds = {path: getattr(leaf, "sharding", leaf).memory_kind for path, leaf in flatten(tree).items()}
    return {path for path, kind in kinds.items() if kind == "pinned_host"}


def draw(seed: int) -> Any:
    return {path: jax.random.normal(jax.random.key(seed), shape) for path, shape in SHAPES.items()}


def test_partition_tags_what_matches_and_is_large() -> None:
    mu = offload_optimizer(optax.adamw(1e-3), pattern="mu/")
    assert find_offloaded(mu.partition(SPECS)) == {"0/mu/large"}
    assert find_offloaded(offload_optimizer(mu, pattern="0/nu/").partition(SPECS)) == {"0/mu/large", "0/nu/large"}
    assert find_offloaded(offload_optimizer(mu, pattern="large", offload_dst="device").partition(SPECS)) == set()
    with pytest.raises(ValueError, match=r"pattern 'momentum' matches none of 7 paths, such as .*0/count"):
        offload_optimizer(optax.adamw(1e-3), pattern="momentum").partition(SPECS)
    with pytest.raises(ValueError, match=r"offload_src: expected 'device'.*given 'pinned_host'"):
        offload_optimizer(optax.adamw(1e-3), offload_src="pinned_host", offload_dst="device")


@pytest.mark.pairs
@pytest.mark.parametrize(
    "make",
    [lambda wrap: wrap(optax.adam(0.1)), lambda wrap: partitioned_chain([optax.clip(1.0), wrap(optax.adam(0.1))])],
)
@pytest.mark.parametrize("mapped", [False, True], ids=["", "stacked"])
def test_without_a_learner_it_moves_the_state_and_back(make: Any, mapped: bool) -> None:
    plain, moving = make(lambda inner: inner), make(lambda inner: offload_optimizer(inner, pattern="mu|nu"))
    each = jax.vmap if mapped else lambda function: function
    params, *grads = [jax.tree.map(lambda *x: jnp.stack(x) if mapped else x[0], draw(i), draw(9 - i)) for i in range(3)]
    expected, specs, device = each(plain.init)(params), moving.partition(SPECS), jax.devices()[0]
    places = jax.tree.map(lambda spec: SingleDeviceSharding(device, memory_kind=spec.memory_kind), specs)
    state = jax.device_put(expected, places)
    update_moving, update_plain = (jax.jit(each(one.update)) for one in (moving, plain))
    for grad in grads:
        result, wanted = update_moving(grad, state, params), update_plain(grad, expected, params)
        small.assert_same_bits(result, wanted)
        state, expected = result[1], wanted[1]
        assert find_offloaded(state) == find_offloaded(specs) != set()
    with pytest.raises((TypeError, ValueError), match="memory"):  # XLA does not move host arrays by itself
        jax.jit(each(plain.update))(grads[0], state, params)


# --- in the learner --------------------------------------------------------------------------------------------------


def wrap_optimizer(pattern: str, optimizer: Config = ADAMW) -> Config:
    return config_for(offload_optimizer, optimizer=optimizer.copy(), pattern=pattern)


def program(optimizer: Config, **memory: str) -> Any:
    model = small.llama(stack__num_layers=3)
    small.block(model).mlp.hidden = 8192  # one megabyte per layer
    config = small.experiment(model, memory=memory, optimizer=optimizer, clip=0.1)
    return small.program(Config.from_json(config.to_json()))


MU = {f"optimizer/stack/default/state/0/mu/block0/mlp/{name}/weight" for name in ("down", "gate", "up")}


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", "streamed"])
def test_the_layout_moves_what_the_wrapper_tags(update: str, tmp_path: Path) -> None:
    ours, plain = program(wrap_optimizer("mu/"), update=update), program(ADAMW, update=update)
    (state, metrics), (expected, wanted) = small.run(ours, 2), small.run(plain, 2)
    assert find_offloaded(state) == MU
    small.assert_close(small.arrays(state), small.arrays(expected), 1e-6)
    assert metrics[-1] == pytest.approx(wanted[-1], rel=1e-6)  # including the learning rate
    with pytest.raises(ValueError, match="mu/block0/mlp/down/weight is in device; the layout says pinned_host"):
        ours.layout.check(expected)

    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(2, state, {})
        checkpointer.wait()
        restored = checkpointer.restore(2, ours.layout.abstract()).state
    ours.layout.check(restored)
    small.assert_same_bits(restored, state)

    bad = small.host_batch(ours)
    bad["weights"] = bad["weights"] * np.nan
    after, metrics = ours.step(restored, ours.put(bad))
    ours.layout.check(after)
    assert float(metrics["skipped"]) == 1.0
    small.assert_same_bits(after["optimizer"], state.optimizer)


@pytest.mark.pairs
def test_nothing_is_moved_twice() -> None:
    settings = [(one, kind) for kind in ("device", "pinned_host") for one in (ADAMW, wrap_optimizer("mu/"))]
    steps = [program(one, optimizer_state=kind).jit_step.traced_step for one, kind in settings]
    assert [str(step.jaxpr).count("device_put") for step in steps] == [0, 2 * len(MU), 4 * len(MU), 4 * len(MU)]


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_patterns_match_full_model_paths_and_chains_build(scope: str) -> None:
    parts = [
        wrap_optimizer("high", config_for(optax.scale_by_adam)),
        config_for(optax.scale, step_size=-0.1),
    ]  # the stack's
    config = config_for(Learner, optimizer=config_for(partitioned_chain, transformations=parts), clip=None, scope=scope)
    params, grads = updates.draw(0), updates.gradients(2)
    expected, _ = updates.plain(optax.adam(0.1), params, grads)
    ours = updates.ours(config.instantiate(specs=updates.specs()), params, grads)
    assert updates.worst([updates.unstack(kept.params) for kept in ours], expected) <= 1e-6
    config.set_path("optimizer.transformations.0.pattern", "hgih")
    with pytest.raises(ValueError, match=r"copy_partition: pattern 'hgih' matches none of \d+ paths"):
        config.instantiate(specs=updates.specs())
