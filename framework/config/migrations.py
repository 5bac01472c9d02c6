"""Migrates fields of configs that an older version of Plimsoll stored to the current constructors."""

from typing import Any

_MEMORY = "plimsoll.Memory"


def migrate_fields(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a stored config under their current names.

    Args:
        name: current dotted name of the class.
        fields: stored fields; those that are already current stay unchanged.
    """
    if name != _MEMORY or "hosted_layers" not in fields:
        return fields
    memory_fields = dict(fields)
    # The number of layers is now part of the placement: pinned_host:8.
    hosted_layers = memory_fields.pop("hosted_layers")
    if hosted_layers is not None:
        memory_fields["parameters"] = f"{memory_fields.get('parameters', 'pinned_host')}:{hosted_layers}"
    return memory_fields
