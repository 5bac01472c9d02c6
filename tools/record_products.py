"""Records 8-bit products and 8-bit blocks of torchao, so that `make test` needs neither torch nor torchao.

    python -m tools.record_products

Writes tests/layers/recorded/torchao.npz. Needs the `peers` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np

RECORDED = Path(__file__).parents[1] / "tests/layers/recorded/torchao.npz"
CASES = ("normal", "spread")


def draw_inputs(case: str) -> dict[str, np.ndarray]:
    """Return x [B, S, I], weight [I, O] and y_grad [B, S, O] of a case, float32.

    Args:
        case: "normal" for normally distributed numbers; in "spread", rows and columns differ by factors of up to 100.
    """
    rng = np.random.default_rng(7)
    arrays = {}
    for name, shape, size in (("x", (2, 24, 64), 1.0), ("weight", (64, 96), 0.1), ("y_grad", (2, 24, 96), 1e-3)):
        values = size * rng.normal(size=shape)
        if case == "spread":
            values *= np.exp(rng.normal(size=(*shape[:-1], 1))) * np.exp(rng.normal(size=shape[-1]))
        arrays[name] = values.astype(np.float32)
    return arrays


def compute(case: str) -> dict[str, np.ndarray]:
    """Return the inputs of a case and y, x_grad and weight_grad of torchao: e4m3 forward, e5m2 cotangents, a scale for
    each array, rounded to a power of two, computed from the array ("dynamic")."""
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inputs = draw_inputs(case)
    linear = torch.nn.Linear(64, 96, bias=False)
    linear.weight.data = torch.tensor(inputs["weight"].T.copy())
    # The product is computed in float32 from the rounded numbers, as CPUs have none of 8 bits.
    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
    model = convert_to_float8_training(torch.nn.Sequential(linear), config=config)
    x = torch.tensor(inputs["x"], requires_grad=True)
    y = model(x)
    y.backward(torch.tensor(inputs["y_grad"]))
    assert x.grad is not None
    weight_grad = model[0].weight.grad
    return {**inputs, "y": y.detach().numpy(), "x_grad": x.grad.numpy(), "weight_grad": weight_grad.numpy().T}


def compute_blocks() -> dict[str, np.ndarray]:
    """Return x [M, K], and torchao's MXFP8 form of it: the bits of values [M, K] and of scales [M, K / 32], uint8."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x = draw_inputs("spread")["x"].reshape(48, 64)
    x[1, 5] = 1e-30
    x[2] = 2.0**-100
    x[3, 7] = 448.0 * 2.0**9
    scales, values = to_mx(torch.tensor(x), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return {"x": x, "values": values.view(torch.uint8).numpy(), "scales": scales.view(torch.uint8).numpy()}


def draw_tiles() -> np.ndarray:
    """Return x [128, 256], float16, whose largest magnitude in each row and column of a tile is 448 times a power of 2.

    The scales of torchao's `blockwise_fp8_training`, which need not be powers of two, then are.
    """
    rng = np.random.default_rng(11)
    # Few bits, so that the file is small.
    x = rng.integers(-127, 128, size=(128, 256)) * np.exp2(rng.integers(-16, -6, size=(128, 1)))
    for tile in range(2):
        columns = 128 * tile + rng.permutation(128)
        x[np.arange(128), columns] = rng.choice([-448.0, 448.0], 128) * np.exp2(rng.integers(-4, 5, 128))
    return x.astype(np.float16)


def compute_tiles() -> dict[str, np.ndarray]:
    """Return x, and torchao's e4m3 numbers of it (as bits) and scales: blocks of 1 x 128, 128 x 1 and 128 x 128."""
    import torch
    import torch._inductor.runtime.hints

    # The module has kernels for GPUs next to the formulas. PyTorch itself must see that Triton is not there.
    for name in ("triton", "triton.language"):
        sys.modules.setdefault(name, MagicMock())
    from torchao.prototype.blockwise_fp8_training import kernels

    x = draw_tiles()
    arrays = {"x": x}
    for name, function in (
        ("row", kernels.torch_blockwise_scale_act_quant_lhs),
        ("column", kernels.torch_blockwise_scale_act_quant_rhs),
        ("square", kernels.torch_blockwise_scale_weight_quant),
    ):
        values, scales = function(torch.tensor(x.astype(np.float32)))
        arrays |= {f"{name}_values": values.view(torch.uint8).numpy(), f"{name}_scales": scales.numpy()}
    return arrays


def main() -> None:
    """Write the recorded arrays."""
    arrays = {f"{case}/{name}": array for case in CASES for name, array in compute(case).items()}
    arrays |= {f"blocks/{name}": array for name, array in compute_blocks().items()}
    arrays |= {f"tiles/{name}": array for name, array in compute_tiles().items()}
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **arrays)  # pyright: ignore[reportArgumentType]
    print(f"{RECORDED.name}: {RECORDED.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
