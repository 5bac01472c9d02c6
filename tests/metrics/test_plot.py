"""The loss plot decodes, shows the logged values, and handles everything that runs do to their metrics."""

import math

import numpy as np
import pytest
from PIL import Image

from plimsoll.framework.metrics.jsonl import JsonlWriter, read_metrics
from plimsoll.framework.metrics.plot import (
    collect_loss_curves,
    expert_loads,
    objective_panels,
    plot_experts,
    plot_losses,
    plot_objective,
    smooth,
)

TRAIN_BLUE, VALIDATION_RED, EMA_TEAL = (0x30, 0x63, 0x8E), (0xD1, 0x49, 0x5B), (0x00, 0x79, 0x8C)
RATE_GREY = (0x44, 0x44, 0x44)


def write(path, steps, *, evaluate_every=0, ema=False, nan=(), resume=None):
    writer = JsonlWriter(path)
    for step in range(1, steps + 1):
        loss = 2 + 6 * math.exp(-step / 30) + 0.05 * math.sin(step)
        writer.write(step, {"train/loss": math.nan if step in nan else loss, "train/grad_norm": 1.0})
        if evaluate_every and step % evaluate_every == 0:
            writer.write(step, {"validation/loss": loss + 0.5, **({"validation_ema/loss": loss + 1.5} if ema else {})})
        if step == resume:
            writer.resume(step)
    writer.close()
    return path


def pixels(path):
    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def count(picture, color):
    return int((np.abs(picture - np.array(color)).sum(axis=-1) < 30).sum())


@pytest.mark.pairs
def test_full_run(tmp_path):
    metrics = write(tmp_path / "m.jsonl", 400, evaluate_every=20, ema=True, nan=(50, 51), resume=200)
    path = plot_losses(metrics, tmp_path / "loss.png", "tiny")
    picture = pixels(path)
    assert picture.shape[0] > 500
    assert picture.shape[1] > 900
    for color in (TRAIN_BLUE, VALIDATION_RED, EMA_TEAL):
        assert count(picture, color) > 500
        assert count(picture[:, -300:], color) > 100  # also after the non-finite steps
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["loss.png", "m.jsonl"]


@pytest.mark.pairs
def test_missing_curves_are_not_plotted(tmp_path):
    picture = pixels(plot_losses(write(tmp_path / "m.jsonl", 400), tmp_path / "loss.png", "tiny"))
    assert count(picture, TRAIN_BLUE) > 500
    assert count(picture, VALIDATION_RED) == count(picture, EMA_TEAL) == 0


@pytest.mark.pairs
@pytest.mark.parametrize("steps", [0, 1, 60])
def test_few_points(tmp_path, steps):
    picture = pixels(plot_losses(write(tmp_path / "m.jsonl", steps, evaluate_every=1), tmp_path / "loss.png", "tiny"))
    assert (count(picture, TRAIN_BLUE) > 50) == (steps > 0)


@pytest.mark.pairs
def test_nan_a_spike_and_a_run_without_losses(tmp_path):
    for name, losses in (("nan", [math.nan] * 30), ("spike", [3.0] * 40 + [1e9] + [3.0] * 80), ("none", [])):
        writer = JsonlWriter(tmp_path / f"{name}.jsonl")
        writer.write(0, {"train/grad_norm": 1.0})
        for step, loss in enumerate(losses):
            writer.write(step, {"train/loss": loss})
        writer.close()
        picture = pixels(plot_losses(tmp_path / f"{name}.jsonl", tmp_path / "loss.png", name))
        assert (count(picture, TRAIN_BLUE) > 300) == (name == "spike")


@pytest.mark.parametrize("changes", [True, False])
def test_a_learning_rate_that_changes_has_a_panel(tmp_path, changes):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    for step in range(1, 61):
        rate = 3e-4 * (61 - step if changes else 1)
        writer.write(step, {"train/loss": 3.0 - step / 60, "train/learning_rate": rate})
    writer.close()
    picture = pixels(plot_losses(tmp_path / "m.jsonl", tmp_path / "loss.png", "tiny"))
    below = picture[-200:, 200:]  # to the right of the axis and its numbers
    assert (count(below, RATE_GREY) > 500) == changes
    assert count(picture, TRAIN_BLUE) > 500


