"""Rollouts: samples the model's own answers to a batch's prompts, and computes their rewards and advantages.

Before each step, the weights being trained sample `data.group_size` answers to each prompt. A single program, compiled
once, reads the arrays of the training state directly. A user's function returns a reward for each answer. The advantage
of an answer is its reward relative to those of the other answers to the same prompt (DeepSeekMath, arXiv 2402.03300).

Random draws are keyed by (seed of the run, step, row), so a run that is killed and resumed samples the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.batch_transforms.answers import (
    SamplingTimer,
    build_answer_rows,
    compute_advantages,
    decode_answers,
    encode_demonstrations,
    get_answer_tokens,
    get_location,
    get_row,
)
from plimsoll.framework.batch_transforms.auxiliary_model import estimate_sampling
from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.batch_transforms.reward_function import JudgedAnswers, RewardFunctions, sum_rewards
from plimsoll.framework.config import Config, NonNegativeInt, PositiveInt, component
from plimsoll.framework.data.batches import Shapes
from plimsoll.framework.data.prompts import Prompts, prompt_text
from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.inference.rollout import SampledAnswers, SamplingInputs, rollout_jit
from plimsoll.framework.layout import TrainState, merge
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.objectives.policy_gradient import GRPO
from plimsoll.framework.program.batch_transform import BatchTransform, ForwardCost, Log
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.schedules.stack_layout import split_stacks

_FILE = "rollouts.jsonl"
# Number of data rows that the reward function is tried on before a run starts.
_TRIED_ROWS = 2


@component
class Rollouts(BatchTransform):
    """Samples answers, computes their rewards, and completes the batch for a GRPO objective. Single process only.

    Args:
        reward: reward function, "my_rewards.py:exact" or "package.module.function", or a list of them, whose rewards
            are added; see `framework.batch_transforms.reward_function`. A reward function is executable code, so it is
            not loaded from the stored config of a workdir, which may be untrusted, unless it is one of Plimsoll's own.
            The field is then None, and no answers can be sampled.
        reward_weights: a weight for each reward function; None for 1.
        scale: divisor of the advantages: the standard deviation of the rewards of each group ("group") or of the
            batch ("batch"), or no scaling ("none", arXiv 2503.20783).
        reference: auxiliary model that adds `reference` for the answers; required for GRPO with beta > 0.
        demonstrations: number of initial steps that train on the correct answers, which the rows have in a field
            "answer", each with advantage 1. This is supervised fine-tuning, for a model that would otherwise get no
            reward. The metrics of these steps show reward 0, because nothing is sampled.
        greedy_evaluation: decode answers to held-out prompts greedily; False samples them, as in training.
        table_every: print some answers every this many steps and append them to WORKDIR/rollouts.jsonl. Answers to
            held-out prompts are shown in every evaluation.
        table_rows: number of prompts in such a table.
    """

    def __init__(
        self,
        *,
        reward: str | list[str] | None = None,
        reward_weights: list[float] | None = None,
        scale: Literal["group", "batch", "none"] = "group",
        reference: Config | None = None,
        demonstrations: NonNegativeInt = 0,
        greedy_evaluation: bool = True,
        table_every: PositiveInt = 100,
        table_rows: PositiveInt = 4,
    ):
        names = [reward] if isinstance(reward, str) else reward
        self._reward: RewardFunctions | None = None if names is None else RewardFunctions(names, reward_weights)
        self.scale: Literal["group", "batch", "none"] = scale
        self.reference: BatchTransform | None = None if reference is None else reference.instantiate()
        self.demonstrations = demonstrations
        self.greedy_evaluation = greedy_evaluation
        self.table_every = table_every
        self.table_rows = table_rows
        # Compiled samplers by the group of weights that they read.
        self._samplers: dict[str, Callable[..., SampledAnswers]] = {}
        self._log: Log | None = None
        self._file: Path | None = None
        self._timer = SamplingTimer()
        self._has_warned = False

    def join(self, experiment: Experiment) -> None:
        """See `BatchTransform`."""
        if self.reference is not None:
            self.reference.join(experiment)

    @property
    def reward(self) -> RewardFunctions:
        """The reward functions. Raises ValueError if batch_transform.reward is None."""
        if self._reward is None:
            raise ValueError(
                "batch_transform.reward is None; expected the function that scores answers: --reward=FILE.py:FUNCTION"
            )
        return self._reward

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """See `BatchTransform`: tokens, targets, positions and segments are int32[B, S], all others f32[B, S]."""
        shape, _ = delivered["prompts"]
        whole_numbers = ("tokens", "targets", "positions", "segments")
        numbers = ("weights", "ends", "advantages", "behavior", "rewards", "spreads")
        shapes: Shapes = {
            **dict.fromkeys(whole_numbers, (shape, "int32")),
            **dict.fromkeys(numbers, (shape, "float32")),
        }
        if self.reference is None:
            return shapes
        return self.reference.arrays(shapes, evaluation=evaluation)

    def check(self, experiment: Experiment) -> None:
        """See `BatchTransform`; also checks that the reward function exists.

        Raises:
            ValueError: the model, data, memory or mesh settings do not allow sampling answers during training.
        """
        data = experiment.data
        if not isinstance(data, Prompts):
            raise ValueError(
                f"batch_transform is Rollouts, which answers prompts; data is a {type(data).__name__}, not Prompts"
            )
        objective = experiment.model.head.objective if isinstance(experiment.model, CausalLM) else None
        if not isinstance(objective, GRPO):
            raise ValueError(
                "batch_transform is Rollouts; expected model.head.objective = GRPO, which trains on its rewards"
            )
        if objective.answer_tokens not in (None, data.answer_tokens):
            raise ValueError(
                f"model.head.objective.answer_tokens = {objective.answer_tokens}; expected data.answer_tokens = "
                f"{data.answer_tokens}"
            )
        if (objective.beta > 0) != (self.reference is not None):
            raise ValueError(
                f"model.head.objective.beta = {objective.beta}: expected a batch_transform.reference if, and only if, "
                "it is over 0"
            )
        memory = experiment.memory
        if memory.traits.is_many_programs:
            raise ValueError(
                "memory.update = layer_programs cannot sample answers; with batch transform = Rollouts "
                "expected in_backward, streamed or after_backward"
            )
        if not all(layer_range.is_whole for layer_range in split_stacks(experiment.model, memory)):
            raise ValueError(
                "memory settings that differ by layer, with batch_transform = Rollouts: expected one value for all "
                "layers"
            )
        num_seq_shards = experiment.mesh.sizes["seq"]
        if num_seq_shards != 1:
            raise ValueError(f"mesh.seq = {num_seq_shards}: answers are sampled one token at a time; expected 1")
        # A plan needs no reward; `check_files` refuses a run without one.
        if self._reward is not None:
            self._reward.check()
        if self.reference is None:
            return
        if isinstance(self.reference, Reference) and self.reference.choice.kind in ("stored", "none"):
            raise ValueError(
                f"batch_transform.reference.kind = {self.reference.choice.kind} ({self.reference.choice.reason}); "
                "expected adapter_off (with model.lora) or offloaded: each step samples new answers, which no stored "
                "reference has"
            )
        self.reference.check(experiment)

    def check_files(self, program: Program, workdir: Path, *, is_new_run: bool) -> None:
        """See `BatchTransform`: calls the reward function once, and checks the files of a reference."""
        data = _prompts(program.experiment)
        # Try it on the first rows, with their correct answers if they have any. Otherwise, a failure would show only
        # after the demonstrations or the first sampled answers.
        rows = [data.row(0, index) for index in range(min(_TRIED_ROWS, len(data.sets[0].rows)))]
        prompts = [prompt_text(row["prompt"]) for row in rows]
        answers = [str(row.get("answer", "")) for row in rows]
        tokens = [[*encoded.tolist(), data.end_id] for encoded in data.tokenizer.encode_batch(answers)]
        self.reward(JudgedAnswers(prompts, answers, rows, tokens, data.sets[0].locations))
        if self.reference is not None:
            self.reference.check_files(program, workdir, is_new_run=is_new_run)

    def open(self, program: Program, workdir: Path, *, is_new_run: bool, log: Log) -> None:
        """See `BatchTransform`. Raises ValueError with several processes, or if the reward function does not exist."""
        if jax.process_count() > 1:
            raise ValueError(
                "batch_transform = Rollouts samples in a single process: expected 1 process, given "
                f"{jax.process_count()}"
            )
        self.reward.load()
        self._log = log
        self._file = workdir / _FILE
        if self.reference is not None:
            self.reference.open(program, workdir, is_new_run=is_new_run, log=log)

    def is_open(self, program: Program) -> bool:
        """See `BatchTransform`: only a reference needs to be opened."""
        return self.reference is None or self.reference.is_open(program)

    def host_bytes(self, program: Program) -> int:
        """See `BatchTransform`."""
        return 0 if self.reference is None else self.reference.host_bytes(program)

    def complete_batch(self, program: Program, state: TrainState, batch: Batch, *, group: str = "parameter") -> Batch:
        """See `BatchTransform`. Raises ValueError if the reward function fails."""
        host_batch = {name: np.asarray(array) for name, array in batch.items()}
        # A state for inference has no step counter.
        step = int(state.counter["step"]) if state.counter else None
        is_training = not host_batch["sources"].any()
        if is_training and step is not None and step < self.demonstrations:
            answers = encode_demonstrations(_prompts(program.experiment), host_batch)
            arrays = build_answer_rows(host_batch, answers)
            zeros_BS = np.zeros_like(arrays["weights"])
            arrays = {**arrays, "advantages": arrays["weights"], "rewards": zeros_BS, "spreads": zeros_BS}
        else:
            arrays = self._sample_rollouts(program, state, batch, host_batch, step, group)
        complete_batch = program.put(arrays)
        if self.reference is not None:
            complete_batch = self.reference.complete_batch(program, state, complete_batch, group=group)
        return complete_batch

    def _sample_rollouts(
        self,
        program: Program,
        state: TrainState,
        batch: Batch,
        host_batch: dict[str, np.ndarray],
        step: int | None,
        group: str,
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a batch with answers sampled from the model."""
        data = _prompts(program.experiment)
        is_training = not host_batch["sources"].any()
        # Wait before the clock starts, because the previous step may still be running.
        jax.block_until_ready(state.parameter)
        self._timer.begin()
        weights = merge(state[group], state.frozen)
        sampler = self._samplers.get(group)
        if sampler is None:
            # The memory placement of a group's weights never changes during a run, so one program serves all steps.
            sampler = rollout_jit(program, weights, data.answer_tokens, data.stop_ids)
            self._samplers[group] = sampler
        if is_training:
            stream, numbers = step or 0, np.arange(data.global_batch_size)
        else:
            # In an evaluation, the draws for a prompt do not depend on the step or on the batch that contains it.
            stream, numbers = -1 - int(host_batch["sources"].max()), host_batch["indices"]
        greedy = self.greedy_evaluation and not is_training
        host_draws = (np.int32(stream), numbers.astype(np.int32), np.bool_(greedy))
        if step is None:
            words = jax.device_put(jax.random.key_data(jax.random.key(0)), program.replicated)
        else:
            words = state.counter["rng"]
        draws = SamplingInputs(words, *jax.device_put(host_draws, program.replicated))
        answers = jax.device_get(sampler((weights, state.buffer), batch["prompts"], batch["lengths"], draws))
        self._timer.lap("sampling")
        texts = decode_answers(data, host_batch, answers)
        # Rows without a prompt get reward 0 without calling the reward functions.
        rewards_FB = np.zeros((len(self.reward.functions), len(texts)))
        judged = np.flatnonzero(host_batch["lengths"]).tolist()
        if judged:
            rows = [get_row(data, host_batch, index) for index in judged]
            prompts = [prompt_text(row["prompt"]) for row in rows]
            locations = [get_location(data, host_batch, index) for index in judged]
            tokens = [get_answer_tokens(answers, index) for index in judged]
            judged_texts = [texts[index] for index in judged]
            rewards_FB[:, judged] = self.reward(JudgedAnswers(prompts, judged_texts, rows, tokens, locations))
        self._timer.lap("rewards")
        self._show(program, step, host_batch, texts, rewards_FB)
        rewards_B = sum_rewards(rewards_FB)
        group_size = data.group_size if is_training else 1
        arrays = build_answer_rows(host_batch, answers)
        advantages_B, spreads_B = compute_advantages(rewards_B, group_size, self.scale)
        arrays["advantages"] = arrays["weights"] * advantages_B[:, None]
        # The mean over the batch is then that of the answers with a reward, which TRL also reports.
        has_reward_B = ~np.isnan(rewards_B)
        has_reward_B[host_batch["lengths"] == 0] = False
        mean = rewards_B[has_reward_B].mean() if has_reward_B.any() else 0.0
        if judged and not has_reward_B.any() and not self._has_warned and self._log is not None:
            self._log(
                "warning: batch_transform.reward: returned None for all answers of a batch, which then teaches nothing"
            )
            self._has_warned = True
        arrays["rewards"] = arrays["ends"] * np.where(np.isnan(rewards_B), mean, rewards_B).astype(np.float32)[:, None]
        arrays["spreads"] = arrays["ends"] * spreads_B[:, None]
        self._timer.end()
        return arrays

    def passes(self, experiment: Experiment, mesh: Mesh | AbstractMesh) -> ForwardCost:
        """See `BatchTransform`: token-by-token sampling of the answers, then the reference's pass over them."""
        sampling = estimate_sampling(experiment, mesh, answer_tokens=_prompts(experiment).answer_tokens)
        if self.reference is None:
            return sampling
        return sampling + self.reference.passes(experiment, mesh)

    def dry_run(self, program: Program, compile: Compile) -> dict[str, MemoryTracker]:
        """See `BatchTransform`: the sampling program with its KV cache, plus the rest of the training state."""
        data = _prompts(program.experiment)
        layout = program.layout
        weight_groups = ("parameter", "frozen", "buffer")
        groups = layout.abstract(layout.specs.select(weight_groups))
        weights = merge(groups.parameter, groups.frozen)
        batch = layout.abstract(program.batch_rows.delivered_specs)
        replicated = partial(jax.ShapeDtypeStruct, sharding=program.replicated)
        draws = SamplingInputs(
            words=layout.abstract(layout.specs.counter)["rng"],
            stream=replicated((), np.int32),
            numbers=replicated((data.global_batch_size,), np.int32),
            greedy=replicated((), bool),
        )
        # Without data, as in a plan, the stop tokens are unknown. Memory use does not depend on them.
        stop_ids = data.stop_ids if data.is_ready else (0,)
        sampler = rollout_jit(program, weights, data.answer_tokens, stop_ids)
        lowered = sampler.lower((weights, groups.buffer), batch["prompts"], batch["lengths"], draws)
        offloaded = sum(layout.bytes_per_device(name, "pinned_host") for name in weight_groups)
        resident = sum(layout.bytes_per_device(name, "device") for name in weight_groups)
        compiled = compile(lowered, HostBytes(arguments=offloaded))
        if compiled.run is not None and data.is_ready:
            # Compiled for the attached devices, so training can run it.
            self._samplers["parameter"] = compiled.run
        tracker = MemoryTracker()
        tracker.count(compiled, compiled.peak + layout.bytes_per_device(memory_kind="device") - resident)
        tracker.host_peak = compiled.host_temp
        tracker.moved = compiled.moved
        others = {} if self.reference is None else self.reference.dry_run(program, compile)
        return {"rollouts": tracker, **others}

    def _show(
        self,
        program: Program,
        step: int | None,
        host_batch: dict[str, np.ndarray],
        texts: list[str],
        rewards_FB: np.ndarray,
    ) -> None:
        """Print some answers and append them to the file, if they are due at this step."""
        data = _prompts(program.experiment)
        set_number = int(host_batch["sources"].max())
        indices = host_batch["indices"]
        if set_number:
            # The first prompts of the set, which are in the first batch of its evaluation.
            chosen = [i for i in range(len(texts)) if host_batch["lengths"][i] and indices[i] < self.table_rows]
        else:
            step = step or 0
            is_last = step + 1 == program.experiment.trainer.known_steps
            is_due = step % self.table_every == 0 or is_last
            chosen = list(range(0, len(texts), data.group_size))[: self.table_rows] if is_due else []
        if self._log is None or self._file is None or not host_batch["lengths"].any() or not chosen:
            return
        name = data.sets[set_number].name
        rewards_B = sum_rewards(rewards_FB)
        records = []
        table = [""]
        for index in chosen:
            prompt = prompt_text(get_row(data, host_batch, index)["prompt"])
            reward = _to_json(rewards_B[index])
            record = {"step": step, "set": name, "prompt": prompt, "answer": texts[index], "reward": reward}
            line = f"  {prompt!r} -> {texts[index]!r}  reward {_show_reward(reward)}"
            if len(rewards_FB) > 1:
                each = dict(zip(self.reward.short_names, map(_to_json, rewards_FB[:, index]), strict=True))
                record["rewards"] = each
                line += " (" + ", ".join(f"{one} {_show_reward(value)}" for one, value in each.items()) + ")"
            records.append(record)
            table.append(line)
        after = "" if step is None else f" after {step} steps"
        self._log(f"answers{after}, {name}{self._timer.shares()}:" + "\n".join(table))
        # Evaluating a finished run does not add to its file.
        if step is None:
            return
        with self._file.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _to_json(reward: float) -> float | None:
    """Return a reward as JSON has it: None for NaN."""
    return None if np.isnan(reward) else float(reward)


def _show_reward(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.3g}"


def _prompts(experiment: Experiment) -> Prompts:
    """Return the experiment's data as `Prompts`; `Rollouts.check` has verified the type."""
    data = experiment.data
    assert isinstance(data, Prompts)
    return data
