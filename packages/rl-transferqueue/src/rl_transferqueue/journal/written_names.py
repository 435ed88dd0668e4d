"""Which columns and tags a put writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec
import numpy as np

from rl_transferqueue.journal.metadata import StoredPut
from rl_transferqueue.wire.header_cache import HeaderCache, unpack_header

Names: TypeAlias = frozenset[tuple[str, str]]
"""("column" or "tag", its name) of one row."""


class _TagColumn(msgspec.Struct, frozen=True, array_like=True):
    """A `wire.messages.TagColumn` whose values are not decoded."""

    name: str
    values: msgspec.Raw
    rows: bytes = b""


_tags = msgspec.msgpack.Decoder(tuple[_TagColumn, ...])


def written_names(put: StoredPut) -> Names | Mapping[int, Names]:
    """What a put writes: the same for all rows, or by the generation of each row.

    Without a header its columns are its blocks.
    """
    record = put.record
    columns = _columns(record.header) if record.header else frozenset(("column", name) for name in put.places)
    tags = _tags.decode(record.tags) if record.tags else ()
    common = _union(columns, frozenset(("tag", tag.name) for tag in tags if not tag.rows))
    if not any(tag.rows for tag in tags):
        return common
    some: list[set[tuple[str, str]]] = [set() for _ in record.generations]
    for tag in tags:
        for row in np.frombuffer(tag.rows, "<i4").tolist():
            some[row].add(("tag", tag.name))
    return {it: _union(common, frozenset(names)) for it, names in zip(record.generations, some, strict=True)}


def _names_of(header: bytes) -> Names:
    return frozenset(("column", column.name) for column in unpack_header(header).columns)


_columns = HeaderCache[Names](_names_of)


@lru_cache(maxsize=1024)
def _union(a: Names, b: Names) -> Names:
    """One object for equal names, of which there is one for each put."""
    return a | b
