"""Directories of published weights: import, export, and every kind of bad directory. tests/peers compares logits."""

import json
from itertools import pairwise
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.config import diff
from plimsoll.framework.layers.lora import merge_adapters
from plimsoll.framework.layers.quantize import dequantize
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from plimsoll.framework.weights.directory import Directory
from plimsoll.framework.weights.export import export_adapters, export_model
from tools.peers.families import FAMILIES


def directory(folder: Path, name: str = "gemma2", *, dtype=np.float32, shards: int = 2, seed: int = 0, **facts) -> Path:
    """Write a directory with a family's small shape and random weights."""
    folder.mkdir(exist_ok=True)
    facts = FAMILIES[name].facts | facts
    (folder / "config.json").write_text(json.dumps(facts))
    family = families.find_family(facts)()
    model = family.model(facts).instantiate()
    rng, tensors = np.random.default_rng(seed), {}
    for path, sources in family.places(model).items():
        spec = model.base_specs[path]
        shape = spec.shape if spec.num_layers is None else spec.shape[1:]
        for part in [part for source in sources for part in source.parts(shape)]:
            values = rng.standard_normal(part.source.shape(part.ours))
            tensors[part.source.name] = values.astype(np.float32).astype(dtype)
    files, names = [f"model-{i}.safetensors" for i in range(shards)], list(tensors)
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
    index = {"weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def program(spec: str, devices: int = 1, **fields) -> Program:
    config = configs.load(spec)
    config.data.seq_len, config.data.global_batch_size = 16, 8
    for path, value in fields.items():
        config.set_path(path.replace("__", "."), value)
    return Program(config.instantiate(), jax.devices()[:devices])


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def assert_same_tensors(actual: Path, expected: Path) -> None:
    """Assert that both directories have the same tensor names and values."""
    before, after = tensors(expected), tensors(actual)
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key], err_msg=key)


