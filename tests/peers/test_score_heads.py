"""Score heads compared live to transformers and TRL: logits, losses, gradients, ten steps, import and export."""

import jax
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.inference.sequence_scores import SequenceScorer
from plimsoll.framework.program.program import Program
from plimsoll.framework.weights.export import export_adapters, export_model
from tools.peers import ours, score_heads
from tools.peers.families import FAMILIES, SEQ_LEN
from tools.peers.recording import PeerResults

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore:::trl"),
]
SEED, LIMIT = 5, 1e-5
SEQUENCES = score_heads.Sequences.draw(SEED)


@pytest.mark.parametrize("kind", ["classify", "reward"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_float32(kind, name, theirs):
    family = score_heads.build_family(name, kind)
    model = theirs.build(family, SEED)
    weights = theirs.get_weights(model)
    expected = PeerResults.from_gradients(weights, *score_heads.their_gradients(model, SEQUENCES, kind))
    program = score_heads.build_program(family, kind)
    params = ours.parameters(family, program.experiment.model, weights)
    scores, loss, grads = score_heads.gradients(program, params, SEQUENCES.batch(kind))
    assert np.abs(scores - expected.logits).max() <= LIMIT * np.abs(expected.logits).max()
    assert loss == pytest.approx(float(expected.loss), rel=LIMIT)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}
    steps = score_heads.training_sequences(SEED)
    losses, _ = score_heads.train(program, params, [step.batch(kind) for step in steps])
    # The loss falls from 7 to 0.003: the small losses are differences of numbers as large as the first loss.
    np.testing.assert_allclose(
        losses, score_heads.their_training(model, steps, kind), rtol=LIMIT, atol=LIMIT * losses[0]
    )


@pytest.mark.parametrize("kind", ["classify", "reward"])
def test_float64(kind, theirs):
    family = score_heads.build_family("llama", kind)
    model = theirs.build(family, SEED)
    weights = {name: tensor.astype(np.float64) for name, tensor in theirs.get_weights(model).items()}
    with theirs.wide_float():
        wide = theirs.build(family, SEED).double()
        wide.load_state_dict(model.state_dict())
        expected = PeerResults.from_gradients(weights, *score_heads.their_gradients(wide, SEQUENCES, kind))
    with jax.enable_x64(True):
        program = score_heads.build_program(family, kind, param_dtype="float64", compute_dtype="float64")
        params = ours.parameters(family, program.experiment.model, weights)
        scores, loss, grads = score_heads.gradients(program, params, SEQUENCES.batch(kind))
    assert scores.dtype == np.float64
    assert np.abs(scores - expected.logits).max() <= 1e-13 * np.abs(expected.logits).max()
    assert loss == pytest.approx(float(expected.loss), rel=1e-13)
    errors = ours.relative_errors(family, grads, expected)
    assert {path: error for path, error in errors.items() if not error <= 1e-12} == {}


def their_scores(model) -> np.ndarray:
    import torch

    arrays = SEQUENCES.pad_sequences("classify")
    with torch.no_grad():
        ids, mask = (torch.as_tensor(arrays[name]) for name in ("input_ids", "attention_mask"))
        return model(input_ids=ids, attention_mask=mask).logits.numpy()


@pytest.mark.parametrize("name", score_heads.LANGUAGE_SHAPES)
def test_directories_import_and_export(name, theirs, tmp_path):
    from transformers import AutoModelForSequenceClassification

    kind = "reward" if name == "llama" else "classify"
    family = score_heads.build_family(name, kind)
    model = theirs.build(family, SEED)
    model.save_pretrained(tmp_path / "in")
    config = configs.load(f"hf:{tmp_path / 'in'}")
    config.data.seq_len = 16
    config.data.global_batch_size = 2
    program = Program(config.instantiate(), jax.devices()[:1])
    state = program.experiment.pretrained.init(program)
    expected = their_scores(model)
    actual = np.stack(list(SequenceScorer(program, state, batch_size=4)([list(t) for t in SEQUENCES.tokens])))
    assert np.abs(actual - expected).max() <= LIMIT * np.abs(expected).max()
    for published in (config.pretrained.facts, None):
        facts, exported_family = families.export_config(config.model, published)
        out = tmp_path / f"out-{published is None}"
        export_model(out, program.experiment.model, program.weights(state), exported_family, facts)
        # A batch of several rows needs to know the padding token.
        again = AutoModelForSequenceClassification.from_pretrained(out, attn_implementation="eager", pad_token_id=0)
        again.config._experts_implementation = "eager"
        assert again.config.num_labels == expected.shape[1]
        limit = 0.0 if published else 1e-6
        assert np.abs(their_scores(again.eval()) - expected).max() <= limit * np.abs(expected).max()


def test_new_head_saved_with_adapters_loads_in_peft(theirs, tmp_path):
    """Start from a language model's directory; the merged export loads by itself, and the adapter loads on the base."""
    import peft
    from transformers import AutoModelForSequenceClassification

    base = tmp_path / "in"
    theirs.build(FAMILIES["llama"], SEED).save_pretrained(base)
    config = configs.load(f"lora-reward:{base}")
    config.data.seq_len, config.data.global_batch_size = SEQ_LEN, len(score_heads.LENGTHS)
    config.model.lora.dropout = 0.0
    config.learner.optimizer.learning_rate = 1e-2
    program = Program(config.instantiate(), jax.devices()[:1])
    state = program.experiment.pretrained.init(program)
    first_score = np.array(state.parameter["head"]["score"])
    for _ in range(5):
        state, _ = program.step(state, program.put(SEQUENCES.batch("reward")))
    assert not np.array_equal(state.parameter["head"]["score"], first_score)
    tokens = [list(sequence) for sequence in SEQUENCES.tokens]
    actual = np.stack(list(SequenceScorer(program, state, batch_size=4)(tokens)))
    params = program.weights(state)
    model, published = program.experiment.model, program.experiment.pretrained
    export_adapters(tmp_path / "adapter", model, params, published.family, str(base))
    facts, family = families.export_config(config.model, published.facts)
    export_model(tmp_path / "merged", model, params, family, facts)

    def load_model(folder):
        options = {"num_labels": 1, "pad_token_id": 0, "attn_implementation": "eager"}
        return AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()

    for one in (
        load_model(tmp_path / "merged"),
        peft.PeftModel.from_pretrained(load_model(base), tmp_path / "adapter").eval(),
    ):
        assert np.abs(their_scores(one) - actual).max() <= LIMIT * np.abs(actual).max()
