"""A user config file for tests: digits, and a flow that compiles in seconds."""

import optax

from plimsoll.extras.flows.coupling import AffineCoupling
from plimsoll.extras.flows.image_source import DigitsSource, ImagePipeline
from plimsoll.extras.flows.linear import ActNorm, InvertibleConv
from plimsoll.extras.flows.model import Flow
from plimsoll.extras.flows.nets import ConvNet
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from tests.support.tiny import CACHE


def flow() -> Config:
    """Two levels of two Glow steps each, with networks of 8 channels, on digits in batches of 64."""
    coupling = config_for(AffineCoupling, net=config_for(ConvNet, hidden=8))
    pattern = [config_for(ActNorm), config_for(InvertibleConv), coupling]
    stack = config_for(Stack, num_layers=6, pattern=pattern, depth_scaled_init=False)
    return config_for(
        Experiment,
        model=config_for(Flow, image_shape=(8, 8, 1), levels=17, stacks=[stack, stack.copy()]),
        data=config_for(
            ImagePipeline,
            source=config_for(DigitsSource),
            validation={"digits": config_for(DigitsSource, split="validation")},
            global_batch_size=64,
            seed=3,
        ),
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=config_for(optax.adam, learning_rate=1e-3)),
        trainer=config_for(
            TrainerOptions,
            max_steps=12,
            log_every=1,
            eval_every=None,
            save_every=4,
            keep=3,
            compilation_cache=CACHE,  # shared by all runs of the tests
        ),
    )


CONFIGS = {"flow": flow}
