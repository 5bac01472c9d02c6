"""Flow: a normalizing flow over images as a chain of stages, data -> (squeeze, level, split) ... -> prior.

Each level is a Stack of invertible layers; between levels half of the channels leave for their prior (Dinh et al. 2016,
RealNVP, arXiv 1605.08803; Kingma and Dhariwal 2018, Glow, arXiv 1807.03039). Latents are standardized by their priors,
so that what is drawn is always a standard Gaussian.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from framework.config import Config, DType, PositiveInt, component, config_for
from framework.layers.base import Context, Layer, Out
from framework.layers.flow.base import Invertible
from framework.layers.flow.ends import Gaussian, Preprocess, Prior, Split
from framework.layers.flow.linear import ActNorm, Squeeze
from framework.layers.stack import Stack
from framework.layout import Nested
from framework.models.chain import Chain


@component
class Flow(Chain):
    """Learns the density of images.

    Args:
        image_shape: (H, W, C).
        levels: values are integers from 0 to levels - 1.
        stacks: one for each level; its layers get dim = the level's channels: 4 C at the first, twice as many at each
            further one.
        preprocess: the first stage.
        split: between levels.
        prior: the last stage.
        param_dtype: float64 is for tests.
        compute_dtype: of the nets in couplings; what flows between layers is float32 at least.
    """

    calibrates = True
    draws_images = True

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        levels: PositiveInt,
        stacks: list[Config],
        preprocess: Config = config_for(Preprocess),
        split: Config = config_for(Split),
        prior: Config = config_for(Prior),
        param_dtype: Literal["float32", "float64"] = "float32",
        compute_dtype: DType = "float32",
    ):
        self.image_shape, self.levels, self.dims = tuple(image_shape), levels, math.prod(image_shape)
        self.param_dtype, self.compute_dtype = jnp.dtype(param_dtype), jnp.dtype(compute_dtype)
        height, width, channels = self.image_shape
        self.preprocess: Preprocess = preprocess.instantiate(levels=levels)
        self.stages: dict[str, Layer] = {"data": self.preprocess}
        self.latent_shapes: list[tuple[int, int, int]] = []  # of split0, split1, ..., prior
        self._positions: dict[str, int] = {}
        for i, config in enumerate(stacks):
            if height % 2 or width % 2:
                raise ValueError(f"stacks.{i}: expected an even height and width to squeeze, given {height} x {width}")
            height, width, channels = height // 2, width // 2, 4 * channels
            stack = config.instantiate(dim=channels)
            for k, layer in enumerate(stack.unit.layers.values()):
                if not isinstance(layer, Invertible):
                    name = type(layer).__name__
                    raise ValueError(f"stacks.{i}.pattern.{k}: expected a layer of framework.layers.flow, given {name}")
            self.stages |= {f"squeeze{i}": Squeeze(), f"level{i}": stack}
            self._positions[f"level{i}"] = height * width
            if i + 1 < len(stacks):
                self._positions[f"split{i}"] = height * width
                self.stages[f"split{i}"] = split.instantiate(dim=channels)
                self.latent_shapes.append((height, width, channels - channels // 2))
                channels //= 2
        self.stages["prior"] = prior.instantiate(shape=(height, width, channels), dims=self.dims)
        self.latent_shapes.append((height, width, channels))

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raises ValueError when the data are no such images, or the mesh has axes that a flow has no use for."""
        for name in ("image_shape", "levels"):
            expected, given = getattr(self, name), getattr(data, name, None)
            if given is None:
                raise ValueError(f"data: expected an image pipeline, given {type(data).__name__}")
            if expected != (tuple(given) if name == "image_shape" else given):
                raise ValueError(f"model.{name} = {expected}, but the data's is {given}")
        for axis in ("model", "seq", "expert"):
            if mesh.shape[axis] > 1:
                raise ValueError(f"mesh.{axis} = {mesh.shape[axis]}: a flow is split over images only; expected 1")

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Sums over a batch's images, nats: nll, log_det, log_prior; and the number of images."""
        sums = {name: self.dims * out.metrics[f"prior/{name}"] for name in ("nll", "log_det", "log_prior")}
        return {**sums, "images": jnp.sum(batch["weights"])}

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """By dimension: loss, log_det and log_prior in nats, bits_per_dim; and the number of images."""
        dims = totals["images"] * self.dims
        loss, log_det, log_prior = (totals[name] / dims for name in ("nll", "log_det", "log_prior"))
        row = {"loss": loss, "bits_per_dim": loss / math.log(2.0), "log_det": log_det, "log_prior": log_prior}
        return {**row, "images": totals["images"]}

    def forward_flops_per_token(self, seq_len: int) -> float:
        """Of an image, the forward pass's matrix products."""
        return sum(count * self.stages[name].flops_per_token(count) for name, count in self._positions.items())

    def flops_per_token(self, seq_len: int) -> float:
        """Of an image, forward and backward: three times the forward pass's matrix products."""
        return 3.0 * self.forward_flops_per_token(seq_len)

    # --- the first values --------------------------------------------------------------------------------------------

    def calibrate(self, params: Nested, ctx: Context, buffers: Nested) -> Nested:
        """Parameters with each ActNorm set so that ctx.batch leaves it with mean 0 and variance 1; for jit.

        Raises ValueError when parameters are not float32 (or float64).
        """
        if any(p.dtype not in (jnp.float32, jnp.float64) for p in jax.tree.leaves(params)):
            raise ValueError("calibrate: expected float32 parameters")
        carry = None
        for name, stage in self.stages.items():
            if isinstance(stage, Stack):
                carry, own = self._calibrate_stack(stage, params[name], carry, ctx.fold(name), params.get("shared", {}))
                params = {**params, name: own}
            elif name != "prior":
                carry, _ = self.run(name, params, carry, ctx, buffers)
        return params

    def _calibrate_stack(
        self, stack: Stack, params: Nested, carry: Any, ctx: Context, shared: Nested
    ) -> tuple[Any, Nested]:
        def body(carry: Any, xs: tuple[jax.Array, Nested]) -> tuple[Any, Nested]:
            index, own = xs
            at = ctx.fold_index(index)
            for name, layer in stack.unit.layers.items():
                if isinstance(layer, ActNorm) and name in own:
                    own = {**own, name: layer.calibrate(own[name], carry["x"])}
                weights = layer.prepare({**own, **shared}.get(name, {}), at)
                carry, _ = layer.apply(weights, carry, at.fold(name), {})
            return carry, own

        return jax.lax.scan(body, carry, (jnp.arange(stack.num_units), params))

    # --- latents and images ------------------------------------------------------------------------------------------

    def encode(self, params: Nested, images: jax.Array) -> list[jax.Array]:
        """Latents [N, h, w, c] of images [N, H, W, C], of split0, split1, ..., prior; standardized by their priors.

        Integers are taken at the middle of their cubes, so that `decode` and rounding down gives them again.
        """
        ctx = Context(batch={}, compute_dtype=self.compute_dtype)
        x = images + 0.5 if jnp.issubdtype(images.dtype, jnp.integer) else images
        zeros = jnp.zeros(len(images), self.param_dtype)
        x: Any = self.preprocess.forward({}, x.astype(self.param_dtype), ctx)[0]
        latents = []
        for name, stage in list(self.stages.items())[1:]:
            if isinstance(stage, Gaussian):
                x, latent = stage.encode(stage.prepare(params.get(name, {}), ctx), x, ctx)
                latents.append(latent)
            else:
                x = self.run(name, params, {"x": x, "log_det": zeros, "log_prior": zeros}, ctx, {})[0]["x"]
        return latents

    def decode(self, params: Nested, latents: list[jax.Array]) -> jax.Array:
        """The inverse of `encode`: images [N, H, W, C] as real numbers, in 0..levels for images that there are."""
        ctx = Context(batch={}, compute_dtype=self.compute_dtype)
        x: Any = None
        latents = list(latents)
        for name, stage in reversed(self.stages.items()):
            if isinstance(stage, Gaussian):
                x = stage.decode(stage.prepare(params.get(name, {}), ctx), x, latents.pop(), ctx)
            elif isinstance(stage, Stack):
                x = self._invert_stack(stage, params[name], x, ctx.fold(name), params.get("shared", {}))
            else:
                assert isinstance(stage, Invertible)
                x, _ = stage.inverse({}, x, ctx)
        return x

    def _invert_stack(self, stack: Stack, params: Nested, x: Any, ctx: Context, shared: Nested) -> Any:
        def body(x: Any, xs: tuple[jax.Array, Nested]) -> tuple[Any, None]:
            index, own = xs
            at = ctx.fold_index(index)
            weights = stack.unit.prepare({**own, **shared}, at)
            for name, layer in reversed(stack.unit.layers.items()):
                x, _ = layer.inverse(weights.get(name, {}), x, at.fold(name))
            return x, None

        return jax.lax.scan(body, x, (jnp.arange(stack.num_units), params), reverse=True)[0]

    def sample(self, params: Nested, key: jax.Array, num: int, temperature: float | jax.Array = 1.0) -> jax.Array:
        """`num` images [num, H, W, C] as integers, uint8 up to 256 levels: standard Gaussian latents times temperature,
        decoded."""
        keys = jax.random.split(key, len(self.latent_shapes))
        latents = [
            temperature * jax.random.normal(key, (num, *shape), self.param_dtype)
            for key, shape in zip(keys, self.latent_shapes, strict=True)
        ]
        return self.quantize(self.decode(params, latents))

    def quantize(self, x: jax.Array) -> jax.Array:
        """Real numbers as the integers whose cubes they lie in."""
        return jnp.clip(jnp.floor(x), 0, self.levels - 1).astype(jnp.uint8 if self.levels <= 256 else jnp.int32)
