"""Loading JSON checks everything, and executes or imports nothing, whatever the file contains."""

import importlib
import json
import sys

import jax
import optax
import pytest

from plimsoll.framework.config import Config, ConfigError, FieldError, FieldTypeError, config_for, get_target
from plimsoll.framework.config import names as config_names
from plimsoll.framework.layers.linear import Linear

BAD = [
    ({"$class": "optax.adamw", "learning_rat": 1}, FieldError, "learning_rat: no such field in optax.adamw"),
    ({"$class": "optax.adamw", "learning_rate": "1"}, FieldTypeError, "learning_rate: expected a number or a config"),
    ({"$class": "optax.adamw", "$doc": "x"}, FieldError, "$doc: no such field"),
    ({"learning_rate": 1}, FieldTypeError, "expected a dict with a '$class'"),
    ({"$class": "optax.adamw", "learning_rate": {"$class": "optax.nope"}}, ConfigError, "learning_rate: 'opt"),
    (
        {"$class": "optax.clip", "max_delta": [{"$class": "optax.clip", "max_delta": ""}]},
        FieldTypeError,
        "max_delta.0.max",
    ),
]


@pytest.mark.parametrize(("data", "kind", "message"), BAD, ids=lambda value: str(value)[:40])
def test_loaded_values_are_checked(data, kind, message):
    with pytest.raises(kind) as caught:
        Config.from_dict(data)
    assert message in str(caught.value)


@pytest.mark.parametrize("depth", [700, 100_000])
def test_invalid_json_is_refused(depth):
    deep = '{"$class": "optax.adamw", "mask": ' + "[" * depth + "]" * depth + "}"
    for text in ("{", "", b"\x80\x04\x95pickle", "!!python/object/apply:os.system ['true']", deep):
        with pytest.raises(ConfigError, match=r"not valid JSON|expected at most 100 nested levels"):
            Config.from_json(text)


# Names that a hostile config.json could contain. None may be imported, and none called.
CANARIES = """
    os os.system subprocess.Popen builtins.eval antigravity.fly canary_module.Payload __import__('os').system('true') .
    plimsoll.framework.config.names.importlib.import_module plimsoll.framework.config.names.sys
    plimsoll.framework.config.names.sys.exit framework.config.names.sys.exit plimsoll.framework.config.names.re.compile
    plimsoll.framework.config.names._DOTTED plimsoll.framework.config.schema.ml_collections.ConfigDict
    plimsoll.framework.config.schema.Callable framework..config.Config plimsoll.__loader__ framework.__loader__
    plimsoll.framework.config.__builtins__ plimsoll.train plimsoll.load plimsoll.api.runs.train
    frameworkish.Thing optax.jax.numpy.zeros optax.jnp jax.numpy.load jax.nn.initializers.np.load configs.importlib
"""


@pytest.mark.parametrize("name", ["", "os.system\n", "optax.adamw\n", *CANARIES.split()])
def test_hostile_names_are_refused(name, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    (tmp_path / "canary_module.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Payload: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Resolving a name may import modules of ours, so import the ones named here, and what they need, before counting.
    importlib.import_module("plimsoll.api.runs")
    modules = set(sys.modules)
    for data in ({"$class": name, "command": f"touch {marker}"}, {"$class": "optax.adamw", "mask": [{"$class": name}]}):
        with pytest.raises(ConfigError, match=r"is refused|does not exist"):
            Config.from_json(json.dumps(data))
    new = {key for key in sys.modules if key not in modules}
    assert not {key for key in new if not key.startswith(("plimsoll", "optax", "jax"))}
    assert not marker.exists()
    # The same holds for the name of a referenced object.
    with pytest.raises(ConfigError):
        Config.from_dict({"$class": "plimsoll.framework.config.reference", "name": name}).instantiate()


def test_importing_user_code_makes_its_names_loadable():
    def local(*, x: int = 0):
        return x

    with pytest.raises(ConfigError, match="your own config file configures"):
        Config.from_dict({"$class": config_names.get_dotted_name(local)})
    assert get_target(Config.from_json(config_for(local, x=2).to_json())) is local


def test_public_names_are_short_and_resolve(monkeypatch):
    names = ["optax.adamw", "optax.contrib.muon", "jax.nn.initializers.normal", "jax.nn.gelu", "plimsoll.Linear"]
    targets = [optax.adamw, optax.contrib.muon, jax.nn.initializers.normal, jax.nn.gelu, Linear]
    for target, name in zip(targets, names, strict=True):
        assert config_names.get_dotted_name(target) == name
        assert config_names.resolve(name, passed=True) is target
    # A name that is not a component's imports nothing; a missing dependency of a component's module is not hidden.
    for name in ("framework.confg.Config", "plimsoll.launch.warm_imports.orbax"):
        with pytest.raises(ConfigError, match="it is not a component"):
            config_names.resolve(name)
    monkeypatch.setattr(config_names.importlib, "import_module", lambda name: __import__("no_such_dependency"))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        config_names.resolve("plimsoll.Linear")
