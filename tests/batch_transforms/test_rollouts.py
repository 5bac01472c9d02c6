"""Rollouts: the model's answers and their probabilities, the batches made from them, and what is refused."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from plimsoll.api.configs import override
from plimsoll.framework.batch_transforms.answers import build_answer_rows
from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.batch_transforms.rollouts import Rollouts
from plimsoll.framework.config import config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.rollout import SampledAnswers
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.program.program import Program
from tests.support import grpo, runs


def build_program(folder: Path, devices: int = 1, **changes) -> Program:
    """Return a program with its data and its batch transform ready; `changes`: config paths with __ for dots."""
    config = grpo.build_grpo_config()
    override(config, {path.replace("__", "."): value for path, value in changes.items()})
    experiment = config.instantiate()
    program = Program(experiment, jax.devices()[:devices])
    experiment.data.setup(folder)
    experiment.batch_transform.open(program, folder, is_new_run=True, log=lambda line: None)
    return program


def complete_batch(program: Program, state, index: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of the data with the model's answers, on the host."""
    batch = program.experiment.data.train_batch(index, program.rows)
    return jax.device_get(program.complete_batch(state, program.put(batch)))


def get_answers(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """Return the tokens of each answer."""
    return [row[weights > 0].tolist() for row, weights in zip(batch["targets"], batch["weights"], strict=True)]


def train(program: Program, steps: int = 3) -> tuple[list[float], list[float]]:
    """Train for `steps` steps, and return (losses, rewards)."""
    state = program.init()
    losses, rewards = [], []
    for index in range(steps):
        batch = program.experiment.data.train_batch(index, program.rows)
        state, metrics = program.step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
        rewards.append(float(metrics["head/reward"]))
    return losses, rewards


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return build_program(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def state(program: Program):
    return program.init()


@pytest.mark.pairs
def test_log_probs_match_the_training_model(program: Program, state):
    """`behavior` comes from the loop over tokens with a cache, `log_probs` from a forward pass of whole rows."""
    batch = complete_batch(program, state)
    model = program.experiment.language_model

    def log_probs(weights, batch):
        return model.log_probs(weights, program.evaluation_context(batch), state["buffer"])

    expected = jax.jit(log_probs)(program.weights(state), batch)
    is_answer = batch["weights"] > 0
    np.testing.assert_allclose(batch["behavior"][is_answer], np.asarray(expected)[is_answer], atol=2e-5)
    assert not batch["behavior"][~is_answer].any()


@pytest.mark.pairs
def test_greedy_answers_match_the_generator(program: Program, state):
    """Evaluation is greedy, and `generate` continues the same prompts token by token."""
    data = program.experiment.data
    with data.eval_batches("sums", program.rows) as batches:
        delivered = next(batches)
    batch = jax.device_get(program.complete_batch(state, program.put(delivered)))
    prompts = [row[:length].tolist() for row, length in zip(delivered["prompts"], delivered["lengths"], strict=True)]
    prompts = [prompt for prompt in prompts if prompt]
    assert 0 < len(prompts) < 16, "some rows of the last batch are padding"
    sampling = Sampling(max_new_tokens=4, temperature=0.0, stop_ids=data.stop_ids)
    continued = Generator(program, state)(prompts, sampling)
    # The generator omits the token that ends an answer.
    answers = [[token for token in answer if token not in data.stop_ids] for answer in get_answers(batch)]
    assert answers[: len(prompts)] == continued
    assert batch["ends"].sum() == len(prompts)
    assert not batch["weights"][len(prompts) :].any()


def test_samples_depend_only_on_step_and_row(program: Program, state):
    first = get_answers(complete_batch(program, state))
    assert get_answers(complete_batch(program, state)) == first
    # The four answers to a prompt are sampled independently.
    assert len({tuple(answer) for answer in first[:4]}) == 4
    later = replace(state, counter={**state["counter"], "step": state["counter"]["step"] + 1})
    assert get_answers(complete_batch(program, later)) != first


def test_rows_end_where_the_answer_ends():
    host_batch = {
        "prompts": np.asarray([[5, 6, 7, 0, 0], [8, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32),
        "lengths": np.asarray([3, 1, 0], np.int32),
    }
    log_probs = np.asarray([[-1, -2, -3], [-4, 0, 0], [0, 0, 0]], np.float32)
    answers = SampledAnswers(np.asarray([[1, 2, 3], [4, 0, 0], [0, 0, 0]], np.int32), log_probs, np.asarray([3, 1, 0]))
    batch = build_answer_rows(host_batch, answers)
    assert batch["tokens"].tolist() == [[5, 6, 7, 1, 2], [8, 0, 0, 0, 0], [0] * 5]
    assert batch["targets"].tolist() == [[6, 7, 1, 2, 3], [4, 0, 0, 0, 0], [0] * 5]
    assert batch["weights"].tolist() == [[0, 0, 1, 1, 1], [1, 0, 0, 0, 0], [0] * 5]
    assert batch["behavior"].tolist() == [[0, 0, -1, -2, -3], [-4, 0, 0, 0, 0], [0] * 5]
    assert batch["ends"].tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0] * 5]
    assert batch["segments"].tolist() == [[1] * 5, [1, 0, 0, 0, 0], [0] * 5]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4], [0] * 5, [0] * 5]


