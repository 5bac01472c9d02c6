"""Scores compared to a log-softmax computed by hand."""

from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from plimsoll.framework.data.tokenizers import ByteTokenizer, Tokenizer
from plimsoll.framework.inference.scoring import Scorer, encode_pair
from plimsoll.framework.program.program import Program
from tests.support import small

ROWS = [([1, 5, 9, 2, 2, 7], 3), ([3, 4], 1), ([8] * 10, 1), ([*range(40)], 35), ([*range(40)], 2), ([6, 6, 6], 2)]


def compile_logits(program: Program, state: Any) -> Any:
    """Return a function from tokens to logits that compiles once: it pads the row, and no token sees the padding."""
    model, weights = program.experiment.model, program.weights(state)
    compiled = jax.jit(lambda weights, x: model.logits(weights, program.evaluation_context({"tokens": x}), {}))

    def logits(tokens: list[int]) -> np.ndarray:
        row = np.zeros((1, program.experiment.data.seq_len), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(compiled(weights, row))[0, : len(tokens)]

    return logits


def score_by_hand(logits: Any, seq_len: int, tokens: list[int], start: int) -> tuple[float, int, bool]:
    start -= max(0, len(tokens) - seq_len - 1)
    tokens, start = tokens[-seq_len - 1 :], max(1, start)
    log_probs = log_softmax(np.float64(logits(tokens[:-1])), axis=-1)
    picked = [(log_probs[i - 1, token], log_probs[i - 1].argmax() == token) for i, token in enumerate(tokens)][start:]
    return sum(float(p) for p, _ in picked), len(picked), all(greedy for _, greedy in picked)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "model": 2, "seq": 2}])
def test_scores_are_summed_log_probabilities(mesh: dict[str, int] | None) -> None:
    program = small.program(small.experiment(small.llama(head__chunk_tokens=5), mesh=mesh))
    one = small.program(small.experiment(small.llama()))
    state = one.init()
    greedy, logits = [1, 5, 9], compile_logits(one, state)
    for _ in range(2):
        greedy.append(int(logits(greedy)[-1].argmax()))
    rows = [*ROWS, (greedy, 3)]
    scores = list(Scorer(program, jax.device_put(state, program.layout.shardings()), batch_size=4).score(rows))
    for score, row in zip(scores, rows, strict=True):
        log_prob, tokens, is_greedy = score_by_hand(logits, 16, *row)
        assert score.log_prob == pytest.approx(log_prob, rel=1e-5)
        assert (score.tokens, score.greedy) == (tokens, is_greedy)
    assert [score.greedy for score in scores][-1:] == [True]
    assert scores[0].tokens == 3


@pytest.mark.pairs
def test_a_text_is_predicted_once_in_windows() -> None:
    program = small.program(small.experiment(small.llama()))
    state = program.init()
    tokens = np.random.default_rng(0).integers(0, small.VOCAB, 16 * 3 + 6)
    score = Scorer(program, state, batch_size=3).text(tokens, 100)
    windows = [tokens[at : at + 17].tolist() for at in (0, 16, 32, 48)]
    logits = compile_logits(program, state)
    nll = -sum(score_by_hand(logits, 16, window, 1)[0] for window in windows)
    assert score.tokens == len(tokens) - 1
    assert score.loss == pytest.approx(nll / score.tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(np.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(nll / np.log(2) / 100, rel=1e-5)


class Words(Tokenizer):
    """Tokenizer with one id per byte and no separator."""

    eos_id = None

    def encode_batch(self, texts: Any) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def test_pairs() -> None:
    tokens, start = encode_pair(ByteTokenizer(), "ab  ", "cd")
    assert (tokens, start) == ([256, *b"ab  cd"], 3)
    assert encode_pair(ByteTokenizer(), "", "x") == ([256, ord("x")], 1)
    assert encode_pair(Words(), "a", "b") == ([97, 98], 1)
    with pytest.raises(ValueError, match="expected text before 'b' to predict it from"):
        encode_pair(Words(), "", "b")
    with pytest.raises(ValueError, match="'' has no tokens"):
        encode_pair(Words(), "a", "")
