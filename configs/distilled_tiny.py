"""A small teacher and a smaller student that a laptop's CPU trains in minutes, on text that every machine has.

    plimsoll train --config=distil-tiny --workdir=runs/student
    plimsoll train --config=distil-tiny-alone --workdir=runs/alone

The first command trains the teacher, stores its scores, and then trains the student. As separate commands:

    plimsoll train --config=distil-tiny-teacher --workdir=runs/teacher
    plimsoll score --workdir=runs/teacher --config=distil-tiny --top_k=32 --out=runs/scores
    plimsoll train --config=distil-tiny --config.batch_transform.path=runs/scores --workdir=runs/student

The teacher is trained on the whole library. The student reads a fiftieth of it several times, as in a domain where
little text exists. `python -m tools.bench.distillation` runs all of this and compares the results.
"""

from __future__ import annotations

from plimsoll.configs.parts import muon
from plimsoll.framework.batch_transforms.teacher import Teacher
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import StdlibSource
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.objectives.distillation import Distillation
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions

# Number of the teacher's most likely bytes, of 257, that the student receives.
_TOP_K = 32


def distil_tiny_teacher() -> Config:
    """The teacher of distil-tiny: a 0.9M-parameter Llama-like byte model of the Python standard library."""
    return _experiment(layers=4, steps=900, share=1.0)


def distil_tiny_alone() -> Config:
    """distil-tiny without a teacher: a 0.5M-parameter Llama-like byte model of a fiftieth of the standard library."""
    return _experiment(layers=2, steps=600, share=0.02)


def distil_tiny() -> Config:
    """A 0.5M-parameter student of distil-tiny-teacher, which is trained first unless its scores are there."""
    config = distil_tiny_alone()
    config.model.head.objective = config_for(Distillation, alpha=0.0, temperature=2.0)
    config.batch_transform = config_for(
        Teacher, path="runs/distil-tiny-scores", top_k=_TOP_K, train_first="distil-tiny-teacher"
    )
    return config


def _experiment(*, layers: int, steps: int, share: float) -> Config:
    """Build a model of width 128 with `layers` layers, trained for `steps` steps on that share of the library."""
    vocab_size = 257
    model = llama_model(layers=layers, heads=2, dim=128, hidden=344, vocab_size=vocab_size)
    model.stack.unroll = 0
    model.embed.init.stddev = 0.5
    optimizer, adam_rule = muon(peak=0.02, adam_peak=0.02, warmup=0.06, end=0.0)
    return config_for(
        Experiment,
        model=model,
        data=config_for(
            DataPipeline,
            source=config_for(StdlibSource, split="train", share=share),
            validation={"stdlib": config_for(StdlibSource, split="validation")},
            tokenizer=config_for(ByteTokenizer),
            seq_len=256,
            global_batch_size=8,
        ),
        mesh=config_for(MeshShape, data=-1, fsdp=1),
        learner=config_for(Learner, optimizer=optimizer, rules=[adam_rule]),
        trainer=config_for(
            TrainerOptions,
            max_steps=steps,
            # Evaluate four times, so that a student that starts to memorize its text shows.
            eval_every=max(1, steps // 4),
            # 131 thousand bytes of the held-out part, the same for teacher and students.
            eval_batches=64,
            save_every=steps,
            log_every=50,
        ),
    )


CONFIGS = {
    "distil-tiny": distil_tiny,
    "distil-tiny-alone": distil_tiny_alone,
    "distil-tiny-teacher": distil_tiny_teacher,
}
