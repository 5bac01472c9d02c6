"""Layers before the stack: their initial values, their memory settings, and invalid configs."""

from unittest import mock

import jax
import numpy as np
import pytest

from plimsoll.framework import layout
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.latent import with_latents


@pytest.mark.pairs
def test_init_is_scaled_by_the_total_depth():
    model = with_latents(small.llama(stack__num_layers=6))
    with_depth = model.instantiate()
    assert with_depth.first is not None
    params = small.program(small.experiment(model)).init().parameter
    for stage in ("first", "stack"):
        deviation = np.std(np.asarray(params[stage]["block0"]["attention"]["output"]["weight"]))
        np.testing.assert_allclose(deviation, 0.2 / np.sqrt(2 * 8), rtol=0.1)


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["streamed", "layer_programs"])
def test_first_layers_use_the_settings_for_stack_layer_0(update):
    """Layers before the stack use the settings of the stack's first layer."""
    memory = {"update": update, "optimizer_state": "pinned_host:2", "remat": "full:2,none"}
    config = small.experiment(with_latents(small.llama(stack__num_layers=4, dim=128)), memory=memory)
    # Also offload matrices of this small size.
    with mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256):
        program = Program(config.instantiate(), jax.devices()[:1])
        leaves = list(program.layout)
    kinds = {"first": set(), "stack": set()}
    for leaf in leaves:
        group, stage = leaf.path.split("/")[:2]
        name = stage.split(".")[0]
        if group == "optimizer" and name in kinds and len(leaf.spec.shape) > 2:
            kinds[name].add(leaf.spec.memory_kind)
    assert kinds["first"] == {"pinned_host"}
    assert kinds["stack"] == {"pinned_host", "device"}


def test_first_layers_share_nothing():
    model = with_latents(small.llama())
    model.first.num_layers = 4
    model.first.pattern = [*model.first.pattern, model.first.pattern[0].copy()]
    model.first.shared = [1]
    with pytest.raises(ValueError, match=r"first\.shared = \[1\]; expected none"):
        model.instantiate()


def test_paths_are_by_stage():
    specs = flatten(with_latents(small.llama()).instantiate().parameter_specs())
    stages = {path.split("/")[0] for path in specs}
    assert stages == {"embed", "first", "stack", "head"}
    assert specs["first/block0/mlp/up/weight"].shape[0] == 2
