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
from launch import cli, weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


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
    model, pretrained = loaded.experiment.language_model, loaded.experiment.pretrained
    facts, family = of_model(loaded.config.model, None if pretrained is None else pretrained.facts)
    params = loaded.program.weights(loaded.state, averaged=loaded.averaged)
    beside = _tokenizer(loaded)
    if not beside:
        kind = type(loaded.experiment.data.tokenizer).__name__
        weights.tell(f"no tokenizer files are written: data.tokenizer is {kind}, which has none")
    if args.adapter:
        base = "" if pretrained is None else pretrained.path
        export_adapters(args.to, model, params, family, base, beside=beside)
    else:
        more: dict[str, Any] = {"eos_token_id": loaded.experiment.data.tokenizer.eos_id}
        if loaded.config.model.embed.max_positions is None:  # else the family has it, under a name of its own
            more["max_position_embeddings"] = loaded.experiment.data.seq_len
        if pretrained is not None and pretrained.generation:
            generation = _generation(pretrained.generation, loaded.experiment.data.tokenizer)
            beside["generation_config.json"] = _json(generation)
        export_model(args.to, model, params, family, {**more, **facts}, beside=beside)
    to = Path(args.to).expanduser()
    size = sum(file.stat().st_size for file in to.iterdir())
    print(f"{to}: {facts['architectures'][0]}, {human_bytes(size)}")
    return 0


def _tokenizer(loaded: weights.Loaded) -> dict[str, bytes]:
    """The tokenizer's files; for one that was trained here, or has none here, those that transformers wants. Empty
    where it has none."""
    tokenizer, folder = loaded.experiment.data.tokenizer, loaded.folder
    if isinstance(tokenizer, ByteTokenizer):
        files = {"tokenizer.json": tokenizer.library_file()}
    elif not tokenizer.has_text:
        files = {}
    else:
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        files["tokenizer_config.json"] = _json(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
        )
    return files


def _generation(published: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json of the directory that the run began with. Texts end where the run's texts ended: with
    another data.tokenizer.eos_token, the published ids would let them run on."""
    ends = published.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_id is None or tokenizer.eos_id in ends:
        return published
    return {**published, "eos_token_id": tokenizer.stop_ids}


def _json(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, indent=2) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
