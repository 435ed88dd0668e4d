"""Other spellings of `lora.*`: verl has two schemas for LoRA, read by different parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_protocol import ConfigError
from rl_protocol.support.options import items

_FLAT = {
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.target_modules",
    "exclude_modules": "lora.exclude",
    "lora.rank": "lora.rank",
    "lora.alpha": "lora.alpha",
    "lora.dropout": "lora.dropout",
    "lora.merge": "lora.merge",
    "lora.target_modules": "lora.target_modules",
    "lora.exclude_modules": "lora.exclude",
}
SPELLINGS: Mapping[str, str] = {
    f"{prefix}model.{name}": key for prefix in ("", "actor_rollout_ref.") for name, key in _FLAT.items()
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
