"""The hand-written step is GPT-2 with AdamW, and trains exactly like our program and like torch."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from plimsoll.launch.cli import Parser
from tools.bench import plain_gpt2
from tools.bench.contestants import PlainJax, Torch, overrides
from tools.bench.sizes import LEARNING_RATE, WEIGHT_DECAY, Batches, Size, write_tokens

TINY = Size(
    "tiny", layers=2, heads=2, dim=16, seq_len=12, batch=8, vocab=50, positions=16, config="nanogpt-cpu", steps=1
)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    write_tokens(path, TINY.vocab, 4000)
    return path


def numpy_logits(params, tokens: np.ndarray, heads: int) -> np.ndarray:
    """Return the logits of GPT-2 in float64, with attention computed one position and one head at a time."""
    p64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(p, x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def attend(q, k, v):
        out = np.zeros_like(q)
        for t in range(len(q)):
            scores = k[: t + 1] @ q[t] / np.sqrt(q.shape[-1])
            chances = np.exp(scores - scores.max())
            out[t] = chances @ v[: t + 1] / chances.sum()
        return out

    rows = []
    for row in tokens:
        x = p64["wte"][row] + p64["wpe"][: len(row)]
        for p in p64["layers"]:
            qkv = norm(p["ln1"], x) @ p["qkv"]["w"] + p["qkv"]["b"]
            q, k, v = (np.split(part, heads, axis=-1) for part in np.split(qkv, 3, axis=-1))
            y = np.concatenate([attend(*head) for head in zip(q, k, v, strict=True)], axis=-1)
            x = x + y @ p["out"]["w"] + p["out"]["b"]
            x = x + gelu(norm(p["ln2"], x) @ p["up"]["w"] + p["up"]["b"]) @ p["down"]["w"] + p["down"]["b"]
        rows.append(norm(p64["lnf"], x) @ p64["wte"].T)
    return np.stack(rows)


def perturb_params(params, seed: int = 7):
    """Return the parameters plus noise, so that a mistake in any gain, bias or weight shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.2, x.shape).astype(np.float32), params)


def test_logits_equal_float64_numpy(tokens: Path):
    params = perturb_params(plain_gpt2.init(TINY))
    ids, _ = Batches(tokens, TINY)()
    expected = numpy_logits(params, ids, TINY.heads)
    logits = jax.jit(plain_gpt2.compute_logits, static_argnums=2)(params, ids, TINY.heads)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.pairs
def test_loss_falls_on_a_repeated_batch(tokens: Path):
    params = plain_gpt2.init(TINY)
    state = plain_gpt2.OPTIMIZER.init(params)
    batch = Batches(tokens, TINY)()
    losses = []
    for _ in range(30):
        params, state, loss = plain_gpt2.step(params, state, *batch, heads=TINY.heads)
        losses.append(float(loss))
    assert abs(losses[0] - np.log(TINY.vocab)) < 0.1
    assert losses[-1] < losses[0] - 0.3
    assert np.all(np.diff(losses) < 0)


@pytest.mark.pairs
def test_only_matrices_decay():
    params = plain_gpt2.init(TINY)
    zeros = jax.tree.map(np.zeros_like, params)

    @jax.jit
    def apply_update(params, grads):
        updates, _ = plain_gpt2.OPTIMIZER.update(grads, plain_gpt2.OPTIMIZER.init(params), params)
        return optax.apply_updates(params, updates)

    shrunk = apply_update(params, zeros)
    factor = 1 - LEARNING_RATE * WEIGHT_DECAY
    np.testing.assert_allclose(shrunk["wte"], params["wte"] * factor, rtol=1e-6)
    np.testing.assert_allclose(shrunk["layers"][0]["up"]["w"], params["layers"][0]["up"]["w"] * factor, rtol=1e-6)
    np.testing.assert_array_equal(shrunk["wpe"], params["wpe"])
    np.testing.assert_array_equal(shrunk["lnf"]["g"], params["lnf"]["g"])


