"""Write the JSON Schema of `plimsoll plan --json` from the records that it describes, or check that it is current.

    python -m tools.plan_schema            # exit code 1 if the stored schema differs
    python -m tools.plan_schema --write

The types come from the annotations, and the descriptions with their units from the docstrings. Increase
`plan_report.SCHEMA_VERSION` when a field is removed, renamed or changes its meaning; a new field does not need that.
"""

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from plimsoll.extras.autotune.settings import TunedSettings
from plimsoll.extras.other_frameworks.foreign_run import ForeignRun
from plimsoll.framework.plan import plan_report
from plimsoll.framework.plan.plan_report import BatchReport, HostReport, PlanReport
from plimsoll.framework.plan.throughput_curve import ThroughputCurve
from plimsoll.launch.plan_check import CheckResult

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}
# Matches `name: text` of a docstring, and the further indented lines below it.
_ATTRIBUTE = re.compile(r"^( +)(\w+): *(.*(?:\n\1 +.*)*)", re.MULTILINE)


def build_schema() -> dict[str, Any]:
    """Return the schema of all outputs."""
    definitions: dict[str, Any] = {}
    report = _describe_record(PlanReport, definitions, keys=plan_report.list_keys())
    definitions["PlanReport"] = report
    _describe_record(TunedSettings, definitions)
    _describe_record(ThroughputCurve, definitions)
    knee = {"type": "integer", "description": "tokens per step of the point with 90% of the highest rate of the curve."}
    definitions["ThroughputCurve"]["properties"]["knee"] = knee
    definitions["ThroughputCurve"]["required"].append("knee")
    host = definitions["HostReport"]
    for name in ("peak_phase", "peak_bytes"):
        hint = typing.get_type_hints(getattr(HostReport, name).fget)["return"]
        host["properties"][name] = _describe_type(hint, definitions) | {
            "description": getattr(HostReport, name).__doc__
        }
        host["required"].append(name)
    curve: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/ThroughputCurve"}, {"type": "null"}]}
    curve["description"] = "Rates at larger batches; null if the rates of the device are unknown."
    foreign = _describe_record(ForeignRun, definitions)
    foreign["properties"] |= {
        "files": {"type": "array", "items": {"type": "string"}, "description": "The files that were read."},
        "command": {"type": "string", "description": "Our command that comes nearest."},
    }
    foreign["required"] += ["files", "command"]
    version = {"const": plan_report.SCHEMA_VERSION, "description": "Version of this schema."}
    report["properties"] = {
        "schema_version": version,
        **report["properties"],
        "auto": {"$ref": "#/$defs/TunedSettings", "description": "With --auto: the chosen settings."},
        "throughput_curve": curve,
        "from": {"$ref": "#/$defs/ForeignRun", "description": "With --from: the run of the other framework."},
    }
    report["required"].insert(0, "schema_version")
    definitions["Frontier"] = _describe_frontier(version, curve, definitions)
    check = _describe_record(CheckResult, definitions)
    del definitions["CheckResult"]
    definitions["Checks"] = {
        "type": "object",
        "description": "The runs of --check.",
        "properties": {"schema_version": version, "checks": {"type": "array", "items": check}},
        "required": ["schema_version", "checks"],
        "additionalProperties": False,
    }
    return {
        "$schema": _DRAFT,
        "$id": f"urn:plimsoll:plan:{plan_report.SCHEMA_VERSION}",
        "title": "Output of plimsoll plan --json",
        "description": "One report; with several targets or --compare a list of reports; with --largest or --longest a "
        "list of frontiers; with --check one object. Bytes are counts of bytes, per device unless a description says "
        "otherwise; times are in seconds.",
        "anyOf": [
            {"$ref": "#/$defs/PlanReport"},
            {"type": "array", "items": {"$ref": "#/$defs/PlanReport"}},
            {"type": "array", "items": {"$ref": "#/$defs/Frontier"}},
            {"$ref": "#/$defs/Checks"},
        ],
        "$defs": dict(sorted(definitions.items())),
    }


