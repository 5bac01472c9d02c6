"""Optimizers with small state, under every schedule and placement, against themselves on one tensor per layer.

The reference has an instance for each stage and layer, and has no schedules, stacks or meshes. tests/optimizers
compares the computation of each optimizer with its paper and with other implementations.
"""

from itertools import cycle, product
from typing import Any

import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.optimizers.named import OPTIMIZERS
from tests.schedules.test_exact import test_twenty_steps_equal_plain_optax as twenty_steps_equal_plain_optax
from tests.support import exact
from tests.support.exact import ExactnessCase

# One case for each of some optimizers, with alternating schedules, placements and meshes.
QUICK = ("apollo_mini", "adam_mini", "adamw8bit")
TURNS = [("streamed", "state", "eight"), ("in_backward", "device", "eight"), ("hosted_gradients", "all", "one")]
CASES = [
    ExactnessCase(optimizer=name, memory=memory, placement=placement, mesh=mesh, remat="full")
    for name, (memory, placement, mesh) in zip(QUICK, cycle(TURNS), strict=False)
]
WAYS: list[Any] = [*product(exact.MEMORY | exact.LAYER_PROGRAMS, ("device", "state", "all"), exact.MESHES)]
SLOW = [
    ExactnessCase(optimizer=name, memory=m, placement=p, mesh=mesh, remat="full")
    for name in exact.SMALL
    for m, p, mesh in WAYS
]


@pytest.mark.pairs
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW if case.is_tried() and case not in CASES)],
    ids=exact.get_case_id,
)
def test_twenty_steps_equal_one_instance_per_layer(case: ExactnessCase):
    twenty_steps_equal_plain_optax(case)


def test_every_optimizer_is_tested():
    tried = {config.to_dict()["$class"] for config in (exact.OPTIMIZERS | exact.SMALL).values()}
    assert {config_for(function).to_dict()["$class"] for function in OPTIMIZERS.values()} <= tried
