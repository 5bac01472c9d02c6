"""Untrusted configs: each payload, at each place of an experiment, is refused and does nothing."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optax
import pytest

from plimsoll import configs
from plimsoll.framework.config import Config, ConfigError, config_for, reference
from plimsoll.framework.families.llama import Llama
from plimsoll.framework.weights.pretrained import Pretrained
from plimsoll.launch import cli
from tests.support.audit_events import record_audit_events

# In texts, {dir} is a folder with evil.py, which writes the file PWNED when it runs, and with the file `precious`.
EVIL = "import pathlib; pathlib.Path(r'{dir}/PWNED').write_text('ran')\ndef f(): ...\n"
PAYLOADS: list[dict[str, Any]] = [
    # Run a file, or code
    {"$class": "configs.load", "spec": "{dir}/evil.py:f"},
    {"$class": "configs.find", "spec": "{dir}/evil.py:f"},
    {"$class": "configs._from_file", "path": "{dir}/evil.py", "name": "f"},
    {"$class": "configs._import_file", "path": "{dir}/evil.py"},
    {"$class": "configs.importlib.import_module", "name": "evil"},
    {"$class": "plimsoll.framework.config.names.importlib.import_module", "name": "evil"},
    {"$class": "os.system", "command": "touch {dir}/PWNED"},
    {"$class": "subprocess.run", "args": ["touch", "{dir}/PWNED"]},
    {"$class": "builtins.exec", "source": "open(r'{dir}/PWNED', 'w')"},
    {"$class": "functools.partial", "func": {"$class": "configs.load", "spec": "{dir}/evil.py:f"}},
    {"$class": "evil.f"},
    {"$class": "runpy.run_path", "path_name": "{dir}/evil.py"},
    {"$class": "plimsoll.framework.files.workdir.os.system", "command": "touch {dir}/PWNED"},
    {"$class": "plimsoll.framework.weights.pretrained.json.loads", "s": "1"},
    # Return configs, or read directories
    {"$class": "configs.names"},
    {"$class": "configs.tiny.stdlib_tiny"},
    {"$class": "configs.finetune.full", "path": "{dir}"},
    {"$class": "configs.families.read", "path": "{dir}"},
    {"$class": "configs.families.model_of", "path": "{dir}"},
    {"$class": "plimsoll.framework.weights.pretrained.Directory", "path": "{dir}"},
    {"$class": "plimsoll.framework.config.Config", "target": "os.system"},
    {"$class": "plimsoll.framework.config.config_for", "target": "os.system"},
    {
        "$class": "plimsoll.framework.config.Config.from_json",
        "text": '{"$class": "configs.load", "spec": "{dir}/evil.py:f"}',
    },
    {"$class": "plimsoll.framework.config.names.resolve", "name": "configs.load"},
    {
        "$class": "plimsoll.framework.config.names.remember",
        "target": {"$class": "configs.load", "spec": "{dir}/evil.py:f"},
    },
    # Write, move or remove files
    {"$class": "plimsoll.framework.files.workdir.write_json", "path": "{dir}/precious", "value": {"now": "mine"}},
    {"$class": "plimsoll.framework.files.workdir.Workdir", "path": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.files.workdir.read_only", "path": "{dir}"},
    {"$class": "plimsoll.framework.files.workdir.shutil.rmtree", "path": "{dir}"},
    {"$class": "plimsoll.framework.metrics.jsonl.JsonlWriter", "path": "{dir}/precious"},
    {"$class": "plimsoll.framework.metrics.jsonl.read_metrics", "path": "{dir}/precious"},
    {"$class": "plimsoll.framework.metrics.writers.TensorBoardWriter", "directory": "{dir}/PWNED"},
    {
        "$class": "plimsoll.framework.metrics.writers.WandbWriter",
        "project": "x",
        "name": "x",
        "workdir": "{dir}",
        "config": {},
    },
    {"$class": "plimsoll.framework.terminal.progress.Progress", "total_steps": 1, "log_path": "{dir}/precious"},
    {"$class": "plimsoll.framework.metrics.plot.plot_losses", "metrics": "{dir}/precious", "to": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.checkpoint.checkpointer.Checkpointer", "directory": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.checkpoint.directory.delete_step", "root": "{dir}", "step": 1},
    {"$class": "plimsoll.framework.checkpoint.directory.remove_leftovers", "root": "{dir}"},
    {"$class": "plimsoll.framework.data.tokenize.write_tokens", "path": "{dir}/precious"},
    {"$class": "plimsoll.framework.data.pipeline.load_or_tokenize", "cache": "{dir}"},
    {"$class": "plimsoll.framework.data.files.fetch_local_copy", "folder": "{dir}"},
    {"$class": "plimsoll.framework.data.files.find", "paths": "{dir}/precious"},
    {"$class": "plimsoll.framework.weights.export.export_model", "path": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.devices.executables.use_compilation_cache", "directory": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.run.trainer.Trainer"},
    {"$class": "plimsoll.framework.devices.executables.compile_or_load", "lowered": 1},
    {"$class": "plimsoll.framework.run.offload_self_test.check"},
    # Connect to other machines, or start processes and threads
    {"$class": "plimsoll.framework.files.remote.Mirror", "url": "gs://a/b"},
    {"$class": "plimsoll.framework.files.remote.connect", "url": "http://127.0.0.1:9"},
    {"$class": "plimsoll.framework.processes.health.Pulse", "folder": "{dir}", "process": 0, "num_processes": 1},
    {"$class": "plimsoll.framework.processes.distributed.Cluster"},
    {"$class": "plimsoll.framework.processes.rendezvous.wait_for_all"},
    {"$class": "plimsoll.launch.train.main", "argv": ["--config=stdlib-tiny"]},
    {"$class": "plimsoll.launch.warm_imports.orbax"},
    {"$class": "plimsoll.framework.program.stored_config.read_to_train", "file": "{dir}/precious"},
    {"$class": "framework.api.runs.train", "config": "nanogpt-cpu", "workdir": "{dir}/PWNED"},
    {"$class": "plimsoll.framework.plan", "config": "nanogpt-cpu", "target": "local"},
    {"$class": "plimsoll.launch.commands.run", "words": ["touch", "{dir}/PWNED"]},
    {"$class": "tools.mutate.main"},
    # Classes and functions of ours that are not components
    {"$class": "plimsoll.framework.config.names.ConfigError", "message": "x"},
    {"$class": "plimsoll.framework.run.hooks.RollBack"},
    {"$class": "plimsoll.framework.inference.sampling.Sampling", "tokens": 1},
    {"$class": "plimsoll.framework.layers.base.Layer"},
    {"$class": "plimsoll.framework.layers.lora.LoRALinear", "base": 1, "lora": 1, "path": ""},
    {"$class": "plimsoll.framework.data.chats.ChatCodec"},
    {"$class": "plimsoll.framework.optimizers.partition.add_partition", "optimizer": 1},
    {"$class": "plimsoll.framework.program.program.Program", "experiment": 1},
    # Names in optax and jax.nn that are not optimizers, schedules or initializers
    {
        "$class": "optax.inject_hyperparams",
        "inner_factory": {"$class": "plimsoll.framework.config.reference", "name": "x"},
    },
    {"$class": "optax.apply_updates", "params": 1, "updates": 1},
    {"$class": "optax.microbatch", "fun": 1},
    {"$class": "optax.MultiSteps", "opt": 1},
    {"$class": "optax._src.utils.np.load", "file": "{dir}/precious"},
    {"$class": "optax.tree_utils.tree_map_params"},
    {"$class": "jax.nn.gelu", "x": 1.0},
    {"$class": "jax.nn.one_hot", "x": 1, "num_classes": 1_000_000_000_000},
    {"$class": "jax.numpy.save", "file": "{dir}/PWNED", "arr": [1]},
    {"$class": "jax.nn.initializers.np.load", "file": "{dir}/precious"},
    {"$class": "numpy.load", "file": "{dir}/precious", "allow_pickle": True},
    {"$class": "pickle.loads", "data": "x"},
    # Invalid names
    {"$class": ["configs.load"], "spec": "{dir}/evil.py:f"},
    {"$class": {"$class": "configs.load", "spec": "{dir}/evil.py:f"}},
    {"$class": None},
    {"$class": 1},
    {"$class": ""},
    {"$class": "configs.load" * 10_000},
    {"$class": "fr\u0430mework.workdir.write_json"},  # a Cyrillic a
    {"$class": "\uff4f\uff53.system", "command": "touch {dir}/PWNED"},  # letters that Python normalizes to "os"
    {"$class": "configs.load\n"},
    {"$class": "configs.load\u0000"},
    {"$class": "\ud800.load"},
    {"$class": "configs..load"},
    {"$class": "plimsoll.framework.files.workdir.Workdir.claim"},
    {"$class": "framework.__loader__.load_module", "fullname": "evil"},
    {"$class": "plimsoll.framework.config.Config.__init__"},
    {"$class": "configs.not_there_yet.f"},
    {"$class": "plimsoll.framework.files.workdir"},
]
# Where a payload is put: dotted paths into the JSON of nanogpt-cpu's config; "" is the whole file.
INSERTION_PATHS = [
    "",
    "model",
    "model.stack",
    "model.stack.pattern.0",
    "model.stack.pattern.0.mlp.linear.init",
    "data.validation.stdlib",
    "learner.optimizer.learning_rate",
    "learner.optimizer.learning_rate.peak_value",
    "learner.rules.0.set.weight_decay",
    "trainer.profile.0",
    "compiler.options.x",
    "accelerator_rules.0",
    "pretrained",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a file when it runs, and a file that must not change."""
    (tmp_path / "evil.py").write_text(EVIL.replace("{dir}", str(tmp_path)))
    (tmp_path / "precious").write_text("keep me")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _fill_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill_folder(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_folder(item, folder) for item in value]
    return value.replace("{dir}", str(folder)) if isinstance(value, str) else value


