"""Builds the framework's config of a random experiment."""

from __future__ import annotations

from typing import Any

import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers import attention, block, embedding, head, linear, lora, mlp, norm, rotary, stack
from plimsoll.framework.layers.experts import experts, moe, router
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.schedules.memory import Memory
from tests.oracle import experiments as plain
from tests.oracle.optimizers import OPTIMIZERS

DTYPES = {  # precision: dtypes of parameters, computation, master copy, and adapters
    "float64": ("float64", "float64", None, "float64"),
    "float32": ("float32", "float32", None, "float32"),
    "mixed": ("bfloat16", "float32", "float32", "float32"),
}


def experiment_config(drawn: plain.RandomExperiment, phase: plain.Phase) -> Config:
    """Return the config of one phase of the run."""
    return config_for(
        Experiment,
        model=_model(drawn, phase),
        data=config_for(
            DataPipeline,
            source=config_for(TokenMemmap, path="never-read.bin"),
            tokenizer=config_for(NoTokenizer, vocab_size=drawn.model.vocab),
            seq_len=drawn.data.seq_len,
            global_batch_size=drawn.data.batch,
            document_mask=drawn.data.documents,
        ),
        mesh=config_for(MeshShape, **phase.mesh),
        learner=_learner(drawn, phase),
        memory=config_for(
            Memory,
            update=phase.update,
            gradients=phase.gradients,
            optimizer_state=phase.optimizer_state,
            parameters=phase.parameters,
            activations=phase.activations,
            remat=phase.remat,
            prefetch=_choose_prefetch(drawn, phase),
            accumulate_by="layer" if _accumulates_by_layer(drawn, phase) else "microbatch",
        ),
        trainer=config_for(TrainerOptions, max_steps=drawn.steps),
    )


def _choose_prefetch(drawn: plain.RandomExperiment, phase: plain.Phase) -> str:
    """Return the value of memory.prefetch: one of three in each phase that can use all of them."""
    on_host = all(place.startswith("pinned_host") for place in (phase.gradients, phase.optimizer_state))
    has_one_pass = phase.accumulate == 1 or _accumulates_by_layer(drawn, phase)
    if not (phase.update == "streamed" and on_host and phase.parameters == "device" and has_one_pass):
        return "chunk"
    if drawn.seed % 2 == 0:
        return "layer"
    has_all_gradients = phase.gradients in ("pinned_host", phase.optimizer_state)
    return "speculative" if has_all_gradients and drawn.seed % 4 == 1 else "chunk"


def _accumulates_by_layer(drawn: plain.RandomExperiment, phase: plain.Phase) -> bool:
    """Return whether all microbatches run through a layer before the next: in two thirds of the possible phases."""
    return phase.accumulate > 1 and phase.update != "after_backward" and drawn.seed % 3 > 0


def _choose_context_parallel(drawn: plain.RandomExperiment, phase: plain.Phase) -> str:
    """Return how devices along `seq` see each other's keys: by a ring in two thirds of the phases that allow one."""
    num_chunks = 2 * phase.mesh.get("seq", 1)
    return "ring" if drawn.data.seq_len % num_chunks == 0 and drawn.seed % 3 > 0 else "gather"


def _model(drawn: plain.RandomExperiment, phase: plain.Phase) -> Config:
    model = drawn.model
    param_dtype, compute_dtype, _, adapter_dtype = DTYPES[drawn.precision]
    adapters = None
    if model.lora is not None:
        one = model.lora
        fields = {"rank": one.rank, "alpha": one.alpha, "targets": one.targets, "base": one.base}
        adapters = config_for(lora.LoRA, **fields, dtype=adapter_dtype)
    layers = config_for(
        stack.Stack,
        num_layers=model.repeats * len(model.layers),
        pattern=[_block(layer, _choose_context_parallel(drawn, phase)) for layer in model.layers],
        shared=list(model.shared),
        streams=model.streams,
        unroll=phase.unroll,
    )
    last = config_for(
        head.LMHead,
        norm=_norm(model.head_norm),
        tied=model.tied,
        chunk_tokens=model.chunk_tokens,
        z_loss=model.z_loss,
        logit_divisor=model.logit_divisor,
        softcap=model.head_softcap,
    )
    return config_for(
        CausalLM,
        dim=model.dim,
        vocab_size=model.vocab,
        embed=config_for(embedding.Embedding, max_positions=model.positions, scale=model.embed_scale),
        stack=layers,
        head=last,
        lora=adapters,
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
    )


def _block(layer: plain.Layer, context_parallel: str) -> Config:
    return config_for(
        block.Block,
        attention=_mixer(layer.attention, context_parallel),
        mlp=_mixture(layer.mlp) if isinstance(layer.mlp, plain.Mixture) else _mlp(layer.mlp),
        norm=_norm(layer.norm),
        post_norm=None if layer.post_norm is None else _norm(layer.post_norm),
        branch_scale=layer.branch_scale,
    )


