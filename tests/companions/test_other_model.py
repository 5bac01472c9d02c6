"""A second model in host memory next to the trained one: the initial weights of the run, and its log-probabilities."""

import jax
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.framework.companions.forward import log_probs_as
from plimsoll.framework.companions.other_model import OtherModel
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from tests.pretrained.test_pretrained import directory
from tests.support import pretrained, small

MESH = {"data": 2, "fsdp": 2, "model": 2}


def log_probs_of(program, weights, batch):
    """Return the log-probabilities of the targets, computed from all logits together."""
    model = program.experiment.model
    ctx = program.evaluation_context(batch)
    logits = jax.jit(lambda params: model.logits(params, ctx, {}))(weights)
    log_probs = jax.nn.log_softmax(np.asarray(logits), axis=-1)
    return np.take_along_axis(np.asarray(log_probs), np.asarray(batch["targets"])[..., None], -1)[..., 0]


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("mesh", "accumulate", "documents"), [(None, 1, False), (None, 4, True), (MESH, 2, True)], ids=str
)
def test_the_first_weights_give_the_same_log_probabilities_row_by_row(mesh, accumulate, documents):
    config = small.experiment(small.llama(), mesh=mesh, accumulate=accumulate, documents=documents)
    program = small.program(config)
    state = program.init()
    batch = program.put(small.host_batch(program))
    other = OtherModel(program, log_probs_as("reference"))
    other.load()
    results = other(batch)
    assert list(results) == ["reference"]
    assert results["reference"].sharding.is_equivalent_to(program.batch_sharding["weights"], 2)
    expected = log_probs_of(program, program.weights(state), batch)
    np.testing.assert_allclose(results["reference"], expected, atol=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("scope", ["unit", "model"])
def test_the_weights_are_the_bits_that_the_run_begins_with_and_live_in_host_memory(scope):
    program = small.program(small.experiment(small.llama(), scope=scope))
    other = OtherModel(program, log_probs_as("reference"))
    other.load()
    assert other._state is not None
    weights = flatten(other._state["parameter"])
    for path, expected in flatten(program.init()["parameter"]).items():
        np.testing.assert_array_equal(weights[path], expected, err_msg=path)
        kind = "pinned_host" if weights[path].ndim - path.startswith("stack") > 1 else "device"
        assert weights[path].sharding.memory_kind == kind, path


def test_it_says_that_it_is_not_loaded():
    program = small.program(small.experiment(small.llama()))
    other = OtherModel(program, log_probs_as("reference"), what="the reference")
    with pytest.raises(ValueError, match=r"the reference is not loaded: call the companion's open\(\)"):
        other(program.put(small.host_batch(program)))


def published(folder, seed=0, tokenizer="chatml", **facts):
    """Write a directory of the llama family with its own tokenizer."""
    directory(folder, "llama", seed=seed, vocab_size=512, **facts)
    pretrained.write(folder, tokenizer)
    return folder


def run_of(folder):
    """Return the program of a run that starts from a directory's weights, with its tokenizer ready."""
    config = configs.load(f"hf:{folder}")
    config.data.seq_len, config.data.global_batch_size = 16, 8
    program = Program(config.instantiate(), jax.devices()[:1])
    program.experiment.data.tokenizer.prepare(folder, None, write=False)
    return program


@pytest.mark.pairs
def test_a_directory_of_other_weights_is_another_reference(tmp_path):
    program = run_of(published(tmp_path / "run"))
    batch = program.put(small.host_batch(program))
    results = {}
    for path in (None, str(tmp_path / "run"), str(published(tmp_path / "other", seed=1))):
        other = OtherModel(program, log_probs_as("reference"), path=path)
        other.check_files()
        other.load()
        results[path] = np.asarray(other(batch)["reference"])
    own, same, different = results.values()
    np.testing.assert_array_equal(own, same)
    assert np.abs(own - different).max() > 0.01
    weights = run_of(tmp_path / "other")
    expected = log_probs_of(weights, weights.weights(weights.experiment.pretrained.init(weights)), batch)
    np.testing.assert_allclose(different, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokenizer": "llama3"}, r"its token \d+ is b.*, that of data.tokenizer is b.*of the same vocabulary"),
        ({"vocab_size": 100}, r"companion.pretrained = .*data.tokenizer has 512 ids, but model.vocab_size = 100"),
    ],
    ids=str,
)
def test_a_directory_of_another_model_is_refused_in_one_line(other, message, tmp_path):
    program = run_of(published(tmp_path / "run"))
    folder = tmp_path / "other"
    if "vocab_size" in other:
        directory(folder, "llama", **other)
    else:
        published(folder, **other)
    with pytest.raises(ValueError, match=message) as error:
        OtherModel(program, log_probs_as("reference"), path=str(folder)).check_files()
    assert "\n" not in str(error.value)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    program = run_of(published(tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match=r"^companion.pretrained = .*/nowhere: no file .*nowhere/config.json"):
        OtherModel(program, log_probs_as("reference"), path=str(tmp_path / "nowhere"))
