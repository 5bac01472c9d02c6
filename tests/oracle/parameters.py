"""The parameters of a random model by name and shape, and their initial values.

A name is the framework's path plus the index in the stack, where the framework has one stacked tensor:
stack/2/block0/attention/query/weight. This module is written from docs and papers, independently of the framework's
parameter specs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.oracle.experiments import (
    MLP,
    Attention,
    LinearAttention,
    LoRA,
    Mixture,
    Model,
    Norm,
    RandomExperiment,
    StateSpace,
)

Shapes = dict[str, tuple[int, ...]]
Linears = dict[str, tuple[int, int, bool]]  # {name: (inputs, outputs, whether it has a bias)}
# 8-bit weights are code / 127 * scale in float32, which a compiler may turn into code * (scale * (1 / 127)). With these
# codes and scales that are powers of two, every order gives the same number, so the usual tolerances apply.
_CODES = np.arange(-127, 128).astype(np.int8)
_QUOTIENTS = _CODES.astype(np.float32) / np.float32(127)
EXACT_CODES = _CODES[_CODES.astype(np.float32) * (np.float32(1) / np.float32(127)) == _QUOTIENTS]
PRECISE = {"float64": np.float64, "float32": np.float32, "mixed": ml_dtypes.bfloat16}


def parameter_shapes(model: Model) -> Shapes:
    """Return {name: shape} of all parameters, one tensor per layer."""
    shapes: Shapes = {"embed/token": (model.vocab, model.dim)}
    if model.positions is not None:
        shapes["embed/position"] = (model.positions, model.dim)
    for home, index in _homes(model):
        shapes |= _layer_shapes(model, home, index)
    shapes |= _norm_shapes("head/norm", model.head_norm, model.dim)
    if not model.tied:
        shapes["head/table"] = (model.vocab, model.dim)
    return shapes


def path(name: str) -> str:
    """Return the framework's path for a name: without the index in the stack."""
    return re.sub(r"^stack/\d+/", "stack/", name)


def _homes(model: Model) -> Iterator[tuple[str, int]]:
    """Yield (prefix of the names, index in the pattern) of every layer; a shared layer comes once."""
    for index in range(len(model.layers)):
        if index in model.shared:
            yield f"shared/block{index}", index
        else:
            yield from ((f"stack/{repeat}/block{index}", index) for repeat in range(model.repeats))


def _layer_shapes(model: Model, home: str, index: int) -> Shapes:
    layer, dim = model.layers[index], model.dim
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, LinearAttention):
        linears = _delta_net_linears(attention, dim)
    elif isinstance(attention, StateSpace):
        linears = _state_space_linears(attention, dim)
    else:
        linears = _attention_linears(attention, dim)
    if isinstance(mlp, MLP):
        linears |= _mlp_linears("mlp", mlp, dim)
    elif mlp.shared is not None:
        linears |= _mlp_linears("mlp/shared", mlp.shared, dim)
        if mlp.shared_gate:
            linears["mlp/shared_gate"] = (dim, 1, False)
    shapes: Shapes = {}
    if isinstance(mlp, Mixture):
        shapes |= _mixture_shapes(model.lora, f"{home}/mlp", f"stack/block{index}/mlp", mlp, dim)
    for name, (inputs, outputs, bias) in linears.items():
        shapes |= _linear_shapes(model.lora, f"{home}/{name}", f"stack/block{index}/{name}", inputs, outputs, bias)
    norms = {"attention_norm": layer.norm, "mlp_norm": layer.norm}
    if layer.post_norm is not None:
        norms |= {"attention_post_norm": layer.post_norm, "mlp_post_norm": layer.post_norm}
    for name, norm in norms.items():
        shapes |= _norm_shapes(f"{home}/{name}", norm, dim)
    if isinstance(attention, LinearAttention):
        shapes |= _delta_net_shapes(f"{home}/attention", attention)
    elif isinstance(attention, StateSpace):
        shapes |= _state_space_shapes(f"{home}/attention", attention)
    elif attention.qk_norm is not None:
        for name in ("query_norm", "key_norm"):
            shapes |= _norm_shapes(f"{home}/attention/{name}", attention.qk_norm, attention.head_dim)
    return shapes


def _attention_linears(attention: Attention, dim: int) -> Linears:
    inner, inner_kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    linears = {
        "attention/query": (dim, inner, attention.bias),
        "attention/key": (dim, inner_kv, attention.bias),
        "attention/value": (dim, inner_kv, attention.bias),
        "attention/output": (inner, dim, attention.output_bias),
    }
    if attention.output_gate:
        linears["attention/gate"] = (dim, inner, attention.bias)
    return linears


def _delta_net_linears(attention: LinearAttention, dim: int) -> Linears:
    keys, values = attention.key_heads * attention.key_dim, attention.heads * attention.value_dim
    outputs = {
        "query": keys,
        "key": keys,
        "value": values,
        "gate": values,
        "beta": attention.heads,
        "decay": attention.heads,
    }
    linears = {f"attention/{name}": (dim, size, attention.bias) for name, size in outputs.items()}
    return {**linears, "attention/output": (values, dim, attention.bias)}


def _delta_net_shapes(home: str, attention: LinearAttention) -> Shapes:
    """Return the shapes of the convolutions, the rates of decay and the norm."""
    keys, values = attention.key_heads * attention.key_dim, attention.heads * attention.value_dim
    channels = {"query": keys, "key": keys, "value": values}
    return {
        **{f"{home}/{name}_conv": (attention.conv_width, size) for name, size in channels.items()},
        f"{home}/log_rate": (attention.heads,),
        f"{home}/decay_bias": (attention.heads,),
        f"{home}/norm/scale": (attention.value_dim,),
    }


