"""LoRA: low-rank adapters for linear layers with frozen weights (Hu et al. 2021, arXiv 2106.09685).

    y = x W + (alpha / rank) dropout(x) A B,    W [in, out] frozen, A [in, rank] random, B [rank, out] zeros

W may be stored in 8 or 4 bits (QLoRA), see layers/quantize.py. Each expert of a mixture has its own A and B, see
layers/experts/expert_storage.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import DType, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.base import Context, Layer, add_shared
from plimsoll.framework.layers.experts.expert_storage import StoredMatrix
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.quantize import Storage, dequantize, make_quantized_specs, matmul
from plimsoll.framework.layout import Nested, ParameterSpec


@component
class LoRA:
    """Adapters for the linear layers of a model; all other parameters are frozen, except those of a score head.

    Args:
        rank: inner size of an adapter's product.
        alpha: the product is scaled by alpha / rank.
        dropout: dropout rate on the adapters' input, in training.
        targets: a regex, searched in the paths of linear layers, such as "stack/block0/attention/query"; "." matches
            all. It matches the experts of a mixture (stack/block0/mlp/experts/gate, up and down) only if it contains
            the word `experts`: "experts|." is everything, "experts/" only the experts. Adapters of experts have no
            dropout.
        base: storage of the weights of those layers: a dtype, int8 with a scale per output, or nf4, 4 bits with a
            scale per 64 weights; None means model.param_dtype.
        base_targets: a regex for further linear layers, including experts, whose weights use this storage without an
            adapter; "." matches all.
        dtype: dtype of the adapters, independent of model.param_dtype.
    """

    def __init__(
        self,
        *,
        rank: PositiveInt = 16,
        alpha: PositiveFloat = 32.0,
        dropout: Fraction = 0.0,
        targets: str = ".",
        base: Literal["float32", "bfloat16", "float16", "int8", "nf4"] | None = None,
        base_targets: str | None = None,
        dtype: DType = "float32",
    ):
        if base_targets is not None and base is None:
            raise ValueError(
                f"base_targets = {base_targets!r} without base; set base to the format in which to store these weights"
            )
        self.targets = _compile_regex("targets", targets)
        self.base_targets = None if base_targets is None else _compile_regex("base_targets", base_targets)
        self.rank = rank
        self.scale = alpha / rank
        self.dropout = dropout
        self.base = base
        self.dtype = dtype
        self.storage: Storage | None = base if base in ("int8", "nf4") else None

    def wrap(self, layers: Mapping[str, Layer]) -> None:
        """Replace Linears below `layers` by LoRALinears and FrozenLinears, and set the storage of experts.

        Raise ValueError if there is no target, or if adapters of experts would have dropout.
        """
        linears = []
        experts = []
        for name, layer in layers.items():
            linears.extend(_find_linears(layer, name))
            experts.extend(_find_expert_matrices(layer, name))
        targets_experts = "experts" in self.targets.pattern
        target_paths = {linear.path for linear in linears if self.targets.search(linear.path)}
        expert_paths = {site.path for site in experts if targets_experts and self.targets.search(site.path)}
        if not target_paths | expert_paths:
            paths = [site.path for site in (*linears, *experts)]
            pattern = self.targets.pattern
            raise ValueError(f"lora.targets = {pattern!r} matches none of {len(paths)} layers: {paths[:8]}")
        if expert_paths and self.dropout:
            raise ValueError(
                f"lora.dropout = {self.dropout}: adapters of experts have none (peft has none there either), and "
                f"lora.targets = {self.targets.pattern!r} matches {min(expert_paths)}; expected 0"
            )
        # Replaced only now, because this changes the children that `_find_linears` walks over.
        for site in linears:
            linear = getattr(site.parent, site.attribute)
            if site.path in target_paths:
                setattr(site.parent, site.attribute, LoRALinear(linear, self, site.path))
            elif self._stores(site.path):
                setattr(site.parent, site.attribute, FrozenLinear(linear, self, site.path))
        for site in experts:
            has_adapter = site.path in expert_paths
            if has_adapter or self._stores(site.path):
                rank = self.rank if has_adapter else None
                site.layer.stored[site.name] = StoredMatrix(site.path, self.base, rank, self.scale, self.dtype)

    def _stores(self, path: str) -> bool:
        """Return whether the weight at a path is stored in the `base` format without an adapter."""
        return self.base_targets is not None and self.base_targets.search(path) is not None


def _compile_regex(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{name} = {text!r} is not a regular expression: {error}") from error


@dataclass(frozen=True)
class _LinearSite:
    """The location of a Linear in a model: `getattr(parent, attribute)`."""

    path: str
    parent: Layer
    attribute: str


def _find_linears(parent: Layer, path: str) -> Iterator[_LinearSite]:
    for name, child in parent.children().items():
        child_path = f"{path}/{name}"
        if isinstance(child, Linear):
            # A child's name in paths may differ from the name of its attribute.
            attribute = next(key for key, value in vars(parent).items() if value is child)
            yield _LinearSite(child_path, parent, attribute)
        else:
            yield from _find_linears(child, child_path)


@dataclass(frozen=True)
class _ExpertSite:
    """One matrix of all experts of a layer, with its name in that layer."""

    path: str
    layer: Experts
    name: str


def _find_expert_matrices(parent: Layer, path: str) -> Iterator[_ExpertSite]:
    for name, child in parent.children().items():
        child_path = f"{path}/{name}"
        if isinstance(child, Experts):
            for matrix in child.names:
                yield _ExpertSite(f"{child_path}/{matrix}", child, matrix)
        else:
            yield from _find_expert_matrices(child, child_path)


class FrozenLinear(Layer):
    """A Linear whose weight is stored in the format `LoRA.base`."""

    def __init__(self, linear: Linear, lora: LoRA, path: str):
        self.linear = linear
        self.lora = lora
        self.path = path

    def param_specs(self) -> Nested:
        """Return the specs of the Linear; a quantized weight is a dict."""
        specs: Nested = {**self.linear.param_specs()}
        weight: ParameterSpec = specs["weight"]
        if self.lora.storage is not None:
            specs["weight"] = make_quantized_specs(weight, self.lora.storage, self.path)
        elif self.lora.base is not None:
            specs["weight"] = replace(weight, dtype=self.lora.base, keeps_dtype=True)
        return specs

    def __call__(self, weights: Nested, x: jax.Array, ctx: Context) -> jax.Array:
        """Map x [..., inputs] to [..., outputs], in x's dtype."""
        if self.lora.storage is None:
            return self.linear(weights, x, ctx)
        y = matmul(self.lora.storage, x, weights["weight"])
        return add_shared(y, weights["bias"]) if self.linear.bias else y

    def flops_per_token(self, seq_len: int) -> float:
        """Count the operations of the Linear."""
        return self.linear.flops_per_token(seq_len)


