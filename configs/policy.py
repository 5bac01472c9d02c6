"""Turns the config of published weights into that of a model that learns from rewards for its own answers (GRPO)."""

from __future__ import annotations

from plimsoll.configs.parts import adamw
from plimsoll.framework.batch_transforms.rollouts import Rollouts
from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.data.prompts import PromptFiles, Prompts
from plimsoll.framework.objectives.policy_gradient import GRPO

_FILE = "data/prompts.jsonl"


def as_policy(config: Config) -> Config:
    """Turn the config of a published language model into one that trains by GRPO, in place, and return it.

    Prompts are read from data/prompts.jsonl, a twentieth of them for validation. The reward function has to be set.

    Raises:
        ConfigError: the published model scores sequences.
    """
    if not config.model.head.takes("objective") or config.model.head.takes("num_labels"):
        raise ConfigError("config.json: the model scores sequences and writes no answers; expected a language model")
    # As in TRL's GRPOConfig: 256 tokens of an answer, 8 answers to each prompt.
    seq_len = min(1024, config.data.seq_len)
    config.model.head.objective = config_for(GRPO)
    config.data = config_for(
        Prompts,
        source=config_for(PromptFiles, paths=[_FILE], split="train"),
        validation={"prompts": config_for(PromptFiles, paths=[_FILE], split="validation")},
        tokenizer=config.data.tokenizer,
        seq_len=seq_len,
        answer_tokens=max(1, min(256, seq_len // 2)),
        group_size=8,
        global_batch_size=64,
    )
    config.batch_transform = config_for(Rollouts, table_every=20)
    has_adapters = config.model.lora is not None
    if has_adapters:
        # With dropout, the trained policy would not be the one that samples.
        config.model.lora.dropout = 0.0
    config.learner.optimizer = adamw(peak=1e-5 if has_adapters else 1e-6, warmup=0.05, weight_decay=0.0)
    config.learner.rules = []
    config.trainer.eval_every = config.trainer.save_every = 50
    return config