def _state_space_linears(attention: StateSpace, dim: int) -> Linears:
    states, inputs = attention.groups * attention.state_dim, attention.heads * attention.head_dim
    outputs = {"query": states, "key": states, "value": inputs, "gate": inputs, "step": attention.heads}
    linears = {f"attention/{name}": (dim, size, attention.bias) for name, size in outputs.items()}
    return {**linears, "attention/output": (inputs, dim, attention.bias)}


def _state_space_shapes(home: str, attention: StateSpace) -> Shapes:
    """Return the shapes of the convolutions, the norm, and the numbers of each head."""
    states, inputs = attention.groups * attention.state_dim, attention.heads * attention.head_dim
    channels = {"query": states, "key": states, "value": inputs}
    shapes: Shapes = {f"{home}/{name}_conv": (attention.conv_width, size) for name, size in channels.items()}
    if attention.conv_bias:
        shapes |= {f"{home}/{name}_conv_bias": (size,) for name, size in channels.items()}
    shapes |= {f"{home}/{name}": (attention.heads,) for name in ("log_rate", "step_bias", "skip")}
    return {**shapes, f"{home}/norm/scale": (inputs,)}


def _mlp_linears(home: str, mlp: MLP, dim: int) -> Linears:
    linears = {f"{home}/up": (dim, mlp.hidden, mlp.bias), f"{home}/down": (mlp.hidden, dim, mlp.bias)}
    if mlp.gated:
        linears[f"{home}/gate"] = (dim, mlp.hidden, mlp.bias)
    return linears


def _mixture_shapes(lora: LoRA | None, home: str, target: str, mixture: Mixture, dim: int) -> Shapes:
    """Return the shapes of the router and of the experts; matrices and adapters of experts are stacked."""
    router, count = mixture.router, mixture.router.experts
    shapes: Shapes = {f"{home}/router/weight": (dim, count)}
    if router.bias:
        shapes[f"{home}/router/bias"] = (count,)
    for name, (inputs, outputs, bias) in _mlp_linears("experts", mixture.expert, dim).items():
        shapes[f"{home}/{name}"] = (count, inputs, outputs)
        if bias:
            shapes[f"{home}/{name}_bias"] = (count, outputs)
        if lora is not None and "experts" in lora.targets and re.search(lora.targets, f"{target}/{name}"):
            shapes[f"{home}/{name}_lora_a"] = (count, inputs, lora.rank)
            shapes[f"{home}/{name}_lora_b"] = (count, lora.rank, outputs)
    return shapes


def _linear_shapes(lora: LoRA | None, home: str, target: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{home}/bias": (outputs,)} if bias else {}
    if lora is None or not re.search(lora.targets, target):
        return {**shapes, f"{home}/weight": (inputs, outputs)}
    shapes |= {f"{home}/lora_a": (inputs, lora.rank), f"{home}/lora_b": (lora.rank, outputs)}
    if lora.base is None:
        return {**shapes, f"{home}/weight": (inputs, outputs)}
    return {**shapes, f"{home}/weight/codes": (inputs, outputs), f"{home}/weight/scales": (1, outputs)}


def _norm_shapes(home: str, norm: Norm, dim: int) -> Shapes:
    shapes: Shapes = {f"{home}/scale": (dim,)}
    if norm.kind == "layer" and norm.bias:
        shapes[f"{home}/bias"] = (dim,)
    return shapes


# --- initial values --------------------------------------------------------------------------------------------------


def first_values(drawn: RandomExperiment) -> dict[str, np.ndarray]:
    """Return {name: array}. Unlike in a real run, biases, scales and adapters do not start at zero or one."""
    values = {}
    for number, (name, shape) in enumerate(sorted(parameter_shapes(drawn.model).items())):
        rng = np.random.default_rng([drawn.seed, 1_000_000 + number])
        kind = name.rsplit("/", 1)[1]
        if kind == "codes":
            values[name] = rng.choice(EXACT_CODES, shape)
        elif kind == "scales":
            values[name] = rng.choice(np.array([0.5, 1.0], np.float32), shape)
        else:
            values[name] = _floats(drawn, name, shape, rng)
    return values


def _floats(drawn: RandomExperiment, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(shape)
    kind = name.rsplit("/", 1)[1]
    if kind == "scale":
        value = 0.2 * normal + (0.0 if _is_zero_centered(drawn.model, name) else 1.0)
    elif kind.endswith("bias"):
        value = 0.2 * normal
    elif kind in ("log_rate", "skip") or name in ("embed/token", "embed/position", "head/table"):
        value = 0.5 * normal
    else:
        value = normal / np.sqrt(shape[-2])
    return value.astype(PRECISE[drawn.precision]).astype(np.float64)  # exact in the framework's dtype


def _is_zero_centered(model: Model, name: str) -> bool:
    if name.startswith("head/"):
        return model.head_norm.zero_centered
    found = re.search(r"/block(\d+)/(.+)/scale$", name)
    assert found is not None, name
    layer = model.layers[int(found[1])]
    norm = {"attention_norm": layer.norm, "mlp_norm": layer.norm}.get(found[2], layer.post_norm)
    if found[2].startswith("attention/"):
        norm = layer.attention.qk_norm if isinstance(layer.attention, Attention) else Norm()
    return norm is not None and norm.zero_centered