@pytest.mark.pairs
@pytest.mark.parametrize("name", FAMILIES)
def test_import_then_export_round_trips(name, tmp_path):
    source = directory(tmp_path / "in", name)
    one = program(f"hf:{source}")
    state = one.experiment.pretrained.init(one)
    one.layout.check(state)
    config = configs.load(f"hf:{source}")
    tensor_sizes = [x.nbytes for x in tensors(source).values()]
    limit = max(*tensor_sizes, sum(tensor_sizes) // 5)
    for published in (config.pretrained.facts, None):  # the published config.json, and our own
        facts, family = families.export_config(config.model, published)
        to = tmp_path / f"out-{published is None}"
        export_model(to, one.experiment.model, one.weights(state), family, facts, shard_bytes=limit)
        sizes = [sum(x.nbytes for x in load_file(file).values()) for file in sorted(to.glob("*.safetensors"))]
        assert len(sizes) > 3
        assert all(size <= limit for size in sizes)
        assert all(a + b > limit for a, b in pairwise(sizes)), "two would have been one"
        # Without the published file, Phi-3's layers are exported as Mistral's, whose files do not fuse tensors.
        if published is not None or name != "phi3":
            assert_same_tensors(to, source)
        again = families.load_model_config(to)[0]
        assert diff(again, families.load_model_config(source)[0]) == []


@pytest.mark.pairs
@pytest.mark.parametrize("scope", ["layer", "model", "layers"])
def test_weights_are_equal_on_any_mesh_and_placement(scope, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 1024}  # stacks large enough to be offloaded
    source = directory(tmp_path / "in", dtype=ml_dtypes.bfloat16, torch_dtype="bfloat16", **sizes)
    layers, scope = scope == "layers", "layer" if scope == "layers" else scope
    fields = {"learner__scope": scope, "learner__ema": 0.9, "learner__rules": []}
    if scope == "layer":
        fields |= {"memory__update": "streamed", "memory__optimizer_state": "pinned_host"}
        fields |= {"memory__parameters": "pinned_host"}
    if layers:
        fields |= {"memory__update": "layer_programs", "memory__parameters": "pinned_host:0.5"}
    one = program(f"hf:{source}", **fields)
    eight = program(f"hf:{source}", 8, mesh__data=2, mesh__fsdp=2, mesh__model=2, **fields)
    alone, together = (p.experiment.pretrained.init(p) for p in (one, eight))
    eight.layout.check(together)
    offloaded = {leaf.path for leaf in eight.layout if leaf.spec.memory_kind == "pinned_host"}
    assert any(path.endswith("master/block0/mlp/up/weight") for path in offloaded) == (scope == "layer")
    assert any(path.startswith("parameter/stack") for path in offloaded) == (scope == "layer")
    alone, together = flatten(one.backend.to_checkpoint(alone)), flatten(eight.backend.to_checkpoint(together))
    for path in alone:
        np.testing.assert_array_equal(alone[path], together[path], err_msg=path)
    masters = [path for path in alone if "/master/" in path]
    assert masters
    for path in masters if scope == "layer" else ():  # one optimizer for the whole model has unstacked layers
        found = [p for p in alone if p.startswith("parameter/") and alone[p].shape == alone[path].shape]
        values = [np.asarray(alone[p], np.float32) for p in found]
        assert any(np.array_equal(np.asarray(alone[path]), value) for value in values), path
    assert alone["ema/embed/token"].dtype == np.float32
    assert np.abs(alone["ema/embed/token"]).max() > 1


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_dtype_is_the_tensors_dtype(dtype, tmp_path):
    """transformers reads `dtype`, or `torch_dtype` without it: the export keeps neither value of the source."""
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    one = program(f"hf:{directory(tmp_path / 'in', 'llama', torch_dtype=other)}", model__param_dtype=dtype)
    weights, published = one.weights(one.experiment.pretrained.init(one)), one.experiment.pretrained
    del published.facts["torch_dtype"]
    for number, fields in enumerate(({"dtype": other}, {"torch_dtype": other}, {})):
        to = tmp_path / f"out-{number}"
        export_model(to, one.experiment.model, weights, published.family, published.facts | fields)
        written = json.loads((to / "config.json").read_text())
        assert written["dtype"] == written["torch_dtype"] == dtype
        assert {str(array.dtype) for array in tensors(to).values()} == {dtype}


@pytest.mark.pairs
def test_adapters_start_at_zero_on_any_base_storage(tmp_path):
    source = directory(tmp_path / "in", "llama", intermediate_size=64, hidden_size=64)
    weights = {}  # the weights of the first program, equal to the directory's
    for spec, base in (("lora", None), ("qlora", "nf4")):
        lora = program(f"{spec}:{source}")
        state = lora.experiment.pretrained.init(lora)
        lora.layout.check(state)
        assert {path.rsplit("/", 1)[1] for path in flatten(state.parameter)} == {"lora_a", "lora_b"}
        model, own = lora.experiment.model, lora.weights(state)
        merged = flatten(merge_adapters(model, own))
        if base is None:
            weights, published = merged, lora.experiment.pretrained
            export_model(tmp_path / "out", model, own, published.family, published.facts)
            assert_same_tensors(tmp_path / "out", source)
        exact = {path for path in merged if base is None or not path.endswith("weight")}
        for path in exact:
            np.testing.assert_array_equal(merged[path], weights[path], err_msg=path)
        for path in merged.keys() - exact:
            parts = flatten(own)
            stored = {name: parts[f"{path}/{name}"] for name in ("codes", "scales")}
            np.testing.assert_array_equal(merged[path], dequantize(stored, base, np.float32), err_msg=path)
            error = np.abs(np.asarray(merged[path]) - weights[path]).max() / np.abs(weights[path]).max()
            assert 0.01 < error < 0.2, path


def test_adapters_as_peft_wants_them(tmp_path):
    source = directory(tmp_path / "in", "llama")
    lora = program(f"lora:{source}", model__lora__targets="query|down")
    state = lora.experiment.pretrained.init(lora)
    model, family = lora.experiment.model, lora.experiment.pretrained.family
    export_adapters(tmp_path / "out", model, lora.weights(state), family, str(source))
    facts = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (facts["r"], facts["lora_alpha"], facts["peft_type"]) == (16, 32.0, "LORA")
    assert "model.layers.1.self_attn.q_proj" in facts["target_modules"]
    arrays = tensors(tmp_path / "out")
    assert len(arrays) == 2 * len(facts["target_modules"]) == 2 * 2 * 2
    array = arrays["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    np.testing.assert_array_equal(array, state.parameter["stack"]["block0"]["mlp"]["down"]["lora_a"][1].T)
    fused = program(f"lora:{directory(tmp_path / 'gpt2', 'gpt2')}")
    abstract = fused.layout.abstract()  # reads no values
    with pytest.raises(ValueError, match=r"c_attn\.weight holds several"):
        export_adapters(
            tmp_path / "no", fused.experiment.model, fused.weights(abstract), fused.experiment.pretrained.family, "x"
        )
    assert not list(tmp_path.glob("*no*"))
    plain = program(f"hf:{source}")
    with pytest.raises(ValueError, match="no adapters"):
        export_adapters(tmp_path / "no", plain.experiment.model, {}, family, "x")
    with pytest.raises(FileExistsError, match="already exists"):
        export_adapters(tmp_path / "out", model, lora.weights(state), family, "x")


PUBLISHED = {
    "llama2-7b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "vocab_size": 32000, "hidden_act": "silu",
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 152064,
    },
    "gpt2-124m": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_named_ones(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ours, published = configs.load(name).model, configs.load(f"hf:{tmp_path}").model
    differences = [
        change
        for change in diff(ours, published)
        if change[0] not in ("vocab_size", "stack.pattern.0.attention.output_bias", "stack.unroll")
    ]
    assert differences == []
    assert families.export_config(ours)[0]["architectures"] == PUBLISHED[name]["architectures"]


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["stdlib-tiny", "gpt2-1.5b", "llama3-8b", "llama2-70b", "qwen2.5-0.5b"])
def test_named_configs_can_be_exported(name):
    model = configs.load(name).model
    facts, family = families.export_config(model)
    assert families.export_config(family.model(facts))[0] == facts


def test_models_unsupported_by_transformers_are_not_exported():
    model = configs.load("llama2-7b").model
    model.head.softcap = 30.0
    with pytest.raises(ValueError, match=r"no family .* head\.softcap = 30\.0"):
        families.export_config(model)


def write_wrong_config(folder, **facts):
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in {**FAMILIES["llama"].facts, **facts}.items() if v})
    )


