"""Other spellings of the LoRA block. verl has two schemas for it, and what one part of it reads another does not; here they are one setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_protocol import ConfigError

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
"""A key of verl -> ours."""

LISTS = ("trainer.logger", "trainer.hooks", "trainer.profile_steps")
"""Keys that may be given as lists, as verl's are."""


def one_spelling(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The layers, (origin, key -> value) each, with every spelling replaced by ours.

    Raises:
        ConfigError: two spellings of one setting have different values, in whatever layers; names both keys.
    """
    seen: dict[str, tuple[str, Any]] = {}
    out: list[tuple[str, dict[str, Any]]] = []
    for origin, values in layers:
        ours: dict[str, Any] = {}
        for key, given in values.items():
            name = SPELLINGS.get(key, key)
            value = plain(given) if name.startswith("lora.") or name in LISTS else given
            if name.startswith("lora."):
                other, before = seen.get(name, (key, value))
                if other != key and before != value:
                    raise ConfigError(
                        f"{other}={before} and {key}={value} are the same setting with different values; set {name} alone."
                    )
                seen[name] = key, value
            ours[name] = value
        out.append((origin, ours))
    return out


def plain(value: Any) -> Any:
    """Lists of names become comma-separated text, and null the empty text, as our keys have them."""
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)  # pyright: ignore[reportUnknownArgumentType]: YAML
    return "" if value is None else value
