"""Samples compared to probabilities computed in numpy; streamed text compared to decoding all tokens at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.inference.generation import TextStream
from plimsoll.framework.inference.sampling import Sampling, choose

LOGITS = np.float32([1.0, 3.0, 2.5, -1.0, 0.5, 2.0])
DRAWS = 20_000


def compute_expected(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probabilities after temperature, then top-k, then top-p, in the order of published sampling code."""
    p = np.exp(LOGITS / temperature)
    order = np.argsort(-p)
    p[order[top_k:]] = 0
    p /= p.sum()
    keep, total = [], 0.0
    for token in order:
        if total >= top_p:
            break
        keep.append(token)
        total += p[token]
    kept = np.zeros_like(p)
    kept[keep] = p[keep]
    return kept / kept.sum()


def sample_frequencies(kind: str, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=3).to_arrays(len(LOGITS), DRAWS)
    tokens = choose(kind, jnp.tile(LOGITS, (DRAWS, 1)), settings, jnp.int32(5))
    return np.bincount(np.asarray(tokens), minlength=len(LOGITS)) / DRAWS


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("kind", "temperature", "top_k", "top_p"),
    [("all", 1.0, 6, 1.0), ("all", 0.5, 6, 1.0), ("filtered", 1.0, 3, 1.0), ("filtered", 1.5, 6, 0.7)]
    + [("filtered", 0.7, 4, 0.8), ("filtered", 1.0, 6, 1e-6), ("filtered", 1.0, 1, 1.0)],
)
def test_samples_follow_the_probabilities(kind: str, temperature: float, top_k: int, top_p: float) -> None:
    want, got = compute_expected(temperature, top_k, top_p), sample_frequencies(kind, temperature, top_k, top_p)
    np.testing.assert_array_equal(got == 0, want == 0)
    np.testing.assert_allclose(got, want, atol=4 * 0.5 / DRAWS**0.5)


def test_greedy_breaks_ties_by_the_first_id() -> None:
    settings = Sampling().to_arrays(3, 2)
    assert choose("greedy", jnp.float32([[1, 7, 7], [2, 0, 1]]), settings, jnp.int32(0)).tolist() == [1, 0]


def pieces(text: str, *stops: str) -> list[str]:
    stream = TextStream(ByteTokenizer(), stops)
    return [stream.push(token) for token in [*text.encode(), None]]


def test_only_complete_characters_are_emitted() -> None:
    text = "aé漢🙂z"
    got = pieces(text)
    assert "".join(got) == text
    assert [piece for piece in got if piece] == list(text)
    broken = TextStream(ByteTokenizer())
    assert [broken.push(token) for token in [*"漢".encode()[:2], None]] == ["", "", "\ufffd"]


def test_stop_texts() -> None:
    assert "".join(pieces("one END two", "END")) == "one "
    assert pieces("abcd", "bce")[:4] == ["a", "", "", "bcd"]
    assert "".join(pieces("abc", "bcd")) == "abc"
    assert "".join(pieces("x--y==z", "==", "--")) == "x"
    stream = TextStream(ByteTokenizer(), ["\n"])
    assert stream.push(ord("a")) == "a"
    assert not stream.ended
    assert [stream.push(ord("\n")), stream.push(ord("b"))] == ["", ""]
    assert stream.ended
