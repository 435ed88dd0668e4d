"""Convert a verl configuration to ours, and report what has no counterpart.

Keys that the file does not set keep verl's default, not ours, so that the file keeps its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.config.loading import load_config, nearest_key, resolve, to_yaml
from rl_app_ppo.config.presets import ALGORITHM, NO_PRESET, PRESET
from rl_app_ppo.config.unused_options import unused
from rl_app_ppo.config.verl_keys.conversions import ACTOR, ENGINES, ROLLOUT, replacing_engine
from rl_app_ppo.config.verl_keys.key_entries import Answer, Lost, Note, Value, Verl
from rl_app_ppo.config.verl_keys.table import find
from rl_app_ppo.verl_import.reading import CONFIG_NAME, defaults, defaults_file, read_verl, resolved, resolved_defaults
from rl_protocol import ConfigError
from rl_protocol.counted import counted


@dataclass(slots=True)
class Imported:
    """A converted verl configuration."""

    settings: dict[str, Value] = field(default_factory=dict[str, Value])
    """Our settings, dotted key -> value; verl's default if the file does not set it."""
    given: set[str] = field(default_factory=set[str])
    """Our keys that the file sets."""
    changed: set[str] = field(default_factory=set[str])
    """Our keys that the file sets to another value than verl's default."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """verl's key -> why its value, which affects training, has no counterpart."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """verl's key -> another remark on its value."""
    kept_defaults: int = 0
    """Number of keys without a counterpart that have verl's default."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The output of --from-verl."""

    text: str
    """YAML for --config, after the report as comments."""
    lost: tuple[str, ...]
    """verl's keys that affect training and have no counterpart."""


def from_verl(path: Path) -> Conversion:
    """Convert a verl configuration to YAML for --config, and check the result.

    Args:
        path: YAML, overrides as on verl's command line, or a shell script with them.

    Raises:
        ConfigError: the file can't be read, or the result is no valid configuration; then the
            message ends with the lines of what is lost.
    """
    imported = import_verl(read_verl(path))
    algorithm = "ppo" if imported.settings.get("algorithm.adv_estimator") == "gae" else "grpo"
    named = [f"{ALGORITHM}={algorithm}", f"{PRESET}={NO_PRESET}"]
    overrides = [*named, *(f"{key}={json.dumps(value)}" for key, value in imported.settings.items())]
    try:
        resolution = resolve(overrides)
        idle = unused(resolution.config, resolution.changed)
        config = load_config([override for override in overrides if override.partition("=")[0] not in idle])
    except ConfigError as error:
        lost = _comments("lost", imported.lost)
        raise ConfigError(f"the converted configuration is not valid: {error}\n{lost}".rstrip()) from error
    return Conversion(report(imported, idle) + to_yaml(config), tuple(imported.lost))


