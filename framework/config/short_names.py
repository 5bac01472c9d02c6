"""Components by short name, without the module: `--config.data.source=JsonLines`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from plimsoll.framework.config.components import INITIALIZERS, OPTAX, find_components
from plimsoll.framework.config.names import ConfigError, choices_in, did_you_mean, resolve


def resolve_short_name(name: str, neighbors: Iterable[str]) -> tuple[Any, str]:
    """Returns the component with a name without dots.

    Args:
        name: short name, such as TextFiles or cosine_decay_schedule.
        neighbors: dotted names of components, such as plimsoll.JsonLines. Their modules are searched first, in this
            order; then Plimsoll's components, and those of optax and jax.nn.initializers.

    Returns:
        (component, ""), or (None, suggestion for the error message) if there is no component of that name.
    """
    if not name.isidentifier():
        return None, ""
    module_names = [neighbor.rpartition(".")[0] for neighbor in neighbors]
    if name in find_components():
        module_names.append(find_components()[name])
    # Only imported modules are searched: a config that can use these has imported them.
    module_names += [module_name for module_name in (*OPTAX, INITIALIZERS) if module_name in sys.modules]
    choices = list(find_components())
    for module_name in dict.fromkeys(module_names):
        with contextlib.suppress(ConfigError):
            return resolve(f"{module_name}.{name}"), ""
        if module_name in sys.modules:
            choices += choices_in(sys.modules[module_name])
    return None, did_you_mean(name, choices)
