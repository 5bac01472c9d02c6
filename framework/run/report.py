"""The summary at the end of a run: its compression beside that of other programs, and samples of text or images."""

from __future__ import annotations

import gzip
import lzma
import math
from typing import Any

import numpy as np

from framework.data.batches import Pipeline
from framework.data.pipeline import DataPipeline
from framework.inference.generation import Generator
from framework.inference.held_out import share_of
from framework.inference.images import Images
from framework.inference.sampling import Sampling
from framework.layers.head import LMHead
from framework.program.program import Program
from framework.terminal.phases import SHORT, phase
from framework.terminal.tables import human_bytes

# Texts that are larger are not compressed for comparison.
_MAX_COMPRESSED_BYTES = 64_000_000
_NUM_SAMPLE_IMAGES = 64


def compressor_bits_per_byte(text: bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on the whole text, which is not empty."""
    gzip_bytes = gzip.compress(text, compresslevel=9, mtime=0)
    xz_bytes = lzma.compress(text, preset=9)
    sizes = {"gzip -9": len(gzip_bytes), "xz -9": len(xz_bytes)}
    return {name: 8.0 * size / len(text) for name, size in sizes.items()}


def compression_lines(
    data: Pipeline, evaluation: dict[str, float], limit: int | None = None, workdir: object = "WORKDIR"
) -> list[str]:
    """Bits per byte of the model beside those of general compressors, on the same validation text.

    Compressing takes seconds per megabyte and the whole text in memory: not done beyond 64 MB.

    Args:
        data: has the validation sets.
        evaluation: metrics of the last evaluation, by name.
        limit: the batches that it took of each set; None for all.
        workdir: of the run.
    """
    lines: list[str] = []
    if not isinstance(data, DataPipeline):
        return lines
    # Where the size of the text is not known, four bytes a token are about right.
    sizes = {row.name: row.bytes or 4 * row.tokens for row in data.source_report()}
    for name in data.validation_names:
        bits = evaluation.get(f"eval/{name}/bits_per_byte", math.nan)
        if math.isnan(bits):
            continue
        share = share_of(data, name, limit)
        part = ""
        if share:
            part = f" of {share} (all: plimsoll evaluate --workdir={workdir} --validation)"
        num_batches = len(data.eval_batch_numbers(name))
        num_taken = len(data.eval_batch_numbers(name, limit))
        num_bytes = sizes[name] * num_taken // num_batches
        better_tools: list[str] = []
        if num_bytes > _MAX_COMPRESSED_BYTES:
            comparison = f"{human_bytes(num_bytes)} of text are too many to compress for comparison"
        else:
            # Exactly the text that was evaluated: a compressor learns from what it has read, so its figure for the
            # whole set, of which the model has seen a part, would not be comparable.
            with phase(f"compressing {name} for comparison", patience=SHORT):
                text = data.document_text(name, limit)
                bits_by_tool = compressor_bits_per_byte(text)
            figures = ", ".join(f"{tool} {value:.3f}" for tool, value in bits_by_tool.items())
            comparison = f"on the same {human_bytes(len(text))} of text {figures}"
            better_tools = [tool for tool, value in bits_by_tool.items() if value <= bits]
        lines.append(f"{name}: {bits:.3f} bits per byte{part}; {comparison}")
        if better_tools:
            lines.append(_why_behind(better_tools, data.seq_len))
    return lines


def _why_behind(tools: list[str], seq_len: int) -> str:
    """The line that says why these compressors need no more bits than a model of sequences of `seq_len` tokens."""
    names = " and ".join(tools)
    return (
        f"fewer bits by {names}: compressors repeat passages from far back, "
        f"the model sees {seq_len:,} tokens at a time, and learns more in a longer run (trainer.max_steps)"
    )


def sample_images(program: Program, state: dict[str, Any]) -> np.ndarray | None:
    """64 images, uint8 [64, H, W, C], that the model draws; None where it draws none."""
    if not program.experiment.model.draws_images:
        return None
    options = program.experiment.trainer
    has_averages = bool(state["ema"])
    images = Images(program, state, averaged=has_averages)
    return images.sample(_NUM_SAMPLE_IMAGES, options.sample_temperature, options.seed)


def sample_text(program: Program, state: dict[str, Any]) -> str | None:
    """The prompt of the config and the model's continuation of it; None where tokens stand for no text."""
    options = program.experiment.trainer
    data = program.experiment.data
    if not options.sample_tokens or not isinstance(data, DataPipeline) or not data.tokenizer.has_text:
        return None
    # A model that scores sequences continues none.
    if not isinstance(program.experiment.language_model.head, LMHead):
        return None
    tokenizer = data.tokenizer
    prompt = tokenizer.encode_prompt(options.sample_prompt)
    if not prompt:
        # A tokenizer may put nothing before a text. Documents then follow the token between them.
        if tokenizer.separator_id is None:
            return None
        prompt = [tokenizer.separator_id]
    num_tokens = options.sample_tokens
    limit = program.experiment.language_model.max_positions
    # Both are cut to the model's positions: a sample is not worth an error at the end of a run.
    if limit is not None:
        prompt = prompt[-max(1, limit - num_tokens) :]
        num_tokens = min(num_tokens, limit - len(prompt))
    sampling = Sampling(
        max_new_tokens=num_tokens,
        temperature=options.sample_temperature,
        stop_ids=tuple(tokenizer.stop_ids),
        seed=options.seed,
    )
    generator = Generator(program, state, averaged=bool(state["ema"]))
    continuations = generator([prompt], sampling)
    return options.sample_prompt + tokenizer.decode(continuations[0])
