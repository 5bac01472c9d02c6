"""Golden files of the resolved named configs, so that no change of a default goes unnoticed.

    python -m tools.golden            compares, prints what differs, exits 1 if anything does
    python -m tools.golden --write    rewrites tests/configs/golden/

`defaults.json` contains the defaults of every component that a named config uses. NAME.json contains the parameter
count and all differences from the defaults, one line per field. Together they are the resolved config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from plimsoll import configs
from plimsoll.framework.config import ABSENT, REQUIRED, Config, config_for, get_target
from plimsoll.framework.config.names import get_dotted_name

FOLDER = Path(__file__).parents[1] / "tests" / "configs" / "golden"
DEFAULTS = "defaults"
Flat = dict[str, Any]


def parameter_count(config: Config) -> int:
    """Return the number of elements of all parameters of an experiment's model."""
    return sum(spec.size for spec in jax.tree.leaves(config.model.instantiate().parameter_specs()))


def changes(config: Config) -> Flat:
    """Return {dotted path: value} of all differences from the defaults; a chosen component is its class's name."""
    return {"": get_dotted_name(get_target(config)), **dict(_changes(config, config_for(get_target(config)), ""))}


def _changes(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        if not isinstance(default, Config) or get_target(default) is not get_target(value):
            yield path, get_dotted_name(get_target(value))
            default = config_for(get_target(value))
        for name in dict.fromkeys([*value.keys(), *default.keys()]):
            yield from _changes(_field(value, name), _field(default, name), f"{path}.{name}" if path else name)
    elif _holds_configs(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _changes(item, ABSENT, f"{path}.{key}")
    elif value is REQUIRED or value != default or type(value) is not type(default):
        yield path, None if value is REQUIRED else value


def _field(config: Config, name: str) -> Any:
    # A required field that the parent fills in counts as REQUIRED.
    return config.get(name, REQUIRED)


def _holds_configs(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Config) for item in inner)


def defaults(of: list[Config]) -> Flat:
    """Return {class.field: default} of every component in the configs, sorted by name."""
    rows: Flat = {}
    todo = [node for config in of for _, node in config.walk() if isinstance(node, Config)]
    done: set[str] = set()
    while todo:
        target = get_target(todo.pop())
        name = get_dotted_name(target)
        if name in done:
            continue
        done.add(name)
        for field, value in config_for(target).to_dict().items():
            if field != "$class":
                rows[f"{name}.{field}"] = value
        todo += [node for _, node in config_for(target).walk() if isinstance(node, Config)]
    return dict(sorted(rows.items()))


def golden() -> dict[str, Flat]:
    """Return {file name without .json: content}."""
    named = {name: configs.load(name) for name in configs.names()}
    files: dict[str, Flat] = {
        name: {"parameters": parameter_count(config), **changes(config)} for name, config in named.items()
    }
    # Round trip through JSON, which turns tuples into lists.
    return json.loads(json.dumps({DEFAULTS: defaults(list(named.values())), **files}))


def load_golden(folder: Path = FOLDER) -> dict[str, Flat]:
    """Return the contents of the folder."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def differences(left: dict[str, Flat], right: dict[str, Flat]) -> list[str]:
    """Return one line for each field that differs between the two sides."""
    lines = []
    for name in dict.fromkeys([*left, *right]):
        old, new = left.get(name, {}), right.get(name, {})
        for path in dict.fromkeys([*old, *new]):
            if path not in old or path not in new or old[path] != new[path]:
                lines.append(f"{name}: {path or 'class'}: {_show(old, path)} -> {_show(new, path)}")
    return lines


def _show(flat: Flat, path: str) -> str:
    return json.dumps(flat[path]) if path in flat else "nothing"


def main(arguments: list[str]) -> int:
    """Compare or write the golden files, and return the exit code."""
    if arguments not in ([], ["--write"]):
        print(__doc__)
        return 2
    files = golden()
    lines = differences(load_golden(), files)
    print("\n".join(lines) or "no differences")
    if not arguments:
        return 1 if lines else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in files:
            path.unlink()
    for name, flat in files.items():
        lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(value)}" for path, value in flat.items())
        (FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