def import_verl(file: Mapping[str, Value]) -> Imported:
    """Convert verl's keys without checking the result.

    `rl_app_ppo.config.loading.resolve` checks it.

    Args:
        file: the values of a file, see `read_verl`.

    Raises:
        ConfigError: a value refers to a key that does not exist, or is of another type than verl's.
    """
    given = {key.lstrip("+~"): None if key.startswith("~") else value for key, value in file.items()}
    given = {key: value for key, value in given.items() if not key.endswith("_target_")}
    found = Imported(settings={"model_engine": "fsdp"})  # even if verl's engine is not supported
    base = str(given.pop(CONFIG_NAME, "ppo_trainer")).removesuffix(".yaml")
    engine = "megatron" if "megatron" in base else str(given.get("model_engine", "fsdp"))
    if base not in ("ppo_trainer", "ppo_megatron_trainer"):
        found.lost[f"{CONFIG_NAME}={base}"] = (
            "the configuration it names is not read; convert what verl prints with --cfg job --resolve"
        )
    engine = str(given.setdefault(f"{ACTOR}.strategy", ENGINES.get(engine, engine)))
    before = {**resolved_defaults(engine), f"{ACTOR}.strategy": "fsdp"}
    verl = Verl(resolved({**defaults(engine), **given}), frozenset(given))
    for key in verl.given & before.keys():
        value = verl.values.get(key, {})  # an empty group has no value
        if _is_number(before[key]) and not (value is None or _is_number(value)):
            raise ConfigError(f"{key} of verl must be a number; got {value!r}.")
    name, chosen = f"{ROLLOUT}.name", replacing_engine(verl)
    if unnamed := verl.get(name) is None:  # verl 0.9 has no default
        verl = Verl({**verl.values, name: chosen}, verl.given)
    for key in verl.values:
        if not key.endswith("_target_"):
            _convert(key, verl, before, found)
    if unnamed:
        found.notes[f"{name} is not given"] = (
            f"{chosen} generates, the default of earlier versions of verl"
            if chosen == "vllm"
            else f"{chosen} generates, since vllm does not report the experts that router replay R3 needs"
        )
    return found


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _convert(key: str, verl: Verl, before: Mapping[str, Value], found: Imported) -> None:
    value, entry = verl.values[key], find(key)
    changed = key not in before or value != before[key]
    shown = _shown(key, verl)
    if entry is None:
        if changed and value is not None:
            found.lost[shown] = (
                f"there is no such key in verl {defaults_file()['version']}.{nearest_key(key, list(before))}"
            )
        return
    if (value is None and not entry.null) or value == "???":
        return
    try:
        answer: Answer = entry.answer(value, verl)
    except (TypeError, ValueError, OverflowError) as error:  # as of a list where verl has a name
        raise ConfigError(f"{key} of verl can't be {value!r}: {error}. Its default is {before.get(key)!r}.") from error
    if isinstance(answer, Lost) and key.startswith("critic.") and not verl.has_critic:
        answer = Note("there is no critic with this estimator")
    match answer:
        case Lost(why):
            if changed:
                found.lost[shown] = why
            else:
                found.kept_defaults += 1
        case Note(why, settings, always):
            if always or (changed and key in verl.given):
                ours = ", ".join(f"{name}={value}" for name, value in (settings or {}).items())
                found.notes[ours if always and ours else shown] = why
            elif not settings:
                found.kept_defaults += 1
            _merge(key, changed, settings or {}, verl, found)
        case settings:
            _merge(key, changed, settings, verl, found)


def _shown(key: str, verl: Verl) -> str:
    return f"{key}={json.dumps(verl.values[key], default=str)}"


def _merge(key: str, changed: bool, settings: Mapping[str, Value], verl: Verl, found: Imported) -> None:
    """Add settings; values of the file replace defaults, and the first of two wins."""
    for name, ours in settings.items():
        if key in verl.given and name in found.given and found.settings[name] != ours:
            found.lost[_shown(key, verl)] = (
                f"{name} is {found.settings[name]!r} already, by another key of verl that means the same"
            )
        elif key in verl.given or name not in found.given:
            found.settings[name] = ours
        if key in verl.given:
            found.given.add(name)
            found.changed |= {name} if changed else set()


def report(imported: Imported, idle: Mapping[str, str]) -> str:
    """The values without counterpart, as YAML comments.

    Args:
        imported: the converted configuration.
        idle: our settings that nothing would read -> what they need.
    """
    lines = [
        f"# note: {key} is left out: nothing reads it without {idle[key]}"
        for key in sorted(idle.keys() & imported.changed)
    ]
    if imported.kept_defaults:
        lines.append(f"# note: without a counterpart here, at verl's default: {counted(imported.kept_defaults, 'key')}")
    return _comments("lost", imported.lost) + _comments("note", imported.notes) + "".join(line + "\n" for line in lines)


def _comments(kind: str, reasons: Mapping[str, str]) -> str:
    return "".join(f"# {kind}: {key}: {why}\n" for key, why in sorted(reasons.items()))
