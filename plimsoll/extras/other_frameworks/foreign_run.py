"""A training run of another framework: its model, devices, batch and precisions, in one typed description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Method = Literal["full", "lora", "qlora"]
# The loss that a run trains with, as far as it changes memory or time.
Objective = Literal["tokens", "pairs", "pairs with a reference"]


# Bytes per logit at the peak of our loss, if the logits of all tokens exist at the same time: XLA fuses the rest.
OUR_LOGIT_BYTES = 4.0


class ForeignConfigError(ValueError):
    """A file of another framework cannot be read, or it lacks something that a plan needs."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that is described by numbers and not by a name.

    Attributes:
        layers: number of layers.
        dim: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        hidden: inner width of the MLPs, of layers without experts.
        vocab_size: number of rows of the token table, padding included.
        head_dim: channels per head; None means dim / heads.
        gated: MLPs have a gate (SwiGLU, GeGLU).
        tied: the head uses the token table.
        biased: linear layers have biases.
        layer_norm: norms are LayerNorm, and not RMSNorm.
        learned_positions: number of learned positions; None for rotary positions.
        qk_norm: queries and keys are normalized.
        experts: number of experts of a layer; 0 for a dense model.
        top_k: number of experts per token.
        expert_hidden: inner width of an expert.
        shared_hidden: inner width of the shared experts together; 0 if there are none.
        dense_layers: number of layers without experts before those with experts.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int
    head_dim: int | None = None
    gated: bool = True
    tied: bool = False
    biased: bool = False
    layer_norm: bool = False
    learned_positions: int | None = None
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 1
    expert_hidden: int = 0
    shared_hidden: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class ForeignModel:
    """The model of a run: a model of the Hub, or a shape.

    Attributes:
        name: name in the file.
        hub_id: id on the Hugging Face Hub, or a folder with a config.json; None if `shape` describes the model.
        shape: sizes of the model, if it has no id.
        overrides: fields of our config that differ from the published model, by path.
    """

    name: str
    hub_id: str | None = None
    shape: ModelShape | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignMesh:
    """How devices divide the work. The product of all but `chunks` is the number of devices.

    Attributes:
        replicas: data-parallel groups, each with all weights (of its tensor and pipeline shard).
        shards: devices that share weights as FSDP and ZeRO-3 do.
        tensors: tensor-parallel devices.
        rows: devices that share the positions of each row (context parallelism).
        stages: stages of a pipeline.
        chunks: chunks of layers per stage (virtual pipeline stages).
        experts: devices among which experts are divided; other weights are divided as `shares_weights_over_experts`.
    """

    replicas: int = 1
    shards: int = 1
    tensors: int = 1
    rows: int = 1
    stages: int = 1
    chunks: int = 1
    experts: int = 1

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.shards * self.tensors * self.rows * self.stages * self.experts

    @property
    def batch_groups(self) -> int:
        """The number of groups of devices that compute different rows."""
        return self.replicas * self.shards * self.experts


@dataclass(frozen=True)
class StoredBytes:
    """Bytes per trainable parameter that a framework stores, where they differ from ours, and how they are sharded.

    Attributes:
        parameter: bytes of a parameter as the layers read it.
        gradient: bytes of a gradient.
        state: bytes of master weights and moments on the device; None for those of our optimizer, sharded as ours.
        parameter_shards: devices that share the parameters.
        gradient_shards: devices that share the gradients.
        state_shards: devices that share master weights and moments.
        keeps_gradients: all gradients have memory during the whole backward pass: they are buffers, or sums.
        update: bytes of temporaries of the update.
        buffers: bytes of buffers for communication, per device.
        unsharded: number of weights that are gathered at most, in addition to those of a layer, with 2 bytes each.
        divides_inputs: tensor-parallel devices share the inputs of layers (sequence parallelism).
    """

    parameter: float
    gradient: float
    state: float | None
    parameter_shards: int = 1
    gradient_shards: int = 1
    state_shards: int = 1
    keeps_gradients: bool = False
    update: float = 0.0
    buffers: int = 0
    unsharded: int = 0
    divides_inputs: bool = False


@dataclass(frozen=True)
class Adapter:
    """LoRA adapters.

    Attributes:
        rank: inner size of an adapter.
        targets: regex of our layers that have adapters; None for all linear layers.
        saved_tables: token tables that are trained as a whole next to the adapters (modules_to_save): 0, 1 or 2.
        double_quantized: the scales of the frozen weights' blocks are quantized too (QLoRA, arXiv 2305.14314).
    """

    rank: int
    targets: str | None = None
    saved_tables: int = 0
    double_quantized: bool = False


@dataclass(frozen=True)
class ForeignRun:
    """A training run of another framework.

    Attributes:
        framework: name of the framework.
        model: the model.
        mesh: how devices divide the work.
        seq_len: tokens of a row.
        rows: rows that a data-parallel group computes at a time (micro-batch).
        accumulate: microbatches per update.
        method: which weights are trained.
        remat: our policy of what is recomputed (memory.remat).
        precision: dtypes of weights, gradients and optimizer state, in the words of `mapping.PRECISIONS`.
        optimizer: our optimizer's short name.
        objective: kind of the loss.
        stored: how the framework stores the state, if other than we do.
        adapter: LoRA adapters, if any.
        base: storage of the frozen weights of an adapter's model: None, int8 or nf4.
        offloaded: fields of our `memory` section whose arrays are in host memory.
        whole_logits: the logits of all tokens exist at the same time.
        logit_bytes: bytes per logit at the peak of the loss, with its copies: in another dtype, softmax, gradient.
        low_precision: our recipe of 8-bit matrix products, or None.
        overrides: other fields of our config, by path.
        machine: our name of the accelerator, if the file names it.
        read: names of the settings that were read.
        skipped: names of the settings that change neither memory nor time.
        unknown: names of the settings that no table of ours has.
        notes: what is approximated, and its effect on the plan: a sentence each.
    """

    framework: str
    model: ForeignModel
    mesh: ForeignMesh
    seq_len: int
    rows: int
    accumulate: int = 1
    method: Method = "full"
    remat: str = "none"
    precision: str = "bfloat16, float32 master"
    optimizer: str = "adamw"
    objective: Objective = "tokens"
    stored: StoredBytes | None = None
    adapter: Adapter | None = None
    base: str | None = None
    offloaded: tuple[str, ...] = ()
    whole_logits: bool = True
    logit_bytes: float = OUR_LOGIT_BYTES
    low_precision: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    machine: str | None = None
    read: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def global_rows(self) -> int:
        """The rows of an update, of all devices; a pair counts twice."""
        pair = 1 if self.objective == "tokens" else 2
        return pair * self.rows * self.mesh.batch_groups * self.accumulate
