"""A user config file: a model of a few layers that answers sums and is trained on rewards.

The reward functions of the tests are in this file too, so `batch_transform.reward` names it. One of them uses the
folder $REWARDED.
"""

import os
import signal
from pathlib import Path

import optax

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
from tests.support.tiny import CACHE

REWARD = f"{__file__}:high_bytes"


def build_grpo_config() -> Config:
    """Two layers of width 32, four prompts with four answers each. One id of the vocabulary stands for no text."""
    model = llama_model(layers=2, heads=4, kv_heads=2, dim=32, hidden=48, vocab_size=258)
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
            group_size=4,
            global_batch_size=16,
        ),
        batch_transform=config_for(Rollouts, reward=REWARD, table_every=4),
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=3e-3)),
        trainer=config_for(
            TrainerOptions, max_steps=8, log_every=1, eval_every=None, save_every=3, compilation_cache=CACHE
        ),
    )


def high_bytes(prompts, answers, rows):
    """Return the fraction of characters that are not UTF-8: slightly over half for an untrained model."""
    assert all(prompt == row["prompt"] for prompt, row in zip(prompts, rows, strict=True))
    return [answer.count("\ufffd") / max(len(answer), 1) for answer in answers]


def kill_at_eighth_call(prompts, answers, rows):
    """high_bytes, but the eighth call kills its process. $REWARDED/calls counts, so later runs are not killed."""
    folder = Path(os.environ["REWARDED"])
    with open(folder / "calls", "a") as file:
        file.write("x")
    if len((folder / "calls").read_text()) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return high_bytes(prompts, answers, rows)


def too_few(prompts, answers, rows):
    """Return one reward too few."""
    return [0.0] * (len(answers) - 1)


def not_a_number(prompts, answers, rows):
    """Return zeros, except for a NaN as the last reward."""
    return [0.0] * (len(answers) - 1) + [float("nan")]


def failing(prompts, answers, rows):
    """Raise an exception."""
    return [1 / 0 for _ in answers]


CONFIGS = {"rewarded": build_grpo_config}