class LoRALinear(FrozenLinear):
    """A FrozenLinear with an adapter. Only adapters have an axis with the role "rank", which marks them as trained."""

    def param_specs(self) -> Nested:
        """Return the specs of the FrozenLinear, of lora_a [inputs, rank] and of lora_b [rank, outputs]."""
        specs = super().param_specs()
        weight: ParameterSpec = self.linear.param_specs()["weight"]
        # U(-1/sqrt(in), 1/sqrt(in)), as in the authors' code.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        inputs, outputs = weight.shape
        in_axis, out_axis = weight.mesh_axes
        in_role, out_role = weight.roles
        rank = self.lora.rank
        # Without an initializer, lora_b starts at zero, and so does the adapter's product.
        specs["lora_a"] = ParameterSpec(
            (inputs, rank),
            dtype=self.lora.dtype,
            mesh_axes=(in_axis, None),
            initializer=uniform,
            roles=(in_role, "rank"),
            keeps_dtype=True,
        )
        specs["lora_b"] = ParameterSpec(
            (rank, outputs),
            dtype=self.lora.dtype,
            mesh_axes=(None, out_axis),
            roles=("rank", out_role),
            keeps_dtype=True,
        )
        return specs

    def __call__(self, weights: Nested, x: jax.Array, ctx: Context) -> jax.Array:
        """Map x [batch, ..., inputs] to [batch, ..., outputs], in x's dtype."""
        y = super().__call__(weights, x, ctx)
        # The path gives each adapter its own mask: the layers of a block share a random stream.
        dropped = ctx.dropout(x, self.lora.dropout, self.path)
        low = dropped @ weights["lora_a"]
        # Scaled in float32: the compute dtype would round a scale that is not a power of two.
        wide = jnp.promote_types(low.dtype, jnp.float32)
        scaled = (self.lora.scale * low.astype(wide)).astype(low.dtype)
        return y + scaled @ weights["lora_b"]

    def flops_per_token(self, seq_len: int) -> float:
        """Count the operations of the Linear and of the adapter."""
        adapter = 2.0 * self.lora.rank * (self.linear.inputs + self.linear.outputs)
        return super().flops_per_token(seq_len) + adapter


class AdaptedModel(Protocol):
    """The part of a model that `merge_adapters` uses; see `framework.models.chain.Chain`."""

    lora: LoRA | None
    param_dtype: np.dtype


def merge_adapters(model: AdaptedModel, params: Nested) -> Nested:
    """Convert the parameters of a model with LoRA to those of the same model without it: W + (alpha / rank) A B.

    The sum is computed in float32 (or wider, if the weights are) and cast to the model's `param_dtype`. Other leaves
    are returned unchanged.
    """
    lora = model.lora
    if lora is None or not isinstance(params, dict):
        return params
    merged = {}
    for name, leaf in params.items():
        # The adapter of a Linear is called lora_a and lora_b; experts prefix these names with the name of the matrix.
        prefix = "" if name == "weight" else f"{name}_"
        adapter = [params.get(f"{prefix}lora_{letter}") for letter in "ab"]
        if name.endswith(("lora_a", "lora_b")):
            continue
        if adapter[0] is not None or (isinstance(leaf, dict) and "codes" in leaf):
            merged[name] = _merge_adapter(lora, leaf, *adapter).astype(model.param_dtype)
        else:
            merged[name] = merge_adapters(model, leaf)
    return merged


def _merge_adapter(
    lora: LoRA, weight: Nested | jax.Array, lora_a: jax.Array | None, lora_b: jax.Array | None
) -> jax.Array:
    """Return W + (alpha / rank) A B, [..., in, out]; without an adapter W."""
    if isinstance(weight, dict):
        assert lora.storage is not None
        weight = dequantize(weight, lora.storage, jnp.float32)
    weight = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    if lora_a is None or lora_b is None:
        return weight
    update = lora_a.astype(weight.dtype) @ lora_b.astype(weight.dtype)
    return weight + lora.scale * update
