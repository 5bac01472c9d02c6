"""Weights in FP8 with block scales: values, slices, a directory of DeepSeek-V3, and inconsistent directories."""

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
from tests.pretrained.test_pretrained import directory
from tools.peers.families import FAMILIES

BLOCK = (8, 6)
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (codes, uint8 [O, I]; scales, float32; the numbers they stand for, bfloat16), block by block."""
    rows, columns = -(-x.shape[0] // BLOCK[0]), -(-x.shape[1] // BLOCK[1])
    codes = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((rows, columns), np.float32)
    exact = np.zeros(x.shape, ml_dtypes.bfloat16)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scales[row, column] = np.abs(x[place]).max() / 448.0
            codes[place] = (x[place] / scales[row, column]).astype(ml_dtypes.float8_e4m3fn)
            product = codes[place].astype(np.float32) * scales[row, column]
            exact[place] = product.astype(ml_dtypes.bfloat16)
    return codes.view(np.uint8), scales, exact


def write_fp8(folder: Path, quantization: dict | None = QUANTIZED, drop: str = "") -> dict[str, np.ndarray]:
    """Write a DeepSeek-V3 whose projections are in FP8, and return the numbers of its tensors."""
    facts = {} if quantization is None else {"quantization_config": quantization}
    directory(folder, "deepseek-v3", shards=1, **facts)
    (file,) = folder.glob("*.safetensors")
    numbers, stored, codes = load_file(file), {}, []
    for name, array in numbers.items():
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], numbers[name] = quantize(array)
            codes.append(name)
        else:
            stored[name] = array
    stored.pop(drop, None)
    (folder / "model.safetensors.index.json").unlink()
    file.unlink()
    save_file(stored, folder / "model.safetensors")
    # safetensors cannot write the dtype from numpy arrays, so the header of the bytes is changed.
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name in codes:
        header.get(name, {})["dtype"] = "F8_E4M3"
    text = json.dumps(header, separators=(",", ":")).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return numbers


def test_slices_equal_the_whole_tensor(tmp_path: Path):
    numbers = write_fp8(tmp_path)
    read = Directory(tmp_path)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    tensor = read.tensor(name)
    # Neither size is a multiple of the block's.
    assert tensor.get_shape() == [20, 32]
    assert tensor.get_dtype() == "BF16"
    for rows in (slice(None), slice(0, 5), slice(7, 9), slice(15, 20), slice(4, 4)):
        for columns in (slice(None), slice(5, 6), slice(6, 19), slice(31, 32)):
            part = tensor[(rows, columns)]
            assert part.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(part, numbers[name][rows, columns])


@pytest.mark.pairs
def test_directory_loads_and_exports_as_floats(tmp_path: Path):
    numbers = write_fp8(tmp_path / "in")
    config = configs.load(f"hf:{tmp_path / 'in'}")
    config.data.seq_len, config.data.global_batch_size = 16, 8
    config.model.param_dtype = "bfloat16"
    program = Program(config.instantiate(), jax.devices()[:1])
    state = program.experiment.pretrained.init(program)
    facts, family = families.export_config(config.model, config.pretrained.facts)
    export_model(tmp_path / "out", program.experiment.model, program.weights(state), family, facts)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == numbers.keys()
    for name, array in numbers.items():
        # The biases of the routers are constants, and rounding would change the choice of experts.
        dtype = np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        assert exported[name].dtype == dtype, name
        np.testing.assert_array_equal(exported[name], array.astype(dtype), err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def read_headers(folder: Path) -> list[list[int]]:
    """Return the shapes of all tensors of a directory."""
    read = Directory(folder)
    return [read.tensor(name).get_shape() for name in read.home]


@pytest.mark.parametrize(
    ("quantization", "drop", "message"),
    [
        (None, "", "config.json has no quantization_config of fp8, but the files have tensors such as"),
        (
            QUANTIZED,
            "model.layers.0.self_attn.o_proj.weight",
            "o_proj.weight_scale_inv has no matching model.layers.0.self_attn.o_proj.weight",
        ),
        ({**QUANTIZED, "weight_block_size": [16, 6]}, "", "F32 .*, given F8_E4M3"),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(tmp_path: Path, quantization, drop, message):
    write_fp8(tmp_path, quantization, drop)
    with pytest.raises(ValueError, match=message):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quantization_config = .*awq.*; expected null, or quant_method fp8"),
        ({"quant_method": "mxfp4"}, "expected null, or quant_method fp8"),
        (
            {**QUANTIZED, "weight_block_size": None},
            r"quantization_config\.weight_block_size = None; expected the number",
        ),
        ({**QUANTIZED, "weight_block_size": [128]}, r"weight_block_size = \[128\]; expected"),
        ({**QUANTIZED, "fmt": "e5m2"}, "fmt = 'e5m2'; expected e4m3"),
        ({**QUANTIZED, "activation_scheme": "static"}, "activation_scheme = 'static'; expected dynamic"),
        ({**QUANTIZED, "kv_cache_scheme": {}}, "expected null, or quant_method fp8"),
    ],
)
def test_other_quantizations_are_refused(tmp_path: Path, quantization, message):
    facts = FAMILIES["deepseek-v3"].facts | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=message):
        families.load_model_config(tmp_path)
