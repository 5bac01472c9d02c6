"""Teacher: adds to each batch the likeliest next tokens of another model, for `framework.objectives.distillation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from framework.companions.likeliest import IDS, LOG_PROBS, TAIL, likeliest, shapes
from framework.companions.other_model import OtherModel, other_experiment
from framework.companions.passes import forward_passes
from framework.companions.teacher_files import Rows, TeacherRows, row_key
from framework.companions.teacher_scoring import digests_of, rows_of
from framework.config import PositiveInt, component
from framework.data.batches import Shapes
from framework.data.files import FileHashes
from framework.data.pipeline import DataPipeline
from framework.files.texts import parse_json
from framework.files.workdir import write_json
from framework.models.causal_lm import CausalLM
from framework.processes import distributed
from framework.program.companion import Companion, Passes, Tell
from framework.program.experiment import Experiment
from framework.program.program import Program
from framework.program.rows import Batch
from framework.schedules.layerwise.programs import Compile, Ledger

# Rows of training, and batches of each validation set, that are looked at before a run begins.
_CHECKED_ROWS = 1000
# The file in a workdir that says which teacher the run has begun with.
_RECORD = "teacher.json"
_SCORE_AGAIN = "run `plimsoll score` again, with this config's trainer.max_steps or with --rows=all"


@component
class Teacher(Companion):
    """Adds `teacher_ids`, `teacher_log_probs` and `teacher_tail` to each batch.

    Args:
        kind: "stored" reads what `plimsoll score` has stored of the run's rows, and costs no memory of the devices;
            "live" computes it in each step by a model whose weights are in host memory.
        path: of stored: the folder of `plimsoll score --out`; of live: a published model's directory, or the Hub's id.
        top_k: K, the tokens of each position that the student is told apart. Of a folder with more, the likeliest K are
            taken, and the others' probability goes to the bucket.
        train_first: of stored: the name of a config, whose model is the teacher. Where `path` holds nothing yet,
            `plimsoll train` trains it there and stores what it says, before the student's run begins. This is for toys;
            other teachers are trained and asked by commands of their own.
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
        self._model: OtherModel | None = None

    def arrays(self, delivered: Shapes, *, evaluation: bool = False) -> Shapes:
        """See `Companion`."""
        num_rows, length = delivered["tokens"][0]
        return {**delivered, **shapes(num_rows, length, self.top_k)}

    def check(self, experiment: Experiment) -> None:
        """Raises ValueError: model or data are of another kind, K is over the vocabulary, or nothing reads a teacher's
        arrays."""
        model = experiment.model
        if not isinstance(model, CausalLM) or not isinstance(experiment.data, DataPipeline):
            raise ValueError(
                "companion is a Teacher, which is for a CausalLM on a DataPipeline; "
                f"model is a {type(model).__name__}, data a {type(experiment.data).__name__}"
            )
        if self.top_k > model.vocab_size:
            raise ValueError(f"companion.top_k = {self.top_k}: expected at most model.vocab_size = {model.vocab_size}")
        objective = model.head.objective
        if objective is None or IDS not in objective.arrays:
            raise ValueError(
                "companion is a Teacher, and nothing reads what it adds: expected model.head.objective = "
                "framework.objectives.distillation.Distillation"
            )

    def check_files(self, program: Program, workdir: Path, *, begins: bool) -> None:
        """See `Companion`: the folder's facts and rows, or the headers and the tokenizer of the model."""
        if self.kind == "stored":
            self._rows = self._opened(program)
            self._check_rows(program.experiment)
        else:
            self._live(program).check_files()
        if not begins:
            self._check_teacher(program, workdir)

    def open(self, program: Program, workdir: Path, *, begins: bool, tell: Tell) -> None:
        """See `Companion`."""
        if self.kind == "stored" and self._rows is None:
            self._rows = self._opened(program)
        # `plimsoll evaluate` opens the teacher of a run, too, and writes nothing there.
        if begins and distributed.is_primary():
            write_json(workdir / _RECORD, {"weights": self._weights(program, workdir)})
        if self.kind == "live":
            self._live(program).load()
            return
        assert self._rows is not None
        facts = self._rows.facts
        tell(
            f"teacher: {self.path} has {self._rows.num_rows:,} rows of {facts.seq_len} tokens, the likeliest "
            f"{facts.top_k} of each, weights {facts.weights[:12]}"
        )

    def _check_teacher(self, program: Program, workdir: Path) -> None:
        """Raises ValueError, in every process, where the run has begun with the answers of another teacher."""
        difference = None
        if distributed.is_primary() and (workdir / _RECORD).exists():
            known = _read_record(workdir / _RECORD)
            found = self._weights(program, workdir)
            if known != found:
                difference = f"weights {found[:12]}; the run began with {known[:12]}"
        difference = distributed.from_primary(difference)
        if difference:
            raise ValueError(
                f"companion.path = {self.path}: another teacher ({difference}); expected the same one, or another "
                "--workdir"
            )

    def _weights(self, program: Program, workdir: Path) -> str:
        """A digest of the teacher's weights."""
        if self.kind == "live":
            hashes = FileHashes(workdir / ".teacher-hashes.json")
            digest = self._live(program).weights_digest(hashes)
            hashes.save()
            return digest
        assert self._rows is not None
        return self._rows.facts.weights

    def is_open(self, program: Program) -> bool:
        """See `Companion`."""
        if self.kind == "stored":
            return self._rows is not None
        return self._model is not None and self._model.run is program and self._model.is_loaded

    def completed(self, program: Program, state: dict[str, Any], batch: Batch, *, group: str = "parameter") -> Batch:
        """See `Companion`."""
        if self.kind == "live":
            return {**batch, **self._live(program)(batch, after=state.get("counter", ()))}
        return {**batch, **program.put(self._stored(program, batch))}

    def host_bytes(self, program: Program) -> int:
        """See `Companion`: the weights of a live teacher."""
        return self._live(program).hosted_bytes if self.kind == "live" else 0

    def passes(self, experiment: Experiment, mesh: Any) -> Passes:
        """See `Companion`: a live teacher's forward pass."""
        if self.kind == "stored":
            return Passes()
        teacher = other_experiment(experiment, self.path)
        return forward_passes(experiment, teacher, mesh, hosted=True)

    def rehearsed(self, program: Program, compile: Compile) -> dict[str, Ledger]:
        """See `Companion`: a live teacher's forward pass, in each step."""
        if self.kind == "stored":
            return {}
        state_bytes = program.layout.bytes_per_device(memory_kind="device")
        return {"teacher": self._live(program).rehearsed(compile, beside=state_bytes)}

    def _live(self, program: Program) -> OtherModel:
        """The model in host memory. Raises ValueError: its vocabulary is smaller than K."""
        if self._model is not None and self._model.run is program:
            return self._model
        function = likeliest(self.top_k, program.experiment.language_model.vocab_size)
        model = OtherModel(program, function, path=self.path, name="companion.path", what="the teacher")
        vocab_size = model.program.experiment.language_model.vocab_size
        if self.top_k > vocab_size:
            raise ValueError(f"companion.top_k = {self.top_k}: the teacher {self.path} has {vocab_size} tokens")
        self._model = model
        return model

    def _opened(self, program: Program) -> TeacherRows:
        """The folder's rows. Raises FileNotFoundError, ValueError: they are of something else; one line."""
        data = program.experiment.data
        # `check` has seen to it.
        assert isinstance(data, DataPipeline)
        try:
            rows = TeacherRows(Path(self.path).expanduser())
        except (FileNotFoundError, ValueError) as error:
            made = "" if self.train_first is None else "; `plimsoll train` without --dry_run makes it"
            raise type(error)(f"companion.path: {error}{made}") from None
        facts = rows.facts
        where = f"companion.path = {self.path}"
        if facts.seq_len != data.seq_len:
            raise ValueError(f"{where}: stored for data.seq_len = {facts.seq_len}, the run has {data.seq_len}")
        if facts.tokenizer != data.tokenizer.digest:
            raise ValueError(
                f"{where}: the teacher's tokenizer is another one than data.tokenizer, so its tokens mean other texts"
            )
        vocab_size = program.experiment.language_model.vocab_size
        if facts.vocab_size > vocab_size:
            raise ValueError(
                f"{where}: stored for {facts.vocab_size} ids; model.vocab_size = {vocab_size}, expected as many or more"
            )
        if facts.top_k < self.top_k:
            raise ValueError(f"{where}: stored with --top_k={facts.top_k}, companion.top_k = {self.top_k} needs more")
        stored_digests = set(facts.data.values())
        for leaf, digest in zip(data.leaves, digests_of(data).values(), strict=True):
            if digest not in stored_digests:
                names = ", ".join(f"{name} {stored[:12]}" for name, stored in facts.data.items())
                raise ValueError(
                    f"{where}: stored for other data than {leaf.label} ({digest[:12]}; stored: {names}); expected the "
                    "folder of `plimsoll score` on this config"
                )
        return rows

    def _check_rows(self, experiment: Experiment) -> None:
        """Raises ValueError where some of the run's rows are not stored; it looks at rows from the first to the last
        one."""
        data = experiment.data
        assert isinstance(data, DataPipeline)
        assert self._rows is not None
        row_list = rows_of(experiment, data, "run", at_most=_CHECKED_ROWS)
        num_checked = len(row_list.places_N2)
        num_missing = sum(row_key(row_list.read(number)) not in self._rows for number in range(num_checked))
        if num_missing:
            raise ValueError(
                f"companion.path = {self.path}: of {num_checked:,} of the run's rows that were looked at, "
                f"{num_missing:,} are not among its {self._rows.num_rows:,}; {_SCORE_AGAIN}"
            )

    def _stored(self, program: Program, batch: Batch) -> dict[str, np.ndarray]:
        """The arrays of this process's rows of a batch, on the host."""
        names = [name for name in ("tokens", "segments", "weights") if name in batch]
        host = {name: _on_host(batch[name], program.rows) for name in names}
        num_rows, length = host["tokens"].shape
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes(num_rows, length, self.top_k).items()}
        # A row without a counted target is padding behind the end of a validation set, and is stored nowhere.
        counted = [row for row in range(num_rows) if host["weights"][row].any()]
        numbers = [self._number_of({name: host[name][row] for name in names}) for row in counted]
        assert self._rows is not None
        stored = _with_fewer(self._rows.take(numbers), self.top_k)
        arrays[IDS][counted] = stored.ids
        arrays[LOG_PROBS][counted] = stored.log_probs
        arrays[TAIL][counted] = stored.tails
        return arrays

    def _number_of(self, row: dict[str, np.ndarray]) -> int:
        assert self._rows is not None
        number = self._rows.number_of(row_key(row))
        if number is None:
            raise ValueError(
                f"companion.path = {self.path}: a row that the run reads now is not among its "
                f"{self._rows.num_rows:,}; {_SCORE_AGAIN}"
            )
        return number