def _mlp(one: plain.MLP) -> Config:
    return config_for(
        mlp.MLP,
        hidden=one.hidden,
        activation=one.activation,
        gated=one.gated,
        linear=config_for(linear.Linear, bias=one.bias),
    )


def _mixture(one: plain.Mixture) -> Config:
    drawn_router, expert = one.router, one.expert
    return config_for(
        moe.MoE,
        num_experts=drawn_router.experts,
        router=config_for(
            router.Router,
            top_k=drawn_router.top_k,
            score=drawn_router.score,
            normalize=drawn_router.normalize,
            scale=drawn_router.scale,
            balance=drawn_router.balance,
            balance_over=drawn_router.balance_over,
            z=drawn_router.z,
            logit_bias=drawn_router.bias,
        ),
        experts=config_for(
            experts.Experts, hidden=expert.hidden, activation=expert.activation, gated=expert.gated, bias=expert.bias
        ),
        shared=None if one.shared is None else _mlp(one.shared),
        shared_gate=config_for(linear.Linear) if one.shared_gate else None,
    )


def _mixer(one: plain.Attention | plain.LinearAttention | plain.StateSpace, context_parallel: str) -> Config:
    if isinstance(one, plain.LinearAttention):
        return _delta_net(one)
    return _state_space(one) if isinstance(one, plain.StateSpace) else _attention(one, context_parallel)


def _attention(one: plain.Attention, context_parallel: str) -> Config:
    turned = scaling = None
    if one.rope_scaling is not None:
        kind, fields = one.rope_scaling
        scaling = config_for({"linear": rotary.LinearScaling, "llama3": rotary.Llama3Scaling}[kind], **fields)
    if one.rope_theta is not None:
        turned = config_for(rotary.Rotary, theta=one.rope_theta, scaling=scaling, rotary_dim=one.rotary_dim)
    return config_for(
        attention.Attention,
        num_heads=one.heads,
        num_kv_heads=one.kv_heads,
        head_dim=one.head_dim,
        linear=config_for(linear.Linear, bias=one.bias),
        output_bias=one.output_bias,
        rotary=turned,
        qk_norm=None if one.qk_norm is None else _norm(one.qk_norm),
        window=one.window,
        softcap=one.softcap,
        scale=one.scale,
        output_gate=one.output_gate,
        context_parallel=context_parallel,
    )


def _delta_net(one: plain.LinearAttention) -> Config:
    return config_for(
        GatedDeltaNet,
        num_heads=one.heads,
        num_key_heads=one.key_heads,
        key_dim=one.key_dim,
        value_dim=one.value_dim,
        conv_width=one.conv_width,
        linear=config_for(linear.Linear, bias=one.bias),
        norm_eps=one.norm_eps,
        chunk=one.chunk,
    )


def _state_space(one: plain.StateSpace) -> Config:
    return config_for(
        Mamba2,
        num_heads=one.heads,
        num_groups=one.groups,
        state_dim=one.state_dim,
        head_dim=one.head_dim,
        conv_width=one.conv_width,
        conv_bias=one.conv_bias,
        linear=config_for(linear.Linear, bias=one.bias),
        min_step=one.min_step,
        max_step=one.max_step,
        norm_eps=one.norm_eps,
        chunk=one.chunk,
    )


def _norm(one: plain.Norm) -> Config:
    if one.kind == "rms":
        return config_for(norm.RMSNorm, eps=one.eps, zero_centered=one.zero_centered)
    return config_for(norm.LayerNorm, eps=one.eps, bias=one.bias)


def _learner(drawn: plain.RandomExperiment, phase: plain.Phase) -> Config:
    learner = drawn.learner
    rules = []
    for rule in learner.rules:
        optimizer = None if rule.optimizer is None else _optimizer(rule.optimizer)
        rules.append(config_for(Rule, pattern=rule.pattern, freeze=rule.freeze, set=rule.set, optimizer=optimizer))
    exact = learner.clip_mode == "global_norm"
    return config_for(
        Learner,
        optimizer=_optimizer(learner.optimizer),
        scope=learner.scope,
        rules=rules,
        clip=learner.clip,
        clip_mode="two_pass" if exact and phase.updates_at_once else learner.clip_mode,
        accumulate=phase.accumulate,
        ema=learner.ema,
        master_dtype=DTYPES[drawn.precision][2],
    )


def _optimizer(one: plain.Optimizer) -> Config:
    rate: Any = one.rate
    if isinstance(rate, tuple):
        name, fields = rate
        rate = config_for(getattr(optax, name), **fields)
    return config_for(OPTIMIZERS[one.name], learning_rate=rate, **one.fields)
