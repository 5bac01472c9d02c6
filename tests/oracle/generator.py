"""Draws a whole experiment from a seed: a model, a learner, batches, and one or more phases of a run.

The framework should accept every drawn experiment, so this module follows the rules in docs/memory.md and in errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np

from tests.oracle import experiments as plain
from tests.oracle.generator_attention import (
    has_whole_words,
    with_factors,
    with_gates,
    with_linear_attention,
    with_state_space,
)
from tests.oracle.generator_learner import INSENSITIVE, SMOOTH, draw_learner, draw_optimizer
from tests.oracle.generator_mixtures import list_widths, with_mixtures
from tests.oracle.parameters import parameter_shapes, path

DEVICES = 8
# Indices of random streams other than that of most settings, which thus stay the same for a seed.
MIXTURES, GATES, LINEAR_ATTENTION, STATE_SPACE, FACTORS = 1, 2, 3, 4, 5
_T = TypeVar("_T")


class Dice:
    """A random generator with helper methods for drawing settings."""

    def __init__(self, seed: int | tuple[int, ...]):
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < probability)

    def pick(self, values: Sequence[_T]) -> _T:
        """Return one of the values."""
        return values[int(self.rng.integers(len(values)))]

    def between(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def log_uniform(self, low: float, high: float) -> float:
        """Return a log-uniform number, rounded to three digits."""
        return float(f"{math.exp(self.rng.uniform(math.log(low), math.log(high))):.3g}")


def draw(seed: int) -> plain.RandomExperiment:
    """Return the experiment of a seed."""
    dice = Dice(seed)
    precision = dice.pick(["float64"] * 8 + ["float32", "mixed"])
    optimizer = draw_optimizer(dice, {"float32": INSENSITIVE, "mixed": SMOOTH}.get(precision))
    # Rounding errors are 1e-8 in float32, not 1e-16. Adam turns them into 1e-4 of an update even with a large eps.
    is_sensitive = optimizer.name not in INSENSITIVE or precision != "float64"
    model = _model(dice, precision=precision, is_sensitive=is_sensitive)
    if precision == "float64":
        # float32 rounding could change which experts a token is sent to.
        model = with_mixtures(Dice((seed, MIXTURES)), model, is_sensitive=is_sensitive)
    model = with_gates(Dice((seed, GATES)), model, is_sensitive=is_sensitive)
    if precision == "float64":
        # Their norms, and a norm after them, amplify the rounding errors of small results.
        model = with_linear_attention(Dice((seed, LINEAR_ATTENTION)), model)
        model = with_state_space(Dice((seed, STATE_SPACE)), model)
    model = with_factors(Dice((seed, FACTORS)), model)
    shapes = parameter_shapes(model)
    paths = list(dict.fromkeys(path(name) for name in shapes))
    learner = draw_learner(dice, optimizer, model, paths, precision)
    seq_len = dice.pick([8, 12, 16])
    data = plain.Data(
        seq_len=seq_len if model.positions is None else min(seq_len, model.positions),
        batch=dice.pick([4, 8, 8, 12, 16]),
        documents=dice.chance(0.5),
        fractions=dice.chance(0.2),
    )
    steps = 4
    count = dice.pick([1] * 11 + [2] * 8 + [3])
    starts = [0, *sorted(dice.rng.choice(np.arange(1, steps), count - 1, replace=False).tolist())]
    phases = tuple(_phase(dice, int(start), model, learner, data) for start in starts)
    empty, poisoned = _bad_rows(dice, phases, steps)
    data = plain.Data(data.seq_len, data.batch, data.documents, data.fractions, empty, poisoned)
    return plain.RandomExperiment(seed, model, learner, data, phases, steps, precision)


# --- the model -------------------------------------------------------------------------------------------------------


def _model(dice: Dice, *, precision: str, is_sensitive: bool) -> plain.Model:
    length = dice.pick([1, 1, 2, 2, 3])
    repeats = dice.pick([n for n in (1, 2, 3, 4) if n * length <= 4])
    kv_heads = dice.pick([1, 2, 2, 4])
    layers = tuple(_layer(dice, kv_heads, is_sensitive=is_sensitive) for _ in range(length))
    shared = [index for index in range(length) if dice.chance(0.25)]
    streams = dice.pick(["one", "one", "one", "float32", "fixed"])
    dim = dice.pick([8, 8, 16])
    model = plain.Model(
        dim=dim,
        vocab=4 * dice.between(4, 10) if dice.chance(0.6) else dice.between(13, 40),
        layers=layers,
        repeats=repeats,
        shared=tuple(shared[: length - 1]),
        streams=streams,
        positions=dice.pick([None, None, 8, 16, 24]),
        embed_scale=dice.pick([None, None, round(math.sqrt(dim), 3)]),
        head_norm=_norm(dice),
        tied=dice.chance(0.5),
        z_loss=dice.pick([0.0, 0.0, 1e-2]),
        head_softcap=dice.pick([None, None, None, 5.0]),
        chunk_tokens=dice.pick([0, 5, 16, 1024]),
        lora=_lora(dice, layers) if dice.chance(0.2) else None,
    )
    # Different float32 rounding could give another multiple of 2^-12.
    return replace(model, streams="float32") if streams == "fixed" and precision != "float64" else model


def _norm(dice: Dice) -> plain.Norm:
    eps = dice.pick([1e-6, 1e-5, 1e-3])
    if dice.chance(0.5):
        return plain.Norm("rms", eps, zero_centered=dice.chance(0.3))
    return plain.Norm("layer", eps, bias=dice.chance(0.7))


def _layer(dice: Dice, kv_heads: int, *, is_sensitive: bool) -> plain.Layer:
    mlp = plain.MLP(
        hidden=4 * dice.between(2, 6),
        activation=dice.pick(["gelu", "gelu_tanh", "silu", "relu", "relu_squared"]),
        gated=dice.chance(0.5),
        bias=dice.chance(0.3),
    )
    layer_kv_heads = kv_heads if dice.chance(0.7) else dice.pick([1, 2, 4])
    attention = _attention(dice, layer_kv_heads, is_sensitive=is_sensitive)
    return plain.Layer(attention, mlp, _norm(dice), _norm(dice) if dice.chance(0.25) else None)


def _attention(dice: Dice, kv_heads: int, *, is_sensitive: bool) -> plain.Attention:
    theta = dice.pick([None, 10.0, 10_000.0])
    scaling = dice.pick(
        [
            None,
            ("linear", {"factor": 2.5}),
            ("llama3", {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 20}),
        ]
    )
    # The softmax is invariant to a bias that is added to all keys. The gradient of such a bias is only rounding error,
    # which optimizers that divide by the gradient turn into full updates.
    has_key_bias = theta is not None or not is_sensitive
    qk_norm = dice.pick([None, None, plain.Norm("rms", 1e-5), plain.Norm("layer", 1e-5, bias=has_key_bias)])
    head_dim = dice.pick([4, 6, 8])
    return plain.Attention(
        heads=kv_heads * dice.pick([1, 1, 2, 3]),
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=dice.chance(0.3) and has_key_bias,
        output_bias=dice.chance(0.3),
        rope_theta=theta,
        rope_scaling=scaling if theta is not None else None,
        qk_norm=qk_norm,
        window=dice.pick([None, None, 2, 5]),
        softcap=dice.pick([None, None, 2.0]),
        scale=dice.pick([None, None, 0.3]),
    )


def _lora(dice: Dice, layers: tuple[plain.Layer, ...]) -> plain.LoRA:
    bases = [None, None, "int8"]
    has_words = all(has_whole_words(layer.attention) for layer in layers)
    return plain.LoRA(
        rank=dice.pick([1, 2, 4]),
        alpha=dice.pick([1.0, 4.0, 32.0]),
        targets=dice.pick([".", "attention", "query|value", "mlp", "block0", "block0/attention/output"]),
        base=dice.pick(bases) if has_words else None,
    )


# --- phases of a run -------------------------------------------------------------------------------------------------


def _phase(dice: Dice, start: int, model: plain.Model, learner: plain.Learner, data: plain.Data) -> plain.Phase:
    updates = ["after_backward", "streamed", "in_backward", "layer_programs"]
    update = "after_backward" if learner.scope == "model" else dice.pick(updates)
    gradients = {"streamed": ["device", "pinned_host"], "layer_programs": ["device", "pinned_host", "none"]}.get(
        update, ["device"]
    )
    gradients = dice.pick(gradients)
    parts = [n for n in (1, 2, 3, 4) if data.batch % n == 0]
    accumulate = 1 if update == "in_backward" or gradients == "none" else dice.pick([1, *parts])
    parameters = activations = "device"
    if update != "after_backward":
        parameters = dice.pick(["device", "pinned_host"])
        activations = dice.pick(["device", "pinned_host"])
    remat = _remat(dice, model, update, activations)
    places = {
        "gradients": gradients,
        "optimizer_state": dice.pick(["device", "pinned_host"]),
        "parameters": parameters,
        "activations": activations,
    }
    # The group size would have to divide the length of every layer range.
    has_groups = remat.startswith("sqrt:")
    if learner.scope == "layer" and model.repeats > 1 and not has_groups and dice.chance(0.5):
        places = {field: _place_some_layers(dice, model, place) for field, place in places.items()}
        remat = _limit_policy(dice, model, remat, update)
    return plain.Phase(
        start=start,
        mesh=_mesh(dice, model, data, accumulate),
        update=update,
        **places,
        remat=remat,
        unroll=dice.between(0, model.repeats),
        accumulate=accumulate,
    )


def _place_some_layers(dice: Dice, model: plain.Model, place: str) -> str:
    """Return the placement for all layers, or for the first few."""
    if place != "pinned_host" or dice.chance(0.3):
        return place
    repeats = dice.between(1, model.repeats)
    # Written as a fraction of the layers, or as their number.
    return f"{place}:{repeats / model.repeats:.6f}" if dice.chance(0.5) else f"{place}:{repeats * len(model.layers)}"


def _limit_policy(dice: Dice, model: plain.Model, remat: str, update: str) -> str:
    """Return the policy for all layers, or for the first ones, with `full` for the others."""
    # Groups would have to divide the remaining layers; layer_programs inverts all layers or none.
    if ":" in remat or ("invert" in remat and update == "layer_programs") or dice.chance(0.3):
        return remat
    repeats = dice.between(1, model.repeats - 1)
    return f"{remat}:{repeats * len(model.layers)},full"


def _mesh(dice: Dice, model: plain.Model, data: plain.Data, accumulate: int) -> dict[str, int]:
    """Return axis sizes that divide the experiment's sizes, for 1, 2, 4 or 8 devices."""
    attentions = [layer.attention for layer in model.layers]
    softmax = [one for one in attentions if isinstance(one, plain.Attention)]
    # Heads that share one key are divided, and their key is not.
    divided = [
        one.key_heads if one.key_heads > 1 else one.heads
        for one in attentions
        if isinstance(one, plain.LinearAttention)
    ]
    divided += [one.groups if one.groups > 1 else one.heads for one in attentions if isinstance(one, plain.StateSpace)]
    # gcd() of nothing is 0, which every number divides.
    heads = math.gcd(*divided, *(attention.kv_heads for attention in softmax))
    hidden = math.gcd(*(width for layer in model.layers for width in list_widths(layer.mlp)))
    experts = math.gcd(*(layer.mlp.router.experts for layer in model.layers if isinstance(layer.mlp, plain.Mixture)))
    expert_sizes = [size for size in (1, 2, 4) if experts % size == 0] if experts else [1]
    by_model, rows = math.gcd(heads, hidden, model.vocab), data.batch // accumulate
    meshes: dict[int, list[dict[str, int]]] = {}
    for sizes in product(expert_sizes, *[(1, 2, 4, 8)] * 4):
        mesh: dict[str, int] = dict(zip(("expert", "data", "fsdp", "seq", "model"), sizes, strict=True))
        fits = rows % (mesh["data"] * mesh["fsdp"] * mesh["expert"]) == 0 and model.dim % mesh["fsdp"] == 0
        fits &= data.seq_len % mesh["seq"] == 0 and by_model % mesh["model"] == 0
        # Matrices this small are not sharded if their codes are packed into words.
        has_words = model.lora is not None and model.lora.base == "int8"
        fits &= not has_words or mesh["fsdp"] == mesh["model"] == 1
        if fits and math.prod(sizes) <= DEVICES:
            meshes.setdefault(math.prod(sizes), []).append(mesh)
    return dice.pick(meshes[dice.pick(list(meshes))])


