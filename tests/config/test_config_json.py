"""JSON: exact round trips, and nothing executed or imported on load, whatever the file says."""

import enum
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

import framework
from framework import config_names
from framework.config import (
    Config,
    ConfigError,
    FieldRangeError,
    FieldTypeError,
    PositiveInt,
    UnknownFieldError,
    UntrustedNameError,
    config_for,
    target_of,
)


class Shade(enum.Enum):
    DARK = 1
    PALE = 2


class Part:
    def __init__(self, *, dim: PositiveInt = 1, init: Callable | None = None):
        pass


class Whole:
    def __init__(
        self,
        *,
        parts: list[Config] = [],  # noqa: B006
        named: dict[str, Config] = {},  # noqa: B006
        pair: tuple[int, float] = (1, 2.0),
        stages: tuple[Config, ...] = (),
        loose: Any = None,
        ratio: float = 1.0,
        shade: Shade = Shade.DARK,
        note: str | None = None,
        must: int,
    ):
        pass


def full() -> Config:
    return config_for(
        Whole,
        parts=[config_for(Part, dim=2), config_for(Part, init=config_for(jax.nn.initializers.normal, stddev=0.02))],
        named={"a": config_for(optax.lion, learning_rate=1e-4), "b.c": config_for(Part)},
        stages=(config_for(Part),),
        loose={"t": (1, [2, (3,)]), "n": None, "big": 2**70, "text": "\u00e9\n"},
        ratio=math.inf,
        shade="PALE",
    )


def test_round_trip_is_exact():
    config = full()
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert again.loose == {"t": (1, [2, (3,)]), "n": None, "big": 2**70, "text": "\u00e9\n"}
    assert isinstance(again.loose["t"], tuple)
    assert again.missing() == ["must"]
    assert Config.from_dict(config.to_dict()) == config


def test_the_form_is_plain_and_in_signature_order():
    data = json.loads(full().to_json())
    assert list(data) == ["$class", "parts", "named", "pair", "stages", "loose", "ratio", "shade", "note"]
    assert data["$class"] == f"{__name__}.Whole"
    assert data["pair"] == [1, 2.0]  # the hint restores the tuple
    assert data["stages"] == [{"$class": f"{__name__}.Part", "dim": 1, "init": None}]
    assert data["loose"]["t"] == {"$tuple": [1, [2, {"$tuple": [3]}]]}  # no hint does here
    assert data["ratio"] == {"$float": "inf"}
    assert data["shade"] == "PALE"
    assert data["named"]["a"]["$class"] == "optax.lion"
    assert data["parts"][1]["init"]["$class"] == "jax.nn.initializers.normal"
    one, two = config_for(Part), config_for(Part)
    one.dim, two.dim = 3, 3
    assert one.to_json() == two.to_json()


def test_nan_survives():
    assert math.isnan(Config.from_json(config_for(Whole, ratio=math.nan).to_json()).ratio)


def test_fields_that_a_file_leaves_out_take_their_defaults():
    config = Config.from_dict({"$class": f"{config_names.name_of(optax.adamw)}", "learning_rate": 1})
    assert config == config_for(optax.adamw, learning_rate=1.0)


BAD = [
    ({"$class": "optax.adamw", "learning_rat": 1}, UnknownFieldError, "learning_rat: no such field in optax.adamw"),
    ({"$class": "optax.adamw", "learning_rate": "1"}, FieldTypeError, "learning_rate: expected a number or a config"),
    ({"$class": "optax.adamw", "$doc": "x"}, UnknownFieldError, "$doc: no such field"),
    ({"learning_rate": 1}, FieldTypeError, "expected a dict with a '$class'"),
    ([1], FieldTypeError, "expected a dict with a '$class', given [1] (list)"),
    ({"$class": 3}, UntrustedNameError, "expected the dotted name of a class or function, given 3"),
    ({"$class": "optax.adamw", "learning_rate": {"$class": "optax.nope"}}, UntrustedNameError, "learning_rate: 'opt"),
    ({"$class": "optax.adamw", "mask": {"$float": "1.0"}}, FieldTypeError, "mask: expected"),
]


