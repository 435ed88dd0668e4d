"""Read YAML configurations, and flatten nested groups to dotted keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from rl_protocol import ConfigError

MERGE_TAG = "tag:yaml.org,2002:merge"


class PlainNumbers(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number, and verl's pairs of bounds 0.5_2 and 1_2, digits
    after a leading zero, dates, and the words on and off, as text. Options of type bool accept
    these words, and those of type int the digits. A key that a mapping has twice is an error.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                if key.value in found:
                    raise ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                found.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        del deep
        try:
            return super().construct_object(node, deep=True)  # which refuses a mapping that is in itself
        except ValueError as error:  # of a tag, as in `!!int x`
            raise ConstructorError(None, None, str(error), node.start_mark) from error


class QuotedTexts(yaml.SafeDumper):
    """YAML dumper that quotes a text which PlainNumbers, or YAML 1.1, reads as something else."""


NUMBERS = {
    "tag:yaml.org,2002:int": (re.compile(r"[-+]?(0|[1-9]\d*)$"), list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        re.compile(r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"),
        list("-+.0123456789"),
    ),
}
"""Tag -> what numbers of it look like, and the characters that they begin with."""
DATE_TAG = "tag:yaml.org,2002:timestamp"
PlainNumbers.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in (*NUMBERS, DATE_TAG)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if first not in ("o", "O")
}
for _tag, (_pattern, _first) in NUMBERS.items():
    PlainNumbers.add_implicit_resolver(_tag, _pattern, _first)
    QuotedTexts.add_implicit_resolver(_tag, _pattern, _first)


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Raises:
        yaml.YAMLError: it is not valid.
    """
    return yaml.load(text, Loader=PlainNumbers)


def yaml_text(values: object) -> str:
    """A YAML document, from which `parse_yaml` reads the same values."""
    return yaml.dump(values, Dumper=QuotedTexts, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, what: str = "--config") -> dict[str, Any]:
    """Read the mapping in a YAML file; `what` says in messages what it is.

    Raises:
        ConfigError: the file can't be read, or is no mapping.
    """
    try:
        values: object = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", line', "at line")  # it has several lines
        raise ConfigError(f"{what} {path}: can't be read as YAML: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path}: expected a mapping of groups to settings; got {type(values).__name__}.")
    return cast(dict[str, Any], values)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups -> dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            flatten(cast(dict[str, Any], value), f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat
