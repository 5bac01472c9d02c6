"""The owner and the sharding axes of each leaf of an optimizer's state, derived for any optax transformation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from plimsoll.framework.layout import OptStateSpec, ParameterSpec, flatten
from plimsoll.framework.optimizers.named import OPTIMIZERS
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition, mirrors_parameter


def spec(*shape: int, axes: tuple = (), dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(shape, dtype, axes, roles=("axis",) * len(shape))


# Names that are suffixes of others; square, wide and tall matrices, an array of three dimensions, and a vector.
SPECS = {
    "wide": {"weight": spec(8, 24, axes=("fsdp", "model")), "bias": spec(24, axes=("model",))},
    "high": {"weight": spec(24, 8, axes=("model", "fsdp"))},
    "square": {"weight": spec(16, 16, axes=("fsdp", "model"))},
    "weight": spec(16, 16, axes=("model", None)),
    "cube": spec(2, 8, 12, axes=(None, "fsdp", "model")),
    "norm": {"scale": spec(16, dtype="bfloat16")},
}
PARAMETERS = flatten(SPECS)


def derive(optimizer: optax.GradientTransformation, specs=None) -> dict[str, OptStateSpec]:
    """Return {path of the state leaf: spec}, after checking structure, shapes and dtypes against the state."""
    specs = SPECS if specs is None else specs
    derived = add_partition(optimizer).partition(specs)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    state = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(derived) == jax.tree.structure(state)
    for path, leaf in flatten(state).items():
        assert (flatten(derived)[path].shape, flatten(derived)[path].dtype) == (leaf.shape, leaf.dtype), path
    return flatten(derived)


def counters(leaves: dict[str, OptStateSpec]) -> set[str]:
    found = {path for path, leaf in leaves.items() if leaf.owner is None}
    assert all(leaves[path].mesh_axes == (None,) * len(leaves[path].shape) for path in found)
    assert not any(mirrors_parameter(leaves[path]) for path in found)
    return found


def assert_mirrors(leaves: dict[str, OptStateSpec], prefix: str, owners=PARAMETERS) -> None:
    """Assert that `prefix` has one leaf per parameter, owned by that parameter and sharded like it."""
    below = {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}
    assert below.keys() == owners.keys()
    for path, leaf in below.items():
        assert leaf.owner == path
        assert (leaf.shape, leaf.mesh_axes) == (PARAMETERS[path].shape, PARAMETERS[path].mesh_axes), path
        assert mirrors_parameter(leaf)


def test_sgd_with_momentum():
    leaves = derive(optax.sgd(0.1, momentum=0.9))
    assert_mirrors(leaves, "0/trace/")
    assert not counters(leaves)


def test_sgd_without_momentum_has_no_state():
    assert derive(optax.sgd(0.1)) == {}


def test_adamw_with_a_schedule():
    leaves = derive(optax.adamw(optax.linear_schedule(0.1, 0.0, 10)))
    assert_mirrors(leaves, "0/mu/")
    assert_mirrors(leaves, "0/nu/")
    assert counters(leaves) == {"0/count", "2/count"}
    assert leaves["0/mu/norm/scale"].dtype == jnp.bfloat16


def test_lion():
    leaves = derive(optax.lion(0.1))
    assert_mirrors(leaves, "0/mu/")
    assert counters(leaves) == {"0/count"}


def test_longest_matching_suffix_wins():
    """The paths weight, wide/weight, high/weight and square/weight all end in "weight"."""
    leaves = derive(optax.sgd(0.1, momentum=0.9))
    assert leaves["0/trace/weight"].owner == "weight"
    assert leaves["0/trace/wide/weight"].owner == "wide/weight"
    assert leaves["0/trace/weight"].mesh_axes == ("model", None)
    assert leaves["0/trace/square/weight"].mesh_axes == ("fsdp", "model")


# path: (v_row's shape and axes, v_col's shape and axes). optax reduces v_row over the larger of the two largest
# dimensions, and v_col over the smaller.
FACTORED = {
    "wide/weight": (((8,), ("fsdp",)), ((24,), ("model",))),
    "high/weight": (((8,), ("fsdp",)), ((24,), ("model",))),
    "square/weight": (((16,), ("fsdp",)), ((16,), ("model",))),
    "weight": (((16,), ("model",)), ((16,), (None,))),
    "cube": (((2, 8), (None, "fsdp")), ((2, 12), (None, "model"))),
}


def test_adafactors_rows_and_columns_find_their_axes():
    leaves = derive(optax.adafactor(0.1, min_dim_size_to_factor=4))
    for path, owner in PARAMETERS.items():
        row, column, full = (leaves[f"0/{name}/{path}"] for name in ("v_row", "v_col", "v"))
        assert row.owner == column.owner == full.owner == path
        if path in FACTORED:
            assert ((row.shape, row.mesh_axes), (column.shape, column.mesh_axes)) == FACTORED[path], path
            assert (full.shape, full.mesh_axes) == ((1,), (None,))
        else:
            assert (full.shape, full.mesh_axes) == (owner.shape, owner.mesh_axes)
            assert (row.shape, row.mesh_axes) == (column.shape, column.mesh_axes) == ((1,), (None,))
    assert counters(leaves) == {"0/count"}


def test_adafactor_below_its_threshold_keeps_whole_moments():
    leaves = derive(optax.adafactor(0.1, min_dim_size_to_factor=128))
    assert_mirrors(leaves, "0/v/")
    assert {leaf.shape for path, leaf in leaves.items() if "/v_row/" in path} == {(1,)}


def test_muon_partitions_matrices_from_the_rest():
    leaves = derive(optax.contrib.muon(0.1))
    matrices = {path: s for path, s in PARAMETERS.items() if len(s.shape) == 2}
    assert_mirrors(leaves, "inner_states/muon/inner_state/0/mu/", owners=matrices)
    others = {path: s for path, s in PARAMETERS.items() if len(s.shape) != 2}
    assert_mirrors(leaves, "inner_states/adam/inner_state/0/mu/", owners=others)
    assert_mirrors(leaves, "inner_states/adam/inner_state/0/nu/", owners=others)
    owned = {leaf.owner for leaf in leaves.values() if leaf.owner}
    assert owned == set(PARAMETERS)
    assert all(leaves[path].shape in ((), (3,)) for path in counters(leaves))


def test_masked_states_have_holes():
    def matrices(params):
        return jax.tree.map(lambda p: len(p.shape) >= 2, params)

    optimizer = optax.chain(optax.masked(optax.trace(0.9), matrices), optax.scale(-0.1))
    leaves = derive(optimizer)
    assert_mirrors(leaves, "0/inner_state/trace/", {p: s for p, s in PARAMETERS.items() if len(s.shape) >= 2})


def test_multi_transform():
    labels = jax.tree.map(lambda s: "adam" if len(s.shape) == 2 else "sgd", SPECS)
    optimizer = optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, momentum=0.9)}, labels)
    leaves = derive(optimizer)
    matrices = {path: s for path, s in PARAMETERS.items() if len(s.shape) == 2}
    assert_mirrors(leaves, "inner_states/adam/inner_state/0/nu/", matrices)
    rest = {path: s for path, s in PARAMETERS.items() if path not in matrices}
    assert_mirrors(leaves, "inner_states/sgd/inner_state/0/trace/", rest)
    assert counters(leaves) == {"inner_states/adam/inner_state/0/count"}


class OwnState(NamedTuple):
    """A user's state: per parameter, one leaf of its shape, one per last axis and one scalar; one leaf for all."""

    seen: dict
    columns: dict
    norms: dict
    total: jax.Array


