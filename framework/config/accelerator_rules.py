"""Accelerator rules: changes that a config applies to itself for a kind of device, `Experiment.accelerator_rules`."""

import fnmatch
from collections.abc import Callable

from plimsoll.framework.config.changes import diff
from plimsoll.framework.config.config import Config
from plimsoll.framework.config.names import ConfigError
from plimsoll.framework.config.value_parsing import as_text


def find_accelerator_rules(config: Config, accelerator: str | None) -> dict[int, Config]:
    """Return the rules of a config whose pattern matches an accelerator, by their index; all rules for None.

    Args:
        config: config; it may have no field for rules.
        accelerator: name such as "v5e-8", "h200x8" or "cpu-8".
    """
    rules: list[Config] = config.accelerator_rules if "accelerator_rules" in config else []
    matches = {}
    for index, rule in enumerate(rules):
        if accelerator is None or fnmatch.fnmatchcase(accelerator, rule.pattern):
            matches[index] = rule
    return matches


def apply_accelerator_rules(
    config: Config, accelerator: str | None, is_kept: Callable[[str], bool] = lambda path: False
) -> list[str]:
    """Applies the rules for an accelerator, in place and in order.

    Args:
        config: config to change.
        accelerator: name of the accelerator; None tries all rules, each on a copy.
        is_kept: returns True for the path of a field that no rule may change.

    Returns:
        One line for each field that a rule changes: `rule v5e-*: memory.remat none -> full`.

    Raises:
        ConfigError: a rule sets an unknown field or an invalid value.
    """
    lines: list[str] = []
    for index, rule in find_accelerator_rules(config, accelerator).items():
        config_before = config.copy()
        # Rules for different accelerators may contradict each other, so each one is tried on a copy.
        changed = config if accelerator is not None else config.copy()
        for path, value in rule.set.items():
            if is_kept(path):
                continue
            try:
                changed.set_path(path, value)
            except ConfigError as error:
                raise ConfigError(str(error), path=f"accelerator_rules.{index} ({rule.pattern})") from error
        for path, old, new in diff(config_before, changed):
            lines.append(f"rule {rule.pattern}: {path} {as_text(old)} -> {as_text(new)}")
    return lines
