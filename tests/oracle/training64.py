"""The reference's training: gradients of the whole batch in float64, clipping by the documented formulas, plain optax.

There is one tensor per layer and one optimizer per rule, without schedules, meshes or checkpoints. Microbatches matter
only to the balance loss of routers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from tests.oracle.batches import host_batch
from tests.oracle.experiments import Learner, Mixture, Optimizer, RandomExperiment
from tests.oracle.model64 import loss, prepare_batch
from tests.oracle.optimizers import OPTIMIZERS
from tests.oracle.parameters import first_values, path

Tensors = dict[str, Any]
FROZEN, DEFAULT = "frozen", "default"


class Result(NamedTuple):
    """Results to compare: losses and norms per step, and each tensor by name after the last step."""

    losses: list[float]
    norms: list[float]
    skipped: int
    parameters: dict[str, np.ndarray]
    averages: dict[str, np.ndarray]


def labels(names: list[str], drawn: RandomExperiment) -> dict[str, str]:
    """Return the label of each parameter's optimizer, or "frozen".

    The first rule whose pattern matches the path decides. With LoRA, only the adapters are trained.
    """

    def label(name: str) -> str:
        if drawn.model.lora is not None and not re.search("lora_[ab]$", name):
            return FROZEN
        for index, rule in enumerate(drawn.learner.rules):
            if re.search(rule.pattern, path(name)):
                return FROZEN if rule.freeze else f"rule{index}"
        return DEFAULT

    return {name: label(name) for name in names}


def train(drawn: RandomExperiment, perturbation: float = 0.0) -> Result:
    """Run all steps of the experiment.

    `perturbation` is the relative change, up or down, of each trained weight that the loss reads.
    """
    learner, values = drawn.learner, first_values(drawn)
    labelled = labels(list(values), drawn)
    frozen = {name: jnp.asarray(value) for name, value in values.items() if labelled[name] == FROZEN}
    params: Tensors = {name: jnp.asarray(value) for name, value in values.items() if name not in frozen}
    averages = dict(params) if learner.ema is not None else {}
    optimizers = _optimizers(learner)
    states = {label: one.init(_select(params, labelled, label)) for label, (one, _) in optimizers.items()}
    rng = np.random.default_rng(0)
    factors = {name: 1.0 + perturbation * rng.choice([-1.0, 1.0], value.shape) for name, value in params.items()}
    gradients = jax.jit(partial(_gradients, drawn, frozen, factors), static_argnums=2)
    update = jax.jit(partial(_update, drawn, optimizers, labelled))
    tensor_norms = {name: jnp.float32(0.0) for name in params}  # for clip_mode norm_growth
    losses, norms, skipped, last_norm = [], [], 0, 0.0
    for step in range(drawn.steps):
        value, grads = gradients(params, prepare_batch(host_batch(drawn, step)), _microbatches(drawn, step))
        norm = np.sqrt(sum(float(jnp.sum(grad**2)) for grad in grads.values()))
        losses.append(float(value))
        norms.append(float(norm))
        if not (np.isfinite(value) and np.isfinite(norm)):
            skipped += 1
            continue
        count = jnp.int32(step - skipped)
        factor = _clip_factor(learner, norm, last_norm)
        params, states, tensor_norms = update(params, states, tensor_norms, grads, factor, count)
        last_norm = float(np.float32(norm))  # the state's counter is a float32
        if learner.ema is not None:
            averages = {n: learner.ema * averages[n] + (1.0 - learner.ema) * params[n] for n in params}
    everything = {**frozen, **params}
    return Result(losses, norms, skipped, jax.device_get(everything), jax.device_get(averages))


def _select(tensors: Tensors, labelled: dict[str, str], label: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if labelled[name] == label}


def _microbatches(drawn: RandomExperiment, step: int) -> int:
    """Return the number of microbatches in which routers are balanced separately; no other loss depends on it."""
    mixtures = [layer.mlp for layer in drawn.model.layers if isinstance(layer.mlp, Mixture)]
    if all(one.router.balance_over == "sequence" for one in mixtures):
        return 1
    return [phase.accumulate for phase in drawn.phases if phase.start <= step][-1]


def _gradients(
    drawn: RandomExperiment, frozen: Tensors, factors: Tensors, params: Tensors, batch: Tensors, microbatches: int
) -> Any:
    """Return the loss at weights multiplied by `factors`, and its gradients.

    In mixed precision, weights (except adapters) and their gradients are rounded to bfloat16.
    """

    def read_weight(name: str, x: jax.Array) -> jax.Array:
        is_narrow = drawn.precision == "mixed" and not re.search("lora_[ab]$", name)
        return x.astype(ml_dtypes.bfloat16).astype(jnp.float64) if is_narrow else x

    def objective(params: Tensors) -> jax.Array:
        return loss(drawn.model, {**frozen, **params}, batch, microbatches)

    value, grads = jax.value_and_grad(objective)(
        {name: read_weight(name, x) * factors[name] for name, x in params.items()}
    )
    return value, {name: read_weight(name, grad) for name, grad in grads.items()}


def _clip_factor(learner: Learner, norm: float, last_norm: float) -> float:
    """Return the factor that multiplies all gradients."""
    if learner.clip is None:
        return 1.0
    if learner.clip_mode == "global_norm":
        return min(1.0, learner.clip / norm) if norm > 0 else 1.0
    if learner.clip_mode == "previous_norm":
        return min(1.0, learner.clip / last_norm) if last_norm > 0 else 1.0
    return 1.0


def _update(
    drawn: RandomExperiment,
    optimizers: dict[str, Any],
    labelled: dict[str, str],
    params: Tensors,
    states: Tensors,
    tensor_norms: Tensors,
    grads: Tensors,
    factor: Any,
    count: Any,
) -> tuple[Tensors, Tensors, Tensors]:
    """Make one optax update, and return (parameters, optimizer states, tensor norms for clip_mode norm_growth)."""
    learner = drawn.learner
    grads = {name: grad * factor for name, grad in grads.items()}
    if learner.clip is not None and learner.clip_mode == "norm_growth":
        grads, tensor_norms = _limit_growth(grads, tensor_norms, learner.clip)
    new_params, new_states = dict(params), {}
    for label, (optimizer, rate) in optimizers.items():
        weights = _select(params, labelled, label)
        changes, new_states[label] = optimizer.update(_select(grads, labelled, label), states[label], weights)
        if learner.clip is not None and learner.clip_mode == "update_rms":
            changes = {name: _limit_rms(change, learner.clip * rate(count)) for name, change in changes.items()}
        new_params.update({name: weight + changes[name] for name, weight in weights.items()})
    return new_params, new_states, tensor_norms


def _limit_rms(change: jax.Array, bound: Any) -> jax.Array:
    """Adafactor's update clipping (arXiv 1804.04235, section 6); `change` includes the learning rate."""
    rms = jnp.sqrt(jnp.mean(change**2))
    return jnp.where(rms > bound, change * (bound / jnp.where(rms > 0, rms, 1.0)), change)


