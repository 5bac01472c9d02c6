"""Published models by Hub id: from the Hub's cache, and from a server that answers like the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import plimsoll as pl
from plimsoll import configs
from plimsoll.framework.weights.directory import Directory
from plimsoll.launch import generate, plan, train
from tests.support.hub import COMMIT, HubServer, Repository, empty_cache, fill_cache, serving
from tools.peers.families import FAMILIES

SMALL_NAMES = ["config.json", "tokenizer.json", "tokenizer_config.json"]
URL = f"hf://acme/tiny@{COMMIT}"


@pytest.fixture
def model(tmp_path: Path) -> Repository:
    """A Llama directory with almost no weights, and a tokenizer; enough for tests that do not compute with it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / ".gitattributes").write_text("*.safetensors binary")
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama"].facts | {"dtype": "float16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    save_file({"x": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return Repository("model", "acme/tiny", folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, empty; network requests fail."""
    return empty_cache(tmp_path, monkeypatch)


def test_a_config_keeps_the_commit(cache: Path, model: Repository):
    folder = fill_cache(cache, model)
    lines: list[str] = []
    config = configs.load("hf:acme/tiny", lines.append)
    assert config.pretrained.path == config.data.tokenizer.path == URL
    assert config.model == configs.load(f"hf:{model.folder}").model
    assert lines == [f"hub: acme/tiny at commit {COMMIT[:12]}, in {folder}"]
    assert Directory(config.pretrained.path).path == folder
    # The config keeps its commit when the branch moves.
    (cache / "models--acme--tiny/refs/main").write_text("b" * 40)
    assert Directory(config.pretrained.path).path == folder
    for kind in ("hf", "lora", "qlora"):
        assert configs.load(f"{kind}:acme/tiny@{COMMIT}").pretrained.path == URL
    assert pl.load_config(f"hf:acme/tiny@{COMMIT}").pretrained.path == URL


def test_a_folder_goes_before_an_id(cache: Path, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill_cache(cache, model)
    shutil.copytree(model.folder, tmp_path / "acme/tiny")
    monkeypatch.chdir(tmp_path)
    assert configs.load("hf:acme/tiny").pretrained.path == "acme/tiny"


@pytest.mark.pairs
def test_plan_needs_no_weights_and_a_run_fails_early(
    cache: Path, model: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fill_cache(cache, model, SMALL_NAMES)
    assert plan.main(["--config=lora:acme/tiny", "--target=cpu:1", "--estimate"]) == 0
    assert f"hub: acme/tiny at commit {COMMIT[:12]}" in capsys.readouterr().err
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    data = f"--data={tmp_path}/chats.jsonl"
    assert train.main(["--config=lora:acme/tiny", data, f"--workdir={tmp_path}/run"]) == 2
    assert "model.safetensors is not in the cache of the Hub" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cached", "lists", "message"),
    [
        (["tokenizer.json", "tokenizer_config.json"], True, "config.json is not in the cache of the Hub"),
        # Without this file, the special tokens would be different.
        (["config.json", "tokenizer.json"], True, "tokenizer_config.json is not in the cache of the Hub"),
        (["tokenizer.json"], False, "config.json is not in the cache of the Hub"),
        (
            [],
            True,
            "no folder acme/tiny, and acme/tiny@aaaaaaaa: config.json, tokenizer.json, tokenizer_config.json is not",
        ),
    ],
)
def test_a_cache_that_lacks_a_file(
    cache: Path, model: Repository, capsys: pytest.CaptureFixture[str], cached: list[str], lists: bool, message: str
):
    fill_cache(cache, model, cached, lists=lists)
    assert plan.main(["--config=hf:acme/tiny", "--target=cpu:1", "--estimate"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_dtype_is_an_error_without_weights(cache: Path, model: Repository, capsys: pytest.CaptureFixture[str]):
    (model.folder / "config.json").write_text(json.dumps(FAMILIES["llama"].facts))
    fill_cache(cache, model, SMALL_NAMES)
    assert plan.main(["--config=hf:acme/tiny", "--target=cpu:1", "--estimate"]) == 2
    assert "its config.json has no dtype, its weights are not in the cache" in capsys.readouterr().err
    shutil.rmtree(cache)
    fill_cache(cache, model)
    assert configs.load("hf:acme/tiny").model.param_dtype == "float32", "that of the first tensor"


def test_user_errors(cache: Path, model: Repository, capsys: pytest.CaptureFixture[str]):
    fill_cache(cache, model)
    for spec, message in [
        ("hf:acme/tyni", "error: no folder acme/tyni, and acme/tyni@main is not in the cache of the Hub"),
        ("hf:acme/tiny@v9", "acme/tiny@v9 is not in the cache of the Hub"),
        ("hf:tiny", "or the Hub's ORG/NAME"),
        ("hf:hf://datasets/acme/tiny", "expected a model of the Hub"),
    ]:
        assert plan.main([f"--config={spec}", "--target=cpu:1", "--estimate"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert generate.main(["--hf=acme/tyni", "--prompt=a"]) == 2
    assert "no folder acme/tyni" in capsys.readouterr().err


def test_without_a_file_list_assumed_missing_files_are_named(cache: Path, model: Repository):
    fill_cache(cache, model, lists=False)
    lines: list[str] = []
    configs.load("hf:acme/tiny", lines.append)
    assert "assumed absent, because the cache has no file list: generation_config.json, adapter_config.json" in lines[0]


# --- against a server ------------------------------------------------------------------------------------------------


def verb(server: HubServer, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command after clearing the server's list of downloads."""
    server.downloads.clear()
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(folder / "cache"), **variables}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.pairs
def test_a_plan_downloads_no_weights(model: Repository, tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    facts = dict(FAMILIES["llama"].facts)
    for name in ("dtype", "torch_dtype"):
        facts.pop(name, None)
    (model.folder / "config.json").write_text(json.dumps(facts))
    save_file({"x": np.zeros((1000, 1000), np.float32)}, model.folder / "model.safetensors")
    gated = Repository("model", "acme/gated", model.folder, gated=True)
    flags = ("--target=cpu:1", "--estimate", "--json")
    with serving([model, gated]) as server:
        done = verb(
            server, tmp_path, "plimsoll.launch.plan", "--config=hf:acme/tiny", *flags, str(tmp_path / "plan.json")
        )
        assert done.returncode == 0, done.stderr
        # config.json has no dtype, so it comes from the header of the weights.
        assert sorted(set(server.downloads)) == [".gitattributes", "config.json", "model.safetensors", *SMALL_NAMES[1:]]
        assert server.sent_bytes < 1_000_000, "of 4 MB"
        again = verb(server, tmp_path, "plimsoll.launch.configs", "show", "hf:acme/tiny", "--only=dtype")
        assert again.returncode == 0, again.stderr
        assert "model.param_dtype = float32" in again.stdout
        for spec, message in [
            ("acme/gated", "acme/gated@main is gated: request access at"),
            ("acme/none", f"no model acme/none at {server.url}/acme/none, or it is private"),
            ("acme/tiny@v9", f"{server.url}/acme/tiny has no revision 'v9'"),
        ]:
            failed = verb(
                server, tmp_path, "plimsoll.launch.plan", f"--config=hf:{spec}", "--target=cpu:1", "--estimate"
            )
            assert failed.returncode == 2
            assert message in failed.stderr.splitlines()[-1]
            assert "Traceback" not in failed.stderr
    gone = verb(server, tmp_path, "plimsoll.launch.plan", "--config=hf:acme/other", "--target=cpu:1", "--estimate")
    assert gone.returncode == 2
    assert f"{server.url} cannot be reached (Connect" in gone.stderr


@pytest.mark.pairs
def test_a_run_on_a_data_set_resumes_without_the_hub(tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.gitattributes").write_text("*.jsonl text")
    for name, count in (("train", 400), ("validation", 40), ("test", 40)):
        lines = "".join(json.dumps({"text": f"document {number} of {name} " * 20}) + "\n" for number in range(count))
        (tmp_path / f"data/{name}.jsonl").write_text(lines)
    data_set = Repository("dataset", "acme/code", tmp_path / "data")
    flags = ["plimsoll.launch.train", "--config=nanogpt-cpu", "--data=hf://datasets/acme/code"]
    flags += ["--config.data.global_batch_size=8"]
    with serving([data_set]) as server:
        for steps in ("2", "4"):
            run = [*flags, f"--config.trainer.max_steps={steps}"]
            whole = verb(server, tmp_path, *run, f"--workdir={tmp_path}/run")
            assert whole.returncode == 0, whole.stderr
            if steps == "2":
                assert sorted(server.downloads) == [".gitattributes", "train.jsonl", "validation.jsonl"]
                assert f"hf://datasets/acme/code@{COMMIT}/train.jsonl" in (tmp_path / "run/config.json").read_text()
                shutil.copytree(tmp_path / "run", tmp_path / "offline")
            else:
                assert server.downloads == []
    resumed = verb(server, tmp_path, *flags, "--config.trainer.max_steps=4", f"--workdir={tmp_path}/offline")
    assert resumed.returncode == 0, resumed.stderr
    losses = []
    for name in ("run", "offline"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([(row["step"], row["train/loss"]) for row in rows if "train/loss" in row])
    assert losses[0] == losses[1]
    assert losses[0][-1][0] == 4
