"""Resolve YAML and dotted overrides to an AppConfig.

Precedence, weakest first: defaults of the schema, of `model_engine=...`, of the model's family, of
the adapters of `critic.adapter_path=...` and `lora.adapter_path=...`, of `placement=...`, of
`algorithm=...`, of each `preset=...` in order, then the file of `--config`, then the overrides.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import os
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_app_ppo.config.full_keys import adapter_errors, full_keys_in_errors
from rl_app_ppo.config.model_path import is_verl_adapter, model_type, verl_adapter_layer
from rl_app_ppo.config.other_trainers import WORDS, describe_other
from rl_app_ppo.config.placement import (
    AUTO,
    SHARE_GPUS,
    TENSOR_PARALLEL,
    check_placement,
    host_defaults,
    placement_defaults,
    resolved_placement,
    shared_gpu_defaults,
)
from rl_app_ppo.config.plain_yaml import flatten, parse_yaml, read_yaml, yaml_text
from rl_app_ppo.config.presets import ALGORITHM, NO_PRESET, PRESET, Source, choose, is_file, layer_values, named_presets
from rl_app_ppo.config.rollout_engines import ROLLOUT_ENGINES
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import TRAINING_BACKENDS, TrainingBackendSpec, get_training_backend
from rl_app_ppo.config.unused_options import check_engine, refuse_unused
from rl_app_ppo.config.verl_keys.aliases import OLD_LOG_PROB, one_spelling
from rl_app_ppo.config.verl_keys.table import describe
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import Option, list_options, unmet_need
from rl_protocol.support.options import build, items
from rl_trainer.config.adapter_folder import adapter_options
from rl_trainer.data.model_families import why_padded

_NAMES = (ALGORITHM, "algorithm.name", PRESET)
"""Keys that select a layer instead of setting a value."""
_PATHS = (
    "data.train_files",
    "data.val_files",
    "model.path",
    "model.cache_dir",
    "lora.adapter_path",
    "reference.path",
    "critic.adapter_path",
    "transfer_queue.journal_dir",
    "checkpoint_engine.directory",
    "trainer.output_dir",
)
"""Keys whose values are names of files and folders."""
_NAME_BYTES = 255
"""Most bytes of the name of a file."""
_WORDS = "command line"
"""Origin of the overrides."""


@functools.cache
def options(engine: str = "") -> tuple[Option, ...]:
    """All leaf keys of the schema in order; with an engine, without the groups of other engines."""
    hidden = tuple(f"{group}." for group in _hidden_groups(engine))
    return tuple(option for option in list_options(AppConfig) if not option.key.startswith(hidden))


@functools.cache
def _texts() -> frozenset[str]:
    """Keys whose values are text."""
    return frozenset(option.key for option in options() if option.type == "str")


def _hidden_groups(engine: str) -> tuple[str, ...]:
    """Groups of settings that belong to other engines than `engine`; none without an engine."""
    return tuple(other for other in TRAINING_BACKENDS if engine and other != engine)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key, and its origin."""

    value: object
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, with the origin of every value."""

    config: AppConfig
    settings: dict[str, Setting]
    changed: dict[str, object]
    """Keys that file and overrides change -> their values."""
    layers: tuple[str, ...]
    """Origins of values, weakest first."""


@full_keys_in_errors()
def load_config(
    overrides: Sequence[str] = (),
    config_file: Path | None = None,
    given: Sequence[Source] = (),
    used: Collection[str] = (),
) -> AppConfig:
    """Resolve and check the configuration of a run; `used` has keys that the caller itself uses.

    The other arguments are those of `resolve`.

    Raises:
        ConfigError: see `resolve`; or a value has no effect, or the engine does not support it.
    """
    resolved = resolve(overrides, config_file, given)
    refuse_unused(resolved.config, {key: value for key, value in resolved.changed.items() if key not in used})
    check_engine(resolved.config)
    check_placement(resolved.config)
    return resolved.config


@full_keys_in_errors()
def resolve(overrides: Sequence[str] = (), config_file: Path | None = None, given: Sequence[Source] = ()) -> Resolved:
    """Merge defaults, algorithm, preset, file, overrides and values.

    Args:
        overrides: `key=value` strings with dotted keys; `algorithm=` and `preset=` select layers.
        config_file: YAML with the nesting of the output of `--cfg`.
        given: (origin, dotted key -> value) of each further layer, weakest first.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, impossible combination, two
            spellings with different values, or unreadable file.
    """
    words = {key: value for text in overrides for key, value in flatten(dict([parse_override(text)])).items()}
    file_values = flatten(read_yaml(config_file)) if config_file is not None else {}
    spelled = _checked([(f"--config {config_file}", file_values), (_WORDS, words), *given])
    below = _layers_below(spelled)
    settings = {option.key: Setting(option.default, "default") for option in options()}
    node = _new_node()
    _lay(node, settings, below)
    base = flatten(_contents(node))
    _lay(node, settings, [(origin, _values(layer)) for origin, layer in spelled])
    contents = _contents(node)
    flat = flatten(contents)
    settings = {key: Setting(flat[key], setting.origin) for key, setting in settings.items()}
    config = build(AppConfig, contents)
    changed = {key: setting.value for key, setting in settings.items() if setting.value != base[key]}
    layers = [origin for origin, layer in [*below, *spelled] if layer.keys() - set(_NAMES)]
    return Resolved(config, settings, changed, ("defaults", *layers))


def _values(layer: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer sets itself: no names of layers, and no `placement=auto`."""
    return {
        key: value
        for key, value in layer.items()
        if key not in _NAMES and not (key == "placement" and items(value) == [AUTO])
    }


