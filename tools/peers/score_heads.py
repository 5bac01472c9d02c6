"""Comparison of our score models with transformers' ...ForSequenceClassification and TRL's RewardTrainer loss.

Their sequences are padded, as usual there; ours are the same sequences, packed two per row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.scored import LabeledSource, RankedSource
from plimsoll.framework.data.tokenizers import NoTokenizer
from plimsoll.framework.families import scores
from plimsoll.framework.layout import Nested, TrainState, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.objectives.rewards import Classification, PairwiseReward
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.after_backward import accumulate_gradients
from plimsoll.framework.schedules.step import training_context
from tools.peers.families import FAMILIES, SEQ_LEN, VOCAB, PeerFamily
from tools.peers.recording import BETAS, CLIP, EPS, LEARNING_RATE, TRAINING_STEPS, WEIGHT_DECAY, Tensors

Task = Literal["classify", "reward"]
CLASSES = ["red", "green", "blue"]
# Lengths of the sequences in each of our rows; for rewards, each row is a pair.
LENGTHS = ((5, 9), (11, 4))
PAD = 0
# The shape that `tools.record_score_heads` records.
RECORDED_SHAPE = "llama"
MARGIN, CENTERING = 0.25, 0.05
# Shapes of language models whose variant with a score head exists in transformers (OLMoE has none).
LANGUAGE_SHAPES = [
    name for name, one in FAMILIES.items() if one.facts["architectures"][0] in scores.LANGUAGE_MODELS.values()
]


def build_family(name: str, kind: Task) -> PeerFamily:
    """Return the shape of a family with a score head in place of the language model's head."""
    names = CLASSES if kind == "classify" else ["LABEL_0"]
    facts = scores.add_score_head_facts(FAMILIES[name].facts, len(names))
    no_gradient = FAMILIES[name].no_gradient
    return PeerFamily(f"{kind}-{name}", {**facts, **scores.label_facts(names), "pad_token_id": PAD}, no_gradient)


@dataclass(frozen=True)
class Sequences:
    """Token ids of sequences, drawn from a seed, and their classes.

    Args:
        tokens: int32 ids of each sequence, without padding ids; the sequences of row 0 come first.
        labels: class of each sequence.
    """

    tokens: list[np.ndarray]
    labels: np.ndarray

    @staticmethod
    def draw(seed: int) -> Sequences:
        """Draw sequences."""
        rng = np.random.default_rng(seed)
        lengths = [length for row in LENGTHS for length in row]
        tokens = [rng.integers(1, VOCAB, length).astype(np.int32) for length in lengths]
        return Sequences(tokens, rng.integers(0, len(CLASSES), len(lengths)))

    def batch(self, kind: Task) -> Batch:
        """Return the sequences in the form that the data pipeline passes to our model."""
        shape = (len(LENGTHS), SEQ_LEN)
        batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")}
        batch |= {name: np.zeros(shape, np.float32) for name in ("weights", "ends", "labels")}
        number = 0
        for row, lengths in enumerate(LENGTHS):
            start = 0
            for segment, length in enumerate(lengths, 1):
                columns = slice(start, start + length)
                batch["tokens"][row, columns] = self.tokens[number]
                batch["positions"][row, columns] = np.arange(length)
                batch["segments"][row, columns] = segment
                batch["weights"][row, columns] = 1
                start += length
                batch["ends"][row, start - 1] = 1
                batch["labels"][row, start - 1] = self.labels[number]
                number += 1
        if kind == "reward":
            del batch["labels"]
        return batch

    def pad_sequences(self, kind: Task) -> dict[str, np.ndarray]:
        """Return the sequences in transformers' format: all chosen before all rejected ones, as in TRL's collator."""
        order = [0, 2, 1, 3] if kind == "reward" else [0, 1, 2, 3]
        rows = [self.tokens[number] for number in order]
        longest = max(map(len, rows))
        ids = np.stack([np.pad(row, (0, longest - len(row)), constant_values=PAD) for row in rows])
        arrays = {"input_ids": ids.astype(np.int64), "attention_mask": (ids != PAD).astype(np.int64)}
        if kind == "classify":
            return {**arrays, "labels": self.labels[order].astype(np.int64)}
        return {**arrays, "margin": np.full(2, MARGIN, np.float32)}


def load_recorded(file: Path) -> tuple[int, Tensors, Tensors, Tensors]:
    """Read a recorded file: (seed of the inputs, weights, gradients, and logits, loss and losses)."""
    groups: dict[str, Tensors] = {"weights": {}, "gradients": {}, "": {}}
    with np.load(file) as arrays:
        for key in arrays.files:
            group, _, name = key.rpartition(":")
            groups[group][name] = arrays[key]
    weights = {name: tensor.astype(np.float32) for name, tensor in groups["weights"].items()}
    return int(groups[""]["seed"]), weights, groups["gradients"], groups[""]


# --- ours ----------------------------------------------------------------------------------------------------------


