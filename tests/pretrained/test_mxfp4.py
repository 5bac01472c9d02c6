"""MXFP4 by its specification: every code with every scale, slices of a packed weight, and inconsistent directories.

tests/peers/test_mxfp4.py compares to transformers on the same bytes.
"""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.program.program import Program
from plimsoll.framework.weights.directory import Directory
from plimsoll.framework.weights.export import export_model
from plimsoll.framework.weights.mxfp4 import PackedTensor, decode
from tools.peers.families import FAMILIES
from tools.peers.mxfp4 import FACTS, make_mxfp4_tensors

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write(folder: Path, quantization=QUANTIZED, drop: str = "", **changed: np.ndarray) -> Path:
    """Write a small gpt-oss directory in MXFP4, without the tensor `drop` and with `changed` tensors replaced."""
    facts = FACTS if quantization is None else FACTS | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(facts))
    tensors = make_mxfp4_tensors() | changed
    save_file({name: array for name, array in tensors.items() if name != drop}, folder / "model.safetensors")
    return folder


def test_every_code_and_scale_decodes_as_specified():
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in range(255):
        expected = []
        for code in codes.ravel().tolist():
            for nibble in (code % 16, code // 16):
                sign = -1.0 if nibble >= 8 else 1.0
                expected.append(sign * magnitudes[nibble % 8] * 2.0 ** (scale - 127))
        # The largest values overflow float32 and bfloat16, which have the same range; all others are exact in bfloat16.
        with np.errstate(over="ignore"):
            narrow = np.asarray(expected).astype(np.float32)
        values = decode(codes, np.full(16, scale, np.uint8))
        assert values.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(values.astype(np.float32), narrow)
        np.testing.assert_array_equal(np.signbit(values), np.signbit(narrow))
    assert np.isnan(decode(codes, np.full(16, 255, np.uint8)).astype(np.float32)).all()


class _Reader:
    """An array with the interface of safetensors' slices."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def get_shape(self):
        return list(self.array.shape)

    def get_dtype(self):
        return "U8" if self.array.dtype == np.uint8 else "F32"

    def __getitem__(self, index):
        return self.array[index]


def test_slice_matches_the_whole_tensor():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    scales = rng.integers(120, 130, (3, 10, 4), dtype=np.uint8)
    tensor = PackedTensor("x", _Reader(blocks), _Reader(scales))
    assert tensor.get_shape() == [3, 128, 10]
    whole = decode(blocks, scales).swapaxes(1, 2)
    for index in (np.s_[:, :, :], np.s_[1:2, 0:32, 3:7], np.s_[0:3, 31:33, 9:10], np.s_[2:3, 70:128, :]):
        np.testing.assert_array_equal(tensor[index], whole[index])
    for wrong in (scales[:, :, :3], scales.astype(np.float32), scales[0]):
        with pytest.raises(ValueError, match=r"^x: expected _blocks U8 \[E, O, I / 32, 16\] and _scales U8"):
            PackedTensor("x", _Reader(blocks), _Reader(wrong))


@pytest.mark.pairs
@pytest.mark.parametrize("devices", [1, 4])
def test_directory_loads_as_bfloat16_and_exports_as_floats(devices, tmp_path):
    """On four devices, each device reads only its own experts and its half of the blocks."""
    (tmp_path / "in").mkdir()
    folder = write(tmp_path / "in")
    config = configs.load(f"hf:{folder}")
    assert config.model.param_dtype == "bfloat16"
    config.data.seq_len, config.data.global_batch_size = 16, 8
    if devices == 4:
        config.mesh.expert, config.mesh.model, config.mesh.fsdp = 2, 2, 1
    program = Program(config.instantiate(), jax.devices()[:devices])
    weights = program.weights(program.experiment.pretrained.init(program))
    stored = load_file(folder / "model.safetensors")
    for path, layer_weights in weights["stack"]["block1"]["mlp"]["experts"].items():
        assert layer_weights.dtype == ml_dtypes.bfloat16, path
    prefix = "model.layers.1.mlp.experts"
    fused = decode(stored[f"{prefix}.gate_up_proj_blocks"], stored[f"{prefix}.gate_up_proj_scales"]).swapaxes(1, 2)
    experts = weights["stack"]["block1"]["mlp"]["experts"]
    np.testing.assert_array_equal(experts["gate"][0], fused[..., ::2])
    np.testing.assert_array_equal(experts["up"][0], fused[..., 1::2])
    down = decode(stored[f"{prefix}.down_proj_blocks"], stored[f"{prefix}.down_proj_scales"]).swapaxes(1, 2)
    np.testing.assert_array_equal(experts["down"][0], down)

    facts, family = families.export_config(config.model, config.pretrained.facts)
    model = program.experiment.language_model
    export_model(tmp_path / "out", model, jax.device_get(weights), family, facts)
    out_facts = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in out_facts
    assert out_facts["dtype"] == "bfloat16"
    out = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(out[f"{prefix}.gate_up_proj"], fused)
    np.testing.assert_array_equal(out[f"{prefix}.down_proj"], down)
    assert not [name for name in out if name.endswith(("_blocks", "_scales"))]


NAME = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("quantization", "drop", "changed", "message"),
    [
        (
            None,
            "",
            {},
            r"config.json has no quantization_config of mxfp4, but the files have tensors such as model.*_blocks",
        ),
        (QUANTIZED, f"{NAME}_scales", {}, r"down_proj_blocks has no matching .*down_proj_scales"),
        (QUANTIZED, f"{NAME}_blocks", {}, r"unexpected +model\.layers\.0\.mlp\.experts\.down_proj_scales"),
        (QUANTIZED, "", {f"{NAME}_scales": np.zeros((5, 32, 1), np.uint8)}, r"down_proj: expected _blocks U8"),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(quantization, drop, changed, message, tmp_path):
    config = configs.load(f"hf:{write(tmp_path, quantization, drop, **changed)}")
    model = config.model.instantiate()
    pretrained = config.pretrained.instantiate()
    with pytest.raises(ValueError, match=message):
        pretrained.places(model)


def test_mxfp4_that_the_files_do_not_have_is_refused(tmp_path):
    save_file({"model.norm.weight": np.ones(32, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FACTS | {"quantization_config": QUANTIZED}))
    with pytest.raises(ValueError, match=r"quant_method = mxfp4, but the files have no tensor NAME_blocks"):
        Directory(tmp_path)


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [("gpt-oss", {"quant_method": "fp8"}), ("gpt-oss", {}), ("gpt-oss", QUANTIZED | {"bits": 4}), ("llama", QUANTIZED)],
)
def test_other_quantizations_are_refused(shape, quantization, tmp_path):
    facts = FAMILIES[shape].facts | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"quantization_config = .*; expected null"):
        families.read_config(tmp_path)
