"""Evaluate a trained model: bits per byte of files, multiple choice, tasks of lm-evaluation-harness.

    plimsoll evaluate --workdir=runs/stdlib-tiny --files README.md docs/*.md
    plimsoll evaluate --workdir=runs/stdlib-tiny --validation
    plimsoll evaluate --workdir=runs/stdlib-tiny --choices=questions.jsonl --json=scores.json
    plimsoll evaluate --hf=DIR --tasks=hellaswag,arc_easy

A line of --choices is {"context": text, "choices": [text, ...], "answer": index of the correct choice}.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.framework.files.text_files import parse_json, read_text
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.install_hints import install_extra
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.launch import cli, weights

if TYPE_CHECKING:
    from plimsoll.api.loaded import LoadedModel


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once everything is printed."""
    parser = weights.parser("evaluate", __doc__)
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="UTF-8 text files; each is one document")
    parser.add_argument("--validation", action="store_true", help="evaluate the run's validation sets in full")
    parser.add_argument("--choices", metavar="FILE", help="multiple-choice questions, one JSON object per line")
    parser.add_argument("--tasks", metavar="A,B", help=f"tasks of lm-evaluation-harness ({install_extra('harness')})")
    parser.add_argument("--task_path", metavar="DIR", help="folder with the YAML files of additional tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N documents of each task")
    parser.add_argument("--batch_size", type=int, default=8, metavar="B", help="sequences per batch; default 8")
    parser.add_argument("--json", metavar="OUT", help="also write the results to this file")
    args, overrides = weights.parse(parser, argv)
    reads_text = bool(args.files or args.choices or args.tasks)
    _check(args, reads_text)
    # Read the files before JAX starts, so that errors in them are reported immediately.
    texts = {}
    for path in args.files:
        with cli.reading("files", path):
            texts[path] = read_text(path)
    questions = []
    if args.choices is not None:
        with cli.reading("choices", args.choices):
            questions = read_choices(args.choices)
    if args.tasks:
        from plimsoll.launch import harness

        harness.check()
    # A run on images has validation sets too, but no tokenizer.
    loaded = weights.load(args, overrides, text=reads_text)

    from plimsoll.api.model import Model

    model = Model(loaded, batch_size=args.batch_size)
    results: dict[str, Any] = {}
    if args.validation:
        results["validation"] = evaluate_validation(loaded)
    for path, text in texts.items():
        score = model.score(text)
        results.setdefault("files", {})[path] = dataclasses.asdict(score)
        line = f"{score.tokens} tokens, loss {score.loss:.4f}, perplexity {score.perplexity:.3f}"
        print(f"{path}: {line}, {score.bits_per_byte:.4f} bits per byte", flush=True)
    if args.choices is not None:
        scores = score_choices(model.scorer, loaded.tokenizer, questions, args.choices)
        results["choices"] = scores
        print(f"{args.choices}: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
    if args.tasks:
        from plimsoll.launch import harness

        tasks = args.tasks.split(",")
        results["tasks"] = harness.evaluate(loaded, model.scorer, tasks, args.task_path, args.limit)
    if args.json:
        with writing(args.json):
            Path(args.json).expanduser().write_text(json.dumps(results, indent=2) + "\n")
    return ExitCode.DONE


def _check(args: Any, reads_text: bool) -> None:
    """Raise UsageError or FileNotFoundError for flags that do not go together, or that name something missing."""
    if not (reads_text or args.validation):
        raise cli.UsageError("nothing to evaluate: give --files, --validation, --choices or --tasks")
    if args.validation and args.workdir is None:
        raise cli.UsageError("--validation requires --workdir: a published model has no validation sets")
    if args.batch_size < 1:
        raise cli.UsageError(f"--batch_size={args.batch_size}: expected at least 1")
    if args.json:
        cli.check_output("json", args.json)


def evaluate_validation(loaded: "LoadedModel") -> dict[str, dict[str, float]]:
    """Return the metrics of each validation set, by its name.

    Evaluates whole sets, although a run may use only a part of them (trainer.eval_batches).

    Args:
        loaded: the model of a run.

    Raises:
        ValueError: the run has no validation sets.
    """
    from plimsoll.framework.inference.evaluation import evaluate_set

    data = loaded.experiment.data
    if not data.validation_names:
        raise ValueError("--validation: the run has no validation sets (data.validation)")
    with phase("preparing data", patience=SHORT):
        data.setup(loaded.folder)
    batch_transform = loaded.experiment.batch_transform
    if batch_transform is not None:
        batch_transform.open(loaded.program, loaded.folder, is_new_run=False, log=print)
    metrics_by_set = {}
    for name in data.validation_names:
        metrics = evaluate_set(loaded.program, loaded.state, name, averaged=loaded.averaged)
        # None means that the evaluation was stopped early, which is not requested here.
        assert metrics is not None
        metrics_by_set[name] = metrics
        figures = ", ".join(f"{key} {value:,.6g}" for key, value in metrics.items())
        print(f"{name}: {figures}", flush=True)
    return metrics_by_set


def read_choices(path: str) -> list[dict[str, Any]]:
    """Return the questions in a file. Raises ValueError, with the line number, for a malformed one."""
    form = '{"context": text, "choices": [text, ...], "answer": index}'
    questions = []
    # Not str.splitlines, because it also splits at other characters, which JSON strings may contain.
    text = read_text(path).removeprefix("\ufeff").removesuffix("\n")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            question = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: expected {form}; the line is not JSON: {error}") from None
        problem = _find_problem(question)
        if problem:
            raise ValueError(f"{path}:{number}: expected {form}; {problem}")
        questions.append(question)
    return questions


def _find_problem(question: Any) -> str:
    """Describe the first problem of a question; "" for a valid one."""
    if not isinstance(question, dict):
        return f"the line contains {_describe_json_type(question)}"
    for key in ("context", "choices", "answer"):
        if key not in question:
            return f"{key!r} is missing"
    context = question["context"]
    choices = question["choices"]
    answer = question["answer"]
    if not isinstance(context, str):
        return f"context is {_describe_json_type(context)}"
    if not isinstance(choices, list) or not choices:
        return f"choices is {_describe_json_type(choices)}"
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            return f"choice {index} is {_describe_json_type(choice)}"
    # In Python, True and False are ints too.
    if type(answer) is not int:
        return f"answer is {_describe_json_type(answer)}"
    if not 0 <= answer < len(choices):
        return f"answer is {answer}, but there are {len(choices)} choices"
    return ""


def _describe_json_type(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {str: "text", bool: "a bool", int: "a number", float: "a number", list: "a list", dict: "an object"}
    name = names.get(type(value), "null")
    if value or isinstance(value, (int, float)):
        return name
    return f"empty: {name}"


def score_choices(scorer: Any, tokenizer: Any, questions: list[dict[str, Any]], path: str) -> dict[str, float]:
    """Return the accuracy of the most likely choice: by log-likelihood, and by log-likelihood per character.

    Args:
        scorer: scorer of the model.
        tokenizer: tokenizer of the model.
        questions: the questions of the file, one for each line.
        path: file of the questions, for messages.

    Raises:
        ValueError: the tokenizer cannot encode a choice.
    """
    from plimsoll.framework.inference.scoring import encode_pair

    pairs = []
    for number, question in enumerate(questions, 1):
        for index, choice in enumerate(question["choices"]):
            try:
                pairs.append(encode_pair(tokenizer, question["context"], choice))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: choice {index}: {error}") from None
    # The scorer yields the scores of all pairs in order, so each question takes one score per choice.
    scores = []
    with phase(f"scoring {path}", patience=SHORT) as scoring:
        for score in scorer.score(pairs):
            scores.append(score)
            scoring.progress(len(scores), len(pairs))
    remaining_scores = iter(scores)
    right = 0
    right_per_character = 0
    for question in questions:
        choices = question["choices"]
        log_probs = [next(remaining_scores).log_prob for _ in choices]
        # Without the division, the shortest choice tends to be the most likely.
        per_character = [value / len(choice) for value, choice in zip(log_probs, choices, strict=True)]
        right += log_probs.index(max(log_probs)) == question["answer"]
        right_per_character += per_character.index(max(per_character)) == question["answer"]
    count = len(questions)
    return {"questions": count, "accuracy": right / count, "accuracy_per_character": right_per_character / count}


if __name__ == "__main__":
    sys.exit(main())
