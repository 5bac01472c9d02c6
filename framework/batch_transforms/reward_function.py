"""Loads a user's reward functions by name, calls them with the answers of a batch, and checks the rewards.

A function has one of two forms, which the names of its parameters tell apart:

    def reward(prompts: list[str], answers: list[str], rows: list[dict]) -> list[float]
    def reward(prompts, completions, completion_ids, **columns) -> list[float]    # as in TRL, by keyword

In the first form, `prompts` are strings (for a list of messages, the text of the last one), `answers` the model's
output up to the token that ends an answer, and `rows` the complete rows of the data. A function with a parameter
`completions` or `completion_ids` has the second form, and so has one with `answers` (the model's) but without `rows`,
and one with `**kwargs` and fewer than three other parameters. Each column is a list, and if the prompt of a row is a
list of messages, the prompt and its completion are passed as such lists; `completion_ids` are the tokens of an answer,
with the one that ends it. The function returns one finite number per answer, or None for an answer that it does not
judge. It runs in the training process; coroutines run in an event loop of their own, all at the same time.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

Rows = list[dict[str, Any]]
Function = Callable[..., Any]
# Parameters of reward functions in TRL that pass objects of its trainer.
_TRAINER_PARAMETERS = ("trainer_state", "log_extra", "log_metric", "environments")
# Parameters of the first form, which are passed by position.
_NUM_PARAMETERS = 3


@dataclass(frozen=True)
class JudgedAnswers:
    """Answers for a reward function.

    Attributes:
        prompts: the prompts as text.
        answers: the answers as text.
        rows: the complete rows of the prompts.
        tokens: the tokens of each answer, with the one that ends it.
        locations: where each row is from, for messages; () if unknown.
    """

    prompts: list[str]
    answers: list[str]
    rows: Rows
    tokens: list[list[int]]
    locations: Sequence[str] = ()

    def take(self, index: int) -> JudgedAnswers:
        """Return one answer by itself."""
        one = slice(index, index + 1)
        return JudgedAnswers(self.prompts[one], self.answers[one], self.rows[one], self.tokens[one])


class RewardFunctions:
    """The reward functions of a run. An answer's reward is the weighted sum of theirs, as in TRL.

    Args:
        names: a name for each function; see `RewardFunction`.
        weights: a weight for each function; None for 1.

    Raises:
        ValueError: there is no function, one is named twice, a weight is not finite, or their number is another.
    """

    def __init__(self, names: list[str], weights: list[float] | None = None):
        if not names or len(set(names)) < len(names):
            raise ValueError(f"batch_transform.reward = {names}: expected the names of different functions")
        if weights is not None and len(weights) != len(names):
            raise ValueError(
                f"batch_transform.reward_weights = {weights}: expected one for each of the {len(names)} functions"
            )
        if weights is not None and not all(map(math.isfinite, weights)):
            raise ValueError(f"batch_transform.reward_weights = {weights}: expected finite numbers")
        # A file with several functions is imported once.
        modules: dict[Path, ModuleType] = {}
        self.functions = [RewardFunction(name, modules) for name in names]
        self._weights = np.asarray([1.0] * len(names) if weights is None else weights, np.float64)

    def __call__(self, judged: JudgedAnswers) -> np.ndarray:
        """Return f64[functions, answers], the weighted rewards; NaN where a function returned None.

        Raises:
            ValueError: a function failed; see `RewardFunction`.
        """
        started = [function.start(judged) for function in self.functions]
        rewards = np.asarray([finish() for finish in started], np.float64)
        return rewards * self._weights[:, None]

    @property
    def short_names(self) -> list[str]:
        """The names of the functions without their files; with them where two would be equal."""
        names = [function.name for function in self.functions]
        short = [name.rpartition(":")[2].rpartition(".")[2] for name in names]
        return short if len(set(short)) == len(short) else names

    def check(self) -> None:
        """Check that all functions exist, without running any of the user's code. Raises as `RewardFunction.check`."""
        for function in self.functions:
            function.check()

    def load(self) -> None:
        """Import all functions. Raises ValueError if one does not exist or its import fails."""
        for function in self.functions:
            function.load()


