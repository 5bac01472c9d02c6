"""What `config.trainer` says: how long a run is, what it reports, evaluates, saves and keeps.

May import: framework.config.
"""

from __future__ import annotations

from framework.config import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, component, diff


@component
class TrainerOptions:
    """The loop's options. Every interval is in steps; a step is one update.

    Args:
        max_steps: where the run ends.
        max_epochs: it ends when the training data was read that many times instead; then `max_steps` is only the length
            that the learner's schedules are written for: all their steps are scaled to what the data gives.
        seed: of initialization and dropout; the data has its own.
        log_every: metrics are written and shown this often.
        eval_every: validation sets are evaluated this often, and at the end; None means only at the end.
        eval_batches: at most this many batches per set during the run, evenly spaced; None means all, as at the end.
        save_every: checkpoints are saved this often, and at the end.
        save_every_minutes: and when that long has passed since the last one, by the clock of the first process.
        keep: the newest checkpoints that are kept.
        keep_every: also keep the checkpoints of each such step, for good.
        profile: [first, last] steps to be traced into WORKDIR/profile; [] traces none.
        sample_tokens: tokens of the sample that ends a run; 0 for none.
        sample_prompt: what the sample continues.
        sample_temperature: 0 is greedy. Of images: the standard deviation of latents.
        compilation_cache: folder where compiled programs outlive the process; None keeps none.
        wandb_project: also report to this Weights & Biases project (`pip install wandb`).
    """

    def __init__(
        self,
        *,
        max_steps: PositiveInt,
        max_epochs: PositiveFloat | None = None,
        seed: Seed = 0,
        log_every: PositiveInt = 10,
        eval_every: PositiveInt | None = 1000,
        eval_batches: PositiveInt | None = None,
        save_every: PositiveInt = 1000,
        save_every_minutes: PositiveFloat | None = None,
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
        self.max_steps, self.max_epochs, self.seed = max_steps, max_epochs, seed
        self.log_every, self.eval_every, self.eval_batches = log_every, eval_every, eval_batches
        self.save_every, self.save_every_minutes = save_every, save_every_minutes
        self.keep, self.keep_every = keep, keep_every
        self.profile = list(profile)
        self.sample_tokens, self.sample_prompt = sample_tokens, sample_prompt
        self.sample_temperature = sample_temperature
        self.compilation_cache, self.wandb_project = compilation_cache, wandb_project


def scale_steps(config: Config, steps: int) -> list[str]:
    """Makes an experiment's config one of so many steps, in place: `trainer.max_steps`, and in proportion to it the
    learner's `*_steps` and `transition_begin`. Returns a line for each change."""
    before, written = config.copy(), config.trainer.max_steps
    for path, value in list(config.learner.leaves()):
        name = path.rpartition(".")[2]
        if isinstance(value, int) and (name.endswith("_steps") or name == "transition_begin"):
            least = 0 if name in ("warmup_steps", "transition_begin") else 1
            config.learner.set_path(path, max(least, value * steps // written))
    config.trainer.max_steps = steps
    return [f"trainer.max_epochs = {config.trainer.max_epochs:g}: {p} {a} -> {b}" for p, a, b in diff(before, config)]
