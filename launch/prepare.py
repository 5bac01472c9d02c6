"""Tokenize a corpus into token files (.bin with a sidecar) that TokenMemmap reads.

    plimsoll prepare --config=NAME [--config.data.source...=...] --out=DIR [--workers=N]

The training source becomes DIR/train.bin (the parts of a mixture become train.0.bin, train.1.bin, ...), and each
validation set DIR/validation-NAME.bin; the tokenizer is stored next to them. Everything is written to a temporary
folder that is renamed at the end, so a killed run leaves nothing under DIR.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config
from plimsoll.framework.data.encoding import Encode, WorkerLostError, default_workers, start_workers
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TokenMemmap, prefix_errors
from plimsoll.framework.data.tokenize import TokenizeProgress, write_tokens
from plimsoll.framework.files import durable
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli

MANIFEST = "prepare.json"
# Seconds between two lines of progress if stderr is not a terminal.
_SECONDS_PER_LINE = 2.0


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once all token files are in place."""
    parser = cli.Parser("prepare", __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must be empty or not exist yet")
    parser.add_argument("--force", action="store_true", help="replace DIR if `plimsoll prepare` wrote it")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of single-threaded processes that tokenize; 1 uses this process and the threads of the tokenizers "
        "library. Default: one per core on machines with 8 or more cores, else 1. The files do not depend on it",
    )
    parser.add_data()
    command = parser.parse(argv)
    for note in command.notes:
        print(note, file=sys.stderr)
    workers = command.args.workers
    if workers is None:
        workers = default_workers()
    if workers < 1:
        raise cli.UsageError(f"--workers={workers}: expected at least 1")
    cli.check_output("out", command.args.out, is_folder=True)
    out = Path(command.args.out).expanduser()
    try:
        prepare(command.config.data, out, force=command.args.force, workers=workers)
    except WorkerLostError as error:
        interrupts.wait_if_exiting()
        print(f"error: {error}. Nothing was written to {out}; run the same command again", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DONE


def prepare(data: Config, out: Path, *, force: bool, workers: int = 1) -> None:
    """Write the token files of every source of `data` (a config of DataPipeline) into the folder `out`.

    Args:
        data: config of the data.
        out: folder to write; it appears complete or not at all.
        force: whether to replace the files that an earlier call wrote there.
        workers: number of processes that tokenize; the files do not depend on it.

    Raises:
        FileExistsError: `out` contains files that may not be replaced.
        WorkerLostError: a process that tokenizes was killed.
        Exception: any error of DataPipeline.setup.
    """
    _check_replaceable(out, force)
    pipeline = data.instantiate()
    if not isinstance(pipeline, DataPipeline):
        raise ValueError(f"data has type {type(pipeline).__name__}; only a DataPipeline has text to tokenize")
    # Both are next to `out`, because a rename works only within a file system.
    temporary = out.with_name(f".{out.name}.partial")
    aside = out.with_name(f".{out.name}.replaced")
    # A killed run may have left this folder.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    unregister = interrupts.register_cleanup(lambda number, line: shutil.rmtree(temporary, ignore_errors=True))
    try:
        pipeline.prepare_tokenizer(temporary, write=True)
        with start_workers(pipeline.tokenizer, workers) as encode:
            records = _write_sources(pipeline, temporary, encode)
        files = sorted([*(path.name for path in temporary.iterdir()), MANIFEST])
        manifest = {"data": data.to_dict(), "sources": records, "files": files}
        with writing(temporary / MANIFEST):
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        # Move old files aside first and remove them last, so that a kill never loses them.
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(out, aside)
        durable.rename(temporary, out)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        unregister()
    print(f"wrote {out}: {', '.join(files)}; to train on it, set for each source:")
    print("  --config.data.source=plimsoll.TokenMemmap")
    print(f"  --config.data.source.path={out}/{next(iter(records))}.bin")
    if (out / "tokenizer.json").exists():
        print(f"  --config.data.tokenizer.path={out}/tokenizer.json")


def _write_sources(pipeline: DataPipeline, folder: Path, encode: Encode) -> dict[str, dict[str, Any]]:
    """Write a token file for every source. Returns the record of each source, by the name of its file."""
    records = {}
    for leaf in pipeline.leaves:
        source = leaf.source
        name = f"validation-{leaf.name}" if leaf.name in pipeline.validation_leaves else leaf.name
        with prefix_errors(leaf.label):
            if isinstance(source, TokenMemmap):
                raise ValueError(f"{source.path} is already tokenized; there is nothing to prepare")
            if source.codec(pipeline.tokenizer) is not pipeline.tokenizer:
                raise ValueError(
                    "conversations cannot be prepared; runs with the same data.cache_dir tokenize them once"
                )
            show(name, write_tokens(source, pipeline.tokenizer, folder / f"{name}.bin", encode))
            records[name] = source.contents(FileHashes())
    return records


def _check_replaceable(out: Path, force: bool) -> None:
    """Raise FileExistsError for files without --force, or for files that this verb did not write."""
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if names and not force:
        raise FileExistsError(
            f"--out={out} already contains {len(names)} files; --force replaces files that this verb wrote"
        )
    manifest = out / MANIFEST
    written_names = parse_json(manifest.read_text())["files"] if manifest.exists() else []
    for name in names:
        if name not in written_names:
            raise FileExistsError(
                f"--out={out} contains {name}, which `plimsoll prepare` did not write; --force does not replace it"
            )


def show(name: str, steps: Iterable[TokenizeProgress]) -> None:
    """Iterate over `steps` and show progress: a bar on a terminal, otherwise a line every few seconds."""
    # Imported here, so that mistakes on the command line are reported without it.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    line = ""
    started = time.monotonic()
    last_shown = started
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name)
        for step in steps:
            now = time.monotonic()
            speed = step.tokens / (now - started)
            counts = f"{step.documents:,} documents, {step.text_bytes / 1e6:,.1f} MB, {step.tokens:,} tokens"
            line = f"{name}: {step.position / step.total:4.0%}, {counts}, {speed:,.0f} tokens/s"
            bar.update(task, completed=step.position, total=step.total, description=line)
            if not console.is_terminal and now - last_shown > _SECONDS_PER_LINE:
                last_shown = now
                print(line, file=sys.stderr, flush=True)
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