def build_program(family: PeerFamily, kind: Task, **model: Any) -> Program:
    """Build the program on one device; its data is never opened."""
    config = family.ours()
    for field, value in model.items():
        config[field] = value
    source = config_for(RankedSource, paths=["not-there.jsonl"])
    config.head.objective = config_for(PairwiseReward, margin=MARGIN, centering=CENTERING)
    if kind == "classify":
        source = config_for(LabeledSource, paths=["not-there.jsonl"], classes=CLASSES)
        config.head.objective = config_for(Classification)
    optimizer = config_for(
        optax.adamw, learning_rate=LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
    )
    experiment = config_for(
        Experiment,
        model=config,
        data=config_for(
            DataPipeline,
            source=source,
            tokenizer=config_for(NoTokenizer, vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            global_batch_size=len(LENGTHS),
        ),
        learner=config_for(Learner, optimizer=optimizer, clip=CLIP),
        trainer=config_for(TrainerOptions, max_steps=1),
    )
    return Program(experiment.instantiate(), jax.devices()[:1])


def gradients(program: Program, params: Nested, batch: Batch) -> tuple[np.ndarray, np.ndarray, Nested]:
    """Return (scores [N, C] of the sequences in the order of the rows, loss, gradients) on the host."""
    model, experiment = program.experiment.language_model, program.experiment

    def run(params: Nested, batch: Batch) -> Any:
        counter = {"rng": jax.random.key_data(jax.random.key(0)), "step": jnp.int32(0)}
        ctx = training_context(batch, counter, model, program.layout, experiment.memory.remat)
        state = TrainState(parameter=params)
        (loss, _), grads = accumulate_gradients(model, experiment.learner, state, ctx)
        x_BSD, _ = model.compute_hidden(params, ctx, {})
        scores_BSC = model.score_head.scores(model.head_weights(params, ctx), x_BSD, ctx)
        return scores_BSC, loss, grads

    scores_BSC, loss, grads = jax.device_get(jax.jit(run)(params, batch))
    return scores_BSC[batch["ends"] > 0], loss, grads


def train(program: Program, params: Nested, batches: list[Batch]) -> tuple[np.ndarray, Tensors]:
    """Return (losses of the steps, norm of each parameter's change by path)."""
    new = program.experiment.learner.init(params)
    counter = {"step": np.int32(0), "skipped": np.int32(0), "grad_norm": np.float32(0)}
    counter["rng"] = jax.random.key_data(jax.random.key(0))
    state = TrainState(parameter=new.weights, optimizer=new.entry, ema=new.average, counter=counter)
    state = jax.device_put(state, program.layout.shardings())
    losses = []
    for batch in batches:
        state, metrics = program.step(state, program.put(batch))
        losses.append(np.asarray(metrics["loss"]))
    first = flatten(params)
    moved = {path: np.asarray(array, np.float64) - first[path] for path, array in flatten(state.parameter).items()}
    return np.asarray(losses), {path: np.asarray(np.linalg.norm(array)) for path, array in moved.items()}


def training_sequences(seed: int) -> list[Sequences]:
    """Return the sequences of each step: two batches that repeat, so that the loss falls."""
    return [Sequences.draw(seed + 1 + step % 2) for step in range(TRAINING_STEPS)]


# --- theirs --------------------------------------------------------------------------------------------------------


def their_loss(model: Any, sequences: Sequences, kind: Task) -> tuple[Any, Any]:
    """Return (logits [N, C] in the order of our rows, loss) as torch tensors, from transformers or RewardTrainer."""
    import torch

    arrays = {name: torch.as_tensor(array) for name, array in sequences.pad_sequences(kind).items()}
    if kind == "classify":
        out = model(**arrays)
        return out.logits, out.loss
    from trl.trainer.reward_trainer import RewardTrainer

    # The attributes of the trainer that its loss reads.
    trainer: Any = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=CENTERING),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    pair: Any = RewardTrainer.compute_loss(trainer, model, arrays, return_outputs=True)
    loss, out = pair
    return out.logits[[0, 2, 1, 3]], loss


def their_gradients(model: Any, sequences: Sequences, kind: Task) -> tuple[np.ndarray, np.ndarray, Tensors]:
    """Return (logits, loss, gradients by the names of published files)."""
    from tools.peers import theirs

    model.zero_grad(set_to_none=True)
    logits, loss = their_loss(model, sequences, kind)
    loss.backward()
    named = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    grads = theirs.to_published_names(model.config.model_type, named)
    return logits.detach().numpy(), loss.detach().numpy(), grads


def their_training(model: Any, steps: list[Sequences], kind: Task) -> np.ndarray:
    """Return the losses of plain AdamW steps, with global-norm clipping; this trains the model."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for sequences in steps:
        optimizer.zero_grad(set_to_none=True)
        _, loss = their_loss(model, sequences, kind)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return np.asarray(losses, np.float32)
