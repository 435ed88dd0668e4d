"""`--explain` and `--diff`: meaning and origin of a key, and differences of two configurations."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import cast

from rl_app_ppo.cli.option_names import help_of
from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.loading import Resolved, options, resolve, unknown_key
from rl_app_ppo.config.placement import described_groups
from rl_app_ppo.config.plain_yaml import flatten, read_yaml
from rl_app_ppo.config.verl_keys.aliases import OLD_LOG_PROB, SPELLINGS
from rl_app_ppo.outputs.run_folder import files_of
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import Option
from rl_trainer.algorithms.old_log_prob import recompute_reason


def explain(key: str, resolved: Resolved) -> str:
    """Meaning, type, default and origin of a key, or of every key of a group.

    Raises:
        ConfigError: no such key; names the most similar one.
    """
    layers = f"layers, weakest first: {', '.join(resolved.layers)}\n"
    return "\n".join([*(_explained(option, resolved) for option in _options(key)), layers])


def keys_text() -> str:
    """A line for every key: its type, default and meaning."""
    listed = list(options())
    width = max(len(option.key) for option in listed)
    return "".join(f"  {o.key:<{width}}  {o.type:<5}  {_default(o):<9}  {help_of(o)}\n" for o in listed)


def _default(option: Option) -> str:
    if isinstance(option.default, tuple):
        return ",".join(map(str, cast(tuple[object, ...], option.default)))
    return str(option.default)


def described(key: str, resolved: Resolved) -> list[dict[str, object]]:
    """As `explain`, for programs.

    Raises:
        ConfigError: no such key; names the most similar one.
    """
    return [
        {
            "key": option.key,
            "value": resolved.settings[option.key].value,
            "origin": resolved.settings[option.key].origin,
            "help": help_of(option),
            "type": option.type,
            "default": option.default,
        }
        for option in _options(key)
    ]


def _options(key: str) -> list[Option]:
    """The option of a key, or those of a group; all if it is empty."""
    name = SPELLINGS.get(key, key)
    found = [option for option in options() if not key or option.key == name or option.key.startswith(name + ".")]
    if not found:
        raise unknown_key(key, [option.key for option in options()])
    return found


def _explained(option: Option, resolved: Resolved) -> str:
    setting = resolved.settings[option.key]
    return (
        f"{option.key} = {shown(setting.value)}   ({setting.origin})\n"
        f"    {help_of(option)}\n    {option.type}, default {shown(option.default)}\n{_consequence(option, resolved)}"
    )


def _consequence(option: Option, resolved: Resolved) -> str:
    """A line on what other settings make of this one; empty: nothing."""
    if option.key == "placement":
        return f"    here {described_groups(resolved.config)}\n"
    algorithm = resolved.config.algorithm
    reason = with_full_keys(recompute_reason(algorithm))
    if option.key != OLD_LOG_PROB or algorithm.old_log_prob != "auto" or not reason:
        return ""
    return f"    here recompute in every step, since {reason}\n"


def shown(value: object) -> str:
    """A value as on the command line."""
    return repr(list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value)


def read_side(text: str) -> Resolved:
    """Resolve one side of `--diff`.

    Args:
        text: a YAML file, the folder of a run, or overrides such as "algorithm=ppo rollout.n=4";
            empty: the defaults.

    Raises:
        ConfigError: it can't be resolved.
    """
    if os.path.exists(text):  # noqa: PTH110 - Path.exists raises for overrides that are longer than a name can be
        path = Path(text)
        origin, file = (f"run {text}", files_of(path).config) if path.is_dir() else (text, path)
        return resolve(given=[(origin, flatten(read_yaml(file, "the configuration")))])
    try:
        words = shlex.split(text)
    except ValueError as error:  # a quotation mark without its other half
        raise ConfigError(f"{text} can't be read as settings: {error}.") from error
    if len(words) == 1 and "=" not in words[0]:
        raise ConfigError(f'{text} is no folder of a run, no YAML file, and no setting such as "rollout.n=4".')
    return resolve(words)


def differing(a: Resolved, b: Resolved) -> list[dict[str, object]]:
    """The keys whose values differ, with both values and their origins."""
    return [
        {"key": key, "a": one.value, "origin_a": one.origin, "b": other.value, "origin_b": other.origin}
        for key, one in a.settings.items()
        if one.value != (other := b.settings[key]).value
    ]


def difference(a: Resolved, b: Resolved) -> str:
    """One line per key whose values differ, with both values and their origins."""
    lines = [
        f"{one['key']}: {shown(one['a'])} ({one['origin_a']}) -> {shown(one['b'])} ({one['origin_b']})"
        for one in differing(a, b)
    ]
    return "\n".join(lines) if lines else "no difference"