def sum_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return the sum of the functions' rewards of each answer; NaN for an answer that no function judges.

    Args:
        rewards: [functions, answers], NaN where a function does not judge an answer.
    """
    return np.where(np.isnan(rewards).all(axis=0), np.nan, np.nansum(rewards, axis=0))


class RewardFunction:
    """A reward function given by name; it is imported on the first call.

    Args:
        name: "path/to/file.py:function", or a dotted name, "package.module.function".
        modules: imported files, to which this one is added.
    """

    def __init__(self, name: str, modules: dict[Path, ModuleType] | None = None):
        self.name = name
        self._label = f"batch_transform.reward = {name}"
        self._modules = {} if modules is None else modules
        self._function: Function | None = None

    def __call__(self, judged: JudgedAnswers) -> list[float]:
        """Return the rewards, one finite number per answer, or NaN where the function returned None.

        Raises:
            ValueError: the function raised an error, or returned anything else. The message names the function.
        """
        return self.start(judged)()

    def start(self, judged: JudgedAnswers) -> Callable[[], list[float]]:
        """Call the function, and return a function that waits for its rewards, for coroutines that run meanwhile.

        Raises:
            ValueError: as from a call.
        """
        function = self.load()
        call = self._bind(function, judged.rows)
        try:
            result = call(judged)
            waiting = _run_in_background(result) if inspect.isawaitable(result) else None
        except Exception as error:
            raise self._explain(error, function, call, judged) from error

        def finish() -> list[float]:
            try:
                values = result if waiting is None else waiting()
                # The code of a generator runs here.
                values = list(values) if isinstance(values, Iterator) else values
            except Exception as error:
                raise self._explain(error, function, call, judged) from error
            return self._check_rewards(values, judged)

        return finish

    def _explain(
        self, error: Exception, function: Function, call: Callable[[JudgedAnswers], Any], judged: JudgedAnswers
    ) -> ValueError:
        """Return the error of a function in one line, because it ends the run; the chained error has the traceback."""
        reason = " ".join(str(error).split())
        # A callable object that is not a function has no source file.
        code = getattr(function, "__code__", None)
        line = _find_line(None if code is None else code.co_filename, error)
        where = self._find_row(call, type(error), judged)
        # The function of an example for conversations reads completion[0]["content"].
        takes_text = any(isinstance(row.get("prompt"), str) for row in judged.rows)
        if takes_text and isinstance(error, TypeError | IndexError) and reason.startswith("string ind"):
            where += "; completions are texts, because the prompts are: expected prompts that are lists of messages"
        return ValueError(f"{self._label}: {line}{type(error).__name__}: {reason}{where}")

    def _bind(self, function: Function, rows: Rows) -> Callable[[JudgedAnswers], Any]:
        """Return a function of answers that passes the arguments which the user's function takes.

        Raises:
            ValueError: the user's function needs a column that the rows do not have, or has neither form.
        """

        def call_by_position(judged: JudgedAnswers) -> Any:
            return function(list(judged.prompts), list(judged.answers), list(judged.rows))

        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            # Some callables of C code have no signature.
            return call_by_position
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        num_positional = sum(
            one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters.values()
        )
        takes_more = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        is_trl = "completions" in parameters or "completion_ids" in parameters
        is_trl = is_trl or (takes_all and num_positional < _NUM_PARAMETERS and not takes_more)
        # In TRL's form, `answers` is a column of the rows like any other.
        answer_name = "completions" if is_trl else "answers"
        if not is_trl and ("answers" not in parameters or "rows" in parameters):
            if num_positional < _NUM_PARAMETERS and not takes_more:
                raise ValueError(
                    f"{self._label}: expected parameters (prompts, answers, rows) or (prompts, completions, **kwargs), "
                    f"given ({', '.join(parameters)})"
                )
            return call_by_position
        special = ("prompt", "prompts", "completion", "completions", "completion_ids")
        columns = list(dict.fromkeys(name for row in rows for name in row if name not in special))
        given = {"prompts", answer_name, "completion_ids", *columns}
        missing = [
            name
            for name, one in parameters.items()
            if name not in given
            and one.default is one.empty
            and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        if missing:
            trainer = [name for name in missing if name in _TRAINER_PARAMETERS]
            reason = f"; {', '.join(trainer)}: of TRL's trainer, not passed here" if trainer else ""
            raise ValueError(
                f"{self._label}: the function needs {', '.join(missing)}, but the rows have only "
                f"{', '.join(columns) or 'prompt'}{reason}"
            )

        def call(judged: JudgedAnswers) -> Any:
            completions: list[str | list[dict[str, str]]] = []
            for row, answer in zip(judged.rows, judged.answers, strict=True):
                is_chat = isinstance(row.get("prompt"), list)
                completions.append([{"role": "assistant", "content": answer}] if is_chat else answer)
            arguments: dict[str, Any] = {name: [row.get(name) for row in judged.rows] for name in columns}
            pairs = zip(judged.rows, judged.prompts, strict=True)
            arguments["prompts"] = [row.get("prompt", prompt) for row, prompt in pairs]
            arguments[answer_name] = completions
            arguments["completion_ids"] = [list(tokens) for tokens in judged.tokens]
            return function(**{name: value for name, value in arguments.items() if takes_all or name in parameters})

        return call

    def _find_row(self, call: Callable[[JudgedAnswers], Any], error: type[Exception], judged: JudgedAnswers) -> str:
        """Describe the first row for which the function raises this error by itself; "" if there is none."""
        for number, (prompt, answer) in enumerate(zip(judged.prompts, judged.answers, strict=True)):
            try:
                result = call(judged.take(number))
                if inspect.isawaitable(result):
                    _run_in_background(result)()
            except error:
                place = f"{judged.locations[number]}, " if judged.locations else ""
                return f" ({place}for the answer {answer!r} to {prompt!r})"
            except Exception:
                # For this answer by itself, the function raises another error, so the failing answer cannot be found.
                return ""
        return ""

    def _check_rewards(self, result: Any, judged: JudgedAnswers) -> list[float]:
        """Return the result of the function as numbers, NaN for None. Raises ValueError if it is anything else."""
        answers = judged.answers
        try:
            values = None if isinstance(result, str) else list(result)
        except TypeError:
            values = None
        if values is None:
            what = "None; does it end with a return?" if result is None else repr(result)[:60]
            if callable(result):
                what = f'a function; write "reward = {self._parse_name()[1]}(...)" in a file, and name that'
            raise ValueError(f"{self._label}: expected a list of {len(answers)} numbers, given {what}")
        if len(values) != len(answers):
            raise ValueError(
                f"{self._label}: expected {len(answers)} rewards, one for each answer, given {len(values)}"
            )
        rewards = []
        for number, value in enumerate(values):
            if value is None:
                rewards.append(math.nan)
                continue
            try:
                reward = float(value)
            except (TypeError, ValueError, OverflowError):
                reward = math.nan
            if not math.isfinite(reward):
                raise ValueError(
                    f"{self._label}: expected finite numbers, given {value!r} for the answer {answers[number]!r} "
                    f"to {judged.prompts[number]!r}"
                )
            rewards.append(reward)
        return rewards

    def check(self) -> None:
        """Check that the function exists, without running any of the user's code.

        Raises:
            ValueError: the name is malformed, the package does not exist, or the file has no such function.
            FileNotFoundError: the file does not exist.
        """
        path, name = self._parse_name()
        if path is None:
            package = self.name.partition(".")[0]
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"{self._label}: there is no package {package!r}")
            return
        if not path.is_file():
            raise FileNotFoundError(f"{self._label}: {path} does not exist")
        try:
            statements = ast.parse(path.read_bytes()).body
        except SyntaxError as error:
            raise ValueError(f"{self._label}: line {error.lineno}: {error.msg}") from error
        functions = [one.name for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = _find_names(statements)
        if names is not None and name not in names:
            raise ValueError(f"{self._label}: expected a function of {path.name}: {', '.join(functions) or 'none'}")

    def load(self) -> Function:
        """Import the function once and return it. Raises ValueError if it does not exist or the import fails."""
        if self._function is not None:
            return self._function
        path, name = self._parse_name()
        try:
            if path is None:
                module = importlib.import_module(self.name.rpartition(".")[0])
            else:
                module = _import_file(path, self._modules)
        except Exception as error:
            reason = " ".join(str(error).split())
            if "relative import" in reason:
                reason += "; expected package.module.function for a file of a package"
            line = _find_line(path, error)
            raise ValueError(f"{self._label}: cannot be imported: {line}{type(error).__name__}: {reason}") from error
        function: Function | None = getattr(module, name, None)
        if not callable(function):
            raise ValueError(f"{self._label}: there is no function {name!r} in {path or module.__name__}")
        self._function = cast(Function, function)
        return self._function

    def _parse_name(self) -> tuple[Path | None, str]:
        """Split the name into (file, function name); the file is None for a dotted name."""
        path, colon, name = self.name.rpartition(":")
        if colon and path.endswith(".py") and name.isidentifier():
            return Path(path), name
        module, _, name = self.name.rpartition(".")
        if not colon and module and all(part.isidentifier() for part in self.name.split(".")):
            return None, name
        raise ValueError(f'{self._label}: expected "path/to/file.py:function" or "package.module.function"')


def _find_names(statements: list[ast.stmt]) -> set[str] | None:
    """Return the names that a file defines; None if they are not known without running it."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        elif not isinstance(statement, ast.Expr | ast.AugAssign | ast.Assert):
            return None
    return None if "*" in names else names


def _import_file(path: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    """Return the module of a file, from `modules` if it was imported before."""
    resolved = path.resolve()
    if resolved in modules:
        return modules[resolved]
    # The file can import modules from its own folder, which shadow no installed ones.
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"user_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module of their annotations.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    modules[resolved] = module
    return module


@cache
def _start_event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a thread. It stays, because clients of a user's coroutines belong to their loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop


def _run_in_background(awaitable: Any) -> Callable[[], Any]:
    """Start a coroutine or another awaitable, and return a function that waits for its result."""

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _start_event_loop()).result


def _find_line(file: str | Path | None, error: BaseException) -> str:
    """Return "line N: " for the innermost traceback frame in `file`; "" if there is none."""
    if file is None:
        return ""
    path = Path(file).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f"line {lines[-1]}: " if lines else ""
