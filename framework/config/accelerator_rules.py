"""Rules by accelerator: what a config changes in itself for a kind of device, `Experiment.accelerator_rules`."""

import fnmatch
from collections.abc import Callable

from framework.config.changes import diff
from framework.config.config import Config
from framework.config.names import ConfigError
from framework.config.texts import as_text


def rules_of(config: Config) -> list[Config]:
    """The rules of a config; none for a config that takes none."""
    return config.accelerator_rules if "accelerator_rules" in config else []


def is_for(rule: Config, accelerator: str) -> bool:
    """Whether a rule's pattern matches a name such as "v5e-8", "h200x8" or "cpu-8"."""
    return fnmatch.fnmatchcase(accelerator, rule.pattern)


def apply_accelerator_rules(
    config: Config,
    accelerator: str | None,
    is_kept: Callable[[str], bool] = lambda path: False,
) -> list[str]:
    """Applies, in place and in order, the rules for an accelerator.

    Args:
        config: is changed.
        accelerator: None tries all rules, on copies.
        is_kept: whether the field of a path stays as it is, whatever a rule says.

    Returns:
        a line for each field that a rule changes: `rule v5e-*: memory.remat none -> full`.

    Raises:
        ConfigError: a rule sets what cannot be.
    """
    lines: list[str] = []
    for index, rule in enumerate(rules_of(config)):
        if accelerator is not None and not is_for(rule, accelerator):
            continue
        config_before = config.copy()
        # Rules of different accelerators may contradict each other, so trying all of them takes a
        # copy for each.
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
