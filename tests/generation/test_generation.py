"""Generation compared to the model itself: no cache, no padding, one device, weights on the device."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.inference.generation import Generator, bucket
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import copy_partition
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.latent import with_latents

PROMPTS = [[1, 2, 3], [5, 9, 33, 2, 60, 7, 7, 12, 1], [7]]
NEW = 12


def make_alternating_model() -> Config:
    """Return a model that alternates local and global layers, with soft caps, like Gemma 2."""
    model = small.llama(stack__num_layers=4)
    local, everywhere = small.block(model).copy(), small.block(model).copy()
    local.attention.window = 4
    local.attention.softcap = everywhere.attention.softcap = 20.0
    model.stack.pattern = [local, everywhere]
    model.head.softcap = 15.0
    return model


def make_shared_model() -> Config:
    model = make_alternating_model()
    model.stack.shared = [1]
    return model


def make_expert_model() -> Config:
    """Return a model with experts in every second layer, whose router has buffers in addition to the cache."""
    model = small.llama(stack__num_layers=4)
    dense, sparse = small.block(model).copy(), small.block(model).copy()
    sparse.mlp = mixture(experts=4, top_k=2, hidden=24)
    sparse.mlp.experts.init.stddev = 0.3
    sparse.mlp.router.bias_rate = 0.1
    model.stack.pattern = [dense, sparse]
    return model


MODELS = {
    "gpt2": small.gpt2,
    "llama-gqa": small.llama,
    "window": lambda: small.llama(stack__pattern__0__attention__window=5),
    "alternating": make_alternating_model,
    "shared": make_shared_model,
    "experts": make_expert_model,
    "qk-norm": lambda: small.llama(stack__pattern__0__attention__qk_norm=config_for(RMSNorm)),
    "latent": lambda: with_latents(small.llama()),
    "latent-lora": lambda: with_latents(small.llama(lora=config_for(LoRA)), query_rank=None),
    "lora-nf4": lambda: small.llama(dim=64, stack__pattern__0__mlp__hidden=64, lora=config_for(LoRA, base="nf4")),
}


def program(config: Config, mesh: dict[str, int] | None = None) -> Program:
    return small.program(small.experiment(config, mesh=mesh))


SHARDED = {"data": 2, "fsdp": 2, "model": 2}


@cache
def start_generator(name: str, mesh: frozenset[tuple[str, int]] | None = None) -> tuple[Program, Any, Generator]:
    """Return the program of one of MODELS, its initial state, and a generator.

    With a mesh, the state is the one-device state, resharded. Tests share the results and must not change them.
    """
    built = program(MODELS[name](), mesh and dict(mesh))
    state = jax.device_put(start_generator(name)[1], built.layout.shardings()) if mesh else built.init()
    return built, state, Generator(built, state)


def decode_without_cache(program: Program, state: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Decode greedily, running the whole sequence through the model for each token."""
    rows, model = [list(prompt) for prompt in prompts], program.experiment.model
    logits = jax.jit(lambda params, x: model.logits(params, program.evaluation_context({"tokens": x}), state["buffer"]))
    weights = program.weights(state)
    for _ in range(count):
        window = np.zeros((len(rows), 32), np.int32)
        for filled, row in zip(window, rows, strict=True):
            filled[: len(row)] = row
        values = np.asarray(logits(weights, window))
        for one, row in zip(values, rows, strict=True):
            row.append(int(np.argmax(one[len(row) - 1])))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.once("llama-gqa")
@pytest.mark.parametrize("name", MODELS)
def test_padded_batch_equals_single_rows_without_a_cache(name: str) -> None:
    one, state, generator = start_generator(name)
    got = generator(PROMPTS, Sampling(NEW))
    assert got == decode_without_cache(one, state, PROMPTS, NEW)
    assert len({*got[0], *got[1], *got[2]}) > 3, "nearly constant output shows little"


