"""RowKey: which trajectory of which rollout of which prompt."""

from __future__ import annotations

import functools

from rl_protocol.errors import BatchError

SEPARATOR = "/"


@functools.total_ordering
class RowKey:
    """Name of one trajectory row: prompt `uid`, `session` (which of its n rollouts), `index` (which trajectory of that rollout).

    The text form is `uid/session/index`, the only one there is; `parse` accepts exactly what `text` writes. Order is by uid
    (as text), then session and index (as numbers).

    >>> RowKey("p7", 3, 0).text
    'p7/3/0'
    >>> RowKey.parse("p7/3/0") == RowKey("p7", 3, 0)
    True

    Raises:
        BatchError: empty uid, uid that holds the separator, negative numbers, or a text that is not canonical.
    """

    __slots__ = ("index", "session", "uid")

    def __init__(self, uid: str, session: int, index: int = 0) -> None:
        if not uid or SEPARATOR in uid:
            raise BatchError(f"A prompt uid must be non-empty and must not contain {SEPARATOR!r}; got {uid!r}.")
        if session < 0 or index < 0:
            raise BatchError(f"session and index of row {uid!r} must be >= 0; got session={session}, index={index}.")
        self.uid = uid
        self.session = session
        self.index = index

    @property
    def text(self) -> str:
        """Canonical text form, used as the key in the data plane."""
        return f"{self.uid}{SEPARATOR}{self.session}{SEPARATOR}{self.index}"

    @classmethod
    def parse(cls, text: str) -> RowKey:
        """Read the canonical text form back."""
        uid, *numbers = text.split(SEPARATOR)
        if len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers):
            key = cls(uid, int(numbers[0]), int(numbers[1]))
            if key.text == text:
                return key
        raise BatchError(f"Not a row key: {text!r}; expected 'uid{SEPARATOR}session{SEPARATOR}index' such as 'p7/3/0'.")

    def _order(self) -> tuple[str, int, int]:
        return (self.uid, self.session, self.index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowKey) and self._order() == other._order()

    def __lt__(self, other: RowKey) -> bool:
        return self._order() < other._order()

    def __hash__(self) -> int:
        return hash(self._order())

    def __repr__(self) -> str:
        return f"RowKey({self.uid!r}, {self.session}, {self.index})"