def _insert_payload(experiment: dict[str, Any], config_path: str, payload: Any) -> Any:
    """Return a copy of the experiment's JSON with the payload at a place, which need not exist yet."""
    if not config_path:
        return payload
    whole: Any = copy.deepcopy(experiment)
    node = whole
    *parents, last = config_path.split(".")
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if isinstance(node, list):
        node[int(last) :] = [payload]
    else:
        node[last] = payload
    return whole


def _assert_unharmed(folder: Path) -> None:
    assert not (folder / "PWNED").exists()
    assert (folder / "precious").read_text() == "keep me"
    assert sorted(file.name for file in folder.iterdir() if file.name != "__pycache__") == ["evil.py", "precious"]
    assert "evil" not in sys.modules


@pytest.fixture(scope="module")
def experiment() -> dict[str, Any]:
    return configs.load("nanogpt-cpu").to_dict()


def test_payload_paths_exist_in_real_configs(experiment):
    schedule = {"$class": "optax.constant_schedule", "value": 0.1}
    placed = _insert_payload(experiment, "learner.optimizer.learning_rate", schedule)
    assert Config.from_dict(placed).learner.optimizer.learning_rate == config_for(optax.constant_schedule, value=0.1)
    for config_path in INSERTION_PATHS[1:]:
        _insert_payload(experiment, config_path, 1)


