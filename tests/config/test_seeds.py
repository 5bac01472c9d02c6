"""Seeds are what jax.random.key uses in full: it silently wraps at 2^32, and fails with a traceback at 2^63."""

from typing import Any

import pytest

from plimsoll.extras.flows.image_source import ImagePipeline
from plimsoll.extras.flows.linear import Permutation
from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.program.options import TrainerOptions

COMPONENTS = [TrainerOptions, DataPipeline, ImagePipeline, Permutation]


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("seed", [2**32, 2**63, 2**128, -1, True, 0.5])
def test_other_seeds_are_refused(component: Any, seed: Any):
    with pytest.raises(ConfigError, match=rf"seed: expected an integer >= 0 and < 4294967296, given {seed}"):
        config_for(component, seed=seed)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_largest_seed_is_taken(component: Any):
    assert config_for(component, seed=2**32 - 1).seed == 2**32 - 1