def talk(generator: Generator, prompt: list[int], count: int, stop_after: int | None = None) -> list[int]:
    """Return the greedy answer to a prompt, keeping the cache for the next call."""
    tokens = []
    for (token,) in generator.stream([prompt], Sampling(count), keep_cache=True):
        tokens.append(token)
        if len(tokens) == stop_after:
            break
    return tokens


@pytest.mark.once("window")
@pytest.mark.parametrize(
    "name", ["gpt2", "window", "alternating", "experts", "latent", "alternating on a mesh", "latent on a mesh"]
)
def test_conversation_prefills_only_new_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, is_sharded = name.partition(" on a ")
    mesh = frozenset({"data": 2, "fsdp": 1, "seq": 2, "model": 2}.items()) if is_sharded else None
    generator = start_generator(model, mesh)[2]
    alone, first_state, _ = start_generator(model)
    read: list[str] = []
    for function in ("_prefill", "_extend"):
        original = getattr(generator, function)
        count = lambda *args, name=function, original=original: read.append(name) or original(*args)  # noqa: E731
        monkeypatch.setattr(generator, function, count)
    prompt = PROMPTS[1]
    for new_tokens, length, stop_after in [([], 4, None), ([3, 1], 3, None), ([9], 5, 2), ([8, 8, 4], 2, None)]:
        prompt = [*prompt, *new_tokens]
        answer = talk(generator, prompt, length, stop_after)
        assert answer == decode_without_cache(alone, first_state, [prompt], stop_after or length)[0], prompt
        prompt = [*prompt, *answer]
    assert read == ["_prefill", "_extend", "_extend", "_extend"]
    # After a change in the history, the common prefix is not read again.
    changed = [*prompt[:6], 11, 12]
    assert talk(generator, changed, 3) == decode_without_cache(alone, first_state, [changed], 3)[0]
    # This needs more positions than the cache has room for, up to the model's last one.
    assert talk(generator, changed, 22) == decode_without_cache(alone, first_state, [changed], 22)[0]
    assert read[4:] == ["_extend", "_extend"]
    # A batch, or a prompt with a different beginning, starts over.
    assert generator(PROMPTS, Sampling(2)) == decode_without_cache(alone, first_state, PROMPTS, 2)
    assert talk(generator, [4, *prompt], 1) == decode_without_cache(alone, first_state, [[4, *prompt]], 1)[0]
    assert read[6:] == ["_prefill", "_prefill"]


@pytest.mark.pairs
def test_a_failed_step_leaves_no_cache_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(*start_generator("llama-gqa")[:2])
    answer = talk(generator, PROMPTS[1], 4)
    decode = generator._decode

    def fails(*args: Any) -> None:
        decode(*args)  # this donates the cache
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generator, "_decode", fails)
        with pytest.raises(KeyboardInterrupt):
            talk(generator, [*PROMPTS[1], 3], 4)
    assert talk(generator, PROMPTS[1], 4) == answer


@pytest.mark.pairs
def test_bfloat16_cache() -> None:
    one = program(small.llama(compute_dtype="bfloat16"))
    generator = Generator(one, one.init())
    assert generator(PROMPTS, Sampling(4))[0] == generator(PROMPTS[:1], Sampling(4))[0]
    seen = []
    decode = generator._decode
    generator._decode = lambda *args: seen.append(args[2]) or decode(*args)
    generator(PROMPTS, Sampling(4))
    shapes = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(seen[0])}
    assert shapes == {((2, 3, bucket(20), 2, 8), "bfloat16")}


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("model", "mesh", "temperature"),
    [
        ("shared", SHARDED, 1.0),
        ("shared", {"fsdp": 4, "seq": 2}, 0.0),
        # Prompts are sharded over positions; decoding one token at a time cannot be.
        ("experts", {"fsdp": 2, "expert": 2, "seq": 2}, 1.0),
        ("latent", {"fsdp": 2, "expert": 2, "seq": 2}, 1.0),
    ],
)
def test_a_mesh_equals_one_device(model: str, mesh: dict[str, int], temperature: float) -> None:
    sampling = Sampling(NEW, temperature, seed=4)
    one, many = start_generator(model)[2], start_generator(model, frozenset(mesh.items()))[2]
    assert many(PROMPTS, sampling) == one(PROMPTS, sampling)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, SHARDED])
