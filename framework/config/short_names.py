"""Components by short name, without the module: `--config.data.source=JsonLines`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from framework.config.components import INITIALIZERS, OPTAX
from framework.config.names import ConfigError, choices_in, did_you_mean, resolve

# {module: the components that are marked in it}. Listed by hand, because a search would import every module;
# tests/config/test_short_names.py compares the list with the marks.
_COMPONENTS = {
    "framework.companions.reference": ("Reference",),
    "framework.companions.rollouts": ("Rollouts",),
    "framework.companions.teacher": ("Teacher",),
    "framework.config.config": ("reference",),
    "framework.data.chats": ("ChatSource",),
    "framework.data.held_out": ("TextPart", "TokenPart"),
    "framework.data.images": ("DigitsSource", "ImageFolder", "ImagePipeline"),
    "framework.data.library_passages": ("LibraryPairs", "LibraryPassages"),
    "framework.data.pipeline": ("DataPipeline",),
    "framework.data.preferences": ("PairSource", "StdlibPairs", "ThumbSource"),
    "framework.data.pretrained_tokenizer": ("PretrainedTokenizer",),
    "framework.data.prompts": ("Arithmetic", "PromptFiles", "Prompts"),
    "framework.data.scored": ("LabelledSource", "RankedSource"),
    "framework.data.sources": ("Csv", "JsonLines", "Mixture", "Parquet", "StdlibSource", "TextFiles", "TokenMemmap"),
    "framework.data.tokenizers": ("BPETokenizer", "ByteTokenizer", "NoTokenizer"),
    "framework.devices.compiler": ("Compiler",),
    "framework.devices.mesh": ("MeshShape",),
    "framework.layers.attention": ("Attention",),
    "framework.layers.block": ("Block",),
    "framework.layers.embedding": ("Embedding",),
    "framework.layers.experts.experts": ("Experts",),
    "framework.layers.experts.gating": ("ClampedSwiGLU",),
    "framework.layers.experts.moe": ("MoE",),
    "framework.layers.experts.router": ("Router",),
    "framework.layers.flow.coupling": ("AdditiveCoupling", "AffineCoupling"),
    "framework.layers.flow.ends": ("Preprocess", "Prior", "Split"),
    "framework.layers.flow.linear": ("ActNorm", "InvertibleConv", "Permutation", "Squeeze"),
    "framework.layers.flow.nets": ("AttentionNet", "Conv", "ConvNet"),
    "framework.layers.flow.residual": ("ResidualBlock",),
    "framework.layers.head": ("LMHead",),
    "framework.layers.kernels_call": ("SplashBlocks",),
    "framework.layers.latent_attention": ("LatentAttention",),
    "framework.layers.linear": ("Linear",),
    "framework.layers.lora": ("LoRA",),
    "framework.layers.longrope": ("LongRopeScaling",),
    "framework.layers.mlp": ("MLP",),
    "framework.layers.norm": ("LayerNorm", "RMSNorm"),
    "framework.layers.rotary": ("LinearScaling", "Llama3Scaling", "Rotary"),
    "framework.layers.score_head": ("ScoreHead",),
    "framework.layers.stack": ("Stack",),
    "framework.layers.yarn": ("YarnScaling",),
    "framework.learner.learner": ("Learner",),
    "framework.learner.rules": ("Rule",),
    "framework.models.causal_lm": ("CausalLM",),
    "framework.models.flow": ("Flow",),
    "framework.objectives.distillation": ("Distillation",),
    "framework.objectives.policy_gradient": ("GRPO",),
    "framework.objectives.preferences": ("DPO", "IPO", "ORPO", "SimPO"),
    "framework.objectives.rewards": ("Classification", "PairwiseReward"),
    "framework.objectives.thumbs": ("KTO",),
    "framework.optimizers.adalomo": ("adalomo",),
    "framework.optimizers.adam_mini": ("adam_mini",),
    "framework.optimizers.learning_rates": ("warmup_cosine", "warmup_linear", "warmup_stable_decay"),
    "framework.optimizers.lowrank": ("apollo", "apollo_mini"),
    "framework.optimizers.matrices": ("galore", "muon"),
    "framework.optimizers.offload": ("offload_optimizer", "partitioned_chain"),
    "framework.optimizers.quantized": ("adamw8bit",),
    "framework.processes.health": ("Health",),
    "framework.program.experiment": ("AcceleratorRule", "Experiment"),
    "framework.program.options": ("TrainerOptions",),
    "framework.schedules.memory": ("Memory",),
    "framework.weights.pretrained": ("Pretrained",),
}
_MODULES = {name: module_name for module_name, names in _COMPONENTS.items() for name in names}


def short_named(name: str, neighbors: Iterable[str]) -> tuple[Any, str]:
    """Returns the component with a name without dots.

    Args:
        name: short name, such as TextFiles or cosine_decay_schedule.
        neighbors: dotted names of components, such as framework.data.sources.JsonLines. Their modules are searched
            first, in this order; then Plimsoll's components, and those of optax and jax.nn.initializers.

    Returns:
        (component, ""), or (None, suggestion for the error message) if there is no component of that name.
    """
    if not name.isidentifier():
        return None, ""
    module_names = [neighbor.rpartition(".")[0] for neighbor in neighbors]
    if name in _MODULES:
        module_names.append(_MODULES[name])
    # Only imported modules are searched: a config that can use these has imported them.
    module_names += [module_name for module_name in (*OPTAX, INITIALIZERS) if module_name in sys.modules]
    choices = list(_MODULES)
    for module_name in dict.fromkeys(module_names):
        with contextlib.suppress(ConfigError):
            return resolve(f"{module_name}.{name}"), ""
        if module_name in sys.modules:
            choices += choices_in(sys.modules[module_name])
    return None, did_you_mean(name, choices)
