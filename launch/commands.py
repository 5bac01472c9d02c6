"""Code shared by the launchers: the validated command line of `plimsoll train`, and the meaning of exit codes.

A launcher takes every flag of `plimsoll train` and adds its own. Flags that are not its own are passed on.
"""

import argparse
import shutil
import signal
import subprocess
from collections.abc import Sequence

from plimsoll.framework.files.workdir import safe_child
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.exit_codes import describe_exit_code
from plimsoll.launch import cli, train


class LauncherParser(cli.Parser):
    """`plimsoll train`'s flags, plus launcher flags, which are not passed on; `--dry_run` is the launcher's own."""

    def __init__(self, verb: str, description: str | None):
        # Launchers replace some flags of `plimsoll train`, including --dry_run.
        super().__init__(verb, description, conflict_handler="resolve")
        train.add_flags(self)
        self._inherited = dict(self._option_string_actions)
        self.add_argument(
            "--dry_run", action="store_true", help="print what would be executed or submitted, without doing it"
        )

    def parse_job(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return (the flags, the words after `plimsoll train`). Raises ValueError if any of them is invalid."""
        command = self.parse(argv)
        args = command.args
        if args.run_name is not None:
            safe_child("runs", args.run_name, "--run_name")
        for flag in ("coordinator", "num_processes", "process_id"):
            if getattr(args, flag) is not None:
                raise cli.UsageError(
                    f"--{flag} is for processes that you start yourself; {self.prog} sets it for each process"
                )
        # Report every mistake in the config now, before a job waits in a queue for hours.
        command.config.instantiate()
        words = []
        tokens = iter(argv)
        for token in tokens:
            flag = token.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None or self._inherited.get(flag) is action:
                words.append(token)
            elif "=" not in token and action.nargs != 0:
                # In `--flag value`, the value belongs to the launcher too.
                next(tokens)
        return args, words


def execute(words: list[str], text: str | None = None) -> int:
    """Run a command that reads `text`; returns its exit code. Raises FileNotFoundError if it is not installed."""
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"{words[0]} is not installed on this machine; use --dry_run to print its input")
    stdin = None if text is None else subprocess.PIPE
    process = subprocess.Popen(words, stdin=stdin, text=True)
    # A signal that ends the launcher also ends the command.
    unregister = interrupts.register_cleanup(lambda number, line: process.terminate())
    process.communicate(text)
    unregister()
    return process.returncode


def describe_process_end(code: int) -> str:
    """Describe how a process ended; a negative code is a signal, as in subprocess."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} ({describe_exit_code(code)})"
