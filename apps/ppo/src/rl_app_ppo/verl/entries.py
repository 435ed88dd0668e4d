"""What an entry of the table says about a key of verl, and what a conversion may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Verl:
    """A whole configuration of verl, dotted key -> value: what the file gives, over verl's defaults."""

    values: Mapping[str, Value]
    given: frozenset[str] = frozenset()
    """Keys that the file gives."""

    def get(self, key: str, default: Value = None) -> Value:
        """The value of a key; `default` where it is null, `???` or absent."""
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
    """The value changes what is learnt there, and has no counterpart here."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """The value has no effect here that concerns what is learnt; `settings` are set nevertheless."""

    why: str
    settings: Mapping[str, Value] | None = None
    always: bool = False
    """Reported also where the file does not give the key."""


Answer: TypeAlias = Mapping[str, Value] | Lost | Note
Turn: TypeAlias = Callable[[Value, Verl], Answer]
"""(value of one of verl's keys, the whole configuration) -> settings of ours, or why there are none."""
Switch: TypeAlias = Callable[[Verl], bool]


@dataclass(frozen=True, slots=True)
class Entry:
    """How some keys of verl are converted.

    Attributes:
        keys: exact, or groups that end in `.*`.
        to: our keys; empty for keys that are not mapped.
        turn: the conversion, for keys that are mapped.
        why: for others, the reason.
        loses: for others, whether a value other than verl's default changes what is learnt.
        needs: key of verl that is false while verl reads none of these keys; empty: always read.
        null: whether null is converted as well; it means "not set" with other keys.
    """

    keys: tuple[str, ...]
    to: tuple[str, ...] = ()
    turn: Turn | None = None
    why: str = ""
    loses: bool = False
    needs: str = ""
    null: bool = False

    def answer(self, value: Value, verl: Verl) -> Answer:
        """How a value that is not null is converted."""
        if self.needs and not verl.get(self.needs, default=False):
            return Note(f"verl does not read it without {self.needs}=true")
        if self.turn is not None:
            return self.turn(value, verl)
        return Lost(self.why) if self.loses else Note(self.why)


def same(verl: str, ours: str) -> Entry:
    """The value means the same here."""
    return Entry((verl,), (ours,), lambda value, _: {ours: value})


def turned(verl: str, ours: str, turn: Turn, *, needs: str = "", null: bool = False) -> Entry:
    """The value is converted; `ours` are our keys, separated by spaces."""
    return Entry((verl,), tuple(ours.split()), turn, needs=needs, null=null)


def only(verl: str, *allowed: Value, why: str) -> Entry:
    """These values mean what is done here anyway; others are not supported."""
    return Entry((verl,), turn=lambda value, _: {} if value in allowed else Lost(why), why=why)


def checked(verl: str, turn: Turn, why: str) -> Entry:
    """Some values mean what is done here anyway; the conversion says which."""
    return Entry((verl,), turn=turn, why=why)


def no_effect(why: str, *keys: str, prefix: str = "") -> Entry:
    """The keys have no counterpart, and do not change what is learnt; `keys` are words, without `prefix`."""
    return Entry(_prefixed(prefix, keys), why=why)


def unsupported(why: str, *keys: str, prefix: str = "", needs: str = "") -> Entry:
    """The keys have no counterpart, and change what is learnt."""
    return Entry(_prefixed(prefix, keys), why=why, loses=True, needs=needs)


def _prefixed(prefix: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for words in keys for name in words.split())
