"""Export a trained model as a directory for transformers' from_pretrained, or its adapters as one for peft.

    plimsoll export --workdir=runs/tuned --to=tuned-hf
    plimsoll export --workdir=runs/tuned --to=tuned-adapter --adapter

Adapters are merged into the weights, unless --adapter exports only the adapters. The tokenizer's files are exported
too, and with a whole model also the generation_config.json of the directory that the run started from.
"""

import sys
from pathlib import Path

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, weights


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb. All checks come before the first file is written."""
    parser = weights.parser("export", __doc__)
    parser.add_argument("--to", metavar="DIR", required=True, help="folder to write; must not exist yet")
    parser.add_argument("--adapter", action="store_true", help="export only the LoRA adapters, for peft")
    args, overrides = weights.parse(parser, argv)
    if Path(args.to).expanduser().exists():
        raise FileExistsError(f"--to={args.to} already exists; choose another folder, or remove it")
    cli.check_output("to", args.to, is_folder=True)

    from plimsoll.api.export import export
    from plimsoll.framework.terminal.tables import human_bytes

    loaded = weights.load(args, overrides)
    exported = export(loaded, args.to, adapter=args.adapter, log=weights.log)
    print(f"{exported.folder}: {exported.architecture}, {human_bytes(exported.num_bytes)}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
