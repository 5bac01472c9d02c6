"""A weighted mixture of sources.

May import: framework.config, framework.data.
"""

from __future__ import annotations

import math

from framework.config import Config


class Mixture:
    """Several sources at once: of many sequences, the share of each source tends to its weight.

    Weights count sequences (and so tokens), not documents. Each source is shuffled on its own and begins its next epoch
    when it is through, so a small source with a large weight is seen more often. Which source a sequence comes from
    follows from its global index alone: no random numbers, and in any stretch of sequences the shares are as close to
    the weights as they can be. Weights are resolved to 1% of the smallest one.

    Args:
        sources: configs of sources, of any kind, mixtures too.
        weights: one positive number per source; only their proportions matter.
    """

    def __init__(self, *, sources: list[Config], weights: list[float]):
        if not sources or len(sources) != len(weights):
            raise ValueError(
                f"Mixture: expected one weight per source, given {len(weights)} weights for {len(sources)} sources"
            )
        if bad := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
            raise ValueError(
                f"Mixture.weights: expected positive numbers, given {bad[0]} (leave the source out instead)"
            )
        self.sources = [source.instantiate() for source in sources]
        self.weights = [weight / sum(weights) for weight in weights]
