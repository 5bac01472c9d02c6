"""`plimsoll generate` and `plimsoll evaluate` on the workdir of a run, called from the command line."""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import plimsoll.api.model as api
from plimsoll.api.loaded import LoadedModel
from plimsoll.framework.checkpoint.directory import Manifest
from plimsoll.framework.layout import flatten
from plimsoll.launch import evaluate, generate, weights
from tests.support import runs

PROMPT = "the quick"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with averaged weights, on eight devices; its text is in folder/text."""
    folder = tmp_path_factory.mktemp("verbs")
    runs.write_text(folder / "text")
    flags = ("--config.trainer.max_steps=4", "--config.learner.ema=0.5", "--config.trainer.save_every=2")
    assert runs.train(folder / "run", *flags) == 0
    return folder / "run"


def load(workdir: Path, *flags: str) -> LoadedModel:
    return weights.load(*weights.parse(weights.parser("x", ""), [f"--workdir={workdir}", *flags]))


def generate_text(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert generate.main([*flags]) == 0
    return capsys.readouterr().out


@pytest.mark.pairs
def test_only_weights_are_loaded(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(workdir)
    assert {group for group, tree in loaded.state.items() if tree} == {"parameter"}
    averaged = load(workdir, "--ema")
    assert {group for group, tree in averaged.state.items() if tree} == {"ema"}
    old = load(workdir, "--step=2")
    first = lambda tree: np.asarray(jax.tree.leaves(tree)[0])  # noqa: E731
    values = [first(loaded.state.parameter), first(averaged.state.ema), first(old.state.parameter)]
    assert all(np.abs(a - b).max() > 0 for a, b in [(values[0], values[1]), (values[0], values[2])])
    offloaded = load(workdir, "--host_weights")
    kinds = {path: leaf.sharding.memory_kind for path, leaf in weights_by_path(offloaded).items()}
    assert kinds["stack/block0/mlp/up/weight"] == "pinned_host"
    assert kinds["stack/block0/mlp_norm/scale"] == kinds["embed/token"] == "device"


def weights_by_path(loaded: LoadedModel) -> dict[str, jax.Array]:
    return flatten(loaded.state.parameter)


@pytest.mark.pairs
def test_works_with_fewer_devices_than_the_runs_mesh(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = tmp_path / "run"
    shutil.copytree(workdir, larger)
    # The config stored in the checkpoint is the one that is used.
    for step in (larger / "checkpoints").glob("0*"):
        manifest = Manifest.read(step)
        manifest.extra["config"]["mesh"] |= {"model": 2, "fsdp": 64}
        (step / "manifest" / "data.json").write_text(json.dumps(manifest.to_json()))
    loaded = load(larger)
    assert dict(loaded.program.mesh.shape) == {"data": 1, "fsdp": 8, "expert": 1, "seq": 1, "model": 1}
    assert "is not the number of devices, 8; nearest: [8]; using mesh.fsdp = 8" in capsys.readouterr().err


@pytest.mark.pairs
def test_requested_mesh_that_does_not_fit_is_refused(workdir: Path, capsys: pytest.CaptureFixture) -> None:
    assert generate.main([f"--workdir={workdir}", f"--prompt={PROMPT}", "--config.mesh.expert=3"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert error.startswith("error: mesh")
    assert "using mesh.fsdp" not in error
    with pytest.raises(ValueError, match="mesh"):
        api.load(workdir, {"mesh.model": 3})


@pytest.mark.pairs
def test_config_in_a_run_cannot_touch_this_machine(workdir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Files named in the config are not read, and nothing is written except what the command line names."""
    stranger, home = tmp_path / "stranger", tmp_path / "home"
    shutil.copytree(workdir, stranger)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    text = json.loads((stranger / "config.json").read_text())
    text["trainer"] |= {"compilation_cache": f"{tmp_path}/cache", "profile": [1, 2], "wandb_project": "x"}
    text["compiler"]["options"] = {"xla_dump_to": f"{tmp_path}/dump", "xla_dump_hlo_as_text": True}
    text["data"]["cache_dir"] = f"{tmp_path}/tokens"
    (stranger / "config.json").write_text(json.dumps(text))
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    flags = (f"--workdir={stranger}", "--config.trainer.compilation_cache=none")
    assert generate.main([*flags, "--prompt=the", "--max_new_tokens=2"]) == 0
    assert evaluate.main([*flags, "--files", str(workdir / "config.json")]) == 0
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert "xla_dump_to" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        places: list[str] = []
        patch.setattr("plimsoll.framework.devices.executables.use_compilation_cache", places.append)
        load(stranger)
    assert places == ["~/.cache/plimsoll/xla"]


