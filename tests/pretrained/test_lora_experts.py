"""Experts of published mixtures with adapters or quantized weights: read, quantized, merged and exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.layers.lora import merge_adapters
from plimsoll.framework.layers.quantize import quantize
from plimsoll.framework.layout import flatten
from plimsoll.framework.weights.export import export_adapters, export_model
from tests.pretrained.test_pretrained import assert_same_tensors, directory, program, tensors

SIZES = {"hidden_size": 64, "intermediate_size": 128}


def perturb_adapters(state: Any) -> Any:
    """Return a state in which all adapters have an effect: B is not zero."""
    rng = np.random.default_rng(1)
    state = jax.device_get(state)
    return replace(state, parameter=jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), state["parameter"]))


@pytest.mark.pairs
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_experts_are_quantized_as_they_are_read(tmp_path: Path, storage: str):
    """A `qlora:` config quantizes all matrices of a mixture except the router, tables and norms."""
    source = directory(tmp_path / "in", "mixtral", **SIZES)
    stored = program(f"qlora:{source}", model__lora__base=storage)
    state = stored.experiment.pretrained.init(stored)
    stored.layout.check(state)
    published = tensors(source)
    experts = state["frozen"]["stack"]["block0"]["mlp"]["experts"]
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for layer in range(2):
            for expert in range(experts[name]["codes"].shape[1]):
                key = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight"
                expected = quantize(published[key].T, storage)
                for part in ("codes", "scales"):
                    np.testing.assert_array_equal(experts[name][part][layer, expert], expected[part], err_msg=key)
    floats = {path for path in flatten(state["frozen"]) if not path.endswith(("/codes", "/scales"))}
    assert all("norm" in path or "router" in path or "embed" in path or "head" in path for path in floats), floats


@pytest.mark.pairs
def test_expert_adapters_are_merged_and_written(tmp_path: Path):
    source = directory(tmp_path / "in", "mixtral", **SIZES)
    fields = {"model__lora__dropout": 0.0, "model__lora__targets": "experts|."}
    adapted = program(f"lora:{source}", **fields)
    published = adapted.experiment.pretrained
    state = published.init(adapted)
    model = adapted.experiment.model
    export_model(tmp_path / "same", model, adapted.weights(state), published.family, published.facts)
    assert_same_tensors(tmp_path / "same", source)
    params = adapted.weights(perturb_adapters(state))
    export_model(tmp_path / "out", model, params, published.family, published.facts)
    written = tensors(tmp_path / "out")
    experts = params["stack"]["block0"]["mlp"]["experts"]
    merged = flatten(merge_adapters(model, params))
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        update = experts[f"{name}_lora_a"] @ experts[f"{name}_lora_b"]
        expected = experts[name] + model.lora.scale * update
        np.testing.assert_allclose(merged[f"stack/block0/mlp/experts/{name}"], expected, rtol=1e-5, atol=1e-5)
        for layer in range(2):
            for expert in range(expected.shape[1]):
                key = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight"
                np.testing.assert_allclose(written[key].T, expected[layer, expert], rtol=1e-5, atol=1e-5, err_msg=key)
    refusal = r"experts/(gate|up|down) has an adapter for each expert.*without --adapter, which merges"
    with pytest.raises(ValueError, match=refusal):
        export_adapters(tmp_path / "adapter", model, params, published.family, str(source))
    assert not (tmp_path / "adapter").exists()


@pytest.mark.pairs
def test_adapters_on_all_but_experts_are_written_for_peft(tmp_path: Path):
    source = directory(tmp_path / "in", "mixtral", **SIZES)
    adapted = program(f"lora:{source}")
    state = adapted.experiment.pretrained.init(adapted)
    family = adapted.experiment.pretrained.family
    export_adapters(tmp_path / "adapter", adapted.experiment.model, adapted.weights(state), family, str(source))
    names = {name.split(".")[-3] for name in tensors(tmp_path / "adapter")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
