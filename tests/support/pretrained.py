"""Directories in the format of published models: small tokenizers with the chat templates of four families."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "the quick brown fox jumps over a lazy dog",
    "who are you? I am a model, and you?",
    "def f(x): return x + 1",
] * 30

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}"
    "{% if loop.index0 == 0 %}{% set header = bos_token + header %}{% endif %}{{ header }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}{% generation %}"
    "{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# family: (kind of tokenizer, its special tokens, bos, eos, template)
FAMILIES: dict[str, tuple[str, list[str], str | None, str, str]] = {
    "chatml": ("bytes", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>", CHATML),
    "llama3": (
        "bytes",
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
        LLAMA3,
    ),
    "mistral": ("pieces", ["<unk>", "<s>", "</s>"], "<s>", "</s>", MISTRAL),
    "gemma": ("gemma", ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", GEMMA),
}


def without_generation(template: str) -> str:
    """Return the template without generation tags, as most models publish it."""
    for tag in ("generation", "endgeneration"):
        template = template.replace("{%- " + tag + " %}", "").replace("{% " + tag + " %}", "")
    return template


def library(kind: str, special: list[str]) -> Tokenizer:
    """Train a tokenizer: byte-level BPE ("bytes"), BPE with byte fallback ("pieces", "gemma"), or "unigram".

    "pieces" is Mistral's form and "gemma" is Gemma's.
    """
    made = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(byte_fallback=kind != "bytes"))
    options: dict[str, Any] = {"show_progress": False, "special_tokens": special, "vocab_size": 400}
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(
            TEXTS, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
        )
        return made
    if kind == "unigram":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        made.train_from_iterator(TEXTS, trainers.UnigramTrainer(unk_token="<unk>", **options))
        return made
    every = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(**{**options, "special_tokens": [*special, *every]}))
    facts = json.loads(trained.to_str())
    facts["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    facts["added_tokens"] = [token for token in facts["added_tokens"] if token["content"] in special]
    made = Tokenizer.from_str(json.dumps(facts))
    replace, strip = normalizers.Replace(" ", "\u2581"), [decoders.Strip(" ", 1, 0)] if kind == "pieces" else []
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if strip else replace  # pyright: ignore
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


def write(folder: Path, family: str, **config: Any) -> Path:
    """Write the family's tokenizer.json and tokenizer_config.json; `config` overrides fields of the latter."""
    kind, special, bos, eos, template = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    library(kind, special).save(str(folder / "tokenizer.json"))
    facts = {"bos_token": bos, "eos_token": {"content": eos, "lstrip": False}, "chat_template": template, **config}
    if kind != "bytes":
        facts.setdefault("unk_token", "<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


CHATS = [
    [{"role": "user", "content": "who are you?"}, {"role": "assistant", "content": "I am a model"}],
    [
        {"role": "user", "content": "  def f(x)  "},
        {"role": "assistant", "content": "return x + 1\n\n\treturn é 🚢 "},
        {"role": "user", "content": "你好\n"},
        {"role": "assistant", "content": " the lazy dog jumps"},
    ],
    [
        {"role": "user", "content": "<b>&amp;"},
        {"role": "assistant", "content": "|>"},
        {"role": "user", "content": "and?"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y " * 40}],
]