@pytest.mark.pairs
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: repr(payload["$class"])[:50])
def test_payloads_are_refused_at_every_path(payload, folder, experiment):
    payload = _fill_folder(payload, folder)
    with pytest.raises(ConfigError):
        Config.from_dict(payload)  # imports those modules of ours that it names
    modules = set(sys.modules)
    for config_path in INSERTION_PATHS:
        text = json.dumps(_insert_payload(experiment, config_path, payload))
        with record_audit_events() as events, pytest.raises(ConfigError) as caught:
            Config.from_json(text)
        assert events == []
        assert caught.value.path.startswith(config_path)
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 1000
    assert set(sys.modules) == modules
    _assert_unharmed(folder)


@pytest.mark.pairs
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: repr(payload["$class"])[:50])
def test_payloads_are_refused_on_the_command_line_too(payload, folder, experiment):
    config = Config.from_dict(experiment)
    for path in ("learner.optimizer", "learner.optimizer.learning_rate", "model.param_dtype"):
        with pytest.raises(ConfigError):
            config.override(path, json.dumps(_fill_folder(payload, folder)))
        if isinstance(name := payload["$class"], str) and name.isascii():
            with pytest.raises(ConfigError):
                config.override(path, name)
    assert config.to_dict() == experiment
    _assert_unharmed(folder)


NAMES = [
    "configs.load",
    "plimsoll.framework.files.workdir.write_json",
    "os.system",
    "plimsoll.framework.files.workdir.os.system",
    "evil.f",
]


