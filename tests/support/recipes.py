"""How a test runs the commands of a page: as they are written, but for what a recipe replaces."""

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

from tests.support.pages import Block, blocks, python_block, text_lines
from tests.support.runs import ROOT, xla_flags

# What commands of the pages name in a checkout.
_OF_A_CHECKOUT = (
    *("Makefile", "constraints.txt", "pyproject.toml", "README.md"),
    *("configs", "docs", "framework", "launch", "tests", "tools"),
)


@dataclass(frozen=True)
class Recipe:
    """How a test runs blocks of a page: as they are written, in order, in one folder, but for what is replaced.

    Attributes:
        page: its path. blocks: how the first command of each begins.
        replaced: text of the commands -> what is run in its place: fewer steps, a folder for DIR. Each must occur.
        setup: commands before them, for what the reader has already. after: commands that run the page's Python.
        files: file of the folder -> a line of the page's Python block that it holds.
        prints: patterns of what the commands print.
        has_outputs: what the blocks show between prompts, and the page's blocks of kind `text`, is printed too, but for
            numbers of spaces.
        fails: the commands end with an exit code other than 0.
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

    def chosen_blocks(self) -> list[Block]:
        """The blocks on the page. Raises LookupError: it has none that begins so."""
        chosen = []
        for start in self.blocks:
            matching = [block for block in blocks(self.page) if block.commands[0].startswith(start)]
            exact = [block for block in matching if block.commands[0] == start]
            if len(exact or matching) != 1:
                raise LookupError(f"{self.page} has {len(matching)} blocks that begin with {start!r}")
            chosen += exact or matching
        return sorted(chosen, key=lambda block: block.line)

    def commands(self) -> list[str]:
        """What is run. Raises LookupError: the commands do not hold a text that is to be replaced."""
        commands = [command for block in self.chosen_blocks() for command in block.commands]
        for old, new in self.replaced.items():
            if not any(old in command for command in commands):
                raise LookupError(f"no command of {self.page} holds {old!r}")
            commands = [command.replace(old, new) for command in commands]
        return commands

    def lay_out(self, folder: Path) -> None:
        """Writes the files of the page into the folder, beside links to what a checkout has."""
        for name in _OF_A_CHECKOUT:
            (folder / name).symlink_to(ROOT / name)
        for name, line in self.files.items():
            (folder / name).write_text(python_block(self.page, line))

    def check(self, printed: str) -> None:
        """Asserts that the commands have printed what they should."""
        for pattern in self.prints:
            assert re.search(pattern, printed), f"{pattern!r} is not in\n{printed}"
        if self.has_outputs:
            squeezed = re.sub(r" +", " ", printed)
            for line in self._outputs():
                assert re.sub(r" +", " ", line).split("; ...")[0] in squeezed, f"{line!r} is not in\n{printed}"

    def _outputs(self) -> list[str]:
        chosen = self.chosen_blocks()
        printed = [line for block in chosen for line in block.printed]
        return printed or text_lines(self.page)


def run_here(recipe: Recipe) -> None:
    """Runs the commands in this process, which shares the imports: no pipes, no setup."""
    printed = io.StringIO()
    for command in recipe.commands():
        program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
        if program == "plimsoll":
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = importlib.import_module(f"launch.{words[0]}").main(words[1:])
        else:
            program = sys.executable if program == "python" else program
            code = subprocess.run([program, *words], check=False).returncode
        assert (code != 0) == recipe.fails, f"{command}: exit code {code}\n{printed.getvalue()}"
    recipe.check(printed.getvalue())


def run_in_shell(recipe: Recipe, folder: Path) -> None:
    """Runs the commands as a shell does, in processes of their own with one CPU device."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # Without a number of devices: the oracle sets its own.
        "XLA_FLAGS": xla_flags().replace("--xla_force_host_platform_device_count=1", ""),
        "JAX_PLATFORMS": "cpu",
    }
    printed = ""
    # Each command has a shell of its own, so that a failure names the command. A reader of stdin finds it empty.
    for command in (*recipe.setup, *recipe.commands(), *recipe.after):
        words = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed += done.stdout
        assert (done.returncode != 0) == recipe.fails, f"{command}: exit code {done.returncode}\n{done.stdout}"
    recipe.check(printed)
