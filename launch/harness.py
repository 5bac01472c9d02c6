"""lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness) drives a model through its own interface.

`pip install 'plimsoll-train[harness]'` brings it; `launch.evaluate --tasks=...` uses it.
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


def evaluate(loaded: Loaded, scorer: Scorer, tasks: Sequence[str], path: str | None, limit: int | None) -> dict:
    """Runs the tasks, prints the harness's table; {task: its metrics}. Raises UsageError for a task that is not known.

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

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # it would fork for error bars, which beside JAX may hang
    manager = TaskManager(include_path=path)
    for task in tasks:
        cli.choose("task", task, manager.all_tasks)
    found: Any = lm_eval.simple_evaluate(
        model=make_model(loaded, scorer), tasks=list(tasks), task_manager=manager, limit=limit
    )
    print(make_table(found))
    return found["results"]


def make_model(loaded: Loaded, scorer: Scorer) -> Any:
    """The model as an lm_eval.api.model.LM. (A function: lm_eval is imported when it is asked for.)"""
    from lm_eval.api.model import LM

    tokenizer, limit = loaded.tokenizer, scorer.seq_len
    generator = Generator(loaded.program, loaded.state, averaged=loaded.averaged)

    class Model(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            """Of (context, continuation): the continuation's, and whether greedy decoding would give it."""
            rows = [encode_pair(tokenizer, *request.args) for request in requests]
            return [(score.log_prob, score.greedy) for score in scorer.score(rows)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """Of (text,): every token predicted once, in windows; the last window begins early enough to be full."""
            return [self._rolling(*request.args) for request in requests]

        def _rolling(self, text: str) -> float:
            tokens = np.asarray(tokenizer.encode_document(text))
            ends = [min((i + 1) * limit + 1, len(tokens)) for i in range(num_windows(len(tokens), limit))]
            return sum(s.log_prob for s in scorer.score([(tokens[:end], i * limit + 1) for i, end in enumerate(ends)]))

        def generate_until(self, requests: list[Any]) -> list[str]:
            """Of (context, options): what follows, up to one of options["until"]; greedy unless they say otherwise."""
            return [self._until(*request.args) for request in requests]

        def _until(self, context: str, options: dict[str, Any]) -> str:
            until, count = options.get("until") or [], min(options.get("max_gen_toks", 256), limit - 1)
            temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
            chosen = {"top_k": options.get("top_k") or None, "top_p": options.get("top_p", 1.0)}
            sampling = Sampling(count, temperature, **chosen, stop_ids=tuple(tokenizer.stop_ids))
            prompt = tokenizer.encode_prompt(context)[count - limit :]
            stops = [until] if isinstance(until, str) else until
            return "".join(text for (text,) in stream_text(generator, tokenizer, [prompt], sampling, stops))

    return Model()
