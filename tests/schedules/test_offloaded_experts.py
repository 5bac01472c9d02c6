"""memory.experts: the experts in host memory, and the numbers of plain optax."""

import pytest

from tests.support import exact
from tests.support.exact import ExactnessCase

CASES = [
    ExactnessCase(model="experts", memory=memory, placement=placement, **rest)
    for memory, placement, rest in [
        ("streamed", "experts", {}),
        ("in_backward", "experts", {}),
        ("streamed", "experts", {"mesh": "eight", "remat": "full"}),
        ("layers", "experts", {}),
        ("layers_at_once", "experts", {}),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=exact.get_case_id)
def test_it(case: ExactnessCase):
    with exact.enable_exact_numerics():
        found, losses, norms, weights = exact.train(case)
        expected, *metrics = exact.once(case.model, case.optimizer, case.precision, case.clip())
    for path, error in exact.differences(found, expected).items():
        assert error <= 1e-12, f"{path}: off by {error:.1e}"
