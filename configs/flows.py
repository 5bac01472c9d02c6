"""Normalizing flows of images: Glow, RealNVP, NICE and residual flows of handwritten digits; Glow of larger images.

Baselines for the flows of digits, on the same held-out images, in bits per dimension: an independent Gaussian per
pixel 3.40, one with full covariance 2.97 (dequantized in the same way, fitted on the training images).
"""

from __future__ import annotations

from plimsoll.configs.parts import adamw, no_decay
from plimsoll.extras.flows.coupling import AdditiveCoupling, AffineCoupling
from plimsoll.extras.flows.image_source import DigitsSource, ImageFolder, ImagePipeline
from plimsoll.extras.flows.linear import ActNorm, InvertibleConv, Permutation
from plimsoll.extras.flows.model import Flow
from plimsoll.extras.flows.nets import ConvNet
from plimsoll.extras.flows.residual import ResidualBlock
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.schedules.memory import Memory


def flow(pattern: list[Config], *, shape: tuple[int, int, int], levels: int, scales: int, steps: int) -> Config:
    """Build a multi-scale flow.

    Args:
        pattern: layers that each scale repeats.
        shape: height, width and channels of an image.
        levels: number of values of a channel.
        scales: number of scales.
        steps: number of repeats of the pattern at each scale.
    """
    stacks = []
    for _ in range(scales):
        stacks.append(config_for(Stack, num_layers=steps * len(pattern), pattern=pattern))
    return config_for(Flow, image_shape=shape, levels=levels, stacks=stacks)


def digits(pattern: list[Config], *, depth: int, steps: int, rate: float = 1e-3, remat: str = "none") -> Config:
    """Build a flow with two scales of the pattern on the digits: 1,436 training images, 361 held out.

    Args:
        pattern: layers that each scale repeats.
        depth: number of repeats of the pattern at each scale.
        steps: number of training steps.
        rate: peak learning rate.
        remat: remat policy of the stacks.
    """
    # Pixels of the digits have 17 levels, 0 to 16.
    model = flow(pattern, shape=(8, 8, 1), levels=17, scales=2, steps=depth)
    data = config_for(
        ImagePipeline,
        source=config_for(DigitsSource),
        validation={"digits": config_for(DigitsSource, split="validation")},
        global_batch_size=64,
    )
    trainer = config_for(TrainerOptions, max_steps=steps, eval_every=300, save_every=steps, sample_temperature=1.0)
    return config_for(
        Experiment,
        model=model,
        data=data,
        # A model of this size fits on every device, so all devices share the batch instead.
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=learner(rate=rate, ema=0.995),
        memory=config_for(Memory, remat=remat),
        trainer=trainer,
    )


def learner(*, rate: float, ema: float, warmup: float = 100) -> Config:
    """Build a learner: AdamW with weight decay only for the nets, clip 1.0, averaged weights.

    Args:
        rate: peak learning rate.
        ema: decay rate of the average of the weights.
        warmup: length of the warm-up, in steps or as a fraction of the run.
    """
    return config_for(
        Learner,
        optimizer=adamw(peak=rate, warmup=warmup, weight_decay=0.01, b2=0.999, end=0.02),
        rules=[no_decay("bias|log_s|^prior|block[0-9]+/(lower|upper)")],
        clip=1.0,
        ema=ema,
    )


def digits_glow() -> Config:
    """Glow (arXiv 1807.03039) of 8 x 8 digits: 0.17M parameters, under 8 minutes on 2 CPU cores.

    Two scales of 8 steps of actnorm, 1x1 convolution and affine coupling. About 2.05 bits per dimension.
    """
    coupling = config_for(AffineCoupling, net=config_for(ConvNet, hidden=64, dropout=0.25))
    return digits([config_for(ActNorm), config_for(InvertibleConv), coupling], depth=8, steps=2000)


def digits_realnvp() -> Config:
    """RealNVP (arXiv 1605.08803) of 8 x 8 digits; 0.21M parameters.

    Actnorm replaces its batch norm. Couplings alternate between the halves of the channels, which are then shuffled;
    nothing else mixes the channels.
    """
    net = config_for(ConvNet, hidden=64, dropout=0.25)
    halves = [config_for(AffineCoupling, net=net, flip=flip) for flip in (False, True)]
    return digits([config_for(ActNorm), *halves, config_for(Permutation, kind="shuffle")], depth=5, steps=1200)


def digits_nice() -> Config:
    """NICE-like flow (arXiv 1410.8516) of 8 x 8 digits; 0.18M parameters.

    Like digits-realnvp but with additive couplings, so only actnorm changes volumes.
    """
    net = config_for(ConvNet, hidden=64, dropout=0.25)
    halves = [config_for(AdditiveCoupling, net=net, flip=flip) for flip in (False, True)]
    return digits([config_for(ActNorm), *halves, config_for(Permutation, kind="shuffle")], depth=5, steps=1200)


def digits_residual() -> Config:
    """Residual flow (arXiv 1906.02735) of 8 x 8 digits; 0.04M parameters.

    Its blocks have no cheap inverse, so memory.remat is sqrt, never invert.
    """
    block = config_for(ResidualBlock, hidden=32, size=4)
    return digits([config_for(ActNorm), block], depth=4, steps=1500, rate=2e-3, remat="sqrt")


def images_glow() -> Config:
    """Glow of 32 x 32 x 3 images in a folder of PNG or NPZ files (data.source.path); 45M parameters.

    3 scales of 32 steps, width 512, as in the paper for CIFAR-10 (there 3.35 bits per dimension), in constant memory
    (memory.remat = invert). It has not been trained yet.
    """
    coupling = config_for(AffineCoupling, net=config_for(ConvNet, hidden=512))
    steps = 200_000
    return config_for(
        Experiment,
        model=flow(
            [config_for(ActNorm), config_for(InvertibleConv), coupling],
            shape=(32, 32, 3),
            levels=256,
            scales=3,
            steps=32,
        ),
        data=config_for(
            ImagePipeline,
            source=config_for(ImageFolder, path="data/images", size=[32, 32, 3]),
            global_batch_size=64,
            flip=True,
        ),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=learner(rate=1e-3, ema=0.9995, warmup=5000),
        memory=config_for(Memory, remat="invert"),
        trainer=config_for(TrainerOptions, max_steps=steps, eval_every=2000, save_every=2000),
    )


CONFIGS = {
    "digits-glow": digits_glow,
    "digits-realnvp": digits_realnvp,
    "digits-nice": digits_nice,
    "digits-residual": digits_residual,
    "images-glow": images_glow,
}
