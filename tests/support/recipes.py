"""Recipes for running the commands of a page in a test: as they are written, with a few replacements."""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.pages import CommandBlock, blocks, python_block, text_lines
from tests.support.runs import ROOT, xla_flags

# Files and folders of a checkout that commands on the pages use.
_OF_A_CHECKOUT = (
    *("Makefile", "constraints.txt", "pyproject.toml", "README.md"),
    *("configs", "docs", "framework", "launch", "plimsoll", "tests", "tools"),
)


@dataclass(frozen=True)
class Recipe:
    """A recipe for running blocks of a page in order in one folder: as they are written, with replacements.

    Attributes:
        page: path of the page.
        blocks: beginning of the first command of each block.
        replaced: replacements in the commands, old text -> new text: fewer steps, a folder for DIR. Each old text must
            occur.
        setup: commands to run first, for things that the reader already has.
        after: commands to run last, which run the page's Python.
        files: name of a file to write -> a line that identifies the page's Python block to write into it.
        prints: patterns that must occur in the output.
        has_outputs: the output must also contain the lines that the blocks show between prompts (if there are none,
            the lines of the page's `text` blocks), apart from the number of spaces.
        fails: the commands must end with an exit code other than 0.
    """

    page: str
    blocks: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    prints: tuple[str, ...] = ()
    has_outputs: bool = False
    fails: bool = False

    def select_blocks(self) -> list[CommandBlock]:
        """Return the recipe's blocks in page order.

        Raises:
            LookupError: a beginning matches no block of the page, or several.
        """
        chosen = []
        for start in self.blocks:
            matching = [block for block in blocks(self.page) if block.commands[0].startswith(start)]
            exact = [block for block in matching if block.commands[0] == start]
            if len(exact or matching) != 1:
                raise LookupError(f"{self.page} has {len(matching)} blocks that begin with {start!r}")
            chosen += exact or matching
        return sorted(chosen, key=lambda block: block.line)

    def commands(self) -> list[str]:
        """Return the commands to run.

        Raises:
            LookupError: no command contains a text that is to be replaced.
        """
        commands = [command for block in self.select_blocks() for command in block.commands]
        for old, new in self.replaced.items():
            if not any(old in command for command in commands):
                raise LookupError(f"no command of {self.page} holds {old!r}")
            commands = [command.replace(old, new) for command in commands]
        return commands

    def lay_out(self, folder: Path) -> None:
        """Write the page's files into the folder, next to links to the files of a checkout."""
        for name in _OF_A_CHECKOUT:
            (folder / name).symlink_to(ROOT / name)
        for name, line in self.files.items():
            (folder / name).write_text(python_block(self.page, line))

    def check(self, printed: str) -> None:
        """Assert that the commands have printed the expected output."""
        for pattern in self.prints:
            assert re.search(pattern, printed), f"{pattern!r} is not in\n{printed}"
        if self.has_outputs:
            squeezed = re.sub(r" +", " ", printed)
            for line in self._outputs():
                assert re.sub(r" +", " ", line).split("; ...")[0] in squeezed, f"{line!r} is not in\n{printed}"

    def _outputs(self) -> list[str]:
        chosen = self.select_blocks()
        printed = [line for block in chosen for line in block.printed]
        return printed or text_lines(self.page)


def run_here(recipe: Recipe) -> None:
    """Run the commands in this process, which shares the imports; pipes and `setup` are not supported."""
    printed = io.StringIO()
    for command in recipe.commands():
        program, *argv = shlex.split(command.replace("\\\n", " "), comments=True)
        if program == "plimsoll":
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = importlib.import_module(f"plimsoll.launch.{argv[0]}").main(argv[1:])
        else:
            program = sys.executable if program == "python" else program
            code = subprocess.run([program, *argv], check=False).returncode
        assert (code != 0) == recipe.fails, f"{command}: exit code {code}\n{printed.getvalue()}"
    recipe.check(printed.getvalue())


def run_in_shell(recipe: Recipe, folder: Path) -> None:
    """Run the commands in a shell, in separate processes with one CPU device."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # No device count, because the oracle sets its own.
        "XLA_FLAGS": xla_flags().replace("--xla_force_host_platform_device_count=1", ""),
        "JAX_PLATFORMS": "cpu",
    }
    printed = ""
    # Each command runs in its own shell, so that a failure names the command. Its stdin is empty.
    for command in (*recipe.setup, *recipe.commands(), *recipe.after):
        argv = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            argv,
            cwd=folder,
            # A run in this process may have set it, and plans depend on it.
            env={name: value for name, value in environment.items() if name != "XLA_CLIENT_MEM_FRACTION"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed += done.stdout
        assert (done.returncode != 0) == recipe.fails, f"{command}: exit code {done.returncode}\n{done.stdout}"
    recipe.check(printed)