@pytest.mark.pairs
def test_demonstrations_get_the_supervised_gradient(tmp_path: Path):
    """The loss is the next-token cross-entropy, averaged over the answers' tokens."""
    program = build_program(tmp_path, batch_transform__demonstrations=1)
    state = program.init()
    batch = complete_batch(program, state)
    assert np.isnan(batch["behavior"][batch["weights"] > 0]).all()
    texts = [program.experiment.data.tokenizer.decode(answer) for answer in get_answers(batch)]
    rows = program.experiment.data.sets[0].rows
    assert set(texts) <= {row["answer"] for row in rows}
    plain = grpo.build_grpo_config()
    plain.model.head.objective = None
    plain.batch_transform = None
    supervised = Program(plain.instantiate(), jax.devices()[:1], training=False)

    def gradients(program: Program):
        model = program.experiment.language_model

        def loss(weights):
            ctx = program.evaluation_context(batch)
            return model.loss(weights, ctx, state["buffer"])[0]

        return jax.jit(jax.grad(loss))(program.weights(state))

    expected = gradients(supervised)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients(program), expected)


@pytest.mark.pairs
def test_one_program_samples_for_all_steps_and_evaluations(tmp_path: Path):
    program = build_program(tmp_path)
    state = program.init()
    program.compile_evaluation(state)
    for index in range(3):
        batch = program.experiment.data.train_batch(index, program.rows)
        state, _ = program.step(state, program.put(batch))
    with program.experiment.data.eval_batches("sums", program.rows) as batches:
        for batch in batches:
            program.evaluate(state, program.put(batch))
    samplers = program.experiment.batch_transform._samplers
    assert {group: sampler._cache_size() for group, sampler in samplers.items()} == {"parameter": 1}


def test_plan_includes_the_kv_cache(program: Program):
    peaks = {}
    for name, answer_tokens in {"short": 4, "long": 4000}.items():
        config = grpo.build_grpo_config()
        config.data.seq_len = answer_tokens + 4
        config.data.answer_tokens = answer_tokens
        longer = Program(config.instantiate(), jax.devices()[:1])
        ledgers = longer.experiment.batch_transform.dry_run(longer, longer.backend.compile_here)
        peaks[name] = ledgers["rollouts"].peak
    # Keys and values of two layers, two heads of width 8 each, float32, for 16 rows.
    per_token = 16 * 2 * 2 * 2 * 8 * 4
    assert peaks["long"] - peaks["short"] > 3900 * per_token


def test_estimate_reads_the_weights_once_per_token(program: Program):
    experiment = program.experiment
    passes = experiment.batch_transform.passes(experiment, program.mesh)
    weights = program.layout.bytes_per_device("parameter") + program.layout.bytes_per_device("buffer")
    assert passes.read_bytes == experiment.data.answer_tokens * weights
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    assert passes.flops == experiment.model.forward_flops_per_token(experiment.data.seq_len) * tokens
    assert passes.offloaded_bytes == 0
    assert passes.moved_bytes == 0


