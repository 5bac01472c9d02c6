"""--data=FILE with pairs or unpaired preferences: it is detected, gets its objective and its reference, and trains."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.config import Config, ConfigError, config_for, get_target
from plimsoll.framework.data.chats import ChatSource
from plimsoll.framework.data.detect_format import detect_format
from plimsoll.framework.data.preferences import PairSource, UnpairedSource
from plimsoll.framework.data.sources import TextFiles, assign_split
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.objectives.kto import KTO
from plimsoll.framework.objectives.preferences import DPO, IPO, ORPO
from plimsoll.launch import cli
from tests.support import runs, small

USER = {"role": "user", "content": "who?"}
GOOD = {"role": "assistant", "content": "a model"}
BAD = {"role": "assistant", "content": "a fox"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
CHATS = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
UNPAIRED = {"prompt": "2+2=", "completion": "4", "label": True}
SUMS = [(a, b) for a in range(8) for b in range(8)]
ROWS = {
    "pairs": [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a * b + 20}"} for a, b in SUMS],
    "thumbs": [{"prompt": f"{a}+{b}=", "completion": f"{a + b}", "label": b % 2 == 0} for a, b in SUMS],
}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "source", "noun", "needs_template"),
    [
        (PAIR, PairSource, "preference pairs", False),
        (CHATS, PairSource, "preference pairs", True),
        ({"prompt": [USER], "completion": [GOOD], "label": False}, UnpairedSource, "labeled answers", True),
        (UNPAIRED, UnpairedSource, "labeled answers", False),
        ({"messages": [USER, GOOD], "label": True}, UnpairedSource, "labeled answers", True),
        ({**UNPAIRED, "label": 1}, UnpairedSource, "labeled answers", False),
        ({**UNPAIRED, "label": 0}, UnpairedSource, "labeled answers", False),
        ({"messages": [USER, GOOD], "label": 0}, UnpairedSource, "labeled answers", True),
        ({"prompt": "a", "completion": "b"}, ChatSource, "conversations", True),
    ],
)
def test_row_format_is_detected_from_its_fields(
    row: dict[str, Any], source: type, noun: str, needs_template: bool, tmp_path: Path
):
    file = write_rows(tmp_path / "a.jsonl", [row])
    data = detect_format(str(file))
    assert (get_target(data.source), data.needs_template) == (source, needs_template)
    assert (data.source.split, data.held_out.split) == ("train", "validation")
    assert data.line == f"data: {noun} from {file}: 1 file, 5% held out"
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
    assert get_target(detect_format(str(tmp_path / "b.parquet")).source) is source


def test_splits_are_detected_from_names(tmp_path: Path):
    for name in ("train.jsonl", "test.jsonl"):
        write_rows(tmp_path / name, [PAIR])
    data = detect_format(str(tmp_path))
    assert (data.source.paths, data.held_out.paths) == ([f"{tmp_path}/train.jsonl"], [f"{tmp_path}/test.jsonl"])
    assert data.source.split == data.held_out.split == "all"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"a.jsonl, line 1 \(byte 0\): no field 'rejected': a pair has chosen and rej"),
        ({"prompt": "a", "rejected": "b", "chosen": None}, r"line 1 \(byte 0\): field 'chosen' is null"),
        ({"completion": "a", "label": True}, r"line 1 \(byte 0\): no field 'prompt'"),
    ],
)
def test_incomplete_first_pair_is_not_read_as_text(row: dict[str, Any], message: str, tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(ValueError, match=f"--data: .*{message}"):
        with_data(configs.load("stdlib-tiny"), str(file), [])


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({**UNPAIRED, "label": "good"}, "'good'"),
        ({**UNPAIRED, "label": None}, "'None'"),
        ({"messages": [USER, GOOD], "label": 3}, "'3'"),
        ({"text": "the fox", "label": "animals"}, "'animals'"),
        ({"text": "the fox", "label": 1}, "'1'"),
    ],
)
def test_a_label_that_nothing_would_read_is_refused(row: dict[str, Any], label: str, tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [row])
    message = rf"a.jsonl, line 1 \(byte 0\): field 'label' is {label}, .* expected true or false .*classify:DIR"
    with pytest.raises(ValueError, match=f"--data: .*{message}") as refusal:
        with_data(configs.load("stdlib-tiny"), str(file), [])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("rows", "objective"), [("pairs", DPO), ("thumbs", KTO)])
def test_the_config_gets_an_objective_and_a_reference(rows: str, objective: type, tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", ROWS[rows])
    config, lines = with_data(configs.load("stdlib-tiny"), str(file), [])
    assert get_target(config.model.head.objective) is objective
    assert get_target(config.batch_transform) is Reference
    name = objective.__name__
    assert (
        f"objective: model.head.objective={name}, batch_transform=Reference, because the data compares answers" in lines
    )
    # This config has its own samples at the end of a run.
    assert config.trainer.sample_tokens == 160
    # The tokenizer is trained on the text of prompts and answers.
    assert config.data.tokenizer.vocab_size < 300


def test_explicit_settings_are_not_overridden(tmp_path: Path):
    file = str(write_rows(tmp_path / "a.jsonl", ROWS["pairs"]))
    named = configs.load("stdlib-tiny")
    config, lines = with_data(named, file, ["model.head.objective"])
    assert config.model.head.objective is None
    assert get_target(config.batch_transform) is Reference
    assert "objective: batch_transform=Reference, because the data compares answers" in lines
    config, lines = with_data(named, file, ["model.head.objective", "batch_transform"])
    assert config.batch_transform is None
    assert not any(line.startswith("objective") for line in lines)
    named.model.head.objective = config_for(ORPO)
    config, lines = with_data(named, file, [])
    assert get_target(config.model.head.objective) is ORPO
    assert config.batch_transform is None
    assert not any(line.startswith("objective") for line in lines)


def test_nested_objective_and_reference_settings_are_kept(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", ROWS["pairs"])
    flags = ["--config=stdlib-tiny", f"--data={file}", "--config.batch_transform.kind=offloaded"]
    parser = cli.Parser("train")
    parser.add_data()
    command = parser.parse([*flags, "--config.model.head.objective.beta=0.2"])
    assert (get_target(command.config.batch_transform), command.config.batch_transform.kind) == (Reference, "offloaded")
    assert (get_target(command.config.model.head.objective), command.config.model.head.objective.beta) == (DPO, 0.2)
    # If the command line sets a field as a whole, it also owns the settings below it.
    command = parser.parse([*flags[:2], "--config.model.head.objective=IPO", "--config.model.head.objective.beta=0.2"])
    assert (get_target(command.config.model.head.objective), command.config.model.head.objective.beta) == (IPO, 0.2)


def test_run_ends_with_an_answer_table_by_default(tmp_path: Path):
    file = str(write_rows(tmp_path / "a.jsonl", ROWS["thumbs"]))
    named = configs.load("stdlib-tiny")
    named.trainer.sample_tokens = 0
    config, lines = with_data(named, file, [])
    assert config.trainer.sample_tokens == 64
    changes = "model.head.objective=KTO, batch_transform=Reference, trainer.sample_tokens=64"
    said = f"{changes}, because the data compares answers"
    assert f"objective: {said}" in lines
    config, lines = with_data(named, file, ["trainer.sample_tokens"])
    assert config.trainer.sample_tokens == 0
    text = tmp_path / "text.txt"
    text.write_text("the fox " * 200)
    assert with_data(named, str(text), [])[0].trainer.sample_tokens == 0


def test_messages_need_a_model_with_a_template(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [CHATS])
    with pytest.raises(
        ConfigError, match="conversations, which need the chat template of a model; pass --config=hf:DIR"
    ):
        with_data(configs.load("stdlib-tiny"), str(file), [])


# --- incompatible data and objectives ---------------------------------------------------------------------------------


def check_experiment(source: type, objective: type | None, *, reference: bool = True, kind: str = "auto") -> None:
    """Check an experiment with this data and objective; no file is read."""
    config: Config = small.experiment(small.llama(vocab_size=257))
    config.data.source = config_for(source, paths=["never-read.jsonl"])
    config.data.tokenizer = config_for(ByteTokenizer)
    config.model.head.objective = None if objective is None else config_for(objective)
    config.batch_transform = config_for(Reference, kind=kind) if reference else None
    experiment = config.instantiate()
    experiment.check(experiment.mesh.build(jax.devices()[:1]), update_locality=False)


@pytest.mark.parametrize(
    ("source", "objective", "message"),
    [
        (PairSource, None, r"model.head.objective is None, the loss of next tokens, which does not read ends"),
        (UnpairedSource, None, r"model.head.objective is None, .* does not read ends and labels"),
        (UnpairedSource, DPO, r"model.head.objective is DPO, which does not read labels .*KTO of judged answers"),
        (PairSource, KTO, r"objective is KTO, which reads labels of a batch.*: labels by data.source=UnpairedSource"),
        (
            TextFiles,
            DPO,
            r"DPO, which reads ends, segments of a batch.*: ends by data.source=PairSource or UnpairedSource",
        ),
    ],
)
def test_other_data_is_refused(source: type, objective: type | None, message: str):
    with pytest.raises(ValueError, match=message) as refusal:
        check_experiment(source, objective)
    assert "\n" not in str(refusal.value)


def test_compatible_data_and_objective_are_accepted():
    check_experiment(PairSource, DPO)
    check_experiment(UnpairedSource, KTO)
    check_experiment(PairSource, ORPO, reference=False)
    with pytest.raises(
        ValueError, match=r"reads reference of a batch; .*adds them: reference by batch_transform=Reference$"
    ):
        check_experiment(PairSource, DPO, reference=False)
    with pytest.raises(ValueError, match=r"adds them: batch_transform.kind = none adds no reference, auto does$"):
        check_experiment(PairSource, DPO, kind="none")


# --- from a file to a step --------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("rows", ROWS)
def test_a_file_trains(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first loss is that of a model that is its own reference: log 2 for DPO, 1 - sigmoid(0) for KTO."""
    runs.write_text(tmp_path / "text")
    file = write_rows(tmp_path / "rows.jsonl", ROWS[rows])
    flags = ["model.stack.pattern.0.dropout=0", "model.embed.dropout=0", "trainer.max_steps=2", "trainer.eval_every=2"]
    flags.append("trainer.sample_tokens=4")
    assert runs.train(tmp_path / "run", f"--data={file}", *(f"--config.{flag}" for flag in flags)) == 0
    output = capsys.readouterr()
    assert f"objective: model.head.objective={'DPO' if rows == 'pairs' else 'KTO'}" in output.out + output.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[0] == pytest.approx(math.log(2) if rows == "pairs" else 0.5, abs=1e-4)
    assert losses[1] != losses[0]
    (evaluation,) = [line for line in lines if "eval/held_out/loss" in line]
    assert 0 <= evaluation["eval/held_out/accuracy"] <= 1
    (answers,) = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").read_text().splitlines()][:1]
    assert answers.keys() == {"prompt", "data", "before", "after"}
    assert f"held out: ...{answers['prompt'][-60:]!r}" in output.out + output.err
    names = ("pairs",) if rows == "pairs" else ("desirable", "undesirable")
    assert sum(evaluation[f"eval/held_out/{name}"] for name in names) >= 1


