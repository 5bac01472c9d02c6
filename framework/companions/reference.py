"""Reference: the log-probabilities of a batch's targets by the model that a run began with.

Preferences are compared with them (`framework.objectives.preferences`). A second model in device memory is the usual
price; no kind of reference here pays it:

    adapter_off   the model itself with its adapters switched off: a forward pass more in each step
    stored        computed once before training, for all rows, and kept in the workdir: no cost in a step
    hosted        weights in host memory that visit layer by layer: a forward pass more in each step, and their way
    none          nothing is added
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from framework.companions.forward import Forward
from framework.companions.other_model import OtherModel, other_experiment
from framework.companions.passes import forward_passes
from framework.companions.scoring import Scoring
from framework.config import component
from framework.data.batches import Shapes
from framework.layers.base import Context
from framework.layers.head import LMHead
from framework.layout import Nested
from framework.models.causal_lm import CausalLM
from framework.program.companion import Companion, Passes, Tell
from framework.program.experiment import Experiment
from framework.program.program import Program
from framework.program.rows import Batch
from framework.schedules.layerwise.programs import Compile, Ledger

ARRAY = "reference"
Kind = Literal["adapter_off", "stored", "hosted", "none"]


class Choice(NamedTuple):
    """The kind of a reference, and why it is that one."""

    kind: Kind
    reason: str


@component
class Reference(Companion):
    """Adds `reference`, f32[B, S]: the log-probability of each target by the reference, 0 where none is counted.

    Args:
        kind: see above. "auto" is none where the objective reads no reference, adapter_off where the model has adapters
            (and is its own reference), and otherwise stored.
        pretrained: the directory of a published model that is the reference, or hf://ORG/NAME; None for the weights
            that the run begins with.
    """

    def __init__(
        self,
        *,
        kind: Literal["auto", "adapter_off", "stored", "hosted", "none"] = "auto",
        pretrained: str | None = None,
    ):
        if pretrained is not None and kind in ("adapter_off", "none"):
            raise ValueError(f"pretrained = {pretrained} with kind = {kind}; expected kind = stored or hosted")
        self.kind: Kind | Literal["auto"] = kind
        self.pretrained = pretrained
        self._experiment: Experiment | None = None
        self._forwards: dict[str, Forward] = {}
        self._other: OtherModel | None = None
        self._program: Program | None = None

    # --- what it is ---------------------------------------------------------------------------------------------------

    def join(self, experiment: Experiment) -> None:
        """See `Companion`."""
        self._experiment = experiment

    @property
    def choice(self) -> Choice:
        """The kind that is in effect."""
        if self.kind != "auto":
            return Choice(self.kind, "companion.kind says so")
        assert self._experiment is not None, "join() first"
        model = self._experiment.model
        objective = model.head.objective if isinstance(model, CausalLM) else None
        if objective is None or ARRAY not in objective.arrays:
            return Choice("none", "the objective reads no reference")
        if self.pretrained is not None:
            return Choice("stored", "companion.pretrained is another model, whose values are computed once")
        if model.lora is None:
            return Choice("stored", "all weights are trained, and the values of the first ones are computed once")
        if self._experiment.memory.update == "layer_programs":
            return Choice("stored", "memory.update = layer_programs runs no forward pass beside its step")
        if model.buffer_specs():
            return Choice("stored", "the model has buffers that steps move, adapters or not")
        return Choice("adapter_off", "the model without its adapters is the one that the run began with")

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """See `Companion`: f32[B, S] more, or nothing."""
        if self.choice.kind == "none":
            return delivered
        shape, _ = delivered["weights"]
        return {**delivered, ARRAY: (shape, "float32")}

    def check(self, experiment: Experiment) -> None:
        """See `Companion`."""
        kind = self.choice.kind
        if kind == "none":
            return
        # Reading the property is the check.
        model = experiment.language_model
        if kind == "adapter_off" and model.lora is None:
            raise ValueError("companion.kind = adapter_off, and model.lora is not set; expected stored or hosted")
        if kind == "adapter_off" and experiment.memory.update == "layer_programs":
            raise ValueError(
                "companion.kind = adapter_off with memory.update = layer_programs, which runs no forward pass beside "
                "its step; expected companion.kind = stored or hosted"
            )
        if kind == "adapter_off" and model.buffer_specs():
            raise ValueError(
                "companion.kind = adapter_off, and the model has buffers (a router's bias) that steps move, so that it "
                "is not what the run began with; expected companion.kind = stored or hosted"
            )

    def check_files(self, program: Program, workdir: Path, *, begins: bool) -> None:
        """See `Companion`: the reference's weights and its tokenizer, and what a run that goes on has stored."""
        kind = self.choice.kind
        if kind in ("stored", "hosted"):
            self._other_of(program).check_files()
        if kind == "stored" and not begins:
            Scoring(program, self._other_of(program), workdir).check()

    # --- what it does -------------------------------------------------------------------------------------------------

    def open(self, program: Program, workdir: Path, *, begins: bool, tell: Tell) -> None:
        """See `Companion`. A stored reference that is not there yet is computed."""
        choice = self.choice
        tell(f"reference: {choice.kind} ({choice.reason})")
        if choice.kind == "stored":
            scoring = Scoring(program, self._other_of(program), workdir)
            # A program for inference writes nothing.
            if program.training:
                scoring.run(begins=begins, tell=tell)
                self._other = None
            elif not scoring.opened():
                tell("the workdir has no stored reference of these weights and data: its model is loaded")
                self._other_of(program).load()
        elif choice.kind == "hosted":
            self._other_of(program).load()
        self._program = program

    def is_open(self, program: Program) -> bool:
        """See `Companion`."""
        # The model itself needs no opening.
        return self.choice.kind in ("none", "adapter_off") or self._program is program

    def completed(self, program: Program, state: dict[str, Any], batch: Batch, *, group: str = "parameter") -> Batch:
        """See `Companion`."""
        if ARRAY in batch or self.choice.kind == "none":
            return batch
        if self.choice.kind == "adapter_off":
            return {**batch, **self._without_adapters(program, group)(state, batch, after=state["counter"])}
        return {**batch, **self._other_of(program)(batch, after=state.get("counter", ()))}

    def host_bytes(self, program: Program) -> int:
        """See `Companion`: the weights of a hosted reference."""
        return self._other_of(program).hosted_bytes if self.choice.kind == "hosted" else 0

    def passes(self, experiment: Experiment, mesh: Any) -> Passes:
        """See `Companion`: a forward pass, of adapter_off by the run's own weights."""
        kind = self.choice.kind
        if kind == "adapter_off":
            return forward_passes(experiment, experiment, mesh, hosted=False)._replace(hosted_bytes=0)
        if kind == "hosted":
            other = other_experiment(experiment, self.pretrained)
            return forward_passes(experiment, other, mesh, hosted=True)
        return Passes()

    def rehearsed(self, program: Program, compile: Compile) -> dict[str, Ledger]:
        """See `Companion`: of adapter_off and hosted what each step runs, of stored what runs once before."""
        choice = self.choice
        if choice.kind == "none":
            return {}
        state_bytes = program.layout.bytes_per_device(memory_kind="device")
        if choice.kind == "adapter_off":
            forward = self._without_adapters(program, "parameter")
            return {ARRAY: forward.rehearsed(compile, beside=state_bytes - forward.resident_bytes)}
        other = self._other_of(program)
        if choice.kind == "hosted":
            return {ARRAY: other.rehearsed(compile, beside=state_bytes)}
        # The state does not exist yet.
        ledger = other.rehearsed(compile, beside=0)
        ledger.once = True
        return {ARRAY: ledger}

    def _without_adapters(self, program: Program, group: str) -> Forward:
        """The forward pass of the running state's own arrays, with adapters switched off."""
        forward = self._forwards.get(group)
        if forward is None or forward.program is not program:
            accumulate = program.experiment.learner.accumulate
            forward = Forward(
                program,
                _counted_log_probs,
                what="the reference",
                group=group,
                change=without_adapters,
                accumulate=accumulate,
            )
            self._forwards[group] = forward
        return forward

    def _other_of(self, program: Program) -> OtherModel:
        """The reference as a model of its own."""
        if self._other is None or self._other.run is not program:
            self._other = OtherModel(
                program,
                _counted_log_probs,
                path=self.pretrained,
                what="the reference",
                hosted=self.choice.kind == "hosted",
            )
        return self._other


def _counted_log_probs(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """{"reference": f32[B, S]}."""
    log_probs_BS = head.log_probs(weights, x_BSD, ctx)
    return {ARRAY: jnp.where(ctx.batch["weights"] != 0, log_probs_BS, 0.0)}


def without_adapters(params: Nested) -> Nested:
    """All parameters with the second factor of each adapter as zeros, so that its product is zero."""

    def switched_off(keypath: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = keypath[-1].key
        # Those of experts have the name of their matrix before it.
        return jnp.zeros_like(x) if name == "lora_b" or name.endswith("_lora_b") else x

    return jax.tree_util.tree_map_with_path(switched_off, params)
