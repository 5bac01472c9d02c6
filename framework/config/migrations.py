"""Old names of config fields, and old values: what older versions stored, and what users may still type.

Stored configs load without a message. When a user types an old name, a warning shows the current one, once per name.
The old names will be removed one release later.
"""

import functools
import logging
from collections.abc import Mapping

from plimsoll.framework.config.components import Target, is_component, is_ours

# {component: {old field: current field}}
RENAMED_FIELDS = {
    "Compiler": {"of_accelerator": "use_accelerator_options"},
    "Experiment": {"companion": "batch_transform"},
    "Health": {"canary": "offload_self_test"},
}
# {component: {field: {old value: current value}}}
RENAMED_VALUES = {
    "Learner": {"scope": {"unit": "layer"}},
    "Memory": {"prefetch": {"piece": "chunk", "unit": "layer"}},
    "Reference": {"kind": {"hosted": "offloaded"}},
    "Rollouts": {
        "reward": {
            f"framework.companions.rewards.{name}": f"plimsoll.framework.batch_transforms.rewards.{name}"
            for name in ("exact", "characters")
        }
    },
}

_warn_once = functools.cache(logging.getLogger(__name__).warning)


def find_current_field(target: Target, name: str) -> str:
    """Returns the current name of a field that a user has typed; a name that was never renamed stays as it is."""
    current = RENAMED_FIELDS.get(_component_name(target), {}).get(name, name)
    if current != name:
        _warn_once(f"{name} was renamed; use {current}")
    return current


def find_current_value(target: Target, field: str, value: object) -> object:
    """Returns the current form of a value that a user has set."""
    if not isinstance(value, str):
        return value
    current = RENAMED_VALUES.get(_component_name(target), {}).get(field, {}).get(value, value)
    if current != value:
        _warn_once(f"{field} = {value} was renamed; use {current}")
    return current


def migrate_fields(name: str, fields: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the fields of a stored config under their current names.

    Args:
        name: current dotted name of the class.
        fields: stored fields; those that are already current stay unchanged.
    """
    if not name.startswith("plimsoll."):
        return fields
    component = name.rpartition(".")[2]
    renamed = RENAMED_FIELDS.get(component, {})
    migrated = {}
    for field, value in fields.items():
        current = renamed.get(field, field)
        if isinstance(value, str):
            value = RENAMED_VALUES.get(component, {}).get(current, {}).get(value, value)
        migrated[current] = value
    if component == "Memory" and "hosted_layers" in migrated:
        # The number of layers is now part of the placement: pinned_host:8.
        hosted_layers = migrated.pop("hosted_layers")
        if hosted_layers is not None:
            migrated["parameters"] = f"{migrated.get('parameters', 'pinned_host')}:{hosted_layers}"
    return migrated


def _component_name(target: Target) -> str:
    """Returns the name of a component of Plimsoll; "" for any other class, which may have the same name."""
    return target.__name__ if is_ours(target) and is_component(target) else ""
