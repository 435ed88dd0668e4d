"""From YAML and dotted overrides to an AppConfig, with errors that name the key and the nearest valid one.

Precedence, weakest first: the schema's defaults, the preset of `algorithm=...`, the file of `--config`, the overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError

T = TypeVar("T")
PRESET_KEY = "algorithm"


class PlainNumbers(yaml.SafeLoader):
    """YAML in which 1e-5 is a number, and 0.5_2 or 1_2, two bounds as verl writes them, is not."""


NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
PlainNumbers.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in NUMBER_TAGS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainNumbers.add_implicit_resolver(NUMBER_TAGS[0], re.compile(r"[-+]?\d+$"), list("-+0123456789"))
PlainNumbers.add_implicit_resolver(
    NUMBER_TAGS[1],
    re.compile(r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the schema."""

    key: str
    type: str
    default: object
    help: str


@functools.cache
def options() -> tuple[Option, ...]:
    """Every leaf key of the schema, in order."""
    return tuple(_leaves(AppConfig, ""))


def _leaves(kind: type[Any], prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        key, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaves(cast(type[Any], hint), key + ".")
        else:
            yield Option(key, hint.__name__, item.default, item.metadata.get("help", ""))


def presets() -> list[str]:
    """Names that `algorithm=` takes."""
    folder = resources.files("rl_app_ppo") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(overrides: Sequence[str] = (), config_file: Path | None = None) -> AppConfig:
    """The configuration of a run.

    Args:
        overrides: `key=value` strings with dotted keys; `algorithm=<preset>` chooses the preset.
        config_file: YAML with the same nesting as `--cfg` prints.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, impossible combination, unreadable file.
    """
    given = [_split(text) for text in overrides]
    file_values = _flatten(_read_yaml(config_file)) if config_file is not None else {}
    preset = _preset_name(given, file_values)
    layers = (_flatten(_read_preset(preset)), file_values, dict(given))
    values = [(key, value) for layer in layers for key, value in layer.items() if key != PRESET_KEY]
    known = [option.key for option in options()]
    for key, _ in values:
        _check_known(key, known)
    node = _editable(OmegaConf.structured(AppConfig))
    for key, value in values:
        _set(node, key, value)
    return _build(AppConfig, cast(dict[str, Any], OmegaConf.to_container(node)))


def to_yaml(config: AppConfig) -> str:
    """The resolved configuration as YAML that `--config` accepts."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def from_yaml(text: str) -> AppConfig:
    """Read back what `to_yaml` wrote."""
    return _build(AppConfig, _parse(text))


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=PlainNumbers)


def _split(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(
            f"Not an override: {text!r}; write key=value, for instance actor.optim.lr=1e-5, or see --help."
        )
    if not value:
        return key, ""  # YAML would read nothing as null
    try:
        return key, _parse(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of {key} can't be read as YAML: {value!r}. Quote it if it holds special signs."
        ) from error


def _preset_name(given: Sequence[tuple[str, Any]], file_values: dict[str, Any]) -> str:
    names = [value for key, value in given if key == PRESET_KEY]
    named: object = names[-1] if names else file_values.get("algorithm.name", "grpo")
    if named not in presets():
        raise ConfigError(
            f"algorithm must be one of {', '.join(presets())}; got {named!r}.{_nearest(str(named), presets())}"
        )
    return str(named)


def _read_preset(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], _parse((resources.files("rl_app_ppo") / "presets" / f"{name}.yaml").read_text()))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values: object = _parse(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: can't be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected a mapping of groups to settings; got {type(values).__name__}.")
    return cast(dict[str, Any], values)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            _flatten(cast(dict[str, Any], value), f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


def _editable(node: DictConfig) -> DictConfig:
    """Frozen dataclasses become read-only nodes; this copy is where overrides are merged and type-checked."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node[key]
        if isinstance(child, DictConfig):
            _editable(child)
    return node


def _check_known(key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    inside = [name for name in known if name.startswith(key + ".")]
    if inside:
        raise ConfigError(f"{key} is a group of settings, not one setting; set one of its keys, such as {inside[0]}.")
    raise ConfigError(f"Unknown key {key!r}.{_nearest(key, known)} See --help for all keys.")


def _set(node: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(node, key, value)
    except OmegaConfBaseException as error:
        kind = next(option.type for option in options() if option.key == key)
        raise ConfigError(f"{key} must be of type {kind}; got {value!r} ({type(value).__name__}).") from error


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:  # the right last part in the wrong group
        last = key.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    return f" Did you mean {close[0]!r}?" if close else ""


def _build(kind: type[T], values: dict[str, Any]) -> T:
    hints = typing.get_type_hints(kind)
    arguments = {
        name: _build(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    return kind(**arguments)
