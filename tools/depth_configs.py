"""Models for varying the depth: `python -m tools.memory_vs_depth --config=tools/depth_configs.py:NAME`.

Flows take `--depth_field=model.stacks.0.num_layers`; their images have the size of CIFAR's, and are never read.
"""

from __future__ import annotations

from pathlib import Path

from plimsoll.configs.parts import adamw
from plimsoll.configs.tiny import nanogpt_cpu
from plimsoll.extras.flows.coupling import AffineCoupling
from plimsoll.extras.flows.image_source import ImageFolder, ImagePipeline
from plimsoll.extras.flows.linear import ActNorm, InvertibleConv
from plimsoll.extras.flows.model import Flow
from plimsoll.extras.flows.nets import ConvNet
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions

LANGUAGE = f"{Path(__file__).relative_to(Path(__file__).parents[1])}:language"


def language() -> Config:
    """nanogpt-cpu with two streams and a loop over layers, so that compile time does not grow with depth.

    It is small enough to be timed on a CPU.
    """
    config = nanogpt_cpu()
    config.model.stack.streams = "float32"
    config.model.stack.unroll = 1
    return config


def language_large() -> Config:
    """The same model with width 256, two heads, and 64 sequences of 1024 tokens, computed in bfloat16.

    Activations are large, and a layer has so few parameters that 1024 of them fit on a v5e chip with AdamW's state.
    """
    config = language()
    block = config.model.stack.pattern[0]
    config.model.dim, block.attention.num_heads, block.mlp.hidden = 256, 2, 1024
    config.model.compute_dtype = "bfloat16"
    config.model.embed.max_positions = config.data.seq_len = 1024
    config.data.global_batch_size = 64
    return config


def actnorm() -> Config:
    """A flow that only has ActNorm: a scale and a shift for each of the 12 channels of 16 x 16."""
    return _flow([config_for(ActNorm)])


def glow() -> Config:
    """A flow of Glow's steps: ActNorm, 1x1 convolution, affine coupling with a net of 64 channels.

    A step is three layers, so depths are multiples of three.
    """
    coupling = config_for(AffineCoupling, net=config_for(ConvNet, hidden=64))
    return _flow([config_for(ActNorm), config_for(InvertibleConv), coupling])


def _flow(pattern: list[Config]) -> Config:
    stack = config_for(Stack, num_layers=len(pattern), pattern=pattern)
    return config_for(
        Experiment,
        model=config_for(Flow, image_shape=(32, 32, 3), levels=256, stacks=[stack]),
        data=config_for(
            ImagePipeline, source=config_for(ImageFolder, path="never read", size=[32, 32, 3]), global_batch_size=32
        ),
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=adamw(peak=1e-3, steps=100, warmup=10)),
        trainer=config_for(TrainerOptions, max_steps=100),
    )