@pytest.mark.pairs
def test_generate(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"--workdir={workdir}", "--max_new_tokens=8", "--temperature=0")
    one = generate_text(capsys, *flags, f"--prompt={PROMPT}")
    assert one.startswith(PROMPT)
    assert one.endswith("\n")
    (tmp_path / "p.txt").write_text(PROMPT)
    both = generate_text(capsys, *flags, "--prompt=a", f"--prompt_file={tmp_path}/p.txt")
    assert both.split("\n---\n")[1] == one
    assert generate_text(capsys, *flags, f"--prompt={PROMPT}", "--host_weights") == one
    made = one.removeprefix(PROMPT).removesuffix("\n")
    cut = generate_text(capsys, *flags, f"--prompt={PROMPT}", f"--stop={made[2:4]}")
    assert cut == f"{PROMPT}{made[: made.index(made[2:4])]}\n"
    long = generate_text(capsys, *flags[::2], f"--prompt={PROMPT}")  # no limit: as many tokens as there are positions
    assert long.startswith(one.removesuffix("\n"))


def test_evaluate_equals_evaluation_during_training(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = workdir.parent / "text" / "valid.txt"
    out = tmp_path / "out.json"
    assert evaluate.main([f"--workdir={workdir}", f"--json={out}", "--files", str(text)]) == 0
    row = next(row for row in runs.rows(workdir) if "eval/held/loss" in row)
    got = json.loads(out.read_text())["files"][str(text)]
    assert got["tokens"] == row["eval/held/tokens"] == len(text.read_bytes())
    assert got["loss"] == pytest.approx(row["eval/held/loss"], rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(row["eval/held/bits_per_byte"], rel=1e-5)
    line = f"{text}: {got['tokens']} tokens, loss {got['loss']:.4f}, perplexity {math.exp(got['loss']):.3f}"
    assert capsys.readouterr().out == f"{line}, {got['bits_per_byte']:.4f} bits per byte\n"


@pytest.mark.pairs
def test_choices(workdir: Path, tmp_path: Path) -> None:
    questions = [("the quick ", ["brown fox", "zz"]), ("a lazy", [" dog while", " q", "!"]), ("jumps", [" over", "%"])]
    loaded = load(workdir)
    model = loaded.experiment.model

    def log_prob(context: str, choice: str) -> float:
        tokens = [256, *(context + choice).encode()]
        ctx = loaded.program.evaluation_context({"tokens": np.int32([tokens[:-1]] * 8)})
        logits = jax.jit(model.logits)(loaded.program.weights(loaded.state), ctx, {})
        log_probs = log_softmax(np.float64(logits[0]), axis=-1)
        return sum(log_probs[i - 1, tokens[i]] for i in range(1 + len(context), len(tokens)))

    table = [[log_prob(context, choice) for choice in choices] for context, choices in questions]
    lengths = [[len(choice) for choice in choices] for _, choices in questions]
    raw = [int(np.argmax(row)) for row in table]
    normed = [int(np.argmax(np.divide(row, size))) for row, size in zip(table, lengths, strict=True)]
    assert raw != normed, "the two rules agree: nothing is shown"
    file, out = tmp_path / "q.jsonl", tmp_path / "out.json"
    for answers, expected in ((raw, "accuracy"), (normed, "accuracy_per_character")):
        lines = [{"context": q, "choices": c, "answer": a} for (q, c), a in zip(questions, answers, strict=True)]
        file.write_text("\n".join(map(json.dumps, lines)))
        assert evaluate.main([f"--workdir={workdir}", f"--choices={file}", f"--json={out}"]) == 0
        result = json.loads(out.read_text())["choices"]
        same = sum(a == b for a, b in zip(raw, normed, strict=True)) / 3
        assert result["questions"] == 3
        assert result[expected] == 1
        assert result["accuracy"] + result["accuracy_per_character"] == pytest.approx(1 + same)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt=a"], "one of the arguments --workdir --hf is required"),
        (["--workdir={run}"], "--prompt=TEXT or --prompt_file=FILE is required"),
        (
            ["--workdir={run}/nope", "--prompt=a"],
            "holds no config.json; expected the workdir of a `plimsoll train` run",
        ),
        (["--workdir={empty}", "--prompt=a"], "empty/checkpoints holds no checkpoint"),
        (["--workdir={broken}", "--prompt=a"], "broken/config.json: not valid JSON"),
        (["--workdir={run}", "--prompt=a", "--step=3"], "no checkpoint of step 3"),
        (["--workdir={run}", "--prompt=a", "--top_p=0"], "top_p: expected over 0, and at most 1, given 0.0"),
        (["--workdir={run}", "--prompt=a", "--topk=3"], "unknown flag '--topk'; did you mean '--top_k'?"),
        (["--workdir={run}", "--prompt=" + "a" * 40], "are over the model's 32 positions"),
        (["--workdir={run}", "--prompt=a", "--config.model.dmi=3"], "did you mean 'dim'?"),
        (["--hf=nope", "--prompt=a", "--ema"], "--step and --ema require --workdir"),
        (["--hf=nope", "--prompt=a"], "no file nope/config.json"),
        (["--workdir={run}", "--prompt_file={run}/metrics.nope"], "metrics.nope: no such file"),
    ],
)
def test_user_errors_are_one_line(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    names = {"run": workdir, "empty": tmp_path / "empty", "broken": tmp_path / "broken"}
    for name in ("empty", "broken"):
        names[name].mkdir()
    shutil.copy(workdir / "config.json", names["empty"])
    (names["broken"] / "config.json").write_text("{")
    assert generate.main([flag.format(**names) for flag in flags]) == 2
    out, err = capsys.readouterr()
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not out, "the prompt was shown"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("files", b"", "is empty"),
        ("files", b"\xff\xfe", "not UTF-8"),
        ("choices", b'{"context": "a", "choices": ["b"], "answer": 1}', "x:1: expected"),
        ("choices", b'{"context": "a", "choices": ["b"]}', "'answer' is missing"),
        ("choices", b'{"context": "a", "choices": [], "answer": 0}', "x:1: expected"),
        ("choices", b'{"context": "a", "choices": "bc", "answer": 0}', "choices is text"),
        ("choices", b'{"context": "a", "choices": {"b": 1}, "answer": 0}', "choices is an object"),
        ("choices", b'{"context": "a", "choices": ["b", ""], "answer": 0}', "choice 1 is empty: text"),
        ("choices", b'{"context": "a", "choices": ["b"], "answer": true}', "answer is a bool"),
        ("choices", b'{"context": 1, "choices": ["b"], "answer": 0}', "context is a number"),
        ("choices", b'{"context": "a", "choices": ["b"], "answer": 0}\n3', "x:2: expected"),
        ("choices", b"[" * 100_000, "x:1: expected"),
        ("choices", b"\n", "x:1: expected"),
    ],
)
def test_bad_files(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    assert evaluate.main([f"--workdir={workdir}", f"--{name}", f"{tmp_path}/x"]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_evaluate(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([f"--workdir={workdir}"]) == 2
    assert "give --files, --validation, --choices or --tasks" in capsys.readouterr().err
    assert evaluate.main([f"--workdir={workdir}", f"--files={workdir}/config.json", "--json=no/where.json"]) == 2
    assert "--json=no/where.json: the folder no does not exist" in capsys.readouterr().err
    if importlib.util.find_spec("lm_eval") is None:
        assert evaluate.main([f"--workdir={workdir}", "--tasks=x"]) == 2
        assert "pip install -e '.[harness]'" in capsys.readouterr().err


@pytest.mark.pairs
def test_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from plimsoll.launch.__main__ import verbs

    assert {"generate", "evaluate"} <= verbs().keys()
