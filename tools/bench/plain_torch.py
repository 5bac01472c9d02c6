"""Hand-written GPT-2 and Llama in plain torch, optimized for speed: the step that ours is compared with.

The architectures of nanoGPT (fused query, key and value; `scaled_dot_product_attention`; tied embeddings) and of Llama
(RMSNorm, rotary positions, SwiGLU, grouped keys and values), eager, with fused AdamW and clipping by the global norm.
Follows Radford et al. 2019 and arXiv 2302.13971.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.bench.sizes import B1, B2, CLIP, LEARNING_RATE, ROPE_THETA, WEIGHT_DECAY, Size


class GPT2Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); biases everywhere."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim)
        self.output = nn.Linear(size.dim, size.dim)
        self.mlp_norm = nn.LayerNorm(size.dim)
        self.up = nn.Linear(size.dim, 4 * size.dim)
        self.down = nn.Linear(4 * size.dim, size.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply one layer."""
        B, S, D = x_BSD.shape
        qkv = self.qkv(self.attention_norm(x_BSD))
        q, k, v = (part.view(B, S, self.heads, -1).transpose(1, 2) for part in qkv.split(D, dim=-1))
        y_BNSH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.output(y_BNSH.transpose(1, 2).reshape(B, S, D))
        hidden = F.gelu(self.up(self.mlp_norm(x_BSD)), approximate="tanh")
        return x_BSD + self.down(hidden)


class TorchGPT2(nn.Module):
    """GPT-2 from tokens to logits, with tied embeddings."""

    def __init__(self, size: Size):
        super().__init__()
        self.token = nn.Embedding(size.vocab, size.dim)
        self.position = nn.Embedding(size.positions, size.dim)
        self.blocks = nn.ModuleList(GPT2Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x_BSD = self.token(tokens_BS) + self.position.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return F.linear(self.norm(x_BSD), self.token.weight)


def rotary_angles(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [S, H]; element i rotates together with element i + H/2."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864) in the half-split convention."""
    first, second = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos_SH + torch.cat([-second, first], dim=-1) * sin_SH


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); no biases."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.dim // size.heads
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.qkv = nn.Linear(size.dim, size.dim + 2 * size.kv_dim, bias=False)
        self.output = nn.Linear(size.dim, size.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.gate = nn.Linear(size.dim, size.hidden, bias=False)
        self.up = nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        """Apply one layer."""
        B, S, D = x_BSD.shape
        kv_dim = self.kv_heads * self.head_dim
        parts = self.qkv(self.attention_norm(x_BSD)).split([D, kv_dim, kv_dim], dim=-1)
        q, k, v = (part.view(B, S, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        y_BNSH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x_BSD = x_BSD + self.output(y_BNSH.transpose(1, 2).reshape(B, S, D))
        h_BSD = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h_BSD)) * self.up(h_BSD))


class TorchLlama(nn.Module):
    """Llama from tokens to logits, with an untied output table."""

    def __init__(self, size: Size):
        super().__init__()
        self.token = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)
        cos_SH, sin_SH = rotary_angles(size.seq_len, size.dim // size.heads)
        self.register_buffer("cos_SH", cos_SH, persistent=False)
        self.register_buffer("sin_SH", sin_SH, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x_BSD = self.token(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, self.cos_SH, self.sin_SH)
        return self.head(self.norm(x_BSD))


def build(size: Size, seed: int = 0) -> nn.Module:
    """Build a size's model and initialize it: normal(0.02), gains 1, biases 0, branch outputs scaled by 1/sqrt(2L)."""
    torch.manual_seed(seed)
    model = TorchGPT2(size) if size.family == "gpt2" else TorchLlama(size)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends_branch = name.endswith(("output.weight", "down.weight"))
            scale = (2 * size.layers) ** -0.5 if ends_branch else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def compute_loss(model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    logits_BSV = model(tokens_BS)
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW. Matrices decay, except for learned positions."""
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if p.dim() == 2 and not name.startswith("position")]
    others = [p for name, p in named.items() if p.dim() != 2 or name.startswith("position")]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BS: np.ndarray, targets_BS: np.ndarray
) -> Tensor:
    """Take one training step. Return the loss before it, without waiting for it."""
    loss = compute_loss(model, torch.from_numpy(tokens_BS).long(), torch.from_numpy(targets_BS).long())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def load(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Copy our parameters, by path and stacked over layers, into a torch model.

    Raises:
        KeyError: a parameter is missing.
    """

    def source(name: str) -> np.ndarray:
        if not name.startswith("blocks."):
            return weights[OUTSIDE[name]]
        _, index, path = name.split(".", 2)
        layer, kind = path.rsplit(".", 1)
        kind = "scale" if layer.endswith("norm") and kind == "weight" else kind
        home = f"stack/block0/{INSIDE[layer]}"
        if layer == "qkv":
            parts = [weights[f"{home}/{part}/{kind}"][int(index)] for part in ("query", "key", "value")]
            return np.concatenate(parts, axis=-1)
        return weights[f"{home}/{kind}"][int(index)]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(np.array(source(name)))
            is_projection = name.startswith("blocks.") and parameter.dim() == 2  # ours are stored as [inputs, outputs]
            parameter.copy_(value.T if is_projection else value)


# Maps parameters of the torch models to the paths of ours.
OUTSIDE = {
    "token.weight": "embed/token",
    "position.weight": "embed/position",
    "norm.weight": "head/norm/scale",
    "norm.bias": "head/norm/bias",
    "head.weight": "head/table",
}
INSIDE = {
    "attention_norm": "attention_norm",
    "qkv": "attention",
    "output": "attention/output",
    "mlp_norm": "mlp_norm",
    "gate": "mlp/gate",
    "up": "mlp/up",
    "down": "mlp/down",
}
