"""LoRA: low-rank adapters for linear layers with frozen weights (Hu et al. 2021, arXiv 2106.09685).

    y = x W + (alpha / rank) dropout(x) A B,    W [in, out] frozen, A [in, rank] random, B [rank, out] zeros

W may be stored in 8 or 4 bits (QLoRA), see layers/quantize.py. Each expert of a mixture has its own A and B, see
layers/experts/expert_storage.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import DType, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.base import Context, Layer, add_shared
from plimsoll.framework.layers.experts.expert_storage import StoredMatrix
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import Recipe
from plimsoll.framework.layers.quantize import Storage, dequantize, matmul
from plimsoll.framework.layout import Nested


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
        """Replace Linears below `layers` by LoRALinears, and set the storage of experts.

        Raise ValueError if there is no target, or if adapters of experts would have dropout.
        """
        sites = [site for name, layer in layers.items() for site in _find_sites(layer, name)]
        linears = [site for site in sites if isinstance(site, _LinearSite)]
        experts = [site for site in sites if isinstance(site, _ExpertSite)]
        paths = [site.path for site in (*linears, *experts)]
        targets_experts = "experts" in self.targets.pattern
        target_paths = {linear.path for linear in linears if self.targets.search(linear.path)}
        expert_paths = {site.path for site in experts if targets_experts and self.targets.search(site.path)}
        if not target_paths | expert_paths:
            pattern = self.targets.pattern
            raise ValueError(f"lora.targets = {pattern!r} matches none of {len(paths)} layers: {paths[:8]}")
        if expert_paths and self.dropout:
            raise ValueError(
                f"lora.dropout = {self.dropout}: adapters of experts have none (peft has none there either), and "
                f"lora.targets = {self.targets.pattern!r} matches {min(expert_paths)}; expected 0"
            )
        # Weights in the `base` format; those that are no targets have no adapter.
        stored_paths = target_paths | expert_paths
        if self.base_targets is not None:
            stored_paths |= set(filter(self.base_targets.search, paths))
        # Replaced only now, because this changes the children that `_find_sites` walks over.
        for site in linears:
            if site.path in stored_paths:
                linear: Linear = getattr(site.parent, site.attribute)
                if linear.recipe is not None and self.storage is not None:
                    raise ValueError(
                        f"model.precision has a rule for {site.path}, whose weight is stored as {self.storage} "
                        "(lora.base) and dequantized for its product; expected another lora.base, or no such rule"
                    )
                setattr(site.parent, site.attribute, LoRALinear(linear, self, site.path, site.path in target_paths))
        for site in experts:
            if site.path in stored_paths:
                rank = self.rank if site.path in expert_paths else None
                site.layer.stored[site.name] = StoredMatrix(site.path, self.base, rank, self.scale, self.dtype)


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


@dataclass(frozen=True)
class _ExpertSite:
    """One matrix of all experts of a layer, with its name in that layer."""

    path: str
    layer: Experts
    name: str


def _find_sites(parent: Layer, path: str) -> Iterator[_LinearSite | _ExpertSite]:
    for name, child in parent.children().items():
        child_path = f"{path}/{name}"
        if isinstance(child, Linear):
            # A child's name in paths may differ from the name of its attribute.
            attribute = next(key for key, value in vars(parent).items() if value is child)
            yield _LinearSite(child_path, parent, attribute)
        elif isinstance(child, Experts):
            for matrix in child.names:
                yield _ExpertSite(f"{child_path}/{matrix}", child, matrix)
        else:
            yield from _find_sites(child, child_path)


class LoRALinear(Layer):
    """A Linear whose weight is stored in the format `LoRA.base`, with or without an adapter.

    Only adapters have an axis with the role "rank", which marks them as trained.
    """

    def __init__(self, linear: Linear, lora: LoRA, path: str, has_adapter: bool = True):
        self.linear = linear
        self.lora = lora
        self.path = path
        self.rank = lora.rank if has_adapter else None

    def param_specs(self) -> Nested:
        """Return the specs of the Linear, whose quantized weight is a dict, and of the adapter's lora_a and lora_b."""
        specs = self.linear.param_specs()
        stored = StoredMatrix(self.path, self.lora.base, self.rank, self.lora.scale, self.lora.dtype)
        return {**specs, **stored.specs("weight", specs["weight"])}

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the product with W; see `Linear`."""
        return self.linear.recipe

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """See `Linear.check_mesh`."""
        self.linear.check_mesh(mesh)

    def __call__(self, weights: Nested, x: jax.Array, ctx: Context) -> jax.Array:
        """Map x [batch, ..., inputs] to [batch, ..., outputs], in x's dtype."""
        if self.lora.storage is None:
            y = self.linear(weights, x, ctx)
        else:
            y = matmul(self.lora.storage, x, weights["weight"])
            if self.linear.bias:
                y = add_shared(y, weights["bias"])
        if self.rank is None:
            return y
        # The path gives each adapter its own mask: the layers of a block share a random stream.
        dropped = ctx.dropout(x, self.lora.dropout, self.path)
        low = dropped @ weights["lora_a"]
        # Scaled in float32: the compute dtype would round a scale that is not a power of two.
        wide = jnp.promote_types(low.dtype, jnp.float32)
        scaled = (self.lora.scale * low.astype(wide)).astype(low.dtype)
        return y + scaled @ weights["lora_b"]

    def flops_per_token(self, seq_len: int) -> float:
        """Count the operations of the Linear and of the adapter."""
        adapter = 2.0 * (self.rank or 0) * (self.linear.inputs + self.linear.outputs)
        return self.linear.flops_per_token(seq_len) + adapter


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
        if name.endswith(("lora_a", "lora_b")):
            continue
        # The adapter of a Linear is called lora_a and lora_b; experts prefix these names with the name of the matrix.
        prefix = "" if name == "weight" else f"{name}_"
        lora_a = params.get(f"{prefix}lora_a")
        lora_b = params.get(f"{prefix}lora_b")
        if isinstance(leaf, dict) and "codes" in leaf:
            assert lora.storage is not None
            weight = dequantize(leaf, lora.storage, jnp.float32)
        elif isinstance(leaf, dict) or lora_a is None:
            merged[name] = merge_adapters(model, leaf)
            continue
        else:
            weight = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        if lora_a is not None and lora_b is not None:
            update = lora_a.astype(weight.dtype) @ lora_b.astype(weight.dtype)
            weight = weight + lora.scale * update
        merged[name] = weight.astype(model.param_dtype)
    return merged