def _limit_growth(grads: Tensors, before: Tensors, growth: float) -> tuple[Tensors, Tensors]:
    """The norm-growth limiter of Fira (arXiv 2410.01623): each tensor's norm is at most `growth` times its last one."""
    new, norms = {}, {}
    for name, grad in grads.items():
        norm, bound = jnp.sqrt(jnp.sum(grad**2)), growth * before[name].astype(jnp.float64)
        is_limited = (before[name] > 0) & (norm > bound)
        new[name] = jnp.where(is_limited, grad * (bound / jnp.where(norm > 0, norm, 1.0)), grad)
        norms[name] = jnp.where(is_limited, bound, norm).astype(jnp.float32)
    return new, norms


def _optimizers(learner: Learner) -> dict[str, tuple[optax.GradientTransformation, Callable[[Any], Any]]]:
    """Return {label: (transformation, learning rate as a function of the number of updates)}."""
    drawn = {DEFAULT: learner.optimizer}
    for index, rule in enumerate(learner.rules):
        if not rule.freeze:
            drawn[f"rule{index}"] = (
                _change_fields(learner.optimizer, rule.set) if rule.optimizer is None else rule.optimizer
            )
    return {label: _build(one) for label, one in drawn.items()}


def _change_fields(optimizer: Optimizer, fields: dict[str, Any]) -> Optimizer:
    rate = fields.get("learning_rate", optimizer.rate)
    others = {name: value for name, value in fields.items() if name != "learning_rate"}
    return Optimizer(optimizer.name, rate, {**optimizer.fields, **others})


def _build(optimizer: Optimizer) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    if isinstance(optimizer.rate, tuple):
        name, fields = optimizer.rate
        rate = getattr(optax, name)(**fields)
        return OPTIMIZERS[optimizer.name](learning_rate=rate, **optimizer.fields), rate
    number = optimizer.rate
    return OPTIMIZERS[optimizer.name](learning_rate=number, **optimizer.fields), lambda count: number
