"""GRPO in one line: --config=grpo:DIR, --data with prompts, --reward; reward functions of TRL's form; user errors."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.batch_transforms.answers import compute_advantages
from plimsoll.framework.batch_transforms.reward_function import JudgedAnswers, RewardFunction, RewardFunctions
from plimsoll.launch import plan, train
from tests.support import pretrained, small
from tests.support.runs import rows

REWARDS = '''
from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

def share(completions, letter, **kwargs):
    """TRL's form: columns as lists by keyword; a conversation's completion is a list of messages."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count(one) / max(len(text), 1) for text, one in zip(texts, letter)]

def named(prompts, answers, letter):
    assert all(isinstance(prompt, str) for prompt in prompts)
    return [float(one in answer) for answer, one in zip(answers, letter)]

def plain(a, b, c):
    assert [row["prompt"] for row in c] == a
    return [len(answer) for answer in b]

def everything(prompts, completions, **kwargs):
    assert sorted(kwargs) == ["completion_ids", "letter", "n"], sorted(kwargs)
    return kwargs["n"]

def any_name(**kwargs):
    return [len(ids) for ids in kwargs["completion_ids"]]

async def judge(completions, letter, **kwargs):
    """Judges all answers at the same time: the last one ends first."""
    ended = []
    async def one(number):
        await asyncio.sleep(0.05 * (len(completions) - number))
        ended.append(number)
        return float(letter[number] in completions[number])
    found = await asyncio.gather(*map(one, range(len(completions))))
    assert ended == sorted(ended, reverse=True)
    return found

async def judge_fails(completions, n, **kwargs):
    await asyncio.sleep(0)
    return [1 / (number - 2) for number in n]

def reads_messages(completions, **kwargs):
    return [float("x" in completion[0]["content"]) for completion in completions]

def needs_state(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)

