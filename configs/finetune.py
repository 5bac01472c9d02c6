"""Fine-tuning with adapters: LoRA (arXiv 2106.09685), and QLoRA (arXiv 2305.14314) by model.lora.base=nf4.

Every other named config takes adapters on the command line, see docs/configs.md.
"""

from __future__ import annotations

from configs.parts import adamw
from configs.tiny import stdlib_tiny
from framework.config import Config, config_for
from framework.layers.lora import LoRA


def lora_tiny() -> Config:
    """stdlib-tiny's text with LoRA of rank 16 on a frozen 1.5M-parameter model; about 3 minutes on 2 CPU cores.

    The frozen weights are random, as nobody publishes any of this size, so it shows the machinery and no result: 6.57
    nats per token at its end (7.62 is a guess among 2048).
    """
    steps = 300
    config = stdlib_tiny()
    config.model.lora = config_for(LoRA, rank=16, alpha=32.0, dropout=0.05)
    config.model.stack.pattern[0].mlp.hidden = 384  # a multiple of nf4's block
    # Adapters cannot change the tables: one of its own for the head, large enough for confident predictions.
    config.model.head.tied = False
    config.model.head.init.stddev = 0.1
    config.learner.optimizer = adamw(peak=1e-2, steps=steps, warmup=30, weight_decay=0.0)
    config.learner.rules = []
    config.trainer.max_steps = steps
    config.trainer.eval_every = config.trainer.save_every = 100
    return config


CONFIGS = {"lora-tiny": lora_tiny}
