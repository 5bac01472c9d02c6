"""Tokenize a corpus into token files (.bin with a sidecar and a document index) that TokenMemmap reads.

    python -m launch.prepare --config=NAME [--config.data.source...=...] --out=DIR
    python -m launch.prepare --source=jsonl --paths='raw/*.jsonl.gz' --tokenizer=bpe --vocab_size=32768 --out=DIR

The training source becomes DIR/train-00000.bin and on (a mixture's parts train.0-, train.1-, ...), each validation set
DIR/validation-NAME-00000.bin; the tokenizer goes beside them. Everything is written in a temporary folder that is
renamed at the end, so a killed run leaves nothing under DIR. May import: framework, launch.cli; rich lazily.
"""

import argparse
import json
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from framework.config import Config, config_for
from framework.data.encode import Progress, write_tokens
from framework.data.leaves import located
from framework.data.pipeline import DataPipeline
from framework.data.sources import JsonLines, Parquet, StdlibSource, TextFiles, TokenMemmap
from framework.data.storage import FileHashes, clear_leftovers, find, temporary_name
from framework.data.tokenizers import BPETokenizer, ByteTokenizer
from launch import cli

MANIFEST = "prepare.json"
_SECONDS_PER_LINE = 5.0
_FLAGS = ("source", "paths", "validation_paths", "field", "separator", "tokenizer", "vocab_size")


