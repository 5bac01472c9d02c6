"""Look-up of configs by name and by file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from framework.config import Config, ConfigError, target_of
from framework.config_names import name_of
from framework.config_schema import schema


def test_the_package_is_searched_by_name():
    functions = configs.functions()
    assert configs.names() == list(functions)
    for name, function in functions.items():
        assert configs.find(name) is function
        assert (function.__doc__ or "").strip(), f"{name} needs a docstring: it documents the config"


def test_every_hint_of_every_component_resolves():
    """A hint that does not resolve would accept anything: our own must not have such holes."""
    for name in configs.names():
        for path, value in configs.load(name).walk():
            if isinstance(value, Config) and name_of(target_of(value)).startswith("framework."):
                for field in schema(target_of(value)).fields.values():
                    assert not isinstance(field.hint, str), f"{name}: {path}.{field.name}: {field.hint}"


def test_named_configs_load_from_json_in_a_process_that_knows_none_of_them():
    texts = {name: configs.load(name).to_json(indent=None) for name in configs.names()}
    code = (
        "import json, sys\n"
        "from framework.config import Config\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    assert Config.from_json(text).to_json(indent=None) == text, name\n"
        "print('same')\n"
    )
    root = Path(configs.__path__[0]).parent
    result = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(texts), capture_output=True, text=True, timeout=120, cwd=root
    )
    assert result.stdout == "same\n", result.stderr


def test_unknown_names_list_the_nearest(monkeypatch):
    known = dict.fromkeys(("gpt2-124m", "gpt2-125m", "llama2-7b"), dict)
    monkeypatch.setattr(configs, "functions", lambda: known)
    with pytest.raises(
        ConfigError, match=r"no config is named 'gpt2-124'; did you mean 'gpt2-12[45]m', 'gpt2-12[45]m'"
    ):
        configs.load("gpt2-124")
    with pytest.raises(ConfigError, match=r"'zzz'; valid: gpt2-124m, gpt2-125m, llama2-7b"):
        configs.load("zzz")
    with pytest.raises(ConfigError, match=r"no config is named 'LLAMA2_7B'; did you mean 'llama2-7b'"):
        configs.load("LLAMA2_7B")


def test_a_users_file(user_file):
    config = configs.load(f"{user_file}:mine")
    assert config.optimizer.learning_rate == 3e-4
    assert configs.load(f"{user_file}:mine-again") == config
    assert configs.load(f"{user_file}:mine") is not config
    assert config.to_dict()["layers"][0]["$class"] == f"{type_module(config)}.Layer"
    assert Config.from_json(config.to_json()) == config


def type_module(config: Config) -> str:
    return config.to_dict()["$class"].rpartition(".")[0]


def test_file_errors_name_what_is_there(user_file, tmp_path):
    cases = {
        f"{user_file}:mien": r"no function or CONFIGS entry 'mien'; did you mean 'mine'\?",
        f"{user_file}:_helper": "no function or CONFIGS entry '_helper'",
        f"{user_file}:needs": "no function or CONFIGS entry 'needs'",
        f"{user_file}": r"say which config: .*my\.py:mine, .*my\.py:other",
        f"{user_file}:": "say which config",
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


def test_one_config_needs_no_name(tmp_path):
    path = tmp_path / "single.py"
    path.write_text(
        "import optax\nfrom framework.config import config_for\ndef only(): return config_for(optax.adamw)\n"
    )
    assert configs.load(str(path)).b1 == 0.9
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(ConfigError, match="it has none"):
        configs.load(str(path))
    with pytest.raises(ConfigError, match="entry 'x'; it has none"):
        configs.load(f"{path}:x")


def test_files_of_one_name_do_not_mix(tmp_path):
    text = "import optax\nfrom framework.config import config_for\n"
    text += "def get(): return config_for(optax.sgd, learning_rate={})\n"
    text += "class Own:\n    def __init__(self, *, x: int = {}): pass\ndef own(): return config_for(Own)\n"
    for index in (1, 2):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "twin.py").write_text(text.format(index, index))
    one, two = (configs.load(f"{tmp_path}/{index}/twin.py:own") for index in (1, 2))
    assert (one.x, two.x) == (1, 2)
    assert type_module(one) == "user_config_twin"  # depends on the file's name, not on its directory
    assert type_module(two) == "user_config_twin_2"
    assert configs.load(f"{tmp_path}/1/twin.py:get").learning_rate == 1.0
    assert Config.from_json(two.to_json()).x == 2


def test_files_may_import_their_neighbours_but_shadow_nothing(tmp_path, monkeypatch):
    (tmp_path / "my_neighbour.py").write_text("import optax\ntarget = optax.lion\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    path = tmp_path / "needs_neighbour.py"
    path.write_text(
        "import colorsys\nimport my_neighbour\nfrom framework.config import config_for\n"
        "def lion(): return config_for(my_neighbour.target)\n"
    )
    assert name_of(target_of(configs.load(f"{path}:lion"))) == "optax.lion"
    sys.path.remove(str(tmp_path))


def test_a_file_that_fails_can_be_mended_and_loaded(tmp_path):
    path = tmp_path / "mended.py"
    path.write_text("def only(:\n")
    with pytest.raises(ConfigError, match=r"mended\.py, line 1: "):
        configs.load(f"{path}:only")
    path.write_text("undefined_name\n")
    with pytest.raises(NameError):  # the user's own bug keeps its traceback
        configs.load(f"{path}:only")
    path.write_text(
        "import optax\nfrom framework.config import config_for\ndef only(): return config_for(optax.adamw)\n"
    )
    assert configs.load(f"{path}:only").b1 == 0.9


def test_home_directories_and_relative_paths(user_file, monkeypatch):
    monkeypatch.setenv("HOME", str(user_file.parent))
    monkeypatch.chdir(user_file.parent)
    assert configs.load("~/my.py:mine") == configs.load("my.py:mine") == configs.load(f"{Path('.')}/my.py:mine")
