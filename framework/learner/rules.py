"""Which parameters are trained, and by which optimizer: rules by path, groups of parameters, and learning rates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.config.schema import ShortNames
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.scale_history import HISTORY, record_scales
from plimsoll.framework.layout import Nested, ParameterSpec, flatten, unflatten
from plimsoll.framework.optimizers.arguments import check_arguments
from plimsoll.framework.optimizers.named import OPTIMIZERS

Optimizer = Annotated[Config, ShortNames(OPTIMIZERS)]
# Labels of parameters: frozen ones, and those that keep the learner's optimizer because no rule applies.
FROZEN = "frozen"
DEFAULT = "default"
# The learning rate as a function of the number of previous updates.
LearningRate = Callable[[ArrayLike], jax.Array]
# The stage name of a group that spans all stages.
ALL_STAGES = "model"


@component
class Rule:
    """An exception for the parameters whose path matches; the first matching rule decides.

    Args:
        pattern: a regex, searched in paths such as "stack/block0/attention/query/weight".
        freeze: whether to freeze these parameters: no gradient, no optimizer state, no average.
        optimizer: another optimizer for these parameters.
        set: fields of the learner's optimizer to override, for example {"weight_decay": 0.0}.
    """

    def __init__(
        self,
        *,
        pattern: str,
        freeze: bool = False,
        optimizer: Optimizer | None = None,
        set: dict[str, Any] = {},  # noqa: B006  (a config's default is copied)
    ):
        if freeze + (optimizer is not None) + bool(set) != 1:
            raise ValueError(f"rule {pattern!r}: expected exactly one of freeze, optimizer and set")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"rule pattern {pattern!r} is no regular expression: {error}") from error
        self.freeze = freeze
        self.optimizer = optimizer
        self.set = set


def label(specs: Nested, optimizer: Config, rules: list[Rule]) -> tuple[dict[str, str], dict[str, Config]]:
    """Apply the rules to all parameters.

    Args:
        specs: the specs of all parameters of the model.
        optimizer: config of the learner's optimizer, for parameters that no rule matches.
        rules: the rules; for each parameter, the first one that matches decides.

    Returns:
        ({path: label of the parameter's optimizer, or FROZEN}, {label: config of the optimizer}).

    Raises:
        ValueError: a pattern matches nothing, or only parameters that earlier rules decide.
        ConfigError: a field that the optimizer does not have, or a value that it does not support.
    """
    check_arguments(optimizer, "learner.optimizer")
    flat_specs = flatten(specs)
    configs = {DEFAULT: optimizer}
    labels = {}
    for path, spec in flat_specs.items():
        labels[path] = DEFAULT if spec.trainable else FROZEN
    # Rules decide about what is optimized. A frozen layer, too, needs the scales of its input and output.
    for path in [path for path, spec in flat_specs.items() if spec.is_history]:
        labels[path] = HISTORY
        configs[HISTORY] = config_for(record_scales)
        del flat_specs[path]
    # For each parameter, the index of the rule that decides.
    decided_by: dict[str, int] = {}
    for index, rule in enumerate(rules):
        matched = [path for path in flat_specs if rule.pattern.search(path)]
        if not matched:
            raise ValueError(
                f"learner.rules.{index}.pattern: {rule.pattern.pattern!r} matches none of {len(flat_specs)} "
                f"parameters, such as {list(flat_specs)[:3]}"
            )
        # Weights that adapters have frozen are ignored: a rule for them (no weight decay for norms) has no effect.
        trained = [path for path in matched if flat_specs[path].trainable]
        undecided = [path for path in trained if path not in decided_by]
        if trained and not undecided:
            raise ValueError(_format_shadowing_error(index, rules, trained, decided_by))
        rule_label = FROZEN
        if not rule.freeze:
            rule_label = f"rule{index}"
            if rule.optimizer is not None:
                config = rule.optimizer
                check_arguments(config, f"learner.rules.{index}.optimizer")
            else:
                config = optimizer.copy()
                for field, value in rule.set.items():
                    config.set_path(field, value)
                check_arguments(config, f"learner.rules.{index}.set")
            configs[rule_label] = config
        labels |= dict.fromkeys(undecided, rule_label)
        decided_by |= dict.fromkeys(undecided, index)
    return labels, configs


def _format_shadowing_error(index: int, rules: list[Rule], matched: list[str], decided_by: dict[str, int]) -> str:
    """Return the error message for a rule without effect: earlier rules decide on everything that it matches."""
    earlier = sorted({decided_by[path] for path in matched})
    names = ", ".join(f"rules.{number} ({rules[number].pattern.pattern!r})" for number in earlier)
    return (
        f"learner.rules.{index}.pattern: {rules[index].pattern.pattern!r} has no effect: earlier rules match all of "
        f"its {len(matched)} parameters (such as {matched[0]}): {names}. The first matching rule decides; put the "
        "narrower rule first"
    )


@dataclass(frozen=True)
class ParamGroup:
    """The parameters of one stage that one optimizer updates together.

    Attributes:
        stage: the stage. With learner.scope = model it is ALL_STAGES, and the group has the parameters of all stages.
        label: label of the optimizer.
        paths: paths of the parameters within the stage.
        length: number of stacked layers, or None if the parameters are not stacked.
        layer_range: the range of layers that the stage holds, if it holds only part of a stack.
    """

    stage: str
    label: str
    paths: tuple[str, ...]
    length: int | None
    layer_range: LayerRange | None = None

    @property
    def spans_stages(self) -> bool:
        """Return whether the group has the parameters of all stages, with separate layers (learner.scope = model)."""
        return self.stage == ALL_STAGES

    @property
    def path_prefix(self) -> str:
        """Return the prefix that turns the group's paths into paths in the model."""
        return "" if self.spans_stages else f"{self.stage}/"


def make_groups(trained: Nested, labels: dict[str, str], *, across_stages: bool) -> list[ParamGroup]:
    """Group the trainable parameters.

    Args:
        trained: the specs of the trainable parameters.
        labels: by path, the label of each parameter of the model.
        across_stages: whether to group only by label, not by stage and label.
    """
    flat_specs = flatten(trained)
    paths_by_group: dict[tuple[str, str], list[str]] = {}
    for path, group_label in labels.items():
        if path in flat_specs:
            stage, path_in_stage = (ALL_STAGES, path) if across_stages else path.split("/", 1)
            paths_by_group.setdefault((stage, group_label), []).append(path_in_stage)
    groups = []
    for (stage, group_label), paths in paths_by_group.items():
        # A group that spans stages has separate layers instead of stacks.
        lengths = {None} if across_stages else {flat_specs[f"{stage}/{path}"].num_layers for path in paths}
        # One vmap over the layers updates the group, so its parameters must all be stacked alike.
        assert len(lengths) == 1, f"stage {stage} mixes stacked and single parameters"
        groups.append(ParamGroup(stage, group_label, tuple(paths), lengths.pop()))
    return groups


def split_stack_specs(specs: Nested, layer_ranges: Iterable[LayerRange]) -> Nested:
    """Return the parameter specs of a model, by stage, with stacks replaced by their layer ranges."""
    homes = {layer_range.home for layer_range in layer_ranges}
    split_specs = {stage: tree for stage, tree in specs.items() if stage not in homes}
    for layer_range in layer_ranges:
        # A completely frozen stack has no trainable parameters.
        if layer_range.home not in specs:
            continue
        range_specs = {}
        for path, spec in flatten(specs[layer_range.home]).items():
            range_specs[path] = replace(spec, shape=(layer_range.count, *spec.shape[1:]))
        split_specs[layer_range.name] = unflatten(range_specs)
    return split_specs


def unstack(spec: ParameterSpec, length: int | None) -> ParameterSpec:
    """Return the spec of one layer of a parameter stacked for `length` layers; if `length` is None, the spec itself."""
    if length is None:
        return spec
    return replace(
        spec, shape=spec.shape[1:], mesh_axes=spec.mesh_axes[1:], roles=spec.roles[1:], indivisible=spec.indivisible[1:]
    )


def get_learning_rate(optimizer: Config) -> LearningRate | None:
    """Return the learning rate in an optimizer's config; None if it has none.

    It is shown in reports, and clip_mode update_rms multiplies its bound by it. The optimizer itself gets the rate
    from its own arguments.
    """
    rate = _learning_rate_field(optimizer)
    if isinstance(rate, Config):
        return rate.instantiate()
    if rate is None:
        return None
    return lambda count: jnp.asarray(rate, jnp.float32)


def distinct_learning_rates(
    configs: dict[str, Config], learning_rates: dict[str, LearningRate | None], labels: Iterable[str]
) -> dict[str, LearningRate]:
    """Return the learning rates to report, by label: the default one, and those of rules with a different rate.

    Args:
        configs, learning_rates: configs and learning rates of the optimizers, by label.
        labels: labels of the optimizers that update something.
    """
    default_field = _learning_rate_field(configs[DEFAULT])
    rates = {}
    for label in (DEFAULT, *sorted(set(labels) - {DEFAULT})):
        rate = learning_rates[label]
        # Most rules set another field, such as the weight decay.
        is_same = label != DEFAULT and _learning_rate_field(configs[label]) == default_field
        if rate is not None and not is_same:
            rates[label] = rate
    return rates


def _learning_rate_field(optimizer: Config) -> Config | float | None:
    """Return the field `learning_rate` of an optimizer's config; None if it has none."""
    # A wrapper, such as offload_optimizer, holds the optimizer with the learning rate in its field `optimizer`.
    while "optimizer" in optimizer:
        optimizer = optimizer.optimizer
    return optimizer.get("learning_rate") if "learning_rate" in optimizer else None
