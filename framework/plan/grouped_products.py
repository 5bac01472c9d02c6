"""Counts the work of experts under balanced routing, which shapes of arrays do not show.

The arrays of grouped matrix products have room for more rows than a router fills, and the rounds of an exchange of
tokens depend on the router.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from plimsoll.framework.layers.experts.expert_exchange import FURTHER_ROUNDS
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.grouped import EVEN_ROWS
from plimsoll.framework.models.chain import Chain

_SCOPE = re.compile(rf"{EVEN_ROWS}(\d+)")
# The loop is the last scope; loops inside it have further ones. Transformations of jax may surround the scope.
_ROUNDS = re.compile(rf"{FURTHER_ROUNDS}(\d+)\)*(?:/while)?$")


def count_grouped_flops(name: str, float_shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the FLOPs of a kernel under balanced routing; 0 if it is not a grouped product.

    Args:
        name: path of the scopes that the kernel is called in.
        float_shapes: shapes of its floating-point operands and results: rows, and the weights [E, I, O] or their
            gradients.
    """
    match = _SCOPE.search(name)
    if match is None:
        return 0
    weights = [shape for shape in float_shapes if len(shape) == 3]
    if not weights:
        return 0
    even_rows = int(match[1])
    return 2 * even_rows * math.prod(weights[0][1:])


def count_further_rounds(name: str) -> int | None:
    """Return the trip count of the loop over an exchange's rounds after the first one, under balanced routing.

    Args:
        name: path of the scopes that a loop is in; the result is None if it is not such a loop.
    """
    match = _ROUNDS.search(name)
    return None if match is None else int(match[1])


def note_ragged_products(model: Chain, platform: str) -> list[str]:
    """Return notes on expert products that the analytical estimate undercounts; [] if it counts them correctly.

    The estimate assumes kernels that multiply each row only with its own expert. `ragged_dot` is not such a kernel.

    Args:
        model: model whose experts are checked.
        platform: platform that XLA compiles for: tpu, gpu or cpu.
    """
    layers = _find_dropless_experts(model)
    if not any(experts.implementation == "ragged" for experts in layers):
        return []
    compiler = "for the gradient of the weights XLA for TPU" if platform == "tpu" else f"XLA for {platform.upper()}"
    return [
        "the estimate assumes grouped kernels for the experts' products; experts.implementation = ragged needs more "
        f"memory and time, because {compiler} multiplies all rows with all experts; use auto or plan without --estimate"
    ]


def note_exchange(model: Chain, sizes: Mapping[str, int], num_tokens: int) -> list[str]:
    """Return notes on how tokens reach their experts on a mesh that shards these; [] if it does not.

    Args:
        model: model whose experts are checked.
        sizes: {mesh axis: size} for all mesh axes.
        num_tokens: number of tokens of a device in a microbatch.
    """
    shards = sizes["expert"]
    if shards == 1:
        return []
    notes = []
    for experts in _find_dropless_experts(model):
        if experts.uses_all_to_all(num_tokens, shards):
            note = (
                f"experts.exchange is all_to_all: a device receives up to {experts.buffer_factor:g} times its even "
                "share of rows in a round; the time is that of an even router"
            )
        else:
            note = f"experts.exchange is all_gather: arrays have room for the tokens of {shards} devices"
        if note not in notes:
            notes.append(note)
    return notes


def _find_dropless_experts(model: Chain) -> list[Experts]:
    layers = [layer for stack in model.stacks.values() for layer in stack.pattern.walk()]
    return [layer for layer in layers if isinstance(layer, Experts) and layer.capacity is None]
