"""What `config.trainer` says: how long a run is, what it reports, evaluates, saves and keeps.

May import: framework.config.
"""

from __future__ import annotations

from framework.config import NonNegativeFloat, NonNegativeInt, PositiveInt


class TrainerOptions:
    """The loop's options. Every interval is in steps; a step is one update.

    Args:
        max_steps: where the run ends.
        seed: of initialization and dropout; the data has its own.
        log_every: metrics are written and shown this often.
        eval_every: validation sets are evaluated this often, and at the end; None means only at the end.
        eval_batches: at most this many batches per set during the run, evenly spaced; None means all, as at the end.
        save_every: checkpoints are saved this often, and at the end.
        keep: the newest checkpoints that are kept.
        keep_every: also keep the checkpoints of each such step, for good.
        profile: [first, last] steps to be traced into WORKDIR/profile; [] traces none.
        sample_tokens: tokens of the sample that ends a run; 0 for none.
        sample_prompt: what the sample continues.
        sample_temperature: 0 is greedy.
        compilation_cache: folder where compiled programs outlive the process; None keeps none.
        wandb_project: also report to this Weights & Biases project (`pip install wandb`).
    """

    def __init__(
        self,
        *,
        max_steps: PositiveInt,
        seed: NonNegativeInt = 0,
        log_every: PositiveInt = 10,
        eval_every: PositiveInt | None = 1000,
        eval_batches: PositiveInt | None = None,
        save_every: PositiveInt = 1000,
        keep: PositiveInt = 2,
        keep_every: PositiveInt | None = None,
        profile: list[int] = [],  # noqa: B006
        sample_tokens: NonNegativeInt = 0,
        sample_prompt: str = "",
        sample_temperature: NonNegativeFloat = 0.8,
        compilation_cache: str | None = "~/.cache/plimsoll/xla",
        wandb_project: str | None = None,
    ):
        if profile and (len(profile) != 2 or not 1 <= profile[0] <= profile[1]):
            raise ValueError(f"profile: expected [] or [first, last] with 1 <= first <= last, given {profile}")
        self.max_steps, self.seed = max_steps, seed
        self.log_every, self.eval_every, self.eval_batches = log_every, eval_every, eval_batches
        self.save_every, self.keep, self.keep_every = save_every, keep, keep_every
        self.profile = list(profile)
        self.sample_tokens, self.sample_prompt = sample_tokens, sample_prompt
        self.sample_temperature = sample_temperature
        self.compilation_cache, self.wandb_project = compilation_cache, wandb_project
