"""Removes from the texts of a plan what a page for others should not have: folders of this machine, and credentials."""

import re
from dataclasses import replace

from plimsoll.extras.plan_page.commands import PlanCommand
from plimsoll.framework.plan.plan_report import PlanReport

# The folders of an absolute path, or of one in a home folder, at the start of a word or of a value. "//" starts a
# host.
_FOLDERS = re.compile(r"(^|[=:,;\s'\"(\[])(?:~[\w.-]*)?/(?!/)(?:[^\s,;:'\"/]+/)*(?=[^\s,;:'\"/])")
# A user name, or a user name and a password, before the host of a URL.
_CREDENTIALS = re.compile(r"(://)[^/@\s]+@")
# Access tokens of the Hugging Face Hub, and values of parameters of URLs that are named like a secret.
_TOKENS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=[?&])(\w*(?:token|key|secret|signature)\w*)=[^&\s'\"]+", re.IGNORECASE)


def redact(text: str) -> str:
    """Return a text without folders of absolute paths, credentials of URLs, and access tokens."""
    text = _CREDENTIALS.sub(r"\1", text)
    text = _TOKENS.sub(lambda match: f"{match[1]}=REDACTED" if match[1] else "REDACTED", text)
    return _FOLDERS.sub(r"\1", text)


def redact_report(report: PlanReport) -> PlanReport:
    """Return a report whose names, settings, notes and messages are redacted."""
    return replace(
        report,
        config=redact(report.config),
        settings=list(map(redact, report.settings)),
        notes=list(map(redact, report.notes)),
        message=redact(report.message),
    )


def redact_command(command: PlanCommand) -> PlanCommand:
    """Return a command line whose flags are redacted: files are named without their folders."""
    return replace(
        command,
        source=redact(command.source),
        settings=list(map(redact, command.settings)),
        flags=list(map(redact, command.flags)),
        train_flags=list(map(redact, command.train_flags)),
    )
