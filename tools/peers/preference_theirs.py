"""Results of TRL for preferences, on the CPU, from the trainers that TRL's users call. Imports torch and TRL."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from tools.peers import theirs
from tools.peers.preference_cases import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MODEL,
    VOCAB,
    PreferenceCase,
    PreferencePair,
    UnpairedExample,
    examples,
    training_seeds,
)
from tools.peers.preference_recording import PreferenceResults
from tools.peers.recording import Tensors

_TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
}
# Maps our names to TRL's metrics.
_OF_PAIRS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}
_METRICS = {
    "dpo": {**_OF_PAIRS, "log_prob_chosen": "logps/chosen", "log_prob_rejected": "logps/rejected"},
    # These two report log-probabilities per token.
    "orpo": {**_OF_PAIRS, "sft": "nll_loss"},
    "cpo": _OF_PAIRS,
    "kto": {
        "reward_desirable": "rewards/chosen",
        "reward_undesirable": "rewards/rejected",
        "margin": "rewards/margins",
        "log_prob_desirable": "logps/chosen",
        "log_prob_undesirable": "logps/rejected",
        "kl": "kl",
    },
}


def compute(case: PreferenceCase, seed: int) -> PreferenceResults:
    """Compute loss, gradients and metrics of a batch, and run ten steps of training."""
    model = theirs.build(MODEL, seed)
    reference = theirs.build(MODEL, seed + 1)
    weights = theirs.get_weights(model)
    trainer = _trainer(case, model, reference)
    loss = trainer.compute_loss(trainer.model, _inputs(trainer, case, seed))
    loss.backward()
    gradients = {name: _array(parameter.grad) for name, parameter in model.named_parameters()}
    metrics = _metrics(trainer, case)
    losses = _train(trainer, case, seed)
    return PreferenceResults(
        weights=weights,
        reference=theirs.get_weights(reference),
        loss=_array(loss),
        gradients=gradients,
        metrics=metrics,
        losses=losses,
        trained=theirs.get_weights(model),
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    return {**theirs.versions(), "trl": trl.__version__}


def _trainer(case: PreferenceCase, model: Any, reference: Any) -> Any:
    """Build TRL's trainer. It requires a dataset, but does not use it."""
    trainer_type, config_type = _TRAINERS[case.trainer]
    with tempfile.TemporaryDirectory() as folder:
        arguments = config_type(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            max_length=64,
            per_device_train_batch_size=2,
            disable_tqdm=True,
            **case.arguments,
        )
        models = {"model": model}
        if case.trainer in ("dpo", "kto"):
            models["ref_model"] = reference
        trainer = trainer_type(args=arguments, train_dataset=_any_data(case), processing_class=_tokenizer(), **models)
    trainer.model.train()
    return trainer


def _any_data(case: PreferenceCase) -> datasets.Dataset:
    texts: dict[str, list[Any]] = {"prompt": ["w5", "w6"]}
    if case.thumbs:
        texts |= {"completion": [" w7", " w8"], "label": [True, False]}
    else:
        texts |= {"chosen": [" w7", " w8"], "rejected": [" w9", " w3"]}
    return datasets.Dataset.from_dict(texts)


def _tokenizer() -> Any:
    ids = {f"w{number}": number for number in range(VOCAB)}
    word_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w4"))
    word_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w4"
    )


def _inputs(trainer: Any, case: PreferenceCase, seed: int) -> dict[str, Any]:
    """Collate our examples into a batch with TRL's own collator."""
    features = [_feature(case, example) for example in examples(case, seed)]
    return trainer.data_collator(features)


def _feature(case: PreferenceCase, example: PreferencePair | UnpairedExample) -> dict[str, Any]:
    if isinstance(example, UnpairedExample):
        return {
            "prompt_ids": example.prompt,
            "completion_ids": example.answer,
            "KL_completion_ids": example.other_answer,
            "label": example.liked,
        }
    if case.trainer == "dpo":
        return {"prompt_ids": example.prompt, "chosen_ids": example.chosen, "rejected_ids": example.rejected}
    feature: dict[str, Any] = {}
    for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
        ids = example.prompt + answer
        feature[f"{name}_input_ids"] = ids
        feature[f"{name}_attention_mask"] = [1] * len(ids)
        feature[f"{name}_labels"] = [-100] * len(example.prompt) + answer
    return feature


def _train(trainer: Any, case: PreferenceCase, seed: int) -> np.ndarray:
    """Train with AdamW, without weight decay or clipping; return the loss before each update."""
    model = trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
    losses = []
    for batch_seed in training_seeds(seed):
        optimizer.zero_grad(set_to_none=True)
        loss = trainer.compute_loss(model, _inputs(trainer, case, batch_seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.asarray(losses, np.float32)


def _metrics(trainer: Any, case: PreferenceCase) -> Tensors:
    """Return the metrics of the only batch so far, by our names."""
    stored = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    return {ours: np.asarray(stored["train"][name][-1], np.float32) for ours, name in _METRICS[case.trainer].items()}


def _array(tensor: Any) -> np.ndarray:
    return copy.deepcopy(tensor.detach().numpy())
