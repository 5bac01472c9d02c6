"""From a published directory through `plimsoll train` to `plimsoll export`: full weights, adapters, a 4-bit base."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from plimsoll.framework import families
from plimsoll.framework.config import config_for
from plimsoll.framework.files import durable
from plimsoll.framework.layers.lora import LoRA, merge_adapters
from plimsoll.framework.layout import flatten
from plimsoll.framework.weights.export import export_model
from plimsoll.launch import export, train, weights
from tests.support import pretrained, runs, small

WEIGHTS = {"config.json", "model.safetensors"}
ALL_FILES = {*WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [2, 3]}
HOSTED = ("update=streamed", "optimizer_state=pinned_host", "gradients=pinned_host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, its tokenizer and chat template, and chats."""
    folder = tmp_path_factory.mktemp("export")
    config = small.llama(vocab_size=512)
    for block in config.stack.pattern:
        block.mlp.hidden = 64  # one full nf4 block
    config.set_path("dim", 64)
    program = small.program(small.experiment(config))
    facts, family = families.export_config(config)
    params = program.init().parameter
    export_model(folder / "model", program.experiment.model, params, family, facts | {"max_position_embeddings": 64})
    pretrained.write(folder / "model", "chatml")
    (folder / "model/generation_config.json").write_text(json.dumps(GENERATION))
    words = pretrained.TEXTS[0].split()
    chats = [
        [{"role": "user", "content": f"{words[i % 9]} {i}"}, {"role": "assistant", "content": words[i % 7]}]
        for i in range(180)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder


def run_finetune(folder: Path, kind: str, *memory: str) -> Path:
    """Train for eight steps, and return the workdir."""
    workdir = folder / f"{kind}-{len(memory)}"
    flags = [f"--config.memory.{field}" for field in memory]
    chats = [f"--config.data.{name}.paths={folder}/chats.jsonl" for name in ("source", "validation.chats")]
    trainer = {"max_epochs": "none", "max_steps": 8, "log_every": 1, "save_every": 8, "eval_every": "none"}
    trainer["compilation_cache"] = runs.ROOT / ".cache" / "xla"
    flags += [f"--config.trainer.{name}={value}" for name, value in trainer.items()]
    flags += ["--config.data.global_batch_size=8", "--config.learner.optimizer.learning_rate.peak_value=1e-2"]
    flags += ["--config.learner.optimizer.learning_rate.warmup=1", "--config.learner.clip_mode=update_rms"]
    assert train.main([f"--config={kind}:{folder / 'model'}", f"--workdir={workdir}", *chats, *flags]) == 0
    losses = list(runs.losses(workdir).values())
    assert losses[-1] < losses[0]
    return workdir


def logits(*flags: str) -> np.ndarray:
    loaded = weights.load(*weights.parse(weights.parser("x", ""), list(flags)))
    program = loaded.program
    context = program.evaluation_context({"tokens": np.arange(3, 35)[None].repeat(8, 0)})
    return np.asarray(jax.jit(program.experiment.model.logits)(program.weights(loaded.state), context, {}))


@pytest.mark.pairs
def test_two_processes_read_only_their_shards(folder: Path):
    chats = [f"--config.data.{name}.paths={folder}/chats.jsonl" for name in ("source", "validation.chats")]
    fields = {"max_epochs": "none", "max_steps": 3, "log_every": 1, "eval_every": "none"}
    flags = [*chats, *(f"--config.trainer.{name}={value}" for name, value in fields.items())]
    flags += ["--config.data.global_batch_size=8", "--config.mesh.fsdp=2", "--config.mesh.data=2"]
    kind = {"file": "qlora", "config": str(folder / "model")}
    assert runs.start(folder / "one", *flags, devices=4, **kind).wait(timeout=300) == 0
    two = runs.pair(folder / "two", *flags, **kind)
    assert [process.wait(timeout=300) for process in two] == [0, 0], Path(f"{folder}/two.out").read_text()
    one, two = (runs.losses(folder / name) for name in ("one", "two"))
    assert one.keys() == two.keys() == {1, 2, 3}
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=2e-5)


