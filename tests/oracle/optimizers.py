"""Optimizers of random experiments: those of optax, and a custom one that clips. Both sides call these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax


def clip_then_adamw(*, learning_rate: Any, max_norm: float, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """AdamW after a clip by the norm of all gradients, which needs learner.scope = model."""
    adamw = optax.adamw(learning_rate, eps=1e-4, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_norm), adamw)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: getattr(optax, name)
    for name in (
        "sgd", "adam", "adamw", "lion", "adafactor", "rmsprop", "adagrad", "lamb", "yogi", "adamaxw", "novograd",
        "adabelief", "sm3", "lars", "amsgrad", "adan",
    )
}  # fmt: skip
OPTIMIZERS |= {"muon": optax.contrib.muon, "clip_then_adamw": clip_then_adamw}