@pytest.mark.pairs
@pytest.mark.parametrize(
    "name",
    [*NAMES, "optax.apply_updates", "plimsoll.framework.config.Config", "plimsoll.framework.run.trainer.Trainer"],
)
def test_reference_syntax_reaches_no_more_than_class_syntax(name, folder, experiment):
    payload = config_for(reference, name=name).to_dict()
    for config_path in ("learner.optimizer.learning_rate", "model.stack.pattern.0.mlp.linear.init"):
        config = Config.from_dict(_insert_payload(experiment, config_path, payload))  # data: nothing is looked up yet
        with record_audit_events() as events, pytest.raises(ConfigError, match=r"is refused|does not exist"):
            config.instantiate()
        assert events == []
    _assert_unharmed(folder)


def test_duplicate_keys_are_refused(folder):
    text = f'{{"$class": "optax.adamw", "learning_rate": 0.1, "$class": "configs.load", "spec": "{folder}/evil.py:f"}}'
    with pytest.raises(ConfigError, match=r"the key '\$class' occurs twice"):
        Config.from_json(text)
    _assert_unharmed(folder)


@pytest.mark.pairs
@pytest.mark.parametrize("depth", [90, 200, 5000])
def test_depth_and_size_are_one_line(depth):
    nested = '{"$class": "optax.apply_if_finite", "max_consecutive_errors": 1, "inner": '
    text = nested * depth + "0.5" + "}" * depth
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:  # 0.5 is not a transformation
        Config.from_json(text)
    assert len(str(caught.value)) < 2000
    with pytest.raises(ConfigError, match="not valid JSON: Exceeds the limit"):
        Config.from_json('{"$class": "optax.scale", "step_size": ' + "9" * 10_000 + "}")
    with pytest.raises(ConfigError, match=r"^[^\n]+$"):
        Config.from_json(json.dumps({"$class": "optax.scale", "step_size": ["x"] * 100_000, "y": 1}))


@pytest.mark.pairs
def test_terminal_escapes_are_not_printed():
    for key in ("a\nb", "\x1b[2J\x1b[H", "\u202egpj.exe", "\ud800", "x" * 1_000_000):
        with pytest.raises(ConfigError) as caught:
            Config.from_json(json.dumps({"$class": "optax.adamw", key: 1}))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_export_refuses_auto_map_code():
    config = config_for(Pretrained, path="x", family=config_for(Llama), facts={"auto_map": {"AutoModel": "evil.Model"}})
    with pytest.raises(ConfigError, match="auto_map names code"):
        config.instantiate()


def test_an_unknown_name_is_answered_with_the_nearest_component():
    for name, near in [
        ("plimsoll.framework.layers.linear.Liner", "Linear"),
        ("plimsoll.framework.data.sources.TextFile", "TextFiles"),
        ("optax.warmup_cosine_decay", "warmup_cosine_decay_schedule"),
        ("jax.nn.initializers.normall", "normal"),
        ("plimsoll.framework.files.workdir.Workdir", None),
    ]:
        with pytest.raises(ConfigError) as caught:
            config_for(optax.adamw, learning_rate=0.1).override("mask", name)
        assert ("did you mean" in str(caught.value)) == (near is not None)
        assert near is None or f"did you mean {near!r}?" in str(caught.value)


# Entry points: the verbs that read the contents of a workdir or a directory.


def _verb(name: str) -> Any:
    import importlib

    return importlib.import_module(f"plimsoll.launch.{name}").main


VERBS = [
    ("generate", ["--prompt=x"]),
    ("evaluate", ["--files", "precious"]),
    ("export", ["--to=exported"]),
    ("sample", ["--output=made.png"]),
]


@pytest.mark.pairs
@pytest.mark.parametrize(("verb", "flags"), VERBS, ids=[verb for verb, _ in VERBS])
@pytest.mark.parametrize("config_path", ["", "model.stack", "learner.optimizer.learning_rate", "compiler.options.x"])
def test_verbs_refuse_an_untrusted_workdir(verb, flags, config_path, folder, experiment, capsys):
    stranger = folder / "stranger"
    for payload in (PAYLOADS[0], PAYLOADS[25]):
        stranger.mkdir()
        (stranger / "config.json").write_text(
            json.dumps(_insert_payload(experiment, config_path, _fill_folder(payload, folder)))
        )
        assert _verb(verb)([f"--workdir={stranger}", *flags]) == 2
        error = capsys.readouterr().err
        assert "is refused: it is not a component" in error
        assert error.count("\n") == 1
        assert [file.name for file in stranger.iterdir()] == ["config.json"]
        (stranger / "config.json").unlink()
        stranger.rmdir()
        _assert_unharmed(folder)


