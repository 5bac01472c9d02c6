"""What `config.trainer` says: how long a run is, what it reports, evaluates, saves and keeps."""

from __future__ import annotations

from framework.config import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    component,
)


@component
class TrainerOptions:
    """The loop's options. Every interval is in steps; a step is one update.

    Args:
        max_steps: the run ends after so many; None: with `max_epochs` alone.
        max_epochs: it ends when the training data was read that many times, if that comes first.
        seed: of initialization and dropout; the data has its own.
        log_every: metrics are written and shown this often.
        eval_every: validation sets are evaluated this often, and at the end; None means only at the end.
        eval_batches: at most this many batches per set, evenly spaced; None means all.
        save_every: checkpoints are saved this often, and at the end.
        save_every_minutes: and when that long has passed since the last one, by the clock of the first process.
        keep: the newest checkpoints that are kept.
        keep_every: also keep the checkpoints of each such step, for good.
        profile: [first, last] steps to be traced into WORKDIR/profile; [] traces none.
        sample_tokens: tokens of the sample that ends a run; 0 for none.
        sample_prompt: what the sample continues.
        sample_temperature: 0 is greedy. Of images: the standard deviation of latents.
        compilation_cache: folder where compiled programs outlive the process; None keeps none.
        tensorboard: also write event files into WORKDIR/tensorboard.
        wandb_project: also report to this Weights & Biases project (`pip install wandb`).
        mlflow_uri: also report to this MLflow server, database or folder (`pip install mlflow`); "default": to
            what MLFLOW_TRACKING_URI says.
        hooks: your own, each a subclass of `framework.run.hooks.Hook`; they are asked in this order, after those that
            every run has.
    """

    def __init__(
        self,
        *,
        max_steps: PositiveInt | None = None,
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
        tensorboard: bool = True,
        wandb_project: str | None = None,
        mlflow_uri: str | None = None,
        hooks: list[Config] = [],  # noqa: B006
    ):
        if profile and (len(profile) != 2 or not 1 <= profile[0] <= profile[1]):
            raise ValueError(f"profile: expected [] or [first, last] with 1 <= first <= last, given {profile}")
        if max_steps is None and max_epochs is None:
            raise ValueError("expected max_steps, max_epochs, or both: the run ends with what comes first")
        # `max_steps` is a property, which refuses to answer while the length of the epochs is not
        # known.
        self.known_steps = max_steps
        self.max_epochs = max_epochs
        self.seed = seed
        self.log_every = log_every
        self.eval_every = eval_every
        self.eval_batches = eval_batches
        self.save_every = save_every
        self.save_every_minutes = save_every_minutes
        self.keep = keep
        self.keep_every = keep_every
        # Lists are copied, as the defaults of the arguments are shared between calls.
        self.profile = list(profile)
        self.sample_tokens = sample_tokens
        self.sample_prompt = sample_prompt
        self.sample_temperature = sample_temperature
        self.compilation_cache = compilation_cache
        self.tensorboard = tensorboard
        self.wandb_project = wandb_project
        self.mlflow_uri = mlflow_uri
        self.hooks = list(hooks)

    @property
    def max_steps(self) -> int:
        """Where the run ends. `known_steps` is None while the data has yet to say how many steps its epochs are."""
        assert self.known_steps is not None, "the data has yet to say how many steps max_epochs are"
        return self.known_steps