@pytest.mark.pairs
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"memory__update": "in_backward", "learner__clip_mode": "two_pass"}, marks=pytest.mark.pairs),
        {"memory__update": "streamed", "learner__accumulate": 2},
        pytest.param({"memory__parameters": "pinned_host", "memory__update": "streamed"}, marks=pytest.mark.pairs),
    ],
    ids=str,
)
def test_schedules_agree(changes, program: Program, tmp_path: Path):
    losses, rewards = train(program)
    other_losses, other_rewards = train(build_program(tmp_path, **changes))
    np.testing.assert_allclose(other_losses, losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(other_rewards, rewards, rtol=1e-6)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [{"data": 8, "fsdp": 1}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}], ids=str)
def test_eight_devices_answer_as_one(mesh: dict[str, int], program: Program, tmp_path: Path):
    losses, rewards = train(program)
    changes = {f"mesh__{axis}": size for axis, size in mesh.items()}
    other_losses, other_rewards = train(build_program(tmp_path, devices=8, **changes))
    np.testing.assert_allclose(other_losses, losses, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(other_rewards, rewards, rtol=1e-6)


@pytest.mark.pairs
def test_rewards_rise(tmp_path: Path):
    changes = {"learner__optimizer__learning_rate": 0.02, "data__global_batch_size": 64, "data__group_size": 16}
    _, rewards = train(build_program(tmp_path, **changes), steps=40)
    assert np.mean(rewards[:3]) < 0.7
    assert np.mean(rewards[-5:]) > 0.9


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["offloaded", pytest.param("adapter_off", marks=pytest.mark.pairs)])
def test_reference_is_the_initial_model(kind: str, tmp_path: Path):
    """At first the divergence from the reference is zero, and behavior equals reference; later they differ."""
    config = grpo.build_grpo_config()
    config.model.head.objective.beta = 0.1
    config.batch_transform.reference = config_for(Reference, kind=kind)
    if kind == "adapter_off":
        config.model.lora = config_for(LoRA, rank=4)
    experiment = config.instantiate()
    program = Program(experiment, jax.devices()[:1])
    experiment.data.setup(tmp_path)
    experiment.batch_transform.open(program, tmp_path, is_new_run=True, log=lambda line: None)
    state = program.init()
    divergences = []
    for index in range(4):
        delivered = experiment.data.train_batch(index, program.rows)
        batch = jax.device_get(program.complete_batch(state, program.put(delivered)))
        is_close = np.allclose(batch["reference"], batch["behavior"], atol=2e-5)
        assert is_close == (index == 0)
        state, metrics = program.step(state, program.put(delivered))
        divergences.append(float(metrics["head/kl"]))
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[3] > 1e-5


