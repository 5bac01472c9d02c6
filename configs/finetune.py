"""Fine-tuning of published weights (hf:DIR, lora:DIR, qlora:DIR; docs/finetune.md), and a toy.

LoRA is arXiv 2106.09685, QLoRA arXiv 2305.14314. Every named config accepts adapters on the command line.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.configs.parts import adamw, large
from plimsoll.configs.policy import as_policy
from plimsoll.configs.scored import as_classifier, as_published, as_reward_model
from plimsoll.configs.tiny import stdlib_tiny
from plimsoll.framework import families
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.chats import ChatSource
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.families.published import shape_url
from plimsoll.framework.files import hub_models
from plimsoll.framework.layers.lora import LoRA


def lora_tiny() -> Config:
    """stdlib-tiny's text with LoRA of rank 16 on a frozen 2.1M-parameter model; about 3 minutes on 2 CPU cores.

    The frozen weights are random, because no weights of this size are published. It demonstrates the mechanism, and
    its loss is not meaningful.
    """
    steps = 300
    config = stdlib_tiny()
    config.model.lora = config_for(LoRA, rank=16, alpha=32.0, dropout=0.05)
    # A multiple of nf4's block size, so that the base weights can be nf4 too.
    config.model.stack.pattern[0].mlp.hidden = 384
    # Adapters cannot change the embedding tables. So the head gets its own table, with values large enough for
    # confident predictions.
    config.model.head.tied = False
    config.model.head.init.stddev = 0.1
    config.learner.optimizer = adamw(peak=1e-2, warmup=0.1, weight_decay=0.0)
    config.learner.rules = []
    config.trainer.max_steps = steps
    config.trainer.eval_every = config.trainer.save_every = 100
    return config


def full(source: str, shape_only: bool = False) -> Config:
    """Train all weights of a published model on chats: bf16 with f32 master weights; float32 files in float32.

    Conversations are read from data/chat.jsonl, a twentieth of them for validation; three epochs.

    Args:
        source: a Hugging Face directory, or the Hub's id of a model, ORG/NAME or ORG/NAME@REVISION.
        shape_only: whether the shape is sufficient, as for a plan; a well-known model then needs no files.
    """
    if shape_only:
        path = shape_url(source)
        model, pretrained = families.build_shape_configs(path)
    else:
        path = hub_models.pin_model(source)
        model, pretrained = families.build_pretrained_configs(path)
    facts = pretrained.facts
    # The second name is GPT-2's.
    max_length = facts.get("max_position_embeddings") or facts.get("n_positions") or 2048
    seq_len = min(2048, max_length)
    # Read the dtype of the files first, because `large` sets bfloat16.
    dtype = model.param_dtype
    config = large(model, seq_len=seq_len, batch=16, peak=1e-5, steps=None, warmup=0.05)
    if dtype == "float32":
        config.model.param_dtype = config.model.compute_dtype = dtype
        # Parameters in float32 are their own master weights.
        config.learner.master_dtype = config.learner.moment_dtype = None
    # Both use one file: the source splits it by conversation.
    train_chats = config_for(ChatSource, paths=["data/chat.jsonl"], split="train")
    validation_chats = config_for(ChatSource, paths=["data/chat.jsonl"], split="validation")
    config.data.source = train_chats
    config.data.validation = {"chats": validation_chats}
    config.data.tokenizer = config_for(PretrainedTokenizer, path=path, vocab_size=model.vocab_size)
    config.data.document_mask = True
    config.trainer.max_steps = None
    config.trainer.max_epochs = 3
    config.pretrained = pretrained
    config.memory.remat = "full"
    config.trainer.save_every = config.trainer.eval_every = 200
    return as_published(config, facts)


def lora(source: str, shape_only: bool = False, base: str | None = None) -> Config:
    """Train adapters of rank 16 on all linear layers of a published model; its own weights are frozen."""
    config = full(source, shape_only)
    config.model.lora = config_for(LoRA, rank=16, alpha=32.0, dropout=0.05, base=base)
    config.learner.optimizer = adamw(peak=2e-4, warmup=0.05, weight_decay=0.0)
    config.learner.rules = []
    config.learner.master_dtype = config.learner.moment_dtype = None
    return as_published(config, config.pretrained.facts)


def qlora(source: str, shape_only: bool = False) -> Config:
    """Like `lora`, with the linear layers' own weights in 4 bits, including those of experts, which have no adapter."""
    config = lora(source, shape_only, base="nf4")
    config.model.lora.base_targets = "."
    return config


def _with_score_head(change: Callable[..., Config], base: Callable[..., Config], what: str) -> Callable[..., Config]:
    """Return a function that builds `base`'s config of a published model and changes it to score sequences."""

    def scored(source: str, shape_only: bool = False) -> Config:
        config = base(source, shape_only)
        try:
            return change(config, config.pretrained.facts)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    scored.__doc__ = (
        f"Like `{base.__name__}`, for {what}. A published model without a score head gets a randomly initialized one."
    )
    return scored


def _with_rewards(base: Callable[..., Config]) -> Callable[..., Config]:
    """Return a function that builds `base`'s config of a published model and changes it to learn from rewards."""

    def policy(source: str, shape_only: bool = False) -> Config:
        try:
            return as_policy(base(source, shape_only))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    policy.__doc__ = (
        f"Like `{base.__name__}`, for GRPO (docs/preferences.md): --data has prompts, --reward scores the answers."
    )
    return policy


CONFIGS = {"lora-tiny": lora_tiny}
KINDS = {"hf": full, "lora": lora, "qlora": qlora}
for _prefix, _base in (("", full), ("lora-", lora), ("qlora-", qlora)):
    KINDS[f"{_prefix}reward"] = _with_score_head(as_reward_model, _base, "a reward model (docs/preferences.md)")
    KINDS[f"{_prefix}grpo"] = _with_rewards(_base)
    KINDS[f"{_prefix}classify"] = _with_score_head(as_classifier, _base, "a classifier (docs/preferences.md)")
