"""`--schema`: the options as a JSON schema (draft 2020-12), for editors of `--config` files."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from rl_app_ppo.cli.option_names import help_of, names_of
from rl_app_ppo.config.presets import ALGORITHM, algorithms
from rl_app_ppo.config.schema import AppConfig
from rl_protocol.support.option_tree import Option, list_groups, list_options

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}
_FILE = r"\.py:[A-Za-z_]\w*$"
"""How `path.py:name` ends."""
_REFERENCE: Schema = {"$ref": "#/$defs/reference"}


def schema_text() -> str:
    """The schema as JSON text."""
    return json.dumps(json_schema(), indent=2) + "\n"


def json_schema() -> Schema:
    """The schema of a `--config` file.

    Names that installed packages offer are those of this machine.
    """
    help_texts = list_groups(AppConfig)
    root = _group(help_texts[""])
    for path, help in help_texts.items():
        if path:
            _place(root, path)[path.rpartition(".")[2]] = _group(help)
    for option in list_options(AppConfig):
        _place(root, option.key)[option.key.rpartition(".")[2]] = _option(option)
    properties = root["properties"]
    # `algorithm: ppo` is short for `algorithm: {name: ppo}`
    properties[ALGORITHM] = {"anyOf": [{"enum": list(algorithms())}, properties[ALGORITHM]]}
    reference = {
        "description": "the value of another option, such as ${trainer.seed}",
        "type": "string",
        "pattern": r"^\$\{.+\}$",
    }
    return {"$schema": DRAFT, "title": "rl-app-ppo", **root, "$defs": {"reference": reference}}


def _group(help: str) -> Schema:
    return {"description": help, "type": "object", "additionalProperties": False, "properties": {}}


def _place(root: Schema, key: str) -> Schema:
    """The properties of the group of a key."""
    node = root
    for part in key.split(".")[:-1]:
        node = node["properties"][part]
    return node["properties"]


def _option(option: Option) -> Schema:
    described: Schema = {"description": help_of(option), "default": option.default}
    names = names_of(option)
    if names.known and not names.closed:
        described["examples"] = [*names.known]
    if option.is_list:
        described["default"] = list(cast(tuple[object, ...], option.default))
        listed: Schema = {"type": "array", "items": _value(option.type.removeprefix("list of "), option)}
        commas = {"description": "the values, separated by commas", "type": "string"}
        return {**described, "anyOf": [listed, commas]}
    value = _value(option.type, option)
    # text may hold references anyway
    return {**described, **value} if value == {"type": "string"} else {**described, "anyOf": [value, _REFERENCE]}


def _value(type_name: str, option: Option) -> Schema:
    """Type, names and bounds of a value."""
    spec, names = option.spec, names_of(option)
    bounds = {
        "exclusiveMinimum": spec.gt,
        "minimum": spec.ge,
        "exclusiveMaximum": spec.lt,
        "maximum": spec.le,
    }
    value: Schema = {"type": _TYPES[type_name]}
    if names.closed and names.files:
        value["anyOf"] = [{"enum": [*names.known]}, {"pattern": _FILE}]
    elif names.closed:
        value["enum"] = [*names.known]
    # JSON has no infinity, so a finite number needs no bound there
    return value | {word: bound for word, bound in bounds.items() if bound is not None and bound < math.inf}
