"""Rollouts: the answers that the model itself gives to a batch's prompts, and what they are worth.

Before each step, the weights that are being trained sample `data.group_size` answers to each prompt: the state's own
arrays, by one program that is compiled once. A user's function gives each answer a reward, and an answer's advantage is
its reward beside those of the other answers to its prompt (DeepSeekMath, arXiv 2402.03300).

Draws are keyed by (the run's seed, the step, the row), so a run that is killed and goes on samples the same answers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from framework.companions.reward_function import RewardFunction
from framework.config import Config, NonNegativeInt, PositiveInt, component
from framework.data.batches import Shapes
from framework.data.prompts import Prompts, Row, prompt_text
from framework.devices.executables import HostBytes
from framework.inference.rollout import Answers, Draws, rollout_jit
from framework.layout import merge
from framework.models.causal_lm import CausalLM
from framework.objectives.policy_gradient import GRPO
from framework.program.companion import Companion, Tell
from framework.program.rows import Batch
from framework.schedules.layerwise.programs import Compile, Ledger
from framework.schedules.sections import sections_of

# Added to a standard deviation, as TRL does: a group whose rewards hardly differ counts little.
_STD_EPS = 1e-4
_FILE = "rollouts.jsonl"


@component
class Rollouts(Companion):
    """Samples answers, has them judged, and completes a batch for a GRPO objective. On one machine.

    Args:
        reward: the function that judges, "my_rewards.py:exact" or "package.module.function"; see
            `framework.companions.reward_function`.
        scale: what advantages are divided by: the standard deviation of the rewards of a group, of the batch, or
            nothing (arXiv 2503.20783).
        reference: a companion that adds the `reference` of the answers, for a GRPO with beta > 0.
        demonstrations: in so many first steps the answers are the right ones, which the rows have in a field "answer",
            each with the advantage 1: supervised fine-tuning, for a model that would otherwise get no reward. The
            metrics of these steps have the reward 0, as nothing was sampled.
        greedy_evaluation: held-out prompts are answered by the likeliest tokens; False draws, as in training.
        table_every: some answers are printed this often, in steps, and written to WORKDIR/rollouts.jsonl; those to
            held-out prompts in every evaluation.
        table_rows: prompts of such a table.
    """

    def __init__(
        self,
        *,
        reward: str,
        scale: Literal["group", "batch", "none"] = "group",
        reference: Config | None = None,
        demonstrations: NonNegativeInt = 0,
        greedy_evaluation: bool = True,
        table_every: PositiveInt = 100,
        table_rows: PositiveInt = 4,
    ):
        self.reward = RewardFunction(reward)
        self.scale = scale
        self.reference: Companion | None = None if reference is None else reference.instantiate()
        self.demonstrations = demonstrations
        self.greedy_evaluation = greedy_evaluation
        self.table_every = table_every
        self.table_rows = table_rows
        self._samplers: dict[str, Any] = {}
        self._tell: Tell | None = None
        self._file: Path | None = None
        self._clock = _Clock()

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """tokens, targets, positions and segments int32[B, S], all others f32[B, S]."""
        shape, _ = delivered["prompts"]
        shapes: Shapes = dict.fromkeys(("tokens", "targets", "positions", "segments"), (shape, "int32"))
        shapes |= dict.fromkeys(("weights", "ends", "advantages", "behavior", "rewards", "spreads"), (shape, "float32"))
        if self.reference is None:
            return shapes
        return self.reference.arrays(shapes, evaluation=evaluation)

    def check(self, experiment: Any) -> None:
        """See `Companion`; also looks whether the reward function is there.

        Raises:
            ValueError: model, data, memory or mesh are not such that the model can answer prompts while it trains.
        """
        data = experiment.data
        if not isinstance(data, Prompts):
            raise ValueError(
                f"companion is Rollouts, which answers prompts; data is a {type(data).__name__}, not Prompts"
            )
        objective = experiment.model.head.objective if isinstance(experiment.model, CausalLM) else None
        if not isinstance(objective, GRPO):
            raise ValueError("companion is Rollouts; expected model.head.objective = GRPO, which trains on its rewards")
        if objective.answer_tokens not in (None, data.answer_tokens):
            raise ValueError(
                f"model.head.objective.answer_tokens = {objective.answer_tokens}; expected data.answer_tokens = "
                f"{data.answer_tokens}"
            )
        if (objective.beta > 0) != (self.reference is not None):
            raise ValueError(
                f"model.head.objective.beta = {objective.beta}: expected a companion.reference if, and only if, it is "
                "over 0"
            )
        memory = experiment.memory
        if memory.update == "layer_programs":
            raise ValueError(
                "memory.update = layer_programs has no stack that could answer prompts; with companion = Rollouts "
                "expected in_backward, streamed or after_backward"
            )
        if not all(section.is_whole for section in sections_of(experiment.model, memory)):
            raise ValueError(
                "memory settings that differ by layer, with companion = Rollouts: expected one value for all layers"
            )
        num_cuts = experiment.mesh.sizes["seq"]
        if num_cuts != 1:
            raise ValueError(f"mesh.seq = {num_cuts}: an answer is made a token at a time; expected 1")
        self.reward.check()
        if self.reference is not None:
            self.reference.check(experiment)

    def open(self, program: Any, workdir: Path, *, begins: bool, tell: Tell) -> None:
        """See `Companion`. Raises ValueError: there are several processes, or no such reward function."""
        if jax.process_count() > 1:
            raise ValueError(
                f"companion = Rollouts samples on one machine: expected 1 process, given {jax.process_count()}"
            )
        self.reward.load()
        self._tell = tell
        self._file = workdir / _FILE
        if self.reference is not None:
            self.reference.open(program, workdir, begins=begins, tell=tell)

    def completed(self, program: Any, state: dict[str, Any], batch: Batch, *, group: str = "parameter") -> Batch:
        """See `Companion`. Raises ValueError: the reward function failed."""
        host_batch = {name: np.asarray(array) for name, array in batch.items()}
        step = int(state["counter"]["step"])
        is_training = not host_batch["sources"].any()
        if is_training and step < self.demonstrations:
            arrays = self._demonstrated(program.experiment.data, host_batch)
        else:
            arrays = self._sampled(program, state, batch, host_batch, step, group)
        completed = program.put(arrays)
        if self.reference is not None:
            completed = self.reference.completed(program, state, completed, group=group)
        return completed

    def _demonstrated(self, data: Prompts, host_batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a batch whose answers are the right ones, each with the advantage 1."""
        answers = demonstrated_answers(data, host_batch)
        arrays = rows_of_answers(host_batch, answers)
        zeros_BS = np.zeros_like(arrays["weights"])
        return {**arrays, "advantages": arrays["weights"], "rewards": zeros_BS, "spreads": zeros_BS}

    def _sampled(
        self,
        program: Any,
        state: dict[str, Any],
        batch: Batch,
        host_batch: dict[str, np.ndarray],
        step: int,
        group: str,
    ) -> dict[str, np.ndarray]:
        """The arrays of a batch whose answers the model gives."""
        data: Prompts = program.experiment.data
        # Before the clock starts: the step before this one may still run.
        jax.block_until_ready(state["parameter"])
        self._clock.begin()
        answers = self._answers(program, state, batch, host_batch, step, group)
        self._clock.sampled()
        texts = _texts(data, host_batch, answers)
        rewards_B = self._rewards(data, host_batch, texts)
        self._clock.judged()
        self._show(program, step, host_batch, texts, rewards_B)
        group_size = 1 if host_batch["sources"].any() else data.group_size
        arrays = rows_of_answers(host_batch, answers)
        advantages_B, spreads_B = advantages(rewards_B, group_size, self.scale)
        arrays["advantages"] = arrays["weights"] * advantages_B[:, None]
        arrays["rewards"] = arrays["ends"] * rewards_B[:, None]
        arrays["spreads"] = arrays["ends"] * spreads_B[:, None]
        self._clock.end()
        return arrays

    def rehearsed(self, program: Any, compile: Compile) -> dict[str, Ledger]:
        """See `Companion`: the program that samples, with its cache."""
        data: Prompts = program.experiment.data
        layout = program.layout
        groups = {name: layout.abstract(layout.specs[name]) for name in ("parameter", "frozen", "buffer")}
        weights = merge(groups["parameter"], groups["frozen"])
        batch = layout.abstract(program.delivered_specs)
        words = layout.abstract(layout.specs["counter"])["rng"]
        number = jax.ShapeDtypeStruct((), np.int32, sharding=program.replicated)
        greedy = jax.ShapeDtypeStruct((), bool, sharding=program.replicated)
        numbers = jax.ShapeDtypeStruct((data.global_batch_size,), np.int32, sharding=program.replicated)
        sampler = rollout_jit(program, weights, data.answer_tokens, (0,))
        arguments = ((weights, groups["buffer"]), batch["prompts"], batch["lengths"])
        lowered = sampler.lower(*arguments, Draws(words, number, numbers, greedy))
        hosted = sum(layout.bytes_per_device(name, "pinned_host") for name in ("parameter", "frozen"))
        ledger = Ledger()
        rehearsed_program = compile(lowered, HostBytes(arguments=hosted))
        ledger.count(rehearsed_program, rehearsed_program.peak)
        others = {} if self.reference is None else self.reference.rehearsed(program, compile)
        return {"rollouts": ledger, **others}

    def _answers(
        self,
        program: Any,
        state: dict[str, Any],
        batch: Batch,
        host_batch: dict[str, np.ndarray],
        step: int,
        group: str,
    ) -> Answers:
        """Samples on the devices; arrays on the host."""
        data: Prompts = program.experiment.data
        weights = merge(state[group], state["frozen"])
        sampler = self._samplers.get(group)
        if sampler is None:
            # A group's weights live where they live for the whole run, so one program serves all of its steps.
            sampler = rollout_jit(program, weights, data.answer_tokens, data.stop_ids)
            self._samplers[group] = sampler
        is_training = not host_batch["sources"].any()
        if is_training:
            stream, numbers = step, np.arange(data.global_batch_size)
        else:
            # An evaluation draws the same whatever the step and the batch in which a prompt stands.
            stream, numbers = -1 - int(host_batch["sources"].max()), host_batch["indices"]
        greedy = self.greedy_evaluation and not is_training
        host_draws = (np.int32(stream), numbers.astype(np.int32), np.bool_(greedy))
        draws = Draws(state["counter"]["rng"], *jax.device_put(host_draws, program.replicated))
        answers = sampler((weights, state["buffer"]), batch["prompts"], batch["lengths"], draws)
        return Answers(*jax.device_get(answers))

    def _rewards(self, data: Prompts, host_batch: dict[str, np.ndarray], texts: list[str]) -> np.ndarray:
        """f32[B]; rows without a prompt have 0, and are not judged."""
        rewards_B = np.zeros(len(texts), np.float32)
        (judged,) = np.nonzero(host_batch["lengths"])
        if not judged.size:
            return rewards_B
        rows = [_row(data, host_batch, index) for index in judged]
        prompts = [prompt_text(row["prompt"]) for row in rows]
        rewards_B[judged] = self.reward(prompts, [texts[index] for index in judged], rows)
        return rewards_B

    def _show(
        self,
        program: Any,
        step: int,
        host_batch: dict[str, np.ndarray],
        texts: list[str],
        rewards_B: np.ndarray,
    ) -> None:
        """Prints and writes some answers, where it is time for that."""
        data: Prompts = program.experiment.data
        set_number = int(host_batch["sources"].max())
        indices = host_batch["indices"]
        if set_number:
            # Those at the beginning of a set, which are in the first batch of its evaluation.
            chosen = [i for i in range(len(texts)) if host_batch["lengths"][i] and indices[i] < self.table_rows]
        else:
            is_last = step + 1 == program.experiment.trainer.known_steps
            is_due = step % self.table_every == 0 or is_last
            chosen = list(range(0, len(texts), data.group_size))[: self.table_rows] if is_due else []
        if self._tell is None or self._file is None or not host_batch["lengths"].any() or not chosen:
            return
        name = data.sets[set_number].name
        records = []
        for index in chosen:
            prompt = prompt_text(_row(data, host_batch, index)["prompt"])
            reward = float(rewards_B[index])
            records.append({"step": step, "set": name, "prompt": prompt, "answer": texts[index], "reward": reward})
        table = ["", *(f"  {r['prompt']!r} -> {r['answer']!r}  reward {r['reward']:.3g}" for r in records)]
        self._tell(f"answers after {step} steps, {name}{self._clock.shares()}:" + "\n".join(table))
        with self._file.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


