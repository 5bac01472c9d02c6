"""The coordinate check of a parametrization: do activations keep their size if the model gets wider?

From "Tensor Programs V" (Yang et al. 2022, arXiv 2203.03466), appendix D.1. Models of several widths are trained for a
few steps. Under muP, no activation grows or vanishes with the width, at initialization or after an update; under the
usual parametrization, activations after an update grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, merge
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.program import Program


@dataclass(frozen=True)
class Coordinate:
    """The size of an activation's elements at one width.

    Attributes:
        name: the activation: "embed", "stack.0" for the output of the first layer, ..., and "logits".
        width: width of the model.
        step: number of updates before.
        size: mean absolute value of its elements; after updates, of their change since initialization.
    """

    name: str
    width: int
    step: int
    size: float


def measure_coordinates(config: Config, steps: int, data_folder: str | Path) -> list[Coordinate]:
    """Train a model for a few steps on one batch, and measure its activations before and after each.

    Args:
        config: config of an experiment with a language model.
        steps: number of updates.
        data_folder: folder for the tokenizer and the tokens.
    """
    measured = config.copy()
    # Rates are those of the peak from the first step on.
    for _, part in measured.learner.walk():
        if isinstance(part, Config) and part.takes("warmup"):
            part.warmup = 0.0
    measured.trainer.max_steps = max(steps, 2)
    experiment = measured.instantiate()
    program = Program(experiment, jax.devices()[:1])
    experiment.data.setup(data_folder)
    state = program.init()
    batches = experiment.data.train_iterator(0, program.rows)
    try:
        batch = program.put(next(batches)[1])
    finally:
        batches.close()
    model = experiment.model
    assert isinstance(model, CausalLM)
    compute = jax.jit(
        lambda params, frozen, buffers: _compute_activations(model, merge(params, frozen), buffers, batch)
    )
    coordinates = []
    first: dict[str, jax.Array] = {}
    for step in range(steps + 1):
        activations = compute(state.parameter, state.frozen, state.buffer)
        first = first or activations
        for name, activation in activations.items():
            change = activation if step == 0 else activation - first[name]
            coordinates.append(Coordinate(name, model.dim, step, float(jnp.mean(jnp.abs(change)))))
        if step < steps:
            state, _ = program.step(state, batch)
    return coordinates


def _compute_activations(model: CausalLM, params: Nested, buffers: Nested, batch: Nested) -> dict[str, jax.Array]:
    """Return the output of the embedding, of each layer and of the head, in float32."""
    ctx = Context(batch=batch, compute_dtype=model.compute_dtype)
    activations: dict[str, jax.Array] = {}
    carry = None
    for name, stage in model.stages.items():
        if name == "head":
            continue
        if not isinstance(stage, Stack):
            carry, _ = model.run(name, params, carry, ctx, buffers)
            activations[name] = carry
            continue
        carry = stage.enter(carry)
        for index in range(stage.num_repeats):
            layer_params = jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], model.stage_params(params, name))
            layer_state = jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], buffers.get(name, {}))
            carry, _ = stage.select_layers(1).run_layers(
                layer_params, carry, stage.context(name, ctx), layer_state, first=jnp.asarray(index)
            )
            activations[f"{name}.{index}"] = stage.leave(carry, ctx)
        carry = stage.leave(carry, ctx)
    assert isinstance(carry, jax.Array)
    activations["logits"] = model.language_head.logits(model.head_weights(params, ctx), carry, ctx)
    return {name: activation.astype(jnp.float32) for name, activation in activations.items()}


def fit_growth(coordinates: Sequence[Coordinate]) -> float:
    """Return the exponent a of size ~ width^a, by least squares, over the coordinates of one activation."""
    points = [(math.log(one.width), math.log(max(one.size, 1e-30))) for one in coordinates]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / variance


def group_by_activation(coordinates: Sequence[Coordinate], step: int) -> dict[str, list[Coordinate]]:
    """Return {activation: its sizes after that many updates, by width}."""
    groups: dict[str, list[Coordinate]] = {}
    for one in coordinates:
        if one.step == step:
            groups.setdefault(one.name, []).append(one)
    return groups


def plot_coordinates(coordinates: Mapping[str, Sequence[Coordinate]], path: Path) -> Path:
    """Plot the change of each activation after the last update against the width; returns the path.

    Args:
        coordinates: the coordinates of each parametrization, by name.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(coordinates), 4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(coordinates), sharey=True, squeeze=False)[0]
    last = max(one.step for measured in coordinates.values() for one in measured)
    for axes, (name, measured) in zip(panels, coordinates.items(), strict=True):
        for activation, sizes in group_by_activation(measured, last).items():
            axes.plot([one.width for one in sizes], [one.size for one in sizes], marker="o", label=activation)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name)
        axes.set_xlabel("width")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"mean change of elements after {last} steps")
    panels[0].legend(fontsize="small")
    figure.savefig(path)
    return path
