"""Exports a model as a directory for transformers' from_pretrained, or its adapters as a directory for peft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.api.loaded import LoadedModel
from plimsoll.framework import families
from plimsoll.framework.data.tokenizers import ByteTokenizer, Tokenizer
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.weights.export import export_adapters, export_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class ExportResult(NamedTuple):
    """The result of an export."""

    folder: Path
    architecture: str  # class name in transformers
    num_bytes: int


def export(loaded: LoadedModel, to: str, *, adapter: bool, log: Callable[[str], None]) -> ExportResult:
    """Write a model. All checks run before any file is written.

    Args:
        loaded: loaded model.
        to: output directory; it must not exist yet.
        adapter: write only the LoRA adapters instead of merging them into the weights.
        log: receives a line if no tokenizer files are written.

    Raises:
        FileExistsError: the directory exists.
        ValueError: the model does not belong to a family that transformers supports, or has no adapters.
    """
    folder = Path(to).expanduser()
    refuse_existing(folder)
    model = loaded.experiment.language_model
    pretrained = loaded.experiment.pretrained
    tokenizer = loaded.experiment.data.tokenizer
    pretrained_facts = None if pretrained is None else pretrained.facts
    facts, family = families.export_config(loaded.config.model, pretrained_facts)
    classes = getattr(loaded.experiment.data, "classes", None)
    if isinstance(model.head, ScoreHead) and classes is not None:
        facts = {**facts, "id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    params = loaded.program.weights(loaded.state, averaged=loaded.averaged)
    extra_files = _tokenizer(loaded)
    if not extra_files:
        kind = type(tokenizer).__name__
        log(f"no tokenizer files are written: data.tokenizer is {kind}, which has none")
    if adapter:
        base = "" if pretrained is None else pretrained.path
        export_adapters(to, model, params, family, base, extra_files=extra_files)
    else:
        run_facts: dict[str, Any] = {"eos_token_id": tokenizer.eos_id}
        # With learned positions, the family writes the length of the table under its own name.
        if loaded.config.model.embed.max_positions is None:
            run_facts["max_position_embeddings"] = loaded.experiment.data.seq_len
        if pretrained is not None and pretrained.generation:
            generation = _generation(pretrained.generation, tokenizer)
            extra_files["generation_config.json"] = _json(generation)
        # The facts of the published model take precedence.
        export_model(to, model, params, family, {**run_facts, **facts}, extra_files=extra_files)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return ExportResult(folder, facts["architectures"][0], size)


def refuse_existing(folder: Path) -> None:
    """Raise FileExistsError if the folder exists."""
    if folder.exists():
        raise FileExistsError(f"--to={folder} already exists; choose another, or remove it")


def _tokenizer(loaded: LoadedModel) -> dict[str, bytes]:
    """Return {name: content} of the tokenizer's files; {} for a tokenizer without text.

    Files that transformers needs are generated for a tokenizer that was trained by a run, or that has no files.
    """
    tokenizer = loaded.experiment.data.tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        files = {"tokenizer.json": tokenizer.library_file()}
    elif not tokenizer.has_text:
        files = {}
    else:
        files = {}
        for name in TOKENIZER_FILES:
            path = loaded.folder / name
            if path.is_file():
                files[name] = path.read_bytes()
    # Without this file, transformers does not know which class reads tokenizer.json, or which token ends a text.
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
        files["tokenizer_config.json"] = _json(tokenizer_config)
    return files


def _generation(published: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of generation_config.json, from the directory that the run started from.

    The end tokens are those of the run: if data.tokenizer.eos_token was changed, generation would not stop at the
    published ids.
    """
    end_ids = published.get("eos_token_id")
    # One id or a list of ids.
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    if tokenizer.eos_id is None or tokenizer.eos_id in end_ids:
        return published
    return {**published, "eos_token_id": tokenizer.stop_ids}


def _json(facts: dict[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    text = json.dumps(facts, indent=2)
    return f"{text}\n".encode()