def test_offloaded_weights_equal_device_weights(mesh: dict[str, int] | None) -> None:
    here, state, generator = start_generator("shared", mesh and frozenset(mesh.items()))
    sampling = Sampling(NEW, 1.0, seed=4)
    offloaded_specs = copy_partition(here.layout.specs["parameter"], pattern=".", memory_kind="pinned_host")
    there = replace(state, parameter=jax.device_put(state["parameter"], here.layout.shardings(offloaded_specs)))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there["parameter"])} == {"pinned_host"}
    assert Generator(here, there)(PROMPTS, sampling) == generator(PROMPTS, sampling)


@pytest.mark.pairs
def test_samples_depend_only_on_seed_and_row() -> None:
    generator = start_generator("llama-gqa")[2]
    draw = lambda prompts, seed: generator(prompts, Sampling(NEW, 1.0, seed=seed))  # noqa: E731
    batch = draw([PROMPTS[0]] * 3, 7)
    assert batch == draw([PROMPTS[0]] * 3, 7)
    assert len({tuple(row) for row in [*batch, *draw(PROMPTS[:1], 8)]}) == 4
    assert draw(PROMPTS[:1], 7)[0] == batch[0] == draw(PROMPTS, 7)[0]


def test_stop_tokens_end_only_their_own_row() -> None:
    generator = start_generator("llama-gqa")[2]
    rows = generator(PROMPTS, Sampling(NEW))
    stops = (rows[0][3], rows[1][5])
    got = generator(PROMPTS, Sampling(NEW, stop_ids=stops))
    cuts = [next((i for i, token in enumerate(row) if token in stops), NEW) for row in rows]
    assert got == [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    assert 0 < min(cuts) < NEW
    steps = list(generator.stream(PROMPTS[:1], Sampling(NEW, stop_ids=stops)))
    assert steps == [[token] for token in got[0]]


@pytest.mark.pairs
def test_compiles_once_per_shape() -> None:
    generator = Generator(*start_generator("llama-gqa")[:2])  # nothing is compiled yet
    for sampling in (
        Sampling(3),
        Sampling(5),
        Sampling(4, 0.5),
        Sampling(4, 1.5),
        Sampling(4, 1.5, 3),
        Sampling(4, 2.0, top_p=0.4),
    ):
        generator(PROMPTS, sampling)
    assert generator._prefill._cache_size() == generator._decode._cache_size() == 3


def test_lengths_fall_into_few_buckets() -> None:
    lengths = [bucket(n) for n in range(1, 4097)]
    assert all(n <= b <= max(16, n + 15, 1.125 * n + 1) for n, b in enumerate(lengths, 1))
    assert len({*lengths}) < 60


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        ([[1], []], {}, "at least one token each"),
        ([[1, 64]], {}, "has the token 64; expected less than vocab_size = 64"),
        ([[1] * 30], {"max_new_tokens": 3}, "30 tokens and max_new_tokens = 3 are over the model's 32 positions"),
        ([[1]], {"top_p": 0.0}, "top_p: expected over 0, and at most 1, given 0.0"),
        ([[1]], {"top_k": 0}, "top_k: expected at least 1, given 0"),
        ([[1]], {"temperature": float("nan")}, "temperature: expected 0 or more, given nan"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, given 0"),
    ],
)
def test_bad_requests(prompts: list[list[int]], fields: dict[str, Any], message: str) -> None:
    generator = start_generator("gpt2")[2]
    with pytest.raises(ValueError, match=message):
        generator.stream(prompts, Sampling(**{"max_new_tokens": 1, **fields}))


@pytest.mark.pairs
def test_positions_to_the_last_one() -> None:
    one, state, generator = start_generator("gpt2")
    assert generator([[3] * 20], Sampling(12)) == decode_without_cache(one, state, [[3] * 20], 12)
    assert generator([], Sampling(12)) == []
