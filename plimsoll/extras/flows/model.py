"""Flow: a normalizing flow over images as a chain of stages, data -> (squeeze, level, split) ... -> prior.

Each level is a Stack of invertible layers; between levels, half of the channels leave for their prior (Dinh et al.
2016, RealNVP, arXiv 1605.08803; Kingma and Dhariwal 2018, Glow, arXiv 1807.03039). Latents are standardized by their
priors, so samples are always drawn from a standard Gaussian.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from plimsoll.extras.flows.base import Invertible
from plimsoll.extras.flows.ends import Gaussian, Preprocess, Prior, Split
from plimsoll.extras.flows.image_sampler import ImageSampler
from plimsoll.extras.flows.linear import ActNorm, Squeeze
from plimsoll.framework.config import Config, DType, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.program.program import Program


@component
class Flow(Chain):
    """Learns the density of images.

    Args:
        image_shape: (H, W, C).
        levels: number of values of a channel: integers from 0 to levels - 1.
        stacks: configs of the stacks, one per level; their layers get dim = the level's channels: 4 C at the first
            level, twice as many at each following one.
        preprocess: config of the first stage.
        split: config of the stage between levels.
        prior: config of the last stage.
        param_dtype: dtype of the parameters; float64 is for tests.
        compute_dtype: dtype of the nets in couplings; the carry between layers is float32 or wider.
    """

    calibrates = True
    generates_images = True

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
        self.image_shape = tuple(image_shape)
        self.levels = levels
        self.dims = math.prod(image_shape)
        self.param_dtype = jnp.dtype(param_dtype)
        self.compute_dtype = jnp.dtype(compute_dtype)
        height, width, channels = self.image_shape
        self.preprocess: Preprocess = preprocess.instantiate(levels=levels)
        self.stages: dict[str, Layer] = {"data": self.preprocess}
        # Shapes (h, w, c) of the latents of split0, split1, ..., prior.
        self.latent_shapes: list[tuple[int, int, int]] = []
        # Positions (height * width) of each stage with matrix products, for counting these.
        self._positions: dict[str, int] = {}
        for i, config in enumerate(stacks):
            if height % 2 or width % 2:
                raise ValueError(f"stacks.{i}: expected an even height and width to squeeze, given {height} x {width}")
            height = height // 2
            width = width // 2
            channels = 4 * channels
            stack = config.instantiate(dim=channels)
            _check_layers(stack, i)
            self.stages[f"squeeze{i}"] = Squeeze()
            self.stages[f"level{i}"] = stack
            self._positions[f"level{i}"] = height * width
            # Everything that remains after the last level goes to the prior.
            if i + 1 < len(stacks):
                self._positions[f"split{i}"] = height * width
                self.stages[f"split{i}"] = split.instantiate(dim=channels)
                latent_channels = channels - channels // 2
                self.latent_shapes.append((height, width, latent_channels))
                channels //= 2
        self.stages["prior"] = prior.instantiate(shape=(height, width, channels), dims=self.dims)
        self.latent_shapes.append((height, width, channels))

    def build_image_sampler(self, program: Program, state: TrainState, *, averaged: bool) -> ImageSampler:
        return ImageSampler(program, state, averaged=averaged)

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raise ValueError if the data has different images, or the mesh has axes that a flow does not use."""
        for name in ("image_shape", "levels"):
            expected = getattr(self, name)
            actual = getattr(data, name, None)
            if actual is None:
                raise ValueError(f"data: expected an image pipeline, given {type(data).__name__}")
            # A pipeline may have the shape as a list.
            comparable = tuple(actual) if name == "image_shape" else actual
            if expected != comparable:
                raise ValueError(f"model.{name} = {expected}, but the data's is {actual}")
        for axis in ("pipe", "model", "seq", "expert"):
            if mesh.shape[axis] > 1:
                raise ValueError(f"mesh.{axis} = {mesh.shape[axis]}: a flow is split over images only; expected 1")

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Return sums over a batch's images, in nats: nll, log_det, log_prior; and the number of images."""
        sums = {}
        for name in ("nll", "log_det", "log_prior"):
            # The metrics are per dimension, see `Prior.apply`.
            sums[name] = self.dims * out.metrics[f"prior/{name}"]
        return {**sums, "images": jnp.sum(batch["weights"])}

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return per dimension loss, log_det and log_prior in nats, and bits_per_dim; and the number of images."""
        num_dims = totals["images"] * self.dims
        loss = totals["nll"] / num_dims
        return {
            "loss": loss,
            "bits_per_dim": loss / math.log(2.0),
            "log_det": totals["log_det"] / num_dims,
            "log_prior": totals["log_prior"] / num_dims,
            "images": totals["images"],
        }

    def forward_flops_per_token(self, seq_len: int) -> float:
        """Count the matrix products of one image's forward pass."""
        flops = 0
        for name, positions in self._positions.items():
            # Each position is a token of the layer, and attention nets see all positions of their level.
            flops += positions * self.stages[name].flops_per_token(positions)
        return flops

    def flops_per_token(self, seq_len: int) -> float:
        """Count forward and backward of one image: three times the forward pass's matrix products."""
        return 3.0 * self.forward_flops_per_token(seq_len)

    # --- calibration -------------------------------------------------------------------------------------------------

    def calibrate(self, params: Nested, ctx: Context, buffers: Nested) -> Nested:
        """Calibrate each ActNorm so that ctx.batch leaves it with mean 0 and variance 1, and return all parameters.

        This is meant to run in jit. Raise ValueError if parameters are not float32 (or float64).
        """
        if any(p.dtype not in (jnp.float32, jnp.float64) for p in jax.tree.leaves(params)):
            raise ValueError("calibrate: expected float32 parameters")
        carry = None
        # In order, because the input of an ActNorm depends on those before it.
        for name, stage in self.stages.items():
            if isinstance(stage, Stack):
                stage_ctx = ctx.fold(name)
                shared = params.get("shared", {})
                carry, stage_params = self._calibrate_stack(stage, params[name], carry, stage_ctx, shared)
                params = {**params, name: stage_params}
            elif name != "prior":
                carry, _ = self.run(name, params, carry, ctx, buffers)
        return params

    def _calibrate_stack(
        self, stack: Stack, params: Nested, carry: Any, ctx: Context, shared: Nested
    ) -> tuple[Any, Nested]:
        """Return (the stack's output, its parameters with each ActNorm calibrated)."""

        def body(carry: Any, xs: tuple[jax.Array, Nested]) -> tuple[Any, Nested]:
            index, repeat_params = xs
            layer_ctx = ctx.fold_index(index)
            for name, layer in stack.pattern.layers.items():
                if isinstance(layer, ActNorm) and name in repeat_params:
                    calibrated = layer.calibrate(repeat_params[name], carry["x"])
                    repeat_params = {**repeat_params, name: calibrated}
                # A layer's parameters are either its repeat's own or shared by all repeats.
                layer_params = {**repeat_params, **shared}.get(name, {})
                weights = layer.prepare(layer_params, layer_ctx)
                carry, _ = layer.apply(weights, carry, layer_ctx.fold(name), {})
            return carry, repeat_params

        xs = (jnp.arange(stack.num_repeats), params)
        return jax.lax.scan(body, carry, xs)

    # --- latents and images ------------------------------------------------------------------------------------------

    def encode(self, params: Nested, images: jax.Array) -> list[jax.Array]:
        """Encode images [N, H, W, C] as latents [N, h, w, c] of split0, split1, ..., prior.

        The latents are standardized by their priors.
        """
        ctx = Context(batch={}, compute_dtype=self.compute_dtype)
        x = images
        # Integers are mapped to the middle of their cubes: `decode` and rounding down restore them.
        if jnp.issubdtype(images.dtype, jnp.integer):
            x = images + 0.5
        zeros = jnp.zeros(len(images), self.param_dtype)
        x: Any = self.preprocess.forward({}, x.astype(self.param_dtype), ctx)[0]
        latents = []
        for name, stage in list(self.stages.items())[1:]:
            if isinstance(stage, Gaussian):
                weights = stage.prepare(params.get(name, {}), ctx)
                x, latent = stage.encode(weights, x, ctx)
                latents.append(latent)
            else:
                carry = {"x": x, "log_det": zeros, "log_prior": zeros}
                carry, _ = self.run(name, params, carry, ctx, {})
                x = carry["x"]
        return latents

    def decode(self, params: Nested, latents: list[jax.Array]) -> jax.Array:
        """Inverse of `encode`: images [N, H, W, C] as real numbers, within 0..levels for latents of real images."""
        ctx = Context(batch={}, compute_dtype=self.compute_dtype)
        x: Any = None
        # A copy, because latents are popped from its end: the prior's is the last one.
        latents = list(latents)
        for name, stage in reversed(self.stages.items()):
            if isinstance(stage, Gaussian):
                weights = stage.prepare(params.get(name, {}), ctx)
                x = stage.decode(weights, x, latents.pop(), ctx)
            elif isinstance(stage, Stack):
                stage_ctx = ctx.fold(name)
                x = self._invert_stack(stage, params[name], x, stage_ctx, params.get("shared", {}))
            else:
                assert isinstance(stage, Invertible)
                x, _ = stage.inverse({}, x, ctx)
        return x

    def _invert_stack(self, stack: Stack, params: Nested, x: Any, ctx: Context, shared: Nested) -> Any:
        """Compute the input x of the stack from its output."""

        def body(x: Any, xs: tuple[jax.Array, Nested]) -> tuple[Any, None]:
            index, repeat_params = xs
            layer_ctx = ctx.fold_index(index)
            weights = stack.pattern.prepare({**repeat_params, **shared}, layer_ctx)
            for name, layer in reversed(stack.pattern.layers.items()):
                assert isinstance(layer, Invertible)
                layer_weights = weights.get(name, {})
                x, _ = layer.inverse(layer_weights, x, layer_ctx.fold(name))
            return x, None

        xs = (jnp.arange(stack.num_repeats), params)
        x, _ = jax.lax.scan(body, x, xs, reverse=True)
        return x

    def sample(self, params: Nested, key: jax.Array, num: int, temperature: float | jax.Array = 1.0) -> jax.Array:
        """Draw `num` images [num, H, W, C] as integers, uint8 for up to 256 levels.

        They are decoded from standard Gaussian latents multiplied by `temperature`.
        """
        keys = jax.random.split(key, len(self.latent_shapes))
        latents = []
        for latent_key, shape in zip(keys, self.latent_shapes, strict=True):
            noise = jax.random.normal(latent_key, (num, *shape), self.param_dtype)
            latents.append(temperature * noise)
        return self.quantize(self.decode(params, latents))

    def quantize(self, x: jax.Array) -> jax.Array:
        """Convert real numbers to the integers whose cubes contain them."""
        dtype = jnp.uint8 if self.levels <= 256 else jnp.int32
        # Clipped, because samples may be outside of all cubes.
        integers = jnp.clip(jnp.floor(x), 0, self.levels - 1)
        return integers.astype(dtype)


def _check_layers(stack: Stack, index: int) -> None:
    """Raise ValueError if a layer of the stack with this index is not invertible."""
    for k, layer in enumerate(stack.pattern.layers.values()):
        if not isinstance(layer, Invertible):
            name = type(layer).__name__
            raise ValueError(f"stacks.{index}.pattern.{k}: expected a layer of plimsoll.extras.flows, given {name}")
