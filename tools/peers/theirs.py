"""Results of torch and transformers, on the CPU. Imports both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.models.llama import modeling_llama

from plimsoll.framework.families import scores
from plimsoll.framework.layout import flatten
from tools.peers.families import ROTARY, ROTARY_POSITIONS, SEQ_LEN, VOCAB, PeerFamily
from tools.peers.ours import to_ours
from tools.peers.recording import BETAS, CLIP, DOCUMENTS, EPS, LEARNING_RATE, WEIGHT_DECAY, Inputs, PeerResults, Tensors

Model = Any  # a transformers model, whose classes are hardly typed
Gradients = tuple[np.ndarray, np.ndarray, Tensors]


def build(family: PeerFamily, seed: int) -> Model:
    """Build a model with random weights, float32, without dropout.

    All weights are random, including norm scales and biases, because initial ones and zeros would hide mistakes. Values
    are rounded to float16 numbers, see `Results.weights`.
    """
    model = _empty(family).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 3:
                # Experts, each [out, in].
                value = noise * 1.2 / math.sqrt(parameter.shape[2])
            elif parameter.ndim == 2:
                # Rows of embeddings are small, so that the norms' eps has an effect; attention logits are of order one.
                is_table = any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
                value = noise * (0.1 if is_table else 1.2 / math.sqrt(parameter.shape[0]))
            elif name.endswith("bias"):
                value = 0.2 * noise
            else:
                # The norm of linear attention stores its scale, whatever the others store.
                is_plain = name.endswith("linear_attn.norm.weight")
                value = (1.0 if is_plain or not family.has_zero_centered_norms else 0.0) + 0.25 * noise
            parameter.copy_(value.half().float())
        for bias in _selection_biases(model).values():
            # Small, so that each expert is chosen by some token.
            bias.copy_((0.15 * torch.randn(bias.shape, generator=generator)).half().float())
    return model


def _selection_biases(model: Model) -> dict[str, Any]:
    """Return the biases of the choice of experts, which torch does not train."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def _empty(family: PeerFamily) -> Model:
    # Copied, because transformers completes the dict of the rotary scaling in place.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(family.facts))
    # Eager: attention is written out instead of one fused operation, and experts run one after the other.
    config._experts_implementation = "eager"
    is_scored = scores.is_scored(family.facts)
    auto = transformers.AutoModelForSequenceClassification if is_scored else transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager").eval()


@contextmanager
def wide_float() -> Iterator[None]:
    """Make transformers compute in float64 within this context.

    transformers asks for float32 by name (norms, softmax, rotary tables, loss), whatever the model's dtype is. These
    names are patched to mean float64, so the exact results also come from transformers' own code.
    """
    names = mock.patch.multiple(torch, float=torch.float64, float32=torch.float64)
    with names, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def compute_wide(model: Model, family: PeerFamily, inputs: Inputs) -> Gradients:
    """Run `compute_gradients` in float64, with the weights of a float32 model."""
    with wide_float():
        wide = _empty(family).double()
        wide.load_state_dict(model.state_dict())
        return compute_gradients(wide, inputs)


def compute(model: Model, family: PeerFamily, inputs: Inputs) -> PeerResults:
    """Compute everything that is compared. This trains the model, so its weights change."""
    weights = get_weights(model)
    logits, loss, gradients = compute_gradients(model, inputs)
    packed_logits = _compute_packed_logits(model, inputs)
    losses = _train(model, inputs)
    moved = {name: p - weights[name] for name, p in get_weights(model).items()}
    ours = flatten(to_ours(family, moved))
    norms = {path: np.asarray(np.linalg.norm(array.astype(np.float64)), np.float32) for path, array in ours.items()}
    return PeerResults(weights, logits, loss, gradients, packed_logits, losses, norms)


def compute_gradients(model: Model, inputs: Inputs) -> Gradients:
    """Return (logits [B, S, V], loss, gradients by name). transformers shifts the labels and ignores those of -100."""
    ids = torch.as_tensor(inputs.windows, dtype=torch.int64)
    labels = ids.clone()
    labels[:, 1:][torch.as_tensor(inputs.ignored)] = -100
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=labels)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {name: torch.zeros_like(bias) for name, bias in _selection_biases(model).items()}
    published_gradients = to_published_names(model.config.model_type, _numpy(gradients))
    return out.logits[:, :SEQ_LEN].detach().numpy(), out.loss.detach().numpy(), published_gradients


