"""What somebody may have meant by a flag that there is not: `--lr=3` as it is called in other trainers, or a field of
the config without its path.
"""

from collections.abc import Callable, Sequence

from framework.config import Config
from framework.config.names import nearest

# How other trainers call what is a field of the config, and two flags, here.
_ELSEWHERE = {
    "lr": "learner.optimizer.learning_rate",
    "learning_rate": "learner.optimizer.learning_rate",
    "wd": "learner.optimizer.weight_decay",
    "beta1": "learner.optimizer.b1",
    "beta2": "learner.optimizer.b2",
    "warmup": "learner.optimizer.learning_rate.warmup_steps",
    "grad_clip": "learner.clip",
    "max_grad_norm": "learner.clip",
    "clip_grad": "learner.clip",
    "gradient_accumulation_steps": "learner.accumulate",
    "grad_accum": "learner.accumulate",
    "accumulation_steps": "learner.accumulate",
    "batch_size": "data.global_batch_size",
    "bs": "data.global_batch_size",
    "train_batch_size": "data.global_batch_size",
    "per_device_train_batch_size": "data.global_batch_size",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "steps": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "train_steps": "trainer.max_steps",
    "iters": "trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "seed": "trainer.seed",
    "eval_steps": "trainer.eval_every",
    "eval_interval": "trainer.eval_every",
    "save_steps": "trainer.save_every",
    "save_interval": "trainer.save_every",
    "logging_steps": "trainer.log_every",
    "log_interval": "trainer.log_every",
    "gradient_checkpointing": "memory.remat",
    "activation_checkpointing": "memory.remat",
    "dtype": "model.compute_dtype",
    "precision": "model.compute_dtype",
    "d_model": "model.dim",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "n_layer": "model.stack.num_layers",
    "layers": "model.stack.num_layers",
    "dataset": "data.source",
    "tokenizer": "data.tokenizer",
    "output_dir": "--workdir",
    "out_dir": "--workdir",
    "outdir": "--workdir",
    "save_dir": "--workdir",
    "checkpoint_dir": "--workdir",
    "logdir": "--workdir",
    "resume_from_checkpoint": "--resume",
}


def hint(flag: str, value: str, known: Sequence[str], config: Callable[[], Config | None]) -> str:
    """`; did you mean '--config.trainer.max_steps=3'?`, or "".

    Args:
        flag: what was given, with its dashes. value: what was given with it, or "".
        known: the verb's own flags.
        config: what --config names, or None.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    path = _ELSEWHERE.get(name, "")
    if path.startswith("--"):
        return _meant(path, value) if path in known else ""
    own, found = nearest(flag, known), config()
    is_field = found is not None and any(one.rpartition(".")[2] == name for one, _ in found.walk())
    if own and not path and not is_field:
        return _meant(own[0], "")
    if found is not None:
        path = _path_of(path or name, found)
    return _meant(f"--config.{path}", value) if path else _few(known)


def _path_of(wanted: str, config: Config) -> str:
    """The path of the config's field that is nearest to a path or a name; "" where none is near."""
    paths = [path for path, _ in config.walk() if path]
    last = wanted.rpartition(".")[2]
    if wanted in paths:
        return _number_in(wanted, config, paths)
    named = [path for path in paths if path.rpartition(".")[2] == last]
    if not named:
        by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
        named = [by_name[name] for name in nearest(last, by_name)]
    return _number_in(min(named, key=lambda path: path.count(".")), config, paths) if named else ""


def _number_in(path: str, config: Config, paths: Sequence[str]) -> str:
    """The path itself, or, of a learning rate that is a schedule, that of its greatest value."""
    for name in ("peak_value", "init_value", "value"):
        if isinstance(config.get_path(path), Config) and f"{path}.{name}" in paths:
            return f"{path}.{name}"
    return path


def _meant(flag: str, value: str) -> str:
    return f"; did you mean '{flag}{'=' * bool(value)}{value}'?"


def _few(known: Sequence[str]) -> str:
    return f"; valid: {', '.join(known)}" if 0 < len(known) <= 40 else ""
