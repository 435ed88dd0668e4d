"""Read a verl configuration (YAML, overrides or a shell script), and verl's defaults."""

from __future__ import annotations

import ast
import functools
import json
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_app_ppo.config.plain_yaml import flatten, parse_yaml, read_yaml
from rl_app_ppo.config.verl_keys.key_entries import Value
from rl_protocol import ConfigError

CONFIG_NAME = "--config-name"
"""Key of the configuration that a file is based on, on the command line or in `defaults`."""
_OVERRIDE = re.compile(r"(?:\+{0,2}|~)[A-Za-z_][\w-]*(?:[.@/][\w@/-]+)+=|~[A-Za-z_][\w.-]+$|model_engine=")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PREFIXES = ("export", "local", "readonly", "declare", "-x")
_LEFT = re.compile(r"\$(?:[A-Za-z_0-9]|\{[A-Za-z_0-9]+(?:\}|:)|\()")
_HERE = re.compile(r"\$\(\s*pwd\s*\)|`pwd`")
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_verl(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Value]:
    """Read a file: dotted key -> value.

    Keys may begin with + or ~, and values may be OmegaConf interpolations.

    Args:
        path: YAML, overrides separated by white space, or a shell script with them.
        environment: environment of the shell that would run the script.

    Raises:
        ConfigError: the file can't be read, or an override uses a shell variable that is not set.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The verl file {path} can't be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(read_yaml(path, "The verl file"))
    if not text.strip() or _OVERRIDE.search(text):
        return _values(overrides(text, environment))
    if (nested := _mapping(text)) is not None:
        return _of_yaml(nested)
    if CONFIG_NAME in text:
        return _values(overrides(text, environment))
    raise ConfigError(
        f"The verl file {path} has no settings of verl, such as actor_rollout_ref.rollout.n=8. "
        "Give the script or the YAML file that has them."
    )


def _mapping(text: str) -> dict[str, Any] | None:
    """The mapping of a YAML file whose name does not say that it is one."""
    try:
        values: object = parse_yaml(text)
    except yaml.YAMLError:
        return None
    return cast("dict[str, Any]", values) if isinstance(values, dict) else None


def _of_yaml(nested: dict[str, Any]) -> dict[str, Value]:
    """The values of a YAML file; of Hydra's own entries only the base configuration is read."""
    bases: object = nested.pop("defaults", None) or []
    nested.pop("hydra", None)
    if not isinstance(bases, list):
        raise ConfigError(
            f"The verl file's defaults must be a list of configurations, as in verl's files; got {bases!r}."
        )
    given: dict[str, Value] = {}
    for base in cast("list[object]", bases):
        named = cast("dict[object, object]", base) if isinstance(base, dict) else {CONFIG_NAME: base}
        for group, name in ((str(group), name) for group, name in named.items()):
            if "@" in group:  # verl's own parts, of which those of an engine matter
                if "megatron" in str(name):
                    given["model_engine"] = "megatron"
            elif name != "_self_" and not group.startswith("override "):
                given[group] = name
    return given | flatten(nested)


# -- shell


