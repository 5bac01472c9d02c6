"""Finds the numbers in a config that count training steps, and scales them; never by their names.

Muon's `ns_steps` are iterations within one update, and APOLLO's `update_interval` counts updates regardless of the
length of the run, but the `boundaries` of joined schedules are steps of the run. So optax's schedules are listed with
their arguments, and a user's own components declare it in their type hints:

    def my_schedule(peak: float, hold: TrainingSteps, steps: RunSteps | None = None) -> optax.Schedule: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types as at
import optax
from optax import contrib

from plimsoll.framework.config import Config, get_schema, get_target
from plimsoll.framework.config.names import get_dotted_name, join
from plimsoll.framework.config.schema import arms


@dataclass(frozen=True)
class _CountsSteps:
    """Mark in a type hint for a number that counts training steps.

    Args:
        is_run: whether the number defaults to the length of the run.
    """

    is_run: bool


TrainingSteps = Annotated[int, at.Ge(0), _CountsSteps(is_run=False)]
RunSteps = Annotated[int, at.Gt(0), _CountsSteps(is_run=True)]

# Type of an argument: a length, a place that may be step 0, a list of places, a dict with places as keys, or a list of
# dicts of arguments of warmup_cosine_decay_schedule.
_ArgumentType = Literal["length", "place", "places", "keys", "cycles"]

_TRANSITION: dict[str, _ArgumentType] = {"transition_steps": "length", "transition_begin": "place"}
_COSINE: dict[str, _ArgumentType] = {"warmup_steps": "place", "decay_steps": "length"}
STEP_ARGUMENTS: dict[Callable[..., Any], dict[str, _ArgumentType]] = {
    optax.constant_schedule: {},
    optax.cosine_decay_schedule: {"decay_steps": "length"},
    optax.cosine_onecycle_schedule: {"transition_steps": "length"},
    optax.exponential_decay: _TRANSITION,
    optax.join_schedules: {"boundaries": "places"},
    optax.linear_onecycle_schedule: {"transition_steps": "length"},
    optax.linear_schedule: _TRANSITION,
    optax.piecewise_constant_schedule: {"boundaries_and_scales": "keys"},
    optax.piecewise_interpolate_schedule: {"boundaries_and_scales": "keys"},
    optax.polynomial_schedule: _TRANSITION,
    optax.sgdr_schedule: {"cosine_kwargs": "cycles"},
    optax.warmup_constant_schedule: {"warmup_steps": "place"},
    optax.warmup_cosine_decay_schedule: _COSINE,
    optax.warmup_exponential_decay_schedule: {"warmup_steps": "place", **_TRANSITION},
    # Optimizers with a built-in schedule.
    contrib.schedule_free_adamw: {"warmup_steps": "place"},
    contrib.schedule_free_sgd: {"warmup_steps": "place"},
}


def step_arguments(config: Config) -> dict[str, _ArgumentType] | None:
    """Return the arguments of one component that count training steps; None if neither table nor type hints say."""
    target = get_target(config)
    if target in STEP_ARGUMENTS:
        return STEP_ARGUMENTS[target]
    marks_by_name = {name: _marks(field.hint) for name, field in get_schema(config).items()}
    if not any(marks_by_name.values()):
        return None
    arguments: dict[str, _ArgumentType] = {}
    for name, marks in marks_by_name.items():
        # The length of the run is filled in anew for each run, so it needs no scaling.
        if marks and not marks[0].is_run:
            arguments[name] = "place"
    return arguments


def _marks(hint: object) -> list[_CountsSteps]:
    """Return the marks in a type hint, in any arm of a union."""
    marks = []
    for arm in arms(hint):
        for note in getattr(arm, "__metadata__", ()):
            if isinstance(note, _CountsSteps):
                marks.append(note)
    return marks


def _run_fields(config: Config) -> list[str]:
    """Return the fields of one component that default to the length of the run."""
    names = []
    for name, field in get_schema(config).items():
        if any(mark.is_run for mark in _marks(field.hint)):
            names.append(name)
    return names


def following(config: Config) -> list[str]:
    """Return the paths of the config fields that follow the run: those that default to its length and are not set."""
    paths = []
    for path, node in config.walk():
        if not isinstance(node, Config):
            continue
        for name in _run_fields(node):
            if node.get(name) is None:
                paths.append(join(path, name))
    return paths


def with_run_length(config: Config, steps: int) -> Config:
    """Return a copy in which the schedules that follow the run have its length."""
    completed = config.copy()
    for path in following(config):
        completed.set_path(path, steps)
    return completed


def schedules(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield (path, config) for each schedule in a config, except those that are parts of another."""
    schedule_paths: list[str] = []
    for path, node in config.walk():
        if not isinstance(node, Config):
            continue
        if any(path.startswith(f"{outer}.") for outer in schedule_paths):
            continue
        for name, value in node.items():
            if not isinstance(value, Config):
                continue
            # An argument that may be a schedule. The learner reports `learning_rate`, also for a user's own optimizer,
            # which may have no type hints.
            takes_schedule = any(arm == optax.Schedule for arm in arms(get_schema(node)[name].hint))
            if takes_schedule or name == "learning_rate":
                schedule_path = join(path, name)
                schedule_paths.append(schedule_path)
                yield schedule_path, value


