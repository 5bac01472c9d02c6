"""Rotary positions for a part of each head, or stretched by YaRN or LongRoPE, compared to the papers' formulas.

tests/peers/ compares whole models and tables of published shapes to transformers.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.rotary import LinearScaling, Llama3Scaling, Rotary
from plimsoll.framework.layers.rotary_scaling import LongRopeScaling, YarnScaling
from tests.support import small
from tests.support.latent import with_latents

POSITIONS = np.array([[0, 1, 7, 30]])


def sample(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_partial_rotary_rotates_only_its_channels():
    x_BSNH = sample(1, 4, 2, 12)
    (turned,) = Rotary(head_dim=12, rotary_dim=8)(jnp.asarray(POSITIONS), jnp.asarray(x_BSNH))
    (expected,) = Rotary(head_dim=8)(jnp.asarray(POSITIONS), jnp.asarray(x_BSNH[..., :8]))
    np.testing.assert_array_equal(turned[..., :8], expected)
    np.testing.assert_array_equal(turned[..., 8:], x_BSNH[..., 8:])


def test_partial_rotary_dim_may_be_even_in_an_odd_head():
    x_BSNH = sample(1, 4, 2, 9)
    (turned,) = Rotary(head_dim=9, rotary_dim=4)(jnp.asarray(POSITIONS), jnp.asarray(x_BSNH))
    np.testing.assert_array_equal(turned[..., 4:], x_BSNH[..., 4:])


@pytest.mark.parametrize("rotary_dim", [3, 10])
def test_an_odd_part_or_more_than_a_head_is_refused(rotary_dim: int):
    with pytest.raises(ValueError, match=f"rotary_dim = {rotary_dim}; expected an even number up to head_dim = 8"):
        Rotary(head_dim=8, rotary_dim=rotary_dim)


def test_yarn_matches_the_ramp_in_its_paper():
    """Section 3.2 of arXiv 2309.00071: frequencies with over 32 turns stay; those with less than one are divided."""
    length, factor, theta = 4096, 8.0, 10_000.0
    scaling = config_for(YarnScaling, factor=factor, original_length=length)
    stretched = Rotary(head_dim=64, theta=theta, scaling=scaling)
    plain = Rotary(head_dim=64, theta=theta).frequencies
    turns = length * plain / (2 * math.pi)
    ratio = plain / stretched.frequencies
    # The ends of the ramp are rounded to whole indices, so these bounds leave a margin around 32 turns and one turn.
    np.testing.assert_allclose(ratio[turns > 48], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.7], factor)
    between = ratio[(turns < 28) & (turns > 1.2)]
    assert len(between) > 3
    assert (np.diff(between) > 0).all()
    assert ((between > 1) & (between < factor)).all()
    assert stretched.amplitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_attention_factor_scales_only_rotated_channels():
    x_BSNH = sample(1, 4, 2, 12)
    plain = config_for(YarnScaling, factor=2.0, original_length=16, attention_factor=1.0)
    louder = config_for(YarnScaling, factor=2.0, original_length=16, attention_factor=1.5)
    turned = []
    for scaling in (plain, louder):
        rotary = Rotary(head_dim=12, rotary_dim=8, scaling=scaling)
        turned += rotary(jnp.asarray(POSITIONS), jnp.asarray(x_BSNH))
    np.testing.assert_allclose(turned[1][..., :8], 1.5 * turned[0][..., :8], rtol=1e-5)
    np.testing.assert_array_equal(turned[1][..., 8:], x_BSNH[..., 8:])


def test_yarn_needs_falling_frequencies():
    scaling = config_for(YarnScaling, factor=2.0, original_length=16)
    with pytest.raises(ValueError, match=r"theta = 1\.0; expected more than 1 with YarnScaling"):
        Rotary(head_dim=8, theta=1.0, scaling=scaling)


FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 5.0], "original_length": 16, "factor": 4.0}


def test_longrope_divides_each_frequency_by_its_factor():
    plain = Rotary(head_dim=4).frequencies
    for use in ("short", "long"):
        rotary = Rotary(head_dim=4, scaling=config_for(LongRopeScaling, use=use, **FACTORS))
        np.testing.assert_allclose(rotary.frequencies, plain / FACTORS[f"{use}_factor"])
        assert rotary.amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


def test_the_short_factors_refuse_sequences_that_they_are_not_for():
    positions = jnp.arange(17)[None]
    x_BSNH = jnp.asarray(sample(1, 17, 2, 4))
    short = Rotary(head_dim=4, scaling=config_for(LongRopeScaling, **FACTORS))
    with pytest.raises(ValueError, match=r"sequences of 17 tokens exceed rotary\.scaling\.original_length = 16"):
        short(positions, x_BSNH)
    short(positions[:, :16], x_BSNH[:, :16])
    long = Rotary(head_dim=4, scaling=config_for(LongRopeScaling, use="long", **FACTORS))
    long(positions, x_BSNH)


def test_latent_attention_in_any_stack_limits_max_positions():
    config = with_latents(small.llama())
    config.first.pattern[0].attention.rotary.scaling = config_for(LongRopeScaling, **FACTORS)
    program = small.program(small.experiment(config))
    assert program.experiment.language_model.max_positions == 16
    with pytest.raises(ValueError, match=r"sequences of 17 tokens exceed rotary\.scaling\.original_length = 16"):
        small.program(small.experiment(config, seq_len=17))


@pytest.mark.pairs
def test_longrope_has_a_factor_for_each_frequency():
    with pytest.raises(ValueError, match="short_factor has 2 numbers; expected 3"):
        Rotary(head_dim=6, scaling=config_for(LongRopeScaling, **FACTORS))


MILLION = 1 << 20
SCALINGS = {
    "none": None,
    "linear": config_for(LinearScaling, factor=4.0),
    "llama3": config_for(Llama3Scaling, factor=32.0),
    "yarn": config_for(YarnScaling, factor=32.0, original_length=32768),
    "longrope": config_for(
        LongRopeScaling,
        short_factor=[1.0] * 64,
        long_factor=list(np.linspace(1.0, 60.0, 64)),
        original_length=4096,
        factor=32.0,
        use="long",
    ),
}


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_exact_in_rows_of_a_million_positions(name: str, theta: float):
    """The formula in float64. Computed as float32 products, angles would be wrong by up to 0.03."""
    rotary = Rotary(head_dim=128, theta=theta, scaling=SCALINGS[name])
    positions = np.array([[0, 1, 1023, 1024, 4095, 131071, MILLION - 2, MILLION - 1, 2 * MILLION - 1]])
    # Rotating (1, 0) gives the cosine and the sine.
    x_BSNH = np.zeros((1, positions.size, 1, 128), np.float32)
    x_BSNH[..., :64] = 1.0
    (rotated,) = rotary(jnp.asarray(positions, jnp.int32), jnp.asarray(x_BSNH))
    cosines, sines = np.split(np.asarray(rotated, np.float64)[0, :, 0], 2, axis=-1)
    angles = positions[0][:, None] * rotary.frequencies
    bounds = np.where(positions[0] < 1024, 4e-5, np.where(positions[0] < MILLION, 5e-4, 1e-3))[:, None]
    assert (np.abs(cosines / rotary.amplitude - np.cos(angles)) < bounds).all()
    assert (np.abs(sines / rotary.amplitude - np.sin(angles)) < bounds).all()


def test_products_of_late_queries_and_keys_depend_on_their_distance():
    """A million positions further on, they are equal up to rounding."""
    rotary = Rotary(head_dim=128, theta=1e6)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 128)).astype(np.float32)

    def multiply(query_position: int, key_position: int) -> float:
        (turned_q,) = rotary(jnp.asarray([[query_position]]), jnp.asarray(q))
        (turned_k,) = rotary(jnp.asarray([[key_position]]), jnp.asarray(k))
        return float(jnp.sum(turned_q * turned_k))

    size = float(np.linalg.norm(q) * np.linalg.norm(k))
    for distance in (1, 2, 77, 5000):
        late, early = multiply(MILLION - 1, MILLION - 1 - distance), multiply(distance, 0)
        assert late == pytest.approx(early, abs=5e-5 * size)
