"""Adapter for lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), through its LM interface.

`pip install 'plimsoll-train[harness]'` installs it; `plimsoll evaluate --tasks=...` uses it.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from plimsoll.api.loaded import LoadedModel
from plimsoll.framework.data.packing import num_windows
from plimsoll.framework.inference.generation import Generator, stream_text
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.inference.scoring import Scorer, encode_pair
from plimsoll.framework.terminal.install_hints import install_extra
from plimsoll.launch import cli


def check() -> None:
    """Raise UsageError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise cli.UsageError(f"--tasks needs lm-evaluation-harness: {install_extra('harness')}")


def evaluate(loaded: LoadedModel, scorer: Scorer, tasks: Sequence[str], path: str | None, limit: int | None) -> dict:
    """Run the tasks, print the harness's table, and return {task: its metrics}.

    Args:
        loaded: the model.
        scorer: scorer of that model.
        tasks: names of tasks or of groups of tasks.
        path: folder with the YAML files of additional tasks.
        limit: maximum number of documents per task.

    Raises:
        UsageError: a task is unknown.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    # The harness would fork for its error bars, and forking a process with JAX's threads may hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    manager = TaskManager(include_path=path)
    for task in tasks:
        cli.choose("task", task, manager.all_tasks)
    results: Any = lm_eval.simple_evaluate(
        model=make_model(loaded, scorer), tasks=list(tasks), task_manager=manager, limit=limit
    )
    print(make_table(results))
    return results["results"]


def make_model(loaded: LoadedModel, scorer: Scorer) -> Any:
    """Wrap the model as an lm_eval.api.model.LM."""
    # Define the class inside the function, because its base lm_eval is imported only if tasks are requested.
    from lm_eval.api.model import LM

    tokenizer = loaded.tokenizer
    limit = scorer.seq_len
    generator = Generator(loaded.program, loaded.state, averaged=loaded.averaged)

    class Model(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            """Return (log-likelihood, whether greedy decoding would produce it) of each (context, continuation)."""
            rows = [encode_pair(tokenizer, *request.args) for request in requests]
            return [(score.log_prob, score.greedy) for score in scorer.score(rows)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """Return the log-likelihood of each (text,).

            Every token is predicted once, in windows; the last window starts early enough to be full.
            """
            return [self._rolling(*request.args) for request in requests]

        def _rolling(self, text: str) -> float:
            tokens = np.asarray(tokenizer.encode_document(text))
            rows = []
            for i in range(num_windows(len(tokens), limit)):
                # A window predicts `limit` tokens, and is preceded by one more.
                first_predicted = i * limit + 1
                end = min(first_predicted + limit, len(tokens))
                rows.append((tokens[:end], first_predicted))
            return sum(score.log_prob for score in scorer.score(rows))

        def generate_until(self, requests: list[Any]) -> list[str]:
            """Continue each (context, options) up to one of options["until"]; greedy unless options say otherwise."""
            return [self._until(*request.args) for request in requests]

        def _until(self, context: str, options: dict[str, Any]) -> str:
            until = options.get("until") or []
            # Leave at least one position for the prompt.
            count = min(options.get("max_gen_toks", 256), limit - 1)
            sampling = _sampling(options, count, tuple(tokenizer.stop_ids))
            # Truncate a prompt that is too long on the left, because its end matters most.
            prompt = tokenizer.encode_prompt(context)[count - limit :]
            stops = [until] if isinstance(until, str) else until
            steps = stream_text(generator, tokenizer, [prompt], sampling, stops)
            return "".join(text for (text,) in steps)

    return Model()


def _sampling(options: dict[str, Any], count: int, stop_ids: tuple[int, ...]) -> Sampling:
    """Convert the harness's options to ours, for at most `count` tokens. Without do_sample, temperature is ignored."""
    temperature = 0.0
    if options.get("do_sample"):
        temperature = options.get("temperature", 0.0)
    return Sampling(
        count, temperature, top_k=options.get("top_k") or None, top_p=options.get("top_p", 1.0), stop_ids=stop_ids
    )
