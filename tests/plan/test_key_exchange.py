"""Rings of keys and gathered keys in estimates: their work, and the note of a plan that compares them."""

import pytest

from plimsoll import configs
from plimsoll.framework.plan.key_exchange import note_key_exchange
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import resolve
from plimsoll.framework.program.experiment import Experiment

ATTENTION = "model.stack.pattern.0.attention"
SHARDS, ROWS, LENGTH, LAYERS = 4, 2, 8192, 2
TARGET = resolve("v5p-16")


def load(**settings: object) -> Experiment:
    config = configs.load("llama3-8b")
    settings = {
        "model.stack.num_layers": LAYERS,
        "data.seq_len": LENGTH,
        "data.global_batch_size": ROWS,
        "mesh.seq": SHARDS,
        **settings,
    }
    for path, value in settings.items():
        config.override(path, str(value))
    return config.instantiate()


def make_note(**settings: object) -> list[str]:
    experiment = load(**settings)
    return note_key_exchange(experiment, estimate_for_target(experiment, TARGET), TARGET)


@pytest.mark.parametrize(
    ("settings", "in_use"),
    [
        ({}, "keys in a ring"),
        ({f"{ATTENTION}.context_parallel": "gather"}, "gathered keys"),
        # Less than 2,048 positions for each device.
        ({"data.seq_len": 4096}, "gathered keys"),
    ],
)
def test_a_plan_names_the_way_in_use(settings: dict[str, object], in_use: str):
    (note,) = make_note(**settings)
    assert note.startswith(f"attention over mesh.seq = {SHARDS}, estimated: keys in a ring ")
    assert "; gathered keys " in note
    assert note.endswith(f"; in use: {in_use}")


def test_a_plan_leaves_out_a_ring_that_cannot_divide_the_row():
    # 2,052 positions have no eight equal chunks.
    (note,) = make_note(**{"data.seq_len": 2052, f"{ATTENTION}.implementation": "xla"})
    assert "keys in a ring" not in note
    assert note.endswith("; in use: gathered keys")


def test_rows_on_one_device_need_no_note():
    assert make_note(**{"mesh.seq": 1, "data.global_batch_size": 8}) == []


def test_gathered_keys_take_as_long_as_the_last_device():
    """Attention's products take 2 - 1 / R times as long as with equal work: the last device sees all other keys."""
    experiments = [load(**{f"{ATTENTION}.context_parallel": way, "memory.remat": "none"}) for way in ("ring", "gather")]
    ring, gather = (estimate_for_target(experiment, TARGET).work for experiment in experiments)
    attention = experiments[0].model.stacks["stack"].pattern.layers["block0"].attention
    # Per device: 2 products forward and 5 backward, without masks.
    products = 7 * 2 * attention.num_heads * attention.head_dim * LENGTH * (LENGTH / SHARDS)
    equal_work = LAYERS * ROWS / 2 * products
    difference = (gather.flops + gather.mask_excess) - (ring.flops + ring.mask_excess)
    assert difference == pytest.approx((1 - 1 / SHARDS) * equal_work, rel=0.01)
