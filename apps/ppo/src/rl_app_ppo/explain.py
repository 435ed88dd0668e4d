"""Answers about a configuration: what a key means and who set it, and where two configurations differ."""

from __future__ import annotations

import shlex
from pathlib import Path

from rl_app_ppo.config import Option, Resolved, options, resolve, unknown_key
from rl_app_ppo.spellings import SPELLINGS


def explain(key: str, resolved: Resolved) -> str:
    """Meaning, type, default and origin of a key, or of every key of a group.

    Raises:
        ConfigError: no such key; names the nearest.
    """
    name = SPELLINGS.get(key, key)
    found = [option for option in options() if option.key == name or option.key.startswith(name + ".")]
    if not found:
        raise unknown_key(key, [option.key for option in options()])
    return "\n".join(_explained(option, resolved) for option in found)


def _explained(option: Option, resolved: Resolved) -> str:
    setting = resolved.settings[option.key]
    return (
        f"{option.key} = {setting.value!r}   ({setting.origin})\n"
        f"    {option.help}\n    {option.type}, default {option.default!r}\n"
    )


def read_side(text: str) -> Resolved:
    """One side of a comparison: a YAML file, or overrides in one word such as "algorithm=ppo rollout.n=4" (empty: the defaults).

    Raises:
        ConfigError: it can't be resolved.
    """
    words = shlex.split(text)
    if len(words) == 1 and "=" not in words[0]:
        return resolve([], Path(words[0]))
    return resolve(words)


def difference(a: Resolved, b: Resolved) -> str:
    """One line per key whose values differ: both, and who set them."""
    lines = [
        f"{key}: {one.value!r} ({one.origin}) -> {b.settings[key].value!r} ({b.settings[key].origin})"
        for key, one in a.settings.items()
        if one.value != b.settings[key].value
    ]
    return "\n".join(lines) if lines else "no difference"
