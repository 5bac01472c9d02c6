"""From a published directory through launch.train to one that launch.export writes: full, adapters, 4-bit base."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import families
from framework.export import export_model
from launch import export, train, weights
from tests.support import pretrained, runs, small

HOSTED = ("update=streamed", "optimizer_state=pinned_host", "gradients=pinned_host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer and a chat template, and chats."""
    folder = tmp_path_factory.mktemp("export")
    config = small.llama(vocab_size=512)
    for block in config.stack.pattern:
        block.mlp.hidden = 64  # a whole block of nf4
    config.set_path("dim", 64)
    program = small.program(small.experiment(config))
    facts, family = families.of_model(config)
    params = program.init()["parameter"]
    export_model(folder / "model", program.experiment.model, params, family, facts | {"max_position_embeddings": 64})
    pretrained.write(folder / "model", "chatml")
    words = pretrained.TEXTS[0].split()
    chats = [
        [{"role": "user", "content": f"{words[i % 9]} {i}"}, {"role": "assistant", "content": words[i % 7]}]
        for i in range(180)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder


def tuned(folder: Path, kind: str, *memory: str) -> Path:
    """A workdir of eight steps."""
    workdir = folder / f"{kind}-{len(memory)}"
    flags = [f"--config.memory.{field}" for field in memory]
    chats = [f"--config.data.{name}.paths={folder}/chats.jsonl" for name in ("source", "validation.chats")]
    trainer = {"max_epochs": "none", "max_steps": 8, "log_every": 1, "save_every": 8, "eval_every": "none"}
    trainer["compilation_cache"] = runs.ROOT / ".cache" / "xla"
    flags += [f"--config.trainer.{name}={value}" for name, value in trainer.items()]
    flags += ["--config.data.global_batch_size=8", "--config.learner.optimizer.learning_rate.peak_value=1e-2"]
    flags += ["--config.learner.optimizer.learning_rate.warmup_steps=1", "--config.learner.clip_mode=update_rms"]
    assert train.main([f"--config={kind}:{folder / 'model'}", f"--workdir={workdir}", *chats, *flags]) == 0
    losses = list(runs.losses(workdir).values())
    assert losses[-1] < losses[0]
    return workdir


def logits(*flags: str) -> np.ndarray:
    loaded = weights.load(*weights.parse(weights.parser("x", ""), list(flags)))
    program = loaded.program
    context = program.evaluation_context({"tokens": np.arange(3, 35)[None].repeat(8, 0)})
    return np.asarray(program.experiment.model.logits(program.weights(loaded.state), context, {}))


def test_two_processes_read_what_their_devices_hold(folder: Path):
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


def test_a_model_with_learned_positions_keeps_them_all(folder: Path):
    """transformers reads max_position_embeddings as another name of n_positions."""
    workdir = folder / "gpt2"
    text = folder / "text.txt"
    text.write_text("the quick brown fox " * 400)
    fields = {
        "model.embed.max_positions": 48, "data.seq_len": 16, "data.global_batch_size": 8, "data.tokenizer":
        "framework.data.tokenizers.ByteTokenizer", "data.source": "framework.data.sources.TextFiles",
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


def test_a_directory_appears_with_its_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Not before: who waits for it may read it at once."""
    seen = []
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (seen.append({f.name for f in self.iterdir()}), rename(self, to))
    )
    assert export.main([f"--hf={folder / 'model'}", f"--to={folder / 'again'}"]) == 0
    assert seen == [{"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}]


@pytest.mark.parametrize(
    ("kind", "memory"), [("hf", HOSTED), ("lora", ("update=in_backward",)), ("qlora", ("update=streamed",))]
)
def test_what_was_trained_is_what_is_exported(folder: Path, kind, memory, capsys):
    workdir = tuned(folder, kind, *memory)
    to = folder / f"{kind}-out"
    assert export.main([f"--workdir={workdir}", f"--to={to}"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in to.iterdir()
    }
    published = json.loads((folder / "model/config.json").read_text())
    assert published.items() <= json.loads((to / "config.json").read_text()).items()
    ours, back = logits(f"--workdir={workdir}"), logits(f"--hf={to}")
    assert np.abs(ours - back).max() <= 1e-4 * np.abs(ours).max()
    assert np.abs(logits(f"--hf={folder / 'model'}") - ours).max() > 1e-2 * np.abs(ours).max()
    assert export.main([f"--workdir={workdir}", f"--to={to}"]) == 2
    assert "is there already" in capsys.readouterr().err
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
