"""What a random experiment is made of: plain numbers and names, which the reference and the framework each build from.

Nothing of the framework is imported: the reference reads these alone.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

Fields = dict[str, Any]  # keyword arguments of a function of optax


@dataclass(frozen=True)
class Norm:
    """RMSNorm or LayerNorm; `bias` is LayerNorm's, `zero_centered` RMSNorm's (what is stored is the scale less 1)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    zero_centered: bool = False
    bias: bool = True


@dataclass(frozen=True)
class Attention:
    """One attention; `rope_scaling` is linear or llama3, and its fields."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: tuple[str, Fields] | None = None
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None


@dataclass(frozen=True)
class MLP:
    """One feed-forward block."""

    hidden: int
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu_squared"] = "gelu_tanh"
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """What gives each token to `top_k` of so many experts. `balance` and `z` are the coefficients of its losses; `bias`
    is a learned bias of the logits."""

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
    """Experts of equal shape in the place of a feed-forward block, and perhaps a block that all tokens are given to."""

    router: Router
    expert: MLP
    shared: MLP | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of the pattern."""

    attention: Attention
    mlp: MLP | Mixture
    norm: Norm = Norm()
    post_norm: Norm | None = None


@dataclass(frozen=True)
class LoRA:
    """Adapters for the linear layers whose path `targets` matches, and for the experts whose path it matches if it has
    the word `experts`; `base` int8 stores the weights of linear layers in 8 bits."""

    rank: int
    alpha: float
    targets: str
    base: Literal["int8"] | None = None


@dataclass(frozen=True)
class Model:
    """A language model: `units` times the pattern `layers`, of which those `shared` have one copy for all units."""

    dim: int
    vocab: int
    layers: tuple[Layer, ...]
    units: int
    shared: tuple[int, ...] = ()
    streams: str = "one"
    positions: int | None = None
    embed_scale: float | None = None
    head_norm: Norm = Norm()
    tied: bool = False
    z_loss: float = 0.0
    head_softcap: float | None = None
    chunk_tokens: int = 1024
    lora: LoRA | None = None


@dataclass(frozen=True)
class Optimizer:
    """A function of `tests.oracle.optimizers`; `rate` is a number, or a schedule of optax and its fields."""

    name: str
    rate: float | tuple[str, Fields]
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """What differs for parameters whose path matches; one of the three."""

    pattern: str
    freeze: bool = False
    set: Fields = field(default_factory=dict)
    optimizer: Optimizer | None = None


@dataclass(frozen=True)
class Learner:
    """How parameters learn. `clip_mode` is global_norm (which stands for two_pass too: a schedule may need that
    instead), previous_norm, update_rms or norm_growth."""

    optimizer: Optimizer
    scope: Literal["unit", "model"] = "unit"
    rules: tuple[Rule, ...] = ()
    clip: float | None = None
    clip_mode: str = "global_norm"
    ema: float | None = None


@dataclass(frozen=True)
class Data:
    """The batches. `empty` are (step, count, index): rows whose number modulo `count` is `index` have no targets."""

    seq_len: int
    batch: int
    documents: bool = False
    fractions: bool = False
    empty: tuple[tuple[int, int, int], ...] = ()
    poisoned: int | None = None


@dataclass(frozen=True)
class Phase:
    """The part of a run from step `start` on: everything here may differ after a checkpoint. The words are those of
    `framework.schedules.memory.Memory`."""

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
        """Whether each unit is updated before all gradients are known."""
        return self.update == "in_backward" or self.gradients == "none"


@dataclass(frozen=True)
class Drawn:
    """A whole experiment. `precision` is float64, float32, or mixed: bfloat16 weights with a float32 master copy."""

    seed: int
    model: Model
    learner: Learner
    data: Data
    phases: tuple[Phase, ...]
    steps: int = 4
    precision: str = "float64"


def settings(drawn: Any, path: str = "") -> dict[str, Any]:
    """{dotted path: value} of all fields that have no default, or another value than it."""
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
