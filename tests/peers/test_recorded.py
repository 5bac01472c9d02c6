"""Each model family compared to recorded results of transformers and torch (`python -m tools.record_peers`).

The promise is 1e-4 relative. float32 rounding costs about 2e-6 (torch's own: recorded.json), so the limits are tighter:
a small mistake, such as a wrong eps, should show. Each family runs once as a loop over layers and once unrolled, and
with and without chunks of logits; which variant computes the gradients and which one trains differs by family.
"""

import json
import zipfile

import jax
import numpy as np
import pytest

from plimsoll.framework.layout import flatten
from tools.peers import ours
from tools.peers.families import FAMILIES, ROTARY, ROTARY_POSITIONS, PeerFamily
from tools.peers.recording import FOLDER, load

LIMIT = 1e-5
VARIANTS = {
    "loop, chunks of logits": {"unroll": 1, "chunk_tokens": 8},
    "no loop, full remat": {"unroll": 0, "chunk_tokens": 0, "remat": "full"},
}
LOOP, FLAT = VARIANTS
GRADIENTS = {name: (LOOP, FLAT)[index % 2] for index, name in enumerate(FAMILIES)}
TRAINING = {name: FLAT if variant is LOOP else LOOP for name, variant in GRADIENTS.items()}


def setup(name, **options):
    """Return (program, our parameters, recorded inputs, recorded results)."""
    inputs, results = load(FOLDER / f"{name}.npz")
    program = ours.build_program(ours.experiment(FAMILIES[name], **options))
    return program, ours.parameters(FAMILIES[name], program.experiment.model, results.weights), inputs, results


@pytest.mark.once(
    "gpt2-loop, chunks of logits",
    "llama-no loop, full remat",
    "qwen3-yarn-loop, chunks of logits",
    "gemma3-no loop, full remat",
    "phi3-loop, chunks of logits",
    "gpt-oss-loop, chunks of logits",
    "deepseek-v2-groups-loop, chunks of logits",
)
@pytest.mark.parametrize(("name", "variant"), [*GRADIENTS.items(), pytest.param("gpt2", FLAT, marks=pytest.mark.pairs)])
def test_logits_and_gradients(name, variant):
    program, params, inputs, theirs = setup(name, **VARIANTS[variant])
    logits, loss, grads = ours.gradients(program, params, inputs.batch())
    assert np.linalg.norm(logits - theirs.logits) <= LIMIT * np.linalg.norm(theirs.logits)
    assert np.abs(logits - theirs.logits).max() <= LIMIT * np.abs(theirs.logits).max()
    assert loss == pytest.approx(theirs.loss, rel=LIMIT)
    errors = ours.relative_errors(FAMILIES[name], grads, theirs)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}


@pytest.mark.pairs
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_equal_separate_documents(name):
    program, params, inputs, theirs = setup(name)
    batch = inputs.pack_batch()
    used = batch["weights"] > 0
    logits = ours.logits(program, params, batch)
    assert np.isfinite(logits).all()
    assert np.abs(logits - theirs.packed_logits)[used].max() <= LIMIT * np.abs(theirs.packed_logits).max()
    # The masks matter: without them, the logits of the second document differ.
    causal = ours.logits(program, params, {name: batch[name] for name in ("tokens", "targets", "weights")})
    second = used & (batch["segments"] > 1)
    assert np.abs(causal - theirs.packed_logits)[second].max() > 1000 * LIMIT * np.abs(theirs.packed_logits).max()


@pytest.mark.pairs
@pytest.mark.parametrize(("name", "variant"), TRAINING.items())
def test_ten_adamw_steps(name, variant):
    program, params, inputs, theirs = setup(name, **VARIANTS[variant])
    losses, moved = ours.train(program, params, inputs)
    np.testing.assert_allclose(losses, theirs.losses, rtol=LIMIT)
    assert theirs.losses[0] - theirs.losses[-1] > 0.5, "a loss that hardly moves would say little about the updates"
    # Adam divides a gradient by its own size, so if a gradient is only rounding error, the update is too.
    compared = sorted(set(moved) - set(FAMILIES[name].no_gradient))
    np.testing.assert_allclose(
        [moved[path] for path in compared], [theirs.update_norms[path] for path in compared], rtol=20 * LIMIT
    )


@pytest.mark.pairs
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_tables(name):
    head_dim, theta, scaling = ROTARY[name]
    positions = np.asarray(ROTARY_POSITIONS)
    with np.load(FOLDER / "rotary.npz") as file:
        query, expected, their_error = (file[f"{name}:{key}"] for key in ("query", "rotated", "float32_error"))
    with jax.enable_x64(True):
        exact = ours.rotate(head_dim, theta, scaling, positions, query)
    assert exact.dtype == np.float64
    # An angle of 1e5 radians has a rounding error of 1.5e-11.
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-10)
    rounded = ours.rotate(head_dim, theta, scaling, positions, query.astype(np.float32))
    assert rounded.dtype == np.float32
    # float32 angles lose digits as positions grow; ours lose no more than those of transformers.
    assert (np.abs(rounded - expected).max(axis=1) <= 2 * their_error + 1e-6).all()


def test_scaled_tables_differ_from_plain_ones():
    """The comparison covers all three branches of the scaling: unchanged, interpolated and divided frequencies."""
    for name, (head_dim, theta, scaling) in ROTARY.items():
        if scaling is None:
            continue
        plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        scaled = ours.rotary_frequencies(head_dim, theta, scaling)
        ratio = plain / scaled
        assert np.isclose(ratio, 1).any(), name
        assert np.isclose(ratio, scaling["factor"]).any(), name
        assert ((ratio > 1.01) & (ratio < scaling["factor"] / 1.01)).any(), name


def test_recorded_files_cover_these_families_and_are_small():
    about = json.loads((FOLDER / "recorded.json").read_text())
    assert about["versions"].keys() >= {"torch", "transformers"}
    assert about["command"] == f"python -m tools.record_peers --seed={about['seed']}"
    assert {name: entry["config"] for name, entry in about["families"].items()} == {
        name: family.facts for name, family in FAMILIES.items()
    }, "families changed: record again"
    files = sorted(FOLDER.glob("*.npz"))
    assert {file.stem for file in files} == {*FAMILIES, "rotary"}
    for file in files:
        assert zipfile.is_zipfile(file)
        assert file.stat().st_size < 300_000, file.name


def test_nothing_is_trivial_in_the_recorded_weights():
    """Only gradients that must be zero are zero, no norm is all ones, no bias all zeros; else agreement is cheap."""
    for name, family in FAMILIES.items():
        _, results = load(FOLDER / f"{name}.npz")
        for tensor, weight in results.weights.items():
            assert weight.std() > 0.05, (name, tensor)
        gradients = flatten(ours.to_ours(family, results.gradients))
        norms = {path: float(np.linalg.norm(gradient)) for path, gradient in gradients.items()}
        small = {path for path, norm in norms.items() if norm < 1e-4 * max(norms.values())}
        assert small == set(family.no_gradient), name


def test_a_forgotten_tensor_is_an_error():
    _, results = load(FOLDER / "llama.npz")
    family = FAMILIES["llama"]
    extra = {**results.weights, "model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        ours.to_ours(family, extra)
    _, gpt2 = load(FOLDER / "gpt2.npz")
    fused = PeerFamily("no keys", FAMILIES["gpt2"].facts)
    del fused.places["stack/block0/attention/key/weight"]
    with pytest.raises(ValueError, match=r"c_attn\.weight"):
        ours.to_ours(fused, gpt2.weights)