def chats(prompts, completions, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    assert [one["role"] for one in completions[0]] == ["assistant"]
    return [len(one[0]["content"]) for one in completions]

def fails(completions, n, **kwargs):
    return [1 / (number - 2) for number in n]

def fails_together(completions, **kwargs):
    assert len(completions) < 2
    return [0.0]

def graded(completions, answers, **kwargs):
    """With completions, answers is a column of the data: the solutions."""
    return [float(one == answer) for one, answer in zip(completions, answers)]

def generated(completions, n, **kwargs):
    for number in n:
        yield 1 / (number - 2)

def huge(completions, **kwargs):
    return [10**400] * len(completions)

def nothing(completions, **kwargs):
    pass

def short(completions, **kwargs):
    return [1.0]

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def some_none(completions, **kwargs):
    return [1.0, None]

def odd_only(completions, n, **kwargs):
    return [3.0 if number % 2 else None for number in n]

def scalar(completions, **kwargs):
    return 1.0

def needs(completions, ground_truth):
    return [0.0] * len(completions)

@dataclass
class Limit:
    """Its annotations are text, which Python looks up in the module."""

    length: int

    def __call__(self, completion_ids, **kwargs):
        return [min(0, self.length - len(ids)) for ids in completion_ids]

overlong = Limit(1)

def get_limit(length, cache):
    return Limit(length)

def get_overlong(a=1, b=2, c=3):
    return Limit(a)
'''
ROWS = [{"prompt": "a", "letter": "x", "n": 1}, {"prompt": "b", "letter": "y", "n": 2}]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path / "my_rewards.py"


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("share", ROWS, [1.0, 0.5]),
        ("share", CHATS, [1.0, 0.5]),
        ("named", ROWS, [1.0, 1.0]),
        ("plain", ROWS, [1, 2]),
        ("everything", ROWS, [1, 2]),
        ("chats", CHATS, [1, 2]),
        ("graded", [{**row, "answers": "x"} for row in ROWS], [1.0, 0.0]),
        ("any_name", ROWS, [1, 2]),
        ("overlong", ROWS, [0, -1]),
        ("judge", ROWS, [1.0, 1.0]),
        ("some_none", ROWS, [1.0, np.nan]),
    ],
)
def test_a_reward_function_gets_the_arguments_that_it_names(name: str, data: list, expected: list, rewards: Path):
    np.testing.assert_array_equal(RewardFunction(f"{rewards}:{name}")(build_answers(data)), expected)


def build_answers(data: list, locations: tuple[str, ...] = ()) -> JudgedAnswers:
    return JudgedAnswers(["a", "b"], ["x", "zy"], data, [[5], [6, 7]], locations)


def test_rewards_of_several_functions_are_weighted(rewards: Path):
    functions = RewardFunctions([f"{rewards}:{name}" for name in ("judge", "some_none", "overlong")], [2.0, 0.5, 1.0])
    np.testing.assert_array_equal(functions(build_answers(ROWS)), [[2.0, 2.0], [0.5, np.nan], [0.0, -1.0]])
    assert functions.short_names == ["judge", "some_none", "overlong"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_answers_without_a_reward_are_left_out_of_their_group(scale: Literal["group", "batch", "none"]):
    """The advantages of the others are those of smaller groups without that answer."""
    full = np.asarray([1.0, np.nan, 3.0, 8.0, 2.0, 2.5, np.nan, 4.0], np.float32)
    known = ~np.isnan(full)
    advantages, spreads = compute_advantages(full, 4, scale)
    fewer, fewer_spreads = compute_advantages(full[known], 3, scale)
    np.testing.assert_allclose(advantages[known], fewer, rtol=1e-6)
    np.testing.assert_allclose(spreads[known], fewer_spreads, rtol=1e-6)
    assert not advantages[~known].any()
    # Of a group with one reward or none, nothing can be learned.
    advantages, spreads = compute_advantages(np.asarray([5.0, np.nan, np.nan, np.nan], np.float32), 2, scale)
    assert not advantages.any()
    assert not spreads.any()


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ([], None, "expected the names of different functions"),
        (["a.b", "a.b"], None, "expected the names of different functions"),
        (["a.b"], [1.0, 2.0], "expected one for each of the 1 functions"),
        (["a.b"], [float("inf")], "expected finite numbers"),
    ],
)
def test_wrong_lists_of_rewards(names: list[str], weights: list[float] | None, message: str):
    with pytest.raises(ValueError, match=message):
        RewardFunctions(names, weights)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"line \d+: ZeroDivisionError: .* \(file.jsonl, line 2, for the answer 'zy' to 'b'\)"),
        ("fails_together", r"line \d+: AssertionError: .*\Z"),
        ("generated", r"line \d+: ZeroDivisionError: .*\Z"),
        ("huge", r"expected finite numbers, given 1000"),
        ("nothing", r"expected a list of 2 numbers, given None; does it end with a return\?"),
        ("short", r"expected 2 rewards, one for each answer, given 1"),
        ("nan", r"expected finite numbers, given nan for the answer 'x' to 'a'"),
        ("judge_fails", r"line \d+: ZeroDivisionError: .* \(file.jsonl, line 2, for the answer 'zy' to 'b'\)"),
        ("reads_messages", r"line \d+: TypeError: string indices .*: expected prompts that are lists of messages\Z"),
        ("needs_state", r"the function needs trainer_state, .*; trainer_state: of TRL's trainer, not passed here"),
        ("get_limit", r"expected parameters \(prompts, answers, rows\) or .*, given \(length, cache\)"),
        ("get_overlong", r'given a function; write "reward = get_overlong\(...\)" in a file, and name that'),
        ("scalar", r"expected a list of 2 numbers, given 1.0"),
        ("needs", r"the function needs ground_truth, but the rows have only letter, n"),
    ],
)
def test_a_wrong_reward_is_one_line_with_its_row(name: str, message: str, rewards: Path):
    locations = ("file.jsonl, line 1", "file.jsonl, line 2")
    with pytest.raises(ValueError, match=message) as raised:
        RewardFunction(f"{rewards}:{name}")(build_answers(ROWS, locations))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"batch_transform.reward = {rewards}:{name}: ")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model directory with a small Llama and a tokenizer with a chat template."""
    from plimsoll.framework import families
    from plimsoll.framework.weights.export import export_model

    folder = tmp_path_factory.mktemp("base") / "model"
    config = small.llama(vocab_size=400)
    program = small.program(small.experiment(config))
    facts, family = families.export_config(config)
    facts |= {"max_position_embeddings": 128}
    export_model(folder, program.experiment.language_model, program.init().parameter, family, facts)
    return pretrained.write(folder, "llama3")


def write_prompts(path: Path, count: int, chats: bool = False) -> Path:
    lines = []
    for number in range(count):
        prompt = f"{number}:"
        content = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
        lines.append(json.dumps({**content, "letter": "e", "n": number}) + "\n")
    path.write_text("".join(lines))
    return path


SMALL = [
    "--config.data.seq_len=32",
    "--config.data.answer_tokens=8",
    "--config.trainer.max_epochs=null",
    "--config.trainer.log_every=1",
]


def test_the_reward_rises_in_a_short_run(base: Path, rewards: Path, tmp_path: Path, capsys):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 60)
    argv = [f"--config=grpo:{base}", f"--data={prompts}", f"--reward={rewards}:share", f"--workdir={tmp_path}/run"]
    rate = "--config.learner.optimizer.learning_rate.peak_value=0.02"
    assert train.main([*argv, *SMALL, rate, "--config.trainer.max_steps=30"]) == 0
    found = [row["train/head/reward"] for row in rows(tmp_path / "run") if "train/head/reward" in row]
    assert sum(found[-5:]) / 5 > 3 * sum(found[:3]) / 3
    out = capsys.readouterr().out
    assert "prompts from" in out
    # A stored config names no code.
    again = [f"--config={tmp_path}/run/config.json", f"--workdir={tmp_path}/again", "--config.trainer.max_steps=1"]
    assert train.main(again) == 2
    assert "batch_transform.reward is None; expected the function" in capsys.readouterr().err


def test_adapters_and_few_conversations_shrink_the_batch(base: Path, rewards: Path, tmp_path: Path, capsys):
    prompts = write_prompts(tmp_path / "chats.jsonl", 3, chats=True)
    argv = [f"--config=lora-grpo:{base}", f"--data={prompts}", f"--reward={rewards}:chats", f"--workdir={tmp_path}/run"]
    more = ["--config.data.seq_len=64", "--config.trainer.max_steps=1", "--config.mesh.fsdp=1", "--config.mesh.data=-1"]
    assert train.main([*argv, *SMALL, *more]) == 0
    out = capsys.readouterr().out
    # One of the three is held out; eight answers to each of the others.
    assert "2 prompts from" in out
    assert "data.global_batch_size 64 -> 16" in out
    config = configs.load(f"lora-grpo:{base}")
    assert config.model.lora.dropout == 0


def test_a_run_with_several_rewards_and_some_none(base: Path, rewards: Path, tmp_path: Path, capsys):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    argv = [f"--config=grpo:{base}", f"--data={prompts}", f"--workdir={tmp_path}/run"]
    argv += [f"--reward={rewards}:{name}" for name in ("judge", "odd_only")]
    argv += ["--config.batch_transform.reward_weights=0,1", "--config.data.global_batch_size=16"]
    assert train.main([*argv, *SMALL, "--config.trainer.max_steps=2"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    for record in records:
        is_odd = int(record["prompt"].rstrip(":")) % 2
        assert record["rewards"]["odd_only"] == (3.0 if is_odd else None)
        assert record["reward"] == (3.0 if is_odd else 0.0)
    assert "judge 0, odd_only 3" in capsys.readouterr().out
    # Of prompts without a reward, the reward is left out.
    argv = [*argv[:2], f"--workdir={tmp_path}/other", f"--reward={rewards}:odd_only", argv[-1]]
    assert train.main([*argv, *SMALL, "--config.trainer.max_steps=2"]) == 0
    assert {row["train/head/reward"] for row in rows(tmp_path / "other") if "train/head/reward" in row} <= {0.0, 3.0}


def test_a_plan_needs_no_reward(base: Path, capsys):
    assert plan.main([f"--config=grpo:{base}", "--target=h100", "--estimate", "--config.data.seq_len=64"]) == 0
    assert "fits: " in capsys.readouterr().out


def test_one_prompt_is_enough(base: Path, tmp_path: Path):
    prompts = write_prompts(tmp_path / "one.jsonl", 1)
    config, (line,) = with_data(configs.load(f"grpo:{base}"), str(prompts), [])
    assert line.endswith("1 prompts from " + str(prompts) + ", too few to hold some out")
    assert config.data.validation == {}
    assert len(list(config.data.source.instantiate().rows())) == 1


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"prompt": "a"}', [], "batch_transform.reward is None"),
        ('{"text": "a"}', ["--reward={r}:share"], 'line 1 (byte 0): expected a row with a field "prompt"'),
        ('{"messages": "a"}', ["--reward={r}:share"], 'field "messages": expected a list of messages, given str'),
        ("no JSON", ["--reward={r}:share"], "not JSON"),
        ('{"prompt": "a"}', ["--reward={r}:shares"], "expected a function of my_rewards.py: share"),
        ('{"prompt": "a"}', ["--reward={r}:share", "--reward=gone.py:share"], "gone.py does not exist"),
        (
            '{"prompt": "a", "letter": "e"}',
            ["--reward={r}:share", "--reward={r}:nothing"],
            "expected a list of 1 numbers",
        ),
        ('{"prompt": "a"}', ["--reward={r}:share", "--data_weights=1"], "prompts have no weights"),
    ],
)
def test_user_errors_are_one_line(content: str, flags: list[str], message: str, base, rewards, tmp_path: Path, capsys):
    (tmp_path / "p.jsonl").write_text(content + "\n")
    argv = [f"--config=grpo:{base}", f"--data={tmp_path}/p.jsonl", f"--workdir={tmp_path}/run"]
    assert train.main([*argv, *(flag.replace("{r}", str(rewards)) for flag in flags)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_prompts_of_several_files_are_all_read(base: Path, tmp_path: Path):
    files = [str(write_prompts(tmp_path / f"{name}.jsonl", 5)) for name in "ab"]
    config, _ = with_data(configs.load(f"grpo:{base}"), files, [])
    assert len(list(config.data.source.instantiate().rows())) == 10
