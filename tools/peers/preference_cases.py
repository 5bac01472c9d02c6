"""Preference losses that are compared with TRL, and the examples that both sides use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.objectives.kto import KTO
from plimsoll.framework.objectives.preferences import DPO, IPO, ORPO, SimPO
from tools.peers.families import PeerFamily

VOCAB = 48
# Examples of a batch, and the number of rows that they take when packed.
BATCH, PACKED_ROWS = 4, 2
# Minimum and maximum tokens of a prompt, and of an answer; two pairs always fit into PACKED_LEN columns.
PROMPT, ANSWER = (2, 5), (2, 8)
PADDED_LEN, PACKED_LEN = 24, 48
TRAINING_STEPS = 10
LEARNING_RATE, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-6
# Smaller than the families' shapes, because gradients and weights of each loss are recorded.
MODEL = PeerFamily(
    "preferences",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)

Ids = list[int]


@dataclass(frozen=True)
class PreferencePair:
    """A prompt and two answers to it."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


@dataclass(frozen=True)
class UnpairedExample:
    """An unpaired preference (KTO): a prompt, an answer, an unrelated answer for the KL estimate, and a label.

    `other_answer` answers another prompt; `liked` is the label of `answer`.
    """

    prompt: Ids
    answer: Ids
    other_answer: Ids
    liked: bool


@dataclass(frozen=True)
class PreferenceCase:
    """One loss, as both sides configure it.

    Args:
        name: name of the recorded file.
        objective: our objective.
        trainer: TRL's trainer: dpo, orpo, cpo or kto.
        arguments: arguments of TRL's config.
    """

    name: str
    objective: Config
    trainer: str
    arguments: dict[str, Any]

    @property
    def thumbs(self) -> bool:
        """True if the examples are unpaired: single answers with a label."""
        return self.trainer == "kto"


CASES: dict[str, PreferenceCase] = {
    case.name: case
    for case in (
        PreferenceCase("dpo", config_for(DPO, beta=0.2), "dpo", {"beta": 0.2}),
        PreferenceCase(
            "dpo-sft",
            config_for(DPO, beta=0.2, sft=0.7),
            "dpo",
            {"beta": 0.2, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        ),
        PreferenceCase("ipo", config_for(IPO, beta=0.3), "dpo", {"beta": 0.3, "loss_type": ["ipo"]}),
        PreferenceCase("orpo", config_for(ORPO, beta=0.6), "orpo", {"beta": 0.6}),
        PreferenceCase(
            "simpo",
            config_for(SimPO, beta=2.0, gamma=1.2),
            "cpo",
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "cpo_alpha": 0.0},
        ),
        PreferenceCase(
            "simpo-sft",
            config_for(SimPO, beta=2.0, gamma=0.5, label_smoothing=0.1, sft=0.4),
            "cpo",
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1, "cpo_alpha": 0.4},
        ),
        PreferenceCase(
            "kto",
            config_for(KTO, beta=0.2, desirable_weight=1.5, undesirable_weight=0.8),
            "kto",
            {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.8},
        ),
    )
}


def pairs(seed: int) -> list[PreferencePair]:
    """Return the pairs of a batch."""
    rng = np.random.default_rng(seed)
    return [PreferencePair(_ids(rng, PROMPT), _ids(rng, ANSWER), _ids(rng, ANSWER)) for _ in range(BATCH)]


def make_unpaired(seed: int) -> list[UnpairedExample]:
    """Return the unpaired examples of a batch; as in TRL, the answer to another prompt is the neighbor's."""
    rng = np.random.default_rng(seed)
    prompts = [_ids(rng, PROMPT) for _ in range(BATCH)]
    answers = [_ids(rng, ANSWER) for _ in range(BATCH)]
    # Unequal numbers of the two labels, so that their weights matter.
    liked = [True, False, True, True]
    return [UnpairedExample(prompts[i], answers[i], answers[i - 1], liked[i]) for i in range(BATCH)]


def examples(case: PreferenceCase, seed: int) -> list[PreferencePair] | list[UnpairedExample]:
    """Return the examples of a batch."""
    return make_unpaired(seed) if case.thumbs else pairs(seed)


def training_seeds(seed: int) -> list[int]:
    """Return the seed of each training step's batch: three batches that repeat."""
    return [seed + 1 + step % 3 for step in range(TRAINING_STEPS)]


def _ids(rng: np.random.Generator, lengths: tuple[int, int]) -> Ids:
    # 0 is padding.
    return rng.integers(1, VOCAB, rng.integers(lengths[0], lengths[1] + 1)).tolist()
