"""A small gpt-oss whose experts are stored in MXFP4, as in published files, with random codes."""

from __future__ import annotations

import numpy as np

from plimsoll.framework.families import find_family
from plimsoll.framework.weights.mxfp4 import BLOCK, BLOCK_BYTES, BLOCKS, SCALES
from plimsoll.framework.weights.source import layer_shape
from tools.peers.families import FAMILIES
from tools.peers.recording import Tensors

# Widths are whole blocks of 32, and experts and widths can be sharded over devices.
FACTS = FAMILIES["gpt-oss"].facts | {"intermediate_size": 64, "num_local_experts": 4, "dtype": "bfloat16"}
_PACKED = ("gate_up_proj", "down_proj")


def make_mxfp4_tensors(seed: int = 0) -> Tensors:
    """Return the tensors by name: experts as blocks and scales, all others as numbers that are exact in bfloat16."""
    family = find_family(FACTS)()
    model = family.model(FACTS).instantiate()
    shapes = {}
    for path, sources in family.places(model).items():
        for source in sources:
            shapes[source.name] = source.shape(layer_shape(model.base_specs[path]))
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        if not name.endswith(_PACKED):
            # Seven-bit numbers, which bfloat16 represents exactly.
            tensors[name] = (rng.integers(-64, 64, shape) / 64).astype(np.float32)
            continue
        num_experts, inputs, outputs = shape
        blocks_shape = (num_experts, outputs, inputs // BLOCK)
        tensors[f"{name}{BLOCKS}"] = rng.integers(0, 256, (*blocks_shape, BLOCK_BYTES), dtype=np.uint8)
        # Powers of two from 1/32 to 1/4.
        tensors[f"{name}{SCALES}"] = rng.integers(122, 126, blocks_shape, dtype=np.uint8)
    return tensors
