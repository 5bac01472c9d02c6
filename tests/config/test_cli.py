"""The command line of every verb: grammar, order, rules by accelerator, and how user errors end."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from plimsoll import configs
from plimsoll.framework.config import Config, ConfigError, config_for, get_schema, get_target
from plimsoll.framework.run import user_errors
from plimsoll.launch import cli, source_index

ROOT = Path(__file__).parents[2]


def parse(*argv: str) -> cli.Command:
    parser = cli.Parser("train", "Trains.\nMore.")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--dry_run", action="store_true")
    return parser.parse(argv)


def test_split_keeps_order_and_reads_both_forms():
    argv = ["--config=x", "--config.a.b=1=2", "--workdir", "w", "--config.c", "-1", "--config.a.b", "", "pos"]
    assert cli.split(argv) == ("x", [("a.b", "1=2"), ("c", "-1"), ("a.b", "")], ["--workdir", "w", "pos"])
    for bad, message in [
        (["--config"], "--config needs a value: --config=..."),
        (["--config.a", "--workdir"], r"--config\.a needs a value"),
        (["--config=a", "--config=b"], "given twice: 'a' and 'b'"),
    ]:
        with pytest.raises(cli.UsageError, match=message):
            cli.split(bad)


def test_parse_gives_flags_and_the_overridden_config(user_file):
    overrides = ["--config.optimizer=optax.lion", "--config.optimizer.learning_rate=1e-5", "--config.layers.1.heads=16"]
    command = parse(f"--config={user_file}:mine", overrides[0], "--workdir=w", *overrides[1:], "--dry_run")
    assert (command.args.workdir, command.args.dry_run) == ("w", True)
    assert get_target(command.config.optimizer).__name__ == "lion"
    assert command.config.optimizer.learning_rate == 1e-5
    assert command.config.layers[1].heads == 16
    assert command.named == configs.load(f"{user_file}:mine")  # untouched
    assert command.config.remat is None  # parsing applies no rule


USAGE = [
    (["--wrokdir=x"], "unknown flag '--wrokdir'; did you mean '--workdir'?"),
    (["--workdir=x", "--dry"], "unknown flag '--dry'"),  # no abbreviations
    (["--workdir=x", "--optimizer.b1=3"], "did you mean '--config.optimizer.b1=3'?"),
    (["--workdir=x", "--lr=3"], "unknown flag '--lr'; did you mean '--config.optimizer.learning_rate=3'?"),
    (["--workdir=x", "--steps", "7"], "did you mean '--config.steps=7'?"),
    (["--outdir=x"], "did you mean '--workdir=x'?"),
    ([], "the following arguments are required: --workdir (`plimsoll train --help` shows all flags)"),
]


@pytest.mark.parametrize(("argv", "message"), USAGE)
def test_usage_errors(argv, message, user_file):
    with pytest.raises(cli.UsageError) as caught:
        parse(f"--config={user_file}:mine", *argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [*configs.names(), "hf:meta-llama/Llama-3.1-8B", "qlora:Qwen/Qwen2.5-7B"])
def test_sections_in_the_source_are_those_of_our_configs(name):
    config = configs.load(name, shape_only=True)
    for section, (_, component) in source_index.SECTIONS.items():
        part = config.get_path(section) if section else config
        assert get_target(part).__name__ == component
        assert source_index.list_fields(section) == list(get_schema(part))


FIELDS = ["trainer.max_stepz=5", "triner.max_steps=5", "memory.remt=full", "zzz=1", "learner.z=2", "mesh.fdsp.x=1"]


@pytest.mark.parametrize("override", FIELDS)
def test_unknown_fields_are_refused_with_the_message_of_the_config(override):
    with pytest.raises(ConfigError) as expected:
        cli.apply_overrides(configs.load("gpt2-124m"), [tuple(override.split("="))])
    with pytest.raises(ConfigError) as caught:
        parse("--config=gpt2-124m", "--workdir=w", f"--config.{override}")
    assert str(caught.value) == str(expected.value)


def test_old_names_and_those_of_other_trainers_are_left_to_the_config():
    command = parse("--config=gpt2-124m", "--workdir=w", "--config.companion=none")
    assert command.config.batch_transform is None
    with pytest.raises(ConfigError, match=r"no such field; did you mean 'trainer\.max_steps'"):
        parse("--config=gpt2-124m", "--workdir=w", "--config.trainer.steps=5")


def test_typos_are_reported_before_jax_is_imported():
    named, published = "--config=llama3-8b", "--config=hf:meta-llama/Llama-3.1-8B"
    commands = [
        ["plan", "--confg=x"],
        ["plan", "--config=lama3-8b"],
        ["plan", named, "--targt=h100"],
        ["plan", published, "--targt=h100"],
        ["plan", published, "--target=h100", "--config.memory.remt=full"],
        ["train", "--config.trainer.max_stepz=5"],
        ["train", named, "--workdir=w", "--config.trainer.max_stepz=5"],
        ["train", named, "--wrokdir=w"],
        ["local", named, "--wrokdir=w"],
        *([verb, "--wrokdir=w"] for verb in ("generate", "chat", "evaluate", "score", "export", "sample")),
    ]
    code = (
        "import sys\n"
        "from plimsoll.launch.__main__ import main\n"
        f"assert [main(command) for command in {commands}] == [2] * {len(commands)}\n"
        "print([name for name in ('jax', 'optax') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
    assert len(done.stderr.splitlines()) == len(commands)


OVERRIDES = [
    ("steps=x", "--config.steps=x: expected an integer, given 'x'"),
    ("setps=3", "--config.setps=3: no such field in user_config_my"),
    ("layers.7.heads=1", "--config.layers.7.heads=1: layers.7: no such index; layers has 2 elements"),
    ("accelerator_rules.0.set.remat=3", "accelerator_rules.0 (v5e-*): remat: expected text or none, given 3 (int)"),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDES)
def test_override_errors_quote_the_flag(override, message, user_file):
    with pytest.raises(ConfigError) as caught:
        parse(f"--config={user_file}:mine", "--workdir=w", f"--config.{override}")
    assert message in str(caught.value)


def test_rules_come_after_the_name_and_before_overrides(user_file):
    command = parse(f"--config={user_file}:mine", "--workdir=w", "--config.layers.0.heads=2")
    config, lines = command.resolve("v5e-8")
    assert lines == ["rule v5e-*: remat none -> full", "rule v5e-*: steps 10 -> 20", "rule v5e-8: steps 20 -> 30"]
    assert (config.remat, config.steps, config.layers[0].heads) == ("full", 30, 2)
    assert command.resolve("cpu-8") == (command.config, [])


def test_override_text_is_parsed_once(user_file, monkeypatch):
    """The same holds where rules are applied before it; without a rule, it is applied only once too."""
    read: list[str] = []
    override = Config.override

    def counting(self: Config, path: str, text: str) -> None:
        read.append(path)
        override(self, path, text)

    monkeypatch.setattr(Config, "override", counting)
    flags = ["--config.optimizer=optax.lion", "--config.optimizer.learning_rate=1e-5", "--config.layers.0.heads=2"]
    command = parse(f"--config={user_file}:mine", "--workdir=w", *flags)
    assert command.resolve("cpu-8") == (command.config, [])
    config, _ = command.resolve("v5e-8")
    assert read == ["optimizer", "optimizer.learning_rate", "layers.0.heads"]
    assert (get_target(config.optimizer), config.optimizer.learning_rate) == (optax.lion, 1e-5)
    config.layers[0].heads = 16
    assert command.resolve("v5e-8")[0].layers[0].heads == 2


def test_rules_are_checked_and_may_be_overridden(user_file):
    command = parse(f"--config={user_file}:mine", "--workdir=w", "--config.accelerator_rules=[]")
    assert command.resolve("v5e-8")[1] == []
    command = parse(f"--config={user_file}:mine", "--workdir=w", "--config.accelerator_rules.1.pattern=cpu-*")
    assert command.resolve("cpu-1")[1] == ["rule cpu-*: steps 10 -> 30"]
    flags = ["--config.accelerator_rules.1.pattern=cpu-*", "--config.steps=16"]
    config, lines = parse(f"--config={user_file}:mine", "--workdir=w", *flags).resolve("cpu-1")
    assert (config.steps, lines) == (16, []), "what is not used is not told"
    config = configs.load(f"{user_file}:mine")
    config.accelerator_rules[0].set = {"layers.0.dim": 8, "optimizer": config_for(optax.sgd, learning_rate=1.0)}
    lines = cli.apply_accelerator_rules(config, "v5e-4")
    assert {"rule v5e-*: layers.0.dim ? -> 8", "rule v5e-*: optimizer optax.adamw -> optax.sgd"} < set(lines)
    config.accelerator_rules[1].set = {"stpes": 3}
    with pytest.raises(ConfigError, match=r"^accelerator_rules\.1 \(v5e-8\): stpes: no such field"):
        cli.apply_accelerator_rules(config, None)  # on any accelerator


def test_main_returns_exit_code_2_for_user_errors(capsys, monkeypatch):
    def run(error: BaseException) -> int:
        @cli.main
        def verb(argv):
            raise error

        return verb(["a"])

    assert cli.main(lambda argv: len(argv))(["a"]) == 1
    for error in (ConfigError("bad", path="a.b"), FileNotFoundError("no data at x"), PermissionError("x is read only")):
        assert run(error) == 2
        assert capsys.readouterr() == ("", f"error: {error}\n")
    for bug in (RuntimeError("bug"), KeyError("bug"), AssertionError(), ValueError("not raised by our code")):
        with pytest.raises(type(bug)):
            run(bug)
    monkeypatch.setenv("PLIMSOLL_TRACEBACK", "1")
    assert run(ConfigError("bad")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_user_value_errors_differ_from_library_bugs():
    def ours():
        raise ValueError("mesh.data = 3 does not divide 8")

    def theirs():
        return jax.jit(lambda x: x, in_shardings=(None, None))(1)

    # As if they were defined in framework/: the file of the frame that raises decides.
    file = str(ROOT / "framework" / "layout.py")
    for raises, expected in ((ours, True), (theirs, False), (lambda: jnp.stack([]), False)):
        with pytest.raises(ValueError) as caught:  # with any message
            types.FunctionType(raises.__code__.replace(co_filename=file), globals())()
        assert user_errors.is_user_error(caught.value) is expected, caught.value


def launch_process(*argv: str) -> subprocess.CompletedProcess[str]:
    # A platform that does not exist: anything that starts a JAX backend raises, and the exit code is then 1.
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=120)
    # A slow machine also shows the startup message.
    done.stderr = re.sub(r"^starting [^\n]*\n", "", done.stderr)
    return done


PROCESSES = [
    (["plimsoll", "configs", "show", "{file}:mine", "--config.layers.0.haeds=3"], "did you mean 'heads'?"),
    (["plimsoll", "configs", "show", "{file}:mine", "--config.optimizer.learning_rate=fast"], "expected a number or"),
    (["plimsoll", "configs", "show", "{file}:mine", "--jsn"], "unknown flag '--jsn'; did you mean '--json'?"),
    pytest.param(
        ["plimsoll", "configs", "show", "gpt2-124"],
        "no config is named 'gpt2-124'; did you mean 'gpt2-124m'",
        marks=pytest.mark.pairs,
    ),
    (["launch", "confgis"], "no verb 'confgis'; did you mean 'configs'?"),
]


@pytest.mark.pairs
@pytest.mark.parametrize(("argv", "message"), PROCESSES)
def test_typos_end_with_exit_code_2_before_jax_starts(argv, message, user_file):
    if argv == PROCESSES[0][0]:
        assert launch_process("-c", "import jax; jax.devices()").returncode == 1  # this platform does fail
    result = launch_process("-m", *(word.format(file=user_file) for word in argv))
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


USERS = """
from plimsoll.framework.config import config_for