REFUSED = {
    "data.group_size": {"data__group_size": 1},
    "does not divide data.global_batch_size = 16": {"data__group_size": 5},
    "leaves no room for a prompt": {"data__answer_tokens": 9},
    "leave room for 4": {"data__answer_tokens": 5},
    "there is no package 'nowhere'": {"batch_transform__reward": "nowhere.exact"},
    "nowhere.py does not exist": {"batch_transform__reward": "nowhere.py:exact"},
    'expected "path/to/file.py:function"': {"batch_transform__reward": "exact"},
    "cannot be imported: ModuleNotFoundError": {
        "batch_transform__reward": "plimsoll.framework.batch_transforms.nowhere.exact"
    },
    "there is no function 'exakt'": {"batch_transform__reward": "plimsoll.framework.batch_transforms.rewards.exakt"},
    "memory.update = layer_programs cannot sample answers": {"memory__update": "layer_programs"},
    "mesh.seq = 2": {"mesh__seq": 2},
    "beta = 0.1: expected a batch_transform.reference": {"model__head__objective__beta": 0.1},
    "expected less than 1": {"model__head__objective__epsilon": 1.0},
    "expected a number with dr_grpo": {"model__head__objective__normalization": "dr_grpo"},
    "has 3 prompts, too few for the 4": {"data__source__count": 3},
    'expected some of "+-*"': {"data__source__operators": "/"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_user_errors_are_one_line(message: str, tmp_path: Path):
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        build_program(tmp_path, devices=8 if "mesh" in message else 1, **REFUSED[message])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "expected 16 rewards, one for each answer, given 15"),
        ("not_a_number", "expected finite numbers, given nan for the answer"),
        ("failing", f": line {grpo.failing.__code__.co_firstlineno + 2}: ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_function_that_fails_is_named(function: str, message: str, program: Program, state):
    reward = grpo.REWARD.replace("high_bytes", function)
    batch_transform = Rollouts(reward=reward)
    batch = program.experiment.data.train_batch(0, program.rows)
    with pytest.raises(ValueError, match=r"batch_transform\.reward = ") as raised:
        batch_transform.complete_batch(program, state, program.put(batch))
    assert message in str(raised.value)
    assert f":{function}: " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", ["too_few", "failing"])
def test_reward_function_is_tested_before_the_run(function: str, program: Program, tmp_path: Path):
    """It is called before the demonstrations, after which its first call would otherwise come."""
    program.experiment.batch_transform.check_files(program, tmp_path, is_new_run=True)
    batch_transform = Rollouts(reward=grpo.REWARD.replace("high_bytes", function), demonstrations=5)
    with pytest.raises(ValueError, match=rf"batch_transform\.reward = .*:{function}: "):
        batch_transform.check_files(program, tmp_path, is_new_run=True)


def test_other_data_is_refused():
    config = grpo.build_grpo_config()
    config.data = config_for(
        DataPipeline,
        source=config_for(TokenMemmap, path="never-read.bin"),
        tokenizer=config.data.tokenizer,
        seq_len=8,
        global_batch_size=16,
    )
    with pytest.raises(ValueError, match=r"data is a DataPipeline, not Prompts$"):
        Program(config.instantiate(), jax.devices()[:1])


@pytest.mark.pairs
def test_a_run_writes_tables_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert runs.train(tmp_path / "run", config="rewarded", file=grpo.__file__) == 0
    out = capsys.readouterr().out
    assert "answers after 0 steps, train:" in out
    assert "answers after 7 steps, train (" in out
    assert "answers after 8 steps, sums (" in out
    records = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert {(record["step"], record["set"]) for record in records} == {
        (0, "train"),
        (4, "train"),
        (7, "train"),
        (8, "sums"),
    }
    rows = runs.rows(tmp_path / "run")
    assert all(0 <= row["train/head/reward"] <= 1 for row in rows if "train/head/reward" in row)
    assert any("eval/sums/reward" in row for row in rows)


@pytest.mark.pairs
def test_resumes_bit_exactly_after_a_kill_during_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REWARDED", str(tmp_path))
    kind = {"config": "rewarded", "file": grpo.__file__}
    reward = grpo.REWARD.replace("high_bytes", "kill_at_eighth_call")
    flags = (f"--config.batch_transform.reward={reward}", "--config.trainer.max_steps=10")
    killed = tmp_path / "killed"
    # The eighth call is in the eighth step, after its answers. The checkpoint of the third step is on disk, because
    # the next save waits for it; that of the sixth may be.
    assert runs.start(killed, *flags, **kind).wait() == -signal.SIGKILL
    assert max(runs.losses(killed)) < 8
    assert runs.start(killed, *flags, **kind).wait() == 0
    assert re.search("resumed from step [36]", runs.output(killed))
    whole = tmp_path / "whole"
    assert runs.start(whole, *flags, **kind).wait() == 0
    assert runs.losses(killed) == runs.losses(whole)
    evaluations = [[row for row in runs.rows(folder) if "eval/sums/reward" in row] for folder in (killed, whole)]
    rewards = [[row["eval/sums/reward"] for row in rows] for rows in evaluations]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 1
