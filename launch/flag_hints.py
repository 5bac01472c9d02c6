"""Suggestions for unknown flags: `--lr=3` as other trainers call it, or a config field without its path."""

from collections.abc import Callable, Sequence

from plimsoll.framework.config import Config
from plimsoll.framework.config.names import nearest
from plimsoll.launch import source_index

# Names that other trainers use for our config fields and for two of our flags.
_OTHER_TRAINERS = {
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
    "checkpoint_every": "trainer.save_every",
    "checkpoint_interval": "trainer.save_every",
    "checkpoint_steps": "trainer.save_every",
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
    "dataset": "--data",
    "data_path": "--data",
    "data_dir": "--data",
    "train_file": "--data",
    "tokenizer": "data.tokenizer",
    "output_dir": "--workdir",
    "out_dir": "--workdir",
    "outdir": "--workdir",
    "save_dir": "--workdir",
    "checkpoint_dir": "--workdir",
    "logdir": "--workdir",
    "resume_from_checkpoint": "--resume",
}


def hint(
    flag: str,
    value: str,
    valid_flags: Sequence[str],
    config: Callable[[], Config | None],
    *,
    has_only_our_components: bool = False,
) -> str:
    """Return a suggestion such as `; did you mean '--config.trainer.max_steps=3'?`, or "".

    Args:
        flag: the unknown flag, with its dashes.
        value: the value given with the flag, or "".
        valid_flags: the verb's own flags.
        config: function that returns the config that --config names, or None.
        has_only_our_components: whether all names of its fields are in the source of Plimsoll or optax.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    path = _OTHER_TRAINERS.get(name, "")
    if path.startswith("--"):
        return _suggest(path, value) if path in valid_flags else ""
    similar_flags = nearest(flag, valid_flags)
    if similar_flags and not path and has_only_our_components and not source_index.is_mentioned(name):
        # No config has such a field, so do not load the config, which imports JAX.
        return _suggest(similar_flags[0], "")
    named_config = config()
    is_field = named_config is not None and name in _field_names(named_config)
    # A typo in a flag of the verb is more likely than another trainer's name, unless that name is known.
    if similar_flags and not path and not is_field:
        return _suggest(similar_flags[0], "")
    if named_config is not None:
        path = _find_nearest_path(path or name, named_config)
    if not path:
        return _list_flags(valid_flags)
    return _suggest(f"--config.{path}", value)


def is_known_elsewhere(path: str) -> bool:
    """Return whether other trainers call one of our fields by the last part of a path."""
    return path.rpartition(".")[2] in _OTHER_TRAINERS


def find_field_alias(path: str, config: Config) -> str:
    """Return the field that other trainers call by the last part of a path; "" if there is none."""
    target = _OTHER_TRAINERS.get(path.rpartition(".")[2], "")
    return target if target in (known for known, _ in config.walk()) else ""


def _field_names(config: Config) -> list[str]:
    """Return the last part of each path in a config."""
    return [path.rpartition(".")[2] for path, _ in config.walk()]


def _find_nearest_path(target: str, config: Config) -> str:
    """Return the path of the config's field nearest to a path or name; "" if none is near."""
    paths = [path for path, _ in config.walk() if path]
    if target in paths:
        return _find_rate_field(target, config, paths)
    target_name = target.rpartition(".")[2]
    candidates = [path for path in paths if path.rpartition(".")[2] == target_name]
    if not candidates:
        # Reversed, so that the first of several fields with the same name wins.
        path_by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
        candidates = [path_by_name[name] for name in nearest(target_name, path_by_name)]
    if not candidates:
        return ""
    # The field nearest to the root is most often the intended one.
    shallowest = min(candidates, key=lambda path: path.count("."))
    return _find_rate_field(shallowest, config, paths)


def _find_rate_field(path: str, config: Config, paths: Sequence[str]) -> str:
    """Return the path itself, or the path of the largest value if it is a learning rate schedule."""
    for name in ("peak_value", "init_value", "value"):
        if isinstance(config.get_path(path), Config) and f"{path}.{name}" in paths:
            return f"{path}.{name}"
    return path


def _suggest(flag: str, value: str) -> str:
    """Return the question that suggests a flag with this value."""
    assignment = f"{flag}={value}" if value else flag
    return f"; did you mean '{assignment}'?"


def _list_flags(valid_flags: Sequence[str]) -> str:
    """List the valid flags, unless there are too many to read."""
    if not 0 < len(valid_flags) <= 40:
        return ""
    return f"; valid: {', '.join(valid_flags)}"