def test_unrelated_config_json_is_a_one_line_error(folder, experiment, capsys):
    stranger = folder / "stranger"
    stranger.mkdir()
    adamw = {"$class": "optax.adamw", "learning_rate": 0.1}
    for config_path, words in [
        ("", "expected the config of an Experiment, given that of adamw"),
        ("trainer", "trainer: expected a config of TrainerOptions, given that of adamw"),
        ("compiler", "compiler: expected a config of Compiler, given that of adamw"),
        ("model", "model: expected a config of Chain, given that of adamw"),
        ("data", "data: expected a config of Pipeline, given that of adamw"),
    ]:
        (stranger / "config.json").write_text(json.dumps(_insert_payload(experiment, config_path, adamw)))
        assert _verb("generate")([f"--workdir={stranger}", "--prompt=x"]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    (stranger / "config.json").write_text('{"$class": "plimsoll.Linear"}')
    assert _verb("generate")([f"--workdir={stranger}", "--prompt=x"]) == 2
    assert "expected the config of an Experiment, given that of Linear" in capsys.readouterr().err


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("verb", "payload", "flags"),
    [("generate", PAYLOADS[0], ["--prompt=x"]), ("evaluate", PAYLOADS[25], ["--files=precious"])],
    ids=["generate", "evaluate"],
)
def test_payload_is_refused_in_a_subprocess(verb, payload, flags, folder):
    (folder / "config.json").write_text(json.dumps(_fill_folder(payload, folder)))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-m", f"launch.{verb}", f"--workdir={folder}", *flags]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert "is refused: it is not a component" in result.stderr
    (folder / "config.json").unlink()
    _assert_unharmed(folder)


