"""The maximal update parametrization (muP): hyperparameters found for a narrow model also suit wider ones.

From "Tensor Programs V" (Yang et al. 2022, arXiv 2203.03466), table 8, for Adam and its relatives. A model is
parametrized relative to a base model of the same layers, by the ratio m of their widths:

    matrices of hidden units    initial variance / m,   learning rate / m
    tables, vectors             unchanged
    logits                      divided by m
    logits of attention         divided by H instead of sqrt(H), for H channels of a head; equal for the base model

At the base width nothing changes. A decoupled weight decay is multiplied by the learning rate, so its coefficient grows
by m, and the decay of a step stays the same. Muon is left as it is: the norm of its updates suits all widths ("A
Spectral Condition for Feature Learning", Yang et al. 2023, arXiv 2310.17813).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import optax

from plimsoll.extras.largest.size_family import Size, SizeFamily
from plimsoll.framework.config import Config, ConfigError, config_for, get_target
from plimsoll.framework.layout import ParameterSpec, flatten
from plimsoll.framework.learner.rules import FROZEN, Rule, label, unstack
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.optimizers.adam_mini import adam_mini
from plimsoll.framework.optimizers.matrices import muon
from plimsoll.framework.optimizers.parameter_kinds import classify_parameter
from plimsoll.framework.optimizers.quantized import adamw8bit

# Optimizers whose updates do not depend on the scale of gradients.
_ADAPTIVE = (optax.adamw, optax.adam, optax.nadamw, optax.lion, adam_mini, adamw8bit)
_UNCHANGED = (muon, optax.contrib.muon)
# Fields of schedules that are rates.
_RATE_FIELDS = ("value", "init_value", "peak_value", "end_value")
# All widths have to grow alike, to this relative difference: published families round the width of their MLPs.
_TOLERANCE = 0.1
# A new width of an MLP is a multiple of a large power of two, if that changes it by at most this.
_ROUNDING = 0.02


def apply_mup(config: Config, base: Config) -> Config:
    """Return a copy of an experiment's config, parametrized relative to a base config.

    Args:
        config: config of the experiment, with the learning rates and initial standard deviations of the base model.
        base: config with a model of the same layers and another width.

    Raises:
        ConfigError: the models have different parameters, their widths do not grow alike, or muP has no rule for the
            optimizer.
    """
    scaled = config.copy()
    ratio = config.model.dim / base.model.dim
    hidden_matrices = _find_hidden_matrices(config, base, ratio)
    if ratio != 1:
        scaled.learner.rules = [*_make_rules(config, hidden_matrices, ratio), *scaled.learner.rules]
        for stack in _get_stacks(scaled):
            for _, part in stack.walk():
                # Other initializers, such as variance_scaling, depend on the shape of the matrix already.
                if isinstance(part, Config) and part.takes("init") and part.init.takes("stddev"):
                    part.init.stddev /= math.sqrt(ratio)
        scaled.model.head.logit_divisor = (config.model.head.logit_divisor or 1.0) * ratio
    for layer, base_layer in zip(_iter_attention(scaled), _iter_attention(base), strict=True):
        channels, base_channels = _count_channels(layer, scaled), _count_channels(base_layer, base)
        if channels != base_channels:
            layer.scale = (layer.scale or base_channels**-0.5) * base_channels / channels
    return scaled


def widen(config: Config, heads: int, *, mup: bool = True) -> Config:
    """Return a config with a wider or narrower model of the same depth, head dimension and ratio of MLP to width.

    Args:
        config: config of an experiment with a language model.
        heads: number of heads of attention, to which the width is proportional.
        mup: parametrize the model by muP relative to `config`, see `apply_mup`. Otherwise only the sizes change.

    Raises:
        ConfigError: the layers are not Blocks with the same number of heads, heads that share keys and values do not
            divide this number, or as in `apply_mup`.
    """
    if heads < 1:
        raise ConfigError(f"heads={heads}: expected at least 1")
    family = SizeFamily.derive(config, "a change of width", _ROUNDING)
    scaled = family.scale_config(Size(heads, family.known.layers))
    nearest = SizeFamily(scaled).known.heads
    if nearest != heads:
        raise ConfigError(
            f"heads={heads}: the heads that share keys and values do not divide this number; the nearest that works "
            f"is {nearest}"
        )
    return apply_mup(scaled, config) if mup else scaled


def _find_hidden_matrices(config: Config, base: Config, ratio: float) -> list[str]:
    """Return the paths of the matrices whose inputs grow with the width.

    Args:
        config, base: see `apply_mup`.
        ratio: ratio of the widths of the two models.
    """
    specs, base_specs = (_get_specs(one) for one in (config, base))
    different = sorted(specs.keys() ^ base_specs.keys())
    if different:
        raise ConfigError(f"muP: only one of the two models has {different[0]}; expected the same layers")
    paths = []
    for path, spec in specs.items():
        layer_spec = unstack(spec, spec.num_layers)
        if classify_parameter(layer_spec) not in ("matrix", "experts"):
            continue
        growth = spec.shape[-2] / base_specs[path].shape[-2]
        if abs(growth / ratio - 1) > _TOLERANCE:
            raise ConfigError(
                f"muP: the inputs of {path} grow {growth:.2f} times, but model.dim {ratio:.2f} times; expected the same"
            )
        paths.append(path)
    return paths


def _make_rules(config: Config, paths: list[str], ratio: float) -> list[Config]:
    """Return the learner's rules that divide the learning rates of some parameters by the ratio."""
    learner = config.learner
    specs = config.model.instantiate().parameter_specs()
    labels, optimizers = label(specs, learner.optimizer, [rule.instantiate() for rule in learner.rules])
    paths_by_label: dict[str, list[str]] = {}
    for path in paths:
        paths_by_label.setdefault(labels[path], []).append(path)
    rules = []
    for name, labeled_paths in paths_by_label.items():
        if name == FROZEN or get_target(optimizers[name]) in _UNCHANGED:
            continue
        pattern = "^(" + "|".join(re.escape(path) for path in labeled_paths) + ")$"
        rules.append(config_for(Rule, pattern=pattern, optimizer=_scale_optimizer(optimizers[name], ratio)))
    return rules


