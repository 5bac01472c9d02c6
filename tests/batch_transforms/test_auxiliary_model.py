"""A second model in host memory next to the trained one: the initial weights of the run, and its log-probabilities."""

import jax
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.framework.batch_transforms.auxiliary_model import AuxiliaryModel
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from tests.pretrained.test_pretrained import directory
from tests.support import pretrained, small

MESH = {"data": 2, "fsdp": 2, "model": 2}


def head_log_probs(head, weights, x_BSD, ctx):
    return {"reference": head.log_probs(weights, x_BSD, ctx)}


def compute_log_probs(program, weights, batch):
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
def test_initial_weights_give_equal_log_probs_per_row(mesh, accumulate, documents):
    config = small.experiment(small.llama(), mesh=mesh, accumulate=accumulate, documents=documents)
    program = small.program(config)
    state = program.init()
    batch = program.put(small.host_batch(program))
    other = AuxiliaryModel(program, head_log_probs)
    other.load()
    results = other(batch)
    assert list(results) == ["reference"]
    assert results["reference"].sharding.is_equivalent_to(program.batch_rows.sharding["weights"], 2)
    expected = compute_log_probs(program, program.weights(state), batch)
    np.testing.assert_allclose(results["reference"], expected, atol=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_weights_are_the_initial_bits_in_host_memory(scope):
    program = small.program(small.experiment(small.llama(), scope=scope))
    other = AuxiliaryModel(program, head_log_probs)
    other.load()
    assert other.state is not None
    weights = flatten(other.state["parameter"])
    for path, expected in flatten(program.init().parameter).items():
        np.testing.assert_array_equal(weights[path], expected, err_msg=path)
        kind = "pinned_host" if weights[path].ndim - path.startswith("stack") > 1 else "device"
        assert weights[path].sharding.memory_kind == kind, path


def test_error_if_the_reference_is_not_loaded():
    program = small.program(small.experiment(small.llama()))
    other = AuxiliaryModel(program, head_log_probs, what="the reference")
    with pytest.raises(ValueError, match=r"the reference is not loaded: call the batch transform's open\(\)"):
        other(program.put(small.host_batch(program)))


def write_model(folder, seed=0, tokenizer="chatml", **facts):
    """Write a directory of the llama family with its own tokenizer."""
    directory(folder, "llama", seed=seed, vocab_size=512, **facts)
    pretrained.write(folder, tokenizer)
    return folder


def load_program(folder):
    """Return the program of a run that starts from a directory's weights, with its tokenizer ready."""
    config = configs.load(f"hf:{folder}")
    config.data.seq_len, config.data.global_batch_size = 16, 8
    program = Program(config.instantiate(), jax.devices()[:1])
    program.experiment.data.tokenizer.prepare(folder, None, write=False)
    return program


@pytest.mark.pairs
def test_other_weights_make_another_reference(tmp_path):
    program = load_program(write_model(tmp_path / "run"))
    batch = program.put(small.host_batch(program))
    results = {}
    for path in (None, str(tmp_path / "run"), str(write_model(tmp_path / "other", seed=1))):
        other = AuxiliaryModel(program, head_log_probs, path=path)
        other.check_files()
        other.load()
        results[path] = np.asarray(other(batch)["reference"])
    own, same, different = results.values()
    np.testing.assert_array_equal(own, same)
    assert np.abs(own - different).max() > 0.01
    weights = load_program(tmp_path / "other")
    expected = compute_log_probs(weights, weights.weights(weights.experiment.pretrained.init(weights)), batch)
    np.testing.assert_allclose(different, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokenizer": "llama3"}, r"token \d+ is b.* there and b.* in data\.tokenizer; .*with the same vocabulary"),
        ({"vocab_size": 100}, r"batch_transform.pretrained = .*data.tokenizer has 512 ids, but model.vocab_size = 100"),
    ],
    ids=str,
)
def test_incompatible_model_directory_is_a_one_line_error(other, message, tmp_path):
    program = load_program(write_model(tmp_path / "run"))
    folder = tmp_path / "other"
    if "vocab_size" in other:
        directory(folder, "llama", **other)
    else:
        write_model(folder, **other)
    with pytest.raises(ValueError, match=message) as error:
        AuxiliaryModel(program, head_log_probs, path=str(folder)).check_files()
    assert "\n" not in str(error.value)


def test_missing_directory_is_named(tmp_path):
    program = load_program(write_model(tmp_path / "run"))
    with pytest.raises(
        FileNotFoundError, match=r"^batch_transform.pretrained = .*/nowhere: no file .*nowhere/config.json"
    ):
        AuxiliaryModel(program, head_log_probs, path=str(tmp_path / "nowhere"))
