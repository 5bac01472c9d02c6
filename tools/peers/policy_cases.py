"""Losses over sampled answers that are compared with TRL's GRPO: both sides' batches, and the recorded results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.objectives.policy_gradient import GRPO
from tools.peers.families import PeerFamily
from tools.peers.recording import TUNING, Tensors

VOCAB = 48
# Answers of a batch, in two groups of three; tokens of the longest prompt and answer, which fill a row.
BATCH, GROUP, PROMPT, ANSWER = 6, 3, 5, 7
SEQ_LEN = PROMPT + ANSWER - 1
# Small enough that the gradients of each case take only a few kilobytes.
MODEL = PeerFamily(
    "policy",
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


@dataclass(frozen=True)
class PolicyCase:
    """One loss, as both sides configure it.

    Args:
        objective: our objective.
        arguments: arguments of TRL's GRPOConfig.
    """

    objective: Config
    arguments: dict[str, Any]


CASES: dict[str, PolicyCase] = {
    "grpo": PolicyCase(config_for(GRPO, normalization="grpo"), {"loss_type": "grpo", "beta": 0.0}),
    "grpo-kl": PolicyCase(config_for(GRPO, normalization="grpo", beta=0.3), {"loss_type": "grpo", "beta": 0.3}),
    "dr-grpo": PolicyCase(
        config_for(GRPO, normalization="dr_grpo", answer_tokens=ANSWER), {"loss_type": "dr_grpo", "beta": 0.0}
    ),
    "dapo": PolicyCase(
        config_for(GRPO, normalization="dapo", epsilon=0.15, epsilon_high=0.28, beta=0.1, unbiased_kl=False),
        {"loss_type": "dapo", "epsilon": 0.15, "epsilon_high": 0.28, "beta": 0.1, "use_bias_correction_kl": False},
    ),
}


@dataclass(frozen=True)
class Samples:
    """Sampled answers, with their log-probabilities and rewards.

    Args:
        prompts, answers: token ids, of any lengths up to PROMPT and ANSWER.
        behavior, reference: f32[B, A], log-probabilities of the answers' tokens.
        rewards: f32[B], reward of each answer.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    behavior: np.ndarray
    reference: np.ndarray
    rewards: np.ndarray

    @staticmethod
    def draw(seed: int) -> Samples:
        """Draw samples. Log-probabilities are around those of an untrained model, so that some ratios are clipped."""
        rng = np.random.default_rng(seed)
        prompts: list[list[int]] = []
        for _ in range(BATCH // GROUP):
            prompt = rng.integers(3, VOCAB, rng.integers(2, PROMPT + 1)).tolist()
            prompts += [prompt] * GROUP
        lengths = rng.permutation([1, 3, ANSWER, 4, ANSWER, 2])
        answers = [rng.integers(3, VOCAB, length).tolist() for length in lengths]
        noise = rng.normal(size=(2, BATCH, ANSWER)).astype(np.float32)
        scales = np.asarray([[[0.3]], [[0.5]]], np.float32)
        behavior, reference = np.float32(-np.log(VOCAB)) + scales * noise
        return Samples(prompts, answers, behavior, reference, rng.normal(size=BATCH).astype(np.float32))

    def batch(self, advantages_B: np.ndarray, spreads_B: np.ndarray) -> Batch:
        """Return the arrays of a step."""
        from plimsoll.framework.batch_transforms.answers import build_answer_rows
        from plimsoll.framework.inference.rollout import SampledAnswers

        counts_B = np.asarray([len(answer) for answer in self.answers], np.int32)
        tokens_BA = np.zeros((BATCH, ANSWER), np.int32)
        prompts_BS = np.zeros((BATCH, SEQ_LEN), np.int32)
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            prompts_BS[row, : len(prompt)] = prompt
            tokens_BA[row, : len(answer)] = answer
        prompt_lengths_B = np.asarray([len(prompt) for prompt in self.prompts], np.int32)
        host_batch = {"prompts": prompts_BS, "lengths": prompt_lengths_B}
        arrays = build_answer_rows(host_batch, SampledAnswers(tokens_BA, self.behavior, counts_B))
        # Occupies the same columns as `behavior`.
        reference = build_answer_rows(host_batch, SampledAnswers(tokens_BA, self.reference, counts_B))["behavior"]
        return {
            **arrays,
            "reference": reference,
            "advantages": arrays["weights"] * advantages_B[:, None],
            "rewards": arrays["ends"] * self.rewards[:, None],
            "spreads": arrays["ends"] * spreads_B[:, None],
        }


@dataclass(frozen=True)
class PolicyResults:
    """Results of TRL.

    Args:
        weights, gradients: tensors by the names of published files.
        advantages: f32[B], computed from the rewards by TRL's own lines.
        loss: a scalar.
        metrics: metrics by our names.
    """

    weights: Tensors
    gradients: Tensors
    advantages: np.ndarray
    loss: np.ndarray
    metrics: Tensors


def get_case_path(name: str, folder: Path = TUNING) -> Path:
    """Return the path of a case's recorded file."""
    return folder / f"policy-{name}.npz"


def save(path: Path, seed: int, results: PolicyResults) -> None:
    """Write a file with the seed of the samples and the results."""
    arrays: Tensors = {"seed": np.asarray(seed)}
    for field in dataclasses.fields(results):
        value = getattr(results, field.name)
        if isinstance(value, dict):
            arrays |= {f"{field.name}:{key}": array for key, array in value.items()}
        else:
            arrays[field.name] = value
    # Weights are exact float16 numbers, see `theirs.build`.
    arrays = {k: array.astype(np.float16) if k.startswith("weights:") else array for k, array in arrays.items()}
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> tuple[Samples, PolicyResults]:
    """Read a file that `save` wrote."""
    with np.load(path) as file:
        arrays = dict(file)
    groups: dict[str, Tensors] = {"weights": {}, "gradients": {}, "metrics": {}}
    for key, array in arrays.items():
        group, colon, name = key.partition(":")
        if colon:
            groups[group][name] = array.astype(np.float32)
    results = PolicyResults(advantages=arrays["advantages"], loss=arrays["loss"], **groups)
    return Samples.draw(int(arrays["seed"])), results
