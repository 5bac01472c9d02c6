"""A user's own config file, as the tests use it: digits, and a chain of scales and shifts that compiles in seconds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from framework.config import Config, config_for
from framework.data.images import DigitsSource, ImagePipeline
from framework.experiment import Experiment
from framework.layers.base import Context, Layer, Out
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec
from framework.learner import Learner
from framework.mesh import MeshShape
from framework.models.chain import Chain
from framework.trainer_options import TrainerOptions
from tests.support.tiny import CACHE

SIZE = 64


class Enter(Layer):
    """Integers to [0, 1), dequantized by noise that depends on the row in training."""

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """ctx.batch["images"] -> (x [B, 64], log_det [B])."""
        x = ctx.batch["images"].astype(jnp.float32).reshape(-1, SIZE)
        noise = jnp.full(x.shape, 0.5)
        if ctx.training:
            assert ctx.rng is not None
            keys = jax.vmap(lambda row: jax.random.fold_in(ctx.rng, row))(ctx.rows)
            noise = jax.vmap(lambda key: jax.random.uniform(key, (SIZE,)))(keys)
        return ((x + noise) / 17.0, jnp.full(len(x), -SIZE * jnp.log(17.0))), Out()


class Scale(Layer):
    """x -> (x - shift) * exp(log_scale)."""

    def own_specs(self) -> dict[str, ParameterSpec]:
        """One shift and one scale per pixel."""
        return {
            name: ParameterSpec((SIZE,), jnp.float32, (None,), initializer=jax.nn.initializers.zeros, roles=("out",))
            for name in ("s", "t")
        }

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Adds its log-determinant to the carry's."""
        x, log_det = carry
        return ((x - weights["t"]) * jnp.exp(weights["s"]), log_det + jnp.sum(weights["s"])), Out()


class Head(Layer):
    """Standard normal latents."""

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """The loss, in nats per dimension."""
        x, log_det = carry
        log_prior = jnp.sum(-0.5 * (x**2 + jnp.log(2 * jnp.pi)), axis=1)
        assert ctx.num_targets is not None
        parts = [jnp.sum(ctx.batch["weights"] * part) / ctx.num_targets / SIZE for part in (log_prior, log_det)]
        return None, Out(loss=-sum(parts), metrics={"log_prior": parts[0], "log_det": parts[1]})


class Pixels(Chain):
    """Per-pixel Gaussians, with everything that the framework asks of a model of images."""

    def __init__(self, *, layers: int = 2, calibrated: bool = True, param_dtype: str = "float32"):
        self.param_dtype, self.compute_dtype = jnp.dtype(param_dtype), jnp.dtype("float32")
        stack = Stack(dim=None, num_layers=layers, pattern=[config_for(Scale)], depth_scaled_init=False)
        self.stages = {"enter": Enter(), "stack": stack, "head": Head()}
        self.image_shape = (8, 8, 1)
        if not calibrated:
            self.calibrate: Any = None

    def check(self, mesh: Any, data: Any) -> None:
        """Digits are expected."""
        if getattr(data, "image_shape", None) != self.image_shape:
            raise ValueError("expected digits")

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Sums of nats per dimension."""
        names = {"log_det": "head/log_det", "log_prior": "head/log_prior"}
        return {**{name: out.metrics[key] for name, key in names.items()}, "images": jnp.sum(batch["weights"])}

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Means."""
        row = {name: totals[name] / totals["images"] for name in ("log_det", "log_prior")}
        loss = -sum(row.values())
        return {"loss": loss, "bits_per_dim": loss / 0.6931471805599453, **row}

    def calibrate(self, params: Nested, ctx: Context, buffers: Nested) -> Nested:
        """The first unit makes mean 0 and variance 1 of the batch."""
        (x, _), _ = Enter().apply({}, None, ctx.fold("enter"), {})
        stack = params["stack"]["block0"]
        first = {"t": stack["t"].at[0].set(x.mean(0)), "s": stack["s"].at[0].set(-jnp.log(x.std(0) + 0.1))}
        return {**params, "stack": {"block0": first}}


def pixels() -> Config:
    """Twelve steps on digits."""
    held = config_for(DigitsSource, split="validation")
    data = config_for(
        ImagePipeline, source=config_for(DigitsSource), validation={"digits": held}, global_batch_size=64, seed=3
    )
    return config_for(
        Experiment,
        model=config_for(Pixels),
        data=data,
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=config_for(optax.adam, learning_rate=1e-2)),
        trainer=config_for(TrainerOptions, max_steps=12, log_every=1, save_every=4, keep=3, compilation_cache=CACHE),
    )


CONFIGS = {"pixels": pixels}