@pytest.mark.parametrize("payload", [PAYLOADS[0], {"architectures": ["LlamaForCausalLM"], "x": PAYLOADS[0]}])
def test_published_weights_directory_executes_no_payload(payload, folder, capsys):
    published = folder / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(_fill_folder(payload, folder)))
    for kind in ("hf", "lora", "qlora"):
        assert _verb("configs")(["show", f"{kind}:{published}"]) == 2
    assert _verb("generate")([f"--hf={published}", "--prompt=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 4
    assert not (folder / "PWNED").exists()
    assert [file.name for file in published.iterdir()] == ["config.json"]


@pytest.mark.pairs
def test_training_a_stored_config_executes_no_payload(folder, experiment, capsys):
    file = folder / "config.json"
    for payload in PAYLOADS:
        for config_path in ("", "trainer.hooks.0"):
            file.write_text(json.dumps(_fill_folder(_insert_payload(experiment, config_path, payload), folder)))
            with record_audit_events() as events:
                assert _verb("train")([f"--config={file}", f"--workdir={folder}/run"]) == 2
            assert [event for event in events if str(file) not in str(event)] == []
            error = capsys.readouterr().err
            assert error.startswith(f"error: {file}: ")
            assert error.count("\n") == 1
    file.unlink()
    _assert_unharmed(folder)


# A stored config controls nothing on this machine.


def test_stored_config_sets_no_cache_and_no_compiler_files(folder, experiment):
    from plimsoll.framework.program import stored_config

    text = json.loads(json.dumps(experiment))
    text["trainer"]["compilation_cache"] = f"{folder}/PWNED"
    options = {
        **{"xla_dump_to": f"{folder}/PWNED", "xla_gpu_cuda_data_dir": ".", "xla_gpu_kernel_cache_file": "x"},
        **{"xla_backend_extra_options": "x", "xla_gpu_dump_autotune_results_to": "x", "xla_gpu_new_option": "../x"},
        **{"xla_cpu_enable_fast_math": False, "xla_backend_optimization_level": 1},
    }
    text["compiler"]["options"] = options
    (folder / "config.json").write_text(json.dumps(text))
    lines: list[str] = []
    config = stored_config.read(folder, lines.append)
    assert config.trainer.compilation_cache == "~/.cache/plimsoll/xla"
    assert config.compiler.options == {"xla_cpu_enable_fast_math": False, "xla_backend_optimization_level": 1}
    assert len(lines) == 6
    # The command line is the user's own, and a run without a cache stays without one.
    own = [("trainer.compilation_cache", "mine"), ("compiler.options.xla_dump_to", "mine")]
    config = cli.apply_overrides(stored_config.read(folder, lines.append), own)
    assert (config.trainer.compilation_cache, config.compiler.options["xla_dump_to"]) == ("mine", "mine")
    rule = {"$class": "plimsoll.AcceleratorRule", "pattern": "*", "set": {"trainer.seed": 7}}
    (folder / "config.json").write_text(json.dumps(text | {"accelerator_rules": [rule]}))
    lines.clear()
    again = configs.load(f"{folder}/config.json", lines.append)
    again.trainer.compilation_cache, again.compiler.options["xla_dump_to"] = "mine", "mine"
    assert again == config, "a config that is trained again is that of its run, without the rules that made it"
    assert len(lines) == 7
    assert "accelerator_rules" in lines[-1]
    text["trainer"]["compilation_cache"] = None
    (folder / "config.json").write_text(json.dumps(text))
    assert stored_config.read(folder, lines.append).trainer.compilation_cache is None


@pytest.mark.parametrize(
    "reward",
    [
        "{dir}/evil.py:exact",
        "os.system",
        "plimsoll.framework.batch_transforms.rewards.x/../evil.py:exact",
        ["plimsoll.framework.batch_transforms.rewards.exact", "{dir}/evil.py:exact"],
    ],
)
def test_stored_config_cannot_choose_a_reward_function(folder, experiment, reward):
    from plimsoll.framework.program import stored_config

    reward = [one.format(dir=folder) for one in reward] if isinstance(reward, list) else reward.format(dir=folder)
    rollouts = {"$class": "plimsoll.Rollouts"}
    batch_transform = {**rollouts, "reward": reward, "reference": {**rollouts, "reward": reward}}
    (folder / "config.json").write_text(json.dumps({**experiment, "batch_transform": batch_transform}))
    lines: list[str] = []
    config = stored_config.read(folder, lines.append)
    assert config.batch_transform.reward is None
    assert config.batch_transform.reference.reward is None
    assert [line.partition("=")[0] for line in lines] == ["batch_transform.reward", "batch_transform.reference.reward"]
    batch_transform = {**rollouts, "reward": "plimsoll.framework.batch_transforms.rewards.exact"}
    (folder / "config.json").write_text(json.dumps({**experiment, "batch_transform": batch_transform}))
    assert (
        stored_config.read(folder, lines.append).batch_transform.reward
        == "plimsoll.framework.batch_transforms.rewards.exact"
    )
    assert len(lines) == 2


# Names that were always meant to load still do.


@pytest.mark.parametrize("name", ["framework.rules.Rule", "framework.learner.Rule", "plimsoll.Rule"])
def test_old_config_names_load(experiment, name: str):
    older = _insert_payload(experiment, "learner.rules.0", {**experiment["learner"]["rules"][0]})
    older["learner"]["rules"][0]["$class"] = name
    assert Config.from_dict(older) == Config.from_dict(experiment)
    assert Config.from_dict(older).instantiate().learner is not None


def test_user_class_loads_after_its_file_is_imported(folder):
    source = (
        "import optax\nfrom plimsoll.framework.config import config_for\n"
        "class Mine:\n    def __init__(self, *, x: int = 1): self.x = x\n"
        "def mine(): return config_for(optax.adamw, learning_rate=0.1, mask=config_for(Mine, x=3))\n"
    )
    (folder / "own_classes.py").write_text(source)
    text = json.dumps(
        {"$class": "optax.adamw", "learning_rate": 0.1, "mask": {"$class": "user_config_own_classes.Mine", "x": 3}}
    )
    with pytest.raises(ConfigError, match="pass it as --config"):
        Config.from_json(text)
    config = configs.load(f"{folder}/own_classes.py:mine")
    assert Config.from_json(text).mask == config.mask
    assert Config.from_json(config.to_json()) == config


def test_run_with_an_unloadable_config_does_not_start(folder, capsys):
    source = (
        "import plimsoll as pl\ndef mine():\n    config = pl.load_config('nanogpt-cpu')\n"
        "    config.model.stack.pattern[0].norm = pl.config_for(pl.Layer)\n    return config\n"
    )
    (folder / "own_layer.py").write_text(source)
    assert _verb("train")([f"--config={folder}/own_layer.py:mine", f"--workdir={folder}/run", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert (
        "model.stack.pattern.0.norm: 'plimsoll.framework.layers.base.Layer' is refused: it is not a component" in error
    )
    assert "could not be read again" in error
    assert not (folder / "run").exists()
