"""Write a trained model as a directory that transformers' from_pretrained loads, or its adapters as one for peft.

    python -m launch.export --workdir=runs/tuned --to=tuned-hf
    python -m launch.export --workdir=runs/tuned --to=tuned-adapter --adapter

Adapters are merged into the weights unless --adapter asks for them alone. The tokenizer's files go with them, and with
a whole model the generation_config.json of the directory that the run began with.
"""

import json
import sys
from pathlib import Path
from typing import Any

from framework.data.tokenizers import ByteTokenizer, Tokenizer
from framework.terminal.exit_codes import ExitCode
from launch import cli, weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@cli.main
def main(argv: list[str]) -> int:
    """Everything that can be refused is, before a file is written."""
    parser = weights.parser("export", __doc__)
    parser.add_argument("--to", metavar="DIR", required=True, help="must not be there yet")
    parser.add_argument("--adapter", action="store_true", help="the LoRA alone, as peft loads it")
    args, overrides = weights.parse(parser, argv)
    if Path(args.to).expanduser().exists():
        raise FileExistsError(f"--to={args.to} is there already; choose another, or remove it")

    from configs.families import of_model
    from framework.terminal.tables import human_bytes
    from framework.weights.export import export_adapters, export_model

    loaded = weights.load(args, overrides)
    model = loaded.experiment.language_model
    pretrained = loaded.experiment.pretrained
    tokenizer = loaded.experiment.data.tokenizer
    pretrained_facts = None if pretrained is None else pretrained.facts
    facts, family = of_model(loaded.config.model, pretrained_facts)
    params = loaded.program.weights(loaded.state, averaged=loaded.averaged)
    beside = _tokenizer(loaded)
    if not beside:
        kind = type(tokenizer).__name__
        weights.tell(f"no tokenizer files are written: data.tokenizer is {kind}, which has none")
    if args.adapter:
        base = "" if pretrained is None else pretrained.path
        export_adapters(args.to, model, params, family, base, beside=beside)
    else:
        run_facts: dict[str, Any] = {"eos_token_id": tokenizer.eos_id}
        # With a table of positions, the family has its length, under a name of its own.
        if loaded.config.model.embed.max_positions is None:
            run_facts["max_position_embeddings"] = loaded.experiment.data.seq_len
        if pretrained is not None and pretrained.generation:
            generation = _generation(pretrained.generation, tokenizer)
            beside["generation_config.json"] = _json(generation)
        # What the published model says has the last word.
        export_model(args.to, model, params, family, {**run_facts, **facts}, beside=beside)
    folder = Path(args.to).expanduser()
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {facts['architectures'][0]}, {human_bytes(size)}")
    return ExitCode.DONE


def _tokenizer(loaded: weights.Loaded) -> dict[str, bytes]:
    """{name: content} of the tokenizer's files. Those that transformers needs are made for a tokenizer that was trained
    by a run, or that has no files. Empty for a tokenizer that makes no text."""
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
    # Without this file, transformers does not know which class reads tokenizer.json, nor where
    # texts end.
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
        }
        files["tokenizer_config.json"] = _json(tokenizer_config)
    return files


def _generation(published: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json of the directory that the run began with. Texts end where the run's texts ended: with
    another data.tokenizer.eos_token, the published ids would let them run on."""
    end_ids = published.get("eos_token_id")
    # It may be one id or several.
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    if tokenizer.eos_id is None or tokenizer.eos_id in end_ids:
        return published
    return {**published, "eos_token_id": tokenizer.stop_ids}


def _json(facts: dict[str, Any]) -> bytes:
    """The content of a JSON file."""
    text = json.dumps(facts, indent=2)
    return f"{text}\n".encode()


if __name__ == "__main__":
    sys.exit(main())
