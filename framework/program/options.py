"""The `config.trainer` section: length of a run, logging, evaluation, checkpoints and samples."""

from __future__ import annotations

from plimsoll.framework.config import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    component,
    config_for,
)
from plimsoll.framework.program.stop_rules import Mode, StopRules


@component
class CheckpointOptions:
    """Options for writing checkpoints.

    Args:
        window_gib: host memory in GiB that a save of one process may use. If a copy of the state fits in it, the copy
            is written in the background; otherwise training waits while the state is written a few rows at a time.
            None: a copy if host memory has room for it, else a quarter of the free memory, at most 1 GiB.
    """

    def __init__(self, *, window_gib: PositiveFloat | None = None):
        self.window_gib = window_gib


@component
class TrainerOptions:
    """Options of the training loop. Every interval is in steps; a step is one update.

    Args:
        max_steps: number of steps after which the run ends; None if only `max_epochs` ends it.
        max_epochs: number of passes over the training data after which the run ends, if that comes first.
        seed: seed of initialization and dropout; the data has its own.
        log_every: interval for writing and showing metrics.
        eval_every: interval for evaluating the validation sets, which are also evaluated at the end; None evaluates
            only at the end.
        eval_batches: maximum number of batches per validation set, evenly spaced; None for all.
        save_every: interval for saving checkpoints, which are also saved at the end.
        save_every_minutes: minutes since the last checkpoint after which one is saved too, by the clock of process 0.
        keep: number of newest checkpoints to keep.
        keep_every: interval of steps whose checkpoints are kept permanently, in addition to the newest.
        keep_best: metric of evaluations, such as "loss" or "eval/SET/loss"; an evaluation that improves it saves a
            checkpoint, and the best one is kept in addition to the newest. None keeps no best checkpoint.
        keep_best_mode: whether lower (min) or higher (max) values of that metric are better.
        stop: rules that end the run before its last step.
        profile: [first, last] steps to trace into WORKDIR/profile; [] traces none.
        sample_tokens: number of tokens in the sample at the end of a run; 0 for no sample.
        sample_prompt: prompt that the sample continues.
        sample_temperature: sampling temperature; 0 is greedy. For images: standard deviation of the latents.
        compilation_cache: folder that stores compiled programs across processes; None disables the cache.
        tensorboard: whether to also write event files into WORKDIR/tensorboard.
        wandb_project: Weights & Biases project that also receives the metrics (`pip install wandb`).
        mlflow_uri: MLflow server, database or folder that also receives the metrics (`pip install mlflow`); "default"
            uses MLFLOW_TRACKING_URI.
        hooks: your own hooks, each a subclass of `framework.run.hooks.Hook`; they are called in this order, after the
            built-in hooks.
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
        keep_best: str | None = None,
        keep_best_mode: Mode = "min",
        stop: Config = config_for(StopRules),
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
            raise ValueError("expected max_steps, max_epochs, or both: the run ends at whichever comes first")
        self.stop: StopRules = stop.instantiate()
        if eval_every is None and (self.stop.patience is not None or keep_best is not None):
            field = "keep_best" if self.stop.patience is None else "stop.patience"
            raise ValueError(f"{field} requires eval_every: without it, only the last step is evaluated")
        # `max_steps` is a property, which raises while the length of the epochs is unknown.
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
        self.keep_best = keep_best
        self.keep_best_mode: Mode = keep_best_mode
        # Copy lists, because the defaults of arguments are shared between calls.
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
        """The last step of the run. `known_steps` is None until the data has determined the steps per epoch."""
        assert self.known_steps is not None, "the number of steps in max_epochs is unknown until the data has been read"
        return self.known_steps
