"""The run that `tools.memory_soak` repeats: a small language model, and hooks that record the memory of the process."""

from __future__ import annotations

import ctypes
import json
import os
import random
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import optax

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.families.decoders import gpt2_model
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.metrics.memory import live_array_bytes, rss_bytes
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.run.hooks import Hook, RollBack, Row
from plimsoll.framework.run.run import Run

# Environment variable with the folder of the text.
TEXT_VARIABLE = "SOAK_TEXT"
# No event is due within this many steps.
NEVER = 1 << 30
SEQ_LEN = 64
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "other", "words", "pass", "by")


@dataclass(frozen=True)
class Sample:
    """Resources of this process after an event.

    Attributes:
        rss_bytes: resident memory, which includes what malloc keeps for later allocations.
        used_bytes: memory that malloc has handed out, over all of its heaps; 0 if the C library does not report it.
        array_bytes: bytes of live jax arrays.
        num_files: number of open file descriptors.
        num_threads: number of Python threads.
    """

    rss_bytes: int
    used_bytes: int
    array_bytes: int
    num_files: int
    num_threads: int


class _MallocInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def count_used_bytes() -> int:
    """Return the bytes that malloc has handed out, without those that it keeps; 0 without mallinfo2 (glibc 2.33)."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    # Blocks in heaps, and blocks with their own mappings.
    return info.uordblks + info.hblkhd


def record_sample(path: str | Path) -> None:
    """Append a sample of this process to a file of JSON lines."""
    sample = Sample(
        rss_bytes=rss_bytes(),
        used_bytes=count_used_bytes(),
        array_bytes=sum(live_array_bytes().values()),
        num_files=len(os.listdir("/proc/self/fd")),
        num_threads=threading.active_count(),
    )
    with open(path, "a") as file:
        print(json.dumps(asdict(sample)), file=file)


def read_samples(path: str | Path) -> list[Sample]:
    """Read the samples in a file of JSON lines."""
    return [Sample(**json.loads(line)) for line in Path(path).read_text().splitlines()]


class SampleEachStep(Hook):
    """Records a sample after each step; user hooks run after the step's evaluation and save.

    Args:
        path: file that receives the samples.
    """

    def __init__(self, *, path: str):
        self.path = path

    def after_step(self, run: Run, step: int) -> None:
        # The copy of the state that a save writes in the background is freed when it is written.
        run.checkpointer.wait()
        record_sample(self.path)


class RollBackOften(Hook):
    """Rolls back after each new checkpoint, as `learner.nonfinite=rollback` does, and records a sample after each.

    Args:
        path: file that receives the samples.
        count: number of rollbacks.
    """

    def __init__(self, *, path: str, count: int):
        self.path = path
        self.remaining = count
        # The step after which the run was rolled back last.
        self.last_step = 0

    def on_metrics(self, run: Run, step: int, metrics: Row) -> None:
        saved_step = step - step % run.options.save_every
        if self.remaining and step > saved_step > self.last_step:
            self.remaining -= 1
            self.last_step = saved_step
            raise RollBack(step)

    def on_roll_back(self, run: Run, step: int) -> None:
        record_sample(self.path)


def write_text(folder: Path) -> None:
    """Write train.txt and valid.txt: random words, the same in each call."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, num_words in [("train.txt", 40_000), ("valid.txt", 2_000)]:
        words = rng.choices(_WORDS, k=num_words)
        lines = [" ".join(words[start : start + 12]) for start in range(0, num_words, 12)]
        (folder / name).write_text("\n".join(lines))


def soak() -> Config:
    """The run without saves (but the last), evaluations and hooks; 82 MiB of weights and optimizer state.

    The text is in the folder $SOAK_TEXT, see `write_text`.
    """
    text = os.environ.get(TEXT_VARIABLE, ".")
    return config_for(
        Experiment,
        model=gpt2_model(layers=4, heads=4, dim=384, vocab_size=257, positions=SEQ_LEN),
        data=config_for(
            DataPipeline,
            source=config_for(TextFiles, paths=[f"{text}/train.txt"]),
            validation={"held": config_for(TextFiles, paths=[f"{text}/valid.txt"])},
            tokenizer=config_for(ByteTokenizer),
            seq_len=SEQ_LEN,
            global_batch_size=2,
        ),
        mesh=config_for(MeshShape),
        learner=config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=1e-4)),
        trainer=config_for(
            TrainerOptions, max_steps=1, log_every=1, eval_every=NEVER, eval_batches=2, save_every=NEVER, keep=1
        ),
    )


def sampled() -> Config:
    """The run with a sample after each step."""
    config = soak()
    config.trainer.hooks = [config_for(SampleEachStep, path="samples.jsonl")]
    return config


def rolled_back() -> Config:
    """The run with rollbacks, and a sample after each."""
    config = soak()
    config.trainer.hooks = [config_for(RollBackOften, path="samples.jsonl", count=1)]
    config.trainer.save_every = 2
    return config


CONFIGS = {"soak": soak, "sampled": sampled, "rolled_back": rolled_back}
