"""The hand-written torch step is the same model as ours, and trains equally from the same weights."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from plimsoll.launch.cli import Parser
from tools.bench.contestants import missing, overrides
from tools.bench.sizes import Batches, Size, write_tokens

GPT2 = Size("tiny", 2, 2, 16, 12, 8, 50, 16, "nanogpt-cpu", 1)
LLAMA = Size("tiny", 2, 4, 32, 12, 8, 50, 16, "llama2-7b", 1, "llama", kv_heads=2, hidden=24)


@pytest.mark.peers
@pytest.mark.parametrize("size", [GPT2, LLAMA], ids=lambda size: size.family)
def test_torch_trains_as_ours_from_the_same_weights(size: Size, tmp_path: Path):
    pytest.importorskip("torch")
    from tools.bench import plain_torch

    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, size.vocab, 4000)
    config = Parser("train", "").parse(overrides(size, tokens)).config
    program = Program(config.instantiate(), jax.devices()[:1])
    state = program.init()
    rng = np.random.default_rng(7)  # noise, so that a mistake in any parameter shows
    weights = jax.tree.map(lambda x: x + rng.normal(0, 0.2, x.shape).astype(np.float32), state.parameter)
    state = replace(state, parameter=weights)
    model = plain_torch.build(size)
    plain_torch.load(model, {path: np.asarray(x) for path, x in flatten(state.parameter).items()})
    optimizer = plain_torch.build_optimizer(model)
    assert sum(p.numel() for p in model.parameters()) == size.num_parameters
    batches = Batches(tokens, size)
    losses = []
    for _ in range(4):
        ids, targets = batches()
        batch = {"tokens": ids, "targets": targets, "weights": np.ones(ids.shape, np.float32)}
        state, metrics = program.step(state, program.put(batch))
        expected = float(plain_torch.train_step(model, optimizer, ids, targets))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
        losses.append(expected)
    assert len(set(losses)) == 4


def test_llama_parameter_count_matches_ours(tmp_path: Path):
    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, LLAMA.vocab, 100)
    model = Parser("train", "").parse(overrides(LLAMA, tokens)).config.instantiate().model
    count = sum(int(np.prod(spec.shape)) for spec in flatten(model.parameter_specs()).values())
    assert count == LLAMA.num_parameters
    assert replace(LLAMA, kv_heads=4).num_parameters - count == LLAMA.layers * 2 * 32 * 16


def test_only_ours_and_torch_have_a_llama():
    assert [missing(name, "llama") for name in ("ours", "plain", "eager", "compiled")] == [None, *["GPT-2 only"] * 3]
