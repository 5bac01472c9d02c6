"""Results of TRL's GRPOTrainer for sampled answers, on the CPU. Imports torch and TRL."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from tools.peers import theirs
from tools.peers.policy_cases import ANSWER, BATCH, GROUP, MODEL, PROMPT, VOCAB, PolicyCase, PolicyResults, Samples

# Maps our names to TRL's metrics.
_METRICS = {"clipped": "clip_ratio/region_mean", "kl": "kl"}


def compute(case: PolicyCase, seed: int, *, wide: bool = False) -> PolicyResults:
    """Compute loss and gradients of a batch, in float64 if `wide`. `seed` determines the samples and the model."""
    with theirs.wide_float() if wide else nullcontext():
        return _compute(case, seed, torch.float64 if wide else torch.float32)


def _compute(case: PolicyCase, seed: int, dtype: torch.dtype) -> PolicyResults:
    samples = Samples.draw(seed)
    model = theirs.build(MODEL, seed).to(dtype)
    weights = theirs.get_weights(model)
    trainer = _trainer(case, model)
    advantages_B = _advantages(samples)
    loss = trainer.compute_loss(trainer.model, _inputs(samples, advantages_B, dtype))
    loss.backward()
    gradients = {name: parameter.grad.detach().numpy() for name, parameter in model.named_parameters()}
    values = trainer._metrics["train"]
    metrics = {ours: np.asarray(values[name][0]) for ours, name in _METRICS.items() if values.get(name)}
    return PolicyResults(weights, gradients, advantages_B.numpy(), loss.detach().numpy(), metrics)


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    return {**theirs.versions(), "trl": trl.__version__}


def _trainer(case: PolicyCase, model: Any) -> Any:
    """Build TRL's trainer. It requires a dataset, but does not use it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            num_generations=GROUP,
            per_device_train_batch_size=BATCH,
            max_completion_length=ANSWER,
            disable_tqdm=True,
            **{**case.arguments, "beta": 0.0},
        )
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w5", "w6"]}),
            processing_class=_tokenizer(),
        )
    # Set afterwards: with a KL weight from the start, TRL would look for a reference model on the Hub.
    trainer.beta = case.arguments["beta"]
    trainer.model.train()
    # Normally set by the training loop.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _tokenizer() -> Any:
    ids = {f"w{number}": number for number in range(VOCAB)}
    word_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w4"))
    word_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w4"
    )


def _advantages(samples: Samples) -> torch.Tensor:
    """Repeat the lines of GRPOTrainer._generate_and_score_completions for scale_rewards = "group" (TRL 1.16)."""
    rewards = torch.as_tensor(samples.rewards)
    mean_grouped_rewards = rewards.view(-1, GROUP).mean(dim=1).repeat_interleave(GROUP, dim=0)
    std_rewards = rewards.view(-1, GROUP).std(dim=1).repeat_interleave(GROUP, dim=0)
    return (rewards - mean_grouped_rewards) / (std_rewards + 1e-4)


def _inputs(samples: Samples, advantages_B: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch in TRL's format: prompts padded on the left, answers on the right."""
    prompt_ids = torch.zeros((BATCH, PROMPT), dtype=torch.int64)
    completion_ids = torch.zeros((BATCH, ANSWER), dtype=torch.int64)
    prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
    for row, (prompt, answer) in enumerate(zip(samples.prompts, samples.answers, strict=True)):
        prompt_ids[row, PROMPT - len(prompt) :] = torch.as_tensor(prompt)
        prompt_mask[row, PROMPT - len(prompt) :] = 1
        completion_ids[row, : len(answer)] = torch.as_tensor(answer)
        completion_mask[row, : len(answer)] = 1
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages_B.to(dtype),
        "old_per_token_logps": torch.as_tensor(samples.behavior).to(dtype),
        "ref_per_token_logps": torch.as_tensor(samples.reference).to(dtype),
        "num_items_in_batch": completion_mask.sum(),
    }
