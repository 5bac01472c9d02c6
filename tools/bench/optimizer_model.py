"""The training run that all rows of tools.bench.optimizers share, as it was for the stored results.

Named configs change, but a row that is added later needs the same model, data and evaluation as the others.
"""

from __future__ import annotations

from plimsoll import configs
from plimsoll.framework.config import Config
from plimsoll.framework.families.decoders import llama_model


def one_million() -> Config:
    """Return a 1M-parameter Llama trained on the Python standard library's source, with a vocabulary of 2,048 ids."""
    vocab_size = 2048
    config = configs.load("stdlib-tiny")
    config.model = llama_model(layers=4, heads=4, dim=128, hidden=344, vocab_size=vocab_size, tied=True)
    config.model.stack.unroll = 0
    config.data.tokenizer.vocab_size = vocab_size
    config.trainer.eval_every = config.trainer.save_every = 250
    config.trainer.eval_batches = 20
    config.trainer.sample_tokens = 0
    config.accelerator_rules = []
    return config
