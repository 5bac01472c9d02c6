"""MXFP4 compared to transformers: its conversion of random codes, and the logits of a directory that it reads."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.framework.weights.mxfp4 import decode
from tools import check_altered
from tools.peers.mxfp4 import FACTS, make_mxfp4_tensors

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]


def test_random_codes_are_exactly_equal(theirs):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 40, 9, 16), dtype=np.uint8)
    scales = rng.integers(0, 255, (3, 40, 9), dtype=np.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        expected = convert_moe_packed_tensors(torch.as_tensor(blocks), torch.as_tensor(scales), dtype=dtype)
        ours = decode(blocks, scales).swapaxes(1, 2).astype(np.float32)
        np.testing.assert_array_equal(ours, expected.float().numpy())


def test_a_directory_has_their_logits(theirs, tmp_path):
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(FACTS | {"quantization_config": quantization}))
    save_file(make_mxfp4_tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    expected = check_altered.their_logits(tmp_path)
    ours = check_altered.our_logits(tmp_path)
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.std(ours) > 0.1, "a model that says nothing would agree cheaply"
