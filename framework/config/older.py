"""Fields of configs that an older version of Plimsoll has stored, as today's constructors take them."""

from typing import Any

_MEMORY = "framework.schedules.memory.Memory"


def todays_fields(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a stored config under today's names.

    Args:
        name: the dotted name of the class, as it is today.
        fields: as they were stored; what is today's already stays as it is.
    """
    if name != _MEMORY or "hosted_layers" not in fields:
        return fields
    memory_fields = dict(fields)
    # The number of layers is part of the placement now: pinned_host:8.
    hosted_layers = memory_fields.pop("hosted_layers")
    if hosted_layers is not None:
        memory_fields["parameters"] = f"{memory_fields.get('parameters', 'pinned_host')}:{hosted_layers}"
    return memory_fields
