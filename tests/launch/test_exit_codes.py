"""The exit codes in the code, in docs/operations.md and in the launchers agree."""

import re

from plimsoll.framework.terminal.exit_codes import FINAL, HOPELESS, ExitCode, describe_exit_code
from plimsoll.launch import commands, slurm
from tests.support.runs import ROOT


def test_the_page_has_every_code_with_its_meaning():
    page = (ROOT / "docs" / "operations.md").read_text()
    documented: dict[int, str] = {}
    for codes, text in re.findall(r"^\| ([\d, ]+) \| [^|]* \| ([^|]*) \|", page, flags=re.MULTILINE):
        documented |= {int(code): text for code in codes.split(", ")}
    assert set(documented) == {int(code) for code in ExitCode}
    for code in ExitCode:
        assert code.meaning in documented[code]
    (words,) = re.findall(r"restart all processes after every code except (.*?) \(", page)
    assert {int(code) for code in re.findall(r"\d+", words)} == {int(code) for code in FINAL}


def test_launchers_start_nothing_again_after_a_hopeless_code():
    digits = "".join(str(int(code)) for code in HOPELESS)
    assert f"[{digits}]x" in slurm.SCRIPT


def test_exit_code_descriptions():
    assert commands.describe_process_end(ExitCode.TOO_BIG) == "ended with exit code 4 (does not fit)"
    assert commands.describe_process_end(-9) == "was killed by SIGKILL"
    assert describe_exit_code(99) == "unknown"
