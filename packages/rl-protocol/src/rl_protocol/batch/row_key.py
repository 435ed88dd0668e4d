"""RowKey: names one trajectory of one rollout of one prompt."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from rl_protocol.errors import BatchError

SEPARATOR = "/"
MAX_DIGITS = 18
"""Most digits of a number in the text form; keeps both numbers within int64."""
_NUMBER = f"(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_CANONICAL = re.compile(f"([^{SEPARATOR}]+){SEPARATOR}{_NUMBER}{SEPARATOR}{_NUMBER}")


def key_text(uid: str, session: int, index: int) -> str:
    """The text form of a row key that is known to be valid, without the checks of `RowKey`."""
    return f"{uid}{SEPARATOR}{session}{SEPARATOR}{index}"


class RowKey(msgspec.Struct, frozen=True, order=True):
    """Key of one trajectory row.

    `uid` names the prompt, `session` one of its n rollouts, `index` a trajectory of that rollout.
    The canonical text form is `uid/session/index`; `parse` accepts exactly what `text` writes. Keys
    are ordered by uid (as text), then session and index (as numbers).

    >>> RowKey("p7", 3, 0).text
    'p7/3/0'
    >>> RowKey.parse("p7/3/0") == RowKey("p7", 3, 0)
    True

    Raises:
        BatchError: the uid is empty or contains the separator, a number is negative, or a text is
            not canonical.
    """

    uid: str
    session: int
    index: int = 0

    def __post_init__(self) -> None:
        if not self.uid or SEPARATOR in self.uid:
            raise BatchError(f"A prompt uid must be non-empty and must not contain {SEPARATOR!r}; got {self.uid!r}.")
        if not (0 <= self.session < 10**MAX_DIGITS and 0 <= self.index < 10**MAX_DIGITS):
            raise BatchError(
                f"session and index of row {self.uid!r} must be >= 0 and below 10**{MAX_DIGITS}; "
                f"got session={self.session}, index={self.index}."
            )

    @property
    def text(self) -> str:
        """The canonical text form, used as the key in the data plane."""
        return key_text(self.uid, self.session, self.index)

    @classmethod
    def parse(cls, text: str) -> RowKey:
        """Parse the canonical text form."""
        return _parsed(text)


@lru_cache(maxsize=2**15)
def _parsed(text: str) -> RowKey:
    """Parse with a cache: each stage of a step parses the keys of the same rows."""
    found = _CANONICAL.fullmatch(text)
    if found is None:
        raise BatchError(f"Not a row key: {text!r}; expected 'uid{SEPARATOR}session{SEPARATOR}index' such as 'p7/3/0'.")
    uid, session, index = found.groups()
    return RowKey(uid, int(session), int(index))