def overrides(text: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(key, value as text) of every override in a list or shell script, with variables expanded.

    Raises:
        ConfigError: see `read_verl`.
    """
    variables = dict(environment)
    for line in text.replace("\\\n", " ").splitlines():
        opened = re.sub(r"^\s*\w+\+?=\(", " ", line)
        try:
            words = shlex.split(_expanded(opened, variables), comments=True)
        except ValueError:  # quotes that end in another line
            words = _expanded(opened, variables).split()
        yield from _of_words(words, variables)


def _of_words(words: Sequence[str], variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    before = True
    for place, word in enumerate(words):
        if word.startswith(CONFIG_NAME):
            _, sign, name = word.partition("=")
            yield CONFIG_NAME, name if sign else "".join(words[place + 1 : place + 2])
        elif _OVERRIDE.match(word):
            key, _, value = word.partition("=")
            _check_expanded(key, value)
            yield key, value.removesuffix(")") if value.count("(") < value.count(")") else value
        elif before and _ASSIGNMENT.match(word):
            name, _, variables[name] = word.partition("=")
        before = before and (word in _PREFIXES or _ASSIGNMENT.match(word) is not None)


def _check_expanded(key: str, value: str) -> None:
    left = _LEFT.search(value)
    if left is not None:
        command = left[0] == "$("
        raise ConfigError(
            f"The verl setting {key}={value} uses what only the shell knows, at {value[left.start() :]!r}. "
            + (
                "Write the value into the file."
                if command
                else "Set the variable in the environment, or write the value."
            )
        )


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand `$NAME`, `${NAME}`, `${NAME:-default}`, `$((sums))` and `$(pwd)`, and leave the rest.

    `${a.b}` is an OmegaConf interpolation.
    """
    out, place = "", 0
    while place < len(text):
        rest = text[place:]
        if (here := _HERE.match(rest)) is not None:
            out += variables.get("PWD") or str(Path.cwd())
            place += here.end()
        elif rest.startswith("$((") and (end := _closing(rest, 1, "(", ")")):
            out += _sum(rest[3 : end - 1], variables) or rest[: end + 1]
            place += end + 1
        elif rest.startswith("${") and (end := _closing(rest, 1, "{", "}")):
            out += _variable(rest[2:end], variables) or rest[: end + 1]
            place += end + 1
        elif (named := re.match(r"\$([A-Za-z_]\w*)", rest)) is not None:
            out += variables.get(named[1], named[0])
            place += named.end()
        else:
            out, place = out + rest[0], place + 1
    return out


def _closing(text: str, start: int, opening: str, closing: str) -> int:
    """Index of the bracket that closes the one at `start`; 0: there is none."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if not depth:
            return place
    return 0


def _variable(inside: str, variables: Mapping[str, str]) -> str | None:
    name, sign, default = re.match(r"(\w*)(:-|-)?(.*)", inside, re.S).groups()  # pyright: ignore[reportOptionalMemberAccess]: it matches all
    if not name or (default and not sign):
        return None
    found = variables.get(name, "")
    return found or (_expanded(default.strip("\"'"), variables) if sign else None)


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: variables.get(m[1], m[0]), text)
    try:
        return str(_computed(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return _SUMS[type(op)](_computed(left), _computed(right))
        case _:
            raise ValueError("no sum of numbers")


def _values(pairs: Iterator[tuple[str, str]]) -> dict[str, Value]:
    """Parse the values; the last value of a key wins, as on verl's command line."""
    found: dict[str, Value] = {}
    for key, text in pairs:
        try:
            value = parse_yaml(text) if text else ""
        except yaml.YAMLError:
            value = text
        if isinstance(value, dict) and value:
            found |= flatten(cast("dict[str, Any]", value), key + ".")
        else:
            found[key] = value
    return found


# -- defaults


@functools.cache
def defaults_file() -> dict[str, Any]:
    """defaults.json: version; key -> default for all engines, and per engine."""
    return json.loads((resources.files("rl_app_ppo.verl_import") / "defaults.json").read_text(encoding="utf-8"))


def defaults(engine: str) -> dict[str, Value]:
    """verl's defaults with one of its engines, with interpolations."""
    file = defaults_file()
    return file["common"] | file["engines"].get(engine, file["engines"]["fsdp"])


@functools.cache
def resolved_defaults(engine: str) -> Mapping[str, Value]:
    """verl's defaults with one of its engines, with all interpolations resolved."""
    return resolved(defaults(engine))


def resolved(values: Mapping[str, Value]) -> dict[str, Value]:
    """Resolve all interpolations (`${data.seed}`) in the values of dotted keys.

    Raises:
        ConfigError: an interpolation refers to a key that does not exist.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        place = nested
        for group in groups:
            inner = place.get(group)
            if not isinstance(inner, dict):  # a group in place of a single value
                inner = place[group] = {}
            place = cast("dict[str, Any]", inner)
        place[name] = {} if value == {} else value  # a new dict: keys may be added to it
    try:
        done = OmegaConf.to_container(OmegaConf.create(nested), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()
        raise ConfigError(
            f"A value of the verl configuration refers to a key that does not exist: {reason[0]} ({error.full_key}). Give its value."
        ) from error
    return flatten(cast("dict[str, Any]", done))
