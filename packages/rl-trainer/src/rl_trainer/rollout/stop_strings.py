"""Stop strings: which token completes one, and the text before it. Semantics as in vLLM.

A response ends with the token that completes a stop string first. Its tokens are kept as sampled,
that one included, also where it continues after the stop string. Special tokens have no text.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, without special tokens."""

_CONTEXT = 16
"""Tokens of the context that are decoded with a response: some decoders drop a leading space."""
_INCOMPLETE = "\ufffd"


def tokens_until_stop(ids: Sequence[int], decode: Decode, stops: Sequence[str]) -> int | None:
    """Number of tokens up to the one that completes a stop string; None: they complete none.

    Args:
        ids: [R] token ids of a response.
        decode: decodes them.
        stops: the stop strings; none of them is empty.
    """

    def completed(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stops or not completed(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=lambda last: completed(last + 1)) + 1


def text_until_stop(text: str, stops: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    """Cut a text at the stop string that is completed first.

    Args:
        text: text of a response.
        stops: the stop strings; of two that are completed at the same place the first one counts.
        include: whether the stop string is kept.

    Returns:
        The text, and the stop string; without one the whole text and None.
    """
    ends = [(text.index(stop) + len(stop), place) for place, stop in enumerate(stops) if stop in text]
    if not ends:
        return text, None
    end, place = min(ends)
    return text[: end if include else end - len(stops[place])], stops[place]


class StopSearch:
    """Searches a response for stop strings while it is generated, token by token.

    >>> search = StopSearch(("d!",), lambda ids: "".join(map(chr, ids)))
    >>> [search.completed_by(ord(letter)) for letter in "end!"]
    [False, False, False, True]

    Args:
        stops: the stop strings, at least one; none of them is empty.
        decode: decodes the tokens.
        context: [C] token ids before the response.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, context: Sequence[int] = ()) -> None:
        self._stops, self._decode = tuple(stops), decode
        self._longest = max(map(len, stops))
        self._ids = list(context[-_CONTEXT:])
        self._read = len(self._ids)
        """Number of `_ids` whose text was read."""
        self._seen = decode(self._ids) if self._ids else ""
        self._tail = ""
        """The end of the text, one letter shorter than the longest stop string."""

    def completed_by(self, token: int) -> bool:
        """Add the next token; returns whether it completes a stop string."""
        text = self._tail + self._text_of(token)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return any(stop in text for stop in self._stops)

    def _text_of(self, token: int) -> str:
        """Text that this token adds; empty while a character is incomplete.

        A window of tokens is decoded, as by `tokenizers.decoders.DecodeStream`, which raises where
        a token changes the text before it.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._seen) or text.endswith(_INCOMPLETE):
            return ""
        new = text[len(self._seen) :]
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        self._seen = self._decode(self._ids)
        return new
