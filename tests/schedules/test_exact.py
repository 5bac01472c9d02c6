"""Every schedule, placement and remat policy against plain optax on one tensor per layer: 20 steps, clip, bad batch.

`make test` runs every value of the eight axes in some case, and `make test-pairs` every pair of values. The full
product, in float64, is marked slow.
"""

import numpy as np
import pytest

from tests.support import exact
from tests.support.exact import ExactnessCase
from tests.support.selection import slow

AXES = {
    "model": exact.MODELS,
    "optimizer": exact.OPTIMIZERS,
    "memory": exact.MEMORY,
    "placement": exact.PLACEMENTS,
    "remat": exact.REMATS,
    "mesh": exact.MESHES,
}
EVERY = exact.list_cases(**AXES, precision=exact.PRECISIONS, microbatches=(1, 2))
# Prefetching a layer's state is a separate schedule only with offloaded optimizer state.
AHEAD = [
    case
    for case in exact.list_cases(**{**AXES, "memory": exact.AHEAD}, precision=exact.PRECISIONS)
    if "optimizer_state" in exact.PLACEMENTS[case.placement] and case.memory not in (exact.DELAYED, exact.SPECULATIVE)
]
ONCE = exact.cover_each_value([*EVERY, *AHEAD])
PAIRS = [
    *exact.cover_value_pairs(EVERY, chosen=ONCE),
    ExactnessCase(memory="two_pass_ahead", placement="all", remat="sqrt", mesh="eight"),
    ExactnessCase(model="shared", memory="in_backward_ahead", placement="state"),
    ExactnessCase(memory="in_backward_ahead", placement="state"),
    ExactnessCase(memory="in_backward_ahead", placement="state", mesh="eight", precision="bfloat16"),
    ExactnessCase(optimizer="adafactor", memory="in_backward_ahead", placement="state+weights", remat="full"),
    ExactnessCase(model="streams", memory="in_backward_ahead", placement="state", remat="invert"),
    ExactnessCase(model="experts", memory="two_pass_ahead", placement="all", remat="none", mesh="eight"),
    ExactnessCase(model="experts", memory="in_backward", placement="state", remat="save:attention", mesh="eight"),
    ExactnessCase(model="experts", memory="streamed", placement="all", remat="sqrt", mesh="eight"),
    ExactnessCase(model="latent", memory="streamed", placement="all", remat="sqrt", mesh="eight"),
    ExactnessCase(model="latent", memory="in_backward", placement="state", remat="full"),
    ExactnessCase(model="latent", memory="two_pass_ahead", placement="state"),
    ExactnessCase(memory=exact.DELAYED, placement="state"),
    ExactnessCase(memory=exact.DELAYED, placement="state", remat="sqrt", mesh="eight", precision="bfloat16"),
    ExactnessCase(model="shared", optimizer="muon", memory=exact.DELAYED, placement="state+boundaries", remat="full"),
    ExactnessCase(model="streams", memory=exact.DELAYED, placement="state", remat="invert"),
    ExactnessCase(model="experts", memory=exact.DELAYED, placement="state", remat="full", mesh="eight"),
    ExactnessCase(model="recurrent", optimizer="adafactor", memory=exact.DELAYED, placement="state"),
    ExactnessCase(memory=exact.SPECULATIVE, placement="state"),
    ExactnessCase(memory=exact.SPECULATIVE, placement="state", remat="sqrt", mesh="eight", precision="bfloat16"),
    ExactnessCase(model="shared", optimizer="muon", memory=exact.SPECULATIVE, placement="state+boundaries"),
    ExactnessCase(model="streams", memory=exact.SPECULATIVE, placement="state", remat="invert"),
    ExactnessCase(model="experts", memory=exact.SPECULATIVE, placement="state", remat="full", mesh="eight"),
    ExactnessCase(model="recurrent", optimizer="adafactor", memory=exact.SPECULATIVE, placement="state"),
]
# All microbatches run through a layer before the next one.
TOGETHER = [
    ExactnessCase(memory=f"{memory}_together", placement=placement, remat=remat, microbatches=2, **rest)
    for memory, placement, remat, rest in [
        ("streamed", "device", "none", {}),
        ("streamed", "all", "full", {"layers": "unlike"}),
        ("hosted_gradients", "all", "sqrt", {"mesh": "eight"}),
        ("in_backward", "state", "save:attention", {}),
        ("two_pass", "all", "full", {"mesh": "eight"}),
        ("in_backward_ahead", "state", "none", {"precision": "float32"}),
        ("two_pass_ahead", "state", "full", {"layers": "unlike"}),
        (exact.DELAYED, "state", "full", {"mesh": "eight"}),
        (exact.SPECULATIVE, "state", "full", {"mesh": "eight"}),
    ]
]
UNLIKE = [
    ExactnessCase(memory="hosted_gradients", placement="all", remat="save:attention", layers="unlike", microbatches=2),
    ExactnessCase(placement="state", layers="unlike"),
    ExactnessCase(
        memory="streamed", placement="all", remat="sqrt", layers="unlike", mesh="eight", precision="bfloat16"
    ),
    ExactnessCase(model="shared", memory="in_backward", placement="all", remat="full", layers="unlike"),
    ExactnessCase(model="streams", memory="two_pass", placement="state+weights", remat="invert", layers="unlike"),
    ExactnessCase(
        model="twins", memory="in_backward_ahead", placement="all", remat="full", layers="unlike", mesh="eight"
    ),
    ExactnessCase(model="recurrent", memory="streamed", placement="weights", layers="unlike"),
    ExactnessCase(optimizer="muon", memory="streamed", placement="state", layers="unlike", precision="float32"),
    ExactnessCase(
        model="experts", memory="hosted_gradients", placement="all", remat="full", layers="unlike", mesh="eight"
    ),
    ExactnessCase(model="latent", memory="hosted_gradients", placement="all", remat="full", layers="unlike"),
    ExactnessCase(model="twins", memory=exact.DELAYED, placement="state", remat="full", layers="unlike", mesh="eight"),
    ExactnessCase(model="twins", memory=exact.SPECULATIVE, placement="state", layers="unlike", mesh="eight"),
]
SHARED_ROWS = [
    ExactnessCase(memory=memory, placement=placement, remat=remat, mesh="shared rows", **rest)
    for memory, placement, remat, rest in [
        ("streamed", "all", "sqrt", {"optimizer": "adafactor"}),
        ("after_backward", "device", "none", {"optimizer": "muon"}),
        ("in_backward", "state", "full", {}),
        ("in_backward_ahead", "all", "save:attention", {"precision": "float32"}),
        ("two_pass", "device", "none", {}),
        ("hosted_gradients", "all", "full", {"layers": "unlike", "microbatches": 2}),
        ("layers", "all", "full", {}),
        ("layers_at_once", "state", "none", {}),
        (exact.DELAYED, "state", "full", {"precision": "bfloat16"}),
        (exact.SPECULATIVE, "state", "none", {}),
        ("hosted_gradients_together", "all", "sqrt", {"microbatches": 2}),
        ("streamed", "all", "sqrt", {"model": "experts"}),
        ("in_backward", "state", "none", {"model": "recurrent"}),
    ]
]
SLOW = set(exact.list_cases(**AXES)).difference(ONCE, PAIRS)