def scale(config: Config, new: int, old: int) -> list[str]:
    """Scale the schedules of a config from a run of `old` steps to one of `new` steps, in place.

    Schedules that follow the run need no scaling.

    Args:
        config: the config to change.
        new, old: lengths of the runs in steps.

    Returns:
        A message for each schedule whose step-counting arguments are unknown.
    """
    schedule_paths = {path for path, _ in schedules(config)}
    unknown = []
    # A list, because the loop changes the config.
    for path, node in list(config.walk()):
        if not isinstance(node, Config):
            continue
        if _run_fields(node):
            continue
        arguments = step_arguments(node)
        is_in_schedule = any(path == outer or path.startswith(f"{outer}.") for outer in schedule_paths)
        if arguments is None and is_in_schedule:
            unknown.append(
                f"{path} ({get_dotted_name(get_target(node))}) is unchanged, because it does not declare "
                "which of its numbers are training steps; annotate them with "
                "plimsoll.framework.optimizers.schedule_steps.TrainingSteps"
            )
        for name, kind in (arguments or {}).items():
            value = node.get(name)
            if value is not None:
                config.set_path(join(path, name), _scale_argument(value, kind, new, old))
    return unknown


def _scale_argument(value: Any, kind: _ArgumentType, new: int, old: int) -> Any:
    """Return an argument written for a run of `old` steps, scaled to one of `new` steps."""
    # Integer division rounds down the same on every machine. No length becomes zero, because optax refuses that.
    if kind == "length":
        return max(1, value * new // old)
    if kind == "place":
        return value * new // old
    if kind == "places":
        return [step * new // old for step in value]
    if kind == "keys":
        return {str(int(step) * new // old): factor for step, factor in value.items()}
    cycles = []
    for cycle in value:
        scaled_cycle = {}
        for name, argument in cycle.items():
            if name in _COSINE:
                argument = _scale_argument(argument, _COSINE[name], new, old)
            scaled_cycle[name] = argument
        cycles.append(scaled_cycle)
    return cycles


def get_schedule_length(config: Config) -> int | None:
    """Return the number of steps that a schedule is written for, including its parts; None if it has no such number."""
    lengths = []
    for _, node in config.walk():
        if not isinstance(node, Config):
            continue
        arguments: dict[str, _ArgumentType] = step_arguments(node) or {}
        for name, kind in arguments.items():
            value = node.get(name)
            # A fraction of the run is not a number of steps.
            if not value or isinstance(value, float):
                continue
            # The last step that the argument refers to.
            if kind == "places":
                lengths.append(max(value))
            elif kind == "keys":
                lengths.append(max(map(int, value)))
            elif kind == "cycles":
                lengths.append(sum(cycle.get("decay_steps", 0) for cycle in value))
            else:
                lengths.append(value)
        for name in _run_fields(node):
            if node.get(name) is not None:
                lengths.append(node[name])
    return max(lengths, default=None)
