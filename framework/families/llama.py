"""Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3: RMSNorm, rotary positions, gated MLP, the same tensor names.

Defaults for fields that a config.json leaves out are those of transformers' configuration classes.
"""

from __future__ import annotations

from typing import TypeVar

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.rope_scaling import original_length, yarn_facts, yarn_scaling
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.rotary import LinearScaling, Llama3Scaling
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_LAYER = "model.layers.{layer}"

# transformers' default of num_key_value_heads. None, like null in the file, stands for the number of heads.
_KV_HEADS = {"LlamaForCausalLM": None, "MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}

T = TypeVar("T")


def decoder_names(**norms: str) -> dict[str, Source]:
    """Return {our path: their tensor}, as in all models derived from Llama.

    Args:
        norms: their name of each norm of a block, by our name.
    """
    names = {
        "embed/token": Source("model.embed_tokens.weight"),
        "head/norm/scale": Source("model.norm.weight"),
        "head/table": Source("lm_head.weight"),
        "attention/query_norm/scale": Source(f"{_LAYER}.self_attn.q_norm.weight"),
        "attention/key_norm/scale": Source(f"{_LAYER}.self_attn.k_norm.weight"),
    }
    for ours, theirs in norms.items():
        names[f"{ours}/scale"] = Source(f"{_LAYER}.{theirs}.weight")
    linear_names = {}
    for name in ("query", "key", "value", "output"):
        linear_names[f"attention/{name}"] = f"self_attn.{name[0]}_proj"
    for name in ("gate", "up", "down"):
        linear_names[f"mlp/{name}"] = f"mlp.{name}_proj"
    for ours, theirs in linear_names.items():
        # torch stores a linear layer as [out, in].
        names[f"{ours}/weight"] = Source(f"{_LAYER}.{theirs}.weight", transpose=True)
        names[f"{ours}/bias"] = Source(f"{_LAYER}.{theirs}.bias")
    return names


def activation(facts: ConfigFacts, field: str, default: str) -> str:
    """Return our name of the activation that a field specifies by its transformers name.

    Args:
        facts: fields of config.json.
        field: name of the field.
        default: transformers' name if the field is absent.

    Raises:
        ValueError: the activation is unknown.
    """
    name = facts.text(field, default)
    if name not in ACTIVATIONS:
        raise facts.error(field, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_fact(ours: str) -> str:
    """Return transformers' name of our activation, the inverse of `activation`.

    Raises:
        ValueError: transformers has no such activation.
    """
    # Several of their names may mean the same; write the first one.
    for theirs, name in ACTIVATIONS.items():
        if name == ours:
            return theirs
    raise ValueError(f"mlp.activation = {ours}")


def rope(facts: ConfigFacts, default_theta: float = 10_000.0, *, partial: bool = False) -> tuple[float, Config | None]:
    """Return (theta, scaling) of a config.json.

    transformers 4 writes `rope_scaling` and `rope_theta`, transformers 5 writes `rope_parameters`.

    Args:
        facts: fields of config.json.
        default_theta: theta if it is not stated.
        partial: whether the family may rotate only a part of each head, which `rope_scaling.rotary_dim` reads.

    Raises:
        ValueError: the scaling is unknown, or the fields of both versions are present and differ.
    """
    old = facts.part("rope_scaling")
    new = facts.part("rope_parameters")
    if old is not None and new is not None and old.values != new.values:
        raise facts.error("rope_scaling", f"the same as rope_parameters ({new.values}), or one of the two")
    scaling = old or new or ConfigFacts({}, "rope_parameters.")
    # Some models have one object per kind of layer here.
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise ValueError(f"config.json: rope_parameters = {scaling.values}; expected the same for all layers")
    theta_facts = scaling if "rope_theta" in scaling.values else facts
    theta = theta_facts.number("rope_theta", default_theta)
    for part in (scaling, facts):
        if not partial and part.any("partial_rotary_factor", None) not in (None, 1):
            raise part.error("partial_rotary_factor", "1: all elements of a head rotate")
    kind = scaling.any("rope_type", scaling.any("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, config_for(LinearScaling, factor=scaling.number("factor"))
    if kind == "llama3":
        return theta, _llama3_scaling(facts, scaling)
    if kind == "yarn":
        return theta, yarn_scaling(facts, scaling)
    raise ValueError(f"config.json: rope scaling {scaling.values}; expected rope_type default, linear, llama3 or yarn")


def _llama3_scaling(facts: ConfigFacts, scaling: ConfigFacts) -> Config:
    """Return the scaling of Llama 3.1 and later.

    Args:
        facts: all fields of config.json.
        scaling: its object for rotary positions.
    """
    fields = {}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        fields[name] = scaling.number(name)
    low = fields["low_freq_factor"]
    if fields["high_freq_factor"] <= low:
        raise scaling.error("high_freq_factor", f"more than low_freq_factor = {low}")
    return config_for(Llama3Scaling, **fields, original_length=original_length(facts, scaling))


def rope_facts(rotary: Config) -> dict[str, object]:
    """Return the fields of config.json for rotary positions, the inverse of `rope`."""
    facts: dict[str, object] = {"rope_theta": rotary.theta}
    if rotary.scaling is None:
        return facts
    scaling = dict(rotary.scaling.leaves())
    if rotary.scaling.takes("beta_fast"):
        facts["rope_scaling"] = yarn_facts(rotary.scaling)
    elif rotary.scaling.takes("low_freq_factor"):
        length = scaling.pop("original_length")
        facts["rope_scaling"] = {"rope_type": "llama3", **scaling, "original_max_position_embeddings": length}
    else:
        facts["rope_scaling"] = {"rope_type": "linear", **scaling}
    return facts


def rope_parameters(rotary: Config | None) -> dict[str, object]:
    """Return the object of config.json for rotary positions as transformers 5 writes it, with theta and scaling.

    Raises:
        ValueError: there are no rotary positions.
    """
    if rotary is None:
        raise ValueError("attention.rotary = None")
    facts = rope_facts(rotary)
    scaling = facts.pop("rope_scaling", None)
    return {**facts, "rope_type": "default", **(scaling if isinstance(scaling, dict) else {})}


def shortest_period(layers: list[T]) -> int:
    """Return the number of layers after which the list repeats."""
    count = len(layers)
    for period in range(1, count + 1):
        if count % period:
            continue
        repeats = count // period
        if layers == layers[:period] * repeats:
            return period
    return count


def with_windows(model: Config, windows: list[int | None], rotaries: list[Config | None] | None = None) -> Config:
    """Let layer i of a model attend to windows[i] positions, and return the model.

    Args:
        model: a model whose pattern has a single layer.
        windows: the attention window of each layer.
        rotaries: the rotary positions of each layer; None for those of the model's layer.
    """
    block = model.stack.pattern[0]
    layers = list(zip(windows, rotaries or [block.attention.rotary] * len(windows), strict=True))
    blocks = []
    # The shorter the pattern, the fewer blocks a stack compiles.
    for window, rotary in layers[: shortest_period(layers)]:
        one = block.copy()
        one.attention.window = window
        one.attention.rotary = None if rotary is None else rotary.copy()
        blocks.append(one)
    model.stack.pattern = blocks
    return model


def get_windows(model: Config) -> list[int | None]:
    """Return the attention window of each layer, the inverse of `with_windows`."""
    pattern = [block.attention.window for block in model.stack.pattern]
    return pattern * (model.stack.num_layers // len(pattern))


def common_facts(model: Config, feed_forward: Config | None = None) -> dict[str, object]:
    """Return the fields of config.json that all models of these families have.

    Args:
        model: our model.
        feed_forward: MLP or experts whose width and activation to state; the first layer's MLP by default.
    """
    block = model.stack.pattern[0]
    mlp = feed_forward or block.mlp
    norm = block.norm or block.post_norm
    if norm is None:
        raise ValueError("stack.pattern.0.norm = None")
    attention = block.attention
    heads = attention.num_heads
    windows = get_windows(model)
    # config.json has only one window width, in addition to the kind of each layer.
    sliding_window = next((window for window in windows if window is not None), None)
    kinds = []
    for window in windows:
        kinds.append("full_attention" if window is None else "sliding_attention")
    facts = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": model.stack.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": attention.num_kv_heads or heads,
        "head_dim": attention.head_dim or model.dim // heads,
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": model.head.tied,
        "hidden_act": activation_fact(mlp.activation),
        "sliding_window": sliding_window,
        "layer_types": kinds,
    }
    if attention.rotary is not None:
        facts |= rope_facts(attention.rotary)
    return facts


def layer_windows(kinds: list[str], window: int | None, facts: ConfigFacts) -> list[int | None]:
    """Return the attention window of each layer; None for full attention.

    Args:
        kinds: the kind of each layer, from `layer_types`.
        window: number of tokens that a sliding_attention layer attends to.
        facts: fields of config.json.

    Raises:
        ValueError: `layer_types` disagrees with the number of layers or with the window.
    """
    num_layers = facts.size("num_hidden_layers")
    if len(kinds) != num_layers:
        raise facts.error("layer_types", f"one for each of {num_layers} layers")
    if window is None and "sliding_attention" in kinds:
        raise facts.error("sliding_window", "a number of tokens, because some layers are sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layer_types(facts: ConfigFacts) -> list[str] | None:
    """Return the field `layer_types`, or None if it is absent.

    Raises:
        ValueError: it is not a list of the two kinds of layers that we support.
    """
    kinds = facts.any("layer_types", None)
    if kinds is None:
        return None
    supported_kinds = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or not all(kind in supported_kinds for kind in kinds):
        raise facts.error("layer_types", f"a list of {' and '.join(supported_kinds)}")
    return kinds


def check_uniform_window(facts: ConfigFacts, window: int | None) -> None:
    """Raise ValueError if `layer_types` disagrees with a window that all layers share."""
    kind = "full_attention" if window is None else "sliding_attention"
    if layer_types(facts) not in (None, [kind] * facts.size("num_hidden_layers")):
        raise facts.error("layer_types", f"{kind} in all layers")


def _windows(architecture: str, facts: ConfigFacts) -> list[int | None]:
    """Return the attention window of each layer, as transformers determines it for the architecture."""
    num_layers = facts.size("num_hidden_layers")
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        # All layers are alike. Mistral has no `use_sliding_window` and Llama no `sliding_window`, so ignore these
        # fields there.
        window = None
        if architecture == "MistralForCausalLM":
            window = facts.size("sliding_window", 4096, null=True)
        check_uniform_window(facts, window)
        return [window] * num_layers
    kinds = layer_types(facts)
    window = None
    if facts.flag("use_sliding_window", False):
        window = facts.size("sliding_window", 4096, null=True)
    if kinds is None:
        # In Qwen, the first layers attend to everything, and those from max_window_layers on have a window.
        num_full = facts.size("max_window_layers", 28, least=0)
        kinds = []
        for layer in range(num_layers):
            is_full = window is None or layer < num_full
            kinds.append("full_attention" if is_full else "sliding_attention")
    return layer_windows(kinds, window, facts)


def llama_decoder(
    facts: ConfigFacts,
    *,
    kv_heads: int | None,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    tied: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> Config:
    """Build a model of these sizes whose layers are all alike and see all earlier tokens.

    Args:
        facts: fields of config.json.
        kv_heads: the architecture's default of num_key_value_heads; None for the number of heads.
        head_dim: its default of head_dim; None for the width divided by the number of heads.
        theta: its default of rope_theta.
        tied: its default of tie_word_embeddings.
        qkv_bias, output_bias, mlp_bias: whether the projections to queries, keys and values, the output projection of
            attention, and the matrices of the MLP have biases.
    """
    theta, scaling = rope(facts, theta)
    dim = facts.size("hidden_size")
    heads = facts.size("num_attention_heads")
    num_kv_heads = facts.size("num_key_value_heads", kv_heads, null=True)
    model = llama_model(
        layers=facts.size("num_hidden_layers"),
        heads=heads,
        kv_heads=None if num_kv_heads == heads else num_kv_heads,
        dim=dim,
        hidden=facts.size("intermediate_size"),
        vocab_size=facts.size("vocab_size"),
        theta=theta,
        eps=facts.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        tied=facts.flag("tie_word_embeddings", tied),
        rope_scaling=scaling,
    )
    block = model.stack.pattern[0]
    block.attention.output_bias = output_bias
    block.mlp.activation = activation(facts, "hidden_act", "silu")
    block.mlp.linear.bias = mlp_bias
    channels = facts.size("head_dim", head_dim, null=True)
    # Set only if it differs from our default, which is the width divided by the number of heads.
    if channels is not None and channels * heads != dim:
        block.attention.head_dim = channels
    return model


@component
class Llama(ModelFamily):
    """LlamaForCausalLM, and architectures that differ from it by biases, windows, and query and key norms."""

    architectures = {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    }
    scored = {
        "LlamaForSequenceClassification": "LlamaForCausalLM",
        "MistralForSequenceClassification": "MistralForCausalLM",
        "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
        "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    }
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        (kind,) = set(fields.any("architectures")) & set(self.architectures)
        # Mistral and Qwen2 have no such field, and transformers ignores it there.
        biases = False
        if kind in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            biases = fields.flag("attention_bias", False)
        model = llama_decoder(
            fields,
            kv_heads=_KV_HEADS[kind],
            head_dim=128 if kind == "Qwen3ForCausalLM" else None,
            qkv_bias=biases or kind == "Qwen2ForCausalLM",
            output_bias=biases,
            mlp_bias=kind == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        )
        if kind == "Qwen3ForCausalLM":
            block = model.stack.pattern[0]
            block.attention.qk_norm = config_for(RMSNorm, eps=block.norm.eps)
        return with_windows(model, _windows(kind, fields))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`. Writes LlamaForCausalLM wherever it can express the model."""
        block = model.stack.pattern[0]
        attention = block.attention
        shared_facts = common_facts(model)
        kinds = shared_facts.pop("layer_types")
        # The fields of the one architecture that the model needs.
        special_facts: dict[str, object] = {}
        if attention.qk_norm is not None:
            architecture = "Qwen3ForCausalLM"
        elif attention.linear.bias and attention.output_bias is False:
            architecture = "Qwen2ForCausalLM"
        elif shared_facts["sliding_window"]:
            architecture = "MistralForCausalLM"
        else:
            architecture = "LlamaForCausalLM"
        if architecture.startswith("Qwen"):
            special_facts["layer_types"] = kinds
            special_facts["use_sliding_window"] = shared_facts["sliding_window"] is not None
        if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            special_facts["attention_bias"] = attention.linear.bias
        if architecture == "LlamaForCausalLM":
            special_facts["mlp_bias"] = block.mlp.linear.bias
        return {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            **shared_facts,
            **special_facts,
        }
