"""Results of other implementations on the CPU: torchao's 8-bit AdamW, adam-mini's, and lomo-optim's AdaLomo."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any
from unittest import mock

import adam_mini
import lomo_optim
import numpy as np
import torch
from torchao.optim import quant_utils
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from tools.peers.optimizer_cases import (
    B1,
    B2,
    DECAY,
    DIM,
    EPS,
    HEADS,
    KV_HEADS,
    RATE,
    STEPS,
    Tensors,
    first,
    gradients,
    make_quantization_inputs,
)


def versions() -> dict[str, str]:
    """Return the versions of the compared packages."""
    return {name: version(name) for name in ("torch", "torchao", "adam_mini", "lomo-optim")}


def compute(name: str) -> Tensors:
    """Return the parameters after all steps, and for 8-bit AdamW its moments, map and codes."""
    params = {key: torch.nn.Parameter(torch.as_tensor(x)) for key, x in first(name).items()}
    more: Tensors = {}
    if name == "adamw8bit":
        more = _torchao(params)
    elif name == "adam_mini":
        shape: dict[str, Any] = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "verbose": False}
        rates: dict[str, Any] = {"lr": RATE, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY}
        optimizer = adam_mini.Adam_mini(params.items(), **rates, **shape)
        for step in range(STEPS):
            for key, g in gradients(name, step).items():
                params[key].grad = torch.as_tensor(g)
            optimizer.step()
    else:
        model = torch.nn.Module()
        for key, parameter in params.items():
            model.register_parameter(key.replace(".", "_"), parameter)
        with mock.patch.object(torch.Tensor, "cuda", lambda self: self):  # for its moments; the rest runs anywhere
            optimizer = lomo_optim.AdaLomo(model, lr=RATE, weight_decay=DECAY)
        for step in range(STEPS):
            loss = sum((params[key] * torch.as_tensor(g)).sum() for key, g in gradients(name, step).items())
            optimizer.fused_backward(loss, RATE)
    return {key: parameter.detach().numpy().copy() for key, parameter in params.items()} | more


def _torchao(params: dict[str, Any]) -> Tensors:
    """Call the function that torchao's AdamW8bit compiles, because compiling it needs a C++ compiler."""
    moments, more = {}, {}
    for key, p in params.items():
        large = p.numel() >= 4096
        zeros = lambda signed, p=p: OptimState8bit.zeros(p.shape, signed, 256)  # noqa: E731
        moments[key] = (zeros(True), zeros(False)) if large else (torch.zeros_like(p), torch.zeros_like(p))
    for step in range(STEPS):
        for key, g in gradients("adamw8bit", step).items():
            rate, count = torch.tensor(RATE), torch.tensor(step + 1.0)
            mu, nu = moments[key]
            gradient = torch.as_tensor(g)
            single_param_adam(
                params[key].detach(), gradient, count, mu, nu, None, rate, B1, B2, DECAY, EPS, True, False
            )
    for i, part in enumerate(("mu", "nu")):
        state = moments["mlp.weight"][i]
        more |= {f"{part}/codes": state.codes.numpy(), f"{part}/scale": state.scale.numpy()}
    for signed in (True, False):
        table = torch.tensor(quant_utils.create_dynamic_map(signed=signed))
        x = torch.as_tensor(make_quantization_inputs(signed=signed))
        codes = quant_utils.quantize_8bit_with_qmap(x, table)
        more |= {f"map/{signed}": table.numpy(), f"codes/{signed}": codes.numpy().astype(np.uint8)}
    return more
