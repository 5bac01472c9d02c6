"""Look-up of configs by name and by file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.framework.config import Config, ConfigError, get_target
from plimsoll.framework.config.names import get_dotted_name
from plimsoll.framework.config.schema import schema


def test_all_component_hints_resolve():
    """A hint that does not resolve would accept anything, so all of ours must resolve."""
    for name, function in configs.functions().items():
        assert (function.__doc__ or "").strip(), f"{name} needs a docstring: it documents the config"
        for path, value in configs.load(name).walk():
            if isinstance(value, Config) and get_dotted_name(get_target(value)).startswith("framework."):
                for field, parameter in schema(get_target(value)).items():
                    assert not isinstance(parameter.hint, str), f"{name}: {path}.{field}: {parameter.hint}"


@pytest.mark.pairs
def test_named_configs_load_from_json_in_a_fresh_process():
    texts = {name: configs.load(name).to_json(indent=None) for name in configs.names()}
    code = (
        "import json, sys\n"
        "from plimsoll.framework.config import Config\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    assert Config.from_json(text).to_json(indent=None) == text, name\n"
        "print('same')\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(texts), capture_output=True, text=True, timeout=120, cwd=root
    )
    assert result.stdout == "same\n", result.stderr


def test_names_in_the_source_are_those_of_the_modules():
    functions = configs.functions()
    assert configs.names() == list(functions)
    for name, function in functions.items():
        assert configs.find(name) is function


def test_unknown_names_list_the_nearest(monkeypatch):
    known = dict.fromkeys(("gpt2-124m", "gpt2-125m", "llama2-7b"), "plimsoll.configs.gpt2")
    monkeypatch.setattr(configs, "find_modules", lambda: known)
    for name, message in {
        "gpt2-124": r"no config is named 'gpt2-124'; did you mean 'gpt2-12[45]m', 'gpt2-12[45]m'",
        "zzz": r"'zzz'; valid: gpt2-124m, gpt2-125m, llama2-7b",
        "LLAMA2_7B": r"no config is named 'LLAMA2_7B'; did you mean 'llama2-7b'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            configs.load(name)


def test_a_users_file(user_file, monkeypatch):
    config = configs.load(f"{user_file}:mine")
    assert config.optimizer.learning_rate == 3e-4
    assert configs.load(f"{user_file}:mine-again") == config
    assert configs.load(f"{user_file}:mine") is not config
    assert Config.from_json(config.to_json()) == config
    monkeypatch.setenv("HOME", str(user_file.parent))
    monkeypatch.chdir(user_file.parent)
    assert configs.load("~/my.py:mine") == configs.load("my.py:mine") == config


def test_file_errors_list_the_available_names(user_file, tmp_path):
    cases = {
        f"{user_file}:mien": r"no function or CONFIGS entry 'mien'; did you mean 'mine'\?",
        f"{user_file}": r"no function or CONFIGS entry ''; valid: broken, mine, no_config, other",
        f"{user_file}:no_config": "expected a function that returns a Config, but it returned int",
        f"{user_file}:broken": r"Layer\.haeds: no such field in .*; did you mean 'heads'\?  \[.*my\.py:\d+\]",
    }
    for spec, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            configs.load(spec)
    with pytest.raises(FileNotFoundError, match=r"no config file '.*mu\.py'; did you mean 'my\.py'\?"):
        configs.load(f"{tmp_path}/mu.py:mine")
    with pytest.raises(FileNotFoundError, match="no config file"):
        configs.load(f"{tmp_path}/nowhere/x.py:mine")


def test_config_files_with_equal_names_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    for index in (1, 2):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / f"neighbour_{index}.py").write_text(f"value = {index}\n")
        (tmp_path / str(index) / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
        (tmp_path / str(index) / "twin.py").write_text(
            f"import colorsys\nfrom neighbour_{index} import value\nfrom plimsoll.framework.config import config_for\n"
            "class Own:\n    def __init__(self, *, x: int = value): pass\ndef own(): return config_for(Own)\n"
        )
    one, two = (configs.load(f"{tmp_path}/{index}/twin.py:own") for index in (1, 2))
    assert (one.x, two.x) == (1, 2)
    assert configs.load(f"{tmp_path}/1/twin.py:own") == one
    assert one.to_dict()["$class"] == "user_config_twin.Own"  # depends on the file's name, not on its directory
    assert Config.from_json(two.to_json()).x == 2
    sys.path[:] = [folder for folder in sys.path if not folder.startswith(str(tmp_path))]


def test_fixed_file_can_be_reloaded(tmp_path):
    path = tmp_path / "mended.py"
    path.write_text("def only(:\n")
    with pytest.raises(ConfigError, match=r"mended\.py, line 1: "):
        configs.load(f"{path}:only")
    path.write_text(
        "import optax\nfrom plimsoll.framework.config import config_for as of\ndef only(): return of(optax.adamw)\n"
    )
    assert configs.load(f"{path}:only").b1 == 0.9
