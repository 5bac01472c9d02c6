"""`plimsoll generate` and `plimsoll evaluate` on a published directory; lm-evaluation-harness, if it is installed."""

import io
import json
from pathlib import Path

import jax
import pytest

from plimsoll.api.loaded import LoadedModel
from plimsoll.framework import families
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.weights.export import export_model
from plimsoll.launch import chat, evaluate, generate, weights
from tests.support import pretrained, small

PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, with a tokenizer; float32."""
    folder = tmp_path_factory.mktemp("published") / "model"
    config = small.llama(vocab_size=400)
    program = small.program(small.experiment(config))
    facts, family = families.export_config(config)
    facts |= {"max_position_embeddings": 128}
    export_model(folder, program.experiment.model, program.init().parameter, family, facts)
    return pretrained.write(folder, "llama3")


def load(model_folder: Path) -> LoadedModel:
    return weights.load(*weights.parse(weights.parser("x", ""), [f"--hf={model_folder}"]))


@pytest.mark.pairs
def test_generate_from_a_directory(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(model_folder)
    assert not jax.tree.leaves(loaded.state.optimizer)
    prompt = loaded.tokenizer.encode_prompt(PROMPT)
    sampling = Sampling(12, stop_ids=tuple(loaded.tokenizer.stop_ids))
    (tokens,) = Generator(loaded.program, loaded.state)([prompt], sampling)
    assert len(tokens) > 3
    flags = [f"--hf={model_folder}", "--max_new_tokens=12", "--temperature=0", f"--prompt={PROMPT}"]
    assert generate.main(flags) == 0
    expected = loaded.tokenizer.decode_bytes(tokens).decode("utf-8", "replace")
    assert capsys.readouterr().out == f"{PROMPT}{expected}\n"
    assert generate.main([*flags, "--host_weights"]) == 0
    assert capsys.readouterr().out == f"{PROMPT}{expected}\n"


@pytest.mark.pairs
def test_chat_with_a_directory(model_folder: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`plimsoll chat` renders conversations with the directory's template, and a second turn contains the first."""
    loaded = load(model_folder)
    tokenizer = loaded.tokenizer
    generator = Generator(loaded.program, loaded.state)
    sampling = Sampling(6, stop_ids=tuple(tokenizer.stop_ids))
    messages = [{"role": "system", "content": "be a fox"}]
    expected = ""
    for question in ("who are you?", "and?"):
        messages.append({"role": "user", "content": question})
        text, _ = tokenizer.render(messages, add_generation_prompt=True)
        (encoding,) = tokenizer.encode_rendered([text])
        (tokens,) = generator([encoding.ids], sampling)
        answer = tokenizer.decode_bytes(tokens).decode("utf-8", "replace").lstrip()
        expected += f"{answer}\n"
        messages.append({"role": "assistant", "content": answer.rstrip()})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"who are you?\nand?\n")))
    flags = [f"--hf={model_folder}", "--system=be a fox", "--temperature=0", "--max_new_tokens=6"]
    assert chat.main(flags) == 0
    assert capsys.readouterr().out == expected
    assert chat.main([f"--hf={model_folder}", "--max_new_tokens=128"]) == 2
    assert "max_new_tokens=128 leaves no room for a message" in capsys.readouterr().err


@pytest.mark.pairs
def test_lm_evaluation_harness_runs(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="it comes with: pip install -e '.[harness]'")
    rows = [("the quick", " brown fox"), ("a lazy", " dog"), ("who are", " you?")]
    lines = [json.dumps({"q": q, "choices": [a, " zzzz"], "gold": 0, "text": q + a}) for q, a in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{tmp_path}/rows.jsonl"}}}
    common |= {"test_split": "test", "target_delimiter": ""}
    choice = {"doc_to_text": "{{q}}", "doc_to_choice": "choices", "doc_to_target": "gold"}
    until = {"doc_to_text": "{{q}}", "doc_to_target": "{{choices[0]}}", "generation_kwargs": {"until": ["."]}}
    rolling = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]}
    for kind, own in (("multiple_choice", choice), ("generate_until", until), ("loglikelihood_rolling", rolling)):
        task = {"task": f"our_{kind}", "output_type": kind, **common, **own}
        (tmp_path / f"{kind}.yaml").write_text(json.dumps(task))  # JSON is YAML
    questions = [{"context": q, "choices": [a, " zzzz"], "answer": 0} for q, a in rows]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "text.txt").write_text("".join(rows[0]))
    out = tmp_path / "out.json"
    tasks = "--tasks=our_multiple_choice,our_generate_until,our_loglikelihood_rolling"
    flags = [tasks, f"--task_path={tmp_path}", f"--choices={tmp_path}/questions.jsonl", f"--json={out}"]
    assert evaluate.main([f"--hf={model_folder}", *flags]) == 0
    found = json.loads(out.read_text())
    assert found["tasks"]["our_multiple_choice"]["acc,none"] == pytest.approx(found["choices"]["accuracy"])
    assert found["tasks"]["our_loglikelihood_rolling"]["bits_per_byte,none"] > 0
    assert found["tasks"]["our_generate_until"]["exact_match,none"] == 0
    assert "our_generate_until" in capsys.readouterr().out
    assert evaluate.main([f"--hf={model_folder}", "--tasks=our_choice", f"--task_path={tmp_path}"]) == 2
    assert "no task 'our_choice'" in capsys.readouterr().err