@pytest.mark.parametrize(("data", "kind", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_loaded_is_checked(data, kind, message):
    with pytest.raises(kind) as caught:
        Config.from_dict(data)
    assert message in str(caught.value)


def test_ranges_are_checked_on_load_with_the_path():
    data = full().to_dict()
    data["parts"][1]["dim"] = -1
    with pytest.raises(FieldRangeError, match=r"^parts\.1\.dim: expected an integer > 0, given -1"):
        Config.from_dict(data)


def test_text_that_is_no_json():
    for text in ("{", "", b"\x80\x04\x95pickle", "!!python/object/apply:os.system ['true']", "[" * 100_000):
        with pytest.raises(ConfigError, match="not valid JSON"):
            Config.from_json(text)
    deep = '{"$class": "optax.adamw", "mask": ' + "[" * 700 + "]" * 700 + "}"
    with pytest.raises(ConfigError):
        Config.from_json(deep)


# What a hostile config.json could name. None may be imported, and none called.
CANARIES = [
    "os.system",
    "posix.system",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "antigravity.fly",
    "canary_module.Payload",
    "framework.config_names.importlib.import_module",
    "framework.config_names.sys.exit",
    "framework.config_names.sys",
    "framework.config_names.re.compile",
    "framework.config_names._import",
    "framework.config_types.ml_collections.ConfigDict",
    "framework.config_types.Callable",
    "framework..config.Config",
    "framework.__loader__",
    "framework.config.__builtins__",
    "frameworkish.Thing",
    "optax.jax.numpy.zeros",
    "optax.jnp",
    "optax.typing",
    "jax.numpy.load",
    "jax.nn.initializers.np.load",
    "jax.nn.np.load",
    "configs.importlib.util.spec_from_file_location",
    "configs.importlib",
    "",
    ".",
    "os",
    "__import__('os').system('true')",
    "os.system\n",
    "optax.adamw\n",
]


@pytest.mark.parametrize("name", CANARIES)
def test_hostile_names_are_refused(name, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    (tmp_path / "canary_module.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Payload: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)
    for data in ({"$class": name, "command": f"touch {marker}"}, {"$class": "optax.adamw", "mask": [{"$class": name}]}):
        with pytest.raises(UntrustedNameError):
            Config.from_json(json.dumps(data))
    new = {key for key in sys.modules if key not in modules and not key.startswith(("framework", "configs", "optax"))}
    assert not {key for key in new if not key.startswith("jax")}, "a module was imported for a name"
    assert not marker.exists()
    # And the same as the name of a referenced object.
    with pytest.raises(ConfigError):
        Config.from_dict({"$class": "framework.config.reference", "name": name}).instantiate()


def test_loading_calls_nothing(monkeypatch):
    calls = []

    class Loud:
        def __init__(self, *, x: int = 0):
            calls.append(x)

    text = config_for(Loud, x=1).to_json()
    assert Config.from_json(text).x == 1
    assert calls == []


def test_a_payload_in_a_saved_file_does_not_run_in_a_new_process(tmp_path):
    """The same in a process that has configured nothing: module import is the danger there."""
    marker = tmp_path / "executed"
    (tmp_path / "payload.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef run(**kw): pass\n")
    (tmp_path / "config.json").write_text(json.dumps({"$class": "payload.run", "command": "touch"}))
    code = (
        "from framework.config import Config, UntrustedNameError\n"
        "try: Config.from_json(open('config.json').read())\n"
        "except UntrustedNameError as error: print(error)\n"
    )
    root = os.path.dirname(os.path.dirname(framework.__file__))
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert "'payload.run' is refused" in result.stdout, result.stderr
    assert not marker.exists()


def test_own_code_makes_its_names_loadable():
    def local(*, x: int = 0):
        return x

    name = config_names.name_of(local)
    with pytest.raises(UntrustedNameError, match="your own config file configures"):
        Config.from_dict({"$class": name.replace("<locals>", "locals")})
    config = config_for(local, x=2)
    assert target_of(Config.from_dict(json.loads(config.to_json()))) is local


def test_public_names_are_short_and_resolve():
    for target, name in [
        (optax.adamw, "optax.adamw"),
        (optax.contrib.muon, "optax.contrib.muon"),
        (optax.warmup_cosine_decay_schedule, "optax.warmup_cosine_decay_schedule"),
        (jax.nn.initializers.normal, "jax.nn.initializers.normal"),
        (jax.nn.gelu, "jax.nn.gelu"),
        (Config, "framework.config.Config"),
    ]:
        assert config_names.name_of(target) == name
        assert config_names.resolve(name) is target


def test_a_missing_module_is_told_from_a_broken_one(monkeypatch):
    with pytest.raises(UntrustedNameError, match=r"no module 'framework\.confg'; did you mean 'framework\.config'"):
        config_names.resolve("framework.confg.Config")
    monkeypatch.setattr(config_names.importlib, "import_module", lambda name: __import__("no_such_dependency"))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        config_names.resolve("framework.config.Config2")