def _checked(sources: Sequence[Source]) -> list[Source]:
    """The sources with our spellings, of keys that exist."""
    known = [option.key for option in options()]
    spelled = [(origin, _unset_steps(values)) for origin, values in one_spelling(sources)]
    for origin, values in spelled:
        for key in values:
            if key not in _NAMES:
                _check_known(key, known, origin)
        _check_lengths(values)
    return list(spelled)


def _check_lengths(values: Mapping[str, Any]) -> None:
    """Refuse what the file system can't look up."""
    for key in values.keys() & set(_PATHS):
        for path in items(values[key]):
            longest = max(len(os.fsencode(part)) for part in str(path).split("/"))
            if longest > _NAME_BYTES:
                raise ConfigError(
                    f"{key} must have names of at most {_NAME_BYTES} bytes between its slashes; got one of {longest} bytes in {path!r}."
                )


def _layers_below(given: Sequence[Source]) -> list[Source]:
    """The layers below file and overrides: engine, algorithm, presets, and their names."""
    read = {name: _preset(name) for name in named_presets(given)}
    choice = choose(
        given, {name: str(values["algorithm.name"]) for name, values in read.items() if "algorithm.name" in values}
    )
    read |= {name: _preset(name) for name in choice.presets if name not in read}
    named = [
        (f"algorithm={choice.algorithm.name}", layer_values("algorithms", choice.algorithm.name)),
        *((f"preset={name}", _values(read[name])) for name in choice.presets),
    ]
    chosen = {key: value for _, values in [*named, *given] for key, value in values.items()}
    engine = get_training_backend(str(chosen.get("model_engine", AppConfig().model_engine)))
    chosen |= _typed(chosen, (f"{engine.name}.", SHARE_GPUS, TENSOR_PARALLEL))
    ranks = _ranks(engine.name, chosen)
    placement, why = resolved_placement(chosen, ranks)
    beside = placement_defaults(placement, ranks)
    return [
        (f"default of model_engine={engine.name}", _of_models(engine.defaults)),
        *_padding(engine, chosen.get("model.path")),
        *_of_adapter("critic.adapter_path", chosen),
        *_of_adapter("lora.adapter_path", chosen),
        *_of_old_log_prob(chosen),
        *_of_generator(str(chosen.get("rollout.name", AppConfig().rollout.name))),
        (why, {"placement": placement, **beside}),
        ("default of trainer.nnodes above 1", host_defaults(chosen, placement)),
        (f"default of {SHARE_GPUS}=true", shared_gpu_defaults(chosen, ranks)),
        *named,
        (choice.algorithm.origin, {"algorithm.name": choice.algorithm.name}),
        (choice.preset_origin, {PRESET: choice.presets}),
    ]


def _of_models(values: Mapping[str, object]) -> dict[str, object]:
    """Options of actor and critic by key."""
    return {f"{group}.{name}": value for group in ("actor", "critic") for name, value in values.items()}


def _ranks(engine: str, chosen: Mapping[str, object]) -> int:
    """Processes that share the actor with these typed values of the options of its engine."""
    group = f"{engine}."
    values = {key.removeprefix(group): value for key, value in chosen.items() if key.startswith(group)}
    return build(type(getattr(AppConfig(), engine)), values, group).ranks


