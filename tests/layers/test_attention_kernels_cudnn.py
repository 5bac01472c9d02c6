"""cuDNN attention: the calls it refuses and, if JAX's CUDA plugin is installed, the calls it makes. Needs no GPU."""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from plimsoll.framework.layers import attention_kernels, kernels_cudnn
from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.kernels_call import describe_call

AXES = ("data", "fsdp", "expert", "seq", "model")
has_cuda = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def query(S=256, N=8, H=64, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((2, S, N, H), dtype)


def call(q, segments=None, window=None, softcap=None, platform="gpu"):
    return dataclasses.replace(describe_call(q, q, q, segments, window, softcap, None), platform=platform)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({}, {"platform": "tpu"}, "it runs on NVIDIA GPUs, not on tpu"),
        ({"dtype": jnp.float32}, {}, "bfloat16 or float16, not float32"),
        ({}, {"softcap": 50.0}, "no cap on logits; use triton or softcap=None"),
        ({"H": 20}, {}, "multiple of 8 up to 128 channels per head, not 20"),
        ({"H": 136}, {}, "multiple of 8 up to 128 channels per head, not 136"),
        ({"S": 255}, {"segments": jax.ShapeDtypeStruct((2, 255), jnp.int32)}, "even number of positions, not 255"),
    ],
)
def test_unsupported_shapes_are_refused(monkeypatch, arguments, options, message):
    monkeypatch.setattr(kernels_cudnn, "_PLUGINS", ("jax",))  # as if JAX were installed with CUDA
    asked = call(query(**arguments), **options)
    with pytest.raises(ValueError, match=f"implementation='cudnn' does not support this call: .*{message}"):
        choose_implementation(asked, "cudnn")
    if asked.platform == "gpu":
        assert choose_implementation(asked) == "triton"


def test_supported_shapes_are_accepted(monkeypatch):
    monkeypatch.setattr(kernels_cudnn, "_PLUGINS", ("jax",))
    for options in ({}, {"window": 30}, {"segments": jax.ShapeDtypeStruct((2, 256), jnp.int32)}):
        assert choose_implementation(call(query(), **options)) == "cudnn"


def test_error_without_cuda(monkeypatch):
    monkeypatch.setattr(kernels_cudnn, "_PLUGINS", ("no_such_plugin",))
    assert "installed without CUDA" in (kernels_cudnn.why_not(call(query())) or "")
    assert choose_implementation(call(query())) == "xla"


@pytest.mark.first(1)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 2, 1, 2, 2), (1, 1, 1, 4, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"segments": True}, {"segments": True, "window": 30}, {"window": 30}], ids=str)
def test_masks_and_positions_match_xla(monkeypatch, sizes, options):
    """With cuDNN's call replaced by JAX's own for the same arguments, only the code around the call can differ."""
    options = dict(options)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 64, n, 8)).astype(np.float32) for n in (4, 2, 2))
    segments = np.sort(rng.integers(0, 4, size=(2, 64)), axis=1).astype(np.int32)
    segments = segments if options.pop("segments", False) else None
    theirs = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **b: theirs(*a, **b | {"implementation": "xla"}))
    mesh = Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), AXES)
    call = describe_call(q, k, v, segments, options.get("window"), None, mesh)
    ours = jax.jit(lambda q, k, v: kernels_cudnn.attend(call, q, k, v, segments))(q, k, v)
    xla = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, segments_BS=segments, **options))(q, k, v)
    np.testing.assert_allclose(ours, xla, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_cuda, reason="JAX's CUDA plugin is not installed: pip install 'plimsoll-train[cuda]'")
@pytest.mark.parametrize(
    ("options", "seq", "mask_type", "window", "bias"),
    [
        ({}, 1, "CAUSAL", 0, False),
        ({"window": 30}, 1, "CAUSAL", 30, False),
        ({"segments": True}, 1, "CAUSAL", 0, True),
        ({"segments": True, "window": 30}, 1, "CAUSAL", 0, True),
        ({}, 4, "NO_MASK", 0, True),
        ({"segments": True, "window": 30}, 4, "NO_MASK", 0, True),
    ],
)
def test_the_calls_it_makes(monkeypatch, options, seq, mask_type, window, bias):
    options = dict(options)
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32) if options.pop("segments", False) else None
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 1, 1, seq, 8 // seq), AXES)
    # The step is lowered for CUDA over a mesh of CPU devices, so only the platform has to be overridden.
    on_gpu = lambda *a: dataclasses.replace(describe_call(*a), platform="gpu")  # noqa: E731
    monkeypatch.setattr(attention_kernels, "describe_call", on_gpu)

    def loss(q, k, v, segments):
        out = dot_product_attention(q, k, v, segments_BS=segments, implementation="cudnn", mesh=mesh, **options)
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    program = step.trace(query(), query(), query(), segments).lower(lowering_platforms=("cuda",)).as_text()
    calls = sorted(set(re.findall(r"__cudnn\$(\w+)", program)))
    name = "fmhaScaleBiasSoftmax" if bias else "fmhaSoftmax"
    assert calls == [name, f"{name}Backward"]
    configs = re.findall(r'backend_config = "(\{.*?\})"[,}]', program.replace("\\22", "'"))
    assert configs, program
    for text in configs:
        config = json.loads(text.replace("'", '"'))["cudnn_fmha_backend_config"]
        assert config["mask_type"] == mask_type
        assert config["sliding_window_length"] == window
        assert config["fmha_scale"] == 0.125