@pytest.mark.pairs
@pytest.mark.parametrize(
    "setting",
    [
        "model.lora=LoRA",
        pytest.param("memory.update=after_backward", marks=pytest.mark.pairs),
        pytest.param("memory.update=layer_programs", marks=pytest.mark.pairs),
        pytest.param("memory.update=streamed memory.parameters=pinned_host:1", marks=pytest.mark.pairs),
    ],
)
def test_answers_before_training_come_from_the_initial_model(setting: str, tmp_path: Path):
    runs.write_text(tmp_path / "text")
    file = write_rows(tmp_path / "rows.jsonl", ROWS["pairs"])
    flags = ["trainer.max_steps=4", "learner.optimizer.learning_rate=0.5", "trainer.eval_every=none"]
    flags += ["trainer.sample_tokens=4", "model.head.objective=DPO", *setting.split()]
    assert runs.train(tmp_path / "run", f"--data={file}", *(f"--config.{flag}" for flag in flags)) == 0
    table = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").read_text().splitlines()]
    assert all(row.keys() == {"prompt", "data", "before", "after"} for row in table)
    assert any(row["before"] != row["after"] for row in table)
    # A run that barely trains gives the same answers, because the seed determines the initial weights.
    flags[:2] = ["trainer.max_steps=1", "learner.optimizer.learning_rate=1e-9"]
    assert runs.train(tmp_path / "still", f"--data={file}", *(f"--config.{flag}" for flag in flags)) == 0
    untrained = [json.loads(line) for line in (tmp_path / "still/answers.jsonl").read_text().splitlines()]
    assert [row["after"] for row in untrained] == [row["before"] for row in table]


