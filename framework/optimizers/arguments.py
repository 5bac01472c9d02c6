"""Valid ranges for the arguments of optimizers and schedules whose own signatures do not define them.

optax's type hints accept nearly anything: a decay of 1.5, a learning rate of NaN, `true` for a number. Training runs
with all of these, and learns nothing. optax gives an argument name the same meaning in all its functions, with few
exceptions, which their defaults reveal. Components of Plimsoll define ranges in their type hints, except that
`learning_rate` is checked here for them as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll.framework.config import Config, ConfigError, get_schema, get_target
from plimsoll.framework.config.names import join, show


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds.

    Args:
        words: description of the range for error messages.
        low: lower bound, included in the range.
        high: upper bound, not included.
        open_low: whether `low` itself is excluded.
    """

    words: str
    low: float
    high: float
    open_low: bool = False

    def has(self, value: object) -> bool:
        """Return whether a value, or each value of a list, is a number in the range. NaN is in no range."""
        if isinstance(value, list | tuple):
            return all(self.has(element) for element in value)
        # A bool is an int in Python.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.open_low and value == self.low:
            return False
        return self.low <= value < self.high


_DECAY = Range("a number >= 0 and < 1", 0.0, 1.0)
_AT_LEAST_ZERO = Range("a finite number >= 0", 0.0, math.inf)
_POSITIVE = Range("a finite number > 0", 0.0, math.inf, open_low=True)
_NUMBER = Range("a finite number", -math.inf, math.inf, open_low=True)

# Ranges of the arguments of optax's functions, by name. If an argument's default is out of the range, the name has a
# different meaning there (`b2` of sm3, where 1 means a sum of squares), and any finite number is allowed.
RANGES: dict[str, Range] = {
    **dict.fromkeys(("b1", "b2", "b3", "beta", "beta3", "betas", "adam_b1", "adam_b2"), _DECAY),
    **dict.fromkeys(("decay", "rho", "momentum"), _DECAY),
    **dict.fromkeys(("learning_rate", "adam_learning_rate", "max_learning_rate", "weight_decay"), _AT_LEAST_ZERO),
    **dict.fromkeys(("weight_decay_rate", "adam_weight_decay", "eps", "eps_root", "adam_eps_root"), _AT_LEAST_ZERO),
    # These are rates that a schedule returns.
    **dict.fromkeys(("init_value", "peak_value", "end_value", "value"), _AT_LEAST_ZERO),
    **dict.fromkeys(
        ("clipping_threshold", "clip_threshold", "clipping", "max_delta", "max_norm", "l2_norm_clip"), _POSITIVE
    ),
}


def check_arguments(config: Config, path: str) -> None:
    """Check the arguments of an optimizer, and of the components in it, against their ranges.

    Args:
        config: the optimizer's config.
        path: the optimizer's dotted path in the whole config, "learner.optimizer".

    Raises:
        ConfigError: an argument is out of its range; the error has the argument's dotted path.
    """
    for node_path, node in config.walk():
        if not isinstance(node, Config):
            continue
        package = get_target(node).__module__.partition(".")[0]
        for name, value in node.items():
            if value is None or isinstance(value, Config | str | dict):
                continue
            # Arguments of wrappers and of a user's own optimizers are theirs to check. The exception is
            # `learning_rate`, which the learner reports.
            if package != "optax" and name != "learning_rate":
                continue
            default = get_schema(node)[name].default
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            if name in RANGES and (not is_number or RANGES[name].has(default)):
                expected = RANGES[name]
            elif is_number:
                expected = _NUMBER
            else:
                continue
            if not expected.has(value):
                argument_path = join(path, join(node_path, name))
                raise ConfigError(f"expected {expected.words}, given {show(value)}", path=argument_path)