@pytest.mark.pairs
def test_a_model_with_learned_positions_keeps_them_all(folder: Path):
    """transformers reads max_position_embeddings as an alias of n_positions."""
    workdir = folder / "gpt2"
    text = folder / "text.txt"
    text.write_text("the quick brown fox " * 400)
    fields = {
        "model.embed.max_positions": 48, "data.seq_len": 16, "data.global_batch_size": 8, "data.tokenizer":
        "plimsoll.ByteTokenizer", "data.source": "plimsoll.TextFiles",
        "data.source.paths": text, "model.vocab_size": 257, "model.dim": 32, "model.stack.num_layers": 2,
        "model.stack.pattern.0.attention.num_heads": 2, "model.stack.pattern.0.mlp.hidden": 64,
        "trainer.max_steps": 1, "trainer.compilation_cache": runs.ROOT / ".cache" / "xla",
    }  # fmt: skip
    flags = [f"--config.{path}={value}" for path, value in fields.items()]
    assert train.main(["--config=gpt2-124m", f"--workdir={workdir}", *flags]) == 0
    assert export.main([f"--workdir={workdir}", f"--to={folder / 'gpt2-out'}"]) == 0
    facts = json.loads((folder / "gpt2-out/config.json").read_text())
    assert facts["n_positions"] == 48
    assert "max_position_embeddings" not in facts
    tokenizer = Tokenizer.from_file(str(folder / "gpt2-out/tokenizer.json"))
    for text in ("the quick brown fox", "é 🚢\n\t\x00 \u2581", "".join(map(chr, range(0x250)))):
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    end = json.loads((folder / "gpt2-out/tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.token_to_id(end) == facts["eos_token_id"] == 256
    assert tokenizer.get_vocab_size() == facts["vocab_size"] == 257


@pytest.mark.pairs
def test_ids_without_text_export_as_placeholder_tokens(folder: Path, capsys):
    numbers = {
        "data.tokenizer": "plimsoll.NoTokenizer", "data.tokenizer.vocab_size": 512,
        "data.source": "plimsoll.TokenMemmap", "data.source.path": "tokens.bin", "data.validation": "{}",
    }  # fmt: skip
    flags = [f"--config.{path}={value}" for path, value in numbers.items()]
    to = folder / "numbers"
    assert export.main([f"--hf={folder / 'model'}", f"--to={to}", *flags]) == 0
    assert "no tokenizer files are written: data.tokenizer is NoTokenizer" in capsys.readouterr().err
    assert {file.name for file in to.iterdir()} == {*WEIGHTS, "generation_config.json"}


@pytest.mark.pairs
def test_texts_end_where_the_tuned_ones_did(folder: Path):
    """With the published generation_config.json, generation would not stop at this token."""
    to = folder / "other-end"
    flags = ["--config.data.tokenizer.eos_token=<|endoftext|>"]
    assert export.main([f"--hf={folder / 'model'}", f"--to={to}", *flags]) == 0
    written = json.loads((to / "generation_config.json").read_text())
    end = Tokenizer.from_file(str(to / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert end in written.pop("eos_token_id")
    assert written.items() <= GENERATION.items()


@pytest.mark.pairs
def test_file_permissions_follow_the_umask(folder: Path):
    to, before = folder / "shared", os.umask(0o027)
    try:
        assert export.main([f"--hf={folder / 'model'}", f"--to={to}"]) == 0
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in to.iterdir()} == dict.fromkeys(ALL_FILES, "0o640")


def test_a_directory_appears_with_its_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer is not added later: a process that waits for the directory may read it immediately."""
    seen = []
    rename = durable.rename

    def record_rename(source: Path, target: Path) -> None:
        seen.append({file.name for file in source.iterdir()})
        rename(source, target)

    monkeypatch.setattr(durable, "rename", record_rename)
    assert export.main([f"--hf={folder / 'model'}", f"--to={folder / 'again'}"]) == 0
    assert seen == [ALL_FILES]


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("kind", "memory"), [("hf", HOSTED), ("lora", ("update=in_backward",)), ("qlora", ("update=streamed",))]
)
def test_exported_weights_equal_the_trained_ones(folder: Path, kind, memory, capsys):
    workdir = run_finetune(folder, kind, *memory)
    to = folder / f"{kind}-out"
    assert export.main([f"--workdir={workdir}", f"--to={to}"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert {file.name for file in to.iterdir()} == ALL_FILES
    assert json.loads((to / "generation_config.json").read_text()) == GENERATION
    published, written = (json.loads((place / "config.json").read_text()) for place in (folder / "model", to))
    assert published.items() <= written.items()
    ours, back = logits(f"--workdir={workdir}"), logits(f"--hf={to}")
    assert np.abs(ours - back).max() <= 1e-4 * np.abs(ours).max()
    assert np.abs(logits(f"--hf={folder / 'model'}") - ours).max() > 1e-2 * np.abs(ours).max()
    again = folder / f"{kind}-from-host-memory"
    assert export.main([f"--workdir={workdir}", f"--to={again}", "--host_weights"]) == 0
    expected, found = (load_file(place / "model.safetensors") for place in (to, again))
    small.assert_same_bits(found, expected)
    assert export.main([f"--workdir={workdir}", f"--to={to}"]) == 2
    assert "already exists" in capsys.readouterr().err
    adapter = folder / f"{kind}-adapter"
    code = export.main([f"--workdir={workdir}", f"--to={adapter}", "--adapter"])
    if kind == "hf":
        assert code == 2
        assert "no adapters" in capsys.readouterr().err
        assert not adapter.exists()
    else:
        assert code == 0
        facts = json.loads((adapter / "adapter_config.json").read_text())
        assert facts["base_model_name_or_path"] == str(folder / "model")
        assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * 7 * 2


@pytest.mark.pairs
def test_weights_in_few_bits_without_an_adapter_are_exported_whole(tmp_path: Path):
    """With model.lora.base_targets, leaves without adapters are codes and scales too; export rebuilds the tensors."""
    config = small.llama(vocab_size=512)
    config.set_path("dim", 64)
    for block in config.stack.pattern:
        block.mlp.hidden = 64
    facts, family = families.export_config(config)
    config.lora = config_for(LoRA, rank=4, base="nf4", targets="query", base_targets=".")
    program = small.program(small.experiment(config))
    params = program.weights(program.init())
    facts |= {"max_position_embeddings": 64}
    export_model(tmp_path / "model", program.experiment.model, params, family, facts)
    tensors = load_file(tmp_path / "model/model.safetensors")
    merged = flatten(merge_adapters(program.experiment.model, params))
    for name in ("up", "down", "gate"):
        weights_LIO = np.asarray(merged[f"stack/block0/mlp/{name}/weight"])
        np.testing.assert_array_equal(tensors[f"model.layers.1.mlp.{name}_proj.weight"].T, weights_LIO[1])