def _describe_frontier(version: dict[str, Any], curve: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a series of --largest or --longest."""
    _describe_record(BatchReport, definitions)
    integer = {"type": "integer"}
    point = {
        "type": "object",
        "description": "A model size or row length, with the fastest settings under which it fits.",
        "properties": {
            "heads": integer | {"description": "With --largest: heads of attention in each layer."},
            "layers": integer | {"description": "With --largest: number of layers."},
            "parameters": integer | {"description": "With --largest: number of parameters."},
            "seq_len": integer | {"description": "With --longest: tokens in a row."},
            "tokens_per_second": {
                "type": ["number", "null"],
                "description": "Tokens per second on all devices; null if the rates of the device are unknown.",
            },
            "choice": {"$ref": "#/$defs/TunedSettings"},
            "batch": {"$ref": "#/$defs/BatchReport"},
        },
        "required": ["tokens_per_second", "choice", "batch"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "description": "The model sizes or row lengths that fit, smallest first, of one series.",
        "properties": {
            "schema_version": version,
            "name": {"type": "string", "description": "Compared settings, target and allowed changes."},
            "failure": {"type": "string", "description": "Why nothing fits; empty if something does."},
            "points": {"type": "array", "items": point, "description": "The last point is the largest that fits."},
            "throughput_curve": curve,
        },
        "required": ["schema_version", "name", "failure", "points", "throughput_curve"],
        "additionalProperties": False,
    }


def _describe_record(record: type, definitions: dict[str, Any], keys: dict[str, bool] | None = None) -> dict[str, Any]:
    """Add the schema of a dataclass or named tuple to the definitions, and return it.

    Args:
        record: the class.
        definitions: schemas by name of the class, to which those of its fields are added too.
        keys: {field: whether every output has it}, for a class of which the output has only some fields.
    """
    documented = {}
    _, _, section = (record.__doc__ or "").partition("Attributes:\n")
    for _, name, text in _ATTRIBUTE.findall(section):
        documented[name] = " ".join(text.split())
    hints = typing.get_type_hints(record, include_extras=False)
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
    else:
        names = list(record._fields)  # pyright: ignore[reportAttributeAccessIssue]
    keys = dict.fromkeys(names, True) if keys is None else keys
    properties = {}
    for name in names:
        if name in keys:
            properties[name] = _describe_type(hints[name], definitions)
            if name in documented:
                properties[name]["description"] = documented[name]
    summary = (record.__doc__ or "").partition("\n")[0]
    schema = {
        "type": "object",
        "description": summary,
        "properties": properties,
        "required": [name for name in properties if keys[name]],
        "additionalProperties": False,
    }
    definitions[record.__name__] = schema
    return schema


def _describe_type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type annotation."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is Any:
        return {}
    if origin in (types.UnionType, typing.Union):
        schemas = [{"type": "null"} if one is type(None) else _describe_type(one, definitions) for one in arguments]
        return {"anyOf": schemas}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], definitions)}
    if origin in (list, tuple):
        return {"type": "array", "items": _describe_type(arguments[0], definitions)}
    if hint.__name__ == "Setting":
        # A named tuple inside of a record becomes a list.
        return {"type": "array", "prefixItems": [{"type": "string"}, {"type": "string"}], "items": False}
    if hint.__name__ not in definitions:
        _describe_record(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def main() -> int:
    """Write or check the schema; returns 1 if it is outdated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    args = parser.parse_args()
    text = json.dumps(build_schema(), indent=1) + "\n"
    if args.write:
        plan_report.SCHEMA_FILE.write_text(text, "utf-8")
    elif plan_report.SCHEMA_FILE.read_text("utf-8") != text:
        print(f"{plan_report.SCHEMA_FILE} is outdated; run python -m tools.plan_schema --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