class _Clock:
    """How the time since the first batch is spent: on sampling, on the reward function, on all else."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._now = 0.0
        self._seconds = {"sampling": 0.0, "rewards": 0.0}

    def begin(self) -> None:
        self._now = time.perf_counter()

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        # The first batch compiles the sampler, which is no sampling.
        if self._start is not None:
            self._seconds[name] += now - self._now
        self._now = now

    def sampled(self) -> None:
        self._lap("sampling")

    def judged(self) -> None:
        self._lap("rewards")

    def end(self) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def shares(self) -> str:
        """Such as " (61% of the time sampling, 1% the reward function)"; "" where nothing was measured yet."""
        if self._start is None or not self._seconds["sampling"]:
            return ""
        total = time.perf_counter() - self._start
        sampling, rewards = (self._seconds[name] / total for name in ("sampling", "rewards"))
        return f" ({sampling:.0%} of the time sampling, {rewards:.0%} the reward function)"


def _row(data: Prompts, host_batch: dict[str, np.ndarray], index: int) -> Row:
    return data.row(int(host_batch["sources"][index]), int(host_batch["indices"][index]))


def _texts(data: Prompts, host_batch: dict[str, np.ndarray], answers: Answers) -> list[str]:
    """The text of each answer, without the token that ends it."""
    stop_ids = set(data.stop_ids)
    texts = []
    for tokens, count in zip(answers.tokens, answers.counts, strict=True):
        answer = [token for token in tokens[:count].tolist() if token not in stop_ids]
        texts.append(data.tokenizer.decode(answer))
    return texts


def demonstrated_answers(data: Prompts, host_batch: dict[str, np.ndarray]) -> Answers:
    """The right answers of a batch's rows, of which nobody knows the log-probabilities.

    Raises:
        ValueError: a row has none, or it is longer than data.answer_tokens.
    """
    shape = (len(host_batch["lengths"]), data.answer_tokens)
    tokens_BA = np.zeros(shape, np.int32)
    counts_B = np.zeros(shape[0], np.int32)
    (rows,) = np.nonzero(host_batch["lengths"])
    for index in rows:
        row = _row(data, host_batch, index)
        if "answer" not in row:
            raise ValueError(
                f'companion.demonstrations: expected rows with a field "answer", given one with {", ".join(row)}'
            )
        (encoded,) = data.tokenizer.encode_batch([str(row["answer"])])
        answer = [*encoded.tolist(), data.end_id]
        if len(answer) > data.answer_tokens:
            raise ValueError(
                f"companion.demonstrations: an answer of {len(answer)} tokens is over data.answer_tokens = "
                f"{data.answer_tokens}: {row['answer']!r}"
            )
        tokens_BA[index, : len(answer)] = answer
        counts_B[index] = len(answer)
    return Answers(tokens_BA, np.full(shape, np.nan, np.float32), counts_B)


def rows_of_answers(host_batch: dict[str, np.ndarray], answers: Answers) -> dict[str, np.ndarray]:
    """The arrays of a batch whose rows are a prompt and its answer, [B, S].

    tokens, targets (the inputs' successors), positions and segments (1; 0 behind the answer) int32, and float32:
    weights, 1 where a token of the answer is the target; behavior, its log-probability when it was drawn; ends, 1 at
    the last such column.
    """
    prompts_BS = host_batch["prompts"]
    shape = prompts_BS.shape
    tokens_BS, targets_BS, positions_BS, segments_BS = np.zeros((4, *shape), np.int32)
    weights_BS, behavior_BS, ends_BS = np.zeros((3, *shape), np.float32)
    for row, (length, count) in enumerate(zip(host_batch["lengths"], answers.counts, strict=True)):
        # A row without a prompt has no answer, and is padding from end to end.
        if not length or not count:
            continue
        sequence = np.concatenate([prompts_BS[row, :length], answers.tokens[row, :count]])
        num_columns = len(sequence) - 1
        answer = slice(length - 1, num_columns)
        tokens_BS[row, :num_columns] = sequence[:-1]
        targets_BS[row, :num_columns] = sequence[1:]
        positions_BS[row, :num_columns] = np.arange(num_columns)
        segments_BS[row, :num_columns] = 1
        weights_BS[row, answer] = 1.0
        behavior_BS[row, answer] = answers.log_probs[row, :count]
        ends_BS[row, num_columns - 1] = 1.0
    return {
        "tokens": tokens_BS,
        "targets": targets_BS,
        "positions": positions_BS,
        "segments": segments_BS,
        "weights": weights_BS,
        "behavior": behavior_BS,
        "ends": ends_BS,
    }


def advantages(
    rewards_B: np.ndarray, group_size: int, scale: Literal["group", "batch", "none"]
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, standard deviation of each row's group), f32[B]; zeros in groups of one, as of an evaluation.

    A = (reward - mean of the group) / (standard deviation + 1e-4), with the deviation of a sample (n - 1), as TRL.
    """
    if group_size == 1:
        return np.zeros_like(rewards_B), np.zeros_like(rewards_B)
    groups_GN = rewards_B.astype(np.float64).reshape(-1, group_size)
    spreads_B = np.repeat(groups_GN.std(axis=1, ddof=1), group_size)
    differences_B = (groups_GN - groups_GN.mean(axis=1, keepdims=True)).reshape(-1)
    divisors_B = {"group": spreads_B + _STD_EPS, "batch": groups_GN.std(ddof=1) + _STD_EPS, "none": 1.0}[scale]
    return (differences_B / divisors_B).astype(np.float32), spreads_B.astype(np.float32)
