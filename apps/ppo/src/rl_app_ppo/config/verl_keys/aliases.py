"""Other spellings of `lora.*`: verl has two schemas for LoRA, read by different parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.options import items

SPELLINGS: Mapping[str, str] = {
    spelling: option.key
    for option in list_options(AppConfig)
    if option.key.startswith("lora.")
    for verl in option.verl
    for spelling in (verl, verl.removeprefix("actor_rollout_ref."))
}
"""verl's key -> our key."""


def one_spelling(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Replace every spelling by ours in all layers, (origin, key -> value) each.

    Raises:
        ConfigError: two spellings of one setting have different values; names both keys.
    """
    seen: dict[str, tuple[str, Any]] = {}
    out: list[tuple[str, dict[str, Any]]] = []
    for origin, values in layers:
        ours: dict[str, Any] = {}
        for key, given in values.items():
            name = SPELLINGS.get(key, key)
            value = "" if given is None and name.startswith("lora.") else given  # null in verl
            if name.startswith("lora."):
                other, before = seen.get(name, (key, value))
                if other != key and items(before) != items(value):
                    raise ConfigError(
                        f"{other}={before} and {key}={value} are the same setting with different values; set {name} alone."
                    )
                seen[name] = key, value
            ours[name] = value
        out.append((origin, ours))
    return out
