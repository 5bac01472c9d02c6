"""What a run says of itself: the table at its start, and the summary at its end."""

from __future__ import annotations

import gzip
import lzma
import math
from typing import Any

import numpy as np

from framework.data.batches import Pipeline
from framework.data.pipeline import DataPipeline
from framework.inference.generation import Generator
from framework.inference.images import Images
from framework.inference.sampling import Sampling
from framework.program.program import Program
from framework.terminal.tables import human_bytes

_MAX_COMPRESSED_BYTES = 64_000_000


def compressor_bits_per_byte(text: bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on the whole text, which is not empty."""
    sizes = {"gzip -9": len(gzip.compress(text, compresslevel=9, mtime=0)), "xz -9": len(lzma.compress(text, preset=9))}
    return {name: 8.0 * size / len(text) for name, size in sizes.items()}


def compression_lines(data: Pipeline, evaluation: dict[str, float]) -> list[str]:
    """Bits per byte of the model beside those of general compressors, on the same validation text.

    Compressing takes seconds per megabyte and the whole text in memory: not done beyond 64 MB.
    """
    lines = []
    if not isinstance(data, DataPipeline):
        return lines
    sizes = {row.name: row.bytes or 4 * row.tokens for row in data.source_report()}
    for name in data.validation_names:
        bits = evaluation.get(f"eval/{name}/bits_per_byte", math.nan)
        if math.isnan(bits):
            continue
        if sizes[name] > _MAX_COMPRESSED_BYTES:
            others = f"{human_bytes(sizes[name])} of text are too many to compress for comparison"
        else:
            compressed = compressor_bits_per_byte(data.document_text(name))
            others = f"on the same text {', '.join(f'{tool} {value:.3f}' for tool, value in compressed.items())}"
        lines.append(f"{name}: {bits:.3f} bits per byte; {others}")
    return lines


def sample_images(program: Program, state: dict[str, Any]) -> np.ndarray | None:
    """64 images [64,H,W,C] that the model draws; None where it draws none."""
    if not program.experiment.model.draws_images:
        return None
    options = program.experiment.trainer
    return Images(program, state, averaged=bool(state["ema"])).sample(64, options.sample_temperature, options.seed)


def sample_text(program: Program, state: dict[str, Any]) -> str | None:
    """The prompt of the config and what the model makes of it; None where tokens stand for no text."""
    options, data = program.experiment.trainer, program.experiment.data
    if not options.sample_tokens or not isinstance(data, DataPipeline) or not data.tokenizer.has_text:
        return None
    tokenizer = data.tokenizer
    prompt, wanted = tokenizer.encode_prompt(options.sample_prompt), options.sample_tokens
    limit = program.experiment.language_model.embed.max_positions
    if limit is not None:  # a sample is not worth an error at the end of a run
        prompt = prompt[-max(1, limit - wanted) :]
        wanted = min(wanted, limit - len(prompt))
    sampling = Sampling(wanted, options.sample_temperature, stop_ids=tuple(tokenizer.stop_ids), seed=options.seed)
    tokens = Generator(program, state, averaged=bool(state["ema"]))([prompt], sampling)[0]
    return options.sample_prompt + tokenizer.decode(tokens)
