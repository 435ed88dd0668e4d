"""What is checked before a put changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_protocol.errors import UNREADABLE, BatchError, ConflictError, DuplicateKeyError, WireError
from rl_protocol.wire import Header
from rl_transferqueue.controller.rows.partition_rows import PartitionTable
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import TagColumn
from rl_transferqueue.wire.spans import Span


def check_unique(keys: tuple[str, ...]) -> None:
    """Raise DuplicateKeyError if a key occurs twice."""
    if len(keys) > 1 and len(set(keys)) != len(keys):
        raise DuplicateKeyError("A key occurs more than once in one call; keys must be unique.")


def check_commit(
    keys: tuple[str, ...],
    tags: Sequence[TagColumn],
    block: Span | None,
    header: bytes,
    expect: Sequence[object] | None,
) -> Header | None:
    """The block's header, once it and the arguments of a put fit together; None: there is no block.

    Raises:
        DuplicateKeyError, BatchError, WireError: they do not.
    """
    check_unique(keys)
    for tag in tags:
        if not (_rows_fit(tag, len(keys)) if tag.rows else len(tag.values) == len(keys)):
            raise BatchError(f"Tag {tag.name!r} needs one value per row: {len(keys)} keys, {len(tag.values)} values.")
    if expect is not None and len(expect) != len(keys):
        raise BatchError(f"A put needs one expectation per key: {len(keys)} keys, {len(expect)} expectations.")
    if block is None:
        return None
    try:
        spec = unpack_header(header)
    except UNREADABLE as error:
        raise WireError(f"The header of a block can't be read: {error}.") from error
    names = [column.name for column in spec.columns]
    if spec.rows != len(keys) or spec.payload > block.nbytes or len(set(names)) != len(names) or not names or not keys:
        raise WireError(
            f"Header of {spec.rows} rows, {len(names)} columns, {spec.payload} bytes does not fit {len(keys)} keys and a block of "
            f"{block.nbytes} bytes."
        )
    return spec


def check_expected(
    table: PartitionTable, partition: str, keys: tuple[str, ...], expect: Sequence[Mapping[str, Scalar] | None]
) -> None:
    """Raise ConflictError unless each row is absent (None) or has the expected tags."""
    for key, wanted in zip(keys, expect, strict=True):
        found, _ = table.find((key,))
        has = table.tags.of_row(int(found[0])) if found.size else None
        fits = has is None if wanted is None else has is not None and _has(has, wanted)
        if not fits:
            wish = "be absent" if wanted is None else f"have the tags {dict(wanted)}"
            is_ = "it is not there" if has is None else f"it has {has}"
            raise ConflictError(f"Row {key!r} of partition {partition!r} was expected to {wish}; {is_}.", key=key)


def _has(tags: Mapping[str, Scalar], wanted: Mapping[str, Scalar]) -> bool:
    return all(name in tags and tags[name] == value for name, value in wanted.items())


def _rows_fit(tag: TagColumn, size: int) -> bool:
    if len(tag.rows) != 4 * len(tag.values):
        return False
    rows = np.frombuffer(tag.rows, "<i4")
    return bool((rows >= 0).all() and (rows < size).all())
