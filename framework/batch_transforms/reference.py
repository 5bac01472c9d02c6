"""Reference model: adds the log-probabilities of a batch's targets under the model that the run started from.

Preference objectives compare against them (`framework.objectives.preferences`). Usually this costs a second model in
device memory; none of the kinds here does:

    adapter_off   the model itself with its adapters disabled: one more forward pass per step
    stored        computed once for all rows before training, and stored in the workdir: no cost per step
    offloaded        offloaded weights, copied in layer by layer: one more forward pass per step, plus the transfers
    none          nothing is added
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.batch_transforms.auxiliary_model import (
    AuxiliaryForward,
    AuxiliaryModel,
    auxiliary_experiment,
    estimate_forward,
)
from plimsoll.framework.batch_transforms.stored_reference import DAMAGED, FOLDER, StoredRows
from plimsoll.framework.config import component
from plimsoll.framework.data.batches import RowSet, Shapes
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.order import Prefetcher
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.batch_transform import BatchTransform, ForwardCost, Log
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker
from plimsoll.framework.terminal.phases import phase

ARRAY = "reference"
ReferenceKind = Literal["adapter_off", "stored", "offloaded", "none"]


@dataclass(frozen=True)
class ReferenceChoice:
    """The kind of a reference, and the reason for choosing it."""

    kind: ReferenceKind
    reason: str


@component
class Reference(BatchTransform):
    """Adds `reference`, f32[B, S]: the log-probability of each target under the reference; 0 where the weight is 0.

    Args:
        kind: "adapter_off", "stored", "offloaded" or "none", as described above. "auto" selects none if the objective
            reads no reference, adapter_off if the model has adapters (and so is its own reference), otherwise stored.
        pretrained: directory of a published model to use as the reference, or hf://ORG/NAME; None for the weights that
            the run starts from.
    """

    def __init__(
        self,
        *,
        kind: Literal["auto", "adapter_off", "stored", "offloaded", "none"] = "auto",
        pretrained: str | None = None,
    ):
        if pretrained is not None and kind in ("adapter_off", "none"):
            raise ValueError(f"pretrained = {pretrained} with kind = {kind}; expected kind = stored or offloaded")
        self.kind: ReferenceKind | Literal["auto"] = kind
        self.pretrained = pretrained
        self._experiment: Experiment | None = None
        self._forwards: dict[str, AuxiliaryForward] = {}
        self._other: AuxiliaryModel | None = None
        self._program: Program | None = None

    # --- choosing the kind --------------------------------------------------------------------------------------------

    def join(self, experiment: Experiment) -> None:
        """See `BatchTransform`."""
        self._experiment = experiment

    @property
    def choice(self) -> ReferenceChoice:
        """The kind in effect, with the reason."""
        if self.kind != "auto":
            return ReferenceChoice(self.kind, "set by batch_transform.kind")
        assert self._experiment is not None, "join() first"
        model = self._experiment.model
        objective = model.head.objective if isinstance(model, CausalLM) else None
        if objective is None or ARRAY not in objective.arrays:
            return ReferenceChoice("none", "the objective reads no reference")
        if self.pretrained is not None:
            return ReferenceChoice("stored", "log-probabilities under batch_transform.pretrained are computed once")
        if model.lora is None:
            return ReferenceChoice(
                "stored", "all weights are trained; log-probabilities under the initial ones are computed once"
            )
        if self._experiment.memory.traits.is_many_programs:
            return ReferenceChoice("stored", "memory.update = layer_programs runs no forward pass outside its step")
        if model.buffer_specs():
            return ReferenceChoice("stored", "training steps change the model's buffers, with or without adapters")
        return ReferenceChoice("adapter_off", "without its adapters, the model is the one that the run started from")

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """See `BatchTransform`: adds `reference`, f32[B, S], unless the kind is none."""
        if self.choice.kind == "none":
            return delivered
        shape, _ = delivered["weights"]
        return {**delivered, ARRAY: (shape, "float32")}

    def check(self, experiment: Experiment) -> None:
        """See `BatchTransform`."""
        kind = self.choice.kind
        if kind == "none":
            return
        # The property raises ValueError if the model is not a language model.
        model = experiment.language_model
        if kind == "adapter_off" and model.lora is None:
            raise ValueError(
                "batch_transform.kind = adapter_off, but model.lora is not set; expected stored or offloaded"
            )
        if kind == "adapter_off" and experiment.memory.traits.is_many_programs:
            raise ValueError(
                "batch_transform.kind = adapter_off with memory.update = layer_programs, which runs no forward pass "
                "outside its step; expected batch_transform.kind = stored or offloaded"
            )
        if kind == "adapter_off" and model.buffer_specs():
            raise ValueError(
                "batch_transform.kind = adapter_off, but training steps change the model's buffers (a router's bias), "
                "so it is not the model that the run started from; expected batch_transform.kind = stored or offloaded"
            )

    def check_files(self, program: Program, workdir: Path, *, is_new_run: bool) -> None:
        """See `BatchTransform`: check the reference's weights and tokenizer, and a resumed run's stored values."""
        kind = self.choice.kind
        if kind in ("stored", "offloaded"):
            self._get_other_model(program).check_files()
        # In a new run, `open` recomputes values that do not match instead of refusing them.
        if kind == "stored" and not is_new_run:
            ReferenceScoring(program, self._get_other_model(program), workdir).check()

    # --- adding the values --------------------------------------------------------------------------------------------

    def open(self, program: Program, workdir: Path, *, is_new_run: bool, log: Log) -> None:
        """See `BatchTransform`. Computes a stored reference if it does not exist yet."""
        choice = self.choice
        log(f"reference: {choice.kind} ({choice.reason})")
        if choice.kind == "stored":
            scoring = ReferenceScoring(program, self._get_other_model(program), workdir)
            # A program for inference writes no files.
            if program.training:
                scoring.run(is_new_run=is_new_run, log=log)
                # Each row now carries its stored values, so the model is not needed again.
                self._other = None
            elif not scoring.attach_stored():
                log("the workdir has no stored reference for these weights and data; loading the reference model")
                self._get_other_model(program).load()
        elif choice.kind == "offloaded":
            self._get_other_model(program).load()
        self._program = program

    def is_open(self, program: Program) -> bool:
        """See `BatchTransform`."""
        # adapter_off uses the trained model, which is already loaded.
        return self.choice.kind in ("none", "adapter_off") or self._program is program

    def complete_batch(self, program: Program, state: TrainState, batch: Batch, *, group: str = "parameter") -> Batch:
        """See `BatchTransform`."""
        # The data pipeline delivers stored values together with their rows.
        if ARRAY in batch or self.choice.kind == "none":
            return batch
        if self.choice.kind == "adapter_off":
            return {**batch, **self._without_adapters(program, group)(state, batch, after=state.counter)}
        return {**batch, **self._get_other_model(program)(batch, after=state.counter)}

    def host_bytes(self, program: Program) -> int:
        """See `BatchTransform`: the weights of an offloaded reference."""
        return self._get_other_model(program).offloaded_bytes if self.choice.kind == "offloaded" else 0

    def passes(self, experiment: Experiment, mesh: Mesh | AbstractMesh) -> ForwardCost:
        """See `BatchTransform`: one forward pass; adapter_off runs it with the run's own weights."""
        kind = self.choice.kind
        if kind == "adapter_off":
            own = estimate_forward(experiment, experiment, mesh, offloaded=False)
            # The weights are the run's own, whose memory the plan counts already.
            return replace(own, offloaded_bytes=0)
        if kind == "offloaded":
            other = auxiliary_experiment(experiment, self.pretrained)
            return estimate_forward(experiment, other, mesh, offloaded=True)
        return ForwardCost()

    def dry_run(self, program: Program, compile: Compile) -> dict[str, MemoryTracker]:
        """See `BatchTransform`: the forward pass of each step, or for stored the one that runs once before training."""
        choice = self.choice
        if choice.kind == "none":
            return {}
        state_bytes = program.layout.bytes_per_device(memory_kind="device")
        if choice.kind == "adapter_off":
            forward = self._without_adapters(program, "parameter")
            other_bytes = state_bytes - forward.weight_bytes("device")
            return {ARRAY: forward.dry_run(compile, other_bytes=other_bytes)}
        other = self._get_other_model(program)
        if choice.kind == "offloaded":
            return {ARRAY: other.dry_run(compile, other_bytes=state_bytes)}
        # A stored reference is computed before the training state exists.
        tracker = other.dry_run(compile, other_bytes=0)
        tracker.once = True
        return {ARRAY: tracker}

    def _without_adapters(self, program: Program, group: str) -> AuxiliaryForward:
        """Return the forward pass over the running state's own arrays, with adapters disabled."""
        forward = self._forwards.get(group)
        if forward is None or forward.program is not program:
            forward = AuxiliaryForward(
                program,
                _compute_log_probs,
                what="the reference",
                group=group,
                change=without_adapters,
                accumulate=program.experiment.learner.accumulate,
            )
            self._forwards[group] = forward
        return forward

    def _get_other_model(self, program: Program) -> AuxiliaryModel:
        """Return the reference as a separate model."""
        if self._other is None or self._other.run is not program:
            self._other = AuxiliaryModel(
                program,
                _compute_log_probs,
                path=self.pretrained,
                what="the reference",
                offloaded=self.choice.kind == "offloaded",
            )
        return self._other