def test_parameter_count_matches_the_formula():
    count = sum(leaf.size for leaf in jax.tree.leaves(plain_gpt2.init(TINY)))
    assert count == TINY.num_parameters


def as_plain(ours) -> plain_gpt2.Params:
    """Return our parameters in the structure of the hand-written step."""
    p = {path: np.asarray(leaf) for path, leaf in flatten(ours).items()}

    def join_heads(i: int, name: str) -> np.ndarray:
        parts = [p[f"stack/block0/attention/{part}/{name}"][i] for part in ("query", "key", "value")]
        return np.concatenate(parts, axis=-1)

    def linear(i: int, path: str) -> plain_gpt2.Params:
        return {"w": p[f"stack/block0/{path}/weight"][i], "b": p[f"stack/block0/{path}/bias"][i]}

    def norm(i: int, path: str) -> plain_gpt2.Params:
        return {"g": p[f"stack/block0/{path}/scale"][i], "b": p[f"stack/block0/{path}/bias"][i]}

    layers = [
        {
            "ln1": norm(i, "attention_norm"),
            "qkv": {"w": join_heads(i, "weight"), "b": join_heads(i, "bias")},
            "out": linear(i, "attention/output"),
            "ln2": norm(i, "mlp_norm"),
            "up": linear(i, "mlp/up"),
            "down": linear(i, "mlp/down"),
        }
        for i in range(TINY.layers)
    ]
    return {
        "wte": p["embed/token"],
        "wpe": p["embed/position"],
        "layers": layers,
        "lnf": {"g": p["head/norm/scale"], "b": p["head/norm/bias"]},
    }


@pytest.mark.pairs
def test_benchmark_config_trains_the_same(tokens: Path):
    config = Parser("train", "").parse(overrides(TINY, tokens)).config
    program = Program(config.instantiate(), jax.devices()[:1])
    state = program.init()
    params = jax.tree.map(np.array, as_plain(state.parameter))
    optimizer = plain_gpt2.OPTIMIZER.init(params)
    batches = Batches(tokens, TINY)
    for _ in range(4):
        ids, targets = batches()
        batch = {"tokens": ids, "targets": targets, "weights": np.ones(ids.shape, np.float32)}
        state, metrics = program.step(state, program.put(batch))
        params, optimizer, loss = plain_gpt2.step(params, optimizer, ids, targets, heads=TINY.heads)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=2e-6)
    # The gradient of a key's bias is only rounding, which Adam turns into full steps, so key biases are not compared.
    key = slice(TINY.dim, 2 * TINY.dim)
    expected, given = params, as_plain(state.parameter)
    for tree in (expected, given):
        for layer in tree["layers"]:
            layer["qkv"]["b"] = np.delete(np.asarray(layer["qkv"]["b"]), key)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.02 * LEARNING_RATE)


@pytest.mark.peers
def test_torch_trains_the_same(tokens: Path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = Torch(TINY, tokens, compiled=False)
    plain = PlainJax(TINY, tokens)
    t = {name: p.detach().numpy().copy() for name, p in theirs.model.named_parameters()}

    def pair(path: str, weight: str = "w") -> plain_gpt2.Params:
        return {weight: t[f"transformer.{path}.weight"], "b": t[f"transformer.{path}.bias"]}

    names = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    layers = [
        {name: pair(f"h.{i}.{path}") for name, path in names.items()}
        | {"ln1": pair(f"h.{i}.ln_1", "g"), "ln2": pair(f"h.{i}.ln_2", "g")}
        for i in range(TINY.layers)
    ]
    embeddings = {"wte": t["transformer.wte.weight"], "wpe": t["transformer.wpe.weight"]}
    plain.params = jax.tree.map(jax.numpy.array, {**embeddings, "layers": layers, "lnf": pair("ln_f", "g")})
    assert theirs.hello().parameters == plain.hello().parameters == TINY.num_parameters
    assert torch.get_num_threads() >= 1
    for _ in range(4):  # both draw the same windows from the same seed
        assert theirs.run(1) == pytest.approx(plain.run(1), rel=1e-5)