@cli.main
def main(argv: list[str]) -> int:
    """Runs the verb; 0 when all token files are in place."""
    parser = cli.Parser("prepare", __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; must not exist, or be empty")
    parser.add_argument("--force", action="store_true", help="replace DIR when an earlier run of this verb wrote it")
    parser.add_argument("--shard_tokens", type=_positive, default=1 << 28, metavar="N", help="tokens per file (2^28)")
    plain = parser.add_argument_group("without --config")
    plain.add_argument("--source", help="text, jsonl, parquet or stdlib")
    plain.add_argument("--paths", nargs="+", metavar="PATH", help="training files: paths, globs, fsspec URLs")
    plain.add_argument("--validation_paths", nargs="+", metavar="PATH", help="validation files, of the same kind")
    plain.add_argument("--field", help="jsonl: the key of the text; parquet: its column (text)")
    plain.add_argument("--separator", help="text: what stands between the documents of one file")
    plain.add_argument("--tokenizer", help="bytes, bpe (trained on the corpus), or a tokenizer.json")
    plain.add_argument("--vocab_size", type=_positive, metavar="N", help="bpe, or a tokenizer.json: ids in all")
    spec, overrides, rest = cli.split(argv)
    if spec is None and not overrides:
        args = parser.parse_flags(rest)
        data = _data_from_flags(args)
    else:
        command = parser.parse(argv)
        args, data = command.args, command.config.data
        if given := [flag for flag in _FLAGS if getattr(args, flag) is not None]:
            raise cli.UsageError(f"--{given[0]} goes without --config; with one, override config.data instead")
    prepare(data, Path(args.out).expanduser(), force=args.force, shard_tokens=args.shard_tokens)
    return 0


def prepare(data: Config, out: Path, *, force: bool, shard_tokens: int) -> None:
    """Writes the token files of every source of `data` (a config of DataPipeline) into the folder `out`.

    Raises:
        FileExistsError: `out` holds something, and not `force`, or it holds more than an earlier run wrote.
        FileNotFoundError, PermissionError, ValueError: as DataPipeline.setup.
    """
    _check_replaceable(out, force)
    pipeline: DataPipeline = data.instantiate()
    out.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(out.parent)
    temporary = out.with_name(temporary_name(out.name))
    temporary.mkdir()
    try:
        tokenizer = pipeline.tokenizer
        pipeline.prepare_tokenizer(temporary, write=True)
        if isinstance(tokenizer, BPETokenizer) and tokenizer.path is not None:
            file = find(tokenizer.path)[0]
            (temporary / "tokenizer.json").write_bytes(file.read(0, file.size()))
        records = {}
        with _Reporter() as report:
            for leaf in [*pipeline.train_leaves, *pipeline.validation_leaves.values()]:
                name = leaf.name if leaf in pipeline.train_leaves else f"validation-{leaf.name}"
                with located(leaf.label):
                    if isinstance(leaf.source, TokenMemmap):
                        raise ValueError(f"{leaf.source.path} holds tokens already; there is nothing to prepare")
                    write_tokens(leaf.source, tokenizer, temporary, name, shard_tokens=shard_tokens, report=report)
                    records[name] = leaf.source.contents(FileHashes()).record()
        files = sorted([*(path.name for path in temporary.iterdir()), MANIFEST])
        manifest = {"data": data.to_dict(), "sources": records, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _put_in_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _print_use(list(records), out)


def _check_replaceable(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out={out} is a file; name a folder")
    there = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if not there:
        return
    if not force:
        raise FileExistsError(f"--out={out} holds {len(there)} files already; --force replaces what this verb wrote")
    manifest = out / MANIFEST
    ours = set(json.loads(manifest.read_text())["files"]) if manifest.exists() else set()
    if foreign := [name for name in there if name not in ours]:
        raise FileExistsError(f"--out={out} holds {foreign[0]}, which this verb did not write: --force leaves it alone")


def _put_in_place(temporary: Path, out: Path) -> None:
    """Renames the whole folder. What it replaces is moved aside first and removed last, so no kill costs the old
    files."""
    aside = out.with_name(f"{out.name}.replaced-{uuid.uuid4().hex[:8]}")
    replaces = out.exists()
    if replaces:
        os.rename(out, aside)
    os.rename(temporary, out)
    if replaces:
        shutil.rmtree(aside)


def _data_from_flags(args: argparse.Namespace) -> Config:
    if args.source is None:
        raise cli.UsageError("expected --config=NAME, or --source=text|jsonl|parquet|stdlib with --paths")
    kind = cli.choose("source", args.source, ["text", "jsonl", "parquet", "stdlib"])
    if kind == "stdlib":
        source = config_for(StdlibSource)
        validation = {"stdlib": config_for(StdlibSource, split="validation")}
    else:
        if args.paths is None:
            raise cli.UsageError(f"--source={kind} needs --paths")
        source = _file_source(kind, args.paths, args)
        validation = {"main": _file_source(kind, args.validation_paths, args)} if args.validation_paths else {}
    # The shape of a batch does not matter here: tokens are written as one stream.
    return config_for(
        DataPipeline, source=source, validation=validation, tokenizer=_tokenizer(args), seq_len=1, global_batch_size=1
    )


def _file_source(kind: str, paths: list[str], args: argparse.Namespace) -> Config:
    if args.field is not None and kind == "text":
        raise cli.UsageError("--field goes with --source=jsonl or parquet")
    if args.separator is not None and kind != "text":
        raise cli.UsageError("--separator goes with --source=text")
    if kind == "text":
        return config_for(TextFiles, paths=paths, separator=args.separator)
    field = args.field or "text"
    return (
        config_for(JsonLines, paths=paths, field=field)
        if kind == "jsonl"
        else config_for(Parquet, paths=paths, column=field)
    )


def _tokenizer(args: argparse.Namespace) -> Config:
    if args.tokenizer is None:
        raise cli.UsageError("--tokenizer is required: bytes, bpe, or a tokenizer.json")
    if args.tokenizer == "bytes":
        return config_for(ByteTokenizer)
    if args.vocab_size is None:
        raise cli.UsageError(f"--tokenizer={args.tokenizer} needs --vocab_size")
    path = None if args.tokenizer == "bpe" else args.tokenizer
    return config_for(BPETokenizer, vocab_size=args.vocab_size, path=path)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer > 0, given {text!r}")
    return int(text)


def _print_use(names: list[str], out: Path) -> None:
    print(f"wrote {out}; to train on it:")
    for name in names:
        role = f"validation.{name.removeprefix('validation-')}" if name.startswith("validation-") else "source"
        if name.startswith("train."):
            print(f"  a part of data.source.sources: config_for(TokenMemmap, path={str(out / f'{name}-*.bin')!r})")
        else:
            print(f"  --config.data.{role}=framework.data.sources.TokenMemmap")
            print(f"  --config.data.{role}.path='{out / name}-*.bin'")
    if (out / "tokenizer.json").exists():
        print(f"  --config.data.tokenizer.path={out / 'tokenizer.json'}")


class _Reporter:
    """Shows progress: a bar on a terminal, otherwise a line now and then. Called with each Progress."""

    def __enter__(self) -> "_Reporter":
        self._last = time.monotonic()
        self._started: dict[str, float] = {}
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        if sys.stderr.isatty():
            from rich.console import Console  # imported here: a mistake on the command line is answered without it
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.fields[counts]}")
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), text, TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        started = self._started.setdefault(progress.name, self._last)
        if self._bar is not None:
            if progress.name not in self._tasks:
                self._tasks[progress.name] = self._bar.add_task(progress.name, total=None, counts="")
            self._bar.update(
                self._tasks[progress.name],
                completed=progress.read,
                total=progress.total or None,
                counts=_counts(progress, started),
            )
        elif progress.done or time.monotonic() - self._last > _SECONDS_PER_LINE:
            self._last = time.monotonic()
            share = f"{progress.read / progress.total:4.0%}, " if progress.total else ""
            print(f"{progress.name}: {share}{_counts(progress, started)}", file=sys.stderr, flush=True)


def _counts(progress: Progress, started: float) -> str:
    rate = progress.tokens / max(time.monotonic() - started, 1e-9)
    return (
        f"{progress.documents:,} documents, {progress.text_bytes / 1e6:,.1f} MB, "
        f"{progress.tokens:,} tokens ({rate:,.0f}/s)"
    )


if __name__ == "__main__":
    sys.exit(main())