def get_weights(model: Model) -> Tensors:
    """Return the weights by the names in published files."""
    tensors = dict(model.named_parameters()) | _selection_biases(model)
    return to_published_names(model.config.model_type, _numpy(tensors))


def to_published_names(model_type: str, tensors: Tensors) -> Tensors:
    """Rename tensors as in published files. In memory, transformers keeps the experts of a layer in one tensor."""
    if model_type == "gpt_oss":
        # Its files keep them in one tensor, too.
        return tensors
    if model_type == "granitemoehybrid":
        return {_to_granite_name(name): tensor for name, tensor in tensors.items()}
    is_mixtral = model_type == "mixtral"
    projections = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    renamed = {}
    for name, tensor in tensors.items():
        found = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        prefix, _, fused = found.rpartition(".experts.")
        if not prefix:
            renamed[found] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            # The gate's rows come before those of `up`.
            parts = [matrix] if fused == "down_proj" else np.split(matrix, 2)
            names = projections[2:] if fused == "down_proj" else projections[:2]
            for projection, part in zip(names, parts, strict=True):
                renamed[f"{prefix}.experts.{expert}.{projection}.weight"] = part
    return renamed


def _to_granite_name(name: str) -> str:
    """Return the name in Granite's files, which keep the experts of a layer in one tensor, too."""
    name = name.replace(".experts.gate_up_proj", ".input_linear.weight")
    name = name.replace(".experts.down_proj", ".output_linear.weight")
    return name.replace(".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight")


def _compute_packed_logits(model: Model, inputs: Inputs) -> np.ndarray:
    logits = np.zeros((len(DOCUMENTS), SEQ_LEN, VOCAB), np.float32)
    for row, lengths in enumerate(DOCUMENTS):
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            document = torch.as_tensor(inputs.packed[row, start:end][None], dtype=torch.int64)
            with torch.no_grad():
                logits[row, start:end] = model(input_ids=document).logits[0].numpy()
    return logits


def _train(model: Model, inputs: Inputs) -> np.ndarray:
    """Train with plain AdamW, weight decay on everything, and global-norm clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for windows in inputs.training:
        ids = torch.as_tensor(windows, dtype=torch.int64)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return np.asarray(losses, np.float32)


def rotary_inputs(name: str) -> np.ndarray:
    """Return float64[P, H]: one query per position of ROTARY_POSITIONS."""
    return np.random.default_rng(len(name)).normal(size=(len(ROTARY_POSITIONS), ROTARY[name][0]))


def rotary(name: str) -> Tensors:
    """Return queries and their rotation by transformers at ROTARY_POSITIONS.

    Returns:
        query, rotated: float64[P, H]. float32_error: float64[P], largest error of its usual float32 result.
    """
    query = rotary_inputs(name)
    with wide_float():
        exact = _rotate_query(name, query)
    error = np.abs(_rotate_query(name, query.astype(np.float32)) - exact).max(axis=1)
    return {"query": query, "rotated": exact, "float32_error": error}


def _rotate_query(name: str, query_PH: np.ndarray) -> np.ndarray:
    head_dim, theta, scaling = ROTARY[name]
    # A dict, because the type checker does not know the fields that the configs of both versions 4 and 5 accept.
    fields: dict[str, Any] = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": 131_072}
    fields |= {"rope_theta": theta, "rope_scaling": copy.deepcopy(scaling)}
    config = transformers.LlamaConfig(**fields)
    query = torch.as_tensor(query_PH)[None, None]
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(query, torch.as_tensor(ROTARY_POSITIONS)[None])
    rotated, _ = modeling_llama.apply_rotary_pos_emb(query, query, cos, sin)
    return rotated[0, 0].numpy()


def rounding(family: PeerFamily, model: Model, inputs: Inputs) -> dict[str, float]:
    """Return torch's own float32 error: relative differences from the same computation in float64."""
    logits, loss, gradients = compute_gradients(model, inputs)
    logits64, loss64, gradients64 = compute_wide(model, family, inputs)
    skipped = {source.name for path in family.no_gradient for source in family.places[path]}
    return {
        "logits": _relative(logits, logits64),
        "loss": _relative(loss, loss64),
        "worst_gradient": max(_relative(gradients[n], gradients64[n]) for n in gradients if n not in skipped),
    }


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def _numpy(tensors: dict[str, Any]) -> Tensors:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
