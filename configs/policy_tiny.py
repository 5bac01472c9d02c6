"""Models that learn from rewards for their own answers (GRPO) on a laptop's CPU."""

from __future__ import annotations

from plimsoll.configs.parts import adamw
from plimsoll.framework.batch_transforms.rollouts import Rollouts
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.prompts import Arithmetic, Prompts
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.objectives.policy_gradient import GRPO
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions


def grpo_tiny() -> Config:
    """A 0.1M-parameter Llama-like model learns sums of two digits by GRPO; minutes on 2 CPU cores.

    Tokens are bytes, and only an exactly right answer has a reward. The first 60 steps train on demonstrations, after
    which the model answers about a tenth of the sums correctly. The other 1140 steps use only rewards. A fifth of the
    sums is held out.
    """
    model = llama_model(layers=2, heads=4, dim=64, hidden=172, vocab_size=257)
    model.stack.unroll = 0
    # On a CPU, the logits of all 2,048 tokens take two megabytes.
    model.head.chunk_tokens = 0
    model.head.objective = config_for(GRPO)
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            Prompts,
            source=config_for(Arithmetic, split="train", validation_fraction=0.2),
            validation={"sums": config_for(Arithmetic, split="validation", validation_fraction=0.2)},
            tokenizer=config_for(ByteTokenizer),
            # "9+9=" after the separator, then "18" and the token that ends it.
            seq_len=8,
            answer_tokens=4,
            group_size=16,
            global_batch_size=256,
        ),
        batch_transform=config_for(
            Rollouts, reward="plimsoll.framework.batch_transforms.rewards.exact", demonstrations=60, table_every=200
        ),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=config_for(Learner, optimizer=adamw(peak=1.5e-3, warmup=0.05, weight_decay=0.0)),
        trainer=config_for(TrainerOptions, max_steps=1200, log_every=20, eval_every=100, save_every=400),
    )


CONFIGS = {"grpo-tiny": grpo_tiny}
