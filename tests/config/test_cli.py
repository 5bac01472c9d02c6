"""The command line of every verb: grammar, order, rules by accelerator, and how mistakes end."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import configs
import launch
from framework.config import ConfigError, config_for, target_of
from launch import cli

ROOT = Path(launch.__path__[0]).parent


def make_parser() -> cli.Parser:
    parser = cli.Parser("train", "Trains.\nMore.")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--dry_run", action="store_true")
    return parser


def parse(*argv: str) -> cli.Command:
    return make_parser().parse(argv)


def test_split_keeps_order_and_reads_both_forms():
    argv = ["--config=x", "--config.a.b=1=2", "--workdir", "w", "--config.c", "-1", "--config.a.b", "", "pos"]
    spec, overrides, rest = cli.split(argv)
    assert spec == "x"
    assert overrides == [("a.b", "1=2"), ("c", "-1"), ("a.b", "")]
    assert rest == ["--workdir", "w", "pos"]
    assert cli.split(["--config", "y"])[0] == "y"
    for bad, message in [
        (["--config"], "--config needs a value: --config=..."),
        (["--config.a", "--workdir"], r"--config\.a needs a value"),
        (["--config=a", "--config=b"], "given twice: 'a' and 'b'"),
    ]:
        with pytest.raises(cli.UsageError, match=message):
            cli.split(bad)


def test_parse_gives_flags_and_the_overridden_config(user_file):
    command = parse(
        f"--config={user_file}:mine",
        "--config.optimizer=optax.lion",
        "--workdir=w",
        "--config.optimizer.learning_rate=1e-5",
        "--config.layers.1.heads",
        "16",
        "--dry_run",
    )
    assert command.args.workdir == "w"
    assert command.args.dry_run
    assert target_of(command.config.optimizer).__name__ == "lion"
    assert command.config.optimizer.learning_rate == 1e-5
    assert command.config.layers[1].heads == 16
    assert command.named == configs.load(f"{user_file}:mine")  # untouched
    assert command.config.remat is None  # parsing alone applies no rule


USAGE = [
    (["--wrokdir=x"], "unknown flag '--wrokdir'; did you mean '--workdir'?"),
    (["--workdir=x", "--dry_rnu"], "unknown flag '--dry_rnu'; did you mean '--dry_run'?"),
    (["--workdir=x", "--dry"], "unknown flag '--dry'"),  # no abbreviations
    (["--workdir=x", "--steps=3"], "unknown flag '--steps'"),
    (["--workdir=x", "--optimizer.b1=3"], "did you mean '--config.optimizer.b1=3'?"),
    (["--workdir=x", "--confg.optimizer.b1=3"], "unknown flag '--confg.optimizer.b1'"),
    ([], "the following arguments are required: --workdir (`python -m launch.train --help` shows all flags)"),
    (["--workdir"], "argument --workdir: expected one argument"),
    (["--workdir=x", "extra"], "unrecognized arguments: extra"),
]


@pytest.mark.parametrize(("argv", "message"), USAGE)
def test_usage_errors(argv, message, user_file):
    with pytest.raises(cli.UsageError) as caught:
        parse(f"--config={user_file}:mine", *argv)
    assert message in str(caught.value)


def test_a_config_is_required():
    with pytest.raises(cli.UsageError, match="--config=NAME is required; valid names:"):
        parse("--workdir=x")


OVERRIDES = [
    ("steps=x", "--config.steps=x: expected an integer, given 'x'"),
    ("setps=3", "--config.setps=3: no such field in user_config_my"),
    ("layers.0.heads=0", "--config.layers.0.heads=0: expected an integer > 0, given '0'"),
    ("layers.7.heads=1", "--config.layers.7.heads=1: layers.7: no such index; valid: 0 to 1"),
    ("optimizer=optax.lin", "'optax.lin' does not exist; did you mean 'lion'?"),
    ("optimizer=os.system", "'os.system' is refused"),
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
    assert lines == [
        "rule v5e-*: remat none -> full",
        "rule v5e-*: layers.0.heads 4 -> 8",
        "rule v5e-*: steps 10 -> 20",
        "rule v5e-8: steps 20 -> 30",
    ]
    assert (config.remat, config.steps, config.layers[0].heads) == ("full", 30, 2)
    config, lines = command.resolve("cpu-8")
    assert lines == []
    assert config == command.config


def test_rules_can_be_switched_off_and_changed_by_override(user_file):
    command = parse(f"--config={user_file}:mine", "--workdir=w", "--config.accelerator_rules=[]")
    assert command.resolve("v5e-8")[1] == []
    command = parse(f"--config={user_file}:mine", "--workdir=w", "--config.accelerator_rules.1.pattern=cpu-*")
    assert command.resolve("cpu-1")[1] == ["rule cpu-*: steps 10 -> 30"]


def test_rules_may_set_what_is_unset_and_swap_components(user_file):
    config = configs.load(f"{user_file}:mine")
    config.accelerator_rules[0].set = {"layers.0.dim": 8, "optimizer": config_for(optax.sgd, learning_rate=1.0)}
    assert cli.apply_accelerator_rules(config, "v5e-4") == [
        "rule v5e-*: layers.0.dim ? -> 8",
        "rule v5e-*: optimizer optax.adamw -> optax.sgd",
    ]
    assert config.layers[0].dim == 8
    assert target_of(config.optimizer) is optax.sgd


def test_a_bad_rule_is_found_on_any_accelerator(user_file):
    with pytest.raises(ConfigError, match=r"^accelerator_rules\.0 \(h200x\*\): remta: no such field"):
        parse(f"--config={user_file}:wrong_rule", "--workdir=w")


def test_main_turns_mistakes_into_exit_code_2(capsys, monkeypatch):
    def run(error: BaseException | None) -> int:
        @cli.main
        def verb(argv):
            if error is not None:
                raise error
            return len(argv)

        return verb(["a"])

    assert run(None) == 1
    for error in (ConfigError("bad", path="a.b"), FileNotFoundError("no data at x"), PermissionError("x is read only")):
        assert run(error) == 2
        captured = capsys.readouterr()
        assert captured.err == f"error: {error}\n"
        assert captured.out == ""
    for bug in (RuntimeError("bug"), KeyError("bug"), AssertionError(), ValueError("not raised by our code")):
        with pytest.raises(type(bug)):
            run(bug)
    monkeypatch.setattr(sys, "argv", ["prog", "x", "y"])
    assert cli.main(lambda argv: len(argv))() == 2
    monkeypatch.setenv("PLIMSOLL_TRACEBACK", "1")
    assert run(ConfigError("bad")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_value_errors_are_told_apart_by_who_raised_them():
    def ours_raises():
        raise ValueError("mesh.data = 3 does not divide 8")

    # As if it were defined in framework/: who raised is read from the frame's globals.
    ours_raises = types.FunctionType(ours_raises.__code__, {**globals(), "__name__": "framework.layout"})
    with pytest.raises(ValueError, match="does not divide") as ours:
        ours_raises()
    assert cli.is_user_error(ours.value)

    def theirs_raises():
        return jax.jit(lambda x: x, in_shardings=(None, None))(1)

    theirs_raises = types.FunctionType(theirs_raises.__code__, {**globals(), "__name__": "framework.layout"})
    for raises in (theirs_raises, lambda: jnp.stack([]), lambda: np.zeros(2).reshape(3)):
        with pytest.raises(ValueError) as theirs:  # whatever it says
            raises()
        assert not cli.is_user_error(theirs.value), theirs.value


def launch_process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    # A platform that does not exist: whatever starts a JAX backend raises, and the exit code is then 1.
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_that_platform_would_fail():
    result = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        timeout=120,
    )
    assert result.returncode == 1


PROCESSES = [
    (["--config.layers.0.haeds=3"], "did you mean 'heads'?"),
    (["--config.optimizer.learning_rate=fast"], "expected a number or a config, given 'fast'"),
    (["--jsn"], "unknown flag '--jsn'; did you mean '--json'?"),
]


@pytest.mark.parametrize(("argv", "message"), PROCESSES)
def test_typos_end_with_exit_code_2_before_jax_starts(argv, message, user_file):
    result = launch_process("launch.configs", "show", f"{user_file}:mine", *argv)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_unknown_names_and_verbs_in_a_process():
    result = launch_process("launch.configs", "show", "no-such-config")
    assert result.returncode == 2
    assert "no config is named 'no-such-config'" in result.stderr
    result = launch_process("launch", "confgis")
    assert (result.returncode, result.stderr) == (2, "error: no verb 'confgis'; did you mean 'configs'?\n")


def test_a_reader_that_leaves_is_no_error(user_file):
    command = f"{sys.executable} -m launch.configs show {user_file}:mine | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1


def test_showing_as_json_in_a_process_equals_the_loaded_config(user_file):
    result = launch_process("launch", "configs", "show", f"{user_file}:mine", "--json", "--config.steps=7")
    assert result.returncode == 0, result.stderr
    expected = configs.load(f"{user_file}:mine")
    expected.steps = 7
    assert json.loads(result.stdout)["steps"] == 7
    assert json.loads(result.stdout).keys() == expected.to_dict().keys()
