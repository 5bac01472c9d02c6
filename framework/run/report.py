"""The summary at the end of a run: compression compared with gzip and xz, and samples of text or images."""

from __future__ import annotations

import gzip
import lzma
import math

import numpy as np

from plimsoll.framework.data.batches import Pipeline
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.inference.evaluation import describe_share
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import TrainState
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes

# Larger texts are not compressed for comparison.
_MAX_COMPRESSED_BYTES = 64_000_000
_NUM_SAMPLE_IMAGES = 64


def compressor_bits_per_byte(text: bytes) -> dict[str, float]:
    """Return the bits per byte of `gzip -9` and `xz -9` on the whole text, which is not empty."""
    gzip_bytes = gzip.compress(text, compresslevel=9, mtime=0)
    xz_bytes = lzma.compress(text, preset=9)
    sizes = {"gzip -9": len(gzip_bytes), "xz -9": len(xz_bytes)}
    return {name: 8.0 * size / len(text) for name, size in sizes.items()}


def compression_lines(
    data: Pipeline, evaluation: dict[str, float], limit: int | None = None, workdir: object = "WORKDIR"
) -> list[str]:
    """Compare the model's bits per byte with those of general-purpose compressors on the same validation text.

    Compression takes seconds per megabyte and needs the whole text in memory, so texts above 64 MB are skipped.

    Args:
        data: data pipeline with the validation sets.
        evaluation: metrics of the last evaluation, by name.
        limit: number of batches evaluated per set; None for all.
        workdir: workdir of the run, shown in the suggested command.
    """
    lines: list[str] = []
    if not isinstance(data, DataPipeline):
        return lines
    # If the size of the text is unknown, estimate about four bytes per token.
    sizes = {row.name: row.bytes or 4 * row.tokens for row in data.source_report()}
    for name in data.validation_names:
        bits = evaluation.get(f"eval/{name}/bits_per_byte", math.nan)
        if math.isnan(bits):
            continue
        share = describe_share(data, name, limit)
        part = ""
        if share:
            part = f" of {share} (all: plimsoll evaluate --workdir={workdir} --validation)"
        num_batches = len(data.eval_batch_numbers(name))
        num_taken = len(data.eval_batch_numbers(name, limit))
        num_bytes = sizes[name] * num_taken // num_batches
        better_tools: list[str] = []
        if num_bytes > _MAX_COMPRESSED_BYTES:
            comparison = f"{human_bytes(num_bytes)} of text is too much to compress for comparison"
        else:
            # Compress exactly the text that was evaluated. Compressors adapt to what they have read, so a figure for
            # the whole set would not be comparable if the model saw only part of it.
            with phase(f"compressing {name} for comparison", patience=SHORT):
                text = data.document_text(name, limit)
                bits_by_tool = compressor_bits_per_byte(text)
            figures = ", ".join(f"{tool} {value:.3f}" for tool, value in bits_by_tool.items())
            comparison = f"on the same {human_bytes(len(text))} of text {figures}"
            better_tools = [tool for tool, value in bits_by_tool.items() if value <= bits]
        lines.append(f"{name}: {bits:.3f} bits per byte{part}; {comparison}")
        if better_tools:
            lines.append(
                f"fewer bits with {' and '.join(better_tools)}: compressors can repeat passages from far back, "
                f"but the model sees {data.seq_len:,} tokens at a time; train longer to improve it (trainer.max_steps)"
            )
    return lines


def sample_images(program: Program, state: TrainState) -> np.ndarray | None:
    """Sample 64 images, uint8 [64, H, W, C]; None if the model does not generate images."""
    model = program.experiment.model
    if not model.generates_images:
        return None
    options = program.experiment.trainer
    has_averages = bool(state.ema)
    images = model.build_image_sampler(program, state, averaged=has_averages)
    return images.sample(_NUM_SAMPLE_IMAGES, options.sample_temperature, options.seed)


def sample_text(program: Program, state: TrainState) -> str | None:
    """Return the config's prompt and the model's continuation; None if the tokens do not represent text."""
    options = program.experiment.trainer
    data = program.experiment.data
    if not options.sample_tokens or not isinstance(data, DataPipeline) or not data.tokenizer.has_text:
        return None
    # Generation runs layer after layer, for which the layers of all stages would be gathered.
    if program.mesh.shape["pipe"] > 1:
        return None
    # A model that scores sequences cannot continue a prompt.
    if not isinstance(program.experiment.language_model.head, LMHead):
        return None
    tokenizer = data.tokenizer
    prompt = tokenizer.encode_prompt(options.sample_prompt)
    if not prompt:
        # Some tokenizers put no token before a text. Documents then follow the separator token.
        if tokenizer.separator_id is None:
            return None
        prompt = [tokenizer.separator_id]
    num_tokens = options.sample_tokens
    limit = program.experiment.language_model.max_positions
    # Truncate both to the model's maximum positions: a sample is not worth an error at the end of a run.
    if limit is not None:
        prompt = prompt[-max(1, limit - num_tokens) :]
        num_tokens = min(num_tokens, limit - len(prompt))
    sampling = Sampling(
        max_new_tokens=num_tokens,
        temperature=options.sample_temperature,
        stop_ids=tuple(tokenizer.stop_ids),
        seed=options.seed,
    )
    generator = Generator(program, state, averaged=bool(state.ema))
    continuations = generator([prompt], sampling)
    return options.sample_prompt + tokenizer.decode(continuations[0])
