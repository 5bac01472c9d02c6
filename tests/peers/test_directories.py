"""Directories that transformers and peft write and read: imported and exported models compute the same."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.program.program import Program
from plimsoll.framework.weights.export import export_adapters, export_model
from tools.peers.families import FAMILIES, SEQ_LEN
from tools.peers.recording import Inputs

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::peft"),
]
SEED = 11
INPUTS = Inputs.draw(SEED)


def program(spec: str, **fields) -> Program:
    config = configs.load(spec)
    config.data.seq_len, config.data.global_batch_size = SEQ_LEN, 2
    for path, value in fields.items():
        config.set_path(path.replace("__", "."), value)
    return Program(config.instantiate(), jax.devices()[:1])


def logits(one: Program, state) -> np.ndarray:
    context = one.evaluation_context(INPUTS.batch())
    return np.asarray(one.experiment.model.logits(one.weights(state), context, {}))


def their_logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(INPUTS.windows[:, :SEQ_LEN], dtype=torch.int64)).logits.numpy()


def load_model(folder: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    # As in `theirs.build`: experts run one after the other, so that their sums are rounded equally.
    model.config._experts_implementation = "eager"
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export(name, theirs, tmp_path):
    model = theirs.build(FAMILIES[name], SEED)
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    one = program(f"hf:{tmp_path / 'in'}")
    state = one.experiment.pretrained.init(one)
    expected = their_logits(model)
    assert np.abs(logits(one, state) - expected).max() <= 1e-5 * np.abs(expected).max()

    config = configs.load(f"hf:{tmp_path / 'in'}")
    for published in (config.pretrained.facts, None):
        facts, family = families.export_config(config.model, published)
        out = tmp_path / f"out-{published is None}"
        export_model(out, one.experiment.model, one.weights(state), family, facts, shard_bytes=50_000)
        again = load_model(out)
        assert type(again) is type(model) or published is None
        ours, before = dict(again.named_parameters()), dict(model.named_parameters())
        # A Phi-3 model that is also a model of another family is exported with separate matrices.
        assert ours.keys() == before.keys() or published is None
        for key in before.keys() & ours.keys():
            assert bool((ours[key] == before[key]).all()), key
        limit = 0.0 if published else 1e-6  # the same function in another family may round differently
        assert np.abs(their_logits(again) - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("experts", ["separate", "together"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_language_model_of_a_multimodal_model(name, experts, theirs, tmp_path):
    """Published models have the layers of the vision model too, and all experts of a layer in two tensors."""
    import torch
    import transformers

    text = {**FAMILIES[name].facts, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    kind = text["model_type"].removesuffix("_text")
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    torch.manual_seed(SEED)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "in")
    if experts == "together":
        join_experts(tmp_path / "in" / "model.safetensors")
    expected = their_logits(load_model(tmp_path / "in"))
    one = program(f"hf:{tmp_path / 'in'}")
    state = one.experiment.pretrained.init(one)
    assert np.abs(logits(one, state) - expected).max() <= 1e-5 * np.abs(expected).max()
    # The vision model was not read, so the language model is written alone.
    config = configs.load(f"hf:{tmp_path / 'in'}")
    facts, family = families.export_config(config.model, config.pretrained.facts)
    assert facts["architectures"] == FAMILIES[name].facts["architectures"]
    export_model(tmp_path / "out", one.experiment.model, one.weights(state), family, facts)
    assert np.array_equal(their_logits(load_model(tmp_path / "out")), expected)


def join_experts(file: Path) -> None:
    """Write the experts of each layer as gate_up_proj [E, 2F, D] and down_proj [E, D, F]."""
    tensors = load_file(file)
    groups: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for tensor in [tensor for tensor in tensors if ".experts." in tensor]:
        parent, _, rest = tensor.partition(".experts.")
        number, projection, _ = rest.split(".")
        groups.setdefault(f"{parent}.experts", {})[int(number), projection] = tensors.pop(tensor)
    for parent, parts in groups.items():
        numbers = sorted({number for number, _ in parts})
        tensors[f"{parent}.down_proj"] = np.stack([parts[number, "down_proj"] for number in numbers])
        joined = [np.concatenate([parts[number, "gate_proj"], parts[number, "up_proj"]]) for number in numbers]
        tensors[f"{parent}.gate_up_proj"] = np.stack(joined)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("named", ["dtype", "torch_dtype"])
def test_transformers_reads_the_tensor_dtype(named, theirs, tmp_path):
    """This holds for any dtype in the published config.json, under either name."""
    import torch

    model = theirs.build(FAMILIES["llama"], SEED)
    model.save_pretrained(tmp_path / "in")
    one = program(f"hf:{tmp_path / 'in'}", model__param_dtype="bfloat16")
    params, published = one.weights(one.experiment.pretrained.init(one)), one.experiment.pretrained
    facts = {key: value for key, value in published.facts.items() if key != "dtype"} | {named: "float32"}
    export_model(tmp_path / "out", one.experiment.model, params, published.family, facts)
    again = load_model(tmp_path / "out")
    assert again.dtype == again.config.dtype == torch.bfloat16
    for name, parameter in again.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert bool((parameter == model.get_parameter(name).bfloat16()).all()), name


def test_byte_tokenizer_matches_theirs(theirs, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = ByteTokenizer()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.library_file())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token})
    )
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "a fox, é 🚢 \n\x00 \u2581" + "".join(map(chr, range(0x300)))
    assert again(text)["input_ids"] == tokenizer.encode_batch([text])[0].tolist()
    assert again.decode(again(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert (again.eos_token_id, len(again)) == (tokenizer.eos_id, tokenizer.vocab_size)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gemma2"])
def test_adapters(name, theirs, tmp_path):
    import peft

    base = tmp_path / "in"
    theirs.build(FAMILIES[name], SEED).save_pretrained(base)
    one = program(f"lora:{base}", model__lora__dropout=0.0, learner__optimizer__learning_rate=1e-2)
    state = one.experiment.pretrained.init(one)
    first = logits(one, state)
    for _ in range(5):
        state, _ = one.step(state, one.put(INPUTS.pack_batch()))
    ours, params, family = logits(one, state), one.weights(state), one.experiment.pretrained.family
    assert np.abs(ours - first).max() > 0.5
    export_adapters(tmp_path / "adapter", one.experiment.model, params, family, str(base))
    facts, family = families.export_config(configs.load(f"hf:{base}").model)
    export_model(tmp_path / "merged", one.experiment.model, params, family, facts)
    for model in (
        peft.PeftModel.from_pretrained(load_model(base), tmp_path / "adapter").eval(),
        load_model(tmp_path / "merged"),
    ):
        assert np.abs(their_logits(model) - ours).max() <= 1e-5 * np.abs(ours).max()
