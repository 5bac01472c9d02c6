"""Cases for comparing optimizers with other implementations: parameters, gradients, and our results.

Parameters have torch's layout, [out, in]; ours are the transposes, except for embedding tables. Numbers are hashes of
their positions, so they are the same everywhere and need not be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from plimsoll.framework.layout import ParameterSpec
from plimsoll.framework.optimizers.adalomo import adalomo
from plimsoll.framework.optimizers.adam_mini import adam_mini
from plimsoll.framework.optimizers.quantized import adamw8bit

Tensors = dict[str, np.ndarray]
FOLDER = Path(__file__).resolve().parents[2] / "tests" / "optimizers" / "recorded"
RATE, B1, B2, EPS, DECAY, STEPS = 1e-2, 0.9, 0.99, 1e-8, 0.1, 24
DIM, HEADS, KV_HEADS = 16, 4, 2


@dataclass(frozen=True)
class Parameter:
    """One torch parameter: its shape, the roles of our axes (in our order), and further fields of our spec."""

    shape: tuple[int, ...]
    roles: tuple[str, ...]
    num_heads: int | None = None
    decay: float = DECAY

    @property
    def spec(self) -> ParameterSpec:
        """Our spec of the parameter."""
        shape = self.shape if "vocab" in self.roles else self.shape[::-1]
        return ParameterSpec(shape, "float32", roles=self.roles, num_heads=self.num_heads)

    def flip(self, x: Any) -> Any:
        """Convert a tensor from their layout to ours, or back."""
        return x if "vocab" in self.roles else x.T


# For each optimizer, by adam-mini's names of parameters; adam-mini does not decay norms.
CASES: dict[str, dict[str, Parameter]] = {
    "adamw8bit": {"mlp.weight": Parameter((20, 512), ("in", "out")), "small.weight": Parameter((8, 16), ("in", "out"))},
    "adam_mini": {
        "embed_tokens.weight": Parameter((13, DIM), ("vocab", "out")),
        "lm_head.weight": Parameter((13, DIM), ("vocab", "in")),
        "q_proj.weight": Parameter((DIM, DIM), ("in", "heads"), num_heads=HEADS),
        "k_proj.weight": Parameter((DIM // 2, DIM), ("in", "heads"), num_heads=KV_HEADS),
        "v_proj.weight": Parameter((DIM // 2, DIM), ("in", "heads")),
        "o_proj.weight": Parameter((DIM, DIM), ("heads", "out")),
        "mlp.up_proj.weight": Parameter((24, DIM), ("in", "hidden")),
        "mlp.down_proj.weight": Parameter((DIM, 24), ("hidden", "out")),
        "layernorm.weight": Parameter((DIM,), ("channel",), decay=0.0),
    },
    "adalomo": {
        "wide.weight": Parameter((12, 40), ("in", "out")),
        "high.weight": Parameter((40, 12), ("in", "out")),
        "square.weight": Parameter((16, 16), ("in", "out")),
        "norm.weight": Parameter((40,), ("channel",)),
    },
}


def numbers(shape: tuple[int, ...], stream: int) -> np.ndarray:
    """Return float32 numbers, uniform in +-[0.02, 1], so that an 8-bit second moment cannot become zero."""
    x = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(stream << 32)
    with np.errstate(over="ignore"):  # splitmix64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    size = 0.02 + 0.98 * (x >> np.uint64(40)).astype(np.float64) / 2.0**24
    return np.where(x & np.uint64(1), size, -size).astype(np.float32).reshape(shape)


def first(name: str) -> Tensors:
    """Return the parameters before training."""
    return {key: 0.5 * numbers(one.shape, 1000 + i) for i, (key, one) in enumerate(CASES[name].items())}


def gradients(name: str, step: int) -> Tensors:
    """Return the gradients of a step, counted from 0; large in some steps, small in others."""
    size = np.float32(2.0 ** (step * 5 % 7 - 3))
    return {key: size * numbers(one.shape, 64 * step + i) for i, (key, one) in enumerate(CASES[name].items())}


def ours(name: str) -> tuple[Tensors, Any]:
    """Return (the parameters after all steps, in torch's layout; the last state)."""
    adam: dict[str, Any] = {"learning_rate": RATE, "b1": B1, "b2": B2, "eps": EPS}
    cases, params, state = CASES[name], {}, {}
    for decay in {one.decay for one in cases.values()}:
        chosen = {key: one for key, one in cases.items() if one.decay == decay}
        made: dict[str, Any] = {
            "adamw8bit": adamw8bit(weight_decay=decay, **adam),
            "adam_mini": adam_mini(weight_decay=decay, **adam),
            "adalomo": adalomo(learning_rate=RATE, weight_decay=decay),
        }
        optimizer = made[name]
        if getattr(optimizer, "fit_to_specs", None) is not None:
            optimizer = optimizer.fit_to_specs({key: one.spec for key, one in chosen.items()})
        flip = lambda tree, chosen=chosen: {key: one.flip(tree[key]) for key, one in chosen.items()}  # noqa: E731
        own, update = flip(first(name)), jax.jit(optimizer.update)
        state = optimizer.init(own)
        for step in range(STEPS):
            changes, state = update(flip(gradients(name, step)), state, own)
            own = optax.apply_updates(own, changes)
        params |= {key: chosen[key].flip(np.asarray(value)) for key, value in own.items()}  # type: ignore[union-attr]
    return params, state


def make_quantization_inputs(*, signed: bool) -> np.ndarray:
    """Return float32[4000] in [-1, 1] or [0, 1] across all decades: the input of both sides' code search."""
    x = numbers((4000,), 77) * 10.0 ** (-4 - 4 * numbers((4000,), 78).astype(np.float64))
    return np.clip(x if signed else np.abs(x), -1, 1).astype(np.float32)
