"""What every class of settings is made of: fields that carry their help text, and checks that name the key."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rl_protocol import ConfigError


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and its help text."""
    return field(default=default, metadata={"help": text})


def group(kind: type[Any], text: str) -> Any:
    """A dataclass field that is a group of settings."""
    return field(default_factory=kind, metadata={"help": text})


def require(ok: bool, key: str, rule: str, got: object) -> None:
    """Raise ConfigError for `key` unless `ok`; `rule` completes the sentence "<key> must be ..."."""
    if not ok:
        raise ConfigError(f"{key} must be {rule}; got {got!r}.")
