"""lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness) drives a model through its own interface.

`pip install 'plimsoll-train[harness]'` brings it; `plimsoll evaluate --tasks=...` uses it.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.data.packing import num_windows
from framework.inference.generation import Generator, stream_text
from framework.inference.sampling import Sampling
from framework.inference.scoring import Scorer, encode_pair
from launch import cli
from launch.weights import Loaded


def check() -> None:
    """Raises UsageError where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise cli.UsageError("--tasks needs lm-evaluation-harness: pip install 'plimsoll-train[harness]'")


def evaluate(
    loaded: Loaded,
    scorer: Scorer,
    tasks: Sequence[str],
    path: str | None,
    limit: int | None,
) -> dict:
    """Runs the tasks, prints the harness's table, and returns {task: its metrics}. Raises UsageError for a task that is
    not known.

    Args:
        loaded: the model.
        scorer: of that model.
        tasks: names of tasks or of groups of them.
        path: a folder with the YAML files of more.
        limit: of each task only so many documents.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    # The harness would fork for its error bars, and a fork of a process with JAX's threads may
    # hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    manager = TaskManager(include_path=path)
    for task in tasks:
        cli.choose("task", task, manager.all_tasks)
    results: Any = lm_eval.simple_evaluate(
        model=make_model(loaded, scorer),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
    )
    print(make_table(results))
    return results["results"]


def make_model(loaded: Loaded, scorer: Scorer) -> Any:
    """The model as an lm_eval.api.model.LM."""
    # The class is made inside a function because lm_eval, its base, is imported only when tasks are
    # asked for.
    from lm_eval.api.model import LM

    tokenizer = loaded.tokenizer
    limit = scorer.seq_len
    generator = Generator(loaded.program, loaded.state, averaged=loaded.averaged)

    class Model(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            """For each (context, continuation): the log-likelihood of the continuation, and whether greedy decoding
            would give it."""
            rows = [encode_pair(tokenizer, *request.args) for request in requests]
            return [(score.log_prob, score.greedy) for score in scorer.score(rows)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """The log-likelihood of each (text,): every token is predicted once, in windows; the last window begins
            early enough to be full."""
            return [self._rolling(*request.args) for request in requests]

        def _rolling(self, text: str) -> float:
            tokens = np.asarray(tokenizer.encode_document(text))
            rows = []
            for i in range(num_windows(len(tokens), limit)):
                # A window predicts `limit` tokens, and has one more in front of them.
                first_predicted = i * limit + 1
                end = min(first_predicted + limit, len(tokens))
                rows.append((tokens[:end], first_predicted))
            return sum(score.log_prob for score in scorer.score(rows))

        def generate_until(self, requests: list[Any]) -> list[str]:
            """The continuation of each (context, options), up to one of options["until"]; greedy unless the options say
            otherwise."""
            return [self._until(*request.args) for request in requests]

        def _until(self, context: str, options: dict[str, Any]) -> str:
            until = options.get("until") or []
            # At least one position is left to the prompt.
            count = min(options.get("max_gen_toks", 256), limit - 1)
            sampling = _sampling(options, count, tuple(tokenizer.stop_ids))
            # Of a prompt that is too long, the end is what counts.
            prompt = tokenizer.encode_prompt(context)[count - limit :]
            stops = [until] if isinstance(until, str) else until
            steps = stream_text(generator, tokenizer, [prompt], sampling, stops)
            return "".join(text for (text,) in steps)

    return Model()


def _sampling(options: dict[str, Any], count: int, stop_ids: tuple[int, ...]) -> Sampling:
    """The harness's options as ours, for at most `count` tokens. Without do_sample, its temperature does not count."""
    temperature = 0.0
    if options.get("do_sample"):
        temperature = options.get("temperature", 0.0)
    return Sampling(
        count,
        temperature,
        top_k=options.get("top_k") or None,
        top_p=options.get("top_p", 1.0),
        stop_ids=stop_ids,
    )
