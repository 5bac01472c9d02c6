"""Write a trained model as a directory that transformers' from_pretrained loads, or its adapters as one for peft.

    python -m launch.export --workdir=runs/tuned --to=tuned-hf
    python -m launch.export --workdir=runs/tuned --to=tuned-adapter --adapter

Adapters are merged into the weights unless --adapter asks for them alone. The tokenizer's files go with the weights.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from launch import cli, weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@cli.main
def main(argv: list[str]) -> int:
    """Finds the family first, so that a model without one is refused before anything is read."""
    parser = weights.parser("export", __doc__)
    parser.add_argument("--to", metavar="DIR", required=True, help="must not be there yet")
    parser.add_argument("--adapter", action="store_true", help="the LoRA alone, as peft loads it")
    args, overrides = weights.parse(parser, argv)
    if Path(args.to).expanduser().exists():
        raise FileExistsError(f"--to={args.to} is there already; choose another, or remove it")

    from configs.families import of_model
    from framework.export import export_adapters, export_model
    from framework.metrics.tables import human_bytes

    loaded = weights.load(args, overrides)
    model, pretrained = loaded.experiment.model, loaded.experiment.pretrained
    facts, family = of_model(loaded.config.model, None if pretrained is None else pretrained.facts)
    params = loaded.program.weights(loaded.state, averaged=loaded.averaged)
    if args.adapter:
        export_adapters(args.to, model, params, family, "" if pretrained is None else pretrained.path)
    else:
        export_model(args.to, model, params, family, {**_generic(loaded), **facts})
    to = Path(args.to).expanduser()
    for name in TOKENIZER_FILES:
        file = Path(args.workdir or args.hf).expanduser() / name
        if file.is_file():
            shutil.copyfile(file, to / name)
    if (to / "tokenizer.json").is_file() and not (to / "tokenizer_config.json").is_file():
        eos = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": loaded.tokenizer.eos_token}
        (to / "tokenizer_config.json").write_text(json.dumps(eos, indent=2))
    size = sum(file.stat().st_size for file in to.iterdir())
    print(f"{to}: {facts['architectures'][0]}, {human_bytes(size)}")
    return 0


def _generic(loaded: weights.Loaded) -> dict[str, Any]:
    """config.json's fields that no layer knows; a published model's own take precedence."""
    ids = {"eos_token_id": loaded.experiment.data.tokenizer.eos_id}
    return {"max_position_embeddings": loaded.experiment.data.seq_len, **ids}


if __name__ == "__main__":
    sys.exit(main())