def user_optimizer() -> optax.GradientTransformation:
    def init(params):
        return OwnState(
            seen=jax.tree.map(jnp.zeros_like, params),
            columns=jax.tree.map(lambda p: jnp.zeros(p.shape[-1:], jnp.float32), params),
            norms=jax.tree.map(lambda p: jnp.zeros((), jnp.float32), params),
            total=jnp.zeros((), jnp.float32),
        )

    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(init, update)


def test_user_defined_transformation():
    leaves = derive(user_optimizer())
    assert_mirrors(leaves, "seen/")
    assert leaves["columns/wide/weight"].mesh_axes == ("model",)
    assert leaves["columns/high/weight"].mesh_axes == ("fsdp",)
    assert leaves["columns/square/weight"].mesh_axes == ("model",)
    assert leaves["columns/weight"].mesh_axes == (None,)
    assert leaves["columns/cube"].mesh_axes == ("model",)
    assert leaves["norms/cube"].owner == "cube"
    assert leaves["norms/cube"].mesh_axes == ()
    assert counters(leaves) == {"total"}


@pytest.mark.parametrize("name", ["adam", "adamax", "amsgrad", "lamb", "nadamw", "novograd", "rmsprop", "yogi", "sm3"])
def test_other_optax_optimizers(name):
    """Leaves with the shape of their parameter are sharded like it; leaves of no parameter are not sharded."""
    leaves = derive(getattr(optax, name)(0.1))
    counters(leaves)
    whole = 0
    for path, leaf in leaves.items():
        if leaf.owner is not None and leaf.shape == PARAMETERS[leaf.owner].shape:
            assert leaf.mesh_axes == PARAMETERS[leaf.owner].mesh_axes, path
            whole += 1
    assert whole >= len(PARAMETERS) or name == "sm3", "no moments found"


def test_sm3_accumulator_lists_belong_to_their_parameter():
    leaves = derive(optax.sm3(0.1))
    assert (leaves["0/mu/wide/weight/0"].owner, leaves["0/mu/wide/weight/1"].owner) == ("wide/weight", "wide/weight")
    assert (leaves["0/mu/wide/weight/0"].mesh_axes, leaves["0/mu/wide/weight/1"].mesh_axes) == (("fsdp",), ("model",))
    assert not counters(leaves)


def test_noise_equal_in_every_layer_is_refused():
    with pytest.raises(ValueError, match=r"learner\.optimizer: 0/rng_key of its state is a PRNG key"):
        derive(optax.noisy_sgd(0.1, key=3))


@pytest.mark.parametrize("name", ["adam_mini", "adamw8bit", "muon", "apollo", "galore", "adalomo"])
def test_our_optimizers_declare_their_update_counters(name: str):
    leaves = flatten(add_partition(OPTIMIZERS[name](learning_rate=0.1)).partition(SPECS))
    counted = {path for path, leaf in leaves.items() if leaf.counts_updates}
    assert counted == {path for path in counters(leaves) if path.endswith("count")}
    assert counted


def test_derived_state_treats_optax_counters_as_update_counts():
    """Flags, counts of non-finite gradients and a user's other counters are not: they may differ between layers."""
    leaves = derive(optax.apply_if_finite(optax.inject_hyperparams(optax.adamw)(0.1), 3))
    assert {path for path, leaf in leaves.items() if leaf.counts_updates} == {
        "inner_state/count",
        "inner_state/inner_state/0/count",
    }
    assert counters(leaves) > {"notfinite_count", "last_finite", "total_notfinite"}


def test_declared_partition_is_not_changed():
    mine = PartitionedGradientTransformation(user_optimizer().init, user_optimizer().update, lambda specs: "as I say")
    assert mine.partition(SPECS) == "as I say"
