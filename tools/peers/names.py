"""How parameters of `transformers` correspond to ours: names, transposes, and which piece of a fused matrix.

Weights, gradients, and whatever else has one value per parameter element go through the same map.
May import: framework.layout, numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from framework.layout import Nested, unflatten

LAYER = "{layer}"


@dataclass(frozen=True)
class Source:
    """Where a parameter of ours is found.

    Args:
        name: of the tensor in transformers' `named_parameters()`; `{layer}` is replaced by each layer's index, and the
            results are stacked on a leading axis.
        transpose: torch's Linear keeps [out, in], we keep [in, out].
        piece: (i, n): the i-th of n equal parts of the last axis, of a fused matrix.
    """

    name: str
    transpose: bool = False
    piece: tuple[int, int] = (0, 1)

    def names(self, layers: int) -> list[str]:
        """The tensors that this one is made of."""
        return [self.name.replace(LAYER, str(i)) for i in range(layers)] if LAYER in self.name else [self.name]

    def read(self, tensors: Mapping[str, np.ndarray], layers: int) -> np.ndarray:
        """Our array, stacked if the name has a layer."""
        parts = [self._convert(tensors[name]) for name in self.names(layers)]
        return np.stack(parts) if LAYER in self.name else parts[0]

    def _convert(self, tensor: np.ndarray) -> np.ndarray:
        index, count = self.piece
        return np.split(tensor.T if self.transpose else tensor, count, axis=-1)[index]


def to_ours(sources: Mapping[str, Source], tensors: Mapping[str, np.ndarray], layers: int) -> Nested:
    """Our nested parameters from transformers' tensors.

    Raises:
        ValueError: a tensor is left over, so the map is not complete.
    """
    pieces = dict.fromkeys(tensors, 0.0)
    flat = {}
    for path, source in sources.items():
        flat[path] = source.read(tensors, layers)
        for name in source.names(layers):
            pieces[name] += 1 / source.piece[1]
    wrong = [name for name, share in pieces.items() if not np.isclose(share, 1.0)]
    if wrong:
        raise ValueError(f"these tensors of transformers do not end up once each in our parameters: {wrong}")
    return unflatten(flat)


def gpt2_sources() -> dict[str, Source]:
    """GPT2LMHeadModel. Its Conv1D keeps [in, out] as we do; query, key and value are one matrix. The head is tied."""
    block, layer = "stack/block0", f"transformer.h.{LAYER}"
    sources = {"embed/token": Source("transformer.wte.weight"), "embed/position": Source("transformer.wpe.weight")}
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        sources[f"{block}/{ours}/scale"] = Source(f"{layer}.{theirs}.weight")
        sources[f"{block}/{ours}/bias"] = Source(f"{layer}.{theirs}.bias")
    for kind in ("weight", "bias"):
        for index, name in enumerate(("query", "key", "value")):
            sources[f"{block}/attention/{name}/{kind}"] = Source(f"{layer}.attn.c_attn.{kind}", piece=(index, 3))
        sources[f"{block}/attention/output/{kind}"] = Source(f"{layer}.attn.c_proj.{kind}")
        sources[f"{block}/mlp/up/{kind}"] = Source(f"{layer}.mlp.c_fc.{kind}")
        sources[f"{block}/mlp/down/{kind}"] = Source(f"{layer}.mlp.c_proj.{kind}")
    sources["head/norm/scale"] = Source("transformer.ln_f.weight")
    sources["head/norm/bias"] = Source("transformer.ln_f.bias")
    return sources


def llama_sources(*, tied: bool = False, qkv_bias: bool = False) -> dict[str, Source]:
    """LlamaForCausalLM and Qwen2ForCausalLM: the same names; Qwen2 has biases in query, key and value."""
    block, layer = "stack/block0", f"model.layers.{LAYER}"
    sources = {"embed/token": Source("model.embed_tokens.weight"), "head/norm/scale": Source("model.norm.weight")}
    sources[f"{block}/attention_norm/scale"] = Source(f"{layer}.input_layernorm.weight")
    sources[f"{block}/mlp_norm/scale"] = Source(f"{layer}.post_attention_layernorm.weight")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
        path, name = f"{block}/attention/{ours}", f"{layer}.self_attn.{theirs}_proj"
        sources[f"{path}/weight"] = Source(f"{name}.weight", transpose=True)
        if qkv_bias and ours != "output":
            sources[f"{path}/bias"] = Source(f"{name}.bias")
    for name in ("gate", "up", "down"):
        sources[f"{block}/mlp/{name}/weight"] = Source(f"{layer}.mlp.{name}_proj.weight", transpose=True)
    if not tied:
        sources["head/table"] = Source("lm_head.weight")
    return sources