def _compute_log_probs(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """Return {"reference": f32[B, S]}: the log-probabilities of the targets, 0 where the weight is 0."""
    log_probs_BS = head.log_probs(weights, x_BSD, ctx)
    return {ARRAY: jnp.where(ctx.batch["weights"] != 0, log_probs_BS, 0.0)}


def without_adapters(params: Nested) -> Nested:
    """Return the parameters with the second factor of each adapter zeroed, so that the adapter's product is zero."""

    def zero_lora_b(keypath: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        name = keypath[-1].key
        # Adapters of experts are named after their matrix: NAME_lora_b.
        return jnp.zeros_like(x) if name == "lora_b" or name.endswith("_lora_b") else x

    return jax.tree_util.tree_map_with_path(zero_lora_b, params)


class ReferenceScoring:
    """Computes the stored reference values of a run for all data rows, before the run's own state exists.

    Args:
        program: program of the run; its data must be set up.
        model: model that computes the values.
        workdir: folder of the run, which contains the folder of the values.
    """

    def __init__(self, program: Program, model: AuxiliaryModel, workdir: Path):
        self._program = program
        self._data = program.experiment.data
        self._model = model
        self._folder = workdir / FOLDER
        self._sets = self._data.row_sets()

    def run(self, *, is_new_run: bool, log: Log) -> None:
        """Compute the missing values and attach them to the data. Every process calls this.

        Args:
            is_new_run: the run has no checkpoint yet, so values of different weights or data are recomputed instead of
                refused.
            log: prints a line.

        Raises:
            ValueError: the folder holds values for different weights or data than those of the resumed run.
        """
        stored = self._make_stored_rows(save_hashes=True)
        difference = self._difference(stored)
        if not is_new_run:
            self._check(difference)
        if difference == DAMAGED:
            log(f"{self._folder} is damaged; computing the reference again")
        elif difference:
            log(f"{self._folder} holds a reference for different {difference}; computing it again")
        self._begin(stored, restart=difference is not None)
        # If there is a checkpoint, the trainer has already compared the config with that of the earlier steps.
        if is_new_run or not stored.is_complete:
            training_rows = self._data.num_rows
            num_steps = self._program.experiment.trainer.known_steps
            rows_read = training_rows if num_steps is None else num_steps * self._data.global_batch_size
            # A run of few steps may need only some of the values.
            if not stored.is_complete and 2 * rows_read < training_rows:
                log(
                    f"computing the reference of all {training_rows:,} rows, but the run reads only {rows_read:,} of "
                    "them; batch_transform.kind=offloaded computes only those, in each step"
                )
            self._model.load()
            if not self._is_reproduced(stored):
                log(f"{self._folder} holds a reference computed by a different program; computing it again")
                self._begin(stored, restart=True)
            self._score(stored)
            self._model.unload()
        # Wait until process 0 has written all values, because every process opens the files below.
        distributed.barrier(ARRAY)
        if not distributed.is_true_on_all(stored.difference is None):
            raise ValueError(
                f"{self._folder}: another process does not see the files that process 0 wrote; expected a folder "
                "that all hosts share, or batch_transform.kind = offloaded"
            )
        self._data.attach(ARRAY, stored.open())

    def check(self) -> None:
        """Check the folder of a resumed run. Every process calls this.

        Raises:
            ValueError: it holds values for different weights or data than those of the resumed run.
        """
        # `run` verifies the checksums of the values. Damaged values are recomputed, so they are no reason to refuse.
        self._check(distributed.broadcast_from_primary(self._make_stored_rows(save_hashes=True).difference))

    def _check(self, difference: str | None) -> None:
        if difference in (None, "", DAMAGED):
            return
        same = "data" if difference == "data" else "pretrained, batch_transform.pretrained and trainer.seed"
        raise ValueError(
            f"{self._folder} holds a reference for different {difference} than those that this run started with; "
            f"expected the same {same} as before, or another --workdir"
        )

    def _difference(self, stored: StoredRows) -> str | None:
        """Return `StoredRows.difference` of the files in the folder, as seen by the primary process.

        This also compares the values with their checksums.
        """
        difference = None
        if distributed.is_primary():
            difference = stored.difference
            if difference is None and stored.has_changed:
                difference = DAMAGED
        return distributed.broadcast_from_primary(difference)

    def attach_stored(self) -> bool:
        """Attach the stored values to the data.

        Returns:
            False if they are incomplete, missing, damaged, or were computed for different weights or data.
        """
        stored = self._make_stored_rows(save_hashes=False)
        if self._difference(stored) is not None:
            return False
        values = stored.open()
        if not stored.is_complete:
            return False
        self._data.attach(ARRAY, values)
        return True

    def _make_stored_rows(self, *, save_hashes: bool) -> StoredRows:
        weights = ""
        # Only one process reads the weight files to hash them.
        if distributed.is_primary():
            hashes = FileHashes(self._folder.with_name(".reference-hashes.json"))
            weights = self._model.weights_digest(hashes)
            if save_hashes:
                hashes.save()
        weights = distributed.broadcast_from_primary(weights)
        return StoredRows(self._folder, self._sets, self._data.seq_len, weights)

    def _begin(self, stored: StoredRows, *, restart: bool) -> None:
        """Prepare the files in the primary process; the others receive the number of finished rows."""
        if distributed.is_primary():
            stored.begin(restart=restart)
        stored.done = distributed.broadcast_from_primary(stored.done)

    def _is_reproduced(self, stored: StoredRows) -> bool:
        """Return whether the model reproduces the first stored rows bit for bit."""
        name = next((name for name, count in stored.done.items() if count), None)
        if name is None:
            return True
        count = min(stored.done[name], self._data.global_batch_size)
        batch = self._program.put(self._read_batch(self._sets[name], 0, 0))
        values = self._gather(self._model(batch)[ARRAY])
        same = True
        if distributed.is_primary():
            same = bool(np.array_equal(values[:count], stored.open()[name][:count]))
        return distributed.broadcast_from_primary(same)

    def _score(self, stored: StoredRows) -> None:
        """Compute all remaining rows; the primary process writes them."""
        size = self._data.global_batch_size
        total = sum(rows.num_rows for rows in self._sets.values())
        with phase("computing the reference") as computing:
            for name, rows in self._sets.items():
                first_row = stored.done[name]
                count = -(-(rows.num_rows - first_row) // size)
                read = partial(self._read_batch, rows, first_row)
                with Prefetcher(read, 0, count, depth=self._data.prefetch) as batches:
                    for number, batch in enumerate(batches):
                        results = self._model(self._program.put(batch))
                        values = self._gather(results[ARRAY])
                        if distributed.is_primary():
                            stored.write(name, first_row + number * size, values)
                        else:
                            stored.done[name] = min(rows.num_rows, first_row + (number + 1) * size)
                        computing.progress(sum(stored.done.values()), total)

    def _read_batch(self, rows: RowSet, first_row: int, number: int) -> dict[str, np.ndarray]:
        """Return this process's rows of batch `number` of a set, counted from row `first_row`."""
        batch_row = first_row + number * self._data.global_batch_size
        local_rows = [rows.row(batch_row + int(row)) for row in self._program.rows]
        return {name: np.stack([row[name] for row in local_rows]) for name in self._data.arrays()}

    def _gather(self, values: jax.Array) -> np.ndarray:
        """Gather the whole array [B, S] in this process."""
        if jax.process_count() == 1:
            return np.asarray(values)
        # Replicate first: a process can copy only its own shards to the host.
        everywhere = jax.jit(lambda x: x, out_shardings=self._program.replicated)(values)
        return np.asarray(everywhere.addressable_data(0))
