"""From YAML and dotted overrides to an AppConfig, with errors that name the key and the nearest valid one.

Precedence, weakest first: the schema's defaults, those of the engine of `model_engine=...`, those of `algorithm=...`, those of `preset=...`,
the file of `--config`, the overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_app_ppo.engines import check_engine
from rl_app_ppo.layers import ALGORITHM, NO_PRESET, PRESET, Source, choose, layer_text, presets
from rl_app_ppo.plain_yaml import flatten, parse_yaml, read_yaml
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.spellings import one_spelling
from rl_app_ppo.unused import refuse_unused
from rl_app_ppo.verl.table import describe
from rl_protocol import ConfigError
from rl_trainer.engines import ENGINES, get_engine

T = TypeVar("T")
_NAMES = (ALGORITHM, "algorithm.name", PRESET)
"""Keys that name a layer instead of setting a value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the schema."""

    key: str
    type: str
    default: object
    help: str


@functools.cache
def options(engine: str = "") -> tuple[Option, ...]:
    """Every leaf key of the schema, in order; for an engine without the groups that others alone read."""
    hidden = tuple(f"{group}." for group in _hidden_groups(engine))
    return tuple(option for option in _leaves(AppConfig, "") if not option.key.startswith(hidden))


def _hidden_groups(engine: str) -> tuple[str, ...]:
    """Groups of settings that `engine` does not read and that are not shown with it; none without one."""
    return tuple(other.group for other in ENGINES.values() if engine and other.group and other.name != engine)


def _leaves(kind: type[Any], prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        key, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaves(cast(type[Any], hint), key + ".")
        else:
            yield Option(key, hint.__name__, item.default, item.metadata.get("help", ""))


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key, and what set it."""

    value: object
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for every key where its value comes from."""

    config: AppConfig
    settings: dict[str, Setting]
    changed: dict[str, object]
    """What file and overrides set to something else than it would be without them."""


def load_config(overrides: Sequence[str] = (), config_file: Path | None = None) -> AppConfig:
    """The configuration of a run; see `resolve`.

    Raises:
        ConfigError: as `resolve`, and for a value that nothing would read, or that the engine can't train with.
    """
    resolved = resolve(overrides, config_file)
    refuse_unused(resolved.config, resolved.changed)
    check_engine(resolved.config)
    return resolved.config


def resolve(overrides: Sequence[str] = (), config_file: Path | None = None) -> Resolved:
    """Lay defaults, algorithm, preset, file and overrides over each other.

    Args:
        overrides: `key=value` strings with dotted keys; `algorithm=` and `preset=` name layers (see `layers`).
        config_file: YAML with the same nesting as `--cfg` prints.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, impossible combination, two spellings that disagree, unreadable file.
    """
    given = [_split(text) for text in overrides]
    file_values = flatten(read_yaml(config_file)) if config_file is not None else {}
    spelled = one_spelling([(f"--config {config_file}", file_values), ("command line", dict(given))])
    spelled = [(origin, _epochs_alone(values)) for origin, values in spelled]
    known = [option.key for option in options()]
    for _, values in spelled:
        for key in values:
            if key not in _NAMES:
                _check_known(key, known)
    built_in = _built_in_layers(spelled)
    settings = {option.key: Setting(option.default, "default") for option in options()}
    node = _editable(OmegaConf.structured(AppConfig))
    _lay(node, settings, built_in)
    base = {key: _get(node, key) for key in settings}
    _lay(node, settings, [(origin, {k: v for k, v in values.items() if k not in _NAMES}) for origin, values in spelled])
    settings = {key: Setting(_get(node, key), setting.origin) for key, setting in settings.items()}
    config = _build(AppConfig, cast(dict[str, Any], OmegaConf.to_container(node, resolve=True)))
    changed = {key: setting.value for key, setting in settings.items() if setting.value != base[key]}
    return Resolved(config, settings, changed)


def _built_in_layers(given: Sequence[Source]) -> list[Source]:
    """The layers below what is given: of engine, algorithm and preset, and at last the names of these."""
    of_presets = {name: _layer("presets", name) for name in presets() if name != NO_PRESET}
    choice = choose(given, {name: str(values["algorithm.name"]) for name, values in of_presets.items()})
    named = [
        (f"algorithm={choice.algorithm.name}", _layer("algorithms", choice.algorithm.name)),
        (f"preset={choice.preset.name}", of_presets.get(choice.preset.name, {})),
    ]
    chosen = {key: value for _, values in [*named, *given] for key, value in values.items()}
    engine = get_engine(str(chosen.get("model_engine", AppConfig().model_engine)))
    return [
        (f"default of model_engine={engine.name}", engine.defaults),
        *named,
        (choice.algorithm.origin, {"algorithm.name": choice.algorithm.name}),
        (choice.preset.origin, {PRESET: choice.preset.name}),
    ]


def _layer(kind: str, name: str) -> dict[str, Any]:
    return flatten(parse_yaml(layer_text(kind, name)))


def _lay(node: DictConfig, settings: dict[str, Setting], layers: Sequence[Source]) -> None:
    """Set the values of the layers, weakest first, and write down what set each."""
    for origin, values in layers:
        for key, value in values.items():
            _set(node, key, value)
            settings[key] = Setting(value, origin)


def to_yaml(config: AppConfig) -> str:
    """The resolved configuration as YAML that `--config` accepts, without the groups of engines that are not chosen."""
    values = dataclasses.asdict(config)
    for group in _hidden_groups(config.model_engine):
        del values[group]
    return yaml.safe_dump(values, sort_keys=False)


def flat_settings(text: str) -> dict[str, Any]:
    """What `to_yaml` wrote, now or in another version, by dotted key."""
    return flatten(parse_yaml(text))


def from_yaml(text: str) -> AppConfig:
    """Read back what `to_yaml` wrote."""
    return _build(AppConfig, parse_yaml(text))


def _split(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(
            f"Not an override: {text!r}; write key=value, for instance actor.optim.lr=1e-5, or see --help."
        )
    if not value:
        return key, ""  # YAML would read nothing as null
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of {key} can't be read as YAML: {value!r}. Quote it if it holds special signs."
        ) from error


def _epochs_alone(values: dict[str, Any]) -> dict[str, Any]:
    """A layer with epochs and without steps sets no limit of steps, whatever a weaker layer has."""
    epochs, steps = values.get("trainer.total_epochs", 0), "trainer.total_training_steps"
    return {**values, steps: -1} if isinstance(epochs, int) and epochs > 0 and steps not in values else values


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
    raise unknown_key(key, known)


def _set(node: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(node, key, value)
    except OmegaConfBaseException as error:
        kind = next(option.type for option in options() if option.key == key)
        raise ConfigError(f"{key} must be of type {kind}; got {value!r} ({type(value).__name__}).") from error


def _get(node: DictConfig, key: str) -> Any:
    """The value of a setting; one may refer to another, as in `data.seed=${trainer.seed}`."""
    try:
        return OmegaConf.select(node, key)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key} refers to what can't be read: {reason}. Write ${{another.key}}, whose value must fit {key}."
        ) from error


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error that says what a key of verl is here, or names the most similar key."""
    of_verl = describe(key)
    hint = f" {of_verl}" if of_verl else nearest_key(key, known)
    return ConfigError(f"Unknown key {key!r}.{hint} See --help for all keys.")


def nearest_key(key: str, known: Sequence[str]) -> str:
    """The sentence that names the most similar key; empty where none is similar."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    close.sort(key=lambda name: (-difflib.SequenceMatcher(a=name, b=key).ratio(), _letters_apart(name, key)))
    if not close:  # the right last part in the wrong group
        last = key.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    return f" Did you mean {close[0]!r}?" if close else ""


def _build(kind: type[T], values: dict[str, Any], group: str = "") -> T:
    """Make the settings of a group; an error names a key of it from the group's own name on, and is given the groups around it."""
    hints = typing.get_type_hints(kind)
    arguments = {
        name: _build(hints[name], value, f"{group}{name}.") if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    try:
        return kind(**arguments)
    except ConfigError as error:
        around, _, own = group.removesuffix(".").rpartition(".")
        if around and str(error).startswith(f"{own}."):
            raise ConfigError(f"{around}.{error}") from error
        raise


def _letters_apart(a: str, b: str) -> int:
    """Letters that one has and the other does not: 0 where they are only in another order."""
    one, other = Counter(a), Counter(b)
    return ((one - other) + (other - one)).total()
