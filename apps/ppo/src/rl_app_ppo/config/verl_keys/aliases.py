"""verl's spellings of options that a run accepts beside ours.

These are the keys of `lora.*`, for which verl has two schemas, and BYPASS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.options import items, require

BYPASS, OLD_LOG_PROB = "algorithm.rollout_correction.bypass_mode", "algorithm.old_log_prob"
SPELLINGS: Mapping[str, str] = {
    spelling: option.key
    for option in list_options(AppConfig)
    if option.key.startswith("lora.")
    for verl in option.verl
    for spelling in (verl, verl.removeprefix("actor_rollout_ref."))
} | {BYPASS: OLD_LOG_PROB}
"""verl's key -> our key."""
_SPELLED = frozenset(SPELLINGS.values())


def old_log_prob(bypass: object) -> str:
    """Our value of verl's BYPASS.

    Raises:
        ConfigError: it is neither true nor false.
    """
    require(isinstance(bypass, bool), BYPASS, "true or false", bypass)
    return "rollout" if bypass else "recompute"


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
            value = old_log_prob(value) if key == BYPASS else value
            if name in _SPELLED:
                other, before = seen.get(name, (key, value))
                if other != key and items(before) != items(value):
                    raise ConfigError(
                        f"{other}={before} and {key}={value} are the same setting with different values; set {name} alone."
                    )
                seen[name] = key, value
            ours[name] = value
        out.append((origin, ours))
    return out