def _read_record(path: Path) -> str:
    """Read the digest of the weights that a run began with. Raises ValueError: the file is damaged."""
    record = parse_json(path.read_text())
    weights = record.get("weights") if isinstance(record, dict) else None
    if not isinstance(weights, str):
        raise ValueError(f"{path} is damaged: expected the digest of a teacher's weights")
    return weights


def _with_fewer(rows: Rows, top_k: int) -> Rows:
    """Rows with the likeliest K tokens of those that are stored; the others go to the tail."""
    if rows.ids.shape[-1] == top_k:
        return rows
    others = rows.log_probs[..., top_k:].astype(np.float32)
    tails = np.logaddexp(rows.tails, np.logaddexp.reduce(others, axis=-1))
    return rows._replace(ids=rows.ids[..., :top_k], log_probs=rows.log_probs[..., :top_k], tails=tails)


def _on_host(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """This process's rows of an array [B, S]. Raises ValueError: other processes have a part of them."""
    if array.is_fully_addressable:
        return np.asarray(array)
    host = np.zeros((len(rows), array.shape[1]), array.dtype)
    filled = np.zeros(host.shape, bool)
    for shard in array.addressable_shards:
        row_slice, column_slice = shard.index
        shard_rows = np.searchsorted(rows, np.arange(array.shape[0])[row_slice])
        host[shard_rows, column_slice] = np.asarray(shard.data)
        filled[shard_rows, column_slice] = True
    if not filled.all():
        raise ValueError("companion.kind = stored: mesh.seq cuts rows between processes; expected mesh.seq within one")
    return host