@pytest.mark.once(
    "streams-adamw-after_backward-device-invert-one-float64-1",
    "tied-adamw-in_backward_ahead-all-none-eight-bfloat16-1",
    "recurrent-adamw-two_pass_ahead-state+boundaries-full-one-float64-1",
    "twins-adamw-in_backward-weights+boundaries-save:attention-eight-float64-1",
    "tied-sgd-streamed-state-save:attention-one-float32-2",
    "tied-adafactor-hosted_gradients-boundaries-offload-eight-float32-2",
    "tied-adamw-hosted_gradients_ahead-state-none-one-float64-1",
    "tied-adamw-speculative-state-none-one-float64-1",
    "tied-adamw-hosted_gradients_ahead_together-state-full-eight-float64-2",
)
@pytest.mark.parametrize(
    "case",
    [
        *ONCE,
        *UNLIKE[:1],
        *(pytest.param(case, marks=pytest.mark.pairs) for case in [*PAIRS, *TOGETHER, *UNLIKE[1:], *SHARED_ROWS]),
        *slow(sorted(SLOW)),
    ],
    ids=exact.get_case_id,
)
def test_twenty_steps_equal_plain_optax(case: ExactnessCase):
    """The models have buffers, layer losses, random streams and shared parameters, which every schedule must handle."""
    with exact.enable_exact_numerics():
        found, losses, norms, weights = exact.train(case)
        known = case.model, case.optimizer, case.precision, case.clip()
        _, master, tolerance = exact.PRECISIONS[case.precision]
        expected, *metrics = exact.plain(*known, weights) if master else exact.once(*known)
    if (case.optimizer, case.precision) == ("muon", "float32"):
        tolerance = 1e-5  # orthogonalization amplifies rounding errors
    for path, error in exact.differences(found, expected).items():
        assert error <= tolerance, f"{path}: off by {error:.1e}"
    np.testing.assert_allclose([losses, norms], metrics, rtol=3e-6)  # float32
    if case.clip() is not None:
        assert np.nanmin(norms) < case.clip() < np.nanmax(norms), "active in some steps, not in others"


@pytest.mark.pairs
@pytest.mark.parametrize("memory", ["layers", "hosted_gradients"])
@pytest.mark.parametrize("model", ["shared", "experts", "streams", *slow(["recurrent", "twins", "latent"])])
def test_microbatches_together_equal_microbatches_in_turn(model: str, memory: str):
    """With buffers, which each microbatch reads as the previous one left them, and with shared parameters."""
    remat = "invert" if model == "streams" else "sqrt"
    results = []
    with exact.enable_exact_numerics():
        for name in (memory, f"{memory}_together"):
            case = ExactnessCase(model=model, memory=name, placement="state", remat=remat, microbatches=4)
            results.append(exact.train(case)[0])
    assert max(exact.differences(*results).values()) <= 1e-12


@pytest.mark.first(1)
@pytest.mark.parametrize("case", [*ONCE, *UNLIKE[:1]], ids=exact.get_case_id)
def test_no_tracer_leaks(case: ExactnessCase):
    with exact.enable_exact_numerics():
        exact.check_leaks(case)
