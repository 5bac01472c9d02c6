"""What a run says of itself: the table at its start, and the summary at its end.

May import: everything in framework but trainer.
"""

from __future__ import annotations

import gzip
import lzma
import math
from importlib.metadata import version
from typing import Any

import numpy as np

from framework.accelerators import accelerator_name, spec_for
from framework.data.batches import Pipeline
from framework.data.pipeline import DataPipeline
from framework.generation import Generator
from framework.images import Images
from framework.layout import GROUPS, MemoryKind
from framework.mesh import island, mesh_text
from framework.metrics.tables import Section, human_bytes, start_table
from framework.program import Program
from framework.sampling import Sampling

_MAX_COMPRESSED_BYTES = 64_000_000


def start_report(name: str, program: Program, without_data: str = "") -> list[Section]:
    """Parameters by group, bytes per device by group and memory kind, mesh, items per step, FLOPs per item, data, or
    why there are none."""
    layout, experiment = program.layout, program.experiment
    devices, shape = list(program.mesh.devices.flat), dict(program.mesh.shape)
    parameters = [
        (group, layout.size(group), sum(leaf.spec.num_bytes for leaf in layout if leaf.group == group))
        for group in ("parameter", "frozen")
        if layout.size(group)
    ]
    kinds: list[MemoryKind] = sorted({leaf.spec.memory_kind for leaf in layout})
    sizes = {(group, kind): layout.bytes_per_device(group, kind) for group in GROUPS for kind in kinds}
    data: Pipeline = experiment.data
    return start_table(
        config=name,
        accelerator=accelerator_name(devices),
        mesh=mesh_text(shape, experiment.mesh.cut(shape, len(set(map(island, devices)))), devices[0].platform),
        parameters=parameters,
        device_bytes={key: size for key, size in sizes.items() if size},
        tokens_per_step=data.global_batch_size * data.seq_len,
        flops_per_token=experiment.model.flops_per_token(data.seq_len),
        device_limit_bytes=spec_for(devices).limit_bytes,
        data={"not checked": without_data} if without_data else {row.name: str(row) for row in data.source_report()},
        item=data.item,
        versions={name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain")},
    )


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
    if not hasattr(program.experiment.model, "sample"):
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
