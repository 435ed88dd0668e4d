"""Where bytes lie: spans of an arena, and committed blocks."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

ALIGN = 64
_SPARE_SHARE = 64
"""A range reserved ahead of need takes at most this part of a unit's capacity ..."""
_SPARE_BYTES = 16 << 20
"""... and at most this many bytes ..."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


def rounded(nbytes: int) -> int:
    """Bytes that a request of `nbytes` takes: the next multiple of `ALIGN`, at least one."""
    return max(ALIGN, -(-nbytes // ALIGN) * ALIGN)


def most_spare(capacity: int) -> int:
    """Most bytes a client reserves ahead of need from a unit of `capacity` bytes."""
    return min(_SPARE_BYTES, capacity // _SPARE_SHARE // ALIGN * ALIGN)


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of one unit's arena; offset and length are multiples of 64 bytes."""

    unit: Count
    offset: Count
    nbytes: Count


class BlockRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One committed block. Ids are never used twice."""

    id: Count
    span: Span
    slot: Count
    """Index of the block's epoch."""