def _remat(dice: Dice, model: plain.Model, update: str, activations: str) -> str:
    policies = ["none", "none", "full", "dots", "dots_no_batch", "save:query,attention", "save:mlp_up", "sqrt"]
    policies += [f"sqrt:{n}" for n in (2, 3) if model.repeats % n == 0]
    if update != "layer_programs":
        policies += ["offload", "offload:input", "save:attention;offload:mlp_up,input"]
    if model.streams != "one" and activations == "device":
        policies += ["invert"] * 4
    return dice.pick(policies)


def _bad_rows(
    dice: Dice, phases: Sequence[plain.Phase], steps: int
) -> tuple[tuple[tuple[int, int, int], ...], int | None]:
    """Return (rows without targets, the step with NaN); the rows are whole microbatches or the whole batch."""
    empty: list[tuple[int, int, int]] = []
    ends = [phase.start for phase in phases[1:]] + [steps]
    for phase, end in zip(phases, ends, strict=True):
        if phase.accumulate > 1 and dice.chance(0.5):
            step = dice.between(phase.start, end - 1)
            empty.append((step, phase.accumulate, dice.between(0, phase.accumulate - 1)))
    if dice.chance(0.08):
        empty.append((dice.between(0, steps - 1), 1, 0))
    return tuple(empty), dice.between(0, steps - 1) if dice.chance(0.4) else None


def as_text(experiment: plain.RandomExperiment) -> list[str]:
    """Return one line for each drawn setting that differs from its default."""
    drawn_settings: dict[str, Any] = plain.settings(experiment)
    return [f"{name} = {value!r}" for name, value in drawn_settings.items()]
