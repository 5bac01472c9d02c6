"""Models that learn from rewards for their own answers (GRPO), on a laptop's CPU."""

from __future__ import annotations

from configs.parts import adamw, llama_model
from framework.companions.rollouts import Rollouts
from framework.config import Config, config_for
from framework.data.prompts import Arithmetic, Prompts
from framework.data.tokenizers import ByteTokenizer
from framework.devices.mesh import MeshShape
from framework.learner.learner import Learner
from framework.objectives.policy_gradient import GRPO
from framework.program.experiment import Experiment
from framework.program.options import TrainerOptions


def grpo_tiny() -> Config:
    """A 0.4M-parameter Llama-like model learns to add from nothing but rewards."""
    model = llama_model(layers=2, heads=4, dim=64, hidden=172, vocab_size=257)
    model.stack.unroll = 0
    model.head.chunk_tokens = 0
    model.head.objective = config_for(GRPO)
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            Prompts,
            source=config_for(Arithmetic, split="train"),
            validation={"sums": config_for(Arithmetic, split="validation")},
            tokenizer=config_for(ByteTokenizer),
            seq_len=8,
            answer_tokens=4,
            group_size=16,
            global_batch_size=256,
        ),
        companion=config_for(Rollouts, reward="framework.companions.rewards.exact", demonstrations=60),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=config_for(Learner, optimizer=adamw(peak=3e-3, warmup=0.05, weight_decay=0.0)),
        trainer=config_for(
            TrainerOptions,
            max_steps=600,
            log_every=20,
            eval_every=200,
            save_every=200,
        ),
    )


CONFIGS = {"grpo-tiny": grpo_tiny}