def _typed(chosen: Mapping[str, object], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """The values of the keys that begin with one of the prefixes, with the types of the schema."""
    given = [key for key in chosen if key.startswith(prefixes)]
    if not given:
        return {}
    node = _new_node()
    for key in given:
        _set(node, key, chosen[key])
    return {key: _get(node, key) for key in given}


def _padding(engine: TrainingBackendSpec, model: object) -> list[Source]:
    """The layer that pads the sequences of a model that can't be joined, as the engine would do."""
    joins = bool(engine.defaults.get("use_remove_padding"))
    found = model_type(model) if joins and model and isinstance(model, str) else None
    reason = "" if found is None else why_padded(found)
    return [(f"model.path={model} {reason}", _of_models({"use_remove_padding": False}))] if reason else []


def _of_adapter(key: str, chosen: Mapping[str, object]) -> list[Source]:
    """The layer with the options that the adapter to start from was made with."""
    path, critic = chosen.get(key), key == "critic.adapter_path"
    if not path or not isinstance(path, str):
        return []
    if not critic and is_verl_adapter(path):
        read = verl_adapter_layer(path)
        if "lora.alpha" not in chosen:
            raise ConfigError(
                f"lora.alpha must be set with {key}={path!r}: it is in verl's old format, whose files store no alpha. Set that of its training."
            )
    else:
        with adapter_errors(key):
            read = adapter_options(path, value_head=critic)
    options = {f"lora.{name}": value for name, value in read.items()}
    return [(f"{key}={path}", options | ({"critic.use_lora": True} if critic else {}))]


def _of_generator(name: str) -> list[Source]:
    """The layer of a rollout engine with defaults of its own."""
    values = ROLLOUT_ENGINES.get(name).defaults()
    return [(f"default of rollout.name={name} as installed", dict(values))] if values else []


def _of_old_log_prob(chosen: Mapping[str, object]) -> list[Source]:
    """The layers of a deterministic run, whose old log-probs come from the actor alone, and of
    interpolated ones, whose ratio needs weights against the rollout engine's.
    """
    if chosen.get("trainer.deterministic") is True:
        return [("trainer.deterministic=true", {OLD_LOG_PROB: "recompute"})]
    if chosen.get(OLD_LOG_PROB) == "interpolate":
        return [(f"{OLD_LOG_PROB}=interpolate", {"algorithm.rollout_correction.rollout_is": "token"})]
    return []


def _preset(name: str) -> Mapping[str, Any]:
    """The values of a built-in preset or of a YAML file."""
    if not is_file(name):
        return {} if name == NO_PRESET else layer_values("presets", name)
    values = flatten(read_yaml(Path(name).expanduser(), PRESET))
    if PRESET in values:
        raise ConfigError(
            f"{PRESET}={name}: a preset can't name presets; give preset=[{values[PRESET]},{name}] instead."
        )
    return _checked([(f"{PRESET}={name}", values)])[0][1]


def algorithm_label(config: AppConfig) -> str:
    """The algorithm's name, or the advantage estimator if it is not that of the algorithm."""
    algorithm = config.algorithm
    usual = layer_values("algorithms", algorithm.name).get("algorithm.adv_estimator", algorithm.adv_estimator)
    return algorithm.name if algorithm.adv_estimator == usual else algorithm.adv_estimator


def _lay(node: DictConfig, settings: dict[str, Setting], layers: Sequence[Source]) -> None:
    """Set the values of the layers, weakest first, and record their origins."""
    for origin, values in layers:
        for key, value in values.items():
            _set(node, key, value)
            settings[key] = Setting(value, origin)


def to_yaml(config: AppConfig) -> str:
    """The resolved configuration as YAML for `--config`, without the groups of other engines."""
    return yaml_text(_shown_groups(config))


def _shown_groups(config: AppConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    for group in _hidden_groups(config.model_engine):
        del values[group]
    return values


def shown_yaml(config: AppConfig) -> str:
    """The configuration for people (`--cfg`): without options at their defaults that nothing reads.

    Read back, it is the same configuration.
    """
    values = flatten(_shown_groups(config))
    shown: dict[str, Any] = {}
    for option in options(config.model_engine):
        value = values[option.key]
        if value != option.default or not unmet_need(config, option):
            *groups, name = option.key.split(".")
            functools.reduce(lambda inside, group: inside.setdefault(group, {}), groups, shown)[name] = value
    return yaml_text(shown)


def flat_settings(text: str) -> dict[str, Any]:
    """Dotted key -> value of YAML that any version of `to_yaml` wrote."""
    return flatten(parse_yaml(text))


@full_keys_in_errors()
def from_yaml(text: str) -> AppConfig:
    """Read the output of `to_yaml`."""
    return build(AppConfig, parse_yaml(text))


@full_keys_in_errors()
def read_config(path: Path) -> AppConfig:
    """Read the configuration that a run has written to a file.

    Raises:
        ConfigError: it can't be read, or has keys of another version.
    """
    values = read_yaml(path, "the configuration")
    known = [option.key for option in options()]
    for key in flatten(values):
        _check_known(key, known, str(path))
    return build(AppConfig, values)


def parse_override(text: str) -> tuple[str, Any]:
    """The dotted key and the value of `key=value`; the value is YAML, but 1e-5 as a text stays so.

    Raises:
        ConfigError: it has another form.
    """
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(
            f"Not an override: {text!r}; write key=value, for instance actor.optim.lr=1e-5, or see --help."
        )
    if not value:
        return key, ""  # YAML would read it as null
    try:
        parsed = parse_yaml(value)
        return key, value if isinstance(parsed, float) and key in _texts() else parsed
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of {key} can't be read as YAML: {value!r}. Quote a text with special characters: "
            + shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
        ) from error


def _unset_steps(values: dict[str, Any]) -> dict[str, Any]:
    """A layer with epochs and without steps removes the step limit of weaker layers."""
    epochs, steps = values.get("trainer.total_epochs", 0), "trainer.total_training_steps"
    return {**values, steps: -1} if isinstance(epochs, int) and epochs > 0 and steps not in values else values


def _new_node() -> DictConfig:
    """A writable node with the defaults of the schema."""
    return copy.deepcopy(_schema())


@functools.cache
def _schema() -> DictConfig:
    """What `_new_node` copies; to make it takes six times as long."""
    return _editable(OmegaConf.structured(AppConfig))


def _editable(node: DictConfig) -> DictConfig:
    """Make a node writable: OmegaConf makes those of frozen dataclasses read-only."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node[key]
        if isinstance(child, DictConfig):
            _editable(child)
    return node


def _check_known(key: str, known: Sequence[str], origin: str) -> None:
    if key in known:
        return
    place = "" if origin == _WORDS else f" in {origin}"
    inside = [name for name in known if name.startswith(key + ".")]
    if inside:
        raise ConfigError(
            f"{key}{place} is a group of settings, not one setting; set one of its keys, such as {WORDS.get(key, inside[0])}."
        )
    raise unknown_key(key, known, place)


def _set(node: DictConfig, key: str, value: Any) -> None:
    option = next(option for option in options() if option.key == key)
    refers = isinstance(value, str) and "${" in value
    try:
        OmegaConf.update(node, key, items(value) if option.is_list and not refers else value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key} must be of type {option.type}; got {value!r} ({type(value).__name__}).") from error


def _contents(node: DictConfig) -> dict[str, Any]:
    """The values of all settings, as `_get` returns them, in nested groups."""
    try:
        return cast(dict[str, Any], _with_tuples(OmegaConf.to_container(node, resolve=True)))
    except OmegaConfBaseException:
        for option in options():
            _get(node, option.key)  # raises for the one at fault
        raise


def _with_tuples(value: Any) -> Any:
    """The lists in nested groups as tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in cast(dict[str, Any], value).items()}
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def _get(node: DictConfig, key: str) -> Any:
    """The value of a setting, with interpolations such as `data.seed=${trainer.seed}` resolved."""
    try:
        value = OmegaConf.select(node, key)
        return tuple(value) if isinstance(value, ListConfig) else value
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key} refers to a value that can't be read: {reason}. Write ${{another.key}}, whose value must fit {key}."
        ) from error


def unknown_key(key: str, known: Sequence[str], place: str = "") -> ConfigError:
    """An error with the counterpart of another trainer's key, or else the most similar key."""
    of_verl = describe(key)
    of_others = of_verl or describe_other(key)
    word = f" Did you mean {WORDS[key]!r}?" if key in WORDS else ""
    hint = f" {of_others}" if of_others else word or nearest_key(key, known)
    if (of_verl or key.partition(".")[0] in ("hydra", "defaults")) and "--config" in place:
        hint += " `rl import-verl` converts a file of verl."
    return ConfigError(f"Unknown key {key!r}{place}.{hint} `rl explain` lists all keys.")


def nearest_key(key: str, known: Sequence[str]) -> str:
    """A hint at the most similar key; empty if none is similar."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    close.sort(key=lambda name: (-difflib.SequenceMatcher(a=name, b=key).ratio(), _letters_apart(name, key)))
    if not close:  # the right last part in the wrong group
        last = key.rpartition(".")[2]
        tails = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    return f" Did you mean {close[0]!r}?" if close else ""


def _letters_apart(a: str, b: str) -> int:
    """Number of letters that only one of the two has; 0 for anagrams."""
    one, other = Counter(a), Counter(b)
    return ((one - other) + (other - one)).total()
