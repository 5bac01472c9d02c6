"""GPT-2 and Llama shapes to compare, and the tokens that all contestants read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

NUM_TOKENS = 1 << 20
LEARNING_RATE = 1e-3
B1, B2, WEIGHT_DECAY, CLIP = 0.9, 0.95, 0.1, 1.0
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Size:
    """A GPT-2 or a Llama: shape of the model, shape of a batch.

    Args:
        name: name on the command line.
        layers: number of layers L.
        heads: number of attention heads N.
        dim: model width D.
        seq_len: sequence length S.
        batch: sequences per step B.
        vocab: vocabulary size V.
        positions: rows of the table of learned positions; for a Llama, which has no table, its context length.
        config: the named config that ours starts from.
        steps: steps per turn; a turn should last about a second, so that a busy machine affects both of a pair.
        family: "gpt2" has biases, LayerNorm, GELU and tied embeddings; "llama" has RMSNorm, rotary positions, SwiGLU
            and untied embeddings.
        kv_heads: heads of keys and values; as many as heads by default.
        hidden: inner width of the MLP; 4 D by default.
    """

    name: str
    layers: int
    heads: int
    dim: int
    seq_len: int
    batch: int
    vocab: int
    positions: int
    config: str
    steps: int
    family: Literal["gpt2", "llama"] = "gpt2"
    kv_heads: int = 0
    hidden: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "hidden", self.hidden or 4 * self.dim)

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token."""
        return self.dim // self.heads * self.kv_heads

    @property
    def tokens_per_step(self) -> int:
        """B * S."""
        return self.batch * self.seq_len

    @property
    def matrix_parameters(self) -> int:
        """Elements of a layer's matrices: query and output, key and value, and the MLP's two or three."""
        mlp_matrices = 2 if self.family == "gpt2" else 3
        return 2 * self.dim**2 + 2 * self.dim * self.kv_dim + mlp_matrices * self.dim * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of embedding tables, layers, and the last norm."""
        D = self.dim
        if self.family == "llama":
            return 2 * self.vocab * D + self.layers * (self.matrix_parameters + 2 * D) + D
        biases = 2 * D + 2 * self.kv_dim + self.hidden + D
        return (self.vocab + self.positions) * D + self.layers * (self.matrix_parameters + biases + 4 * D) + 2 * D

    @property
    def flops_per_step(self) -> float:
        """FLOPs of matrix products, forward and backward, counting attention without the causal mask."""
        per_layer = self.matrix_parameters + 2 * self.seq_len * self.dim
        return 6.0 * self.tokens_per_step * (self.layers * per_layer + self.vocab * self.dim)


SIZES = {
    size.name: size
    for size in (
        Size("nanogpt-cpu", 4, 4, 128, 64, 12, 257, 64, "nanogpt-cpu", 25),
        Size("6x384", 6, 6, 384, 256, 8, 257, 256, "nanogpt-cpu", 1),
        Size("gpt2-124m", 12, 12, 768, 512, 1, 50257, 1024, "gpt2-124m", 1),
        Size("llama-26m", 8, 8, 512, 256, 4, 4096, 256, "llama2-7b", 1, "llama", kv_heads=2, hidden=1408),
    )
}


def write_tokens(path: Path, vocab: int, count: int = NUM_TOKENS) -> None:
    """Write a nanoGPT-style uint16 file with Zipf-distributed ids, so that the loss falls right from the start."""
    chances = 1.0 / (np.arange(vocab) + 3.0)
    ids = np.random.default_rng(0).choice(vocab, size=count, p=chances / chances.sum())
    ids.astype("<u2").tofile(path)


class Batches:
    """Random windows of a token file, sampled like nanoGPT's get_batch.

    Args:
        path: a uint16 file.
        size: provides B and S.
        seed: seed for sampling the windows.
    """

    def __init__(self, path: Path, size: Size, seed: int = 0):
        self._tokens = np.memmap(path, dtype="<u2", mode="r")
        self._size = size
        self._rng = np.random.default_rng(seed)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, targets), each int32[B, S]."""
        S = self._size.seq_len
        starts = self._rng.integers(0, len(self._tokens) - S - 1, self._size.batch)
        windows = np.stack([self._tokens[start : start + S + 1] for start in starts]).astype(np.int32)
        return windows[:, :-1], windows[:, 1:]
