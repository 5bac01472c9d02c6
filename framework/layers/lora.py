"""LoRA: low-rank adapters beside linear layers, whose own weights stay as they are (Hu et al. 2021, arXiv 2106.09685).

    y = x W + (alpha / rank) dropout(x) A B,    W [in, out] frozen, A [in, rank] random, B [rank, out] zeros

W may be stored in 8 or 4 bits (QLoRA), see layers/quantize.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.config import DType, Fraction, PositiveFloat, PositiveInt, component
from framework.layers.base import Context, Layer, add_shared
from framework.layers.linear import Linear
from framework.layers.quantize import Storage, dequantize, matmul, quantized_specs
from framework.layout import Nested, ParameterSpec


@component
class LoRA:
    """Adapters for the linear layers of a model; all else is frozen.

    Args:
        rank: inner size of an adapter's product.
        alpha: the product is scaled by alpha / rank.
        dropout: rate, on the adapters' input, in training.
        targets: a regex, searched in the paths of linear layers, such as "stack/block0/attention/query"; "." is all.
        base: how the weights of those layers are stored: a dtype, int8 with a scale per output, or nf4, 4 bits with a
            scale per 64 weights; None means model.param_dtype.
        dtype: of the adapters, whatever model.param_dtype is.
    """

    def __init__(
        self,
        *,
        rank: PositiveInt = 16,
        alpha: PositiveFloat = 32.0,
        dropout: Fraction = 0.0,
        targets: str = ".",
        base: Literal["float32", "bfloat16", "float16", "int8", "nf4"] | None = None,
        dtype: DType = "float32",
    ):
        try:
            self.targets = re.compile(targets)
        except re.error as error:
            raise ValueError(f"targets = {targets!r} is no regular expression: {error}") from error
        self.rank, self.scale, self.dropout, self.base, self.dtype = rank, alpha / rank, dropout, base, dtype
        self.storage: Storage | None = base if base in ("int8", "nf4") else None

    def wrap(self, layers: Mapping[str, Layer]) -> None:
        """Puts a LoRALinear in the place of each Linear below `layers` that matches. Raises ValueError for none."""
        found = [one for name, layer in layers.items() for one in _linears(layer, name)]
        chosen = [one for one in found if self.targets.search(one[0])]
        if not chosen:
            some = [path for path, *_ in found][:8]
            raise ValueError(f"lora.targets = {self.targets.pattern!r} matches none of {len(found)} layers: {some}")
        for path, parent, attribute in chosen:
            setattr(parent, attribute, LoRALinear(getattr(parent, attribute), self, path))


def _linears(parent: Layer, path: str) -> Iterator[tuple[str, Layer, str]]:
    for name, child in parent.children().items():
        if isinstance(child, Linear):
            yield f"{path}/{name}", parent, next(key for key, value in vars(parent).items() if value is child)
        else:
            yield from _linears(child, f"{path}/{name}")


class LoRALinear(Layer):
    """A Linear and its adapter. Only adapters have an axis of the role "rank", and only they are trained."""

    def __init__(self, base: Linear, lora: LoRA, path: str):
        self.base, self.lora, self.path = base, lora, path

    def own_specs(self) -> dict[str, Any]:
        """The Linear's own (a quantized weight as a dict), lora_a [inputs, rank] and lora_b [rank, outputs]."""
        specs: dict[str, Any] = self.base.own_specs()
        weight: ParameterSpec = specs["weight"]
        if self.lora.storage is not None:
            specs["weight"] = quantized_specs(weight, self.lora.storage, self.path)
        elif self.lora.base is not None:
            specs["weight"] = replace(weight, dtype=self.lora.base, own_dtype=True)
        # U(-1/sqrt(in), 1/sqrt(in)), as the authors' code has it.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        (inputs, outputs), (rows, columns), (source, goal) = weight.shape, weight.mesh_axes, weight.roles
        rank, own = self.lora.rank, {"dtype": self.lora.dtype, "own_dtype": True}
        a = ParameterSpec((inputs, rank), mesh_axes=(rows, None), initializer=uniform, roles=(source, "rank"), **own)
        b = ParameterSpec((rank, outputs), mesh_axes=(None, columns), roles=("rank", goal), **own)
        return {**specs, "lora_a": a, "lora_b": b}

    def __call__(self, weights: Nested, x: jax.Array, ctx: Context) -> jax.Array:
        """x [batch, ..., inputs] -> [batch, ..., outputs], in x's dtype."""
        if self.lora.storage is None:
            y = self.base(weights, x, ctx)
        else:
            y: Any = matmul(self.lora.storage, x, weights["weight"])
            y = add_shared(y, weights["bias"]) if self.base.bias else y
        low = ctx.dropout(x, self.lora.dropout, self.path) @ weights["lora_a"]
        # Scaled in float32: a scale that is no power of two would be rounded to the compute dtype first.
        wide = jnp.promote_types(low.dtype, jnp.float32)
        scaled = (self.lora.scale * low.astype(wide)).astype(low.dtype)
        return y + scaled @ weights["lora_b"]

    def flops_per_token(self, seq_len: int) -> float:
        """The Linear's and the adapter's."""
        return self.base.flops_per_token(seq_len) + 2.0 * self.lora.rank * (self.base.inputs + self.base.outputs)


def merge_adapters(model: Any, params: Nested) -> Nested:
    """All parameters of a model with LoRA as those of the same model without it: W + (alpha / rank) A B, computed in
    float32 and cast to the model's `param_dtype`. Other leaves come back as they are."""
    lora: LoRA | None = model.lora
    if lora is None or not isinstance(params, dict):
        return params
    if "lora_a" not in params:
        return {name: merge_adapters(model, child) for name, child in params.items()}
    a, b, weight = (params[name] for name in ("lora_a", "lora_b", "weight"))
    weight = weight.astype(jnp.float32) if lora.storage is None else dequantize(weight, lora.storage, jnp.float32)
    merged = weight + lora.scale * (a.astype(jnp.float32) @ b.astype(jnp.float32))
    bias = {name: leaf for name, leaf in params.items() if name == "bias"}
    return {**bias, "weight": merged.astype(model.param_dtype)}
