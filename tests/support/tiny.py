"""A user config file for tests: a model that compiles in seconds, on text in $TINY_TEXT.

Its head makes the loss NaN in batches that contain the byte \\x01; a test puts it into the text to poison a batch.
"""

import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import gpt2_model
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.norm import LayerNorm
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions

POISON, SPIKE = 1, 2
CACHE = str(Path(__file__).parents[2] / ".cache" / "xla")


class PoisonHead(LMHead):
    """An LMHead whose loss is NaN when the batch contains the byte POISON."""

    def apply(self, weights, carry: jax.Array, ctx: Context, layer_state) -> tuple[None, Out]:
        """Return the result of LMHead.apply; a poisoned batch is multiplied by NaN first."""
        carry = carry * jnp.where(jnp.any(ctx.batch["tokens"] == POISON), jnp.nan, 1.0)
        return super().apply(weights, carry, ctx, layer_state)


class SpikeHead(LMHead):
    """An LMHead whose loss is 100 times larger when the batch contains the byte SPIKE."""

    def apply(self, weights, carry: jax.Array, ctx: Context, layer_state) -> tuple[None, Out]:
        """Return the result of LMHead.apply, with the loss times 100 for a batch with SPIKE."""
        _, out = super().apply(weights, carry, ctx, layer_state)
        return None, replace(out, loss=out.loss * jnp.where(jnp.any(ctx.batch["tokens"] == SPIKE), 100.0, 1.0))


def tiny() -> Config:
    """Two layers of width 32 on bytes, with 32 positions and batches of 8."""
    folder = os.environ.get("TINY_TEXT", "tests/trainer")
    model = gpt2_model(layers=2, heads=2, dim=32, vocab_size=257, positions=32, dropout=0.1)
    model.head = config_for(PoisonHead, norm=config_for(LayerNorm), tied=True)
    model.stack.unroll = 0
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            DataPipeline,
            source=config_for(TextFiles, paths=[f"{folder}/train*.txt"]),
            validation={"held": config_for(TextFiles, paths=[f"{folder}/valid.txt"])},
            tokenizer=config_for(ByteTokenizer),
            seq_len=32,
            global_batch_size=8,
            seed=3,
        ),
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=3e-3)),
        trainer=config_for(
            TrainerOptions,
            max_steps=12,
            log_every=1,
            eval_every=None,
            save_every=4,
            keep=3,
            compilation_cache=CACHE,  # shared by all runs of the tests
        ),
    )


def wide() -> Config:
    """tiny with 2 MiB of parameters, so that a second copy of anything shows; with EMA weights and a sample."""
    config = tiny()
    config.model.dim = 160
    config.model.stack.pattern[0].mlp.hidden = 640
    config.learner.ema = 0.9
    config.trainer.eval_every = 2
    config.trainer.max_steps = 4
    config.trainer.save_every = 2
    config.trainer.sample_tokens = 3
    config.trainer.sample_prompt = "the "
    return config


def spiky() -> Config:
    """tiny, with a SpikeHead."""
    config = tiny()
    config.model.head = config_for(SpikeHead, norm=config_for(LayerNorm), tied=True)
    return config


CONFIGS = {"tiny": tiny, "wide": wide, "spiky": spiky}
