"""AdaLomo: Adafactor's second moment without a first one, with steps in proportion to the weights (Lv et al. 2023,
arXiv 2310.10195, algorithm 1), built from optax's parts. Its state is tiny: one row and one column per matrix.
"""

from __future__ import annotations

import optax

from plimsoll.framework.config import FiniteNonNegative, PositiveFloat, component


@component
def adalomo(
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: FiniteNonNegative = 0.0,
    decay_rate: PositiveFloat = 0.8,
    clip_threshold: PositiveFloat = 1.0,
    eps: FiniteNonNegative = 1e-30,
    min_scale: FiniteNonNegative = 1e-3,
) -> optax.GradientTransformation:
    """AdaLomo. For each tensor p with gradient g at step t:

        beta = 1 - t^-decay_rate
        r = beta r + (1 - beta) mean over columns of (g^2 + eps),  c: the same over rows;  v = r c / mean(r)
        u = g / sqrt(v),  u = u / max(1, RMS(u) / clip_threshold)
        p = p - learning_rate max(min_scale, RMS(p)) (u + weight_decay p)

    Vectors keep all of v. For tensors with more dimensions, the two largest are factored.

    Args:
        learning_rate: step size for an update of RMS 1, relative to the RMS of the weights.
        weight_decay: decoupled weight decay.
        decay_rate: exponent of the second moment's decay beta.
        clip_threshold: the largest RMS of an update, before it is scaled by the RMS of the weights.
        eps: added to the squared gradient, which keeps the second moment from zero.
        min_scale: lower bound of the scale RMS(p), so that tensors of zeros move.
    """
    return optax.chain(
        # optax's default would not factor v for matrices with a side under 128.
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=1, epsilon=eps),
        optax.clip_by_block_rms(clip_threshold),
        optax.add_decayed_weights(weight_decay),
        # After the weight decay, because the algorithm scales both by RMS(p).
        optax.scale_by_param_block_rms(min_scale),
        optax.scale_by_learning_rate(learning_rate),
    )
