"""Loads a user's reward function by name, calls it with the answers of a batch, and checks the rewards.

It has one of two forms, which the names of its parameters tell apart:

    def reward(prompts: list[str], answers: list[str], rows: list[dict]) -> list[float]
    def reward(prompts, completions, **columns) -> list[float]    # as in TRL, by keyword

In the first form, `prompts` are strings (for a list of messages, the text of the last one), `answers` the model's
output up to the token that ends an answer, and `rows` the complete rows of the data. A function with a parameter
`completions` has the second form, and so has one with `answers` (the model's) but without `rows`: each column is a
list, and if the prompt of a row is a list of messages, the prompt and its completion are passed as such lists. The
function returns one finite number per answer. It runs in the training process.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

Rows = list[dict[str, Any]]
Function = Callable[..., Sequence[float]]


class RewardFunction:
    """A reward function given by name; it is imported on the first call.

    Args:
        name: "path/to/file.py:function", or a dotted name, "package.module.function".
    """

    def __init__(self, name: str):
        self.name = name
        self._label = f"batch_transform.reward = {name}"
        self._function: Function | None = None

    def __call__(
        self, prompts: list[str], answers: list[str], rows: Rows, locations: Sequence[str] = ()
    ) -> list[float]:
        """Return the rewards, one finite number per answer.

        Args:
            prompts: the prompts as text.
            answers: the answers.
            rows: the complete rows of the prompts.
            locations: where each row is from, for messages; () if unknown.

        Raises:
            ValueError: the function raised an error, or returned anything else. The message names the function.
        """
        function = self.load()
        call = self._bind(function, rows)
        try:
            result = call(list(prompts), list(answers), list(rows))
            # The code of a generator runs here.
            result = list(result) if isinstance(result, Iterator) else result
        except Exception as error:
            # One line, because it ends the run; the chained exception has the traceback.
            reason = " ".join(str(error).split())
            # A callable object that is not a function has no source file.
            code = getattr(function, "__code__", None)
            line = _find_line(None if code is None else code.co_filename, error)
            where = self._find_row(call, type(error), prompts, answers, rows, locations)
            raise ValueError(f"{self._label}: {line}{type(error).__name__}: {reason}{where}") from error
        return self._check_rewards(result, prompts, answers)

    def _bind(self, function: Function, rows: Rows) -> Callable[[list[str], list[str], Rows], Any]:
        """Return a function of (prompts, answers, rows) that passes the arguments which the user's function takes.

        Raises:
            ValueError: the user's function needs a column that the rows do not have.
        """
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            # Some callables of C code have no signature.
            return function
        # With a parameter `completions`, `answers` is a column of the rows like any other.
        answer_name = "completions" if "completions" in parameters else "answers"
        takes_columns = answer_name in parameters and (answer_name == "completions" or "rows" not in parameters)
        if not takes_columns:
            return function
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        columns = list(dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "prompts")))
        given = {"prompts", answer_name, *columns}
        missing = [
            name
            for name, one in parameters.items()
            if name not in given
            and one.default is one.empty
            and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        if missing:
            raise ValueError(
                f"{self._label}: the function needs {', '.join(missing)}, but the rows have only "
                f"{', '.join(columns) or 'prompt'}"
            )

        def call(prompts: list[str], answers: list[str], rows: Rows) -> Any:
            completions: list[str | list[dict[str, str]]] = []
            for row, answer in zip(rows, answers, strict=True):
                is_chat = isinstance(row.get("prompt"), list)
                completions.append([{"role": "assistant", "content": answer}] if is_chat else answer)
            arguments: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
            arguments["prompts"] = [row.get("prompt", prompt) for row, prompt in zip(rows, prompts, strict=True)]
            arguments[answer_name] = completions
            return function(**{name: value for name, value in arguments.items() if takes_all or name in parameters})

        return call

    def _find_row(
        self,
        call: Callable[[list[str], list[str], Rows], Any],
        error: type[Exception],
        prompts: list[str],
        answers: list[str],
        rows: Rows,
        locations: Sequence[str],
    ) -> str:
        """Describe the first row for which the function raises this error by itself; "" if there is none."""
        for number, (prompt, answer, row) in enumerate(zip(prompts, answers, rows, strict=True)):
            try:
                call([prompt], [answer], [row])
            except error:
                place = f"{locations[number]}, " if locations else ""
                return f" ({place}for the answer {answer!r} to {prompt!r})"
            except Exception:
                # For this answer by itself, the function raises another error, so the failing answer cannot be found.
                return ""
        return ""

    def _check_rewards(self, result: Any, prompts: list[str], answers: list[str]) -> list[float]:
        """Return the result of the function as numbers. Raises ValueError if it is anything else."""
        try:
            values = None if isinstance(result, str) else list(result)
        except TypeError:
            values = None
        if values is None:
            what = "None; does it end with a return?" if result is None else repr(result)[:60]
            raise ValueError(f"{self._label}: expected a list of {len(answers)} numbers, given {what}")
        if len(values) != len(answers):
            raise ValueError(
                f"{self._label}: expected {len(answers)} rewards, one for each answer, given {len(values)}"
            )
        rewards = []
        for number, value in enumerate(values):
            try:
                reward = float(value)
            except (TypeError, ValueError, OverflowError):
                reward = math.nan
            if not math.isfinite(reward):
                raise ValueError(
                    f"{self._label}: expected finite numbers, given {value!r} for the answer {answers[number]!r} "
                    f"to {prompts[number]!r}"
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
        functions = [statement.name for statement in statements if isinstance(statement, ast.FunctionDef)]
        # Imported or assigned names may be callable too, so only a file that merely defines functions is checked.
        is_plain = not any(isinstance(one, ast.ImportFrom | ast.Assign | ast.ClassDef) for one in statements)
        if name not in functions and is_plain:
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
                # The file can import modules from its own folder, which shadow no installed ones.
                folder = str(path.resolve().parent)
                if folder not in sys.path:
                    sys.path.append(folder)
                spec = importlib.util.spec_from_file_location(f"user_reward_{path.stem}", path)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        except Exception as error:
            reason = " ".join(str(error).split())
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


def _find_line(file: str | Path | None, error: BaseException) -> str:
    """Return "line N: " for the innermost traceback frame in `file`; "" if there is none."""
    if file is None:
        return ""
    path = Path(file).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f"line {lines[-1]}: " if lines else ""
