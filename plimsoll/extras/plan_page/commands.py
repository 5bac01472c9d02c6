"""The commands on a page, for pasting into a terminal: the one that trains, and the one that made the page."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.extras.plan_page.batch_grid import BATCH, SEQUENCE, GridPoint
from plimsoll.extras.plan_page.data_binding import Figures, bind_element
from plimsoll.framework.plan.plan_report import PlanReport


@dataclass(frozen=True)
class PlanCommand:
    """The command line that asked for the plans of a page.

    Attributes:
        source: --config=NAME or --function=FILE.py:NAME.
        target: --target=NAMES; "" if the command line names none.
        settings: overrides as `path=value`, in order, without those of --compare.
        flags: the other flags, such as --estimate.
        train_flags: the subset of `flags` that `plimsoll train` accepts, too.
    """

    source: str
    target: str
    settings: Sequence[str] = ()
    flags: Sequence[str] = ()
    train_flags: Sequence[str] = ()


def get_overrides(report: PlanReport) -> list[str]:
    """Return the overrides of a plan as `path=value`, without the lines about rules, which apply automatically."""
    return [setting for setting in report.settings if not setting.startswith("rule ")]


def plan_command(asked: PlanCommand, settings: Sequence[str]) -> str:
    """Return the `plimsoll plan` command with these settings.

    Args:
        asked: the command line that asked for the page.
        settings: overrides as `path=value`.
    """
    words = ["plimsoll", "plan", asked.source, asked.target]
    return _join_command([*filter(None, words), *_overrides(settings), *asked.flags])


def train_command(asked: PlanCommand, settings: Sequence[str]) -> str:
    """Return the `plimsoll train` command with these settings; "" if the source is not a config.

    Args:
        asked: the command line that asked for the page.
        settings: overrides as `path=value`.
    """
    flag, _, config = asked.source.partition("=")
    if flag != "--config":
        return ""
    # The workdir is named after the config, without characters that are special in paths or shells.
    name = re.sub(r"[^A-Za-z0-9._]+", "-", config.removesuffix(".json")).strip("-.") or "run"
    return _join_command(
        ["plimsoll", "train", asked.source, *_overrides(settings), *asked.train_flags, f"--workdir=runs/{name}"]
    )


def settings_at(point: GridPoint, settings: Sequence[str]) -> list[str]:
    """Return the settings with the batch size and sequence length of a point.

    Args:
        point: point of the slider.
        settings: overrides as `path=value`.
    """
    paths = (f"{BATCH}=", f"{SEQUENCE}=")
    changed = [setting for setting in settings if not setting.startswith(paths)]
    changed.append(f"{BATCH}={point.batch}")
    if point.sequence is not None:
        changed.append(f"{SEQUENCE}={point.sequence}")
    return changed


def render_command(figures: Figures, key: str, title: str) -> str:
    """Return a command with a copy button, which the script activates.

    Args:
        figures: figures of the point that is shown first.
        key: key of the command in `figures`.
        title: heading of the command.
    """
    code = bind_element("code", figures, {"text": key})
    button = '<button type="button" class="copy" hidden>copy</button>'
    return f'<div class="command"><h3>{title}</h3>{button}<pre tabindex="0">{code}</pre></div>'


def _overrides(settings: Sequence[str]) -> list[str]:
    return [f"--config.{setting}" for setting in settings]


def _join_command(words: Sequence[str]) -> str:
    """Quote words for a shell, and break long lines between them."""
    quoted = [shlex.quote(word) for word in words]
    lines = [" ".join(quoted[:2])]
    for word in quoted[2:]:
        if len(lines[-1]) + len(word) > 88:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
