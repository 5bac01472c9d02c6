"""Components that a newcomer might add, as the text of their files; see test_contributing.py."""

IMPORT = "from plimsoll.framework.schedules import toy, after_backward,"

NORM = '''"""A layer of a newcomer."""

import jax
import jax.numpy as jnp

from plimsoll.framework.config import PositiveInt, component
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layout import ParameterSpec


@component
class ToyNorm(Layer):
    """Divides x [..., dim] by its largest element, times a learned scale."""

    def __init__(self, *, dim: PositiveInt):
        self.dim = dim

    def param_specs(self) -> dict[str, ParameterSpec]:
        initializer = jax.nn.initializers.ones
        return {"scale": ParameterSpec((self.dim,), "float32", initializer=initializer, roles=("channel",))}

    def __call__(self, weights: dict[str, jax.Array], x: jax.Array, ctx: Context) -> jax.Array:
        largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        return (x / (largest + 1e-6) * weights["scale"]).astype(x.dtype)
'''

ATTENTION = '''"""A variant of attention of a newcomer: each head attends to all earlier positions alike."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer, Out, check_axis
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layout import Nested


@component
class ToyAttention(Layer):
    """The mean of the values of all positions so far, with a learned factor for each head."""

    def __init__(
        self, *, dim: PositiveInt, num_heads: PositiveInt, linear: Config = config_for(Linear),
        output_init_scale: float = 1.0,
    ):
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.value = linear.instantiate(inputs=dim, outputs=dim, mesh_axes=("fsdp", "model"), roles=("in", "heads"))
        self.output = linear.instantiate(
            inputs=dim, outputs=dim, init_scale=output_init_scale, mesh_axes=("model", "fsdp"), roles=("heads", "out")
        )

    def children(self) -> dict[str, Layer]:
        return {"value": self.value, "output": self.output}

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        check_axis(mesh, "model", "num_heads", self.num_heads)

    def localize(self, sizes: Mapping[str, int]) -> None:
        self.num_heads //= sizes["model"]

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[jax.Array, Out]:
        batch, length, _ = carry.shape
        values = self.value(weights["value"], carry, ctx).reshape(batch, length, self.num_heads, self.head_dim)
        means = jnp.cumsum(values, axis=1) / jnp.arange(1, length + 1)[:, None, None]
        means = means.astype(carry.dtype).reshape(batch, length, self.num_heads * self.head_dim)
        return self.output(weights["output"], means, ctx), Out()
'''

OPTIMIZER = '''"""An optimizer of a newcomer."""

import jax
import optax

from plimsoll.framework.config import component


@component
def toy_sign(*, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Sign of the gradient, times the rate."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(jax.numpy.sign, grads), state

    sign = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.chain(sign, optax.scale_by_learning_rate(learning_rate))
'''

OBJECTIVE = '''"""An objective of a newcomer."""

from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.config import component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested


@component
class ToyObjective(Objective):
    """The probability that the model does not give to the next token."""

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context):
        log_probs_BS = head.log_probs(weights, x_BSD, ctx)
        return jnp.sum(ctx.batch["weights"] * (1 - jnp.exp(log_probs_BS))) / ctx.num_targets, {}

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        return {"loss": totals["loss"] / max(totals["tokens"], 1.0)}
'''

SOURCE = '''"""A source of a newcomer."""

from collections.abc import Iterator

from plimsoll.framework.config import component
from plimsoll.framework.data.files import DataFile
from plimsoll.framework.data.sources import DataSource


@component
class ToySource(DataSource):
    """Text files, backwards."""

    def __init__(self, *, paths: list[str]):
        self.paths = paths

    def read(self, file: DataFile) -> Iterator[str]:
        yield b"".join(file.chunks(1 << 20, decompress=True)).decode()[::-1]
'''

SCHEDULE = '''"""A schedule of a newcomer: the plain one, which scales the gradients by one first."""

from functools import partial

import jax

from plimsoll.framework.schedules import after_backward


def _update(learner, layout, state, grads, decision):
    grads = jax.tree.map(lambda grad: grad * 1, grads)
    return after_backward.update_whole(learner, layout, state, grads, decision)


build_step = partial(after_backward.build_step, update=_update)
'''

FAMILY = '''"""A family of a newcomer: Gemma 2 under another name."""

from plimsoll.framework.config import component
from plimsoll.framework.families.gemma import Gemma2


@component
class Toy(Gemma2):
    """ToyForCausalLM."""

    architectures = {"ToyForCausalLM": "toy"}
'''