def name():
    return undefined

def inner():
    return name()

def numbers():
    import numpy as np
    return np.zeros(3) @ np.zeros(4)
"""


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("function", "message", "lines"),
    [
        ("inner", "my.py:5: NameError: name 'undefined' is not defined", [8, 5]),
        ("numbers", "my.py:12: ValueError", [12]),
    ],
)
def test_user_file_exception_shows_only_user_frames(tmp_path, function, message, lines):
    (tmp_path / "my.py").write_text(USERS)
    result = launch_process("-m", "plimsoll", "configs", "show", f"{tmp_path}/my.py:{function}")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith(f"error: {message}")
    frames = [line.split(", ")[:2] for line in result.stderr.splitlines() if line.startswith("  File ")]
    assert frames == [[f'  File "{tmp_path}/my.py"', f"line {line}"] for line in lines]
    assert "Traceback" not in result.stderr


@pytest.mark.pairs
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{"])
def test_verb_run_as_main_recognizes_its_errors(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    result = launch_process("-m", "plimsoll", "evaluate", f"--workdir={tmp_path}", f"--choices={tmp_path}/x")
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: {tmp_path}/x")
    assert result.stderr.count("\n") == 1


def test_package_logging_uses_our_line_format():
    """Packages that log through absl (orbax, grain and the framework), and packages with their own loggers."""
    script = """
import logging, sys
from absl import logging as absl_logging
from plimsoll.launch import cli, source_index

def verb(argv):
    logging.getLogger("package").warning("%s is slow", "it")
    absl_logging.info("not shown")
    absl_logging.error("broken", exc_info=ValueError("why"))
    return 0

sys.exit(cli.main(verb)())
"""
    result = launch_process("-c", script)
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert lines == ["warning: it is slow (package)", "error: broken", "ValueError: why (<string>)"]
