"""Store a teacher's most likely tokens for every row of a student's training data, for distillation.

    plimsoll score --workdir=runs/teacher --config=distil-tiny --out=runs/scores
    plimsoll score --hf=ORG/NAME --config=my.py:student --data=chats.jsonl --top_k=64 --out=scores
    plimsoll train --config=my.py:student --data=chats.jsonl --config.batch_transform.path=scores --workdir=runs/student
    plimsoll score --workdir=runs/reward --texts=pairs.jsonl

--config names the student's config, whose data is read; overrides apply to that config. After a kill, the same
command continues with bit-identical results. It adds rows if trainer.max_steps has grown. With --texts, a reward
model or a classifier scores texts instead: `plimsoll score --texts= --help`.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes
from plimsoll.launch import cli, weights

# The flag that requests scores of a reward model or a classifier.
_TEXTS_FLAG = "--texts"
# Tokens stored per position by default; the same as the default of batch_transform.top_k.
_TOP_K = 64


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once all rows are stored."""
    if any(token.partition("=")[0] == _TEXTS_FLAG for token in argv):
        from plimsoll.launch import score_texts

        return score_texts.main(argv)
    command = _parser().parse(argv)
    for note in command.notes:
        print(note, file=sys.stderr)
    args = command.args
    _check(args)
    return _score(args, command.config)


def _parser() -> cli.Parser:
    parser = cli.Parser("score", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--workdir", metavar="DIR", help="the teacher: a run of `plimsoll train`")
    model.add_argument("--hf", metavar="DIR", help="the teacher: a Hugging Face directory, or the Hub's ORG/NAME")
    weights.add_step(parser)
    parser.add_argument("--ema", action="store_true", help="use the averaged weights (EMA) of the run")
    parser.add_argument(
        "--host_weights",
        action="store_true",
        help="keep the teacher's stack in host memory, except for one layer at a time",
    )
    parser.add_data()
    parser.add_argument(
        "--top_k", type=int, default=_TOP_K, metavar="K", help="tokens to store per position; default 64"
    )
    parser.add_argument(
        "--rows",
        choices=["run", "all"],
        default="run",
        help="score the rows that the student's run reads (default), or all rows",
    )
    parser.add_argument("--batch_size", type=int, default=8, metavar="B", help="rows per batch; default 8")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder for the scores")
    parser.add_argument(
        _TEXTS_FLAG,
        metavar="FILE",
        help="score the rows of this file with a reward model or a classifier instead; "
        "`plimsoll score --texts= --help` shows the flags of this use",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for invalid flag values, before anything is loaded."""
    for name in ("top_k", "batch_size"):
        if getattr(args, name) < 1:
            raise cli.UsageError(f"--{name}={getattr(args, name)}: expected at least 1")
    if args.hf is not None and (args.step is not None or args.ema):
        raise cli.UsageError("--step and --ema require --workdir")
    if "://" in args.out:
        raise cli.UsageError(f"--out={args.out}: expected a local folder")
    cli.check_output("out", args.out, is_folder=True)


def _score(args: argparse.Namespace, config: Config) -> int:
    """Load the teacher, read the data of the student's config, and store the rows that are not stored yet."""
    from plimsoll.framework.batch_transforms.teacher_files import TeacherFacts
    from plimsoll.framework.batch_transforms.teacher_scoring import (
        TeacherScorer,
        check_teacher,
        hash_sources,
        list_rows,
        store,
        weights_digest,
    )
    from plimsoll.framework.data.pipeline import DataPipeline

    student: Any = config.instantiate()
    data = student.data
    if not isinstance(data, DataPipeline):
        raise ValueError(f"data has type {type(data).__name__}; a teacher can only score the tokens of a DataPipeline")
    folder = Path(args.out).expanduser()
    teacher = weights.load(args, [])
    with phase("preparing data", patience=SHORT):
        data.setup(folder)
    vocab_size = check_teacher(teacher.experiment, student, data, teacher.program, args.top_k)
    with phase("hashing the teacher's weights", patience=SHORT):
        digest = weights_digest(teacher.program.weights(teacher.state, averaged=teacher.averaged))
    facts = TeacherFacts(
        weights=digest,
        tokenizer=data.tokenizer.digest,
        vocab_size=vocab_size,
        seq_len=data.seq_len,
        top_k=args.top_k,
        data=hash_sources(data),
    )
    row_list = list_rows(student, data, args.rows)
    _report_size(facts, len(row_list.row_ids_N2), folder)
    scorer = TeacherScorer(teacher.program, teacher.state, facts, averaged=teacher.averaged, batch_size=args.batch_size)
    num_added, num_rows = store(scorer, row_list, folder)
    # Training reads the default number of tokens without a flag.
    top_k_flag = "" if args.top_k == _TOP_K else f" --config.batch_transform.top_k={args.top_k}"
    print(
        f"{folder}: {num_rows:,} rows, {num_added:,} of them new; train with "
        f"--config.batch_transform.path={folder}{top_k_flag}"
    )
    return ExitCode.DONE


def _report_size(facts: Any, num_rows: int, folder: Path) -> None:
    """Print the size of the files for these facts. Raises ValueError if the disk has less free space."""
    from plimsoll.framework.batch_transforms.teacher_files import MANIFEST, read_manifest

    size = num_rows * facts.row_bytes
    weights.log(
        f"{num_rows:,} rows of {facts.seq_len} tokens, the {facts.top_k} most likely of {facts.vocab_size} tokens: "
        f"{facts.row_bytes / facts.seq_len:.1f} bytes per token, at most {human_bytes(size)} in {folder}"
    )
    stored = read_manifest(folder)[1] * facts.row_bytes if (folder / MANIFEST).exists() else 0
    free = shutil.disk_usage(folder).free
    if size - stored > free:
        raise ValueError(
            f"--out={folder}: the scores need {human_bytes(size - stored)}, but the disk has {human_bytes(free)} free"
        )


if __name__ == "__main__":
    sys.exit(main())