def test_invalid_row_ends_the_run_before_compilation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs.write_text(tmp_path / "text")
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS["pairs"], {**PAIR, "chosen": "5"}])
    assert runs.train(tmp_path / "run", f"--data={file}") == 2
    error = capsys.readouterr().err
    assert "both answers are the same" in error
    assert "rows.jsonl, line 65 (byte" in error
    assert "compiling" not in error


@pytest.mark.pairs
@pytest.mark.parametrize("config", ["tiny", "stdlib-tiny"])
@pytest.mark.parametrize("part", ["train", "validation"])
def test_empty_split_is_refused(part: str, config: str, tmp_path: Path):
    prompts = (f"{number}" for number in itertools.count())
    prompt = next(prompt for prompt in prompts if assign_split(json.dumps(prompt), 0.05) != part)
    rows = [{"prompt": prompt, "completion": f"{number}", "label": number % 2} for number in range(9)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    spec = f"{runs.CONFIG}:tiny" if config == "tiny" else config

    def set_up() -> None:
        named, _ = with_data(configs.load(spec), str(file), [])
        named.data.global_batch_size = 1
        named.data.instantiate().setup(tmp_path)

    with pytest.raises(ValueError, match=f"the split '{part}' is empty: all its 9 rows are in the other") as error:
        set_up()
    assert "\n" not in str(error.value)
    assert ("data.source.split=all" in str(error.value)) == (part == "train")
