"""Small models that a laptop's CPU trains in minutes, on text that every machine has."""

from __future__ import annotations

from plimsoll.configs.parts import adamw, muon, no_decay
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import StdlibSource
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import gpt2_model, llama_model
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import AcceleratorRule, Experiment
from plimsoll.framework.program.options import TrainerOptions

_SAMPLE_PROMPT = """class Reader:
    def __init__(self, path):
        self.path = path

    def read(self):
"""


def stdlib_tiny() -> Config:
    """A 1.8M-parameter Llama-like model of the Python standard library's source; under 5 minutes on 2 CPU cores.

    Byte-level BPE trained on the same text; Muon for the matrices, AdamW for the rest.
    """
    steps = 1500
    vocab_size = 4096
    model = llama_model(layers=4, heads=2, dim=128, hidden=344, vocab_size=vocab_size)
    model.stack.unroll = 0
    # On a CPU, the logits of such a small chunk of tokens stay in the cache.
    model.head.chunk_tokens = 256
    model.embed.init.stddev = 0.5
    optimizer, adam_rule = muon(peak=0.02, adam_peak=0.02, warmup=0.06, end=0.0)
    # A batch contains few of the tokens, so most rows of the table have a gradient in few steps. In such a short run,
    # those steps must be large. The first rule that matches decides.
    embed_rule = adam_rule.copy()
    embed_rule.pattern = "^embed"
    embed_rule.optimizer.learning_rate.peak_value = 0.3
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            DataPipeline,
            source=config_for(StdlibSource, split="train"),
            validation={"stdlib": config_for(StdlibSource, split="validation")},
            tokenizer=config_for(BPETokenizer, vocab_size=vocab_size),
            seq_len=256,
            global_batch_size=8,
        ),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=config_for(Learner, optimizer=optimizer, rules=[embed_rule, adam_rule]),
        trainer=config_for(
            TrainerOptions,
            max_steps=steps,
            eval_every=750,
            # Evaluate the whole held-out part, which takes seconds; a compressor's bits per byte also cover the
            # whole.
            eval_batches=None,
            save_every=750,
            sample_tokens=160,
            sample_temperature=0.5,
            sample_prompt=_SAMPLE_PROMPT,
        ),
        # With a single CPU, more updates are worth more than smoother ones. With two microbatches, the activations
        # stay in the cache.
        accelerator_rules=[
            config_for(AcceleratorRule, pattern="cpu-1", set={"data.global_batch_size": 4, "learner.accumulate": 2})
        ],
    )


def stdlib_tiny_reversible() -> Config:
    """stdlib-tiny (1.8M parameters), two residual streams in fixed point, trained by inversion (constant memory)."""
    config = stdlib_tiny()
    config.model.stack.streams = "fixed"
    config.memory.remat = "invert"
    return config


def nanogpt_cpu() -> Config:
    """nanoGPT's CPU example (its README): 4 layers, 4 heads, width 128, 64 positions, batch 12, bytes for characters.

    0.8M parameters, 2000 steps, no dropout. nanoGPT reports a loss of 1.88 per character on Shakespeare; this config
    trains on the standard library's source instead.
    """
    steps = 2000
    model = gpt2_model(layers=4, heads=4, dim=128, vocab_size=257, positions=64)
    model.stack.unroll = 0
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            DataPipeline,
            source=config_for(StdlibSource, split="train"),
            validation={"stdlib": config_for(StdlibSource, split="validation")},
            tokenizer=config_for(ByteTokenizer),
            seq_len=64,
            global_batch_size=12,
        ),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=config_for(Learner, optimizer=adamw(peak=1e-3, warmup=0.05, b2=0.99), rules=[no_decay()]),
        trainer=config_for(TrainerOptions, max_steps=steps, eval_every=500, eval_batches=20, save_every=500),
    )


CONFIGS = {"stdlib-tiny": stdlib_tiny, "stdlib-tiny-reversible": stdlib_tiny_reversible, "nanogpt-cpu": nanogpt_cpu}
