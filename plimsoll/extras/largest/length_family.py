"""The row lengths of a config, for `plimsoll plan --longest`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from plimsoll.extras.largest.frontier import Member
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.models.causal_lm import CausalLM

# Lengths are multiples of this power of two, and of larger ones the longer they are, so that kernels and meshes can
# divide them: the first 64 multiples, then 64 lengths up to each next power of two.
_FIRST_EXPONENT = 7
_STEPS = 64
# Up to 64M tokens.
_DOUBLINGS = 13


@dataclass(frozen=True)
class LengthFamily:
    """A config with rows of any length; a `Family`. All else, such as the batch size, stays as it is.

    Attributes:
        config: the config.
        max_positions: the longest row that the model's positions support; None for any.
    """

    config: Config
    max_positions: int | None
    title: ClassVar[str] = "longest row that fits"
    columns: ClassVar[tuple[str, ...]] = ("tokens per row",)

    @staticmethod
    def derive(config: Config) -> LengthFamily:
        """Return the family of a config. Raises ConfigError if it is not a language model's."""
        experiment = config.instantiate()
        if not isinstance(experiment.model, CausalLM):
            raise ConfigError("--longest requires a language model, with rows of data.seq_len tokens")
        return LengthFamily(config, experiment.model.max_positions)

    def members(self) -> list[Member[int]]:
        """Return the lengths to search, the shortest first."""
        lengths = [step << _FIRST_EXPONENT for step in range(1, _STEPS)]
        for doubling in range(_DOUBLINGS):
            lengths += [step << (_FIRST_EXPONENT + doubling) for step in range(_STEPS, 2 * _STEPS)]
        most = self.max_positions or lengths[-1]
        if most < lengths[0]:
            raise ConfigError(
                f"the model's positions support rows of up to {most} tokens; the shortest row that is searched has "
                f"{lengths[0]}"
            )
        return [Member(length, length) for length in lengths if length <= most]

    def scale_config(self, size: int) -> Config:
        """Return the config with rows of this length."""
        scaled = self.config.copy()
        scaled.data.seq_len = size
        return scaled

    def measure(self, config: Config) -> int:
        """Return the length of a config's rows."""
        return config.data.seq_len

    def describe(self, amount: int) -> str:
        """Return a length with its unit."""
        return f"rows of {amount:,} tokens"

    def to_cells(self, member: Member[int]) -> list[str]:
        """Return the length."""
        return [f"{member.amount:,}"]

    def to_json(self, member: Member[int]) -> dict[str, Any]:
        """Return the length by name."""
        return {"seq_len": member.amount}
