"""The commands that a page shows, to be pasted into a terminal: the one that trains, and the one that made the page."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from framework.plan.grid import BATCH, SEQUENCE, Point
from framework.plan.page.bound import Figures, bound
from framework.plan.report import Report


@dataclass(frozen=True)
class Asked:
    """How the plans of a page were asked for on a command line.

    Attributes:
        source: --config=NAME or --function=FILE.py:NAME.
        target: --target=NAMES; "" where none was named.
        settings: `path=value` of the overrides, in order, without those of --compare.
        flags: the other flags, such as --estimate.
        train_flags: those of them that training takes, too.
    """

    source: str
    target: str
    settings: Sequence[str] = ()
    flags: Sequence[str] = ()
    train_flags: Sequence[str] = ()


def settings_of(report: Report) -> list[str]:
    """`path=value` of what was set for a plan; the lines about rules, which apply themselves, are left out."""
    return [setting for setting in report["settings"] if not setting.startswith("rule ")]


def plan_command(asked: Asked, settings: Sequence[str]) -> str:
    """`plimsoll plan` with these settings."""
    words = ["plimsoll", "plan", asked.source, asked.target]
    return _line([*filter(None, words), *_overrides(settings), *asked.flags])


def train_command(asked: Asked, settings: Sequence[str]) -> str:
    """`plimsoll train` with these settings; "" for what is no config."""
    flag, _, config = asked.source.partition("=")
    if flag != "--config":
        return ""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", config.removesuffix(".json")).strip("-.") or "run"
    return _line(
        ["plimsoll", "train", asked.source, *_overrides(settings), *asked.train_flags, f"--workdir=runs/{name}"]
    )


def settings_at(point: Point, settings: Sequence[str]) -> list[str]:
    """Settings of the asked point, changed for another."""
    paths = (f"{BATCH}=", f"{SEQUENCE}=")
    changed = [setting for setting in settings if not setting.startswith(paths)]
    changed.append(f"{BATCH}={point.batch}")
    if point.sequence is not None:
        changed.append(f"{SEQUENCE}={point.sequence}")
    return changed


def box(figures: Figures, key: str, title: str) -> str:
    """A command with a button that copies it, which the script brings to life."""
    code = bound("code", figures, {"text": key})
    button = '<button type="button" class="copy" hidden>copy</button>'
    return f'<div class="command"><h3>{title}</h3>{button}<pre tabindex="0">{code}</pre></div>'


def _overrides(settings: Sequence[str]) -> list[str]:
    return [f"--config.{setting}" for setting in settings]


def _line(words: Sequence[str]) -> str:
    """Words as a shell reads them; a long line is broken before flags."""
    quoted = [shlex.quote(word) for word in words]
    lines = [" ".join(quoted[:2])]
    for word in quoted[2:]:
        if len(lines[-1]) + len(word) > 88:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
