"""A reward model and a classifier from data to export and back: train, evaluate, score --texts, export, refusals."""

import json
import re
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.launch import evaluate, export, generate, score, train
from tests.support import pretrained, small

TEXTS = {"code": "def f(x): return x + 1", "prose": "the quick brown fox jumps over a lazy dog"}
SMALL = [
    "--config.data.seq_len=32",
    "--config.data.global_batch_size=8",
    "--config.trainer.max_epochs=null",
    "--config.trainer.save_every=100",
]


def write_rows(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model directory with a small Llama and a tokenizer."""
    from plimsoll.framework import families
    from plimsoll.framework.weights.export import export_model

    folder = tmp_path_factory.mktemp("base") / "model"
    config = small.llama(vocab_size=400)
    program = small.program(small.experiment(config))
    facts, family = families.export_config(config)
    facts |= {"max_position_embeddings": 128}
    export_model(folder, program.experiment.model, program.init().parameter, family, facts)
    return pretrained.write(folder, "llama3")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(workdir, data file) of a classifier for two kinds of text, each truncated to a few characters."""
    folder = tmp_path_factory.mktemp("trained")
    rows = []
    for number in range(60):
        for label, text in TEXTS.items():
            rows.append({"text": text[: 12 + number % 8], "label": label})
    file = write_rows(folder / "rows.jsonl", *rows)
    arguments = [f"--config=lora-classify:{base}", f"--data={file}", f"--workdir={folder / 'run'}", *SMALL]
    rate = "--config.learner.optimizer.learning_rate.peak_value=0.01"
    assert train.main([*arguments, rate, "--config.trainer.max_steps=30"]) == 0
    return folder / "run", file


@pytest.mark.pairs
def test_classifier_learns_and_scores_texts(trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    workdir, file = trained
    assert score.main([f"--workdir={workdir}", f"--texts={file}"]) == 0
    captured = capsys.readouterr()
    results = [json.loads(line) for line in captured.out.splitlines()]
    assert len(results) == 120
    for result in results:
        assert list(result["probabilities"]) == ["code", "prose"]
        assert sum(result["probabilities"].values()) == pytest.approx(1)
        assert result["label"] == max(result["probabilities"], key=result["probabilities"].__getitem__)
    assert "120 labels: accuracy 1.0000" in captured.err
    assert evaluate.main([f"--workdir={workdir}", "--validation"]) == 0
    assert "accuracy 1" in capsys.readouterr().out


@pytest.mark.pairs
def test_a_label_that_is_no_class_is_not_scored(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workdir, _ = trained
    file = write_rows(tmp_path / "a.jsonl", {"text": "the fox", "label": 1}, {"text": "x", "label": "poem"})
    assert score.main([f"--workdir={workdir}", f"--texts={file}"]) == 2
    captured = capsys.readouterr()
    assert re.search(
        r"a.jsonl, line 2 \(byte \d+\): field 'label' is 'poem'; expected one of code, prose", captured.err
    )
    assert not captured.out


@pytest.mark.pairs
def test_exported_classifier_reloads_with_its_label_names(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workdir, file = trained
    assert export.main([f"--workdir={workdir}", f"--to={tmp_path / 'out'}"]) == 0
    assert "LlamaForSequenceClassification" in capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "config.json").read_text())
    assert facts["id2label"] == {"0": "code", "1": "prose"}
    outputs = []
    for place in (f"--workdir={workdir}", f"--hf={tmp_path / 'out'}"):
        assert score.main([place, f"--texts={file}"]) == 0
        outputs.append([json.loads(line)["probabilities"]["code"] for line in capsys.readouterr().out.splitlines()])
    assert outputs[1] == pytest.approx(outputs[0], abs=0.02)
    config = configs.load(f"hf:{tmp_path / 'out'}")
    assert config.data.source.classes == ["code", "prose"]
    with pytest.raises(ValueError, match="has 2 labels; expected one"):
        configs.load(f"reward:{tmp_path / 'out'}")


@pytest.mark.pairs
def test_reward_model_from_any_directory_scores_pairs(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # The prompts differ, because all pairs of one prompt would be in one part of the split.
    rows = [{"prompt": f"def {n}", "chosen": "f(x): return 1", "rejected": "the fox"} for n in range(80)]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    rate = "--config.learner.optimizer.learning_rate.peak_value=0.003"
    arguments = [f"--config=reward:{base}", f"--data={file}", f"--workdir={tmp_path / 'run'}", rate, *SMALL]
    assert train.main([*arguments, "--config.trainer.max_steps=20"]) == 0
    capsys.readouterr()
    out = tmp_path / "scores.jsonl"
    assert score.main([f"--workdir={tmp_path / 'run'}", f"--texts={file}", f"--out={out}"]) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(result["margin"] == pytest.approx(result["chosen"] - result["rejected"]) for result in results)
    assert "80 pairs: accuracy 1.0000" in capsys.readouterr().err
    text = write_rows(tmp_path / "text.jsonl", {"text": "def 0f(x): return 1"})
    assert score.main([f"--workdir={tmp_path / 'run'}", f"--texts={text}"]) == 0
    # This is the chosen answer of row 0, as one text.
    assert json.loads(capsys.readouterr().out)["reward"] == pytest.approx(results[0]["chosen"], rel=1e-4)


@pytest.mark.pairs
def test_unsupported_verbs_are_one_line(
    base: Path, trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    workdir, _ = trained
    pair = write_rows(tmp_path / "pair.jsonl", {"chosen": "a", "rejected": "b"})
    bad = write_rows(tmp_path / "bad.jsonl", {"text": "a"}, {"txt": "a"})
    text = write_rows(tmp_path / "text.jsonl", {"text": "a"})
    three = "--config.model.head.num_labels=3"
    for verb, arguments, message in [
        (
            score,
            [f"--workdir={workdir}", f"--texts={pair}"],
            "line 1 (byte 0): a classifier of 2 classes cannot score a pair",
        ),
        (score, [f"--workdir={workdir}", f"--texts={bad}"], "line 2 (byte 14): expected a row with"),
        (score, [f"--hf={base}", f"--texts={text}"], "model.head is a LMHead, which scores no texts"),
        (generate, [f"--workdir={workdir}", "--prompt=x"], "model.head is a ScoreHead, which predicts no tokens"),
        (train, [f"--config=classify:{base}", three, f"--workdir={tmp_path / 'x'}"], "the data has 2 classes (0, 1)"),
    ]:
        assert verb.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err
