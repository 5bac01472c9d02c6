"""What the launchers share: launch.train's command line, checked before anything starts, and its exit codes.

A launcher takes every flag of launch.train and adds its own; what it does not know itself is passed on.
"""

import argparse
import shutil
import signal
import subprocess
from collections.abc import Sequence

from framework.files.workdir import safe_child
from framework.terminal import interrupts
from launch import cli, train

MEANINGS = ["the run came to its end", "failed", "command, config or data are wrong", "loss not finite", "does not fit"]
MEANINGS += ["another process is gone, or was not found", "hung", "replicas disagree"]
STOPPED = {130: "stopped by SIGINT", 143: "stopped by SIGTERM"}
FINAL = (0, 2, 3, 4, 130, 143)  # starting again would change nothing, or is not wanted


class Parser(cli.Parser):
    """launch.train's flags, and those added here, which are not passed on; `--dry_run` is the launcher's own."""

    def __init__(self, verb: str, description: str | None):
        super().__init__(verb, description, conflict_handler="resolve")  # a flag of launch.train's may be replaced
        train.add_flags(self)
        self._inherited = dict(self._option_string_actions)
        self.add_argument("--dry_run", action="store_true", help="print what would be done, and do nothing")

    def parse_job(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """(the flags, the words after `python -m launch.train`). Raises ValueError: anything is wrong with them."""
        command, words, tokens = self.parse(argv), [], iter(argv)
        args = command.args
        if args.run_name is not None:
            safe_child("runs", args.run_name, "--run_name")
        for flag in ("coordinator", "num_processes", "process_id"):
            if getattr(args, flag) is not None:
                raise cli.UsageError(f"--{flag} is for processes started by hand; {self.prog} sets it for each")
        command.config.instantiate()
        for token in tokens:
            action = self._option_string_actions.get(token.partition("=")[0])
            if action is None or self._inherited.get(token.partition("=")[0]) is action:
                words.append(token)
            elif "=" not in token and action.nargs != 0:
                next(tokens)  # `--flag value`
        return args, words


def execute(words: list[str], text: str | None = None) -> int:
    """Runs a command that reads `text`; its exit code. Raises FileNotFoundError: this machine does not have it."""
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"there is no {words[0]} on this machine; --dry_run prints what it would be given")
    process = subprocess.Popen(words, stdin=None if text is None else subprocess.PIPE, text=True)
    take_back = interrupts.at_end(lambda number, line: process.terminate())
    process.communicate(text)
    take_back()
    return process.returncode


def meaning(code: int) -> str:
    """How a process ended, for people; a negative code is a signal, as in subprocess."""
    known = {**dict(enumerate(MEANINGS)), **STOPPED}.get(code, "unknown")
    return f"ended with exit code {code} ({known})" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