def _scale_optimizer(optimizer: Config, ratio: float) -> Config:
    """Return a copy of an optimizer's config with a learning rate that is smaller by the ratio."""
    target = get_target(optimizer)
    if target not in _ADAPTIVE:
        raise ConfigError(
            f"muP has no rule for the optimizer {target.__name__}; expected adamw, adam, nadamw, lion, adam_mini, "
            "adamw8bit or muon"
        )
    scaled = optimizer.copy()
    if isinstance(scaled.learning_rate, Config):
        schedule = scaled.learning_rate
        fields = [name for name in _RATE_FIELDS if schedule.takes(name)]
        if not fields:
            raise ConfigError(f"muP cannot scale the schedule {get_target(schedule).__name__}: it has no peak_value")
        for name in fields:
            schedule[name] = schedule[name] / ratio
    else:
        scaled.learning_rate = scaled.learning_rate / ratio
    if scaled.takes("weight_decay") and scaled.weight_decay:
        scaled.weight_decay = scaled.weight_decay * ratio
    return scaled


def _get_specs(config: Config) -> dict[str, ParameterSpec]:
    model = config.model.instantiate()
    if not isinstance(model, CausalLM):
        raise ConfigError("muP needs a language model")
    return flatten(model.parameter_specs())


def _get_stacks(config: Config) -> list[Config]:
    model = config.model
    return [model.stack] if model.first is None else [model.first, model.stack]


def _iter_attention(config: Config) -> Iterator[Config]:
    """Yield the attention of each layer of the pattern that multiplies its logits by `scale`."""
    for stack in _get_stacks(config):
        for layer in stack.pattern:
            if layer.attention.takes("scale"):
                yield layer.attention


def _count_channels(attention: Config, config: Config) -> int:
    """Return the number of channels of a head."""
    return attention.head_dim or config.model.dim // attention.num_heads
