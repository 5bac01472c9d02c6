"""Description of a random experiment in plain numbers and names, from which both reference and framework are built.

This module does not import the framework, because it is the only input of the reference.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

Fields = dict[str, Any]  # keyword arguments of a function of optax


@dataclass(frozen=True)
class Norm:
    """RMSNorm or LayerNorm; `bias` is for LayerNorm, `zero_centered` (scale - 1 is stored) for RMSNorm."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    zero_centered: bool = False
    bias: bool = True


@dataclass(frozen=True)
class Attention:
    """One attention layer.

    `rope_scaling` is (linear or llama3, its fields); None as `rotary_dim` means that whole heads rotate.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: tuple[str, Fields] | None = None
    rotary_dim: int | None = None
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    output_gate: bool = False


@dataclass(frozen=True)
class LinearAttention:
    """One layer of Gated DeltaNet. `heads` counts those of values; `chunk` does not change the result."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    bias: bool = False
    norm_eps: float = 1e-6
    chunk: int = 64


@dataclass(frozen=True)
class StateSpace:
    """One layer of Mamba-2. `groups` counts those that share B and C; `chunk` does not change the result."""

    heads: int
    groups: int
    state_dim: int
    head_dim: int
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    min_step: float = 0.0
    max_step: float | None = None
    norm_eps: float = 1e-5
    chunk: int = 64


@dataclass(frozen=True)
class MLP:
    """One feed-forward block."""

    hidden: int
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"] = "gelu_tanh"
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """A router that sends each token to `top_k` of `experts` experts.

    `balance` and `z` are the coefficients of its losses; `bias` adds a learned bias to the logits.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    balance: float = 0.0
    balance_over: Literal["sequence", "batch"] = "sequence"
    z: float = 0.0
    bias: bool = False


@dataclass(frozen=True)
class Mixture:
    """Experts of equal shape instead of a feed-forward block, with an optional shared block for all tokens.

    With `shared_gate`, the sigmoid of a projection of each token multiplies the result of the shared block.
    """

    router: Router
    expert: MLP
    shared: MLP | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of the pattern. `branch_scale` multiplies the output of each branch."""

    attention: Attention | LinearAttention | StateSpace
    mlp: MLP | Mixture
    norm: Norm = Norm()
    post_norm: Norm | None = None
    branch_scale: float | None = None


@dataclass(frozen=True)
class LoRA:
    """LoRA adapters for the linear layers whose path matches `targets`.

    Experts whose path matches get adapters too, but only if `targets` contains the word `experts`. With `base` int8,
    the weights of these linear layers are stored in 8 bits.
    """

    rank: int
    alpha: float
    targets: str
    base: Literal["int8"] | None = None


@dataclass(frozen=True)
class Model:
    """A language model: the pattern `layers`, repeated `repeats` times.

    Layers whose index is in `shared` have one copy of their weights for all repeats.
    """

    dim: int
    vocab: int
    layers: tuple[Layer, ...]
    repeats: int
    shared: tuple[int, ...] = ()
    streams: str = "one"
    positions: int | None = None
    embed_scale: float | None = None
    head_norm: Norm = Norm()
    tied: bool = False
    z_loss: float = 0.0
    logit_divisor: float | None = None
    head_softcap: float | None = None
    chunk_tokens: int = 1024
    lora: LoRA | None = None


@dataclass(frozen=True)
class Optimizer:
    """A function of `tests.oracle.optimizers`; `rate` is a number, or (an optax schedule, its fields)."""

    name: str
    rate: float | tuple[str, Fields]
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """A change for parameters whose path matches: one of freeze, set and optimizer."""

    pattern: str
    freeze: bool = False
    set: Fields = field(default_factory=dict)
    optimizer: Optimizer | None = None


@dataclass(frozen=True)
class Learner:
    """Optimizer, rules, clipping and EMA.

    `clip_mode` is global_norm, previous_norm, update_rms or norm_growth. global_norm also stands for two_pass, which
    some schedules need instead.
    """

    optimizer: Optimizer
    scope: Literal["layer", "model"] = "layer"
    rules: tuple[Rule, ...] = ()
    clip: float | None = None
    clip_mode: str = "global_norm"
    ema: float | None = None


@dataclass(frozen=True)
class Data:
    """The batches. `empty` has entries (step, count, index): rows with number % count == index have no targets."""

    seq_len: int
    batch: int
    documents: bool = False
    fractions: bool = False
    empty: tuple[tuple[int, int, int], ...] = ()
    poisoned: int | None = None


@dataclass(frozen=True)
class Phase:
    """The part of a run from step `start` on, with the settings that may change at a checkpoint.

    The values are those of `plimsoll.Memory`.
    """

    start: int = 0
    mesh: dict[str, int] = field(default_factory=dict)
    update: str = "after_backward"
    gradients: str = "device"
    optimizer_state: str = "device"
    parameters: str = "device"
    activations: str = "device"
    remat: str = "none"
    unroll: int = 1
    accumulate: int = 1

    @property
    def updates_at_once(self) -> bool:
        """True if each layer is updated before all gradients are known."""
        return self.update == "in_backward" or self.gradients == "none"


@dataclass(frozen=True)
class RandomExperiment:
    """A whole experiment. `precision` is float64, float32, or mixed: bfloat16 weights with a float32 master copy."""

    seed: int
    model: Model
    learner: Learner
    data: Data
    phases: tuple[Phase, ...]
    steps: int = 4
    precision: str = "float64"


def settings(drawn: Any, path: str = "") -> dict[str, Any]:
    """Return {dotted path: value} of all fields without a default or with a value that differs from it."""
    if is_dataclass(drawn):
        found: dict[str, Any] = {}
        for own in fields(drawn):
            value = getattr(drawn, own.name)
            default = own.default_factory() if own.default_factory is not MISSING else own.default
            if default is MISSING or value != default:
                found |= settings(value, f"{path}.{own.name}" if path else own.name)
        return found
    if isinstance(drawn, tuple) and any(is_dataclass(item) for item in drawn):
        return {key: value for i, item in enumerate(drawn) for key, value in settings(item, f"{path}.{i}").items()}
    return {path: drawn}