def test_loss_curves():
    rows = [
        {"step": 3, "train/loss": 2.5, "train/z_loss": 0.1},
        {"step": 2, "validation/loss": 1, "validation/accuracy": 0.5},
        {"step": 1, "train/loss": 3.0},
        {"step": 1, "resumed_from": 1},
    ]
    curves = collect_loss_curves(rows)
    assert list(curves) == ["train/loss", "train/z_loss", "validation/loss"]
    assert curves["train/loss"] == [(1, 3.0), (3, 2.5)]


def test_smoothing_keeps_a_line_takes_noise_out_and_steps_over_nan():
    line = np.arange(1000.0)
    assert np.allclose(smooth(line)[20:-20], line[20:-20], atol=0.51)
    noise = np.random.default_rng(0).normal(size=2000)
    assert np.std(smooth(noise)[300:]) < 0.25
    line[500] = np.nan
    assert np.flatnonzero(np.isnan(smooth(line))).tolist() == [500]


def test_objective_metrics_have_a_panel_per_type(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        rewards = {"train/head/reward_chosen": step / 10, "train/head/reward_rejected": -step / 10}
        row = {"train/loss": 1.0, "train/head/preference": 1.0, "train/head/accuracy": step / 30, **rewards}
        writer.write(step, row)
        if step % 10 == 0:
            writer.write(step, {"eval/pairs/accuracy": 0.5, "eval/pairs/reward_chosen": 1.0, "eval/pairs/pairs": 7.0})
    writer.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    panels = {kind: list(curves) for kind, curves in objective_panels(rows).items()}
    assert panels == {
        "accuracy": ["train/head/accuracy", "eval/pairs/accuracy"],
        "reward": ["train/head/reward_chosen", "eval/pairs/reward_chosen", "train/head/reward_rejected"],
    }
    assert objective_panels(rows)["accuracy"]["eval/pairs/accuracy"] == [(10, 0.5), (20, 0.5), (30, 0.5)]
    picture = pixels(plot_objective(tmp_path / "metrics.jsonl", tmp_path / "objective.png", "run"))
    assert count(picture, TRAIN_BLUE) > 500
    assert count(picture, VALIDATION_RED) > 100
    plain = write(tmp_path / "plain.jsonl", 5)
    assert plot_objective(plain, tmp_path / "none.png", "run") == "no metrics to plot"


def test_each_expert_layer_is_a_row_with_its_loads(tmp_path):
    dense, capped = "train/stack/block0/mlp", "train/stack/block1/mlp"
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        row = {"train/loss": 1.0, f"{capped}/dropped": 0.1, f"{dense}/load/0": math.nan if step == 9 else 1.0}
        for layer in (dense, capped):
            row |= {f"{layer}/load_max": 2.0, f"{layer}/load_min": 0.5, f"{layer}/entropy": 1.0}
        for expert in range(12):
            row[f"{capped}/load/{expert}"] = 1.0 + expert * step / 400
        writer.write(step, row)
    writer.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    loads = expert_loads(rows)
    assert {layer: list(of_experts) for layer, of_experts in loads.items()} == {dense: [0], capped: list(range(12))}
    assert loads[capped][11][-1] == (30, 1.0 + 11 * 30 / 400)
    picture = pixels(plot_experts(tmp_path / "metrics.jsonl", tmp_path / "experts.png", "run"))
    entropy_blue, dropped_red = TRAIN_BLUE, VALIDATION_RED
    assert count(picture, entropy_blue) > 500
    assert count(picture, dropped_red) > 200
    plain = write(tmp_path / "plain.jsonl", 5)
    assert plot_experts(plain, tmp_path / "none.png", "run") == "no metrics to plot"
