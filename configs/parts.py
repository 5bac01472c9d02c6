"""Building blocks that the named configs share: the usual optimizers, and the settings of large models."""

from __future__ import annotations

import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.optimizers.learning_rates import warmup_cosine
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions


def adamw(
    *,
    peak: float,
    warmup: float,
    weight_decay: float = 0.1,
    b2: float = 0.95,
    end: float = 0.1,
    steps: int | None = None,
) -> Config:
    """Build AdamW with a linear warm-up and a cosine decay.

    Args:
        peak: peak learning rate.
        warmup: length of the warm-up, in steps or as a fraction of the run.
        weight_decay: coefficient of the weight decay.
        b2: decay rate of the second moment.
        end: final learning rate as a fraction of the peak.
        steps: length of the schedule; None means the length of the run.
    """
    schedule = config_for(warmup_cosine, peak_value=peak, warmup=warmup, end_fraction=end, steps=steps)
    return config_for(optax.adamw, learning_rate=schedule, b1=0.9, b2=b2, weight_decay=weight_decay)


def muon(*, peak: float, adam_peak: float, warmup: float, end: float = 0.02) -> tuple[Config, Config]:
    """Build Muon (Jordan et al. 2024) for the stack's matrices, with AdamW for all other parameters.

    Args:
        peak: peak learning rate of Muon.
        adam_peak: peak learning rate of AdamW.
        warmup: length of the warm-up, in steps or as a fraction of the run.
        end: final learning rate as a fraction of the peak.

    Returns:
        (the optimizer, the rule that assigns AdamW to the other parameters).
    """

    def schedule(rate: float) -> Config:
        return config_for(warmup_cosine, peak_value=rate, warmup=warmup, end_fraction=end)

    adam = config_for(optax.adamw, learning_rate=schedule(adam_peak), b2=0.95, weight_decay=0.0)
    optimizer = config_for(optax.contrib.muon, learning_rate=schedule(peak), weight_decay=0.01)
    # Muon is for matrices between hidden states, which embedding tables and norms are not.
    adam_rule = config_for(Rule, pattern="^embed|^head|norm", optimizer=adam)
    return optimizer, adam_rule


def no_decay(pattern: str = r"norm|bias|position") -> Config:
    """Build a rule that disables weight decay where the regex `pattern` matches a parameter's path."""
    return config_for(Rule, pattern=pattern, set={"weight_decay": 0.0})


def large(model: Config, *, seq_len: int, batch: int, peak: float, steps: int | None, warmup: float = 2000) -> Config:
    """Build a large model's config: AdamW, clip 1.0, bf16 parameters and compute, f32 master weights and moments.

    Data is nanoGPT-style token files: set data.source.path to the output of `plimsoll prepare`.

    Args:
        model: the model; changed in place.
        seq_len: number of tokens of a sequence.
        batch: number of sequences of a global batch.
        peak: peak learning rate.
        steps: number of training steps; None leaves trainer.max_steps unset.
        warmup: length of the warm-up, in steps or as a fraction of the run.
    """
    model.param_dtype = "bfloat16"
    model.compute_dtype = "bfloat16"
    # The ids in a prepared file are final, so its tokenizer is not needed.
    data = config_for(
        DataPipeline,
        source=config_for(TokenMemmap, path="data/train.bin"),
        tokenizer=config_for(NoTokenizer, vocab_size=model.vocab_size),
        seq_len=seq_len,
        global_batch_size=batch,
    )
    undecayed = ["norm", "bias"]
    # Only for learned positions, because other models have no such parameters.
    if model.embed.max_positions is not None:
        undecayed.append("position")
    # As in Mamba (arXiv 2312.00752): a decay of the logarithm of a rate would pull the rate to 1.
    if any(block.attention.takes("conv_width") for block in model.stack.pattern):
        undecayed.append("log_rate")
    if any(block.attention.takes("state_dim") for block in model.stack.pattern):
        undecayed.append("skip")
    learner = config_for(
        Learner,
        optimizer=adamw(peak=peak, warmup=warmup),
        rules=[no_decay("|".join(undecayed))],
        clip=1.0,
        # An update is often smaller than half a bfloat16 step of its weight, and would be lost in bfloat16.
        master_dtype="float32",
        moment_dtype="float32",
    )
    return config_for(
        Experiment,
        model=model,
        data=data,
        mesh=config_for(MeshShape, fsdp=-1),
        learner=learner,
        trainer=config_for(TrainerOptions, max_steps=steps, save_every=1000, eval_every=1000),
    )
