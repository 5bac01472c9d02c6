"""Toy preference models that a laptop's CPU trains in minutes, on text that every machine has."""

from __future__ import annotations

from plimsoll.configs.parts import adamw
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.preferences import StdlibPairs
from plimsoll.framework.objectives.preferences import DPO


def dpo_tiny() -> Config:
    """stdlib-tiny's model, 1.8M parameters, trained by DPO: lines of the library against the same words shuffled.

    The reference is the model's initial weights, whose log-probabilities are computed once. Minutes on 2 CPU cores.
    """
    config = stdlib_tiny()
    # About as many pairs as this short run reads, because the reference is computed for all of them.
    config.data.source = config_for(StdlibPairs, split="train", every=8)
    config.data.validation = {"pairs": config_for(StdlibPairs, split="validation", every=8)}
    config.model.head.objective = config_for(DPO, beta=0.1)
    config.batch_transform = config_for(Reference)
    config.learner.optimizer = adamw(peak=3e-3, warmup=0.1, weight_decay=0.0)
    config.learner.rules = []
    config.accelerator_rules = []
    config.trainer.max_steps = 300
    config.trainer.eval_every = 100
    config.trainer.save_every = 100
    return config


CONFIGS = {"dpo-tiny": dpo_tiny}
