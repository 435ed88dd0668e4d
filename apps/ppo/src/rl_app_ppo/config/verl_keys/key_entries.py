"""The types of the table of verl's keys: entries, conversions and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Verl:
    """A complete verl configuration, dotted key -> value: the file's values over the defaults."""

    values: Mapping[str, Value]
    given: frozenset[str] = frozenset()
    """Keys that the file sets."""

    def get(self, key: str, default: Value = None) -> Value:
        """The value of a key; `default` if it is null, `???` or absent."""
        value = self.values.get(key)
        return default if value is None or value == "???" else value

    @property
    def megatron(self) -> bool:
        """Whether Megatron-Core trains the models."""
        return self.get("actor_rollout_ref.actor.strategy") == "megatron"

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.get("algorithm.adv_estimator") == "gae"


@dataclass(frozen=True, slots=True)
class Lost:
    """Result of a conversion: the value affects training and has no counterpart here."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Result of a conversion: the value doesn't affect training; `settings` are set anyway."""

    why: str
    settings: Mapping[str, Value] | None = None
    always: bool = False
    """Report it even if the file does not set the key."""


Answer: TypeAlias = Mapping[str, Value] | Lost | Note
Convert: TypeAlias = Callable[[Value, Verl], Answer]
"""(value of a verl key, complete configuration) -> our settings, or why there are none."""
Switch: TypeAlias = Callable[[Verl], bool]


@dataclass(frozen=True, slots=True)
class Entry:
    """How some keys of verl are converted.

    Attributes:
        keys: exact, or groups that end in `.*`.
        to: our keys; empty for keys that are not mapped.
        convert: the conversion of mapped keys.
        why: the reason why other keys are not mapped.
        loses: whether a value of an unmapped key other than verl's default affects training.
        needs: key that must be true for verl to read these keys; empty: they are always read.
        null: whether null is converted too; for other keys it means "not set".
    """

    keys: tuple[str, ...]
    to: tuple[str, ...] = ()
    convert: Convert | None = None
    why: str = ""
    loses: bool = False
    needs: str = ""
    null: bool = False

    def answer(self, value: Value, verl: Verl) -> Answer:
        """Convert a value."""
        if self.needs and not verl.get(self.needs, default=False):
            return Note(f"verl does not read it without {self.needs}=true")
        if self.convert is not None:
            return self.convert(value, verl)
        return Lost(self.why) if self.loses else Note(self.why)


def same(verl: str, ours: str) -> Entry:
    """An entry whose value means the same here."""
    return Entry((verl,), (ours,), lambda value, _: {ours: value})


def converted(verl: str, ours: str, convert: Convert, *, needs: str = "", null: bool = False) -> Entry:
    """An entry whose value is converted; `ours` are our keys, separated by spaces."""
    return Entry((verl,), tuple(ours.split()), convert, needs=needs, null=null)


def only(verl: str, *allowed: Value, why: str) -> Entry:
    """An entry of which only these values are supported; they need no setting here."""
    return Entry((verl,), convert=lambda value, _: {} if value in allowed else Lost(why), why=why)


def checked(verl: str, convert: Convert, why: str) -> Entry:
    """An entry whose supported values need no setting; the conversion decides which."""
    return Entry((verl,), convert=convert, why=why)


def no_effect(why: str, *keys: str, prefix: str = "") -> Entry:
    """An entry of keys without counterpart that do not affect training; `keys` have no `prefix`."""
    return Entry(_prefixed(prefix, keys), why=why)


def unsupported(why: str, *keys: str, prefix: str = "", needs: str = "") -> Entry:
    """An entry of keys without counterpart that affect training."""
    return Entry(_prefixed(prefix, keys), why=why, loses=True, needs=needs)


def _prefixed(prefix: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for words in keys for name in words.split())
