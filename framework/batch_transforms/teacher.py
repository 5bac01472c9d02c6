"""Teacher: adds the top-K next tokens of another model to each batch, for `framework.objectives.distillation`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.batch_transforms.auxiliary_model import AuxiliaryModel, auxiliary_experiment, estimate_forward
from plimsoll.framework.batch_transforms.teacher_files import TeacherRows, row_key
from plimsoll.framework.batch_transforms.teacher_scoring import (
    IDS,
    LOG_PROBS,
    TAIL,
    hash_sources,
    list_rows,
    make_top_k_function,
    teacher_shapes,
)
from plimsoll.framework.config import PositiveInt, component
from plimsoll.framework.data.batches import Shapes
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.layout import TrainState
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.batch_transform import BatchTransform, ForwardCost, Log
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.rows import Batch
from plimsoll.framework.schedules.layerwise.programs import Compile, MemoryTracker

# Maximum number of training rows, and of batches of each validation set, to look up before a run starts.
_CHECKED_ROWS = 1000
# File in the workdir that records which teacher the run started with.
_RECORD = "teacher.json"
_SCORE_AGAIN = "run `plimsoll score` again, with this config's trainer.max_steps or with --rows=all"


@component
class Teacher(BatchTransform):
    """Adds `teacher_ids`, `teacher_log_probs` and `teacher_tail` to each batch.

    Args:
        kind: "stored" reads the outputs that `plimsoll score` stored for the run's rows, and needs no device memory;
            "live" computes them in each step with a model whose weights are offloaded to host memory.
        path: for stored, the folder given to `plimsoll score --out`; for live, the directory of a published model or
            its id on the Hub.
        top_k: K, the number of teacher tokens per position with individual probabilities. If the folder has more, only
            the top K are used, and the probability of the others goes to the tail bucket.
        train_first: for stored, the name of a config whose model is the teacher. If `path` has no files yet,
            `plimsoll train` trains the teacher there and stores its outputs before the student's run starts. This is
            meant for toy examples; train and score larger teachers with separate commands.
    """

    def __init__(
        self,
        *,
        kind: Literal["stored", "live"] = "stored",
        path: str,
        top_k: PositiveInt = 64,
        train_first: str | None = None,
    ):
        if train_first is not None and kind == "live":
            raise ValueError(f"train_first = {train_first} with kind = live; expected kind = stored")
        self.kind: Literal["stored", "live"] = kind
        self.path = path
        self.top_k = top_k
        self.train_first = train_first
        self._rows: TeacherRows | None = None
        self._model: AuxiliaryModel | None = None

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """See `BatchTransform`."""
        num_rows, length = delivered["tokens"][0]
        return {**delivered, **teacher_shapes(num_rows, length, self.top_k)}

    def check(self, experiment: Experiment) -> None:
        """See `BatchTransform`.

        Raises:
            ValueError: the type of model or data is not supported, K exceeds the vocabulary size, or the objective does
                not read a teacher's arrays.
        """
        model = experiment.model
        if not isinstance(model, CausalLM) or not isinstance(experiment.data, DataPipeline):
            raise ValueError(
                "batch_transform is a Teacher, which is for a CausalLM on a DataPipeline; "
                f"model is a {type(model).__name__}, data a {type(experiment.data).__name__}"
            )
        if self.top_k > model.vocab_size:
            raise ValueError(
                f"batch_transform.top_k = {self.top_k}: expected at most model.vocab_size = {model.vocab_size}"
            )
        objective = model.head.objective
        if objective is None or IDS not in objective.arrays:
            raise ValueError(
                "batch_transform is a Teacher, but nothing reads its arrays: expected model.head.objective = "
                "plimsoll.Distillation"
            )

    def check_files(self, program: Program, workdir: Path, *, is_new_run: bool) -> None:
        """See `BatchTransform`: check the folder's facts and rows, or the weight files and tokenizer of a model.

        A resumed run needs the teacher that it started with, in every process.
        """
        if self.kind == "stored":
            self._rows = self._open_rows(program)
            data = program.experiment.data
            assert isinstance(data, DataPipeline)
            # Look up some of the run's rows, evenly from the first to the last one.
            row_list = list_rows(program.experiment, data, "run", at_most=_CHECKED_ROWS)
            num_checked = len(row_list.row_ids_N2)
            numbers = self._rows.number_by_key
            num_missing = sum(row_key(row_list.read(number)) not in numbers for number in range(num_checked))
            if num_missing:
                raise ValueError(
                    f"batch_transform.path = {self.path}: of the {num_checked:,} checked rows of this run, "
                    f"{num_missing:,} are not among its {self._rows.num_rows:,} stored rows; {_SCORE_AGAIN}"
                )
        else:
            self._get_live_model(program).check_files()
        if is_new_run:
            return
        difference = None
        # The digest of a live teacher reads all of its weight files, so only one process computes it.
        if distributed.is_primary() and (workdir / _RECORD).exists():
            record = parse_json((workdir / _RECORD).read_text())
            known = record.get("weights") if isinstance(record, dict) else None
            if not isinstance(known, str):
                raise ValueError(f"{workdir / _RECORD} is damaged: expected the digest of a teacher's weights")
            found = self._weights(program, workdir)
            if known != found:
                difference = f"weights {found[:12]}; the run started with {known[:12]}"
        difference = distributed.broadcast_from_primary(difference)
        if difference:
            raise ValueError(
                f"batch_transform.path = {self.path}: a different teacher ({difference}); expected the same teacher, "
                "or a different --workdir"
            )

    def open(self, program: Program, workdir: Path, *, is_new_run: bool, log: Log) -> None:
        """See `BatchTransform`."""
        if self.kind == "stored" and self._rows is None:
            self._rows = self._open_rows(program)
        # `plimsoll evaluate` also opens the teacher of a run, and must not write to the workdir.
        if is_new_run and distributed.is_primary():
            write_json(workdir / _RECORD, {"weights": self._weights(program, workdir)})
        if self.kind == "live":
            self._get_live_model(program).load()
            return
        assert self._rows is not None
        facts = self._rows.facts
        log(
            f"teacher: {self.path} has {self._rows.num_rows:,} rows of {facts.seq_len} tokens, the top "
            f"{facts.top_k} of each position, weights {facts.weights[:12]}"
        )

    def _weights(self, program: Program, workdir: Path) -> str:
        """Return a digest of the teacher's weights."""
        if self.kind == "live":
            hashes = FileHashes(workdir / ".teacher-hashes.json")
            digest = self._get_live_model(program).weights_digest(hashes)
            hashes.save()
            return digest
        assert self._rows is not None
        return self._rows.facts.weights

    def is_open(self, program: Program) -> bool:
        """See `BatchTransform`."""
        if self.kind == "stored":
            return self._rows is not None
        return self._model is not None and self._model.run is program and self._model.state is not None

    def complete_batch(self, program: Program, state: TrainState, batch: Batch, *, group: str = "parameter") -> Batch:
        """See `BatchTransform`."""
        if self.kind == "live":
            return {**batch, **self._get_live_model(program)(batch, after=state.counter)}
        # This process's rows of the batch, on the host.
        names = [name for name in ("tokens", "segments", "weights") if name in batch]
        host = {name: _copy_to_host(batch[name], program.rows) for name in names}
        num_rows, length = host["tokens"].shape
        arrays = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in teacher_shapes(num_rows, length, self.top_k).items()
        }
        # A row without a counted target is padding after the end of a validation set, which is not stored.
        scored_rows = [row for row in range(num_rows) if host["weights"][row].any()]
        assert self._rows is not None
        numbers = []
        for row in scored_rows:
            number = self._rows.number_by_key.get(row_key({name: host[name][row] for name in names}))
            if number is None:
                raise ValueError(
                    f"batch_transform.path = {self.path}: a row that the run reads is not among its "
                    f"{self._rows.num_rows:,} stored rows; {_SCORE_AGAIN}"
                )
            numbers.append(number)
        stored = self._rows.take(numbers)
        tails = stored.tails
        if stored.ids.shape[-1] > self.top_k:
            # The probability of the stored tokens beyond the top K is added to the tail.
            others = stored.log_probs[..., self.top_k :].astype(np.float32)
            tails = np.logaddexp(tails, np.logaddexp.reduce(others, axis=-1))
        arrays[IDS][scored_rows] = stored.ids[..., : self.top_k]
        arrays[LOG_PROBS][scored_rows] = stored.log_probs[..., : self.top_k]
        arrays[TAIL][scored_rows] = tails
        return {**batch, **program.put(arrays)}

    def host_bytes(self, program: Program) -> int:
        """See `BatchTransform`: the offloaded weights of a live teacher."""
        return self._get_live_model(program).offloaded_bytes if self.kind == "live" else 0

    def passes(self, experiment: Experiment, mesh: Mesh | AbstractMesh) -> ForwardCost:
        """See `BatchTransform`: the forward pass of a live teacher."""
        if self.kind == "stored":
            return ForwardCost()
        teacher = auxiliary_experiment(experiment, self.path)
        return estimate_forward(experiment, teacher, mesh, offloaded=True)

    def dry_run(self, program: Program, compile: Compile) -> dict[str, MemoryTracker]:
        """See `BatchTransform`: the forward pass of a live teacher, in each step."""
        if self.kind == "stored":
            return {}
        state_bytes = program.layout.bytes_per_device(memory_kind="device")
        return {"teacher": self._get_live_model(program).dry_run(compile, other_bytes=state_bytes)}

    def _get_live_model(self, program: Program) -> AuxiliaryModel:
        """Return the offloaded teacher model. Raises ValueError if its vocabulary is smaller than K."""
        if self._model is not None and self._model.run is program:
            return self._model
        function = make_top_k_function(self.top_k, program.experiment.language_model.vocab_size)
        model = AuxiliaryModel(program, function, path=self.path, name="batch_transform.path", what="the teacher")
        vocab_size = model.program.experiment.language_model.vocab_size
        if self.top_k > vocab_size:
            raise ValueError(f"batch_transform.top_k = {self.top_k}: the teacher {self.path} has {vocab_size} tokens")
        self._model = model
        return model

    def _open_rows(self, program: Program) -> TeacherRows:
        """Open the rows of the folder.

        Raises:
            FileNotFoundError, ValueError: the folder is missing or damaged, or its rows do not match the run. The
                message is one line.
        """
        data = program.experiment.data
        # `check` has verified the type.
        assert isinstance(data, DataPipeline)
        try:
            rows = TeacherRows(Path(self.path).expanduser())
        except (FileNotFoundError, ValueError) as error:
            made = "" if self.train_first is None else "; `plimsoll train` without --dry_run creates it"
            raise type(error)(f"batch_transform.path: {error}{made}") from None
        facts = rows.facts
        where = f"batch_transform.path = {self.path}"
        if facts.seq_len != data.seq_len:
            raise ValueError(f"{where}: stored for data.seq_len = {facts.seq_len}, the run has {data.seq_len}")
        if facts.tokenizer != data.tokenizer.digest:
            raise ValueError(
                f"{where}: the teacher's tokenizer differs from data.tokenizer, so its token ids mean different text"
            )
        vocab_size = program.experiment.language_model.vocab_size
        if facts.vocab_size > vocab_size:
            raise ValueError(
                f"{where}: stored for {facts.vocab_size} ids; model.vocab_size = {vocab_size}, expected at least that"
            )
        if facts.top_k < self.top_k:
            raise ValueError(
                f"{where}: stored with --top_k={facts.top_k}, batch_transform.top_k = {self.top_k} needs more"
            )
        stored_digests = set(facts.data.values())
        for leaf, digest in zip(data.leaves, hash_sources(data).values(), strict=True):
            # Only the content of a source matters; its name may differ.
            if digest not in stored_digests:
                names = ", ".join(f"{name} {stored[:12]}" for name, stored in facts.data.items())
                raise ValueError(
                    f"{where}: stored for other data than {leaf.label} ({digest[:12]}; stored: {names}); expected the "
                    "folder of `plimsoll score` on this config"
                )
        return rows


def _copy_to_host(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Return this process's rows of an array [B, S]. Raises ValueError if other processes hold parts of them."""
    if array.is_fully_addressable:
        return np.asarray(array)
    host = np.zeros((len(rows), array.shape[1]), array.dtype)
    filled = np.zeros(host.shape, bool)
    for shard in array.addressable_shards:
        row_slice, column_slice = shard.index
        # Positions of the shard's rows in `rows`, which is sorted.
        shard_rows = np.searchsorted(rows, np.arange(array.shape[0])[row_slice])
        host[shard_rows, column_slice] = np.asarray(shard.data)
        filled[shard_rows, column_slice] = True
    if not filled.all():
        raise ValueError(
            "batch_transform.kind = stored: mesh.seq splits rows across processes; expected each in one process"
        )
    return host
