"""docs/multihost.md names every launcher and its flags; tests/house/test_docs_commands.py runs its commands."""

from tests.support.pages import blocks
from tests.support.runs import ROOT

PAGE = (ROOT / "docs" / "multihost.md").read_text()
COMMANDS = [command for block in blocks("docs/multihost.md") for command in block.commands]


def test_the_page_shows_every_launcher_and_its_flags() -> None:
    verbs = {command.split()[1] for command in COMMANDS if command.startswith("plimsoll ")}
    assert verbs == {"local", "slurm", "gke", "tpu_vm"}
    for flag in ("--grace", "--backoff", "--max_restarts", "--dry_run", "--save_seconds", "--secret"):
        assert f"{flag}`" in PAGE or f"{flag}=" in PAGE, flag