def truncate_shard(folder):
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    home = json.loads(file.read_text())["weight_map"]
    change(home)
    file.write_text(json.dumps({"weight_map": home}))


def replace_tensors(folder, change):
    for file in folder.glob("*.safetensors"):
        arrays = load_file(file)
        change(arrays)
        save_file(arrays, file)
    home = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    edit_index(folder, lambda old: (old.clear(), old.update(home)))


NORM = "model.norm.weight"
WRONG = {
    "unknown architecture": (
        lambda d: write_wrong_config(d, architectures=["MambaForCausalLM"]),
        "unknown .* MambaForCausalLM",
    ),
    "code of its own": (lambda d: write_wrong_config(d, auto_map={"AutoModel": "x.Y"}), "never executed"),
    "a field is missing": (lambda d: write_wrong_config(d, hidden_size=None), "no field 'hidden_size'"),
    "an unknown scaling": (
        lambda d: write_wrong_config(d, rope_scaling={"rope_type": "dynamic", "factor": 2}),
        "rope_type",
    ),
    "an unknown activation": (lambda d: write_wrong_config(d, hidden_act="xielu"), "hidden_act = 'xielu'"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
    "truncated": (truncate_shard, r"model-1\.safetensors: damaged"),
    "an index of nothing": (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "not an index of shards"),
    "an index that lies": (lambda d: edit_index(d, lambda home: home.pop(NORM)), f"disagrees with .* {NORM}"),
    "a shard elsewhere": (
        lambda d: edit_index(d, lambda home: home.update(x="../x")),
        "is not a file in the directory",
    ),
    "a shard is missing": (lambda d: (d / "model-0.safetensors").unlink(), r"model-0\.safetensors"),
    "a tensor is missing": (lambda d: replace_tensors(d, lambda a: a.pop(NORM, None)), f"missing +{NORM} \\[32\\]"),
    "another shape": (
        lambda d: replace_tensors(d, lambda a: a.update({NORM: np.zeros(8, np.float32)}) if NORM in a else None),
        f"shape +{NORM} \\[8\\], expected \\[32\\]",
    ),
    "an unexpected one": (
        lambda d: replace_tensors(
            d, lambda a: a.update({"model.more": np.zeros(8, np.float32)}) if NORM in a else None
        ),
        r"unexpected +model\.more",
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", WRONG)
def test_a_bad_directory_is_one_clear_error(case, tmp_path):
    damage, message = WRONG[case]
    source = directory(tmp_path / "in", "llama")
    damage(source)

    def use():
        one = program(f"hf:{source}")
        return one.experiment.pretrained.init(one)

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        use()


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"].facts))
    (tmp_path / "pytorch_model.bin").touch()
    one = program(f"hf:{tmp_path}")  # enough for a plan
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        one.experiment.pretrained.init(one)
    with pytest.raises(FileNotFoundError, match="no file"):
        configs.load(f"hf:{tmp_path / 'nowhere'}")


@pytest.mark.pairs
def test_names_without_the_models_prefix(tmp_path):
    """OpenAI's published GPT-2 directories have such names, and also contain masks."""
    source = directory(tmp_path / "in", "gpt2", shards=1)
    before = tensors(source)
    arrays = {name.removeprefix("transformer."): x for name, x in before.items()}
    (file,) = source.glob("*.safetensors")
    file.unlink()
    (source / "model.safetensors.index.json").unlink()
    save_file({**arrays, "h.0.attn.bias": np.zeros((1, 1, 4, 4), np.float32)}, source / "model.safetensors")
    one = program(f"hf:{source}")
    weights, published = one.weights(one.experiment.pretrained.init(one)), one.experiment.pretrained
    export_model(tmp_path / "out", one.experiment.model, weights, published.family, published.facts)
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert "h.0.attn.bias" in Directory(source).home
