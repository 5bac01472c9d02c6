"""Tensors in files that hold several of our parameters side by side: split on reading, and joined on export."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from plimsoll.framework import families
from plimsoll.framework.config import config_for
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layout import flatten, unflatten
from plimsoll.framework.weights.export import export_adapters, export_model
from plimsoll.framework.weights.source import layer_shape
from tools.peers.families import FAMILIES

# Four query heads, and two key and value heads, with eight elements each.
QUERY_ROWS, KEY_ROWS = 32, 16


def test_unequal_query_key_and_value_sizes_round_trip(tmp_path: Path):
    facts = FAMILIES["phi3"].facts
    family = families.find_family(facts)()
    model = family.model(facts).instantiate()
    generator = np.random.default_rng(0)
    tensors = {}
    for path, sources in family.places(model).items():
        for source in sources:
            shape = source.shape(layer_shape(model.base_specs[path]))
            tensors.setdefault(source.name, generator.standard_normal(shape).astype(np.float32))
    params = {}
    for path, sources in family.places(model).items():
        spec = model.base_specs[path]
        whole = tuple(slice(None) for _ in layer_shape(spec))
        layers = [source.read(tensors.__getitem__, layer_shape(spec), whole) for source in sources]
        params[path] = jnp.asarray(np.stack(layers) if spec.num_layers is not None else layers[0])
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    key_end = QUERY_ROWS + KEY_ROWS
    parts = {"query": fused[:QUERY_ROWS], "key": fused[QUERY_ROWS:key_end], "value": fused[key_end:]}
    for name, rows in parts.items():
        np.testing.assert_array_equal(params[f"stack/block0/attention/{name}/weight"][1], rows.T)
    export_model(tmp_path / "out", model, unflatten(params), family, facts)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array)


def test_peft_cannot_adapt_half_a_fused_tensor(tmp_path: Path):
    facts = FAMILIES["phi3"].facts
    family = families.find_family(facts)()
    config = family.model(facts)
    config.lora = config_for(LoRA)
    model = config.instantiate()
    params = {path: jnp.zeros(spec.shape) for path, spec in flatten(model.parameter_specs()).items()}
    with pytest.raises(ValueError, match=r"qkv_proj\.weight holds several of our layers"):
        export_adapters(tmp_path / "out", model, unflatten(params), family, "base")
