"""The rungs of a ladder: the same training run at several model sizes, each as a config.

All rungs keep the base's data, batch and learning rate. What grows is the model, and the number of tokens with it: a
fixed number for each parameter, 20 by default (Hoffmann et al. 2022, arXiv 2203.15556).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from plimsoll.extras.scaling.mup import widen
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.optimizers.schedule_steps import scale

Parametrization = Literal["mup", "usual"]
PARAMETRIZATIONS: tuple[str, ...] = get_args(Parametrization)
DEFAULT_TOKENS_PER_PARAMETER = 20.0
TRAIN_LOSS = "train/loss"


@dataclass(frozen=True)
class LadderOptions:
    """The sizes of a ladder and the length of its runs.

    Attributes:
        heads: widths, in heads of attention; None if each rung has a config of its own.
        tokens_per_parameter: training tokens for each parameter; None with `steps`.
        steps: number of steps of every rung; None with `tokens_per_parameter`.
        parametrization: "mup" to widen by muP relative to the base, "usual" to change only the sizes.
        max_epochs: how often the training data may be read.
        metric: name of the loss in metrics.jsonl; None for the loss of the only validation set.
    """

    heads: tuple[int, ...] | None = None
    tokens_per_parameter: float | None = None
    steps: int | None = None
    parametrization: str = "mup"
    max_epochs: float = 1.0
    metric: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens_per_parameter is None) == (self.steps is None):
            raise ConfigError("a ladder has a number of tokens_per_parameter or of steps; expected one of the two")
        for name in ("tokens_per_parameter", "steps", "max_epochs"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value:g}: expected more than 0")
        if self.parametrization not in PARAMETRIZATIONS:
            raise ConfigError(f"parametrization={self.parametrization}: expected {' or '.join(PARAMETRIZATIONS)}")
        for heads in self.heads or ():
            if heads < 1:
                raise ConfigError(f"heads={heads}: expected at least 1")
            if self.heads is not None and self.heads.count(heads) > 1:
                raise ConfigError(f"heads={heads} is given twice; the rungs of a ladder have different sizes")


@dataclass(frozen=True)
class Rung:
    """One size of a ladder.

    Attributes:
        name: name of its folder.
        heads: number of heads of attention that determine the width; None if the config was given.
        width: width of the model.
        layers: number of layers.
        parameters: number of parameters.
        non_embedding_parameters: number of parameters without the embedding tables; a head that is not tied counts.
        flops_per_token: training FLOPs per token, as in a plan.
        tokens_per_step: tokens of a batch.
        steps: number of training steps.
        config: config of its run.
    """

    name: str
    heads: int | None
    width: int
    layers: int
    parameters: int
    non_embedding_parameters: int
    flops_per_token: float
    tokens_per_step: int
    steps: int
    config: Config

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """Training FLOPs that the model needs, without recomputation."""
        return self.tokens * self.flops_per_token

    @property
    def sha256(self) -> str:
        """A digest of the config. The folder of tokens and the folder of compiled programs do not count."""
        content = json.loads(self.config.to_json())
        content["data"].pop("cache_dir", None)
        content["trainer"].pop("compilation_cache", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def build_rungs(configs: Sequence[Config], options: LadderOptions) -> list[Rung]:
    """Return the rungs of a ladder, smallest first.

    Args:
        configs: the base config; without `options.heads`, the config of each rung. Rules of accelerators have been
            applied.
        options: sizes and lengths.

    Raises:
        ConfigError: a config cannot be scaled, rungs have the same size, or the metric does not exist.
    """
    if options.heads is None:
        rungs = [build_rung(f"rung-{index}", config, options) for index, config in enumerate(configs)]
    else:
        (base,) = configs
        rungs = [build_widened_rung(base, heads, options) for heads in options.heads]
    rungs.sort(key=lambda rung: rung.parameters)
    for smaller, larger in itertools.pairwise(rungs):
        if smaller.parameters == larger.parameters:
            raise ConfigError(
                f"{smaller.name} and {larger.name} both have {smaller.parameters:,} parameters; the rungs of a ladder "
                "have different sizes"
            )
    return rungs


def build_widened_rung(base: Config, heads: int, options: LadderOptions) -> Rung:
    """Return the rung of a width."""
    _check_base(base)
    return build_rung(f"heads-{heads}", widen(base, heads, mup=options.parametrization == "mup"), options, heads)


def build_rung(name: str, config: Config, options: LadderOptions, heads: int | None = None) -> Rung:
    """Return the rung of a config: with its length set.

    Args:
        name: name of its folder.
        config: config of the size.
        options: sizes and lengths.
        heads: number of heads that it was widened to; None if the config was given.
    """
    _check_base(config)
    model = config.model.instantiate()
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{name}: a ladder requires language models")
    if options.metric is not None:
        choose_metric(config, options)
    parameters = sum(spec.size for spec in model.base_specs.values())
    embedding = sum(spec.size for path, spec in model.base_specs.items() if path.startswith("embed/"))
    tokens_per_step = config.data.global_batch_size * config.data.seq_len
    steps = options.steps
    if steps is None:
        assert options.tokens_per_parameter is not None
        steps = math.ceil(options.tokens_per_parameter * parameters / tokens_per_step)
    sized = config.copy()
    if config.trainer.max_steps is not None:
        # Schedules that follow the run do so by themselves.
        scale(sized.learner, steps, config.trainer.max_steps)
    sized.trainer.max_steps = steps
    sized.trainer.max_epochs = None
    # Every mistake shows before anything starts.
    sized.instantiate()
    return Rung(
        name=name,
        heads=heads,
        width=model.dim,
        layers=config.model.stack.num_layers + (0 if config.model.first is None else config.model.first.num_layers),
        parameters=parameters,
        non_embedding_parameters=parameters - embedding,
        flops_per_token=float(model.flops_per_token(config.data.seq_len)),
        tokens_per_step=tokens_per_step,
        steps=steps,
        config=sized,
    )


def choose_metric(config: Config, options: LadderOptions) -> str:
    """Return the name of the loss that the rungs of a ladder are compared by.

    Raises:
        ConfigError: there is no such metric, or several validation sets and none is named.
    """
    names = [f"eval/{name}/loss" for name in config.data.validation]
    if options.metric is not None:
        if options.metric not in (*names, TRAIN_LOSS):
            raise ConfigError(f"metric={options.metric}: expected one of {', '.join([*names, TRAIN_LOSS])}")
        return options.metric
    if not names:
        raise ConfigError(
            f"a ladder compares losses of a validation set, and the config has none (data.validation); add one, or set "
            f"metric={TRAIN_LOSS} to compare the noisier training losses"
        )
    if len(names) > 1:
        raise ConfigError(
            f"a ladder compares one loss, and the config has {len(names)} validation sets; set metric to one of "
            f"{', '.join(names)}"
        )
    return names[0]


def _check_base(config: Config) -> None:
    """Raise ConfigError for a config whose runs do not train all parameters from scratch, on the same data."""
    if config.data.takes("stages") and any(step != "0" for step in config.data.stages):
        raise ConfigError(
            "the rungs of a ladder have different lengths, but the data of this config changes at a step; expected "
            "data.stages={}"
        )
    if config.takes("pretrained") and config.pretrained is not None:
        raise ConfigError(
            "a ladder trains every size from scratch, but this config starts from published weights (pretrained); "
            "use a config without them"
        )
    if config.model.takes("lora") and config.model.lora is not None:
        raise ConfigError("a ladder trains every parameter, but this config has adapters (model.lora)")
